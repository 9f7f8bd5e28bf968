"""This rank's slots: how many, how large, and which one may be filled next; here a rank blocks.

The number of slots is decided once per node under ``budget.lock``; a state that outgrew its slot gets a new
edition under a new name, and the saver removes the old one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt_engine import _C, budget, locks, shm
from ckpt_engine.config import Options
from ckpt_engine.control import Page, RankPage
from ckpt_engine.errors import BufferBusy, ShmFull, StagingError
from ckpt_engine.events import log, warn_once
from ckpt_engine.header import Header
from ckpt_engine.link import Link
from ckpt_engine.names import MAX_EDITION, SegmentName
from ckpt_engine.slots import CANCEL, DATA_OFFSET, RETIRED, Slot, open_all
from ckpt_engine.states import LEASED, Order, State, Told, hopeless, newest_common, victim
from ckpt_engine.waits import SLICE_S, Deadline

_PEER_LOOK_S = 0.01
"""How often to look for what comes without a message."""

_ROOM_S = 2.0
"""How long retired segments may take to become free memory; the saver looks every second."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A FILLING slot of ours; ``waited_s`` seconds were spent until ``blocker`` ("" if none) let go of it."""

    slot: Slot
    waited_s: float
    blocker: str


class Buffers:
    """The slots of one rank, and a look at those of its node."""

    def __init__(self, link: Link, options: Options, *, local_world: int) -> None:
        self._link = link
        self._options = options
        self._local_world = local_world
        self._own: dict[SegmentName, Slot] = {}
        self._editions: dict[int, int] = {}  # the last one of each slot: a name is never used again
        self._theirs: dict[SegmentName, Slot] = {}  # mapped only while it matters: mapped memory is not free memory
        self._pages: dict[int, Page] = {}
        self._populating: dict[SegmentName, _C.Populate] = {}
        self._short: Deadline | None = None  # since when there is too little memory for a slot
        self.count = 0

    # -- what is there -------------------------------------------------------------------------------------------

    def node_slots(self) -> list[Slot]:
        """Every slot of this engine on this node, dead ranks' ones included."""
        names = self._link.names.segments()
        open_all([name for name in names if name.local_rank != self._link.local_rank], self._theirs)
        return [*self._own_slots(names), *self._theirs.values()]

    def mine(self) -> list[Slot]:
        """My slots, the newest edition of each; retired ones left out."""
        return self._newest(self._own_slots(self._link.names.segments()))

    def _newest(self, slots: Iterable[Slot]) -> list[Slot]:
        mine = [slot for slot in slots if slot.name.local_rank == self._link.local_rank and not slot.flags() & RETIRED]
        return list({slot.name.slot: slot for slot in sorted(mine, key=lambda found: found.name)}.values())

    def _own_slots(self, names: list[SegmentName]) -> list[Slot]:
        for name in [name for name, slot in self._own.items() if slot.unlinked()]:
            self._stop_populating(name)
            if not self._own[name].flags() & RETIRED:
                log.warning("slot %s was unlinked by someone (logind's RemoveIPC?): its snapshot is lost", name)
        return list(open_all([name for name in names if name.local_rank == self._link.local_rank], self._own).values())

    # -- lease ---------------------------------------------------------------------------------------------------

    def lease(self, need_bytes: int, deadline: Deadline) -> Lease:
        """A slot of ours with room for ``need_bytes``, in state FILLING; blocks until one is released.

        Raises BufferBusy at the deadline, ShmFull if memory is too small, SaverDied if a dead saver holds it.
        """
        found: list[Slot] = []
        blocker = ""

        def try_take() -> bool:
            nonlocal blocker
            slot = self._take(need_bytes, deadline)
            if slot is None:
                blocker = blocker or self._what_blocks()
                return False
            found.append(slot)
            return True

        start = Deadline(0)
        try:
            leased = self._link.wait(try_take, deadline, every_s=self._look_every_s)
        finally:
            self._let_go_of_peers()
            self._short = None
        if leased:
            return Lease(found[0], start.elapsed() if blocker else 0.0, blocker)
        waited = start.elapsed()
        raise BufferBusy(
            f"rank {self._link.record.rank}: no buffer was released within {waited:.1f} s; the oldest holds {blocker}. "
            "Storage is slower than the saves: save less often, use slots=3, or raise wait_s",
            rank=self._link.record.rank,
            waited_s=waited,
            attempt=blocker,
        )

    def reserve(self, need_bytes: int, deadline: Deadline) -> None:
        """Make the slots, for files of ``need_bytes``, unless it is done; touched in the background. Raises ShmFull."""
        self.count = self.count or self._decide(need_bytes, deadline)

    def busy(self) -> bool:
        """True if a save would have to wait now."""
        slots = self._newest(everyone := self.node_slots())
        return bool(self.count) and len(slots) >= self.count and self._victim(slots, everyone) is None

    def _look_every_s(self) -> float:
        """A release by the saver comes with a message; a peer's seal, and memory that becomes free, do not."""
        silent = self._short is not None or any(slot.word().state is State.READY for slot in self.mine())
        return _PEER_LOOK_S if silent else 1.0

    def _take(self, need_bytes: int, deadline: Deadline) -> Slot | None:
        if not self.count:
            self.count = self._decide(need_bytes, deadline)
        slots = self._newest(everyone := self.node_slots())
        if len(slots) < self.count:
            index = min(set(range(self.count)) - {slot.name.slot for slot in slots})
            return self._claimed(new) if (new := self._grow(index, need_bytes)) is not None else None
        chosen = self._victim(slots, everyone)
        if chosen is None:
            return None
        slot = self._claimed(chosen)
        if slot is None or slot.capacity >= need_bytes:
            return slot
        why = f"the state outgrew its buffer: {slot.capacity} bytes are there, {need_bytes} needed; a larger one comes"
        warn_once(f"{self._link.names.hash} {need_bytes}", why)
        self._retire(slot)
        return self._take(need_bytes, deadline)

    def _victim(self, slots: list[Slot], everyone: list[Slot]) -> Slot | None:
        """The one of my ``slots`` that may be filled; the newest attempt complete on the node stays (invariant 12)."""
        views = {slot.name: slot.view() for slot in everyone}
        mine = {views[slot.name]: slot for slot in slots}
        chosen = victim(list(mine), newest_common(views.values(), range(self._local_world)), self._hopeless)
        return mine.get(chosen) if chosen is not None else None

    def _claimed(self, slot: Slot) -> Slot | None:
        """``slot`` in state FILLING and cleared; None if the saver was faster."""
        word = slot.word()
        if word.state is State.FILLING:  # a fill of our predecessor; the saver may be freeing it just now, for he died
            slot.change("rank", word, State.FREE)
            word = slot.word()
        if word.state in LEASED or not slot.change(
            "rank", word, State.FILLING, incarnation=self._link.record.incarnation
        ):
            return None
        slot.clear_for_fill()
        return slot

    def _grow(self, index: int, need_bytes: int) -> Slot | None:
        """A new slot where the decided ones are not all there; checked and reserved one local rank after another.

        None: not now, retired segments may still make room. Raises ShmFull.
        """
        self._let_go_of_peers()  # what we map of theirs is not free, even if they gave it up
        lock = locks.lock_file(self._link.names.budget_lock)
        if not lock.lock(Deadline(SLICE_S)):
            return None
        try:
            return self._create(index, need_bytes) if self._room_for(need_bytes) else None
        finally:
            lock.unlock()

    def _create(self, index: int, need_bytes: int) -> Slot:
        """A new FREE slot (or a new edition of it), touched in the background."""
        last = max((name.edition for name in self._own if name.slot == index), default=0)
        for edition in range(max(last, self._editions.get(index, 0)) + 1, MAX_EDITION):
            name = self._link.names.segment(self._link.local_rank, index, edition)
            with contextlib.suppress(FileExistsError):  # retired, torn, or another user's: the next one
                slot = Slot.create(name, _segment_bytes(need_bytes) - DATA_OFFSET)
                self._own[name] = slot
                self._editions[index] = edition
                self._populating[name] = _C.Populate(slot.memory, offset=DATA_OFFSET)
                return slot
        raise StagingError(f"no free name for a slot after {name}: somebody fills /dev/shm with names like ours")

    def _retire(self, slot: Slot) -> None:
        """Give up a segment, FREE and marked, so that the saver unlinks it. REQUIRES: FILLING, by us."""
        self._stop_populating(slot.name)
        slot.set_flags(RETIRED)
        slot.change("rank", slot.word(), State.FREE)
        self._own.pop(slot.name).close()
        self._link.wake("joined")

    def _stop_populating(self, name: SegmentName) -> None:
        if (thread := self._populating.pop(name, None)) is not None:
            thread.stop()

    def _let_go_of_peers(self) -> None:
        for slot in self._theirs.values():
            slot.close()
        self._theirs.clear()

    def _room_for(self, need_bytes: int) -> bool:
        """True if a larger edition fits now, False if what we retired may still make room. Raises ShmFull."""
        room = budget.room()
        if room.free_bytes >= _segment_bytes(need_bytes):
            return True
        self._short = self._short or Deadline(_ROOM_S)
        if not self._short.expired():
            return False
        if self.count > 1 and room.free_bytes + sum(s.capacity for s in self.mine()) >= _segment_bytes(need_bytes):
            self.count, self._short = self.count - 1, None
            why = f"has no room for another buffer of {need_bytes} bytes: slots={self.count} from now on"
            log.warning("%s %s", room.limit, why)
            self._link.say(slots=self.count)
            return False
        raise ShmFull(
            f"the state grew to {need_bytes} bytes, and {room.limit} leaves {room.free_bytes}: enlarge it",
            need_bytes=need_bytes,
            free_bytes=room.free_bytes,
            limit=room.limit,
        )

    def _decide(self, need_bytes: int, deadline: Deadline) -> int:
        """How many slots each rank of this node gets; the first rank decides for all."""
        lock = locks.lock_file(self._link.names.budget_lock)
        if not lock.lock(deadline):
            raise StagingError(f"{lock.path} stayed locked until wait_s was over: is another rank stopped?")
        try:
            count = self._decided_by_peer()
            held = sum(slot.capacity for slot in self.node_slots())
            if not count:
                count = budget.slots_for_node(
                    wanted=self._options.slots,
                    slot_bytes=_segment_bytes(need_bytes),
                    local_ranks=self._local_world,
                    held_bytes=held,
                    found=budget.room(),
                )
            self._link.say(slots=count)
            for index in sorted(set(range(count)) - {slot.name.slot for slot in self.mine()}):
                self._create(index, need_bytes)  # all of it now: a later ENOSPC would cost a save
        finally:
            lock.unlock()
        return count

    def _decided_by_peer(self) -> int:
        for local_rank in set(range(self._local_world)) - {self._link.local_rank}:
            page = self._peer(local_rank) if self._alive(local_rank) else None
            if page is not None and page.slots:
                return page.slots
        return 0

    # -- peers ---------------------------------------------------------------------------------------------------

    def _peer(self, local_rank: int) -> RankPage | None:
        if local_rank not in self._pages:
            if (page := Page.find(self._link.names.rank_control(local_rank))) is None:
                return None
            self._pages[local_rank] = page
        return self._pages[local_rank].read(RankPage)

    def _alive(self, local_rank: int) -> bool:
        return locks.holder(self._link.names.rank_lock(local_rank)) is not None

    def _hopeless(self, order: Order) -> bool:
        """True if ``order`` can no longer become common to the node."""
        others = set(range(self._local_world)) - {self._link.local_rank}
        told = {local_rank: self._told(local_rank) for local_rank in others}  # before the slots: see ``hopeless``
        return hopeless(order, (slot.view() for slot in self.node_slots()), told)

    def _told(self, local_rank: int) -> Told:
        page = self._peer(local_rank)
        if page is None:
            return Told(alive=False)
        return Told(self._alive(local_rank), page.entered, page.outcome == "failed")

    def _what_blocks(self) -> str:
        for slot in sorted(self.mine(), key=lambda found: found.view().order or (0, 0)):
            found = slot.snapshot()
            if found is not None:
                return f"{found[1].attempt.tag} ({found[0].state.name}, attempt {found[1].attempt.id})"
        return "an unfinished fill"

    # -- the other line, and the end -----------------------------------------------------------------------------

    def drop(self, unwanted: Callable[[Header, State], bool]) -> int:
        """Free (or have cancelled) my snapshots that ``unwanted`` picks (invariant 9); returns how many."""
        dropped = 0
        for slot in self.mine():
            found = slot.snapshot()
            if found is None or not unwanted(found[1], found[0].state):
                continue
            dropped += 1
            if found[0].state is State.PERSISTING or not slot.change("rank", found[0], State.FREE):
                slot.set_flags(CANCEL)  # the saver frees it after its last I/O
        return dropped

    def close(self) -> None:
        for name in list(self._populating):
            self._stop_populating(name)
        self._let_go_of_peers()
        mapped: list[Slot | Page] = [*self._own.values(), *self._pages.values()]
        for one in mapped:
            one.close()
        self._own.clear()
        self._pages.clear()


def _segment_bytes(need_bytes: int) -> int:
    """What a new slot takes for files of ``need_bytes``."""
    return DATA_OFFSET + int(need_bytes * budget.GROWTH) + shm.PAGE
