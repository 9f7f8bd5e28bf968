"""What a save costs without its copy: laying out many tiny tensors, against pickling them with torch.

    python benchmarks/plan.py [--tensors 10 100 1000 4000] [--repeats 15] [--profile] [--json FILE]

The state is a model with AdamW and a scheduler: four tensors for each parameter (itself, its step, two moments), all of
them tiny, so that blocking time is what a save costs beside its copy. In turns:

first    the first save of an engine that was prepared for it (median over three engines)
same     the same objects again
changed  dicts, lists and numbers made anew as ``state_dict()`` does; step, learning rate and scheduler have changed
layout   one tensor has another shape than in the save before, so that nothing of its layout may be reused
plan     ``image.plan`` alone, of "changed"
torch    ``torch.save`` of that state into a file that drops everything
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows, common_options, median, pick, scratch, table, verdict

from ckpt_engine import CheckpointEngine, image

TARGETS_MS = {100: 1.0, 4000: 8.0}
"""What a repeated save may cost."""
FIRST = 3


class Null(io.RawIOBase):
    """Writes go nowhere."""

    def write(self, data: Any) -> int:
        return len(data)

    def writable(self) -> bool:
        return True


class Job:
    """Tensors that stay, and state dicts that are made anew for each save."""

    def __init__(self, tensors: int) -> None:
        self.parameters = [torch.randn(8) for _ in range(max(1, tensors // 4))]
        self.moments = [(torch.zeros(()), torch.zeros(8), torch.zeros(8)) for _ in self.parameters]
        self.rest = [torch.randn(8) for _ in range(tensors - 4 * len(self.parameters))]
        self.step = 0

    def state(self) -> dict[str, Any]:
        self.step += 1
        model = {f"layers.{n}.weight": parameter.detach() for n, parameter in enumerate(self.parameters)}
        model |= {f"buffers.{n}": tensor.detach() for n, tensor in enumerate(self.rest)}
        moments = {
            n: {"step": step, "exp_avg": first, "exp_avg_sq": second}
            for n, (step, first, second) in enumerate(self.moments)
        }
        group = {"lr": 1e-3 / self.step, "betas": (0.9, 0.95), "params": list(range(len(self.parameters)))}
        scheduler = {"last_epoch": self.step, "_last_lr": [1e-3 / self.step]}
        optimizer = {"state": moments, "param_groups": [group]}
        return {"model.pt": {"module": model, "optimizer": optimizer, "scheduler": scheduler, "step": self.step}}

    def reshape(self) -> None:
        """Another layout from now on."""
        self.parameters[-1] = torch.randn(8 if self.parameters[-1].numel() != 8 else 9)


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def measure(rows: Rows, tensors: int, repeats: int, work: Path) -> Row:
    job, cache = Job(tensors), image.PlanCache()
    for number in range(FIRST):
        with CheckpointEngine(work / f"{tensors}-{number}", name=f"plan{number}") as engine:
            state = job.state()
            engine.prepare(state)
            state = job.state()
            rows.add(kind="save", tensors=tensors, way="first", ms=timed(lambda: engine.save_to_memory(1, state)))  # noqa: B023
    with CheckpointEngine(work / str(tensors), name="plan") as engine:
        state, step = job.state(), 0

        def save(this: dict[str, Any]) -> float:
            nonlocal step
            step += 1
            return timed(lambda: engine.save_to_memory(step, this))

        def layout() -> float:
            job.reshape()
            took = save(job.state())
            job.reshape()
            save(job.state())
            return took

        def plan() -> float:
            fresh = job.state()["model.pt"]
            return timed(lambda: image.plan(fresh, "model.pt", cache).release())

        ways: dict[str, Callable[[], float]] = {
            "same": lambda: save(state),
            "changed": lambda: save(job.state()),
            "layout": layout,
            "plan": plan,
            "torch": lambda: timed(lambda: torch.save(state, Null())),
        }
        for repeat in range(repeats + 2):
            for turn in range(len(ways)):
                name = list(ways)[(turn + repeat) % len(ways)]
                if name == "same":
                    save(state)  # whatever was saved before, this is a repeat
                ms = ways[name]()
                if repeat > 1:
                    rows.add(kind="save", tensors=tensors, way=name, ms=ms)
    found = {
        way: median([row["ms"] for row in pick(rows.rows, kind="save", tensors=tensors, way=way)])
        for way in ("first", *ways)
    }
    target_ms = TARGETS_MS.get(tensors)
    verdict = None if target_ms is None else max(found["same"], found["changed"]) <= target_ms
    return rows.add(kind="summary", tensors=tensors, **found, target_ms=target_ms, passes=verdict)


def profile(tensors: int, work: Path) -> str:
    """Where the time of a repeated save goes."""
    job, profiler = Job(tensors), cProfile.Profile()
    with CheckpointEngine(work / "profile", name="profile") as engine:
        for step in range(20):
            state = job.state()
            if step >= 10:
                profiler.enable()
            engine.save_to_memory(step, state)
            profiler.disable()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(25)
    return out.getvalue()


def show(summaries: list[Row]) -> str:
    keys = ("first", "same", "changed", "layout", "plan", "torch")
    lines = [
        (
            str(row["tensors"]),
            *(f"{row[key]:.2f} ms" for key in keys),
            "-" if row["target_ms"] is None else f"{row['target_ms']:.0f} ms",
            verdict(row["passes"]),
        )
        for row in summaries
    ]
    return table(("tensors", *keys, "target", ""), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser)
    parser.set_defaults(repeats=15)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--profile", action="store_true", help="also print where the time of a repeated save goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(args.json, bench="plan")
    with scratch(args, "plan") as work:
        summaries = [measure(rows, tensors, args.repeats, Path(work)) for tensors in args.tensors]
        print(f"\na save without its copy, median of {args.repeats}, interleaved")
        print(show(summaries))
        if args.profile:
            print(profile(args.tensors[-1], Path(work)))


if __name__ == "__main__":
    main()
