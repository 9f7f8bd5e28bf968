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
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from disk_model import ROOT_ID, ModelDisk, authors, claim_of, content, recover, write_node

from ckpt_engine import commit, disk_names, listing, runs
from ckpt_engine.config import SaverOptions
from ckpt_engine.errors import StorageError
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.names import SegmentName
from ckpt_engine.record import Record
from ckpt_engine.saver.committer import Committer
from ckpt_engine.saver.persist import Job, Writer
from ckpt_engine.slots import DATA_OFFSET, Header, SlotFile
from ckpt_engine.states import State, Word, check_transition

from .explorer import Violation

ROOT = "/root"
FILES = ("a_model_states.pt", "b.pt")


class Disk(ModelDisk):
    """A disk that can be copied and compared; slots of the nodes lie in it too, for they are as shared."""

    bytes_of: ClassVar[dict[int, bytes]] = {}
    number_of: ClassVar[dict[tuple[str, bytes], int]] = {}

    def __init__(self, other: ModelDisk | None = None) -> None:
        super().__init__()
        self.slots: dict[int, State] = {}
        self.data = Disk.bytes_of
        if other is not None:
            self.now, self.safe, self.pending = dict(other.now), dict(other.safe), list(other.pending)
            self.slots = dict(getattr(other, "slots", {}))

    def write_new(self, path: str, source: Any, **where: Any) -> bool:
        offset, nbytes = where.get("offset", 0), where.get("nbytes", -1)
        data = bytes(memoryview(source)[offset : None if nbytes < 0 else offset + nbytes])
        number = Disk.number_of.setdefault((path, data), len(Disk.number_of))
        self._room("write", path)
        if path in self.now:
            raise Violation(f"two writers of {path}")
        Disk.bytes_of[number] = data
        self._set(path, number)
        return False

    def slot_state(self, rank: int) -> State:
        return self.slots[rank]

    def slot_change(self, rank: int, old: State, new: State) -> bool:
        check_transition("saver", old, new)
        if self.slots[rank] is not old:
            return False
        self.slots[rank] = new
        return True

    def key(self) -> Any:
        slots = tuple(sorted((rank, int(state)) for rank, state in self.slots.items()))
        power = (frozenset(self.safe.items()), tuple(self.pending)) if self.slots else ()
        return frozenset(self.now.items()), power, slots


READS = ("list_dir", "read_small", "size", "same_file", "crc_of_file", "free_bytes", "slot_state")


class Paused(BaseException):
    """The process wants to do this now."""


class Replayed:
    """What a process takes for its disk: old answers come again, then it is stopped."""

    VERBS = (
        "write_new", "rename", "link", "unlink", "make_dir", "remove_dir", "sync_dir", "sync_file", "list_dir",
        "read_small", "crc_of_file", "size", "same_file", "free_bytes", "slot_state", "slot_change",
    )  # fmt: skip

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for answer in self._answers:
                if isinstance(answer, StorageError):
                    raise answer
                return answer
            raise Paused(verb, args, kwargs)

        if verb not in self.VERBS:
            raise AttributeError(verb)
        return call


class ModelSlot:
    """The part of ``slots.Slot`` that the writer uses, over the shared disk."""

    progress_offset = 0

    def __init__(self, storage: Any, header: Header) -> None:
        self._storage, self._header = storage, header
        self.name = SegmentName("0" * 16, 0, 0, 1)
        self.memory = bytes(DATA_OFFSET) + b"".join(content(header.attempt, file.name) for file in header.files)

    def word(self) -> Word:
        return Word(self._storage.slot_state(self._header.rank))

    def change(self, actor: str, old: Word, state: State) -> bool:
        return bool(self._storage.slot_change(self._header.rank, old.state, state))

    def flags(self) -> int:
        return 0

    def reset_progress(self) -> None:
        pass

    def put_error(self, failure: Any) -> None:
        raise Violation(f"a write failed: {failure}")


def header_of(attempt: Attempt, claim: RunClaim, rank: int, nodes: int, keep_last: int | None) -> Header:
    table, offset = [], 0
    for name in files_of(rank):
        data = content(attempt, name)
        table.append(SlotFile(name, offset, len(data), zlib.crc32(data)))
        offset += len(data)
    return Header(
        attempt, claim, rank, 0, nodes, rank, nodes, (rank,), "shared", ROOT, f"{ROOT}/{attempt.tag}", keep_last, None,
        True, tuple(table),
    )  # fmt: skip


def files_of(rank: int) -> tuple[str, ...]:
    return FILES[rank : rank + 1]


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
        parsed = functools.lru_cache(None)(lambda cls, data: parse.__func__(cls, data, "?"))
        disk_names.temp = self._temp
        Record.from_bytes = classmethod(lambda cls, data, path: parsed(cls, data))  # type: ignore[assignment,misc]
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


# -- what savers do: production's writer and committer, one call at a time -----------------------------------------


def persist(header: Header) -> Act:
    """The writer with one slot."""

    def run(storage: Any) -> str:
        slot: Any = ModelSlot(storage, header)
        writer = Writer(storage, _committer(storage, header), lambda rank, message: None, 0.0)
        writer._persist(Job(slot, slot.word(), header))
        return "released"

    return Act(f"persisting {header.attempt.id}", run)


def receipt(header: Header) -> Act:
    """The first look of the committer: the receipt, and to publish if all others are there."""
    return Act(f"the receipt of {header.attempt.id}", lambda storage: _commit(storage, header, receipted=False) or "")


def publish(header: Header) -> Act:
    """Later looks; one that finds a receipt missing changes nothing."""

    def all_there(disk: Disk) -> bool:
        path = commit.attempt_path(ROOT, header.attempt)
        committed = listing.read_manifest(disk, header.commit_dir)
        there = all(disk.size(f"{path}/{disk_names.receipt(node)}") is not None for node in range(header.nodes))
        return there or (committed is not None and committed.attempt.order >= header.attempt.order)

    return Act(f"publishing {header.attempt.id}", lambda storage: _commit(storage, header, receipted=True), all_there)


def _committer(storage: Any, header: Header, ended: Callable[..., None] = lambda header, outcome: None) -> Committer:
    return Committer(
        storage, SaverOptions(), ended=ended, live_run=lambda run: True, held=lambda: (header,),
        answered=lambda: None,
    )  # fmt: skip


def _commit(storage: Any, header: Header, *, receipted: bool) -> Attempt | str | None:
    ended: list[str] = []
    committer = _committer(storage, header, lambda header, outcome: ended.append(f"{outcome.status} {outcome.reason}"))
    committer.durable(header, header.shard_record())
    committer._pending[header.attempt].receipted = receipted
    committer._pass()
    return header.attempt if ended and ended[0].startswith("committed") else ended[0] if ended else None


# -- where they begin ----------------------------------------------------------------------------------------------

OTHER_RUN = "1" * 16


def attempt_of(seq: int, tag: str, generation: int = 1) -> Attempt:
    return Attempt(generation, OTHER_RUN if generation > 1 else "0" * 16, seq, 10 * seq, tag, ROOT_ID)


def root(*, committed: Iterable[Attempt], nodes: int) -> Disk:
    """A root with checkpoints of all ranks, one on each node."""
    disk = Disk()
    runs.adopt_root_id(disk, ROOT, ROOT_ID)
    runs.claim_run(disk, ROOT, claim_of(1))
    for attempt in committed:
        received(disk, attempt, nodes)
        done = commit.try_publish(disk, ROOT, attempt, nodes=nodes, world=nodes, runs=runs.read_runs(disk, ROOT))
        assert isinstance(done, commit.Published) and done.trouble is None
    return disk


def received(disk: Disk, attempt: Attempt, nodes: int) -> None:
    """Everything but the manifest."""
    for node in range(nodes):
        write_node(disk, ROOT, attempt, {node: files_of(node)}, world=nodes, node=node, nodes=nodes)


FIRST = claim_of(1)


def first_save(nodes: int = 2) -> Publishing:
    attempt = attempt_of(2, "two")
    disk = root(committed=[attempt_of(1, "one")], nodes=nodes)
    commit.make_tag_dir(disk, ROOT, "two")
    disk.slots = dict.fromkeys(range(nodes), State.QUEUED)
    headers = [header_of(attempt, FIRST, node, nodes, None) for node in range(nodes)]
    savers = [[persist(header), receipt(header), publish(header)] for header in headers]
    return Publishing(
        "publish: first save", f"{nodes} nodes, from the slot to latest", disk, savers, last=attempt, switches=1
    )


def re_save(nodes: int = 2) -> Publishing:
    attempt = attempt_of(2, "one")
    disk = root(committed=[attempt_of(1, "one")], nodes=nodes)
    received(disk, attempt, nodes)
    savers = [[publish(header_of(attempt, FIRST, node, nodes, None))] for node in range(nodes)]
    return Publishing("publish: re-save of a tag", f"{nodes} nodes, all receipts there", disk, savers, last=attempt)


def retention(nodes: int = 2) -> Publishing:
    attempt = attempt_of(2, "two")
    disk = root(committed=[attempt_of(1, "one")], nodes=nodes)
    received(disk, attempt, nodes)
    savers = [[publish(header_of(attempt, FIRST, node, nodes, 1))] for node in range(nodes)]
    bounds = f"{nodes} nodes, all receipts there, keep_last=1, sweep"
    return Publishing("publish: retention", bounds, disk, savers, last=attempt, switches=1)


def two_runs() -> Publishing:
    """A saver of an old run comes late: its attempt has all receipts, and a new run saves under the same tag."""
    old, new = attempt_of(2, "two"), attempt_of(1, "two", 2)
    claim = claim_of(2, attempt_of(1, "one"), OTHER_RUN)
    disk = root(committed=[attempt_of(1, "one")], nodes=2)
    received(disk, old, 2)
    runs.claim_run(disk, ROOT, claim)
    received(disk, new, 2)
    savers = [[publish(header_of(old, FIRST, 0, 2, None))], [publish(header_of(new, claim, 1, 2, None))]]
    bounds = "a saver of generation 1, one of generation 2, one tag"
    return Publishing("publish: two generations", bounds, disk, savers, last=new, never=[old])


def stale_attempt() -> Publishing:
    """Two attempts at one tag in one run; a saver tries the older one again when the newer one is committed."""
    old, new = attempt_of(2, "two"), attempt_of(3, "two")
    disk = root(committed=[attempt_of(1, "one"), new], nodes=2)
    received(disk, old, 2)
    savers = [[publish(header_of(old, FIRST, 0, 2, None))], [publish(header_of(new, FIRST, 1, 2, None))]]
    return Publishing("publish: stale attempt", "2 savers, 2 attempts at one tag", disk, savers, last=new, never=[old])


SCENES: list[Callable[[], Publishing]] = [re_save, retention, two_runs, stale_attempt, first_save]
