"""All ranks of a job, told what to do by a test: ``Team(lab, "aabb")`` has four ranks on two simulated nodes.

``team.all("save", step=5)`` lets every rank save and returns what each of them answers, in rank order; ``team.one(2,
…)`` tells one. An error of ours is an answer too: ``{"error": "StorageFull", "text": …, …}``. The state of rank r at
step s is coded: ``{"rank<r>.pt": {"w": coded(s, r), …}}``, so that a wrong rank, step or byte shows at restore.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import Lab, Process, kill, until

from ckpt_engine import listing
from ckpt_engine.errors import NotFound
from ckpt_engine.names import Names
from ckpt_engine.slots import Slot
from ckpt_engine.storage.posix import PosixStorage

HOOK = {"CKPT_ENGINE_HOOK": "faulty:hook"}


class Team:
    """One life of a job. ``nodes``: one letter for each rank; ``roots``: letter → directory, where they differ."""

    def __init__(self, lab: Lab, nodes: str, *, roots: dict[str, str] | None = None, **options: Any) -> None:
        self.lab = lab
        self.nodes = nodes
        self.options = options
        lab._groups += 1
        group = str(lab.dir / f"group-{lab._groups}")
        self.ranks: list[Process] = []
        for rank, node in enumerate(nodes):
            env = {**HOOK, "CKPT_ENGINE_FAULTS": str(lab.dir / "faults"), "CKPT_ENGINE_NODE": node}
            told = {**options, "node_id": node, "root": (roots or {}).get(node, lab.root)}
            self.ranks.append(lab.rank(member, told, rank=rank, world=len(nodes), group=group, env=env))

    def open(self) -> Team:
        """Make every rank's engine."""
        self.ok("open")
        return self

    def all(self, verb: str, within_s: float = 40.0, **how: Any) -> list[dict[str, Any]]:
        return self.some(range(len(self.ranks)), verb, within_s, **how)

    def some(self, ranks: Sequence[int], verb: str, within_s: float = 40.0, **how: Any) -> list[dict[str, Any]]:
        self.tell(ranks, verb, **how)
        return [self.hear(rank, within_s) for rank in ranks]

    def one(self, rank: int, verb: str, within_s: float = 40.0, **how: Any) -> dict[str, Any]:
        return self.some([rank], verb, within_s, **how)[0]

    def tell(self, ranks: Sequence[int], verb: str, **how: Any) -> None:
        for rank in ranks:
            self.ranks[rank].tell("do", verb=verb, how=how)

    def hear(self, rank: int, within_s: float = 40.0) -> dict[str, Any]:
        return self.ranks[rank].expect("done", within_s)

    def ok(self, verb: str, **how: Any) -> list[dict[str, Any]]:
        """``all``; no rank may answer with an error."""
        answers = self.all(verb, **how)
        bad = [(rank, answer["error"], answer["text"]) for rank, answer in enumerate(answers) if "error" in answer]
        assert not bad, bad
        return answers

    def save(self, step: int, **how: Any) -> list[dict[str, Any]]:
        """A memory save of all ranks."""
        return self.ok("save", step=step, storage=False, **how)

    def commit(self, step: int, **how: Any) -> list[dict[str, Any]]:
        """A storage save of all ranks, and its commit."""
        self.ok("save", step=step, storage=True, **how)
        return self.ok("result", step=step)

    def restore(self, step: int | None = None, **how: Any) -> dict[str, Any]:
        """The one answer of all ranks; each of them has checked that its bytes are those of that step and rank."""
        answers = self.ok("restore", step=step, **how)
        assert len({(a["step"], a["source"], a["line"]) for a in answers}) == 1, answers
        return answers[0]

    def leave(self) -> None:
        """Everybody closes and goes."""
        self.ok("close")
        self.end()

    def end(self) -> None:
        self.tell(range(len(self.ranks)), "end")
        for process in self.ranks:
            process.end()

    def kill(self) -> None:
        """SIGKILL all ranks at one time."""
        for process in self.ranks:
            os.kill(process.pid, 9)
        for process in self.ranks:
            process.kill()


def faults(lab: Lab, *rules: dict[str, Any]) -> None:
    """From now on these rules count, and no others."""
    path = lab.dir / "faults.tmp"
    path.write_text(json.dumps(rules))
    os.replace(path, lab.dir / "faults")


def hits(lab: Lab) -> list[dict[str, Any]]:
    path = lab.dir / "hits"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_saver(lab: Lab, node: str) -> None:
    pid = lab.saver(lab.names(node_id=node))
    if pid:
        kill(pid)


def committed(root: str) -> list[tuple[int, str]]:
    """(step, tag) of every committed checkpoint, newest first."""
    found = listing.list_committed(PosixStorage(), root)
    assert not found.damaged
    return [(one.manifest.attempt.step, os.path.basename(one.commit_dir)) for one in found.committed]


def whole(root: str) -> bool:
    """Every committed checkpoint verifies, bit for bit; one that retention removes meanwhile is none."""
    storage = PosixStorage()
    while True:
        with contextlib.suppress(NotFound):
            return not any(listing.verify(storage, one) for one in listing.list_committed(storage, root).committed)


def slots(names: Names) -> list[tuple[Slot, int]]:
    """(slot, step) of every snapshot in the memory of a node."""
    opened = [slot for name in names.segments() if (slot := Slot.open(name)) is not None]
    return [(slot, found[1].attempt.step) for slot in opened if (found := slot.snapshot()) is not None]


def until_committed(root: str, step: int, within_s: float = 20.0) -> None:
    until(lambda: any(found == step for found, _ in committed(root)), within_s, f"commit of step {step}")


# -- the rank's side -------------------------------------------------------------------------------------------------


def member(me: Any, options: dict[str, Any]) -> None:
    """Rank program: does what it is told, until "end"."""
    rank = Member(me, options)
    while (told := me.hear("do", within_s=120))["verb"] != "end":
        try:
            answer = getattr(rank, told["verb"])(**told["how"]) or {}
        except Exception as error:
            traceback.print_exc()
            facts = {key: value for key, value in vars(error).items() if isinstance(value, (int, str, tuple, list))}
            answer = {**facts, "error": type(error).__name__, "text": str(error)}
        me.say("done", **answer)


class Member:
    def __init__(self, me: Any, options: dict[str, Any]) -> None:
        self.me = me
        self.options = options
        self.engine: Any = None
        self.handles: dict[int, Any] = {}
        self.report: Any = None

    def open(self, **changes: Any) -> None:
        self.engine = self.me.engine(**{**self.options, **changes})

    def save(
        self, step: Any, storage: bool, line: str = "", count: int = 1000, empty: bool = False, **how: Any
    ) -> dict[str, Any]:
        state = {} if empty else self.state(step, line, count)
        before = _now()
        if storage:
            handle = self.handles[step] = self.engine.save_to_storage(step, state, **how)
            staged = handle.staged
        else:
            staged = self.engine.save_to_memory(step, state, **how)
        return {
            "step": staged.step,
            "order": staged.attempt.order,
            "skipped": staged.skipped,
            "seconds": _now() - before,
        }

    def state(self, step: int, line: str, count: int) -> dict[str, Any]:
        import torch

        rng = torch.Generator().manual_seed(1000 * step + self.me.rank)
        own = {"w": self.me.coded(step, count), "rng": rng.get_state(), "step": step, "line": line}
        files: dict[str, Any] = {f"rank{self.me.rank}.pt": own}
        if self.me.rank == 0:
            files["sub/model.pt"] = {"step": step, "w": torch.full((count,), float(step))}
        return files

    def result(self, step: int, timeout_s: float | None = None) -> dict[str, Any]:
        published = self.handles[step].result(timeout_s)
        return {"step": published.step, "path": published.path}

    def rounds(self, first: int, count: int, tag: str = "") -> dict[str, Any]:
        """``count`` storage saves in step with the other ranks, each awaited; how many raised."""
        import torch

        errors = []
        for step in range(first, first + count):
            torch.distributed.barrier()
            try:
                self.engine.save_to_storage(step, self.state(step, "", 1000), tag=tag).result()
            except Exception as error:
                traceback.print_exc()
                errors.append(f"{step}: {type(error).__name__}: {error}")
        return {"errors": errors}

    def done(self, step: int) -> dict[str, Any]:
        return {"done": self.handles[step].done()}

    def wait(self, **how: Any) -> dict[str, Any]:
        return {"steps": [one.step for one in self.engine.wait(**how)]}

    def restore(self, step: int | None = None, **how: Any) -> dict[str, Any]:
        self.report = report = self.engine.restore(step, **how)
        line = ""
        if report.source is not None:
            line = report.state[f"rank{self.me.rank}.pt"]["line"]
            self.check()
        return {
            "step": report.step,
            "source": report.source,
            "line": line,
            "skipped": [(one.step, one.source, one.reason) for one in report.skipped],
            "unmanaged": list(report.unmanaged),
            "generation": self.engine._core.claim.generation,
        }

    def check(self) -> None:
        """What was restored is what this rank saved at that step, still."""
        import torch

        own, step = self.report.state[f"rank{self.me.rank}.pt"], self.report.step
        rng = torch.Generator().manual_seed(1000 * step + self.me.rank)
        count = own["w"].numel()
        if not (own["step"] == step and torch.equal(own["w"], self.me.coded(step, count))):
            raise ValueError(f"rank {self.me.rank}: not the state of step {step}: {own}")
        if not torch.equal(own["rng"], rng.get_state()):
            raise ValueError("another rank's random numbers")
        for name in self.report.state:
            if name == "sub/model.pt" and not bool((self.report.state[name]["w"] == step).all()):
                raise ValueError(f"{name} is not of step {step}")

    def reduce(self) -> dict[str, Any]:
        """The user's own collective: does everybody come?"""
        import torch

        one = torch.ones(1)
        torch.distributed.all_reduce(one)
        return {"sum": int(one)}

    def call(self, code: str) -> dict[str, Any]:
        """Run ``code`` with ``engine``, ``me`` and ``report``; its ``answer`` is the answer."""
        space = {"engine": self.engine, "me": self.me, "report": self.report, "member": self, "answer": {}}
        exec(code, space)
        answer: dict[str, Any] = space["answer"]
        return answer

    def close(self, **how: Any) -> None:
        self.engine.close(**how)

    def leave_by_exception(self) -> None:
        try:
            with self.engine:
                raise RuntimeError("in the training loop")
        except RuntimeError:
            pass


def _now() -> float:
    import time

    return time.monotonic()


__all__ = ["Callable", "Path", "Team", "committed", "faults", "hits", "kill_saver", "slots", "until_committed", "whole"]
