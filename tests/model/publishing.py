"""Several savers on one root: production's own code, stopped before every single disk operation.

A process is a function that is run again from its start with the answers it got so far, up to its next operation; so
its state is what it has seen. Every interleaving of the operations of all savers is explored. A death is a process
that is never scheduled again: every state is also the state after any deaths, and for every disk that comes up, what
whoever starts next would do (roll forward, sweep) is tried.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from disk_model import authors, recover

from ckpt_engine import commit, disk_names, listing
from ckpt_engine.errors import StorageError
from ckpt_engine.manifest import Attempt
from ckpt_engine.record import Record
from ckpt_engine.states import State

from .explorer import Violation
from .replay import READS, ROOT, Disk, Paused, Replayed, files_of


class Act(NamedTuple):
    """One thing a saver does, from its start to its end. ``when``: it waits until the disk looks like this."""

    name: str
    run: Callable[[Any], Any]
    when: Callable[[Disk], bool] = lambda disk: True


class Scene(NamedTuple):
    at: tuple[tuple[int, int], ...]  # of each saver: which act, and what it has seen in it
    disk: int
    latest: tuple[int, int]
    said: frozenset[Attempt]
    running: int = -1  # who made the last step,
    switches: int = 0  # and how often one that could have gone on was stopped


class Publishing:
    """``savers``: what each does, one act after another. ``never``: attempts that must not be committed."""

    def __init__(
        self, name: str, bounds: str, disk: Disk, savers: list[list[Act]], *, last: Attempt, switches: int = 2,
        never: Iterable[Attempt] = (),
    ) -> None:  # fmt: skip
        self.name, self.bounds, self._switches = name, f"{bounds}, {switches} preemptions", switches
        self._first, self._savers, self._last, self._never = disk, savers, last, set(never)
        self._disks: list[Disk] = []
        self._disk_ids: dict[Any, int] = {}
        self._seen: dict[tuple[int, int, int, Any], int] = {}
        self._answers: list[list[Any]] = [[]]
        self._next: dict[tuple[int, int, int], Any] = {}
        self._writer, self._temps = (-1, 0), 0
        self._verdicts: dict[int, str] = {}
        self._recovered: dict[Any, str] = {}
        self._newest: dict[int, tuple[int, int]] = {}

    def start(self) -> Iterable[Scene]:
        disk = self._intern(self._first)
        yield Scene(tuple((0, 0) for _ in self._savers), disk, self._latest(self._first), frozenset())

    def _intern(self, disk: Disk) -> int:
        number = self._disk_ids.setdefault(disk.key(), len(self._disks))
        if number == len(self._disks):
            self._disks.append(disk)
        return number

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Names of temporary files are the same in each replay; a record is parsed once."""
        temp, parse = disk_names.temp, Record.__dict__["from_bytes"]
        parsed: Any = functools.lru_cache(None)(lambda cls, data: parse.__func__(cls, data, "?"))
        disk_names.temp = self._temp
        Record.from_bytes = classmethod(lambda cls, data, path: parsed(cls, data))  # type: ignore[assignment]
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            disk_names.temp = temp
            Record.from_bytes = parse  # type: ignore[method-assign]

    def _temp(self) -> str:
        self._temps += 1
        return f".tmp-{1 + self._writer[0]}-{self._writer[1]:08x}{self._temps:08x}"

    # -- moves ---------------------------------------------------------------------------------------------------

    def moves(self, state: Scene) -> Iterator[tuple[str, Scene]]:
        able = [number for number in range(len(state.at)) if self._able(state, number)]
        for number in able:
            stopped = state.running in able and number != state.running
            if state.switches + stopped <= self._switches:
                after = state._replace(running=number, switches=state.switches + stopped)
                yield from self._move(after, number, *state.at[number])

    def _able(self, state: Scene, number: int) -> bool:
        act, seen = state.at[number]
        if act == len(self._savers[number]):
            return False
        return bool(seen) or self._savers[number][act].when(self._disks[state.disk])

    def _move(self, state: Scene, number: int, act: int, seen: int) -> Iterator[tuple[str, Scene]]:
        doing, disk = self._savers[number][act], self._disks[state.disk]
        wanted = self._wanted(number, act, seen)
        if not isinstance(wanted, Paused):
            said = state.said | {wanted} if isinstance(wanted, Attempt) else state.said
            after = self._at(state, number, (act + 1, 0))._replace(said=said)
            yield f"saver {number} has ended {doing.name}: {wanted}", after
            return
        verb, args, kwargs = wanted.args
        changes = verb not in READS
        disk = Disk(disk) if changes else disk
        answer: Any
        try:
            answer = getattr(disk, verb)(*args, **kwargs)
        except StorageError as error:
            answer = error
        told = (type(answer).__name__, str(answer)) if isinstance(answer, StorageError) else answer
        key = (number, act, seen, told)
        if key not in self._seen:
            self._seen[key] = len(self._answers)
            self._answers.append([*self._answers[seen], answer])
        after = self._at(state, number, (act, self._seen[key]))
        if changes:
            after = after._replace(disk=self._intern(disk))
        if verb == "rename" and args[1] == f"{ROOT}/latest":
            latest = self._latest(disk)
            if latest < state.latest:
                raise Violation(f"invariant 5: latest goes back from {state.latest} to {latest} (saver {number})")
            after = after._replace(latest=latest)
        names = " ".join(str(arg) for arg in args if isinstance(arg, str))
        yield f"saver {number}: {verb} {names}", after

    @staticmethod
    def _at(state: Scene, number: int, where: tuple[int, int]) -> Scene:
        at = list(state.at)
        at[number] = where
        return state._replace(at=tuple(at))

    def _wanted(self, number: int, act: int, seen: int) -> Any:
        """What this saver does next, or how its act ended."""
        key = (number, act, seen)
        if key not in self._next:
            self._writer, self._temps = (number, act), 0
            try:
                self._next[key] = self._savers[number][act].run(Replayed(self._answers[seen]))
            except Paused as paused:
                self._next[key] = paused
        return self._next[key]

    def _latest(self, disk: Disk) -> tuple[int, int]:
        """The order of what ``latest`` names; -1 if it names nothing that is committed."""
        tag = disk.read_small(f"{ROOT}/latest", 4096)
        found = None if tag is None else listing.read_manifest(disk, f"{ROOT}/{tag.decode()}")
        return found.attempt.order if found else (0, 0) if tag is None else (-1, 0)

    # -- promises ------------------------------------------------------------------------------------------------

    def wrong(self, state: Scene) -> str:
        disk = self._disks[state.disk]
        if state.disk not in self._verdicts:
            committed = listing.list_committed(disk, ROOT).committed
            self._newest[state.disk] = committed[0].order if committed else (0, 0)
            self._verdicts[state.disk] = self._check(disk)
            names = disk.key()[0]
            if names not in self._recovered:
                self._recovered[names] = self._after_deaths(disk)
            self._verdicts[state.disk] = self._verdicts[state.disk] or self._recovered[names]
        for attempt in state.said:
            if self._newest[state.disk] < attempt.order:
                return f"invariant 13: {attempt.id} was said to be committed and is not"
        return self._verdicts[state.disk]

    def _check(self, disk: Disk) -> str:
        found = listing.list_committed(disk, ROOT)
        if found.damaged:
            return f"a damaged manifest: {found.damaged}"
        for one in found.committed:
            attempt = one.manifest.attempt
            if attempt in self._never:
                return f"{attempt.id} was given up and is committed"
            if broken := listing.verify(disk, one):
                return f"invariant 4: {attempt.id} is committed and not whole: {broken}"
            for shard in one.manifest.shards:
                if tuple(entry.name for entry in shard.files) != files_of(shard.rank):
                    return f"invariant 4: {attempt.id} was committed without the receipt of rank {shard.rank}"
            if len(authors(disk, one.commit_dir)) > 1:
                return f"stock tools find a mixture in {one.commit_dir}"
        if self._latest(disk) == (-1, 0):
            return "invariant 5: latest names what is not committed"
        for rank, slot in disk.slots.items():
            if slot is State.DURABLE:
                attempt = self._last
                path = commit.attempt_path(ROOT, attempt, disk_names.shard_record(rank))
                settled = any(one.manifest.attempt == attempt for one in found.committed)
                if path not in disk.safe and not settled:
                    return f"invariant 1: the slot of rank {rank} was released before its shard record was durable"
        return ""

    def _after_deaths(self, disk: Disk) -> str:
        """All savers die here; whoever starts next rolls forward and sweeps."""
        before = listing.list_committed(disk, ROOT).committed
        left = Disk(disk)
        self._writer, self._temps = (99, 0), 0
        recover(left, ROOT)
        if why := self._check(left):
            return f"after the death of all: {why}"
        after = listing.list_committed(left, ROOT).committed
        if [one.manifest for one in before] != [one.manifest for one in after]:
            return "invariant 13: recovery changed what is committed"
        if after and self._latest(left) != after[0].order:
            return "invariant 5: after recovery latest is not the newest"
        return ""

    def rests(self, state: Scene) -> str:
        for number, (act, _) in enumerate(state.at):
            if act < len(self._savers[number]):
                return f"deadlock: saver {number} waits for ever in {self._savers[number][act].name}"
        disk = self._disks[state.disk]
        committed = listing.list_committed(disk, ROOT).committed
        if not committed or committed[0].manifest.attempt != self._last:
            return f"{self._last.id} is not committed in the end"
        if self._latest(disk) != self._last.order:
            return "invariant 5: latest is not the newest in the end"
        for one in committed:
            for entry in one.manifest.files():
                if disk.size(f"{one.commit_dir}/{entry.name}") is None:
                    return f"{entry.name} of {one.manifest.attempt.id} has no plain name in the end"
        return ""
