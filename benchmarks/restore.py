"""How fast a state comes back, from memory and from disk, against bare copies, the disk and torch.load: medians.

    python benchmarks/restore.py [--mib 1024] [--tensors 64] [--repeats 5] [--json FILE]

From disk everything is read *cold* (the file is dropped from the page cache before) and *warm* (all of it is there):

restore      ``CheckpointEngine.restore``: choose, verify every byte, hand over tensors; from memory, from storage
read         the verified bytes alone, as restore reads them
torch.load   of the same file, which checks nothing but the small records
fio          direct reads, several in flight: the disk
copy         of as many bytes in shared memory: into memory touched before, and into fresh private memory (``clone``)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from crew import NotRun, refuse_unless_free
from disk import BLOCK_MIB, fio
from persist import slot
from rows import Row, Rows, common_options, median, scratch, table, verdict

from ckpt_engine import _C, CheckpointEngine, listing
from ckpt_engine.storage.posix import PosixStorage

OF_FIO, OF_COPY = 0.9, 0.8
"""Targets: of the disk's read speed, and of a bare copy into fresh private memory."""


def drop(path: Path) -> None:
    """Out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    """Into the page cache."""
    with open(path, "rb") as file:
        while file.read(8 << 20):
            pass


def trim() -> None:
    """Give freed memory back: a job restores once, into memory that it never had, and so does everybody here."""
    with contextlib.suppress(AttributeError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)


def timed(work: Callable[[], object]) -> float:
    """Seconds; of ``work`` that measures itself, a float, what it says."""
    begin = time.perf_counter()
    kept = work()
    took = time.perf_counter() - begin
    return kept if isinstance(kept, float) else took


def measure(args: argparse.Namespace, rows: Rows, work: Path) -> None:
    each = (args.mib << 18) // args.tensors
    state = {"state.pt": {f"layer.{number}": torch.arange(each, dtype=torch.float32) for number in range(args.tensors)}}
    nbytes, threads = 4 * each * args.tensors, len(os.sched_getaffinity(0))
    storage, root = PosixStorage(), work / "root"
    with CheckpointEngine(root, name="writer", slots=1) as writer:
        writer.save_to_storage(1, state).result(300)
    found = listing.list_committed(storage, str(root)).committed[0]
    entry = next(iter(found.manifest.files()))
    path = root / "global_step1" / "state.pt"

    def read() -> mmap.mmap:
        memory = mmap.mmap(-1, entry.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        listing.read_verified(storage, found, entry, memory, threads=threads)
        return memory

    with (
        CheckpointEngine(root, name="reader", slots=1) as reader,
        CheckpointEngine(work / "memory", name="memory", slots=1) as held,
        slot(nbytes) as source,
        slot(nbytes) as target,
    ):
        held.save_to_memory(1, state)
        row = array("Q", [_C.address_of(source), 0, nbytes])
        before: dict[str, Callable[[Path], None]] = {"cold": drop, "warm": warm}
        ways: dict[str, tuple[Callable[[], object], Callable[[Path], None] | None]] = {
            f"copy, {threads} threads, touched": (lambda: _C.copy(target, row, threads=threads, crc=False), None),
            "copy, clone into fresh memory": (lambda: clones(source, args.tensors), None),
            "restore, memory": (lambda: check(held.restore(), "memory"), None),
        }
        try:
            fio(work, nbytes, keep=True)
            fio(work, nbytes, write=False, keep=True)  # if it can read that once, it can again
            ways[f"fio, {BLOCK_MIB} MiB, 4 in flight"] = (lambda: fio(work, nbytes, write=False, keep=True), None)
        except NotRun as error:
            rows.add(kind="not run", way="fio", reason=str(error))
        for how, prepare in before.items():
            ways[f"restore, storage, {how}"] = (lambda: check(reader.restore(), "storage"), prepare)
            ways[f"read, {how}"] = (read, prepare)
            ways[f"torch.load, {how}"] = (lambda: torch.load(path, weights_only=True), prepare)
        for repeat in range(args.repeats + 1):
            for turn in range(len(ways)):
                name = list(ways)[(turn + repeat) % len(ways)]
                act, prepare = ways[name]
                trim()
                if prepare is not None:
                    prepare(path)
                took = timed(act)
                if repeat:
                    rows.add(kind="read", way=name, mib=args.mib, s=took, gbs=nbytes / took / 1e9)


def clones(source: mmap.mmap, count: int) -> list[torch.Tensor]:
    return [piece.clone() for piece in torch.frombuffer(source, dtype=torch.uint8).chunk(count)]


def check(report: object, source: str) -> object:
    """The report, if it is of that source."""
    if getattr(report, "source", None) != source:
        raise SystemExit(f"restored from {getattr(report, 'source', None)}, not {source}")
    return report


def summaries(rows: Rows) -> list[Row]:
    ways = list(dict.fromkeys(row["way"] for row in rows.of("read")))
    speed = {way: median([row["gbs"] or 0.0 for row in rows.of("read", way=way)]) for way in ways}
    disk = next((gbs for way, gbs in speed.items() if way.startswith("fio")), 0.0)
    fresh = next(gbs for way, gbs in speed.items() if "clone" in way)
    for way in sorted(ways, key=lambda way: (way.split(",")[0], way)):
        against, passes = "", None
        if way == "restore, memory":
            against, passes = f"{speed[way] / fresh:.2f} of clone", speed[way] >= OF_COPY * fresh
        elif way.startswith("restore"):
            other = speed[way.replace("restore, storage", "torch.load")]
            against, passes = f"{speed[way] / other:.2f} of torch.load", speed[way] >= other
            if way.endswith("cold") and disk:
                against += f", {speed[way] / disk:.2f} of fio"
                passes = passes and speed[way] >= OF_FIO * disk
        s = median([row["s"] or 0.0 for row in rows.of("read", way=way)])
        rows.add(kind="summary", way=way, s=s, gbs=speed[way], against=against, passes=passes)
    return rows.of("summary")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser)
    parser.set_defaults(repeats=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=64)
    args = parser.parse_args()
    refuse_unless_free(7 * args.mib, "give a smaller --mib")
    torch.set_num_threads(1)
    rows = Rows(args.json, bench="restore")
    with scratch(args, "restore") as work:
        measure(args, rows, Path(work))
    print(f"\n{args.mib} MiB in {args.tensors} tensors, median of {args.repeats}, in turns")
    lines = [
        (
            row["way"],
            f"{row['s']:.3f} s",
            f"{row['gbs']:.2f}",
            row["against"],
            verdict(row["passes"]),
        )
        for row in summaries(rows)
    ]
    print(table(("way", "median", "GB/s", "against", ""), lines))
    print(
        f"targets: memory {OF_COPY} of a copy into fresh memory, cold storage {OF_FIO} of fio, never below torch.load"
    )


if __name__ == "__main__":
    main()
