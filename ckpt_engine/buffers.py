"""This rank's slots: how many, how large, and which one may be filled next; here a rank blocks.

The number of slots is decided once per node under ``budget.lock``; a state that outgrew its slot gets a new
edition under a new name, and the saver removes the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine import _C, budget, locks, shm
from ckpt_engine.config import Options
from ckpt_engine.control import Page, RankPage
from ckpt_engine.errors import BufferBusy, ShmFull, StagingError
from ckpt_engine.events import log
from ckpt_engine.link import Link
from ckpt_engine.names import SegmentName
from ckpt_engine.slots import CANCEL, DATA_OFFSET, RETIRED, Header, Slot, open_all
from ckpt_engine.states import LEASED, SNAPSHOT, Order, SlotView, State, newest_common, victim
from ckpt_engine.waits import Deadline

_PEER_LOOK_S = 0.01
"""How often to look while a peer, which sends no message to us, has to seal its part."""


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
        self._all: dict[SegmentName, Slot] = {}
        self._pages: dict[int, Page] = {}
        self._populating: list[_C.Populate] = []
        self.count = 0

    # -- what is there -------------------------------------------------------------------------------------------

    def node_slots(self) -> list[Slot]:
        """Every slot of this engine on this node, dead ranks' ones included."""
        open_all(self._link.names.segments(), self._all)
        return list(self._all.values())

    def mine(self) -> list[Slot]:
        """My slots, the newest edition of each; retired ones left out."""
        newest: dict[int, Slot] = {}
        for slot in sorted(self.node_slots(), key=lambda found: found.name):
            if slot.name.local_rank == self._link.local_rank and not slot.flags() & RETIRED:
                newest[slot.name.slot] = slot
        return list(newest.values())

    def kept(self) -> Order | None:
        """The newest attempt complete on this node (invariant 12)."""
        return newest_common((slot.view() for slot in self.node_slots()), range(self._local_world))

    # -- lease ---------------------------------------------------------------------------------------------------

    def lease(self, need_bytes: int, deadline: Deadline) -> Lease:
        """A slot of ours with room for ``need_bytes``, in state FILLING; blocks until one is released.

        Raises BufferBusy at the deadline, ShmFull if memory is too small, SaverDied if a dead saver holds it.
        """
        found: list[Slot] = []
        blocker = ""

        def try_take() -> bool:
            nonlocal blocker
            slot = self._take(need_bytes)
            if slot is None:
                blocker = blocker or self._what_blocks()
                return False
            found.append(slot)
            return True

        start = Deadline(0)
        if not self._link.wait(try_take, deadline, every_s=self._look_every_s):
            waited = start.elapsed()
            raise BufferBusy(
                f"rank {self._link.record.rank}: no buffer was released within {waited:.1f} s; the oldest holds {blocker}. "
                "Storage is slower than the saves: save less often, use slots=3, or raise wait_s",
                rank=self._link.record.rank,
                waited_s=waited,
                attempt=blocker,
            )
        return Lease(found[0], start.elapsed() if blocker else 0.0, blocker)

    def busy(self) -> bool:
        """True if a save would have to wait now."""
        mine = [slot.view() for slot in self.mine()]
        return bool(self.count) and len(mine) >= self.count and victim(mine, self.kept(), self._hopeless) is None

    def _look_every_s(self) -> float:
        """Releases come with a message; a peer's seal does not."""
        waiting_for_peer = any(slot.word().state is State.READY for slot in self.mine())
        return _PEER_LOOK_S if waiting_for_peer else 1.0

    def _take(self, need_bytes: int) -> Slot | None:
        if not self.count:
            self.count = self._decide(need_bytes)
        slots = self.mine()
        if len(slots) < self.count:
            used = {slot.name.slot for slot in slots}
            index = min(set(range(self.count)) - used)
            return self._claimed(self._create(index, need_bytes)) if self._room_for(need_bytes) else None
        by_view = {slot.view(): slot for slot in slots}
        chosen = victim(list(by_view), self.kept(), self._hopeless)
        if chosen is None:
            return None
        slot = by_view[chosen]
        if slot.capacity >= need_bytes and not slot.unlinked():
            return self._claimed(slot)
        why = "was unlinked by someone (logind's RemoveIPC?)" if slot.unlinked() else f"holds {slot.capacity} bytes"
        log.warning("slot %s %s and %d are needed: making a new edition", slot.name, why, need_bytes)
        retire(slot, self._link)
        return self._take(need_bytes)

    def _claimed(self, slot: Slot) -> Slot | None:
        """``slot`` in state FILLING and cleared; None if the saver was faster."""
        word = slot.word()
        if word.state in LEASED:
            return None
        begun = word.state is State.FILLING  # ours: a fill that was cut short
        if not begun and not slot.change("rank", word, State.FILLING, incarnation=self._link.record.incarnation):
            return None
        slot.clear_for_fill()
        return slot

    def _create(self, index: int, need_bytes: int) -> Slot:
        """A new FREE slot (or a new edition of it), touched in the background."""
        names = self._link.names
        editions = [n.edition for n in names.segments() if n.local_rank == self._link.local_rank and n.slot == index]
        name = names.segment(self._link.local_rank, index, max(editions, default=0) + 1)
        capacity = int(need_bytes * budget.GROWTH) + shm.PAGE
        slot = Slot.create(name, capacity)
        self._all[name] = slot
        self._populating = [thread for thread in self._populating if not thread.wait(0)]
        self._populating.append(_C.Populate(slot.memory, offset=DATA_OFFSET))
        return slot

    def _room_for(self, need_bytes: int) -> bool:
        """True if a larger edition fits now, False if the saver is about to make room. Raises ShmFull."""
        room = budget.room()
        if room.free_bytes >= need_bytes * budget.GROWTH:
            return True
        if any(slot.flags() & RETIRED for slot in self.node_slots()):
            return False
        raise ShmFull(
            f"the state grew to {need_bytes} bytes, more than its slot; {room.limit} leaves {room.free_bytes}. Enlarge "
            "it, or end this job and start it with fewer slots",
            need_bytes=need_bytes,
            free_bytes=room.free_bytes,
            limit=room.limit,
        )

    def _decide(self, need_bytes: int) -> int:
        """How many slots each rank of this node gets; the first rank decides for all."""
        lock = locks.lock_file(self._link.names.budget_lock)
        deadline = Deadline(60.0)
        if not lock.lock(deadline):
            raise StagingError(f"{lock.path} stayed locked for {deadline.elapsed():.0f} s: is another rank stopped?")
        try:
            count = self._decided_by_peer()
            held = sum(slot.capacity for slot in self.node_slots())
            need = int(need_bytes * budget.GROWTH) + DATA_OFFSET + shm.PAGE
            if not count:
                count = budget.slots_for_node(
                    wanted=self._options.slots,
                    slot_bytes=need,
                    local_ranks=self._local_world,
                    held_bytes=held,
                    found=budget.room(),
                )
            self._link.say(slots=count)
            for index in range(count - len(self.mine())):  # reserve all of it now: a later ENOSPC would cost a save
                used = {slot.name.slot for slot in self.mine()}
                self._create(min(set(range(index + len(used) + 1)) - used), need_bytes)
        finally:
            lock.unlock()
        return count

    def _decided_by_peer(self) -> int:
        for local_rank in range(self._local_world):
            if local_rank != self._link.local_rank and self._alive(local_rank):
                page = self._peer(local_rank)
                if page is not None and page.slots:
                    return page.slots
        return 0

    # -- peers ---------------------------------------------------------------------------------------------------

    def _peer(self, local_rank: int) -> RankPage | None:
        if local_rank not in self._pages:
            page = Page.find(self._link.names.rank_control(local_rank))
            if page is None:
                return None
            self._pages[local_rank] = page
        return self._pages[local_rank].read(RankPage)

    def _alive(self, local_rank: int) -> bool:
        return locks.holder(self._link.names.rank_lock(local_rank)) is not None

    def _hopeless(self, order: Order) -> bool:
        """True if ``order`` can no longer become common to the node."""
        views = [slot.view() for slot in self.node_slots()]
        for local_rank in set(range(self._local_world)) - {self._link.local_rank}:
            if any(v.local_rank == local_rank and v.order == order and v.state in SNAPSHOT for v in views):
                continue
            page = self._peer(local_rank)
            if not self._alive(local_rank) or page is None:
                return True
            if page.entered > order or (page.entered == order and page.outcome == "failed"):
                return True
        return False

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
        for thread in self._populating:
            thread.stop()
        self._populating.clear()
        for slot in self._all.values():
            slot.close()
        for page in self._pages.values():
            page.close()
        self._all.clear()
        self._pages.clear()


def retire(slot: Slot, link: Link) -> None:
    """Give up a segment: FREE and marked, so that the saver unlinks it."""
    slot.set_flags(RETIRED)
    word = slot.word()
    if word.state is not State.FREE:
        slot.change("rank", word, State.FREE)
    link.wake("joined")


def seal(slot: Slot, header: Header) -> None:
    """FILLING → READY: complete, checksummed, immutable; a snapshot from now on."""
    slot.put_header(header)
    if not slot.change("rank", slot.word(), State.READY, header.attempt):
        raise StagingError(f"slot {slot.name} was taken away while it was filled")
