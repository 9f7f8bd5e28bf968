"""One node: ranks with their slots, a saver that is killed and started again, a job that dies and comes back.

Every rule is production's own: who may change which state, which slot is filled next, what the saver makes of a slot
it finds, what it concludes from locks and control pages, and what it does for the dead. The disk is reduced to the
set of shard records and the set of committed attempts (`publishing` has the rest). Messages are not there at all:
every process may look at any time, so any of them may have been lost, doubled or late.

What a process has seen is part of the state: it acts upon old news, and only compare-exchange is atomic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ckpt_engine import runs, states
from ckpt_engine.saver import endings
from ckpt_engine.saver.peers import Peer
from ckpt_engine.states import (
    LEASED,
    SNAPSHOT,
    Order,
    State,
    Word,
    check_transition,
    tended,
)

from .explorer import Violation
from .world import (
    NEVER,
    Rank,
    Saver,
    Slot,
    World,
    attempt_of,
    claim_of,
    claims,
    common,
    done_of,
    header_of,
    holds,
    missing,
    note,
    of,
    page_of,
    peer_of,
    pending,
    put_rank,
    put_saver,
    put_slot,
    told_of,
    views,
    waiting,
)


class Node:
    """``saves``: one letter for each save of the first run, M(emory) or S(torage); ``again``: those of the second.

    ``together``: ranks die all at once, and no saver does. ``grace``: the grace after a first death is over at once.
    ``late``: it begins when all have sealed their first save and one has queued it.
    """

    def __init__(
        self, saves: str, again: str = "", *, ranks: int = 2, slots: int = 2, deaths: int = 1, mishaps: int = 0,
        drift: int = 0, grace: bool = False, together: bool = False, late: bool = False,
    ) -> None:  # fmt: skip
        self.name = f"node {saves}/{again or '-'}"
        self.bounds = (
            f"{ranks} ranks x {slots} slots, {len(saves)} saves, then {len(again)} of a second run, {deaths} deaths, "
            f"{mishaps} failed fills or writes, ranks {drift} saves apart at most"
            + ", all ranks die at once" * together
            + ", from the first seal on" * late
            + ", no grace" * grace
        )
        self.saves = {1: saves, 2: again}
        self.together, self.late = together, late
        self.ranks, self.slots, self.deaths, self.mishaps, self.drift, self.grace = (
            ranks,
            slots,
            deaths,
            mishaps,
            drift,
            grace,
        )

    def world(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self) -> Iterable[World]:
        rank, row = Rank(told=(None,) * self.ranks), (Slot(),) * self.slots
        world = World((rank,) * self.ranks, (row,) * self.ranks, Saver())
        for number in range(self.ranks if self.late else 0):
            world = put_slot(world, number, 0, Slot(State.READY, (1, 1), 1))
            world = put_rank(world, number, entered=(1, 1), outcome="sealed", at="queue", chosen=0)
        if self.late:
            world = put_slot(world, 0, 0, Slot(State.QUEUED, (1, 1), 1))
            world = put_rank(world, 0, at="idle", waits=frozenset({(1, 1)}))
        yield world

    # -- promises ------------------------------------------------------------------------------------------------

    def wrong(self, world: World) -> str:
        if world.best is not None and (common(world) or (0, 0)) < world.best:
            return f"invariant 12: {world.best} was complete in memory, now only {common(world)} is"
        for rank, row in enumerate(world.slots):
            for slot in row:
                if slot.state is State.DURABLE and (slot.order, rank) not in world.shards:
                    return f"invariant 1: {slot.order} of rank {rank} was released and is not durable"
        return ""

    def rests(self, world: World) -> str:
        for number, rank in enumerate(world.ranks):
            if rank.alive:
                return f"deadlock: rank {number} waits for ever (at {rank.at}, {rank.entered})"
        if not world.saver.alive:
            return ""  # nobody is left: the next start finds the slots, see ``_job_starts``
        leased = [slot for row in world.slots for slot in row if slot.state in LEASED | {State.FILLING}]
        if leased:
            return f"orphaned for ever: {leased[0]}"
        if stuck := pending(world):
            return f"the saver waits for ever for the missing parts of {sorted(stuck)}"
        died = any(not rank.goodbye for rank in world.ranks)
        if died and world.best and world.best not in world.committed and not world.mishaps:
            return f"invariant 13: all are dead and {world.best}, complete in memory, is not committed"
        return ""

    # -- what may happen -----------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        waited = True
        for step, after in self._moves(world):
            waited = waited and (step[0] == "!" or after == world)
            yield step, after
        if waited and world.saver.alive:  # commit_s is long: it ends only what nothing else ends
            for order in waiting(world):
                if not any(holds(world, rank, order) for rank in missing(world, order)):
                    yield f"commit_s is over for {order}", world._replace(failed=world.failed | {order})

    def _moves(self, world: World) -> Iterator[tuple[str, World]]:
        for number, rank in enumerate(world.ranks):
            if rank.alive:
                yield from self._rank(world, number, rank)
        if world.saver.alive:
            yield from self._saver(world)
        elif any(rank.alive for rank in world.ranks):
            yield "a saver starts and recovers", world._replace(saver=Saver(known=world.shards))
        yield from self._faults(world)

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        if world.deaths < self.deaths:
            once = world._replace(deaths=world.deaths + 1)
            for number, rank in enumerate(world.ranks):
                twin = number > 0 and all(peer.alive and peer.life == 1 for peer in world.ranks)
                if self.together and rank.alive:
                    dead = tuple(peer._replace(alive=False) for peer in once.ranks)
                    yield f"! all ranks are killed (at {[peer.at for peer in once.ranks]})", once._replace(ranks=dead)
                    break
                if rank.alive and not twin:  # ranks are alike: the first to die may as well be rank 0
                    yield f"! rank {number} is killed (at {rank.at})", put_rank(once, number, alive=False)
            if world.saver.alive and not self.together:
                yield f"! the saver is killed (writing {world.saver.job})", once._replace(saver=Saver(alive=False))
        for number, rank in enumerate(world.ranks):
            if rank.alive and any(not peer.alive and not peer.goodbye for peer in world.ranks):
                yield f"rank {number} is ended, a peer died", put_rank(world, number, alive=False)
        over = all(not rank.alive and not rank.goodbye for rank in world.ranks)
        if over and self.saves[2] and world.ranks[0].generation == 1:
            yield "! the job starts again", self._job_starts(world)

    def _job_starts(self, world: World) -> World:
        newest = max(common(world) or (0, 0), *world.committed, (0, 0))
        if newest < max([world.best or (0, 0), *world.committed]):
            raise Violation(f"invariant 13: the next start finds {newest}, there was {world.best}")
        ranks = tuple(
            Rank(life=rank.life + 1, generation=2, told=(None,) * self.ranks, entered=rank.entered, outcome="")
            for rank in world.ranks
        )
        return world._replace(ranks=tuple(r._replace(entered=(0, 0)) for r in ranks), resumed=newest)

    # -- a rank --------------------------------------------------------------------------------------------------

    def _rank(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        name, row = f"rank {number}", world.slots[number]
        if rank.at == "idle":
            yield from self._between_saves(world, number, rank)
        elif rank.at in ("peek", "look"):
            told = tuple(told_of(peer) if one != number else None for one, peer in enumerate(world.ranks))
            kept = states.newest_common(views(world), range(self.ranks))
            if rank.at == "peek":
                yield f"{name} looks", put_rank(world, number, at="look", told=told, kept=kept)
                return
            peers = {one: was for one, was in enumerate(rank.told) if was is not None}
            seen = views(world)
            mine = [view for view in seen if view.local_rank == number]
            chosen = states.victim(mine, rank.kept, lambda order: states.hopeless(order, seen, peers))
            if chosen is not None:
                yield f"{name} chooses slot {chosen.slot}", put_rank(world, number, at="claim", chosen=chosen.slot)
            elif (told, kept) != (rank.told, rank.kept):
                yield f"{name} looks again", put_rank(world, number, told=told, kept=kept)
        elif rank.at == "claim":
            slot = row[rank.chosen]
            if slot.state is State.FILLING:
                check_transition("rank", slot.state, State.FREE)
                slot = slot._replace(state=State.FREE)
            if slot.state in LEASED:
                yield f"{name} was too late", put_rank(world, number, at="peek")
                return
            check_transition("rank", slot.state, State.FILLING)
            after = put_slot(world, number, rank.chosen, Slot(State.FILLING, None, rank.life))
            yield f"{name} fills slot {rank.chosen}", put_rank(after, number, at="fill")
        elif rank.at == "fill":
            slot = row[rank.chosen]
            if slot.state is not State.FILLING or slot.life != rank.life:
                raise Violation(f"invariant 1: slot {rank.chosen} was taken from {name} while it was filled: {slot}")
            sealed = put_slot(world, number, rank.chosen, Slot(State.READY, rank.entered, rank.life))
            yield f"{name} seals {rank.entered}", put_rank(sealed, number, at="sealed")
            if world.mishaps < self.mishaps:
                freed = put_slot(world, number, rank.chosen, Slot(State.FREE, None, rank.life))
                freed = freed._replace(mishaps=world.mishaps + 1)
                yield f"! {name} cannot fill", put_rank(freed, number, at="idle", outcome="failed")
        elif rank.at == "sealed":
            at = "queue" if self._kind(rank) == "S" else "idle"
            yield f"{name} says sealed", put_rank(world, number, at=at, outcome="sealed")
        elif rank.at == "queue":
            after = world
            if row[rank.chosen].state is State.READY:
                after = put_slot(world, number, rank.chosen, row[rank.chosen]._replace(state=State.QUEUED))
            yield f"{name} queues", put_rank(after, number, at="idle", waits=rank.waits | {rank.entered})

    def _kind(self, rank: Rank) -> str:
        return self.saves[rank.generation][rank.entered[1] - 1]

    def _between_saves(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        after = rank.entered[1] + 1
        if after <= len(self.saves[rank.generation]):
            if all(after - done_of(peer) <= 1 + self.drift for peer in world.ranks):
                entered = put_rank(
                    self._leave_other_lines(world, number) if after == 1 else world, number,
                    entered=(rank.generation, after), outcome="filling", at="peek",
                    told=(None,) * self.ranks, kept=None,
                )  # fmt: skip
                yield f"rank {number} enters save {after}", entered
        elif rank.waits <= world.committed | world.failed:
            if rank.goodbye:
                yield f"rank {number} lets go of its lock", put_rank(world, number, alive=False)
            else:
                yield f"rank {number} says goodbye", put_rank(world, number, goodbye=True)

    def _leave_other_lines(self, world: World, number: int) -> World:
        claim = claim_of(world.ranks[number].generation, world.resumed)
        known = [claim, claim_of(1, None)]
        for index, slot in enumerate(world.slots[number]):
            if slot.state in SNAPSHOT and slot.order is not None:
                leased = slot.state in LEASED
                if runs.left_behind(attempt_of(slot.order), claim, known, leased=leased):
                    if slot.state is State.PERSISTING:
                        world = put_slot(world, number, index, slot._replace(cancel=True))
                    else:
                        check_transition("rank", slot.state, State.FREE)
                        world = put_slot(world, number, index, slot._replace(state=State.FREE, order=None))
        return world

    # -- the saver -----------------------------------------------------------------------------------------------

    def _saver(self, world: World) -> Iterator[tuple[str, World]]:
        saver = world.saver
        pages = tuple(map(page_of, world.ranks))
        living = tuple(rank.alive for rank in world.ranks)
        if (pages, living) != (saver.pages, saver.living) and (not saver.pages or self._matters(world)):
            yield "the saver looks", put_saver(world, pages=pages, living=living)
        if saver.pages:
            yield from self._tends(world)
            conclusions = list(self._concludes(world))
            yield from conclusions or self._thinks_of_the_dead(world)
        yield from self._writes(world)
        yield from self._commits(world)

    def _matters(self, world: World) -> bool:
        """A look at ranks that all live and do well, and hold all that is waited for, changes nothing."""
        well = all(rank.alive and rank.outcome != "failed" for rank in world.ranks)
        return not well or any(
            not holds(world, rank, order, LEASED) for order in waiting(world) for rank in missing(world, order)
        )

    def _peers(self, saver: Saver) -> list[Peer]:
        saved = any(page[2] > (0, 0) for page in saver.pages)
        return [peer_of(page, alive, saved, self.grace) for page, alive in zip(saver.pages, saver.living, strict=True)]

    def _tends(self, world: World) -> Iterator[tuple[str, World]]:
        saver = world.saver
        for rank, row in enumerate(world.slots):
            dead = None if saver.living[rank] else saver.pages[rank][0]
            for index, slot in enumerate(row):
                mine = saver.job is not None and saver.job[:2] == (rank, index)
                word = Word(slot.state, slot.life, *(slot.order or (0, 0)))
                handed = Word(State.QUEUED, slot.life, *(slot.order or (0, 0))) if mine else None
                state = tended(word, handed=handed, dead=dead)
                if state is not None:
                    check_transition("saver", slot.state, state)
                    after = slot._replace(state=state) if state is State.QUEUED else Slot(state, None, slot.life)
                    step = f"the saver makes slot {rank}.{index} {state.name}, it was {slot.state.name}"
                    yield step, put_slot(world, rank, index, after)

    def _concludes(self, world: World) -> Iterator[tuple[str, World]]:
        saver = world.saver
        peers = self._peers(saver)
        for rank, peer in enumerate(peers):
            entered = peer.page.entered
            if (rank, entered) in saver.reported or not self._storage(entered):
                continue
            if peer.failed(sealed=holds(world, rank, entered)):
                told = put_saver(note(world, entered), reported=saver.reported | {(rank, entered)})
                yield f"the saver notes that rank {rank} failed {entered}", told
        for order in waiting(world):
            for rank in missing(world, order):
                ready = holds(world, rank, order, {State.READY})
                if (ready or not holds(world, rank, order)) and peers[rank].without(attempt_of(order), ready=ready):
                    step = f"the saver notes that rank {rank} left {order}"
                    yield step, note(world, order)

    def _storage(self, order: Order) -> bool:
        return order > (0, 0) and self.saves[order[0]][order[1] - 1] == "S"

    def _thinks_of_the_dead(self, world: World) -> Iterator[tuple[str, World]]:
        saver = world.saver
        if saver.chosen:
            (order, rank), *later = saver.chosen
            after = self._reopen(put_saver(world, chosen=tuple(later)), order)
            for index, slot in enumerate(world.slots[rank]):
                if slot.order == order and slot.state in (State.READY, State.FAILED):
                    check_transition("saver", slot.state, State.QUEUED)
                    after = put_slot(after, rank, index, slot._replace(state=State.QUEUED))
            yield f"the saver queues {order} of rank {rank} for the dead", after
        elif endings.deaths_call(self._peers(saver), 0.0 if self.grace else NEVER):
            headers = [
                header_of(slot.order, rank, self.ranks)
                for rank, row in enumerate(world.slots)
                for slot in row
                if slot.state in SNAPSHOT and slot.order is not None
            ]
            complete = endings.complete_here(headers)
            if complete and complete[0].attempt.order not in saver.asked:
                newest = max(world.committed, default=(0, 0))
                worth = endings.worth_saving(complete, newest, claims(world))[:1]
                chosen = tuple((attempt.order, rank) for attempt in worth for rank in range(self.ranks))
                asked = saver.asked | {complete[0].attempt.order}
                yield f"the saver chooses {worth and worth[0].order}", put_saver(world, chosen=chosen, asked=asked)

    def _reopen(self, world: World, order: Order) -> World:
        known, noted = world.saver.known | of(world.shards, order), world.saver.noted - {order}
        return put_saver(world, known=known, noted=noted)._replace(failed=world.failed - {order})

    def _writes(self, world: World) -> Iterator[tuple[str, World]]:
        """The one writer: take, write, tell the committer, release."""
        saver = world.saver
        if saver.job is None:
            for rank, row in enumerate(world.slots):
                for index, slot in enumerate(row):
                    if slot.state is State.QUEUED:
                        check_transition("saver", slot.state, State.PERSISTING)
                        taken = put_slot(world, rank, index, slot._replace(state=State.PERSISTING))
                        yield (
                            f"the writer takes {slot.order} of rank {rank}",
                            put_saver(taken, job=(rank, index, "write")),
                        )
            return
        rank, index, stage = saver.job
        slot = world.slots[rank][index]
        order = slot.order
        assert order is not None and slot.state is State.PERSISTING, "the slot in the writer's hands is the saver's"
        if stage == "write" and slot.cancel:
            freed = put_slot(world, rank, index, Slot(State.FREE, None, slot.life))
            yield f"the writer gives up {order}", put_saver(freed, job=None)._replace(failed=world.failed | {order})
        elif stage == "write":
            written = world._replace(shards=world.shards | {(order, rank)})
            yield f"{order} of rank {rank} is durable", put_saver(written, job=(rank, index, "tell"))
            if world.mishaps < self.mishaps:
                failed = put_slot(world, rank, index, slot._replace(state=State.FAILED))
                failed = note(failed._replace(mishaps=world.mishaps + 1), order)
                yield f"! {order} of rank {rank} cannot be written", put_saver(failed, job=None)
        elif stage == "tell":
            known = saver.known | {(order, rank)}
            yield "the committer is told", put_saver(world, known=known, job=(rank, index, "release"))
        else:
            check_transition("saver", slot.state, State.DURABLE)
            released = put_slot(world, rank, index, slot._replace(state=State.DURABLE))
            yield f"slot {rank}.{index} is released", put_saver(released, job=None)

    def _commits(self, world: World) -> Iterator[tuple[str, World]]:
        ready = [order for order in pending(world) if order in world.saver.noted or not missing(world, order)]
        if not ready:
            return
        order = min(ready)
        if order in world.saver.noted:
            after = put_saver(world, noted=world.saver.noted - {order})
            yield f"{order} has failed", after._replace(failed=world.failed | {order})
        elif runs.on_the_line(attempt_of(order), claims(world)):
            yield f"{order} is committed", world._replace(committed=world.committed | {order})
        else:
            yield f"{order} is cancelled", world._replace(failed=world.failed | {order})
