"""Shard records → receipt → publish → latest → outcome → retention. One thread, receipts strictly in order.

An attempt is *pending* from its first durable or failed shard on this node to its outcome. When every rank of the
node has a shard record, the receipt is written, unless the node decides alone; then this saver, like every other, looks
for the receipts of all nodes until it can publish, or finds a manifest, a failure, a newer run or the deadline. What
waits for another node, where a rank may never have entered it, keeps none of those that follow. Retention comes last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_engine import commit, runs
from ckpt_engine.config import SaverOptions
from ckpt_engine.control import Outcome
from ckpt_engine.errors import Cancelled, CkptError, CommitTimeout, PersistError, StaleRun, StorageError
from ckpt_engine.events import log, span
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, Failure, Receipt, ShardRecord
from ckpt_engine.saver.ledger import Ledger
from ckpt_engine.saver.outcomes import failure_of, node_of, outcome_from, outcome_of, parent_of, refusal, write_failure
from ckpt_engine.storage.base import Storage
from ckpt_engine.waits import Deadline

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 1.0


@dataclass(slots=True)
class Pending:
    """What this node knows of one attempt that has no outcome yet."""

    header: Header
    deadline: Deadline
    shards: dict[int, ShardRecord] = field(default_factory=dict)
    failure: Failure | None = None
    cancelled: str = ""
    receipted: bool = False
    retry: Deadline | None = None
    names: Deadline | None = None
    """It is committed; how long what comes after the manifest is tried again."""

    @property
    def attempt(self) -> Attempt:
        return self.header.attempt

    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.header.node_ranks if rank not in self.shards)

    def actionable(self) -> bool:
        return bool(self.cancelled or self.failure or not self.missing() or self.deadline.expired())


class Committer(threading.Thread):
    """The one committing thread of a saver; the other threads tell it what they saw."""

    def __init__(
        self,
        storage: Storage,
        options: SaverOptions,
        *,
        ended: Callable[[Header, Outcome], None],
        live_run: Callable[[str], bool],
        held: Callable[[], tuple[Header, ...]],
        look_at_us: Callable[[], None],
    ) -> None:
        super().__init__(name="committer", daemon=True)
        self._storage = storage
        self._options = options
        self._ended = ended
        self._live_run = live_run
        self._held = held
        self._look_at_us = look_at_us
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._stop_asked = False
        self._pending: dict[Attempt, Pending] = {}
        self._done: dict[Attempt, str] = {}
        self.ledger = Ledger(storage, options, held)
        self._questions: list[Callable[[], bool]] = []
        self.recovered = threading.Event()
        self._patience = Deadline(options.retry_s)
        self._reopened: set[Attempt] = set()
        self.tidying = False

    # -- told by the writer and by the main loop -----------------------------------------------------------------

    def durable(self, header: Header, record: ShardRecord) -> None:
        with self._mutex:
            pending = self._enter(header)
            if pending is not None:
                pending.shards[record.rank] = record
        self._wake.set()

    def failed(self, header: Header, failure: Failure) -> None:
        with self._mutex:
            pending = self._enter(header)
            if pending is not None and pending.failure is None:
                pending.failure = failure
        self._wake.set()

    def cancelled(self, header: Header, why: str) -> None:
        with self._mutex:
            pending = self._enter(header)
            if pending is not None:
                pending.cancelled = why
        self._wake.set()

    def keep_waiting(self, attempt: Attempt) -> None:
        """Its missing shards are on their way to the disk: only what nobody writes can be late."""
        with self._mutex:
            pending = self._pending.get(attempt)
            if pending is not None and not pending.actionable():
                pending.deadline = Deadline(self._options.commit_s)

    def ask(self, question: Callable[[], bool]) -> None:
        """Run ``question`` in this thread, again and again until it returns True."""
        with self._mutex:
            self._questions.append(question)
        self._wake.set()

    def waiting(self) -> list[tuple[Header, tuple[int, ...]]]:
        """Attempts whose shards of this node are not all there, with the ranks that are missing."""
        if not self.recovered.is_set():
            return []  # what is durable already is not known yet
        with self._mutex:
            return [(p.header, p.missing()) for p in self._pending.values() if p.missing() and not p.actionable()]

    def status(self, attempt: Attempt) -> str:
        """ "" while it has no outcome here."""
        return self._done.get(attempt, "")

    def idle(self) -> bool:
        with self._mutex:
            return not self._pending and not self._questions and not self.tidying

    def stop(self) -> None:
        self._stop_asked = True
        self._wake.set()

    def _enter(self, header: Header) -> Pending | None:
        """The pending record of this attempt. REQUIRES: the mutex is held."""
        attempt = header.attempt
        if attempt in self._done:
            return None
        pending = self._pending.get(attempt)
        if pending is None:
            pending = self._pending[attempt] = Pending(header, Deadline(self._options.commit_s))
        if header.commit_dir != pending.header.commit_dir and pending.failure is None:
            reason = f"ranks disagree on the directory: {pending.header.commit_dir} and {header.commit_dir}"
            pending.failure = Failure(rank=header.rank, reason=reason)
        return pending

    # -- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        look_s = _FIRST_LOOK_S
        while not self._stop_asked:
            try:
                progress = self._pass()
            except Exception:  # a defect in one attempt must not end the only committer
                log.exception("defect while committing")
                progress = False
            look_s = _FIRST_LOOK_S if progress else min(2 * look_s, _LAST_LOOK_S)
            if not progress and self._wake.wait(look_s):
                look_s = _FIRST_LOOK_S
            self._wake.clear()

    def _pass(self) -> bool:
        """One look at every question and, oldest first, at what can go on until something ends; True if it did."""
        with self._mutex:
            questions = list(self._questions)
            ready = sorted((p for p in self._pending.values() if p.actionable()), key=lambda p: p.attempt.order)
        answered = [question for question in questions if self._answered(question)]
        if answered:
            with self._mutex:
                self._questions = [q for q in self._questions if q not in answered]
            self._look_at_us()
        for pending in ready:
            try:
                outcome = self._step(pending)
            except Exception as defect:  # one attempt must not end, or block, the only committer
                log.exception("defect while committing %s", pending.attempt.id)
                reason = f"defect: {type(defect).__name__}: {defect}"
                outcome = self._fail(pending, Failure(pending.header.rank, reason))
            if outcome is not None:
                self._end(pending, outcome)
            if outcome is not None or not pending.receipted:
                return outcome is not None or bool(answered)
        return bool(answered)

    def _answered(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except CkptError as error:
            log.warning("%s; asking again", error)
        return False

    def _end(self, pending: Pending, outcome: Outcome) -> None:
        with self._mutex:
            if self._pending.get(pending.attempt) is not pending:
                return  # reopened meanwhile: this was not its end
            del self._pending[pending.attempt]
            self._done[pending.attempt] = outcome.status
            for old in list(self._done)[:-256]:
                del self._done[old]
            self.tidying = outcome.status == "committed" and pending.names is None
        say = log.info if outcome.status == "committed" else log.warning
        say("%s %s %s", outcome.status, pending.attempt, outcome.reason)
        try:
            self._ended(pending.header, outcome)
            if self.tidying:
                self._retain(pending.header)
        finally:
            self.tidying = False
            self._look_at_us()  # once, when all is done: before that the main loop has nothing to do about it

    def _retain(self, header: Header) -> None:
        if self._live_run(header.attempt.run):  # commits for the dead remove nothing, nor does one behind ``latest``
            with self._mutex:
                waiting = frozenset({*self._pending, header.attempt})  # another node may be in its receipt just now
            self.ledger.retain(header, waiting, lambda other: not self.status(other))

    def _step(self, pending: Pending) -> Outcome | None:
        """Bring one attempt as far as it can go now; its outcome, or None: look again later."""
        header, attempt = pending.header, pending.attempt
        if pending.names is not None:
            return self.ledger.named(header, pending.names)
        try:
            if pending.cancelled:
                raise Cancelled(pending.cancelled)
            if pending.failure is not None:
                return self._fail(pending, pending.failure)
            if pending.missing():
                raise CommitTimeout(
                    f"ranks {pending.missing()} of this node never staged {attempt.tag}",
                    missing_ranks=pending.missing(),
                )
            if not pending.receipted:
                with span("receipt", step=attempt.step, attempt=attempt.id):
                    if not header.decides_alone:
                        commit.write_receipt(self._storage, parent_of(header), Receipt.of(pending.shards.values()))
                pending.receipted = True
                pending.deadline = Deadline(self._options.commit_s)
            return self._publish(pending)
        except Cancelled as error:
            return outcome_of(error, header, status="cancelled")
        except StorageError as error:
            pending.retry = pending.retry or Deadline(self._options.retry_s)
            if pending.retry.expired():
                return self._fail(pending, failure_of(error, header.rank))
            log.warning("commit of %s: %s; trying again", attempt.id, error)
            return None
        except CommitTimeout as error:
            self._fail(pending, failure_of(error, -1))
            return outcome_of(error, header)
        except PersistError as error:
            return self._fail(pending, failure_of(error, header.rank))

    def _publish(self, pending: Pending) -> Outcome | None:
        header, attempt = pending.header, pending.attempt
        known = self.ledger.runs(header.root)
        place, nodes, world = parent_of(header), header.nodes, header.world
        line = known if place == header.root else ()  # another directory has no line of its own
        with span("publish", step=attempt.step, attempt=attempt.id) as facts:
            own = Receipt.of(pending.shards.values()) if header.decides_alone else None
            result = commit.try_publish(
                self._storage, place, attempt, nodes=nodes, world=world, runs=line, node=node_of(header), own=own
            )
            facts["result"] = type(result).__name__
        if isinstance(result, commit.Published):
            if result.trouble is not None:
                log.warning("%s is committed; its plain names or latest are not done: %s", attempt.id, result.trouble)
                pending.names = Deadline(self._options.retry_s)
                return None
            return Outcome(attempt.order, attempt.run, "committed")
        if isinstance(result, commit.Failed):
            if attempt in self._reopened and not pending.deadline.expired():
                return None  # a peer's receipt of the first try: it tries again as we do
            return outcome_from(result.failure, header)
        if isinstance(result, commit.NotOnLine):
            raise refusal(attempt, result.by, known, live=self._live_run(attempt.run))
        newer = any(claim.generation > attempt.generation for claim in known if claim.run != attempt.run)
        if newer and not runs.on_the_line(attempt, known):  # else that run resumed from it, and needs it
            raise StaleRun("a newer run took over this root", other=str(max(c.generation for c in known)))
        if pending.deadline.expired():
            raise CommitTimeout(
                f"no receipt of nodes {result.missing_nodes} for {attempt.tag} within {self._options.commit_s:g} s",
                missing_ranks=result.missing_ranks,
            )
        return None

    def _fail(self, pending: Pending, failure: Failure) -> Outcome:
        write_failure(self._storage, pending.header, failure, nothing_there=not pending.shards)
        return outcome_from(failure, pending.header)

    def reopen(self, header: Header) -> None:
        """Another try at an attempt that failed here, or is about to: what is durable of it counts again."""
        attempt = header.attempt
        with self._mutex:
            self._done.pop(attempt, None)
            self._pending.pop(attempt, None)
            self._reopened.add(attempt)

        def look() -> bool:
            where = (self._storage, parent_of(header), attempt, header.node_ranks)
            found = commit.read_shard_records(*where, node=node_of(header))
            for record in found:
                self.durable(header, record)
            return True

        self.ask(lambda: self._answered(look) or True)

    def recover(self, headers: tuple[Header, ...], root: str, ended: Callable[[list[Attempt]], None]) -> bool:
        """After a saver's death: records without an outcome are pending again, a half publish is finished."""
        done = self._answered(lambda: self.ledger.recover(headers, root, self.durable, ended))
        if done or self._patience.expired():
            self.recovered.set()
        return self.recovered.is_set()
