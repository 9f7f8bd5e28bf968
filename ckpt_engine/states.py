"""The pure rules of slots: which change of state is whose, and which slot a rank may fill next.

::

    FREE       → FILLING (rank)
    FILLING    → READY (rank); FREE (rank raised; saver if the owner is dead)
    READY      → QUEUED (rank: storage save; saver: breakpoint); FILLING (rank, victim rule); FREE (rank, other line)
    QUEUED     → PERSISTING (saver); FREE (rank, other line)
    PERSISTING → DURABLE, FAILED, FREE = cancelled (saver, after its last I/O); QUEUED (next holder of the saver lock)
    DURABLE    → FILLING, FREE (rank)
    FAILED     → FILLING, FREE (rank); QUEUED (saver, retry)

The state word is state:8 | incarnation:24 | generation:8 | seq:24, changed by compare-exchange only; what it holds
beside the state only defeats ABA. Identity is always the whole attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_engine.errors import CkptError

Order = tuple[int, int]
"""(generation, seq): the order of attempts in time."""


class State(enum.IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2
    QUEUED = 3
    PERSISTING = 4
    DURABLE = 5
    FAILED = 6


STATES = {int(state): state for state in State}

SNAPSHOT = frozenset({State.READY, State.QUEUED, State.PERSISTING, State.DURABLE, State.FAILED})
"""States in which a slot is complete and immutable."""

LEASED = frozenset({State.QUEUED, State.PERSISTING})
"""States in which the slot belongs to the saver (invariant 1)."""

_RANK = {
    (State.FREE, State.FILLING),
    (State.FILLING, State.READY),
    (State.FILLING, State.FREE),
    (State.READY, State.QUEUED),
    (State.READY, State.FILLING),
    (State.READY, State.FREE),
    (State.QUEUED, State.FREE),
    (State.DURABLE, State.FILLING),
    (State.DURABLE, State.FREE),
    (State.FAILED, State.FILLING),
    (State.FAILED, State.FREE),
}
_SAVER = {
    (State.FILLING, State.FREE),
    (State.READY, State.QUEUED),
    (State.QUEUED, State.PERSISTING),
    (State.PERSISTING, State.DURABLE),
    (State.PERSISTING, State.FAILED),
    (State.PERSISTING, State.FREE),
    (State.PERSISTING, State.QUEUED),
    (State.FAILED, State.QUEUED),
}
TRANSITIONS = {"rank": frozenset(_RANK), "saver": frozenset(_SAVER)}


@dataclass(frozen=True, slots=True)
class Word:
    """The state word, unpacked. Stale high bits of generation and seq are cut off on purpose."""

    state: State = State.FREE
    incarnation: int = 0
    generation: int = 0
    seq: int = 0

    def pack(self) -> int:
        return (
            self.state << 56
            | (self.incarnation & 0xFFFFFF) << 32
            | (self.generation & 0xFF) << 24
            | (self.seq & 0xFFFFFF)
        )

    def is_of(self, order: Order) -> bool:
        """True if these may be the low bits of ``order``."""
        return (self.generation, self.seq) == (order[0] & 0xFF, order[1] & 0xFFFFFF)

    @classmethod
    def unpack(cls, value: int) -> Word:
        """A state that does not exist (damage) reads as FREE: no snapshot, and no compare-exchange on it succeeds."""
        state = STATES.get(value >> 56, State.FREE)
        return cls(state, value >> 32 & 0xFFFFFF, value >> 24 & 0xFF, value & 0xFFFFFF)


def check_transition(actor: str, old: State, new: State) -> None:
    """Raises CkptError if ``actor`` ("rank" or "saver") must not change ``old`` into ``new``."""
    if (old, new) not in TRANSITIONS[actor]:
        raise CkptError(f"a {actor} must not turn a {old.name} slot {new.name}")


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the rules need to know of one slot; ``order`` is None where no attempt was ever sealed in it."""

    local_rank: int
    slot: int
    state: State
    order: Order | None


def newest_common(views: Iterable[SlotView], local_ranks: Collection[int]) -> Order | None:
    """The newest attempt that every one of ``local_ranks`` holds complete; it is never overwritten (invariant 12)."""
    held: dict[int, set[Order]] = {rank: set() for rank in local_ranks}
    for view in views:
        if view.state in SNAPSHOT and view.order is not None and view.local_rank in held:
            held[view.local_rank].add(view.order)
    common = set.intersection(*held.values()) if held else set()
    return max(common, default=None)


@dataclass(frozen=True, slots=True)
class Told:
    """What the lock and the control page of a local rank say; ``failed`` is about the attempt it ``entered``."""

    alive: bool
    entered: Order = (0, 0)
    failed: bool = False


def hopeless(order: Order, views: Iterable[SlotView], peers: Mapping[int, Told]) -> bool:
    """True if some of ``peers`` neither holds ``order`` nor can still seal it: it never becomes common.

    REQUIRES: ``peers`` was read before ``views``, or a peer that seals and goes on in between looks as if it had
    gone on without.
    """
    holders = {view.local_rank for view in views if view.order == order and view.state in SNAPSHOT}
    return any(
        not told.alive or told.entered > order or (told.entered == order and told.failed)
        for local_rank, told in peers.items()
        if local_rank not in holders
    )


def tended(word: Word, *, handed: Word | None, dead: int | None) -> State | None:
    """What the saver makes of a slot it finds like this, if anything.

    ``handed``: the word with which this saver gave the slot to its writer; a PERSISTING slot of another word was a
    dead saver's. ``dead``: the incarnation of its rank, read before the rank was seen to be dead; None: it lives. A
    fill of a later life is not touched.
    """
    if word.state is State.FILLING and dead is not None and (dead - word.incarnation) & 0xFFFFFF < 1 << 23:
        return State.FREE
    if word.state is State.PERSISTING and handed != replace(word, state=State.QUEUED):
        return State.QUEUED
    return None


def victim(mine: Sequence[SlotView], kept: Order | None, hopeless: Callable[[Order], bool]) -> SlotView | None:
    """The slot this rank may fill now, or None: wait for a release.

    ``kept`` is ``newest_common``; ``hopeless(order)`` tells that an attempt can no longer become common, since
    some local rank failed it or is dead. A rank with a single slot gives up what it holds (documented as weaker).
    """
    usable = [view for view in mine if view.state not in LEASED]
    free = [view for view in usable if view.state in (State.FREE, State.FILLING)]
    if free:
        return free[0]
    if len(mine) == 1:
        return usable[0] if usable else None

    def oldest(candidates: Iterable[SlotView]) -> SlotView | None:
        return min(candidates, key=lambda view: view.order or (-1, -1), default=None)

    done = oldest(v for v in usable if v.state in (State.DURABLE, State.FAILED) and v.order != kept)
    if done is not None:
        return done
    ready = [view for view in usable if view.state is State.READY]
    older = oldest(v for v in ready if v.order is None or (kept is not None and v.order < kept))
    if older is not None:
        return older
    return oldest(v for v in ready if v.order is not None and v.order != kept and hopeless(v.order))
