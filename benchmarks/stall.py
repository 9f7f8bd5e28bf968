"""How long a save blocks the training, side by side with the ways everybody has: one run, interleaved, medians.

    python benchmarks/stall.py [saves|steps|copies …] [--mib 512] [--tensors 200] [--repeats 7] [--dir DIRECTORY]

One process, a state of CPU tensors. JSON lines, then a table for each part:

saves   per system: blocked (the call), lag (until it is durable; fsync against fsync), and inflation (how much longer
        a step takes while stage 2 runs)
steps   a network and AdamW, trained: call and guard as a share of the step, and by how much the step grew beside,
        for blocking and overlapping saves
copies  a blocking save to memory against the bare copies of its bytes
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import _C, CheckpointEngine

State = dict[str, torch.Tensor]
Finish = Callable[[], Any] | None
"""Waits until a save is durable; None: it is as safe as it will get."""
Save = Callable[[int], Finish]


def make_state(mib: int, tensors: int) -> State:
    """``tensors`` tensors of unequal sizes, ``mib`` MiB in all."""
    weights = torch.linspace(1, 20, tensors)
    sizes = (weights / weights.sum() * mib * 2**18).long().clamp(min=1)
    return {f"layer.{number}": torch.randn(int(size)) for number, size in enumerate(sizes)}


def train_step(matrix: torch.Tensor) -> float:
    begin = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - begin


def measure(save: Save, step: int, matrix: torch.Tensor, quiet_s: float) -> dict[str, float]:
    """Save once, train until it is durable. ``save(step)`` returns what waits for that."""
    begin = time.perf_counter()
    finish = save(step)
    blocked = time.perf_counter() - begin
    busy = [train_step(matrix) for _ in range(3)]
    lag = blocked
    if finish is not None:
        finish()
        lag = time.perf_counter() - begin
    return {
        "blocked_ms": 1e3 * blocked,
        "lag_ms": 1e3 * lag,
        "inflation": statistics.median(busy) / quiet_s,
    }


def systems(state: State, work: Path, ckpt: CheckpointEngine) -> dict[str, Save]:
    """Name → a save that blocks as long as the training would, and returns how to wait until it is durable."""

    def torch_save(sync: bool) -> Save:
        def save(step: int) -> Finish:
            with open(work / f"torch-{sync}.pt", "wb") as file:
                torch.save(state, file)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            return None

        return save

    def memory(step: int) -> Finish:
        ckpt.save_to_memory(step, {"model.pt": state})
        return None

    def storage(step: int) -> Finish:
        return ckpt.save_to_storage(step, {"model.pt": state}).result

    return {
        "torch.save": torch_save(False),
        "torch.save + fsync": torch_save(True),
        "ckpt_engine, memory": memory,
        "ckpt_engine, storage": storage,
    }


class Training:
    """A network of square layers with AdamW: ``mib`` MiB of parameters and moments, ``batch`` rows a step."""

    def __init__(self, mib: int, tensors: int, batch: int) -> None:
        layers = max(1, tensors // 6)  # weight and bias, each with two moments
        width = max(8, int((mib * 2**20 / 12 / layers) ** 0.5))
        self.net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, foreach=True)
        self.data = torch.randn(batch, width)

    def state(self) -> dict[str, Any]:
        return {"model.pt": self.net.state_dict(), "optim.pt": self.optimizer.state_dict()}

    def step(self, save: Callable[[], Any], guard: Callable[[], Any]) -> dict[str, float]:
        """Save, forward, backward, wait for the guard, update; milliseconds of each."""
        marks = [time.perf_counter()]
        for part in (save, self._backward, guard, self.optimizer.step, self.optimizer.zero_grad):
            part()
            marks.append(time.perf_counter())
        call, passes, waited, update, zero = (1e3 * (b - a) for a, b in itertools.pairwise(marks))
        return {"call_ms": call, "guard_ms": waited, "passes_ms": passes, "update_ms": update + zero}

    def _backward(self) -> None:
        (self.net(self.data) ** 2).mean().backward()


def steps(args: argparse.Namespace, work: Path) -> None:
    training = Training(args.mib, args.tensors, args.batch)
    found: dict[str, list[dict[str, float]]] = {}
    with (
        CheckpointEngine(work / "blocking", slots=1, name="blocking") as blocking,
        CheckpointEngine(work / "overlap", slots=1, name="overlap", staging="overlap") as overlap,
    ):
        training.step(lambda: None, lambda: None)
        overlap.guard(training.optimizer)
        for engine in (blocking, overlap):
            engine.prepare(training.state())
        for repeat in range(args.repeats + 2):  # the first two warm up: slots are touched, plans are kept
            saves: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
                "no save": (lambda: None, lambda: None),
                "blocking": (lambda: blocking.save_to_memory(repeat, training.state()), lambda: None),  # noqa: B023
                "overlap": (lambda: overlap.save_to_memory(repeat, training.state()), overlap._core.guard),  # noqa: B023
            }
            for name, (save, guard) in saves.items():
                row = training.step(save, guard)
                if repeat > 1:
                    found.setdefault(name, []).append(row)
                    print(json.dumps({"steps": name, "mib": args.mib, "batch": args.batch, **row}), flush=True)
    median = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }
    base = median["no save"]["passes_ms"] + median["no save"]["update_ms"]
    print(f"\n{args.mib} MiB of parameters and moments, {base:.0f} ms a step, median of {args.repeats}, interleaved")
    print(f"{'save each step':<24}{'call':>11}{'guard':>11}{'of the step':>13}{'step beside':>13}")
    for name, row in median.items():
        stall, beside = row["call_ms"] + row["guard_ms"], row["passes_ms"] + row["update_ms"]
        print(
            f"{name:<24}{row['call_ms']:>8.2f} ms{row['guard_ms']:>8.2f} ms{100 * stall / base:>11.2f} %"
            f"{100 * (beside - base) / base:>+11.2f} %"
        )


def copies(args: argparse.Namespace, work: Path) -> None:
    """Interleaved; every destination is shared memory that was touched before."""
    sizes = [args.mib * 2**18 // args.tensors] * args.tensors
    state = {f"layer.{number}": torch.randn(size) for number, size in enumerate(sizes)}
    nbytes = sum(4 * size for size in sizes)
    memory = mmap.mmap(-1, nbytes)
    target, threads = torch.frombuffer(memory, dtype=torch.uint8), len(os.sched_getaffinity(0))
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + 4 * size)
    table = array("Q", [v for t, at in zip(state.values(), starts, strict=False) for v in (t.data_ptr(), at, t.nbytes)])
    base = _C.address_of(memory)

    def memcpy(pool: ThreadPoolExecutor) -> None:
        rows = [(base + at, t.data_ptr(), t.nbytes) for t, at in zip(state.values(), starts, strict=False)]
        list(pool.map(lambda row: ctypes.memmove(*row), rows))

    def tensor_copy() -> None:
        for tensor, at in zip(state.values(), starts, strict=False):
            target[at : at + tensor.nbytes].view(torch.float32).copy_(tensor)

    count: Iterator[int] = iter(range(1, 1000))
    found: dict[str, list[float]] = {}
    with CheckpointEngine(work / "copies", slots=1) as ckpt, ThreadPoolExecutor(threads) as pool:
        ways: dict[str, Callable[[], Any]] = {
            f"memcpy, {threads} threads": lambda: memcpy(pool),
            "Tensor.copy_": tensor_copy,
            f"bare kernel, {threads} threads": lambda: _C.copy(memory, table, threads=threads, crc=False),
            f"kernel with CRC, {threads} threads": lambda: _C.copy(memory, table, threads=threads),
            "save_to_memory": lambda: ckpt.save_to_memory(next(count), {"model.pt": state}),
        }
        for repeat in range(args.repeats + 2):
            for turn in range(len(ways)):
                name = list(ways)[(turn + repeat) % len(ways)]
                begin = time.perf_counter()
                ways[name]()
                seconds = time.perf_counter() - begin
                if repeat > 1:
                    found.setdefault(name, []).append(1e3 * seconds)
                    print(json.dumps({"copies": name, "mib": args.mib, "tensors": args.tensors, "ms": 1e3 * seconds}))
    print(f"\n{args.mib} MiB in {args.tensors} tensors, median (least) of {args.repeats}, interleaved")
    bare = statistics.median(found[f"bare kernel, {threads} threads"])
    for name in ways:
        ms = statistics.median(found[name])
        print(f"{name:<30}{ms:>9.1f} ms ({min(found[name]):.1f}){nbytes / ms / 1e6:>8.1f} GB/s{ms / bare:>8.2f}x")


def main() -> None:
    parts = {"saves": saves, "steps": steps, "copies": copies}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="|".join(parts), help="all by default")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="steps: rows of the batch, so how long a step is")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", default="", help="where to write (a temporary directory here by default)")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no part of this: {sorted(unknown)}")
    need = int(3.3 * args.mib) << 20
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free:
        sys.exit(
            f"needs {need >> 20} MiB of memory (state and two slots), {free >> 20} MiB are free: give a smaller --mib"
        )
    torch.set_num_threads(1)
    for name in args.parts or parts:
        work = Path(tempfile.mkdtemp(prefix="stall-", dir=args.dir or None))
        try:
            parts[name](args, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def saves(args: argparse.Namespace, work: Path) -> None:
    state, matrix = make_state(args.mib, args.tensors), torch.randn(768, 768)
    found: dict[str, list[dict[str, float]]] = {}
    with CheckpointEngine(work / "root", keep_last=2) as ckpt:
        ways = systems(state, work, ckpt)
        quiet_s = statistics.median(train_step(matrix) for _ in range(15))
        for repeat in range(args.repeats + 1):  # the first round warms up
            for turn in range(len(ways)):
                name = list(ways)[(turn + repeat) % len(ways)]
                step = repeat * len(ways) + turn
                row = measure(ways[name], step, matrix, quiet_s)
                if repeat:
                    found.setdefault(name, []).append(row)
                    print(json.dumps({"system": name, "mib": args.mib, "tensors": args.tensors, **row}), flush=True)
    median = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }
    base = median["torch.save + fsync"]["blocked_ms"]
    print(f"\n{args.mib} MiB in {args.tensors} tensors, median of {args.repeats}, interleaved")
    print(f"{'system':<24}{'blocked':>12}{'of fsync':>10}{'until safe':>13}{'step time':>11}")
    for name in ways:
        row = median[name]
        print(
            f"{name:<24}{row['blocked_ms']:>9.1f} ms{100 * row['blocked_ms'] / base:>8.1f} %{row['lag_ms']:>10.1f} ms"
            f"{row['inflation']:>10.2f}x"
        )
    print("until safe: durable on disk; for memory saves: safe from the death of the process")


if __name__ == "__main__":
    main()
