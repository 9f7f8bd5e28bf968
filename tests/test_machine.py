"""Ranks and a saver over real segments and queues, step by step in any order: the invariants hold after every step.

The rules for slots are production's (``states``, ``slots``, ``Buffers._claimed``, ``saving.seal``, ``messages``); what
is made up here is who takes the next step, and that looking and acting upon it are two steps. Every process maps the
segments for itself. The saver reads a slot in two halves, so that a rank that wrote in between would be found out by
the sums. Messages are lost, repeated, spoiled and late; at the end of each run nobody hears any, and all that was
queued must get an outcome all the same.

``tests.model`` goes through every state of smaller worlds without memory; this goes through some of larger ones with.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt_engine import _C, messages, shm
from ckpt_engine.buffers import Buffers
from ckpt_engine.control import RankPage
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import Attempt, Failure, RunClaim
from ckpt_engine.messages import Ended, Mailbox, Released, Wake
from ckpt_engine.names import Names
from ckpt_engine.retention import Retention
from ckpt_engine.saving import seal
from ckpt_engine.slots import CANCEL, DATA_OFFSET, Slot
from ckpt_engine.states import (
    LEASED,
    SNAPSHOT,
    Order,
    SlotView,
    State,
    Told,
    Word,
    hopeless,
    newest_common,
    tended,
    victim,
)

NAMES = Names(f"face{os.getpid():012x}")
RANKS = (0, 1)
NBYTES = 9000
ranks = st.sampled_from(RANKS)
seldom = st.sampled_from([False, False, False, True])


def content(rank: int, order: Order) -> bytes:
    return bytes([rank + 1, order[0] & 0xFF, order[1] & 0xFF]) * (NBYTES // 3)


def attempt_of(order: Order) -> Attempt:
    return Attempt(order[0], f"{order[0]:016x}", order[1], order[1], f"step{order[1]}", "b" * 16)


def header_of(rank: int, order: Order, *, storage: bool) -> Header:
    attempt = attempt_of(order)
    file = SlotFile("a.pt", 0, NBYTES, zlib.crc32(content(rank, order)))
    return Header(
        attempt=attempt, claim=RunClaim(attempt.generation, attempt.run, None, 2, 0), rank=rank, local_rank=rank,
        world=2, node=0, nodes=1, node_ranks=RANKS, layout="shared", root="/r", commit_dir=f"/r/{attempt.tag}",
        retention=Retention(), confirmed=None, storage=storage, files=(file,),
    )  # fmt: skip


@dataclass
class Rank:
    """One life of a rank: what it maps, and how far it is in its save."""

    number: int
    slots: list[Slot]
    incarnation: int = 1
    entered: Order = (1, 0)
    outcome: str = "sealed"
    alive: bool = True
    chosen: Slot | None = None
    filling: Slot | None = None
    written: int = 0
    to_queue: Word | None = None
    sealed_in: Slot | None = None

    def told(self) -> Told:
        return Told(self.alive, self.entered, self.outcome == "failed")


@dataclass
class Job:
    slot: Slot
    word: Word
    header: Header
    first_half: bytes | None = None


@dataclass
class Saver:
    """One life of the saver: gone with it is what it has handed to its writer, not what is in the segments."""

    slots: dict[int, list[Slot]]
    handed: dict[Slot, Word] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)


class Node(RuleBasedStateMachine):
    @initialize(count=st.integers(2, 3))
    def begin(self, count: int) -> None:
        self.count = count
        self.names = {rank: [NAMES.segment(rank, slot, 1) for slot in range(count)] for rank in RANKS}
        for name in [name for names in self.names.values() for name in names]:
            Slot.create(name, NBYTES).close()
        self.events, self.notify = Mailbox(NAMES.events_queue), [Mailbox(NAMES.notify_queue(rank)) for rank in RANKS]
        self.ranks = {rank: Rank(rank, self.mapped(rank)) for rank in RANKS}
        self.saver = Saver({rank: self.mapped(rank) for rank in RANKS})
        self.watch = {rank: self.mapped(rank) for rank in RANKS}
        self.durable: set[tuple[int, Order]] = set()
        self.sealed: set[tuple[int, Order]] = set()
        self.best: Order | None = None
        self.turn = 0
        self.seen: dict[tuple[int, int], tuple[Word, bytes]] = {}

    def mapped(self, rank: int) -> list[Slot]:
        found = [Slot.open(name) for name in self.names[rank]]
        return [slot for slot in found if slot is not None]

    def views(self) -> list[SlotView]:
        return [slot.view() for slots in self.watch.values() for slot in slots]

    @rule(steps=st.integers(8, 20))
    def train_together(self, steps: int) -> None:
        """In turns, as far as a save or two."""
        for step in range(2 * steps):
            self.train(step % 2, 1, step % 3 > 0, False)

    @rule(number=ranks, steps=st.integers(1, 9), storage=st.booleans(), dies=seldom)
    def train(self, number: int, steps: int, storage: bool, dies: bool) -> None:
        """The next steps of a rank's save; between any two of them others may go on, and after any it may die."""
        for _ in range(steps):
            rank = self.ranks[number]
            if rank.to_queue is not None:
                self.queue(number)
            elif rank.outcome != "filling":
                self.enter(number)
            elif rank.filling is None:
                self.choose(number) if rank.chosen is None else self.claim(number)
            elif rank.written < NBYTES:
                self.write(number)
            else:
                self.seal(number, storage)
        self.ranks[number].alive &= not dies

    @rule(steps=st.integers(1, 20), end=st.sampled_from([State.DURABLE, State.DURABLE, State.FAILED]), dies=seldom)
    def serve(self, steps: int, end: State, dies: bool) -> None:
        """The next steps of the saver: its loop goes round the slots, its writer has one job at a time.

        When it has died, the next one knows what is in the segments, and no write of the dead one comes any more.
        """
        for _ in range(steps):
            self.turn = (self.turn + 1) % (2 * self.count + 2)
            if self.turn < 2 * self.count:
                self.look((self.turn % 2, self.turn // 2))
            elif self.turn == 2 * self.count:
                self.persist_begins()
            else:
                self.persist_ends(end)
        if dies:
            self.saver = Saver(self.saver.slots)

    # -- ranks -------------------------------------------------------------------------------------------------------

    def may_enter(self, rank: Rank) -> bool:
        """Between two saves lies a step of the optimizer, hence a collective: nobody is a save ahead of a peer."""
        peers = [peer for peer in self.ranks.values() if peer is not rank]
        idle = rank.alive and rank.chosen is None and rank.filling is None and rank.outcome != "filling"
        return idle and all(p.alive and p.entered >= rank.entered and (p.entered > rank.entered or
                            p.outcome != "filling") for p in peers)  # fmt: skip

    def enter(self, number: int) -> None:
        """The save begins: the control page says so before a slot is looked for."""
        rank = self.ranks[number]
        if self.may_enter(rank):
            rank.entered, rank.outcome, rank.to_queue = (rank.entered[0], rank.entered[1] + 1), "filling", None

    def choose(self, number: int) -> None:
        rank = self.ranks[number]
        if not rank.alive or rank.outcome != "filling" or rank.filling is not None:
            return
        told = {peer.number: peer.told() for peer in self.ranks.values() if peer is not rank}
        views = self.views()
        mine = {slot.view(): slot for slot in rank.slots}
        found = victim(list(mine), newest_common(views, RANKS), lambda order: hopeless(order, views, told))
        rank.chosen = mine[found] if found is not None else None

    def claim(self, number: int) -> None:
        """Upon what was seen some time ago."""
        rank = self.ranks[number]
        if rank.chosen is None or not rank.alive:
            return
        link = SimpleNamespace(record=RankPage(incarnation=rank.incarnation))
        before = rank.chosen.word()
        rank.filling, rank.chosen, rank.written = Buffers._claimed(SimpleNamespace(_link=link), rank.chosen), None, 0  # type: ignore[arg-type]
        assert rank.filling is None or before.state not in LEASED, "invariant 1"

    def write(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.filling is None or not rank.alive or rank.written == NBYTES:
            return
        half = NBYTES // 2
        data = content(number, rank.entered)[rank.written : rank.written + half]
        row = b"".join(value.to_bytes(8, "little") for value in (_C.address_of(data), DATA_OFFSET + rank.written, half))
        _C.copy(rank.filling.memory, row)
        rank.written += half

    def seal(self, number: int, storage: bool) -> None:
        rank = self.ranks[number]
        if rank.filling is None or not rank.alive or rank.written < NBYTES:
            return
        seal(rank.filling, header_of(number, rank.entered, storage=storage))
        rank.outcome, rank.to_queue = "sealed", rank.filling.word() if storage else None
        rank.sealed_in, rank.filling = rank.filling, None
        self.sealed.add((number, rank.entered))

    def queue(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.to_queue is None or rank.sealed_in is None or not rank.alive:
            return
        if rank.sealed_in.change("rank", rank.to_queue, State.QUEUED):
            self.events.send(Wake("queued", number, attempt_of(rank.entered).digest))
        rank.to_queue = None

    @rule(number=ranks, chance=seldom)
    def fail(self, number: int, chance: bool) -> None:
        """The save raises; a claimed slot is given back."""
        rank = self.ranks[number]
        if not rank.alive or rank.outcome != "filling" or not chance:
            return
        rank.outcome, rank.chosen = "failed", None
        if rank.filling is not None:
            rank.filling.change("rank", rank.filling.word(), State.FREE)
            rank.filling = None

    @precondition(lambda self: any(not rank.alive for rank in self.ranks.values()))
    @rule()
    def start_again(self) -> None:
        """All ranks live anew, agree on the newest complete attempt and let go of others (invariant 9)."""
        chosen = newest_common(self.views(), RANKS)
        generation = 1 + max(rank.entered[0] for rank in self.ranks.values())
        for number, old in self.ranks.items():
            rank = Rank(number, old.slots, old.incarnation + 1, (generation, 0))
            self.ranks[number] = rank
            for slot in rank.slots:
                found = slot.snapshot()
                if found is None or chosen is None or found[1].attempt.order == chosen:
                    continue
                if found[0].state is State.PERSISTING or not slot.change("rank", found[0], State.FREE):
                    slot.set_flags(CANCEL)

    # -- the saver ---------------------------------------------------------------------------------------------------

    def look(self, place: tuple[int, int]) -> None:
        """What the main loop does with one slot: tend it, and hand it to the writer once."""
        number, index = place
        slot = self.saver.slots[number][index % self.count]
        rank, word = self.ranks[number], slot.word()
        dead = None if rank.alive else rank.incarnation
        state = tended(word, handed=self.saver.handed.get(slot), dead=dead)
        if state is not None:
            slot.change("saver", word, state)
        found = slot.snapshot()
        if found is not None and found[0].state is State.QUEUED and self.saver.handed.get(slot) != found[0]:
            self.saver.handed[slot] = found[0]
            self.saver.jobs.append(Job(slot, *found))

    def persist_begins(self) -> None:
        for job in self.saver.jobs[:1]:
            if job.first_half is None:
                if not job.slot.change("saver", job.word, State.PERSISTING):
                    self.saver.jobs.remove(job)  # the rank took it back
                    continue
                job.slot.reset_progress()
                job.first_half = bytes(job.slot.memory[DATA_OFFSET : DATA_OFFSET + NBYTES // 2])

    def persist_ends(self, end: State) -> None:
        for job in self.saver.jobs[:1]:
            if job.first_half is None:
                continue
            self.saver.jobs.remove(job)
            data = job.first_half + bytes(job.slot.memory[DATA_OFFSET + NBYTES // 2 : DATA_OFFSET + NBYTES])
            assert zlib.crc32(data) == job.header.files[0].crc32, "invariant 1: it was written to while it was read"
            _C.store(job.slot.memory, job.slot.progress_offset, NBYTES)
            if job.slot.flags() & CANCEL:
                end = State.FREE
            elif end is State.FAILED:
                job.slot.put_error(Failure(job.header.rank, "the disk says no"))
            else:
                self.durable.add((job.header.rank, job.header.attempt.order))
            assert job.slot.change("saver", job.slot.word(), end)
            digest = job.header.attempt.digest
            self.notify[job.header.rank].send(Released(job.slot.name.slot, int(end), digest))
            self.notify[job.header.rank].send(Ended("committed", digest))

    @precondition(lambda self: not any(rank.alive for rank in self.ranks.values()))
    @rule()
    def breakpoint_save(self) -> None:
        """All ranks died: the newest complete attempt goes to storage on their behalf."""
        best = newest_common(self.views(), RANKS)
        for slot in [slot for slots in self.saver.slots.values() for slot in slots]:
            found = slot.snapshot()
            if found and found[1].attempt.order == best and found[0].state in (State.READY, State.FAILED):
                self.saver.handed.pop(slot, None)
                slot.change("saver", found[0], State.QUEUED)

    # -- messages ----------------------------------------------------------------------------------------------------

    @rule(number=st.sampled_from([*RANKS, None]), fate=st.sampled_from(["heard", "lost", "twice"]))
    def message(self, number: int | None, fate: str) -> None:
        """Whatever becomes of a message: it makes the saver look, or a rank, and says nothing that counts."""
        box = self.events if number is None else self.notify[number]
        found = box.receive(0)
        if found is None or fate == "lost":
            return
        if fate == "twice":
            box.send(found)
        if isinstance(found, Wake):
            for index in range(self.count):
                self.look((found.local_rank, index))
        else:
            assert number is not None
            self.choose(number)

    @rule(number=st.sampled_from([*RANKS, None]), text=st.text(max_size=20), chance=seldom)
    def nonsense(self, number: int | None, text: str, chance: bool) -> None:
        if not chance:
            return
        box = self.events if number is None else self.notify[number]
        box.send(Ended(text, text) if number is not None else Wake(text, 0, text))

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def every_snapshot_is_whole_and_stays_as_it_was_sealed(self) -> None:
        """Invariants 1 and 8; and nobody changes what is complete but by giving it up."""
        for number, slots in self.watch.items():
            for slot in slots:
                found, key = slot.snapshot(), (number, slot.name.slot)
                assert (found is not None) == (slot.word().state in SNAPSHOT)
                if found is None:
                    self.seen.pop(key, None)
                    continue
                word, header = found
                data = bytes(slot.memory[DATA_OFFSET : DATA_OFFSET + NBYTES])
                assert (number, header.attempt.order) in self.sealed and header.rank == number
                assert data == content(number, header.attempt.order)
                assert zlib.crc32(data) == header.files[0].crc32
                before = self.seen.get(key)
                if before is not None and before[0].is_of(header.attempt.order):
                    assert before[1] == header.pack()
                self.seen[key] = (word, header.pack())

    @invariant()
    def what_a_slot_says_of_its_end_is_so(self) -> None:
        """Invariants 4 and 7: DURABLE only after the record, FAILED only with a reason."""
        for number, slots in self.watch.items():
            for slot in slots:
                found = slot.snapshot()
                if found is not None and found[0].state is State.DURABLE:
                    assert (number, found[1].attempt.order) in self.durable
                if found is not None and found[0].state is State.FAILED:
                    assert slot.error() == Failure(number, "the disk says no")

    @invariant()
    def a_complete_snapshot_stays_in_memory_and_is_never_an_older_one(self) -> None:
        """Invariant 12."""
        now = newest_common(self.views(), RANKS)
        assert self.best is None or (now is not None and now >= self.best), (self.best, now)
        self.best = now

    def settle(self) -> None:
        """Invariant 2: nobody hears a message any more, and what was queued gets its outcome all the same."""
        everything = [(number, index) for number in RANKS for index in range(self.count)]
        for _ in range(2 * len(everything) + 2):
            for place in everything:
                self.look(place)
            self.persist_begins()
            self.persist_ends(State.DURABLE)
        left = [slot.word() for slots in self.watch.values() for slot in slots if slot.word().state in LEASED]
        assert not left, left

    def teardown(self) -> None:
        if not hasattr(self, "watch"):
            return
        try:
            self.settle()
            self.a_complete_snapshot_stays_in_memory_and_is_never_an_older_one()
        finally:
            for slot in [s for maps in (self.watch, self.saver.slots) for slots in maps.values() for s in slots]:
                slot.close()
            for slot in [slot for rank in self.ranks.values() for slot in rank.slots]:
                slot.close()
            for box in (self.events, *self.notify):
                box.close()
            _clear()


def _clear() -> None:
    for name in NAMES.segments():
        shm.unlink(str(name))
    for queue in (NAMES.events_queue, *map(NAMES.notify_queue, RANKS)):
        messages.unlink(queue)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Any:
    yield
    _clear()


class TestAnyInterleavingOfRanksAndSaverKeepsTheInvariants(Node.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=examples(60), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
