"""What the native part does at the same time, without torch: run under a sanitizer by ``tests.sanitize``.

Not a test file: ``python drive.py`` fails with an AssertionError, or with the sanitizer's report.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_engine import _C

PAGE = 4096
SOURCE = random.Random(0).randbytes((5 << 20) + 77)
MADVISE = """
#include <errno.h>
int madvise(void *address, unsigned long nbytes, int advice) { errno = 22; return -1; }
"""


def rows(*ranges: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("3Q", *one) for one in ranges)


def at_once(*acts: Callable[[], object]) -> None:
    """Run them in threads that start together; the first error of any is raised."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(acts))

    def run(act: Callable[[], object]) -> None:
        try:
            gate.wait(60)
            act()
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def guarded(nbytes: int) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """A buffer whose end is the end of a page; the next page may not be touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole = -(-nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, whole + PAGE)
    start = _C.address_of(memory)
    assert libc.mprotect(ctypes.c_void_p(start + whole), PAGE, 0) == 0
    yield (ctypes.c_char * nbytes).from_address(start + whole - nbytes)
    assert libc.mprotect(ctypes.c_void_p(start + whole), PAGE, 3) == 0
    memory.close()


def copies() -> None:
    """All kernels, by several callers that share the pool, into buffers that end where their bytes do."""
    for kernel in _C.cpu_kernels():
        for nbytes in (33, 63, 16 << 10, (16 << 10) + 65, 50_001, len(SOURCE), 1):
            target = (ctypes.c_char * nbytes)()  # on the heap, and not a byte longer as a bytearray is
            crc = _C.copy(target, rows((_C.address_of(SOURCE), 0, nbytes)), threads=3, kernel=kernel)
            assert crc == struct.pack("<I", zlib.crc32(SOURCE[:nbytes])) and bytes(target) == SOURCE[:nbytes]
            with guarded(nbytes) as edge:
                _C.copy(edge, rows((_C.address_of(SOURCE), 0, nbytes)), threads=3, kernel=kernel)
                assert bytes(edge) == SOURCE[:nbytes]
                assert _C.crc32(edge, threads=2) == zlib.crc32(SOURCE[:nbytes])


def stops(*, with_copies: bool) -> None:
    """A populate that several threads stop, ask and wait for, half of them with a copy beside it; one is dropped."""
    for number in range(0, 10, 1 if with_copies else 2):
        memory = mmap.mmap(-1, 32 << 20)
        toucher = _C.Populate(memory)
        copy = [lambda: _C.copy(memory, rows((_C.address_of(SOURCE), 5, len(SOURCE))), threads=2)]  # noqa: B023
        at_once(toucher.stop, toucher.stop, toucher.done_bytes, lambda: toucher.wait(5), *copy * (number % 2))  # noqa: B023
        assert toucher.wait(0) and toucher.done_bytes() <= len(memory)
        assert number % 2 == 0 or memory[5 : 5 + len(SOURCE)] == SOURCE
        _C.Populate(memory)
        del copy
        memory.close()


COUNT = """
import mmap, sys
from ckpt_engine import _C
with open(sys.argv[1], "r+b") as shared:
    word = mmap.mmap(shared.fileno(), 4096)
for _ in range(3000):
    while not _C.compare_exchange(word, 64, seen := _C.load(word, 64), seen + 1):
        pass
"""


def words(folder: Path) -> None:
    """Two processes and two threads of each count in one word, and none is lost."""
    shared = folder / "word"
    shared.write_bytes(bytes(PAGE))
    others = [subprocess.Popen([sys.executable, "-c", COUNT, str(shared)]) for _ in range(2)]
    with shared.open("r+b") as file:
        word = mmap.mmap(file.fileno(), PAGE)

    def count() -> None:
        for _ in range(3000):
            while not _C.compare_exchange(word, 64, seen := _C.load(word, 64), seen + 1):
                pass

    at_once(count, count)
    assert [other.wait(120) for other in others] == [0, 0]
    assert _C.load(word, 64) == 12_000


def files(folder: Path) -> None:
    """Writers whose progress is read all the while, as the server reads what its writer does; then parallel reads."""
    source = mmap.mmap(-1, 8 << 20)
    source.write(SOURCE)

    def one(number: int) -> None:
        progress, path = bytearray(16), str(folder / f"file-{number}")
        options = {"offset": 0, "nbytes": len(SOURCE), "chunk_bytes": 16 << 10, "direct": number % 2 == 0, "threads": 3}
        written = threading.Event()

        def write() -> None:
            _C.write_file(path, source, progress=progress, progress_offset=8, **options)  # type: ignore[arg-type]
            written.set()

        def watch() -> None:
            last = 0
            while not written.is_set():
                now = _C.load(progress, 8)
                assert last <= now <= len(SOURCE)
                last = now

        at_once(write, watch)
        assert _C.load(progress, 8) == len(SOURCE)
        back = bytearray(len(SOURCE))
        assert _C.read_file(path, back, offset=0, nbytes=len(back), threads=3) == zlib.crc32(SOURCE)
        assert back == SOURCE

    at_once(*(lambda number=number: one(number) for number in range(3)))  # type: ignore[misc]
    source.close()


def without_advice(folder: Path, kind: str) -> None:
    """Populate on a kernel without MADV_POPULATE_WRITE: byte by byte; not beside copies under TSan (``__main__``)."""
    (folder / "madvise.c").write_text(MADVISE)
    library = folder / "madvise.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "madvise.c"], check=True)
    preload = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    subprocess.run([sys.executable, __file__, kind, "stops"], env={**os.environ, "LD_PRELOAD": preload}, check=True)


def under(kind: str) -> None:
    """Fails unless the extension is the copy here, and that runtime is in the process."""
    assert Path(_C.__file__).is_relative_to(Path.cwd()), _C.__file__
    assert f"lib{kind}.so" in Path("/proc/self/maps").read_text()


def main() -> None:
    kind = sys.argv[1]
    under(kind)
    if sys.argv[2:] == ["stops"]:
        stops(with_copies=kind != "tsan")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        at_once(copies, copies)
        stops(with_copies=True)
        words(folder)
        files(folder)
        without_advice(folder, kind)
    print("driven: copies, populate, words, files")


if __name__ == "__main__":
    main()
