"""What a save at every step costs a training with a real optimizer: blocking and overlapping, interleaved.

    python benchmarks/steps.py [--mib 512] [--tensors 66] [--batch 128] [--threads 1] [--repeats 7]

A network of square layers and AdamW. Per way to save: call and guard as a share of the step without a save, and by how
much the rest of the step grew beside. Rows of the kind "step", a "summary" for each way, and a table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from crew import free_mib
from rows import Row, Rows, common_options, median, pick, scratch, table

from ckpt_engine import CheckpointEngine


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


def measure(rows: Rows, args: argparse.Namespace, work: Path) -> list[Row]:
    """One summary for each way to save."""
    training = Training(args.mib, args.tensors, args.batch)
    facts = {"part": "steps", "mib": args.mib, "tensors": args.tensors, "threads": args.threads}
    with (
        CheckpointEngine(work / "blocking", slots=1, name="blocking") as blocking,
        CheckpointEngine(work / "overlap", slots=1, name="overlap", staging="overlap") as overlap,
    ):
        training.step(lambda: None, lambda: None)
        overlap.guard(training.optimizer)
        for engine in (blocking, overlap):
            engine.prepare(training.state())
        ways: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
            "no save": (lambda step: None, lambda: None),
            "blocking": (lambda step: blocking.save_to_memory(step, training.state()), lambda: None),
            # what the optimizer's own hook does, here to be timed apart
            "overlap": (lambda step: overlap.save_to_memory(step, training.state()), overlap._core.guard),
        }
        for repeat in range(args.repeats + 2):  # the first two warm up: slots are touched, plans are kept
            for turn in range(len(ways)):
                name = list(ways)[(turn + repeat) % len(ways)]
                save, guard = ways[name]
                found = training.step(lambda save=save, step=repeat: save(step), guard)
                if repeat > 1:
                    rows.add(kind="step", **facts, way=name, repeat=repeat - 2, **found)
    medians = {}
    for name in ways:
        found = pick(rows.rows, kind="step", way=name)
        medians[name] = {
            key: median([row[key] for row in found]) for key in ("call_ms", "guard_ms", "passes_ms", "update_ms")
        }
    base = medians["no save"]["passes_ms"] + medians["no save"]["update_ms"]
    return [
        rows.add(
            kind="summary",
            **facts,
            way=name,
            **found,
            base_ms=base,
            stall_percent=100 * (found["call_ms"] + found["guard_ms"]) / base,
            beside_percent=100 * (found["passes_ms"] + found["update_ms"] - base) / base,
        )
        for name, found in medians.items()
    ]


def show(summaries: list[Row]) -> str:
    lines = [
        (
            row["way"],
            f"{row['call_ms']:.2f} ms",
            f"{row['guard_ms']:.2f} ms",
            f"{row['stall_percent']:.2f} %",
            f"{row['beside_percent']:+.2f} %",
        )
        for row in summaries
    ]
    return table(("save each step", "call", "guard", "of the step", "step beside"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser)
    parser.add_argument("--mib", type=int, default=512, help="parameters and both moments")
    parser.add_argument("--tensors", type=int, default=66, help="of them")
    parser.add_argument("--batch", type=int, default=128, help="rows of the batch, so how long a step is")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    args = parser.parse_args()
    need, free = int(4.2 * args.mib) + 400, free_mib()
    if need > free:
        sys.exit(f"needs {need} MiB of memory (state, gradients, two slots), {free} MiB are free: give a smaller --mib")
    torch.set_num_threads(args.threads)
    rows = Rows(args.json, bench="steps")
    with scratch(args, "steps") as work:
        summaries = measure(rows, args, Path(work))
    base_ms = summaries[0]["base_ms"]
    print(f"\n{args.mib} MiB, a step of {base_ms:.0f} ms without a save, median of {args.repeats}, interleaved")
    print(show(summaries))


if __name__ == "__main__":
    main()
