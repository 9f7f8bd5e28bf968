"""Stop a scenario after each of its steps, cut the power in every way, recover, check; and count."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disk_model import Killed, recover, refuse

from .checks import Broken, check, check_live, check_recovered, require
from .choices import Choice, selections
from .fault_disk import FaultDisk, Step
from .savers import Act, History, Pair, World

ALL = 1 << 62


@dataclass
class Tally:
    """How much was looked at: ``cases`` counts (step, what a cut left); ``disks`` those that differ."""

    name: str
    steps: int = 0
    cases: int = 0
    disks: int = 0
    largest: int = 0
    bounded: int = 0
    seen: set[Any] = field(default_factory=set, repr=False)

    def __str__(self) -> str:
        bounds = f", {self.bounded} steps of more than the bound" if self.bounded else ""
        return f"{self.name:34} {self.steps:5} steps {self.cases:8} cases {self.disks:7} disks{bounds}"


def judged(left: FaultDisk, history: History, *, torn: bool, where: str) -> None:
    """Checks one disk, before and after recovery. Raises Broken, naming ``where``."""
    try:
        check(left, history, torn=torn)
        check_recovered(left, history, torn=torn)
    except Broken as broken:
        raise Broken(f"{broken} [{where}]") from broken
    except Exception as error:
        raise Broken(f"recovery raised {error!r} [{where}]") from error


class Cutter:
    """Cuts the power ahead of every step of a disk that calls it, and after the last."""

    def __init__(self, world: World, tally: Tally, bound: int) -> None:
        self.world, self.tally, self.bound = world, tally, bound
        self.broken: Broken | None = None

    def __call__(self, step: Step) -> None:
        try:
            self.tally.steps += 1
            self.cut(f"before step {self.tally.steps}: {step.kind} {step.path}")
        except Broken as broken:  # production must not catch it
            self.broken = broken
            raise Killed from broken

    def cut(self, where: str) -> None:
        disk, history, tally = self.world.disk, self.world.history, self.tally
        disk.before, before = (lambda step: None), disk.before
        choices = disk.choices()
        count = 1
        for choice in choices:
            count *= len(choice.states)
        tally.largest = max(tally.largest, count)
        tally.bounded += count > self.bound
        for picked in selections(choices, disk.pending, self.bound):
            tally.cases += 1
            left, torn = disk.cut(choices, picked)
            key = (left.key(), history.mark(), torn)
            if key not in tally.seen:
                tally.seen.add(key)
                tally.disks += 1
                judged(left, history, torn=torn, where=f"{where}; left {_told(choices, picked)}")
        live = disk.settled()
        tally.cases += 1
        try:
            check_live(live, history)
        except Broken as broken:
            raise Broken(f"{broken} [{where}; killed]") from broken
        key = (live.key(), history.mark(), False)
        if key not in tally.seen:
            tally.seen.add(key)
            tally.disks += 1
            judged(live, history, torn=False, where=f"{where}; killed")
        disk.before = before


def _told(choices: list[Choice], picked: tuple[int, ...]) -> str:
    return " ".join(f"{choice.slot[1] if choice.slot else choice.file}:{index}/{len(choice.states) - 1}"
                    for choice, index in zip(choices, picked, strict=True))  # fmt: skip


def cut_everywhere(name: str, act: Act, world: World, *, bound: int) -> Tally:
    """Every step × every power cut; see ``selections`` for what ``bound`` bounds. Raises Broken."""
    tally = Tally(name)
    cutter = Cutter(world, tally, bound)
    world.disk.before = cutter
    try:
        act(world)
    except Killed:
        raise cutter.broken or Broken("killed") from cutter.broken
    cutter.cut("at the end")
    return tally


def fail_everywhere(
    name: str, act: Act, begin: Callable[[], World], number: int, *, for_good: bool, bound: int
) -> Tally:
    """Every step is refused with errno ``number``, once or from then on; then a kill, and every power cut.

    What is refused once is tried again, and committed. Raises Broken.
    """
    tally = Tally(name)
    while True:
        world = begin()
        world = World(world.disk, world.history, 1 if for_good else 4)
        failing = _Failing(tally.steps, number, for_good)
        world.disk.before = failing
        done = False
        try:
            act(world)
            done = True
        except Broken:
            raise
        except Exception as error:
            if not failing.hit:
                raise Broken(f"{name} raised {error!r}") from error
        if not failing.hit:
            return tally
        where = f"{errno.errorcode[number]} at step {tally.steps}: {failing.step}"
        if done and not for_good and not failing.lost:
            left = [attempt.tag for attempt in world.history.begun if attempt not in world.history.told]
            require(not left, "what is refused once is tried again", (left, where))
        _cut_after(world, tally, bound, where)
        tally.steps += 1


def _cut_after(world: World, tally: Tally, bound: int, where: str) -> None:
    world.disk.before = lambda step: None
    choices = world.disk.choices()
    cuts = [world.disk.cut(choices, picked) for picked in selections(choices, world.disk.pending, bound)]
    for left, torn in [*cuts, (world.disk.settled(), False)]:
        tally.cases += 1
        key = (left.key(), world.history.mark(), torn)
        if key not in tally.seen:
            tally.seen.add(key)
            tally.disks += 1
            judged(left, world.history, torn=torn, where=where)


@dataclass
class _Failing:
    at: int
    number: int
    for_good: bool
    hit: bool = False
    step: Step | None = None

    @property
    def lost(self) -> bool:
        """It was the fsync of a file whose bytes only a framework has."""
        return self.step is not None and self.step.kind == "fsync" and ".tmp-" not in self.step.path

    def __call__(self, step: Step) -> None:
        if step.kind == "close" or (step.kind in ("unlink", "rmdir") and self.number == errno.ENOSPC):
            return  # a full disk can still remove
        self.at -= 1
        if self.at == -1 or (self.at < 0 and self.for_good):
            self.hit, self.step = True, self.step or step
            raise refuse(step.kind, step.path, self.number)


def cut_recovery(name: str, act: Act, world: World) -> Tally:
    """Recovery itself is cut after each of its steps, all unsynced lost or kept, from every step of the scenario."""
    tally = Tally(name)

    def before(step: Step) -> None:
        tally.steps += 1
        world.disk.before = lambda step: None
        choices = world.disk.choices()
        for first in selections(choices, [], 0):
            left, torn = world.disk.cut(choices, first)
            key = (left.key(), world.history.mark(), torn)
            if key not in tally.seen:
                tally.seen.add(key)
                inner(left, torn, step)
        world.disk.before = before

    def inner(left: FaultDisk, torn: bool, step: Step) -> None:
        cutter = _Recovering(World(left, world.history), tally, torn, f"recovery from {step.kind} {step.path}")
        left.before = cutter
        try:
            recover(left, "/root")
        except Killed:
            failed.append(cutter.broken or Broken("killed"))
            raise

    failed: list[Broken] = []
    world.disk.before = before
    try:
        act(world)
    except Killed:
        raise failed[0] from failed[0]
    return tally


def cut_two_savers(name: str, begin: Callable[[], Pair], *, bound: int) -> Tally:
    """Two nodes' savers on one root: one stopped ahead of each of its steps while the other runs to its end.

    The power is cut ahead of every step of that run, and of all steps of the first that come after it. So the disk is
    seen at every (step of one, step of the other).
    """
    tally = Tally(name)
    at, ended = 0, False
    while not ended:
        pair = begin()
        cutter = Cutter(pair.world, tally, bound)
        turn = _Turn(at, pair, cutter)
        pair.world.disk.before = turn
        try:
            pair.first()
            ended = not turn.taken
            pair.world.disk.before = cutter
            pair.second()
        except Killed:
            raise cutter.broken or Broken("killed") from cutter.broken
        cutter.cut("at the end")
        require(pair.done(), "both savers tell their ranks that it is committed", where(at))
        at += 1
    return tally


def where(at: int) -> str:
    return f"the second saver runs ahead of step {at} of the first"


@dataclass
class _Turn:
    at: int
    pair: Pair
    cutter: Cutter
    taken: bool = False

    def __call__(self, step: Step) -> None:
        disk = self.pair.world.disk
        if self.at == 0 and not self.taken:
            self.taken = True
            disk.before = self.cutter
            self.pair.second()
            disk.before = self
        self.at -= 1
        if self.taken:
            self.cutter(step)
            disk.before = self


class _Recovering(Cutter):
    def __init__(self, world: World, tally: Tally, torn: bool, start: str) -> None:
        super().__init__(world, tally, 1)
        self.torn, self.start = torn, start

    def cut(self, where: str) -> None:
        disk, history, tally = self.world.disk, self.world.history, self.tally
        disk.before, before = (lambda step: None), disk.before
        choices = disk.choices()
        for picked in selections(choices, [], 0):
            tally.cases += 1
            left, torn = disk.cut(choices, picked)
            key = (left.key(), history.mark(), torn or self.torn)
            if key not in tally.seen:
                tally.seen.add(key)
                tally.disks += 1
                judged(left, history, torn=torn or self.torn, where=f"{self.start}, {where}")
        disk.before = before
