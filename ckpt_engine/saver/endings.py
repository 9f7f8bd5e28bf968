"""What a saver does when ranks die or say goodbye: breakpoint save, linger, and which slots may be unlinked.

Death: finish what is queued. When all local ranks are dead, or ``grace_s`` after the first death, the newest
attempt that is complete here and newer than the newest committed one is persisted; with several nodes on a shared
root all nodes first offer what they hold, and the newest attempt common to all is taken (at the deadline: all that
is held). Goodbye: drain, then unlink. SIGTERM: as if everybody had died.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_engine import runs, shm
from ckpt_engine.control import Outcome
from ckpt_engine.errors import CkptError
from ckpt_engine.events import log, span
from ckpt_engine.manifest import Attempt, Failure, Offer
from ckpt_engine.saver.committer import node_of, outcome_from
from ckpt_engine.slots import BREAKPOINT, Header
from ckpt_engine.states import SNAPSHOT, Order, State
from ckpt_engine.waits import Deadline

if TYPE_CHECKING:
    from ckpt_engine.saver.server import Server


class Endings:
    """The part of a server that thinks about the end; its questions to the disk run in the committing thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._asked: set[tuple[str, Order]] = set()
        self._chosen: list[Attempt] = []
        self._newest: dict[str, Order] = {}
        self._retried: set[Attempt] = set()
        self._born = Deadline(server.options.grace_s)
        self.settled = True

    # -- death ---------------------------------------------------------------------------------------------------

    def think(self, *, terminating: bool) -> None:
        server = self._server
        for attempt in self._take_chosen():
            server.queue_breakpoint(attempt)
        if not (terminating or self._deaths_call()):
            return
        complete = complete_here(server.headers())
        if not complete:
            return
        key = ("term" if terminating else complete[0].attempt.run, complete[0].attempt.order)
        if key in self._asked:
            return
        self._asked.add(key)
        self.settled = False
        question = Breakpoint(self, server, complete)
        server.committer.ask(question.answered)

    def _deaths_call(self) -> bool:
        peers = self._server.peers.values()
        dead = [peer for peer in peers if peer.died and peer.page.run]
        if not dead:
            return False
        if not any(peer.alive for peer in peers):
            return True
        newest_run = max(peers, key=lambda peer: peer.page.generation).page.run
        first = [peer.dead_since for peer in dead if peer.page.run == newest_run and peer.dead_since]
        return any(since.elapsed() >= self._server.options.grace_s for since in first)

    def choose(self, attempts: Iterable[Attempt]) -> None:
        """Called in the committing thread: these are to be persisted."""
        self._chosen.extend(attempts)
        self.settled = True
        self._server.wake()

    def _take_chosen(self) -> list[Attempt]:
        taken = [self._chosen.pop(0) for _ in range(len(self._chosen))]
        return taken

    # -- the end of life -----------------------------------------------------------------------------------------

    def may_retire(self) -> bool:
        """True if no rank lives and nothing here is worth waiting for."""
        server = self._server
        if any(peer.alive for peer in server.peers.values()) or not self.settled or self._chosen:
            return False
        if not server.peers and not self._born.expired():
            return False  # just started: the rank that wants us is on its way
        dead = [peer for peer in server.peers.values() if peer.died]
        if dead and server.headers():
            lingering = [peer.dead_since for peer in dead if peer.dead_since is not None]
            if not all(since.expired() for since in lingering):
                return False
        return self._nothing_left_to_save()

    def _nothing_left_to_save(self) -> bool:
        """Ask the disk once more; retry each failed slot once before giving it up."""
        server = self._server
        again = [h.attempt for h, state in self._states() if state is State.FAILED and h.attempt not in self._retried]
        if again:
            self._retried.update(again)
            for attempt in dict.fromkeys(again):
                server.queue_breakpoint(attempt)
            return False
        return not any(state in (State.QUEUED, State.PERSISTING) for _, state in self._states())

    def _states(self) -> list[tuple[Header, State]]:
        found = (slot.snapshot() for slot in self._server.slots.values())
        return [(pair[1], pair[0].state) for pair in found if pair]

    def unlink_slots(self) -> int:
        """Unlink every slot that may go; the number of snapshots that must stay. REQUIRES: spawn.lock is held."""
        server, kept = self._server, 0
        clean = not any(peer.died for peer in server.peers.values())
        for slot in list(server.slots.values()):
            found = slot.snapshot()
            if found is not None and self._must_stay(*found[1:], state=found[0].state, flags=slot.flags(), clean=clean):
                log.warning("keeping %s: %s is not committed", slot.name, found[1].attempt.tag)
                kept += 1
            else:
                shm.unlink(str(slot.name))
        for name in server.names.segments():  # never born: killed between creation and magic
            if name not in server.slots:
                shm.unlink(str(name))
        return kept

    def _must_stay(self, header: Header, *, state: State, flags: int, clean: bool) -> bool:
        storage = header.storage or bool(flags & BREAKPOINT)
        if state is State.FAILED:
            return header.attempt.order > self._committed(header)
        if clean or state is State.DURABLE:
            return False  # memory-only, or its outcome is known and was reported
        return storage is False and header.attempt.order > self._committed(header) and header in complete_here(
            self._server.headers()
        )

    def _committed(self, header: Header) -> Order:
        try:
            return self._server.committer.newest_committed(header.root, node_of(header))
        except CkptError:
            return (0, 0)


def complete_here(headers: Iterable[Header]) -> list[Header]:
    """One header of each attempt that all ranks of this node hold, newest first."""
    by_attempt: dict[Attempt, dict[int, Header]] = {}
    for header in headers:
        by_attempt.setdefault(header.attempt, {})[header.rank] = header
    whole = [held for held in by_attempt.values() if set(next(iter(held.values())).node_ranks) <= set(held)]
    return sorted((next(iter(held.values())) for held in whole), key=lambda h: h.attempt.order, reverse=True)


class Breakpoint:
    """One question, asked in the committing thread until it has an answer: what is to be persisted for the dead?"""

    def __init__(self, ending: Endings, server: Server, complete: list[Header]) -> None:
        self._ending = ending
        self._server = server
        self._complete = complete
        self._claim = max((h.claim for h in server.headers()), key=lambda claim: claim.generation)
        self._deadline: Deadline | None = None
        self._retry = Deadline(server.options.retry_s)

    def answered(self) -> bool:
        try:
            chosen = self._decide()
        except CkptError as error:
            if not self._retry.expired():
                return False
            log.warning("breakpoint save: %s; snapshots stay in memory", error)
            chosen = []
        if chosen is None:
            return False
        self._ending.choose(chosen)
        return True

    def _decide(self) -> list[Attempt] | None:
        """Attempts to persist, oldest last; None: look again."""
        committer, first = self._server.committer, self._complete[0]
        storage = self._server.storage
        if runs.root_id(storage, first.root) != first.attempt.root_id:
            log.warning("%s is not the root these snapshots were made for: nothing is persisted there", first.root)
            return []
        known = committer.runs(first.root)
        newest = committer.newest_committed(first.root, node_of(first))
        usable = [
            h.attempt for h in self._complete if h.attempt.order > newest and runs.on_the_line(h.attempt, known)
        ]
        with span("breakpoint", held=len(usable), newest=newest):
            if first.nodes == 1 or node_of(first) is not None:
                return usable[:1]
            return self._agree(first, usable)

    def _agree(self, first: Header, usable: list[Attempt]) -> list[Attempt] | None:
        storage, claim = self._server.storage, self._claim
        if self._deadline is None:
            self._deadline = Deadline(self._server.options.commit_s)
            runs.write_offer(storage, first.root, Offer(claim.generation, claim.run, first.node, tuple(usable)))
        offers = runs.read_offers(storage, first.root, claim, first.nodes)
        if None not in offers:
            common = runs.newest_common(offers)
            return [common] if common is not None else []
        return usable if self._deadline.expired() else None


def stalled(header: Header, failure: Failure) -> Outcome:
    return outcome_from(failure, header)


__all__ = ["SNAPSHOT", "Breakpoint", "Endings", "complete_here"]
