"""One life of a job, in which somebody dies, or stops, at the start or the end of one span.

Two ranks and their saver. The process that comes to the span is held there (it stops itself); then the victims are
killed, or stopped and later continued. What has to follow, whatever the case: every wait ends soon, a restart takes
the newest attempt that all ranks had sealed, with the bytes of its step, rank and life, the next save becomes a
checkpoint, and nothing is left in shared memory, queues or processes.

A span belongs to an act of the story: the one in which it is reached.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.hooks import faults
from faults.programs import COUNT, LIFE, all_do, leave, obeys
from harness import Lab, Process, alive, kill, until
from nursery import coded
from team import committed, whole

ACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "save": (
        ("plan", "lease", "fill", "seal", "queue", "wake"),
        ("claim", "persist", "receipt", "publish", "retention"),
    ),
    "restart": (("attach", "spawn", "restore", "verify"), ("start", "recover")),
    "death": ((), ("breakpoint",)),
    "end": (("goodbye",), ("retire",)),
}
"""Act → the spans of a rank, and those of the saver, that are reached in it."""

VICTIMS = ("rank", "ranks", "saver", "both")
SIGNALS = ("kill", "stop")
PHASES = ("started", "complete")
OF_RANKS = {span for spans, _ in ACTS.values() for span in spans}
ACT_OF = {span: act for act, both in ACTS.items() for spans in both for span in spans}

SOON_S = 20.0
"""No answer may take longer, whoever died: a second to notice, one to start a saver, and a busy machine."""

STOPPED_S = 0.3
"""How long the stopped ones stay so, while the others go on as far as they can."""


@dataclass(frozen=True, slots=True)
class Case:
    """``victim`` is what dies when ``span`` is at ``phase``: the rank that is there, all ranks, the saver, or both."""

    span: str
    phase: str
    victim: str
    signal: str

    def __str__(self) -> str:
        return f"{self.span}:{self.phase} {self.signal} {self.victim}"

    @property
    def possible(self) -> bool:
        """There is no saver to hit before the first one is started."""
        return (self.span, self.phase, self.victim) != ("spawn", "started", "saver")


def every_case() -> list[Case]:
    """All that can happen."""
    cases = itertools.starmap(Case, itertools.product(ACT_OF, PHASES, VICTIMS, SIGNALS))
    return [case for case in cases if case.possible]


def telling_cases() -> list[Case]:
    """For each span and phase the death that leaves most to others; and stops, where somebody waits for the stopped."""
    found = []
    for span in ACT_OF:
        found.append(Case(span, "started", "rank" if span in OF_RANKS else "saver", "kill"))
        found.append(Case(span, "complete", "both", "kill"))
    found += [Case(span, "started", "rank", "stop") for span in ("seal", "attach")]
    found += [Case(span, "started", "saver", "stop") for span in ("persist", "start")]
    return found


@dataclass
class Story:
    """``run`` raises AssertionError where the story does not go as promised; ``told`` says what the restart found."""

    lab: Lab
    case: Case
    ranks: list[Process] = field(default_factory=list)
    life: int = 0
    told: str = ""

    def run(self) -> None:
        self._begin()
        act: Callable[[], int] = getattr(self, f"_{ACT_OF[self.case.span]}")
        expected = act()
        if not self.ranks:
            self._start()
            self._restores(expected)
        self._finish()

    # -- lives -------------------------------------------------------------------------------------------------------

    def _born(self) -> None:
        """Two ranks on their way to ``ready``."""
        self.life += 1
        grace_s = 0.3 if self.case.span == "breakpoint" else 2.0
        options = {"keep_last": 1, "saver": {"grace_s": grace_s, "linger_s": 30.0}}
        both = f"{self.case.span}:{self.case.phase}:*:stop"
        once, when = str(self.lab.dir / "once"), str(self.lab.dir / "armed")
        only_first = self.case.span in OF_RANKS - {"spawn"}
        group = str(self.lab.dir / f"group-{self.life}")
        self.ranks = [
            self.lab.rank(
                obeys,
                options,
                rank=rank,
                world=2,
                group=group,
                env=faults("" if only_first and rank else both, once=once, when=when),
            )
            for rank in (0, 1)
        ]

    def _start(self) -> None:
        self._born()
        for rank in self.ranks:
            rank.expect("ready", SOON_S)

    def _begin(self) -> None:
        """Step 1 is a checkpoint, step 2 a snapshot. A new run, where its claim is the place."""
        self._start()
        self._do("storage", step=1)
        self._do("result", step=1)
        self._do("memory", step=2)
        if self.case.span == "claim":
            self._restores(2)

    def _do(self, verb: str, **how: Any) -> list[dict[str, Any]]:
        said = all_do(self.ranks, verb, SOON_S, life=self.life, **how)
        wrong = [one for one in said if one["error"]]
        _hold(not wrong, f"{verb} {how}: {wrong}")
        return said

    def _restores(self, step: int) -> None:
        """All ranks get ``step``, from one source, with the bytes of the life that saved it: always the first one."""
        said = self._do("restore")
        self.told = f"step {said[0]['step']} from {said[0]['source']}"
        _hold(all(one["step"] == step and one["whole"] for one in said), f"step {step} was expected: {said}")
        _hold({(one["life"], one["source"]) for one in said} == {(1, said[0]["source"])}, f"of another life: {said}")

    def _end_ranks(self) -> None:
        """What a launcher does when one rank is dead: end the others."""
        for rank in self.ranks:
            rank.kill()
        self.ranks = []

    def _finish(self) -> None:
        """The next save becomes a checkpoint, and a clean end leaves nothing but it."""
        import torch

        self._do("storage", step=7)
        self._do("result", step=7)
        leave(self.ranks)
        for rank in (0, 1):
            found = torch.load(Path(self.lab.root, "global_step7", f"rank{rank}.pt"), weights_only=True)["w"]
            _hold(torch.equal(found, coded(7, rank, COUNT) + LIFE * self.life), "not the bytes of step 7")
        until(lambda: not self.lab.savers(), SOON_S, self.lab.saver_log())
        there = committed(self.lab.root)
        _hold(there[:1] == [(7, "global_step7")], f"committed: {there}")
        may_stay = [[], [(3, "global_step3")]]  # a slot may hold it
        if self.life > 1:  # and step 2, if the restart took longer than the grace
            may_stay.append([(2, "global_step2")])
        _hold(there[1:] in may_stay, f"retention left {there}")
        _hold(whole(self.lab.root), "a committed checkpoint does not verify")

    # -- acts --------------------------------------------------------------------------------------------------------

    def _save(self) -> int:
        """Step 3 goes to storage; each rank that is not held has returned from the save when it happens."""
        self._arm()
        for rank in self.ranks:
            rank.tell("do", verb="storage", step=3, life=self.life)
        held = self._held()
        in_save = [rank for rank in self.ranks if rank.pid == held]
        for rank in self.ranks:
            if rank not in in_save:
                _hold(rank.expect("storage", SOON_S)["error"] == "", "a save that nobody held")
        if self._strike(held):
            for rank in in_save:
                _hold(rank.expect("storage", SOON_S)["error"] == "", "the held save")
            self._do("result", step=3, timeout_s=SOON_S)
            self._restores(3)
            return 3
        survivors = [rank for rank in self.ranks if alive(rank.pid)]
        if len(survivors) == 2:
            for rank in in_save:
                _hold(rank.expect("storage", SOON_S)["error"] == "", "the save of a rank whose saver died")
            self._do("result", step=3, timeout_s=SOON_S)
        elif survivors:
            said = all_do(survivors, "result", SOON_S, step=3, timeout_s=SOON_S)[0]
            known = ("",) if self._queued else ("", "AttemptFailed") if self._sealed else ("AttemptFailed",)
            _hold(said["error"] in known, f"one of {known} was expected: {said}")
        done = len(survivors) == 2 or self._sealed
        self._end_ranks()
        return 3 if done else 2

    @property
    def _sealed(self) -> bool:
        """The rank that is held has sealed step 3."""
        order = [*ACTS["save"][0], *ACTS["save"][1]]
        seal = order.index("seal")
        where = order.index(self.case.span)
        return where > seal or (where == seal and self.case.phase == "complete")

    @property
    def _queued(self) -> bool:
        return self._sealed and (self.case.span, self.case.phase) not in (("seal", "complete"), ("queue", "started"))

    def _restart(self) -> int:
        """All ranks were killed (and the saver, for what happens while one starts); the next life meets the fault."""
        saver = self.lab.saver()
        self._end_ranks()
        if self.case.span in ("spawn", "start", "recover") and saver:
            kill(saver)
        if self.case.span not in ("restore", "verify"):
            self._arm()
            self._born()
            event, verb = "ready", ""
        else:
            self._start()
            self._arm()
            event = verb = "restore"
            for rank in self.ranks:
                rank.tell("do", verb=verb)
        survived = self._strike(self._held())
        if survived or all(alive(rank.pid) for rank in self.ranks):
            for rank in self.ranks:
                said = rank.expect(event, SOON_S)
                _hold(not said.get("error"), f"{event}: {said}")
            if not verb:
                self._restores(2)
            return 2
        for rank in self.ranks:  # its peers are told, or are through already
            if alive(rank.pid):
                _hold(rank.hear(SOON_S)["event"] in (event, "raised"), "a word of the survivor")
        self._end_ranks()
        return 2

    def _death(self) -> int:
        """Rank 1 dies, and after ``grace_s`` its saver saves for it; rank 0 lives on."""
        self._arm()
        self.ranks[1].kill()
        held = self._held()
        self._strike(held)
        if alive(self.ranks[0].pid):
            said = all_do(self.ranks[:1], "memory", SOON_S, step=3, life=self.life)[0]
            _hold(said["error"] == "", f"the peer of a dead rank: {said}")
        self._end_ranks()
        return 2

    def _end(self) -> int:
        """A clean end after step 3 was committed; a new life may come while the saver leaves."""
        self._do("storage", step=3)
        self._do("result", step=3)
        self._arm()
        for rank in self.ranks:
            rank.tell("do", verb="close")
        held = self._held()
        leaving = [rank for rank in self.ranks if rank.pid != held]
        for rank in leaving:
            _hold(rank.expect("close", SOON_S)["error"] == "", "a clean end")
        if self.case.span == "retire":
            for rank in leaving:
                rank.end()
            self._born()
            until(lambda: all(rank.began() for rank in self.ranks), SOON_S, "the next life")
            if not self._strike(held) and self.case.victim != "saver":
                self._end_ranks()
                return 3
            for rank in self.ranks:
                rank.expect("ready", SOON_S)
            self._restores(3)
            return 3
        survived = self._strike(held)
        for rank in self.ranks:
            if survived or (self.case.victim == "saver"):
                if rank not in leaving:
                    _hold(rank.expect("close", SOON_S)["error"] == "", "a clean end")
                rank.end()
        self._end_ranks()
        return 3

    # -- the blow ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        (self.lab.dir / "armed").touch()

    def _held(self) -> int:
        """The pid of the process that is at the place, once it stands still."""
        once = self.lab.dir / "once"
        until(lambda: once.exists() and once.read_text(), SOON_S, f"nobody came to {self.case.span}")
        pid = int(once.read_text())
        until(lambda: stopped(pid), SOON_S, "the stop")
        return pid

    def _strike(self, held: int) -> bool:
        """Kill or stop the victims; True if all of them live on."""
        saver = self.lab.saver() if held in {rank.pid for rank in self.ranks} else held
        at = [rank.pid for rank in self.ranks if rank.pid == held] or [self.ranks[0].pid]
        all_ranks = [rank.pid for rank in self.ranks if alive(rank.pid)]
        ranks = {"rank": at, "ranks": all_ranks, "saver": [], "both": all_ranks}[self.case.victim]
        victims = [*ranks, *([saver] if saver and self.case.victim in ("saver", "both") else [])]
        _hold(bool(victims), "nobody to hit")
        number = signal.SIGKILL if self.case.signal == "kill" else signal.SIGSTOP
        for pid in victims:
            os.kill(pid, number)
        if self.case.signal == "kill":
            until(lambda: not any(map(alive, victims)), SOON_S, "the deaths")
            if held not in victims:
                os.kill(held, signal.SIGCONT)
            return False
        # At its goodbye the other rank waits for nobody, and may have ended in the meantime.
        until(lambda: all(stopped(pid) or not alive(pid) for pid in victims), SOON_S, "the stops")
        if held not in victims:
            os.kill(held, signal.SIGCONT)
        time.sleep(STOPPED_S)  # the others go on meanwhile, as far as they can
        for pid in {*victims, held}:
            os.kill(pid, signal.SIGCONT)
        return True


def stopped(pid: int) -> bool:
    """True for a process that a signal has stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _hold(true: bool, promise: str) -> None:
    """No assert: this is no test module, see python -O."""
    if not true:
        raise AssertionError(promise)
