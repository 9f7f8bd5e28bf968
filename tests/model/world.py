"""The state of the node model: what lies in shared memory and on disk, and what each process knows."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from ckpt_engine.control import RankPage
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.retention import Retention
from ckpt_engine.saver.peers import Peer
from ckpt_engine.states import (
    SNAPSHOT,
    Order,
    SlotView,
    State,
    Told,
    newest_common,
)
from ckpt_engine.waits import Deadline

ROOT_ID = "ab" * 8
NEVER = float("inf")


class Slot(NamedTuple):
    state: State = State.FREE
    order: Order | None = None
    life: int = 0
    cancel: bool = False


class Rank(NamedTuple):
    alive: bool = True
    life: int = 1
    generation: int = 1
    entered: Order = (0, 0)
    outcome: str = ""
    goodbye: bool = False
    at: str = "idle"  # idle, peek, look, claim, fill, sealed, queue
    told: tuple[Told | None, ...] = ()  # what it read of its peers' pages while it looks for a slot
    kept: Order | None = None
    chosen: int = -1
    waits: frozenset[Order] = frozenset()  # handles of storage saves without outcome


Page = tuple[int, int, Order, str, bool]
"""Incarnation, generation, attempt entered, its outcome, goodbye."""


class Saver(NamedTuple):
    alive: bool = True
    pages: tuple[Page, ...] = ()
    living: tuple[bool, ...] = ()
    job: tuple[int, int, str] | None = None  # (rank, slot, stage) in the writer's hands
    known: frozenset[tuple[Order, int]] = frozenset()  # shard records its committer was told of
    noted: frozenset[Order] = frozenset()  # attempts that its committer was told have failed
    chosen: tuple[tuple[Order, int], ...] = ()  # (attempt, rank) still to be queued for the dead
    asked: frozenset[Order] = frozenset()
    reported: frozenset[tuple[int, Order]] = frozenset()


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    slots: tuple[tuple[Slot, ...], ...]
    saver: Saver
    shards: frozenset[tuple[Order, int]] = frozenset()
    committed: frozenset[Order] = frozenset()
    failed: frozenset[Order] = frozenset()
    resumed: Order | None = None  # what the run of generation 2 came out of
    best: Order | None = None  # the newest attempt that was ever complete here
    deaths: int = 0
    mishaps: int = 0


def run_of(generation: int) -> str:
    return f"{generation:016x}"


@lru_cache(None)
def attempt_of(order: Order) -> Attempt:
    return Attempt(order[0], run_of(order[0]), order[1], 10 * order[1], f"step{order[1]}", ROOT_ID)


@lru_cache(None)
def claim_of(generation: int, resumed: Order | None) -> RunClaim:
    return RunClaim(generation, run_of(generation), attempt_of(resumed) if resumed else None, 2, 0)


@lru_cache(None)
def header_of(order: Order, rank: int, world: int) -> Header:
    return Header(
        attempt_of(order), claim_of(order[0], None), rank, rank, world, 0, 1, tuple(range(world)), "shared", "/root",
        f"/root/step{order[1]}", Retention(), None, True, (),
    )  # fmt: skip


@lru_cache(None)
def peer_of(page: Page, alive: bool, saved: bool, grace: bool) -> Peer:
    life, generation, entered, outcome, goodbye = page
    told = RankPage(
        incarnation=life, generation=generation, run=run_of(generation), entered=entered, outcome=outcome,
        goodbye=goodbye,
    )  # fmt: skip
    return Peer(told, alive, None if alive else Deadline(0.0 if grace else NEVER), saved)


def put_rank(world: World, number: int, **changes: object) -> World:
    ranks = list(world.ranks)
    ranks[number] = ranks[number]._replace(**changes)  # type: ignore[arg-type]
    return world._replace(ranks=tuple(ranks))


def put_saver(world: World, **changes: object) -> World:
    return world._replace(saver=world.saver._replace(**changes))  # type: ignore[arg-type]


def put_slot(world: World, rank: int, index: int, slot: Slot) -> World:
    rows = list(world.slots)
    row = list(rows[rank])
    row[index] = slot
    rows[rank] = tuple(row)
    after = world._replace(slots=tuple(rows))
    if slot.state is State.READY and (newest := common(after)) is not None and newest > (world.best or (0, 0)):
        after = after._replace(best=newest)
    return after


@lru_cache(1 << 16)
def view_of(rank: int, index: int, slot: Slot) -> SlotView:
    return SlotView(rank, index, slot.state, slot.order if slot.state in SNAPSHOT else None)


def views(world: World) -> list[SlotView]:
    return [view_of(rank, index, slot) for rank, row in enumerate(world.slots) for index, slot in enumerate(row)]


def common(world: World) -> Order | None:
    """The promise, whatever a rank takes for it (``states.newest_common``)."""
    return newest_common(views(world), range(len(world.ranks)))


def page_of(rank: Rank) -> Page:
    return (rank.life, rank.generation, rank.entered, rank.outcome, rank.goodbye)


def told_of(rank: Rank) -> Told:
    return Told(rank.alive, rank.entered, rank.outcome == "failed")


def done_of(rank: Rank) -> int:
    """The last save that this rank has left."""
    return rank.entered[1] - (rank.at != "idle")


def of(shards: frozenset[tuple[Order, int]], order: Order) -> frozenset[tuple[Order, int]]:
    return frozenset(one for one in shards if one[0] == order)


def missing(world: World, order: Order) -> list[int]:
    return [rank for rank in range(len(world.ranks)) if (order, rank) not in world.saver.known]


def holds(world: World, rank: int, order: Order, among: Collection[State] = SNAPSHOT) -> bool:
    return any(slot.order == order and slot.state in among for slot in world.slots[rank])


def pending(world: World) -> list[Order]:
    known = {order for order, _ in world.saver.known} | world.saver.noted
    return sorted(known - world.committed - world.failed)


def waiting(world: World) -> list[Order]:
    """Attempts of which parts are missing and may still come."""
    return [order for order in pending(world) if order not in world.saver.noted and missing(world, order)]


def note(world: World, order: Order) -> World:
    """The committer is told that ``order`` failed; news of one that has ended is no news."""
    if order in world.committed | world.failed:
        return world
    return put_saver(world, noted=world.saver.noted | {order})


def claims(world: World) -> list[RunClaim]:
    """Claims on disk, which come before the first byte of a run, and those in slot headers."""
    known = {order[0] for order, _ in world.shards}
    known |= {slot.order[0] for row in world.slots for slot in row if slot.order is not None}
    return [claim_of(generation, world.resumed if generation == 2 else None) for generation in sorted(known)]
