"""What a saver does when ranks die or say goodbye: breakpoint save, linger, and which slots may be unlinked.

Death: finish what is queued. When all local ranks are dead, or ``grace_s`` after the first death, the newest
attempt that is complete here and newer than the newest committed one is persisted; with several nodes on a shared
root all nodes first offer what they hold, and the newest attempt common to all is taken (at the deadline: all that
is held). Goodbye: drain, then unlink. SIGTERM: as if everybody had died.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_engine import messages, runs, shm
from ckpt_engine.control import Outcome
from ckpt_engine.errors import CkptError
from ckpt_engine.events import log, span
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, Offer, RunClaim
from ckpt_engine.saver.outcomes import node_of
from ckpt_engine.slots import Slot
from ckpt_engine.states import LEASED, Order, State
from ckpt_engine.waits import Deadline

if TYPE_CHECKING:
    from ckpt_engine.saver.peers import Peer
    from ckpt_engine.saver.server import Server


class Endings:
    """The part of a server that thinks about the end; its questions to the disk run in the committing thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._asked: set[tuple[str, Order]] = set()
        self._chosen: list[Attempt] = []
        self._question: Breakpoint | None = None
        self._retried: set[Attempt] = set()
        self._hopeless: set[Attempt] = set()
        self._judged: frozenset[Attempt] | None = None
        self._worth: frozenset[Attempt] = frozenset()
        self._born = Deadline(server.options.grace_s)
        self.settled = True

    # -- death ---------------------------------------------------------------------------------------------------

    def think(self, *, terminating: bool) -> None:
        server = self._server
        for attempt in [self._chosen.pop(0) for _ in range(len(self._chosen))]:
            server.queue_breakpoint(attempt)
        if not (terminating or deaths_call(server.peers.values(), server.options.grace_s)):
            self._withdraw()
            return
        complete = complete_here(server.headers)
        if not complete:
            return
        key = ("term" if terminating else complete[0].attempt.run, complete[0].attempt.order)
        if key in self._asked:
            return
        self._asked.add(key)
        if terminating:
            log.info("SIGTERM: saving %s, at most %g s", complete[0].attempt.id, server.options.term_s)
        self.settled = False
        self._question = Breakpoint(self, server, complete)
        server.committer.ask(self._question.answered)

    def _withdraw(self) -> None:
        """A rank is back: what the dead left is its own again, and other nodes may never answer."""
        question, self._question = self._question, None
        if question is not None and not self.settled:
            question.withdrawn = True
            self._asked.clear()

    def choose(self, attempts: Iterable[Attempt], hopeless: Iterable[Attempt] = ()) -> None:
        """Called in the committing thread: these are to be persisted, and those can never be."""
        self._hopeless.update(hopeless)
        self._chosen.extend(attempts)
        self.settled = True

    def tell_unsaved(self, outcomes: Iterable[Outcome]) -> None:
        """After SIGTERM: name what is complete here and no checkpoint. Asks memory only, for the disk may hang."""
        newest = max((end.order for end in outcomes if end.status == "committed"), default=(0, 0))
        for header in complete_here(self._server.headers):
            if header.attempt.order > newest:
                log.warning("SIGTERM: %s is not committed; it stays in this node's memory", header.attempt)

    # -- the end of life -----------------------------------------------------------------------------------------

    def may_retire(self) -> bool:
        """True if no rank lives and nothing here is worth waiting for."""
        server = self._server
        if server.peers.any_alive or not self.settled or self._chosen:
            return False
        if not server.peers and not self._born.expired():
            return False  # just started: the rank that wants us is on its way
        dead = [peer.dead_since for peer in server.peers.values() if peer.dead_since is not None]
        if server.headers and not all(since.expired() for since in dead):
            return False
        return self._all_judged() and self._nothing_left_to_save()

    def _all_judged(self) -> bool:
        """True once the disk has said which of the snapshots held now are newer than what is committed."""
        held = frozenset(header.attempt for header in self._server.headers)
        if held == self._judged:
            return True
        one_each = {header.attempt: header for header in self._server.headers}

        def judge() -> bool:
            self._worth = frozenset(attempt for attempt, header in one_each.items() if self._is_worth(header))
            self._judged = held
            self.choose(())
            return True

        self.settled = False
        self._server.committer.ask(judge)
        return False

    def _is_worth(self, header: Header) -> bool:
        """True unless it is committed, superseded, not whole elsewhere, or of a root that is no more. Asks the disk."""
        ledger, attempt = self._server.committer.ledger, header.attempt
        if attempt in self._hopeless:
            return False
        try:
            if runs.root_id(self._server.storage, header.root) not in (attempt.root_id, None):
                return False
            newest = ledger.newest_committed(header)
            return attempt.order > newest and runs.on_the_line(attempt, ledger.runs(header.root))
        except CkptError as error:
            log.warning("is %s committed? %s", attempt.id, error)
            return True

    def _nothing_left_to_save(self) -> bool:
        """Try once more, newest first, to make checkpoints of what would have to stay."""
        slots = [
            (found[1].attempt, slot) for slot in self._server.slots.values() if (found := self._server.snapshot(slot))
        ]
        if any(slot.word().state in LEASED for _, slot in slots):
            return False
        stays = {attempt for attempt, slot in slots if self._must_stay(slot)} - self._retried
        if not stays:
            return True
        newest = max(stays, key=lambda attempt: attempt.order)
        self._retried.add(newest)
        self._judged = None
        self._server.queue_breakpoint(newest)
        return False

    def unlink_slots(self) -> int:
        """Unlink every slot that may go; the number of snapshots that must stay. REQUIRES: spawn.lock is held."""
        server, kept = self._server, 0
        for slot in list(server.slots.values()):
            if self._must_stay(slot):
                log.warning("keeping %s: it is not committed", slot.name)
                kept += 1
            else:
                shm.unlink(str(slot.name))
        for name in server.names.segments():  # never born: killed between creation and magic
            if name not in server.slots:
                shm.unlink(str(name))
        return kept

    def unlink_names(self, left: int) -> None:
        """All that is not a slot; with snapshots ``left``, what the next start needs stays. REQUIRES: as above."""
        names = self._server.names
        for local_rank in names.rank_locks():
            shm.unlink(names.rank_control(local_rank))
            messages.unlink(names.notify_queue(local_rank))
        messages.unlink(names.events_queue)
        if left:
            log.warning("kept %d snapshots that could not be persisted: see 'ckpt-engine gc'", left)
            return
        shm.unlink(names.saver_control)
        shutil.rmtree(names.run_dir)

    def _must_stay(self, slot: Slot) -> bool:
        """What failed, and what ranks that died held complete, unless there is a newer checkpoint."""
        found = slot.snapshot()
        if found is None or found[1].attempt not in self._worth:
            return False
        if found[0].state is State.FAILED:
            return True
        return any(peer.left_a_legacy for peer in self._server.peers.values()) and any(
            found[1].attempt == header.attempt for header in complete_here(self._server.headers)
        )


def deaths_call(peers: Iterable[Peer], grace_s: float) -> bool:
    """True if the dead want their snapshots on disk: nobody lives, or one of the newest run is dead for ``grace_s``."""
    peers = list(peers)
    if not any(peer.alive for peer in peers):
        return any(peer.left_a_legacy for peer in peers)
    dead = [peer for peer in peers if peer.died]
    if not dead:
        return False
    newest = max(peer.page.generation for peer in peers)
    first = [peer.dead_since for peer in dead if peer.page.generation == newest and peer.dead_since]
    return any(since.elapsed() >= grace_s for since in first)


def worth_saving(complete: Iterable[Header], newest: Order, known: Iterable[RunClaim]) -> list[Attempt]:
    """The attempts of ``complete`` that are newer than the ``newest`` committed one and on the line."""
    known = list(known)
    return [h.attempt for h in complete if h.attempt.order > newest and runs.on_the_line(h.attempt, known)]


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
        self._claim = max((h.claim for h in server.headers), key=lambda claim: claim.generation)
        self.withdrawn = False
        self._deadline: Deadline | None = None
        self._hopeless: list[Attempt] = []
        self._retry = Deadline(server.options.retry_s)

    def answered(self) -> bool:
        try:
            chosen = [] if self.withdrawn else self._decide()
        except CkptError as error:
            if not self._retry.expired():
                return False
            log.warning("breakpoint save: %s; snapshots stay in memory", error)
            chosen = []
        if chosen is None:
            return False
        self._ending.choose(chosen, self._hopeless)
        return True

    def _decide(self) -> list[Attempt] | None:
        """Attempts to persist, oldest last; None: look again."""
        ledger, first = self._server.committer.ledger, self._complete[0]
        storage = self._server.storage
        if runs.root_id(storage, first.root) != first.attempt.root_id:
            log.warning("%s is not the root these snapshots were made for: nothing is persisted there", first.root)
            return []
        known = ledger.runs(first.root)
        newest = ledger.newest_committed(first)
        usable = worth_saving(self._complete, newest, known)
        with span("breakpoint", held=len(usable), newest=newest):
            if first.nodes == 1:
                return usable[:1]
            if node_of(first) is not None:  # nobody here knows which of them the other nodes hold too
                return usable
            return self._agree(first, usable)

    def _agree(self, first: Header, usable: list[Attempt]) -> list[Attempt] | None:
        storage, claim = self._server.storage, self._claim
        if self._deadline is None:
            self._deadline = Deadline(self._server.options.commit_s)
            runs.write_offer(storage, first.root, Offer(claim.generation, claim.run, first.node, tuple(usable)))
        offers = runs.read_offers(storage, first.root, claim, first.nodes)
        if None not in offers:
            self._hopeless = [one for one in usable if any(offer and one not in offer.attempts for offer in offers)]
            common = runs.newest_common(offers)
            return [common] if common is not None else []
        return usable if self._deadline.expired() or not usable else None
