"""Random deaths, for as long as you like: ranks train and save, somebody dies or stops, the job starts again.

    python tests/soak.py [--minutes 10] [--seed N]

First, what 1,000 saves and 50 killed lives cost. Then two to four ranks and their saver save position-, rank-, step-
and life-coded tensors to memory, each fourth time to storage. At a random instant a rank, all of them, the saver or
both are killed, or stopped and continued; a launcher ends the others and starts the job again. Sometimes the job
leaves in order, and sometimes nobody comes back until the saver has left. One line per incident: who, when, what was
restored. The seed repeats the choice of victims and of delays; how far a process has come at that instant is up to
the machine.

Exit code 1 if a step was lost that every rank had returned from, if bytes are not those of their step, rank and
life, if anybody waits longer than ``SOON_S``, or if anything is left behind.
"""

from __future__ import annotations

import argparse
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from faults.counts import lives, many_saves
from faults.programs import LIFE
from faults.story import stopped
from harness import Lab, Process, alive, kill, until
from team import whole

SOON_S = 30.0
COUNT = 50_000
KINDS = {
    "kill rank": 5, "kill ranks": 4, "kill saver": 4, "kill both": 4, "stop rank": 2, "stop saver": 2,
    "stop all": 1, "leave": 2, "kill ranks, come back late": 2,
}  # fmt: skip
"""What may happen, and how often."""


def trains(me: Any, life: int, pace_s: float) -> None:
    """Rank program: resume, then save at every step until told to leave; a barrier keeps the ranks in step."""
    import torch

    engine = me.engine(keep_last=2, wait_s=SOON_S, saver={"grace_s": 1.0, "linger_s": 5.0})
    report = engine.restore()
    facts: dict[str, Any] = {"life": 0, "whole": True}
    if report.step:
        own = report.state[f"rank{me.rank}.pt"]["w"]
        facts["life"] = int(own[-1]) // LIFE
        facts["whole"] = torch.equal(own, me.coded(report.step, COUNT) + LIFE * facts["life"])
    skipped = [f"{one.step} from {one.source}: {one.reason}" for one in report.skipped]
    me.say("resumed", step=report.step, source=report.source, skipped=skipped, **facts)
    step = report.step
    while True:
        leaving = torch.tensor([bool(select.select([me._commands], [], [], pace_s)[0])])
        torch.distributed.all_reduce(leaving, torch.distributed.ReduceOp.MAX)  # the training step
        if leaving.item():
            engine.close()
            me.say("left")
            return
        step += 1
        state = {f"rank{me.rank}.pt": {"w": me.coded(step, COUNT) + LIFE * life}}
        if step % 4 == 0:
            engine.save_to_storage(step, state)
        else:
            engine.save_to_memory(step, state)
        me.say("saved", step=step)


class Trouble(AssertionError):
    """A promise that was not kept."""


class Job:
    """One root and its lives, as a launcher sees them."""

    def __init__(self, dice: random.Random, world: int) -> None:
        self.lab = Lab()
        self.dice = dice
        self.world = world
        self.ranks: list[Process] = []
        self.last: list[int] = []  # of each rank, the last step it returned from
        self.raised: list[dict[str, Any]] = []
        self.who = ""
        self.life = 0
        self.resumed: dict[int, int] = {0: 0}  # life → the step it began with
        self.reached: dict[int, int] = {0: 0}  # life → the last step that any rank returned from
        self.safe = 0  # the last step that every rank returned from
        self.stored = 0  # the last one of them that went to storage
        self.saves = 0

    def start(self) -> str:
        """A new life; what it resumed from. Raises Trouble."""
        self.life += 1
        begin = time.monotonic()
        pace_s = self.dice.choice((0.0, 0.002, 0.02))
        self.ranks = self.lab.ranks(trains, self.life, pace_s, world=self.world)
        found = [rank.expect("resumed", SOON_S) for rank in self.ranks]
        first = found[0]
        step, life = first["step"], first["life"]
        if any((one["step"], one["source"], one["life"]) != (step, first["source"], life) for one in found):
            raise Trouble(f"the ranks do not agree: {found}")
        if not all(one["whole"] for one in found):
            raise Trouble(f"wrong bytes: {found}")
        if step < self.safe:
            raise Trouble(f"lost: every rank had returned from step {self.safe}, resumed from {found}")
        if not self.resumed.get(life, step) <= step <= self.reached.get(life, -2) + 1:
            raise Trouble(f"step {step} is not of life {life}, which went to {self.reached.get(life)}")
        took_s, safe = time.monotonic() - begin, self.safe
        self.resumed[self.life] = self.reached[self.life] = self.safe = step
        self.last = [step] * self.world
        return f"step {step} of life {life} from {first['source']} (safe: {safe}), {took_s:.1f} s"

    def listen(self) -> list[int]:
        """Take what the ranks said; the last step of each of them."""
        for number, rank in enumerate(self.ranks):
            rank.drain()
            told, rank._told = rank._told, []
            self.raised += [one for one in told if one["event"] == "raised"]
            steps = [one["step"] for one in told if one["event"] == "saved"]
            self.saves += len(steps)
            self.last[number] = max([self.last[number], *steps])
        self.safe = max(self.safe, min(self.last))
        if self.safe // 4 * 4 > self.resumed[self.life]:
            self.stored = self.safe // 4 * 4
        self.reached[self.life] = max(self.reached[self.life], *self.last)
        return list(self.last)

    def train(self, seconds: float) -> None:
        """Let it go on for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))
            self.listen()

    def goes_on(self) -> None:
        """Every rank returns from another save, soon. Raises Trouble."""
        before = self.listen()
        try:
            until(lambda: all(b > a for a, b in zip(before, self.listen(), strict=True)), SOON_S, "progress")
        except AssertionError as error:
            logs = "\n".join(rank.log.read_text()[-1500:] for rank in self.ranks)
            raise Trouble(f"hangs: {before} and no further, {error}\n{logs}\n{self.lab.saver_log()[-2000:]}") from error
        if self.raised:
            raise Trouble(f"a rank raised: {self.raised}")

    def end_ranks(self) -> None:
        """What a launcher does when one is dead; that its peers raised meanwhile is right."""
        for rank in self.ranks:
            rank.kill()
        self.listen()
        self.raised = []

    # -- incidents ---------------------------------------------------------------------------------------------------

    def incident(self, kind: str) -> str:
        """Let ``kind`` happen now, and the job go on; what was restored. Raises Trouble."""
        if kind == "leave":
            return self._leave()
        saver = self.lab.saver()
        verb, _, who = kind.partition(",")[0].partition(" ")
        some = [self.dice.choice(self.ranks)] if who == "rank" else self.ranks if who != "saver" else []
        victims = [rank.pid for rank in some] + ([saver] if saver and who in ("saver", "both", "all") else [])
        self.who = f"{[self.ranks.index(rank) for rank in some]} {'+ saver' if saver in victims else ''}"
        if verb == "stop":
            return self._stop(victims)
        for pid in victims:
            kill(pid, signal.SIGKILL)
        if who == "saver":
            self.goes_on()
            return f"went on (safe: {self.safe})"
        time.sleep(self.dice.random() * 0.3)  # a launcher takes its time
        self.end_ranks()
        if kind.endswith("late"):
            until(lambda: not self.lab.savers() and not self.lab.left(), SOON_S, self.lab.saver_log()[-3000:])
        return self.start()

    def _stop(self, victims: list[int]) -> str:
        for pid in victims:
            kill(pid, signal.SIGSTOP)
        until(lambda: all(stopped(pid) or not alive(pid) for pid in victims), SOON_S, "stops")
        self.train(self.dice.random())
        for pid in victims:
            kill(pid, signal.SIGCONT)
        self.goes_on()
        return f"went on (safe: {self.safe})"

    def _leave(self) -> str:
        """A clean end: what was memory only may go, what went to storage may not."""
        self.ranks[0].tell("leave")
        for rank in self.ranks:
            rank.join(SOON_S)
        self.listen()
        until(lambda: not self.lab.savers() and not self.lab.left(), SOON_S, self.lab.saver_log()[-3000:])
        if not whole(self.lab.root):
            raise Trouble("a committed checkpoint does not verify")
        self.safe, self.who = self.stored, ""
        return self.start()

    def close(self) -> None:
        """The job ends; nothing of it may be left. Raises Trouble."""
        try:
            self._leave_for_good()
        finally:
            remains = self.lab.close()
        if remains:
            raise Trouble(f"left behind: {remains}")

    def _leave_for_good(self) -> None:
        self.ranks[0].tell("leave")
        for rank in self.ranks:
            rank.join(SOON_S)


def costs(name: str, count: Callable[[Lab], str]) -> list[str]:
    """Print what many saves or lives cost; the trouble, if something grew or was left."""
    lab = Lab()
    try:
        print(count(lab), flush=True)
        trouble = ""
    except AssertionError as error:
        trouble = f"{name}: {error}"
    remains = lab.close()
    trouble = trouble or (f"{name}: left behind: {remains}" if remains else "")
    if trouble:
        print(f"TROUBLE {trouble}", flush=True)
    return [trouble] if trouble else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    dice, begin = random.Random(seed), time.monotonic()
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    counts: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    troubles: list[str] = []
    saves = number = 0
    troubles += costs("saves", lambda lab: many_saves(lab, 1000, storage_every=2))
    troubles += costs("lives", lambda lab: lives(lab, 50))
    begin = time.monotonic()
    while time.monotonic() - begin < 60 * options.minutes:
        kind, job = "start", Job(dice, dice.choice((2, 2, 3, 4)))
        try:
            job.start()
            for _ in range(25):
                job.train(dice.random() ** 2 * 1.5)
                kind = dice.choices(list(KINDS), KINDS.values())[0]
                at, life = time.monotonic() - begin, job.life
                found = job.incident(kind)
                counts[kind] += 1
                for source in ("memory", "storage"):
                    sources[source] += f"from {source}" in found
                print(
                    f"{at:7.2f} s  {job.world} ranks, life {life:2}: {kind + ' ' + job.who:35} → {found}",
                    flush=True,
                )
                if time.monotonic() - begin > 60 * options.minutes:
                    break
            kind = "the last leave"
            job.close()
        except AssertionError as error:
            troubles.append(f"{time.monotonic() - begin:.2f} s, {job.world} ranks, life {job.life}: {kind}: {error}")
            print(f"TROUBLE {troubles[-1]}", flush=True)
            job.lab.close()
        saves, number = saves + job.saves, number + job.life
    print(f"seed {seed}: {sum(counts.values())} incidents in {time.monotonic() - begin:.0f} s: {dict(counts)}")
    print(f"{saves} saves returned, {number} lives, restored {dict(sources)}, {len(troubles)} troubles")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
