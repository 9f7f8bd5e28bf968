"""The native contract: all kernels move the same bytes, every argument is checked, nothing hangs at fork or exit."""

from __future__ import annotations

import ast
import ctypes
import functools
import itertools
import mmap
import os
import random
import re
import shutil
import stat
import struct
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import until

import ckpt_engine
from ckpt_engine import _C

KERNELS = _C.cpu_kernels()
PAGE, BLOCK, PIECE = 4096, 4 * 4096, 2 << 20
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 255, 1000, PAGE - 1, PAGE, PAGE + 1]
SIZES += [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, BLOCK + 64, BLOCK + 65, 2 * BLOCK + 64, 50_001, 65_536, 70_000]
FILE_SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, (20 << 20) + 1]
FILLER = 0xA5

SOURCE = random.Random(0).randbytes(8 << 20)


def table(*rows: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("=3Q", *row) for row in rows)


def uint32s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def run_python(script: str, *args: object, env: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints; it must end by itself, quietly and well."""
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.fixture(params=["disk", "shm"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with O_DIRECT (most likely), and one on tmpfs, which may refuse it."""
    if request.param == "disk":
        yield tmp_path
        return
    path = Path("/dev/shm") / f"test-csrc-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def pages() -> Iterator[mmap.mmap]:
    """SOURCE several times over, page-aligned like a slot."""
    memory = mmap.mmap(-1, 24 << 20)
    memory.write(SOURCE * 3)
    yield memory
    memory.close()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> list[str]:
    """The command that runs another one, given a directory with 1 MiB of space as its last argument."""
    inside = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@" "$0"'
    command = ["unshare", "-m", "sh", "-c", inside, str(tmp_path)]
    if (
        os.geteuid() != 0
        or shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False).returncode
    ):
        pytest.skip("mounting a file system needs root and mount namespaces")
    return command


# ---- the contract ----


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(ckpt_engine.__file__).parent / "_C.pyi").read_text())
    promised = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert promised == {name for name in dir(_C) if not name.startswith("_")}


def test_there_is_always_a_portable_kernel_and_it_is_the_last_choice() -> None:
    assert KERNELS[-1] == "portable"
    assert len(set(KERNELS)) == len(KERNELS)


# ---- copy ----


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("source_shift", [0, 1, 4, 63])
@pytest.mark.parametrize("target_shift", [0, 1, 8, 63])
def test_every_size_and_alignment_arrives_whole_and_alone(kernel: str, source_shift: int, target_shift: int) -> None:
    address = _C.address_of(SOURCE) + source_shift
    target = bytearray([FILLER]) * (sum(SIZES) + 128 * len(SIZES) + PAGE)
    expected = bytearray(target)
    rows, offset = [], target_shift
    for size in SIZES:
        rows.append((address + size, offset, size))
        expected[offset : offset + size] = SOURCE[source_shift + size : source_shift + size + size]
        offset += (size + 127) // 64 * 64  # at least one byte of filler behind each
    crcs = _C.copy(target, table(*rows), kernel=kernel)
    assert target == expected
    wanted = [zlib.crc32(SOURCE[source_shift + size : source_shift + size + size]) for size in SIZES]
    assert crcs == uint32s(*wanted)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ranges_of_all_lengths_up_to_two_blocks_are_equal_to_their_source(kernel: str) -> None:
    lengths = random.Random(1).sample(range(2 * BLOCK), 400)
    for length in lengths:
        target = bytearray(length + 100)
        crc = _C.copy(target, table((_C.address_of(SOURCE) + length, length % 100, length)), kernel=kernel)
        assert target[length % 100 :][:length] == SOURCE[length : 2 * length]
        assert crc == uint32s(zlib.crc32(SOURCE[length : 2 * length]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_large_range_is_dealt_out_and_its_crc_joined(kernel: str, threads: int) -> None:
    size = 5 * (1 << 20) + 12_345
    sizes = [100, size, 0, 2 * PIECE, 70_000]
    rows, offset = [], 3
    for at, length in enumerate(sizes):
        rows.append((_C.address_of(SOURCE) + at, offset, length))
        offset += length
    target = bytearray(offset + 1)
    crcs = _C.copy(target, table(*rows), threads=threads, kernel=kernel)
    whole = b"".join(SOURCE[at : at + length] for at, length in enumerate(sizes))
    assert target == bytes(3) + whole + b"\0"
    assert crcs == uint32s(*(zlib.crc32(SOURCE[at : at + length]) for at, length in enumerate(sizes)))


@pytest.mark.parametrize("threads", [1, 64])
def test_thousands_of_small_ranges_keep_their_order(threads: int) -> None:
    rows = [(_C.address_of(SOURCE) + i, 120 * i, 100 + i % 20) for i in range(5000)]
    target = bytearray(120 * 5000)
    crcs = _C.copy(target, table(*rows), threads=threads)
    assert crcs == uint32s(*(zlib.crc32(SOURCE[i : i + 100 + i % 20]) for i in range(5000)))
    assert all(target[120 * i :][: 100 + i % 20] == SOURCE[i : i + 100 + i % 20] for i in range(5000))


@pytest.mark.parametrize("kernel", ["", *KERNELS])
def test_without_crc_the_bytes_are_the_same_and_nothing_is_returned(kernel: str) -> None:
    target = bytearray(300_007)
    assert _C.copy(target, table((_C.address_of(SOURCE) + 5, 7, 300_000)), kernel=kernel, crc=False) == b""
    assert target[7:] == SOURCE[5:300_005]


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_fresh_memory_is_touched_by_the_copy_and_only_where_it_goes(flags: int) -> None:
    source = _C.address_of(SOURCE)
    rows = [(source + 3, 5, 1), (source, 4096, 5_000_000), (source + 9, 6 << 20, 4095), (0, 7 << 20, 0)]
    with mmap.mmap(-1, 8 << 20, flags=flags | mmap.MAP_ANONYMOUS) as memory:
        crcs = _C.copy(memory, table(*rows), threads=2, fresh=True)
        want = bytearray(8 << 20)
        for address, offset, nbytes in rows:
            want[offset : offset + nbytes] = SOURCE[address - source :][:nbytes] if nbytes else b""
        assert memory[:] == want
        assert crcs == uint32s(*(zlib.crc32(want[offset : offset + nbytes]) for _, offset, nbytes in rows))


def test_memory_that_cannot_be_touched_first_is_copied_to_all_the_same(pages: mmap.mmap) -> None:
    target = bytearray(1 << 20)  # other things lie in its first and last page
    crc = _C.copy(target, table((_C.address_of(pages), 0, 1 << 20)), fresh=True)
    assert target == pages[: 1 << 20] and crc == uint32s(zlib.crc32(target))


def test_no_rows_and_empty_rows_copy_nothing() -> None:
    target = bytearray(b"before")
    assert _C.copy(target, b"") == b""
    assert _C.copy(target, table((0, 6, 0), (2**64 - 1, 0, 0))) == uint32s(0, 0)
    assert _C.copy(bytearray(), table((0, 0, 0))) == uint32s(0)
    assert target == b"before"


HOSTILE_COPIES: dict[str, tuple[type[Exception], Callable[[bytearray], object]]] = {
    "a row that ends behind dst": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + source_row(61, 4))),
    "a row that begins behind dst": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + source_row(65, 0))),
    "an end that wraps": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + source_row(8, 2**64 - 4))),
    "an offset that wraps": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + source_row(2**64 - 1, 2))),
    "a null source": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + table((0, 0, 1)))),
    "a source that wraps": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + table((2**64 - 4, 0, 8)))),
    "half a row": (ValueError, lambda dst: _C.copy(dst, good_rows(dst) + bytes(23))),
    "no thread": (ValueError, lambda dst: _C.copy(dst, good_rows(dst), threads=0)),
    "minus one thread": (ValueError, lambda dst: _C.copy(dst, good_rows(dst), threads=-1)),
    "too many threads": (ValueError, lambda dst: _C.copy(dst, good_rows(dst), threads=65)),
    "threads beyond 64 bits": (OverflowError, lambda dst: _C.copy(dst, good_rows(dst), threads=2**64)),
    "half a thread": (TypeError, lambda dst: _C.copy(dst, good_rows(dst), threads=1.5)),  # type: ignore[arg-type]
    "an unknown kernel": (ValueError, lambda dst: _C.copy(dst, good_rows(dst), kernel="abacus")),
    "threads by position": (TypeError, lambda dst: _C.copy(dst, good_rows(dst), 2)),  # type: ignore[call-arg]
    "a read-only dst": (BufferError, lambda dst: _C.copy(bytes(dst), good_rows(dst))),
    "a dst with gaps": (BufferError, lambda dst: _C.copy(memoryview(dst)[::2], good_rows(dst))),
    "no buffer at all": (TypeError, lambda dst: _C.copy(dst, None)),  # type: ignore[arg-type]
}


def good_rows(dst: bytearray) -> bytes:
    return source_row(0, len(dst))


def source_row(offset: int, nbytes: int) -> bytes:
    return table((_C.address_of(SOURCE), offset, nbytes))


@pytest.mark.parametrize("case", HOSTILE_COPIES)
def test_a_hostile_copy_is_refused_before_a_byte_moves(case: str) -> None:
    error, call = HOSTILE_COPIES[case]
    target = bytearray(64)
    with pytest.raises(error):
        call(target)
    assert target == bytes(64)
    target.append(0)  # no export is left behind, so it may be resized


# ---- crc32, combine, scatter, address_of ----


def test_crc32_is_that_of_zlib() -> None:
    for size in [*SIZES, PIECE - 1, PIECE + 1, 5_000_000]:
        assert _C.crc32(SOURCE, offset=1, nbytes=size) == zlib.crc32(SOURCE[1 : 1 + size])
    for threads in (2, 4, 64):
        assert _C.crc32(SOURCE, threads=threads) == zlib.crc32(SOURCE)


def test_crc32_goes_on_where_another_ended() -> None:
    first = zlib.crc32(SOURCE[:1000])
    assert _C.crc32(SOURCE, first, offset=1000) == zlib.crc32(SOURCE)
    assert _C.crc32(SOURCE, first, offset=1000, nbytes=0) == first
    assert _C.crc32(b"", 0xFFFFFFFF) == 0xFFFFFFFF


def test_combining_pieces_gives_the_crc_of_the_whole() -> None:
    cuts = [0, 0, 1, 64, 64, 70_000, 5_000_000, len(SOURCE), len(SOURCE)]
    pieces = [SOURCE[a:b] for a, b in itertools.pairwise(cuts)]
    crcs, lengths = uint32s(*map(zlib.crc32, pieces)), uint64s(*map(len, pieces))
    assert _C.crc32_combine(crcs, lengths) == zlib.crc32(SOURCE)
    assert _C.crc32_combine(b"", b"") == 0


def test_combining_keeps_apart_what_it_remembers_of_many_lengths() -> None:
    lengths = [7 * number % 509 for number in range(4000)] + [0] * 5 + [64, 1 << 20] * 50
    pieces = [SOURCE[at : at + nbytes] for at, nbytes in enumerate(lengths)]
    found = _C.crc32_combine(uint32s(*map(zlib.crc32, pieces)), uint64s(*map(len, pieces)))
    assert found == zlib.crc32(b"".join(pieces))


def test_combining_knows_lengths_beyond_32_bits() -> None:
    zeros, length = zlib.crc32(b"\0"), 1
    while length < 1 << 40:
        zeros, length = _C.crc32_combine(uint32s(zeros, zeros), uint64s(length, length)), 2 * length
        if length <= 1 << 20:
            assert zeros == zlib.crc32(bytes(length))
    one = zlib.crc32(b"x")
    step_by_step = _C.crc32_combine(uint32s(one, zeros, zeros), uint64s(1, length, length))
    twice = _C.crc32_combine(uint32s(zeros, zeros), uint64s(length, length))
    assert step_by_step == _C.crc32_combine(uint32s(one, twice), uint64s(1, 2 * length))


def test_scatter_writes_little_endian_words_at_any_byte() -> None:
    target = bytearray(20)
    _C.scatter_u32(target, uint64s(0, 5, 16), uint32s(1, 0xDEADBEEF, 0xFFFFFFFF))
    assert target == uint32s(1) + b"\0" + uint32s(0xDEADBEEF) + bytes(7) + uint32s(0xFFFFFFFF)


@pytest.mark.parametrize(
    ("positions", "values"),
    [
        (uint64s(0, 17), uint32s(1, 2)),
        (uint64s(0, 2**64 - 1), uint32s(1, 2)),
        (uint64s(0), uint32s(1, 2)),
        (uint64s(0) + b"\0", uint32s(1)),
        (uint64s(0), uint32s(1) + b"\0"),
    ],
)
def test_a_scatter_that_does_not_fit_writes_nothing(positions: bytes, values: bytes) -> None:
    target = bytearray(20)
    with pytest.raises(ValueError, match=r"buffer|differ|whole items"):
        _C.scatter_u32(target, positions, values)
    assert target == bytes(20)


def test_address_of_is_where_the_bytes_are() -> None:
    data = bytearray(b"0123456789")
    assert ctypes.string_at(_C.address_of(data), 10) == data
    assert _C.address_of(memoryview(data)[3:]) == _C.address_of(data) + 3
    assert ctypes.string_at(_C.address_of(b"read-only"), 9) == b"read-only"


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda: _C.crc32(b"abc", offset=4)),
        (ValueError, lambda: _C.crc32(b"abc", offset=-1)),
        (ValueError, lambda: _C.crc32(b"abc", offset=2, nbytes=2)),
        (ValueError, lambda: _C.crc32(b"abc", nbytes=-2)),
        (ValueError, lambda: _C.crc32(b"abc", -1)),
        (ValueError, lambda: _C.crc32(b"abc", 1 << 32)),
        (ValueError, lambda: _C.crc32(b"abc", threads=0)),
        (OverflowError, lambda: _C.crc32(b"abc", offset=1 << 64)),
        (OverflowError, lambda: _C.crc32(b"abc", nbytes=-(1 << 64))),
        (TypeError, lambda: _C.crc32("abc")),  # type: ignore[arg-type]
        (TypeError, lambda: _C.crc32(b"abc", offset="0")),  # type: ignore[arg-type]
        (ValueError, lambda: _C.crc32_combine(uint32s(1, 2), uint64s(1))),
        (ValueError, lambda: _C.crc32_combine(b"123", uint64s(1))),
        (BufferError, lambda: _C.scatter_u32(b"1234", uint64s(0), uint32s(1))),
        (TypeError, lambda: _C.address_of(7)),  # type: ignore[arg-type]
    ],
)
def test_hostile_numbers_and_buffers_are_refused(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


# ---- hole_marker ----


class Bare:
    """Attributes make it more than that."""


class Below(Bare):
    """Not the same class."""


def test_a_marker_takes_bare_objects_asks_for_some_and_leaves_the_rest() -> None:
    order: list[object] = []
    asked: list[object] = []
    mark = 1 << 100

    def ask(obj: object) -> int:
        asked.append(obj)
        return 7

    marker = _C.hole_marker((Bare,), (list, Below), order, mark, ask)
    bare, more, below = Bare(), Bare(), Below()
    more.name = "x"  # type: ignore[attr-defined]
    assert [marker(one) for one in (bare, more, [1], below, "text", None)] == [mark, None, 7, 7, None, None]
    assert order == [bare] and asked == [[1], below]


def test_a_marker_passes_on_what_is_raised_and_keeps_nothing_of_what_it_saw() -> None:
    order: list[object] = []
    marker = _C.hole_marker((Bare, int), (list,), order, 1, lambda obj: obj[0])
    with pytest.raises(IndexError):
        marker([])
    with pytest.raises(AttributeError):  # it has no dict
        marker(5)
    one = Bare()
    seen = weakref.ref(one)
    marker(one)
    order.clear()
    del one
    assert seen() is None
    with pytest.raises(TypeError):
        _C.hole_marker([Bare], (), order, 1, print)  # type: ignore[arg-type]


def test_a_marker_and_what_it_holds_go_when_nobody_needs_them() -> None:
    order: list[object] = [Bare()]
    seen = weakref.ref(order[0])
    marker = _C.hole_marker((Bare,), (), order, 1, print)
    del order
    assert seen() is not None
    del marker
    assert seen() is None


# ---- atomics ----


def test_words_hold_64_bits_and_exchange_only_what_was_expected() -> None:
    words = bytearray(24)
    _C.store(words, 8, 2**64 - 1)
    _C.fence()
    assert (_C.load(words, 0), _C.load(words, 8), _C.load(words, 16)) == (0, 2**64 - 1, 0)
    assert not _C.compare_exchange(words, 8, 1, 2)
    assert _C.load(words, 8) == 2**64 - 1
    assert _C.compare_exchange(words, 8, 2**64 - 1, 2)
    assert _C.load(bytes(words), 8) == 2
    assert words == uint64s(0, 2, 0)


COUNT_BY_EXCHANGE = """
import mmap, sys
from ckpt_engine import _C
shared = open(sys.argv[1], "r+b")
word = mmap.mmap(shared.fileno(), 4096)
for _ in range(20_000):
    while not _C.compare_exchange(word, 64, seen := _C.load(word, 64), seen + 1):
        pass
"""


def test_two_processes_that_count_by_exchange_lose_no_count(tmp_path: Path) -> None:
    shared = tmp_path / "word"
    shared.write_bytes(bytes(4096))
    command = [sys.executable, "-c", COUNT_BY_EXCHANGE, str(shared)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert _C.load(shared.read_bytes(), 64) == 40_000


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda words: _C.load(words, 4)),
        (ValueError, lambda words: _C.load(words, 16)),
        (ValueError, lambda words: _C.load(words, 2**63 - 8)),
        (ValueError, lambda words: _C.load(words, -8)),
        (ValueError, lambda words: _C.load(memoryview(words)[1:], 0)),
        (OverflowError, lambda words: _C.load(words, 2**64)),
        (OverflowError, lambda words: _C.store(words, 0, 2**64)),
        (OverflowError, lambda words: _C.store(words, 0, -1)),
        (OverflowError, lambda words: _C.compare_exchange(words, 0, 0, 2**64)),
        (OverflowError, lambda words: _C.compare_exchange(words, 0, -1, 0)),
        (TypeError, lambda words: _C.store(words, 0, 1.0)),  # type: ignore[arg-type]
        (BufferError, lambda words: _C.store(bytes(words), 0, 1)),
        (BufferError, lambda words: _C.compare_exchange(bytes(words), 0, 0, 1)),
    ],
)
def test_no_word_outside_or_across_is_touched(error: type[Exception], call: Callable[[bytearray], object]) -> None:
    words = bytearray(16)
    with pytest.raises(error):
        call(words)
    assert words == bytes(16)


# ---- write_file ----


@pytest.mark.parametrize("size", FILE_SIZES)
@pytest.mark.parametrize("direct", [True, False])
def test_a_written_file_holds_exactly_its_bytes(folder: Path, pages: mmap.mmap, size: int, direct: bool) -> None:
    path, progress = folder / "file", bytearray(uint64s(0, 7))
    used = _C.write_file(
        str(path), pages, offset=PAGE, nbytes=size, direct=direct, progress=progress, progress_offset=8
    )
    assert path.read_bytes() == pages[PAGE : PAGE + size]
    assert progress == uint64s(0, 7 + size)
    assert used in ((True, False) if direct else (False,))


@pytest.mark.parametrize("size", FILE_SIZES)
def test_a_source_off_the_page_is_written_buffered(folder: Path, pages: mmap.mmap, size: int) -> None:
    path = folder / "file"
    assert _C.write_file(str(path), pages, offset=512, nbytes=size) is False
    assert path.read_bytes() == pages[512 : 512 + size]


def test_direct_io_is_used_where_the_file_system_has_it(tmp_path: Path, pages: mmap.mmap) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert _C.write_file(str(tmp_path / "file"), pages, offset=0, nbytes=3 * PAGE + 1) is True


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE, 1 << 30])
def test_how_a_file_is_cut_and_by_how_many_does_not_show_in_it(
    folder: Path, pages: mmap.mmap, chunk: int, threads: int
) -> None:
    path = folder / "file"
    _C.write_file(str(path), pages, offset=0, nbytes=10 * PAGE + 100, chunk_bytes=chunk, threads=threads)
    assert path.read_bytes() == pages[: 10 * PAGE + 100]


def test_a_limit_holds_while_it_is_there_and_no_longer(tmp_path: Path, pages: mmap.mmap) -> None:
    limit, progress = bytearray(uint64s(1)), bytearray(8)
    options = {"chunk_bytes": PAGE, "progress": progress, "limit": limit}
    write = functools.partial(_C.write_file, str(tmp_path / "file"), pages, offset=0, nbytes=8 * PAGE, **options)
    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    until(lambda: _C.load(progress, 0) == PAGE, 30)  # the second would be due in more than an hour
    assert writing.is_alive()
    _C.store(limit, 0, 0)
    writing.join(60)
    assert (tmp_path / "file").read_bytes() == pages[: 8 * PAGE]


def test_an_existing_file_is_never_touched(folder: Path, pages: mmap.mmap) -> None:
    path = folder / "file"
    path.write_bytes(b"older")
    with pytest.raises(FileExistsError) as raised:
        _C.write_file(str(path), pages, offset=0, nbytes=PAGE)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"older"


def test_a_missing_directory_is_named(tmp_path: Path, pages: mmap.mmap) -> None:
    path = str(tmp_path / "none" / "fi\u00e9le")
    with pytest.raises(FileNotFoundError) as raised:
        _C.write_file(path, pages, offset=0, nbytes=1)
    assert raised.value.filename == path


def test_the_mode_is_under_the_umask(tmp_path: Path, pages: mmap.mmap) -> None:
    before = os.umask(0o027)
    try:
        _C.write_file(str(tmp_path / "default"), pages, offset=0, nbytes=1)
        _C.write_file(str(tmp_path / "private"), pages, offset=0, nbytes=1, mode=0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "default").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"offset": -1}),
        (ValueError, {"nbytes": -1}),
        (ValueError, {"offset": 1, "nbytes": 24 << 20}),
        (ValueError, {"nbytes": 2**63 - 1}),
        (OverflowError, {"nbytes": 2**64}),
        (ValueError, {"chunk_bytes": 0}),
        (ValueError, {"chunk_bytes": 4097}),
        (ValueError, {"chunk_bytes": 2 << 30}),
        (ValueError, {"threads": 0}),
        (ValueError, {"limit": bytearray(7)}),
        (ValueError, {"mode": -1}),
        (ValueError, {"mode": 0o10000}),
        (ValueError, {"progress": bytearray(8), "progress_offset": 8}),
        (ValueError, {"progress": bytearray(16), "progress_offset": 4}),
        (ValueError, {"progress": bytearray(8), "progress_offset": -1}),
        (BufferError, {"progress": bytes(8)}),
        (TypeError, {"direct": "yes", "progress": 1}),
    ],
)
def test_hostile_options_create_no_file(
    tmp_path: Path, pages: mmap.mmap, error: type[Exception], options: dict[str, object]
) -> None:
    with pytest.raises(error):
        _C.write_file(str(tmp_path / "file"), pages, **{"offset": 0, "nbytes": PAGE, **options})  # type: ignore[arg-type]
    assert not (tmp_path / "file").exists()


def test_a_path_with_a_nul_or_of_another_type_is_refused(pages: mmap.mmap) -> None:
    with pytest.raises(ValueError, match="null"):
        _C.write_file("a\0b", pages, offset=0, nbytes=1)
    with pytest.raises(TypeError):
        _C.read_file(3, bytearray(1), offset=0, nbytes=1)  # type: ignore[arg-type]


FILL_UP = """
import mmap, sys
from ckpt_engine import _C
source, progress = mmap.mmap(-1, 4 << 20), bytearray(8)
try:
    _C.write_file(sys.argv[1] + "/file", source, offset=0, nbytes=4 << 20, chunk_bytes=64 << 10, progress=progress)
except OSError as error:
    print(error.errno, error.filename == sys.argv[1] + "/file", _C.load(progress, 0) == 0)
"""


def test_a_full_disk_is_enospc_with_the_name_of_the_file(small_tmpfs: list[str]) -> None:
    command = [*small_tmpfs, sys.executable, "-c", FILL_UP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["28", "True", "True"], "")


FAULTY_CALLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static int is(const char *fault) { const char *set = getenv("FAULT"); return set && !strcmp(set, fault); }
static int fail(int code) { errno = code; return -1; }

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
    static int calls;
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    if (is("refuse direct") && fcntl(fd, F_GETFL) & O_DIRECT) return fail(EINVAL);
    if (is("interrupt") && ++calls % 2) return fail(EINTR);
    if (is("write nothing")) return 0;
    if (is("break") && offset) return fail(EIO);
    if (is("write little") && count > 4096) count = ++calls % 2 ? 4096 : 1000;
    return real(fd, data, count, offset);
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) { return pwrite64(fd, data, count, offset); }

ssize_t pread64(int fd, void *data, size_t count, off64_t offset) {
    static int calls;
    ssize_t (*real)(int, void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pread64");
    if (is("interrupt") && __sync_add_and_fetch(&calls, 1) % 2) return fail(EINTR);
    if (is("write little") && count > 1000) count = 1000;
    if (is("break") && offset) return fail(EIO);
    return real(fd, data, count, offset);
}
ssize_t pread(int fd, void *data, size_t count, off_t offset) { return pread64(fd, data, count, offset); }

int fsync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    return is("not durable") ? fail(EIO) : real(fd);
}
"""

WRITE_AND_READ = """
import mmap, sys
from ckpt_engine import _C
size, path = 100_003, sys.argv[1]
source, progress = mmap.mmap(-1, 1 << 20), bytearray(8)
source.write(bytes(range(256)) * 4096)
try:
    direct = _C.write_file(path, source, offset=0, nbytes=size, chunk_bytes=8192, progress=progress)
    back = bytearray(size)
    crc = _C.read_file(path, back, offset=0, nbytes=size, threads=2)
    print(direct, back == source[:size], crc == _C.crc32(back), _C.load(progress, 0))
except OSError as error:
    print(error.errno, error.filename == path, _C.load(progress, 0))
"""


@pytest.fixture(scope="module")
def faulty_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that, loaded before the C library's, plays the fault named by $FAULT."""
    if shutil.which("cc") is None:
        pytest.skip("the faulty library needs a C compiler")
    source = tmp_path_factory.mktemp("faults") / "faults.c"
    source.write_text(FAULTY_CALLS)
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("interrupt", r"(True|False) True True 100003"),
        ("refuse direct", r"False True True 100003"),
        ("write little", r"False True True 100003"),
        ("write nothing", r"5 True 0"),
        ("break", r"5 True 8192"),
        ("not durable", r"5 True 100003"),
    ],
)
def test_faulty_system_calls_are_survived_or_reported(
    tmp_path: Path, faulty_calls: Path, fault: str, outcome: str
) -> None:
    preload = f"{os.environ.get('LD_PRELOAD', '')} {faulty_calls}".strip()  # beside a sanitizer's
    env = {"LD_PRELOAD": preload, "FAULT": fault}
    printed = run_python(WRITE_AND_READ, tmp_path / "file", env=env)
    assert re.fullmatch(outcome, printed), printed


# ---- read_file ----


@pytest.mark.parametrize("size", FILE_SIZES)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_is_read_back_with_its_crc(tmp_path: Path, pages: mmap.mmap, size: int, threads: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(pages[:size] + b"more than asked for")
    target = bytearray(size + 5)
    assert _C.read_file(str(path), target, offset=3, nbytes=size, threads=threads) == zlib.crc32(pages[:size])
    assert target == bytes(3) + pages[:size] + bytes(2)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("missing", [1, 3_000_000])
def test_a_short_file_is_eof(tmp_path: Path, threads: int, missing: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(SOURCE[: 5_000_000 - missing])
    with pytest.raises(EOFError, match="fewer than 5000000 bytes"):
        _C.read_file(str(path), bytearray(5_000_000), offset=0, nbytes=5_000_000, threads=threads)


def test_what_cannot_be_read_is_an_oserror_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        _C.read_file(str(tmp_path / "none"), bytearray(8), offset=0, nbytes=8)
    assert missing.value.filename == str(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        _C.read_file(str(tmp_path), bytearray(8), offset=0, nbytes=8)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="seek"):  # and does not wait for a writer
        _C.read_file(str(tmp_path / "fifo"), bytearray(8), offset=0, nbytes=8)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"offset": 1}),
        (ValueError, {"offset": -1}),
        (ValueError, {"nbytes": 9}),
        (ValueError, {"nbytes": -1}),
        (ValueError, {"threads": 65}),
        (OverflowError, {"offset": 2**64}),
        (BufferError, {"dst": bytes(8)}),
    ],
)
def test_a_read_that_does_not_fit_moves_nothing(
    tmp_path: Path, error: type[Exception], options: dict[str, object]
) -> None:
    (tmp_path / "file").write_bytes(SOURCE[:100])
    arguments = {"dst": bytearray(8), "offset": 0, "nbytes": 8, **options}
    with pytest.raises(error):
        _C.read_file(str(tmp_path / "file"), **arguments)  # type: ignore[arg-type]
    assert arguments["dst"] == bytes(8)


# ---- Populate ----


@pytest.fixture
def segment() -> Iterator[tuple[int, mmap.mmap]]:
    """A mapped segment of 64 MiB in shared memory of which no page exists yet."""
    path = Path("/dev/shm") / f"test-csrc-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    path.unlink()
    os.ftruncate(fd, 64 << 20)
    memory = mmap.mmap(fd, 64 << 20)
    yield fd, memory
    memory.close()
    os.close(fd)


def test_populate_makes_every_page_exist(segment: tuple[int, mmap.mmap]) -> None:
    fd, memory = segment
    assert os.fstat(fd).st_blocks == 0
    toucher = _C.Populate(memory)
    assert toucher.wait(timeout_s=30)
    assert toucher.done_bytes() == len(memory)
    assert os.fstat(fd).st_blocks * 512 == len(memory)
    toucher.stop()


def test_populate_stays_within_its_window(segment: tuple[int, mmap.mmap]) -> None:
    fd, memory = segment
    toucher = _C.Populate(memory, offset=PAGE + 1, nbytes=2 * PAGE)
    assert toucher.wait(30)
    assert toucher.done_bytes() == 2 * PAGE
    assert os.fstat(fd).st_blocks * 512 == 3 * PAGE
    toucher.stop()


def test_populate_changes_no_byte_that_others_write(segment: tuple[int, mmap.mmap]) -> None:
    _, memory = segment
    toucher = _C.Populate(memory)
    rows = table(*((_C.address_of(SOURCE), i * len(SOURCE), len(SOURCE)) for i in range(8)))
    _C.copy(memory, rows, threads=2)
    toucher.stop()
    assert _C.crc32(memory) == zlib.crc32(SOURCE * 8)


def test_populate_holds_the_buffer_until_it_is_stopped(segment: tuple[int, mmap.mmap]) -> None:
    _, memory = segment
    toucher = _C.Populate(memory)
    with pytest.raises(BufferError):
        memory.close()
    toucher.stop()
    toucher.stop()
    assert 0 <= toucher.done_bytes() <= 64 << 20
    assert toucher.wait(0)
    memory.close()


def test_a_dropped_populate_ends_its_thread_and_frees_the_buffer(segment: tuple[int, mmap.mmap]) -> None:
    _, memory = segment
    _C.Populate(memory)  # dropped at once: the destructor stops it
    memory.close()


def test_populate_of_nothing_is_done() -> None:
    assert _C.Populate(bytearray()).wait(10)
    assert _C.Populate(bytearray(10), offset=10).wait(10)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (BufferError, lambda: _C.Populate(b"read-only")),
        (TypeError, lambda: _C.Populate(None)),  # type: ignore[arg-type]
        (ValueError, lambda: _C.Populate(bytearray(8), offset=9)),
        (ValueError, lambda: _C.Populate(bytearray(8), offset=-1)),
        (ValueError, lambda: _C.Populate(bytearray(8), offset=4, nbytes=5)),
        (OverflowError, lambda: _C.Populate(bytearray(8), nbytes=2**64)),
        (ValueError, lambda: _C.Populate(bytearray(8)).wait(-1)),
        (ValueError, lambda: _C.Populate(bytearray(8)).wait(float("nan"))),
        (TypeError, lambda: _C.Populate(bytearray(8)).wait("long")),  # type: ignore[arg-type]
    ],
)
def test_a_hostile_populate_is_refused(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


TOUCH_TOO_MUCH = """
import mmap, os, sys
from ckpt_engine import _C
fd = os.open(sys.argv[1] + "/segment", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 8 << 20)
toucher = _C.Populate(mmap.mmap(fd, 8 << 20))
print(toucher.wait(30), toucher.done_bytes())
"""


def test_populate_without_the_memory_ends_quietly(small_tmpfs: list[str]) -> None:
    command = [*small_tmpfs, sys.executable, "-c", TOUCH_TOO_MUCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "-7" in str(done.returncode):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert (done.stdout.split(), done.stderr) == (["True", "0"], "")


# ---- threads and processes ----


def test_a_copy_lets_other_threads_run() -> None:
    target = bytearray(len(SOURCE))
    rows = table(*((_C.address_of(SOURCE), 0, len(SOURCE)) for _ in range(8)))
    copier = threading.Thread(target=lambda: [_C.copy(target, rows, kernel="portable") for _ in range(4)])
    turns = 0
    copier.start()
    while copier.is_alive():
        turns += 1
    copier.join()
    assert turns > 100


def test_calls_from_many_threads_share_the_pool() -> None:
    wanted = zlib.crc32(SOURCE)
    found: list[bytes] = []

    def copy_often() -> None:
        target = bytearray(len(SOURCE))
        for _ in range(5):
            found.append(_C.copy(target, table((_C.address_of(SOURCE), 0, len(SOURCE))), threads=4))

    threads = [threading.Thread(target=copy_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [uint32s(wanted)] * 20


PRELUDE = """
import mmap, os, signal, struct, sys, threading, time, warnings, zlib
from ckpt_engine import _C
warnings.simplefilter("ignore")  # forking with threads is what these scripts are about
source = os.urandom(6 << 20)
def copy():
    target = bytearray(len(source))
    crc = _C.copy(target, struct.pack("3Q", _C.address_of(source), 0, len(source)), threads=4)
    assert struct.unpack("I", crc)[0] == zlib.crc32(source) and target == source
"""


def test_a_forked_child_copies_with_threads_of_its_own_and_exits() -> None:
    script = """
copy()
if (child := os.fork()) == 0:
    copy()
    sys.exit(0)  # an ordinary exit: at-exit handlers, finalisation and all
copy()
print(os.waitpid(child, 0)[1])
"""
    assert run_python(PRELUDE + script) == "0"


def test_a_fork_in_the_middle_of_copies_leaves_both_sides_able() -> None:
    script = """
stop = threading.Event()
def busy():
    while not stop.is_set(): copy()
thread = threading.Thread(target=busy)
thread.start()
statuses = []
for _ in range(10):
    if (child := os.fork()) == 0:
        copy()
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
stop.set()
thread.join()
print(sum(statuses))
"""
    assert run_python(PRELUDE + script) == "0"


def test_a_forked_child_does_not_wait_for_its_parents_populate() -> None:
    script = """
memory = mmap.mmap(-1, 256 << 20)
toucher = _C.Populate(memory)
if (child := os.fork()) == 0:
    assert toucher.wait(10)
    toucher.stop()
    del toucher
    memory.close()
    sys.exit(0)
status = os.waitpid(child, 0)[1]
print(status, toucher.wait(30))
"""
    assert run_python(PRELUDE + script) == "0 True"


@pytest.mark.parametrize(
    "last_act",
    [
        "copy()",
        "toucher = _C.Populate(mmap.mmap(-1, 512 << 20))",
        "threading.Thread(target=lambda: [copy() for _ in iter(int, 1)], daemon=True).start(); time.sleep(0.05)",
    ],
    ids=["an idle pool", "a running populate", "a daemon thread in a copy"],
)
def test_the_process_exits_cleanly_with(last_act: str) -> None:
    assert run_python(PRELUDE + last_act) == ""


def test_signals_reach_python_while_the_pool_is_idle() -> None:
    script = """
copy()
caught = []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # deadly to a thread of the pool that took it
os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR1)
print(len(caught), signal.sigwait([signal.SIGUSR2]) == signal.SIGUSR2)
"""
    assert run_python(PRELUDE + script) == "1 True"


def test_waiting_for_populate_hears_a_signal() -> None:
    script = """
def stop(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
toucher = _C.Populate(mmap.mmap(-1, 4 << 30))
begin = time.monotonic()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    toucher.wait(60)
    print("done")
except KeyboardInterrupt:
    print(time.monotonic() - begin < 5)
toucher.stop()
"""
    assert run_python(PRELUDE + script) in ("True", "done")


def test_a_link_anywhere_on_the_way_is_seen(tmp_path: Path) -> None:
    real = Path(os.path.realpath(tmp_path)) / "a" / "b"
    real.mkdir(parents=True)
    (real.parent.parent / "link").symlink_to("a")
    for path, free in ((real, True), (real.parent, True), (real.parent.parent / "link", False),
                       (real.parent.parent / "link" / "b", False), (real / "missing", False)):  # fmt: skip
        assert _C.free_of_links(str(path)) is free, path
    assert _C.free_of_links(os.fsencode(real)) is True
    with pytest.raises(ValueError):
        _C.free_of_links("a\0b")
    with pytest.raises(TypeError):
        _C.free_of_links(7)  # type: ignore[arg-type]
