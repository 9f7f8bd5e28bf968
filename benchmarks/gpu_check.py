"""What only a GPU can prove of staging: the speed of the copy, and that a step hides it. Ends with 2 where none is.

    python benchmarks/gpu_check.py [--gib 4] [--repeats 5]

1. bandwidth: device tensors into a pinned slot, at least 85 % of the speed of one copy into torch's pinned memory.
2. overlap: a step of matrix products longer than the copy; call and guard at most 2 % of it, the step beside at most
   5 % longer, and the snapshot bit for bit what was on the device when the save was called.

Less than three minutes; shared memory for two slots of ``--gib``. Exit code 0 if all holds, 1 if something does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from ckpt_engine import CheckpointEngine, image, shm
from ckpt_engine.device import Lanes
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.slots import Slot
from ckpt_engine.staging import Fill, Planned, space

LEAST_BANDWIDTH, MOST_STALL, MOST_BESIDE = 0.85, 0.02, 0.05


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def bandwidth(tensors: list[torch.Tensor], repeats: int) -> float:
    """Speed of our copy over that of a copy into pinned memory, interleaved, medians."""
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    lanes, hash_ = Lanes(), f"{os.getpid():016x}"
    planned = image.plan({str(number): tensor for number, tensor in enumerate(tensors)})
    files = {"a.pt": Planned(planned, late=range(planned.records))}
    slot = Slot.create(SegmentName(hash_, 0, 0, 1), space(files))
    ours, theirs = [], []
    try:
        for repeat in range(repeats + 1):
            theirs.append(seconds(lambda: pinned.copy_(flat, non_blocking=True)))
            fill = Fill(slot, files, lanes)
            fill.copy(threads=1)
            ours.append(seconds(lambda: (fill.copy_late(lambda: 1), fill.abandon())))  # noqa: B023  # without the CRCs
            print(f"copy {repeat}: ours {ours[-1]:.4f} s, pinned {theirs[-1]:.4f} s", flush=True)
    finally:
        slot.close()
        for name in Names(hash_).segments():
            shm.unlink(str(name))
    gb = flat.nbytes / 1e9
    ratio = statistics.median(theirs[1:]) / statistics.median(ours[1:])  # the first one pins
    print(f"{gb / statistics.median(ours[1:]):.1f} GB/s, {100 * ratio:.0f} % of a pinned copy")
    return ratio


def overlap(tensors: list[torch.Tensor], repeats: int, root: str) -> tuple[float, float, bool]:
    """Call and guard, and how much longer the rest is, as shares of a step; and whether the bytes are right."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    with CheckpointEngine(root, staging="overlap") as ckpt:
        ckpt.guard(optimizer)

        def state() -> dict[str, Any]:
            return {"model.pt": {str(number): p.detach() for number, p in enumerate(parameters)}}

        def save(step: int) -> None:
            ckpt.save_to_memory(step, state())

        ckpt.prepare(state())
        for step in (1, 2):
            save(step)  # pins the slots
            ckpt.wait_staged()
        copy_s = seconds(lambda: (save(3), ckpt.wait_staged()))
        one_s = seconds(lambda: torch.mm(matrix, matrix))
        rounds = int(2 * copy_s / max(one_s, 1e-5)) + 1
        stalls, steps, bare = [], [], []
        for number in range(repeats + 1):
            for saving in (False, True):
                torch.cuda.synchronize()
                marks = [time.perf_counter()]
                if saving:
                    save(10 + number)
                marks.append(time.perf_counter())
                for _ in range(rounds):
                    torch.mm(matrix, matrix)
                marks.append(time.perf_counter())
                ckpt._core.guard()
                marks.append(time.perf_counter())
                optimizer.step()
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
                if number:
                    stall_s = marks[1] - marks[0] + marks[3] - marks[2] if saving else 0.0
                    (steps if saving else bare).append(marks[-1] - marks[0] - stall_s)
                    stalls += [stall_s] if saving else []
        base = statistics.median(bare)
        stall, beside = statistics.median(stalls) / base, (statistics.median(steps) - base) / base
        print(f"step {base:.3f} s, copy alone {copy_s:.3f} s")
        want = parameters[0].detach().cpu()
        save(100)
        optimizer.step()  # comes behind the copy
        found = ckpt.restore(map_location="cpu").state["model.pt"]["0"]
        right = torch.equal(found, want) and not torch.equal(parameters[0].detach().cpu(), want)
    return stall, beside, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU")
        return 2
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    tensors = [torch.randn(int(args.gib * 2**28 / 64), device="cuda") for _ in range(64)]
    root = tempfile.mkdtemp(prefix="gpu-check-")
    try:
        ratio = bandwidth(tensors, args.repeats)
        stall, beside, right = overlap(tensors, args.repeats, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    held = {
        f"bandwidth {100 * ratio:.0f} % of a pinned copy (at least {100 * LEAST_BANDWIDTH:.0f} %)": ratio
        >= LEAST_BANDWIDTH,
        f"call and guard {100 * stall:.2f} % of the step (at most {100 * MOST_STALL:.0f} %)": stall <= MOST_STALL,
        f"step {100 * beside:+.2f} % (at most {100 * MOST_BESIDE:+.0f} %)": beside <= MOST_BESIDE,
        "the snapshot is what was on the device": right,
    }
    for claim, holds in held.items():
        print("ok  " if holds else "FAIL", claim)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
