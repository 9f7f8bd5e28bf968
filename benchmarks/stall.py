"""How long a save blocks the training, side by side with the ways everybody has: one run, interleaved, medians.

    python benchmarks/stall.py [--mib 512] [--tensors 200] [--repeats 7] [--dir DIRECTORY]

One process, a state of CPU tensors. Three numbers per system: blocked (the call), lag (until it is durable; fsync
against fsync), and inflation (how much longer a training step takes while stage 2 runs). JSON lines, then a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import CheckpointEngine

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", default="", help="where to write (a temporary directory here by default)")
    args = parser.parse_args()
    need = int(3.3 * args.mib) << 20
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free:
        sys.exit(
            f"needs {need >> 20} MiB of memory (state and two slots), {free >> 20} MiB are free: give a smaller --mib"
        )
    torch.set_num_threads(1)
    state, matrix = make_state(args.mib, args.tensors), torch.randn(768, 768)
    work = Path(tempfile.mkdtemp(prefix="stall-", dir=args.dir or None))
    found: dict[str, list[dict[str, float]]] = {}
    try:
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
    finally:
        shutil.rmtree(work, ignore_errors=True)
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
