"""One rank that trains and saves with one system, and measures: a line of JSON in, a line of JSON out.

    python benchmarks/worker.py MODULE:CLASS --work DIRECTORY [--mib 64] [--tensors 64] [--threads 1]

MODULE is looked for beside this file (``systems``, ``peers.torchsnapshot``). Imports the standard library, torch and
what the system imports, so it runs in a rival's environment. Commands, ``{"do": NAME, …}``:

make                   make the state
start                  start the system
plain    n             n steps without a save: how long each takes
save     step          a save, one step, and the wait until it is durable
busy     step, most    a save, and steps for as long as it is under way: how long they take
pressed  step, saves, every   saves every few steps without waiting in between
kept     step          a save alone; then the conductor kills this process
verify   step          load that save and compare with what the state was at its call
forget   step          remove that save
close                  stop the system

Every answer has ``ok``; with ``ok`` false ``error`` says what was raised. The numbers of a state: element e of tensor t
starts as an integer below 2**20 that depends on t and e, and every step adds one to all of them. So a state tells, for
each element, after which step it was read: a save that mixes steps is torn.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from systems import State, System


class Worker:
    """A training and its system."""

    def __init__(self, args: argparse.Namespace) -> None:
        module, _, name = args.system.partition(":")
        kind: type[System] = getattr(importlib.import_module(module), name)
        self.rank, self.world = args.rank, args.world
        if kind.needs_group or self.world > 1:
            os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK=str(self.rank))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group(
                "gloo", rank=self.rank, world_size=self.world, timeout=datetime.timedelta(seconds=args.timeout_s)
            )
        self.grouped = self.world > 1
        self.system = kind(Path(args.work), rank=self.rank, world=self.world, resuming=args.resuming)
        self.args = args
        self.state: State = {}
        self.updates = 0
        self.save_began = 0.0
        self.save_cpu_s = 0.0
        self.saved: dict[int, int] = {}  # step of a save -> updates before it

    # -- the training --------------------------------------------------------------------------------------------

    def forward_backward(self) -> None:
        """A fixed amount of work, so that whoever takes the cores makes it longer."""
        for _ in range(self.args.multiplications):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def update(self) -> None:
        with torch.no_grad():
            torch._foreach_add_(self.tensors, 1.0)
        self.updates += 1

    def step(self) -> dict[str, float]:
        """One step: milliseconds in all, and of the guard."""
        marks = [time.perf_counter()]
        for part in (self.forward_backward, self.system.guard, self.update):
            part()
            marks.append(time.perf_counter())
        return {"step_ms": 1e3 * (marks[-1] - marks[0]), "guard_ms": 1e3 * (marks[2] - marks[1])}

    def call(self, step: int) -> float:
        """``System.save``, entered by all ranks at once; seconds."""
        self.saved[step] = self.updates
        if self.grouped:
            torch.distributed.barrier()
        self.save_began, processor = time.perf_counter(), time.process_time()
        self.system.save(step)
        took, self.save_cpu_s = time.perf_counter() - self.save_began, time.process_time() - processor
        return took

    # -- the commands --------------------------------------------------------------------------------------------

    def do_make(self) -> dict[str, Any]:
        torch.set_num_threads(
            1
        )  # others make theirs meanwhile, and more threads than cores wait for each other, spinning
        self.matrix, self.product = torch.randn(512, 512), torch.empty(512, 512)
        self.state = self.system.make_state(self.args.mib, self.args.tensors)
        self.tensors = list(self.state.values())
        for number, tensor in enumerate(self.tensors):
            for at, numbers in pieces(self.rank, number, tensor):
                tensor.detach().view(-1)[at : at + len(numbers)] = numbers
        torch.set_num_threads(self.args.threads)
        return {
            "pid": os.getpid(),
            "state_bytes": sum(tensor.nbytes for tensor in self.tensors),
            "tensors": len(self.tensors),
            "overlapping": self.system.overlapping,
            "torch": torch.__version__,
        }

    def do_start(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.system.start(self.state)
        return {"start_s": time.perf_counter() - begin}

    def do_plain(self, n: int) -> dict[str, Any]:
        return {"steps_ms": [self.step()["step_ms"] for _ in range(n)]}

    def do_save(self, step: int) -> dict[str, Any]:
        found = self.save_and_step(step)
        self.system.wait()
        found.setdefault("lag_ms", self.since_save_ms())
        return found

    def do_busy(self, step: int, most: int) -> dict[str, Any]:
        """``steps_ms``: the steps after the first that began and ended before the save was complete."""
        found = self.save_and_step(step)
        steps: list[float] = []
        while "lag_ms" not in found and len(steps) < most:
            took_ms = self.step()["step_ms"]
            if self.system.done():
                found["lag_ms"] = self.since_save_ms()
            else:
                steps.append(took_ms)
        self.system.wait()
        found.setdefault("lag_ms", self.since_save_ms())
        return {**found, "steps_ms": steps}

    def do_pressed(self, step: int, saves: int, every: int) -> dict[str, Any]:
        """``run_ms``: every step in order, the first of each ``every`` with a save. ``blocking_ms``: of those."""
        blocking, run = [], []
        for number in range(saves):
            found = self.save_and_step(step + number)
            blocking.append(found["blocking_ms"])
            run += [found["step_ms"], *(self.step()["step_ms"] for _ in range(every - 1))]
        self.system.wait()
        return {"blocking_ms": blocking, "run_ms": run}

    def do_kept(self, step: int) -> dict[str, Any]:
        return {"call_ms": 1e3 * self.call(step), "updates": self.updates}

    def do_verify(self, step: int, updates: int = -1) -> dict[str, Any]:
        """``found``: "ok", "older" (whole, but of another save), "torn" (of several steps) or "wrong"."""
        self.system.wait()
        want = updates if updates >= 0 else self.saved[step]
        loaded = self.system.load(step)
        if missing := sorted(set(self.state) - set(loaded)):
            return {"found": "wrong", "why": f"{len(missing)} tensors are missing, such as {missing[0]}"}
        seen: set[float] = set()
        for number, (name, tensor) in enumerate(self.state.items()):
            got = loaded[name].detach()
            if got.shape != tensor.shape:
                return {"found": "wrong", "why": f"{name} has the shape {tuple(got.shape)}"}
            for at, numbers in pieces(self.rank, number, tensor):
                steps = got.reshape(-1)[at : at + len(numbers)] - numbers
                seen |= {steps.min().item(), steps.max().item()}
        if self.system.loads_in_place:
            self.updates = want
        if seen == {float(want)}:
            return {"found": "ok", "why": ""}
        if any(value != int(value) or not 0 <= value <= max(self.updates, want) for value in seen):
            return {"found": "wrong", "why": f"numbers that never were in it: {sorted(seen)[:3]}"}
        which = f"updates {sorted(map(int, seen))[:4]} instead of {want}"
        return {"found": "older" if len(seen) == 1 else "torn", "why": which}

    def do_forget(self, step: int) -> dict[str, Any]:
        if self.rank == 0:
            self.system.forget(step)
        return {}

    def do_close(self) -> dict[str, Any]:
        self.system.close()
        return {}

    # -- parts of them -------------------------------------------------------------------------------------------

    def save_and_step(self, step: int) -> dict[str, Any]:
        """The call, and the step after it. ``lag_ms`` is there if the save is already as durable as it gets."""
        call_ms = 1e3 * self.call(step)
        found: dict[str, Any] = {"call_cpu_ms": 1e3 * self.save_cpu_s}
        if self.system.done():
            found["lag_ms"] = call_ms
        after = self.step()
        if "lag_ms" not in found and self.system.done():
            found["lag_ms"] = self.since_save_ms()
        blocking_ms = call_ms + after["guard_ms"]
        found |= {"call_ms": call_ms, "guard_ms": after["guard_ms"], "blocking_ms": blocking_ms}
        return found | {"step_ms": call_ms + after["step_ms"]}

    def since_save_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self.save_began)

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """``variant`` in a command chooses the way to save from then on."""
        name = command.pop("do")
        if self.system.variants:
            self.system.variant = command.pop("variant", "") or self.system.variant
        command.pop("variant", None)
        answer = getattr(self, f"do_{name}")(**command)
        return {"ok": True, "fsynced": self.system.fsynced, "persistent": self.system.persistent, **answer}


PIECE = 1 << 22
PATTERN = ((torch.arange(PIECE) * 7919) % 2**19).float()


def pieces(rank: int, number: int, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset, what the elements from there are before the first update) for a tensor, 16 MiB at a time."""
    for at in range(0, tensor.numel(), PIECE):
        shift = (number * 104729 + at // PIECE * 15485863 + rank * 1299709) % 2**19
        yield at, PATTERN[: tensor.numel() - at] + shift


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", metavar="MODULE:CLASS")
    parser.add_argument("--work", required=True, help="directory that all ranks of the system share")
    parser.add_argument("--mib", type=int, default=64, help="size of the state of this rank")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--multiplications", type=int, default=4, help="of 512 × 512 matrices in a step")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=600, help="of collectives")
    parser.add_argument("--resuming", action="store_true", help="the process that saved was killed")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a system prints goes to the log
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        last = command["do"] == "close"
        try:
            if worker is None:
                worker = Worker(args)
            answer = worker.obey(command)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's CheckpointException is no Exception
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        if last:
            break


if __name__ == "__main__":
    main()
