"""How fast a slot becomes durable files, against what the disk can do: in turns, medians.

    python benchmarks/persist.py [--mib 1024] [--files 1 200] [--repeats 5] [--json FILE]

fio      direct writes of a new file, the same block size as ours and fsync at the end, for several queue depths
writer   the native writer, as the saver calls it for one file, from the same slot: GB/s, and CPU seconds per GB
saver    a whole save of a real engine: from the moment its snapshot is handed over until the rank may fill the slot
         again (durable) and until the checkpoint is committed; CPU seconds of the saver per GB, and how much of the
         files is in the page cache afterwards
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from crew import NotRun, refuse_unless_free
from disk import BLOCK_MIB, fio
from rows import Row, Rows, common_options, median, pick, scratch, table, verdict

from ckpt_engine import CheckpointEngine, locks
from ckpt_engine.slots import DATA_OFFSET
from ckpt_engine.states import State
from ckpt_engine.storage.base import write_range
from ckpt_engine.storage.posix import PosixStorage
from ckpt_engine.waits import Deadline

REST_S = 0.3
"""Between two turns, for what the disk (or the host behind it) does after a sync: else the next one pays for it."""
BUSY = (State.QUEUED, State.PERSISTING)
OF_FIO, CPU_S_PER_GB = 0.9, 0.1
"""Targets: of the best fio, and processor time."""


def by_fio(work: Path, nbytes: int, depth: int) -> Row:
    return {"s": fio(work, nbytes, depth=depth)}


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as m,
    ):
        pages = (size + page - 1) // page
        vector = (ctypes.c_ubyte * pages)()
        place = ctypes.addressof(ctypes.c_char.from_buffer(m))
        if libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return page * sum(one & 1 for one in vector)


@contextlib.contextmanager
def slot(nbytes: int) -> Iterator[mmap.mmap]:
    """Shared memory that was touched before."""
    path = f"/dev/shm/persist-benchmark-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
        os.posix_fallocate(fd, 0, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            for start in range(0, nbytes, 1 << 20):
                memory[start : start + 8] = os.urandom(8)
            yield memory
    finally:
        os.close(fd)


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Saver:
    """A real engine with a state in ``files`` files; saves one after another."""

    def __init__(self, root: Path, nbytes: int, files: int) -> None:
        each = nbytes // files // 4
        self.state = {f"part{number:04}.pt": {"a": torch.arange(each, dtype=torch.float32)} for number in range(files)}
        self.root, self.step, self.nbytes = root, 0, 4 * each * files
        self.engine = CheckpointEngine(root, keep_last=1, slots=1, name=f"files{files}")
        self.engine.prepare(self.state)

    def save(self) -> Row:
        self.step += 1
        core = self.engine._core
        pid = locks.holder(core.link.names.saver_lock) or 0
        before = processor_s(pid)
        handle = self.engine.save_to_storage(self.step, self.state)
        begin = time.perf_counter()
        core.link.wait(lambda: not any(slot.word().state in BUSY for slot in core.buffers.mine()), Deadline(300))
        durable = time.perf_counter() - begin
        handle.result(300)
        committed = time.perf_counter() - begin
        core.outbox.await_tidy(core.link, 60.0)
        folder = self.root / f"global_step{self.step}"
        cached = sum(cached_bytes(path) for path in folder.glob("*.pt"))
        cpu = (processor_s(pid) - before) / self.nbytes * 1e9
        return {"s": durable, "committed_s": committed, "cpu_s_per_gb": cpu, "cached_mib": cached / 2**20}


def measure(args: argparse.Namespace, rows: Rows, work: Path) -> None:
    nbytes = args.mib << 20
    storage = PosixStorage()
    ways: dict[str, Callable[[], Row]] = {}
    for depth in (1, 2, 4):
        ways[f"fio, {BLOCK_MIB} MiB, {depth} in flight"] = partial(by_fio, work, nbytes, depth)

    def writer(of: Saver) -> Row:
        path = work / "writer"
        (leased,) = of.engine._core.buffers.mine()
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        direct = write_range(storage, str(path), leased.memory, offset=DATA_OFFSET, nbytes=nbytes)
        storage.sync_dir(str(work))
        took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
        cached = cached_bytes(path) / 2**20
        path.unlink()
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"s": took, "cpu_s_per_gb": cpu / nbytes * 1e9, "cached_mib": cached, "direct": direct}

    with contextlib.ExitStack() as stack:
        for files in args.files:
            saver = Saver(work / f"files{files}", nbytes, files)
            stack.enter_context(saver.engine)
            saver.save()
            ways.setdefault("writer, 1 file", partial(writer, saver))
            ways[f"saver, {files} file{'s' if files > 1 else ''}"] = saver.save
        for repeat in range(args.repeats + 1):  # the first round warms up
            names = list(ways)
            random.Random(repeat).shuffle(names)  # nobody always comes behind the same one, whose file just went
            for name in names:
                os.sync()
                time.sleep(REST_S)
                try:
                    row = ways[name]()
                except NotRun as error:
                    rows.add(kind="not run", way=name, reason=str(error))
                    del ways[name]
                    continue
                if repeat:
                    rows.add(kind="write", way=name, mib=args.mib, gbs=nbytes / row["s"] / 1e9, **row)


def summaries(rows: Rows) -> list[Row]:
    ways = list(dict.fromkeys(row["way"] for row in rows.of("write")))
    speed = {way: median([row["gbs"] or 0.0 for row in rows.of("write", way=way)]) for way in ways}
    disk = max((gbs for way, gbs in speed.items() if way.startswith("fio")), default=0.0)
    for way in ways:
        found = pick(rows.rows, kind="write", way=way)
        facts = {
            key: median([row[key] for row in found]) if key in found[0] else None
            for key in ("s", "committed_s", "cpu_s_per_gb", "cached_mib")
        }
        of_fio = speed[way] / disk if disk else None
        passes = None
        if way.startswith(("writer", "saver, 1 ")) and of_fio is not None:
            passes = of_fio >= OF_FIO and (facts["cpu_s_per_gb"] or 0) <= CPU_S_PER_GB
        rows.add(kind="summary", way=way, mib=found[0]["mib"], gbs=speed[way], of_fio=of_fio, passes=passes, **facts)
    return rows.of("summary")


def show(found: list[Row]) -> str:
    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        (
            row["way"],
            f"{row['s']:.3f} s",
            f"{row['gbs']:.2f}",
            text(row["of_fio"], ".2f"),
            text(row["committed_s"], ".3f"),
            text(row["cpu_s_per_gb"], ".3f"),
            text(row["cached_mib"], ".0f"),
            verdict(row["passes"]),
        )
        for row in found
    ]
    head = ("way", "durable", "GB/s", "of best fio", "committed, s", "CPU s per GB", "in page cache, MiB", "")
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser)
    parser.set_defaults(repeats=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--files", type=int, nargs="+", default=[1, 200])
    args = parser.parse_args()
    refuse_unless_free(int(2.2 * args.mib * len(args.files)), "give a smaller --mib or fewer --files")
    torch.set_num_threads(1)
    rows = Rows(args.json, bench="persist")
    with scratch(args, "persist") as work:
        measure(args, rows, Path(work))
    print(f"\n{args.mib} MiB from shared memory to disk, median of {args.repeats}, in turns, everything synced")
    print(show(summaries(rows)))
    print(f"targets: at least {OF_FIO} of the best fio, at most {CPU_S_PER_GB} s of processor time per GB")


if __name__ == "__main__":
    main()
