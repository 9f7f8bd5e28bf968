"""The trainer's story, read from top to bottom: meet, save, wait, restore, close.

``Checkpointer`` is the whole engine without a framework; ``CheckpointEngine`` is its face for plain PyTorch, and
``integrations`` put a framework's verbs in front of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from ckpt_engine import image, pins
from ckpt_engine.agreement import agree_on_confirmed, agree_on_root, agree_on_run, leave_other_lines
from ckpt_engine.budget import copy_threads
from ckpt_engine.buffers import Buffers
from ckpt_engine.config import Options, hook_from_environment, require_linux, whole
from ckpt_engine.device import Lanes
from ckpt_engine.errors import CkptError, ConfigError, Corrupt, StagingError
from ckpt_engine.events import log, span
from ckpt_engine.group import Group, meet, my_node, places, together
from ckpt_engine.handles import Destination, Handle, Outbox, Published, Staged, patience
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.link import Link
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.metrics import Metric, Metrics, of_user
from ckpt_engine.names import names_for
from ckpt_engine.overlap import Copier, Guards, Late
from ckpt_engine.reading import Reading
from ckpt_engine.restore import Facts, How, RestoreReport, Wants, choose, look, take
from ckpt_engine.saving import Entry, Saving
from ckpt_engine.source import Candidate, Share, Source
from ckpt_engine.staging import Planned
from ckpt_engine.states import Order
from ckpt_engine.storage.posix import PosixStorage
from ckpt_engine.waits import Deadline

MAX_STEP = 2**53
COLLECTIVE_S, MAX_COLLECTIVE_S = 1800.0, 7 * 86400.0
"""How long attach and restore wait for the slowest rank; a rank may wait ``wait_s`` for a buffer meanwhile."""
TIDY_S = 30.0
"""How long ``close`` waits for retention."""


class Checkpointer:
    """One engine of one rank, from attach to goodbye. Made collectively by all ranks."""

    def __init__(
        self, root: str | os.PathLike[str], options: Options, *, rank: int | None, world_size: int | None
    ) -> None:
        require_linux()
        hook_from_environment()
        if not os.fspath(root):
            raise ConfigError("root is empty: name the checkpoint directory")
        self.root = os.path.realpath(os.fspath(root))
        self.options = options
        self.storage = PosixStorage()
        self._pid = os.getpid()
        self._one_at_a_time = threading.Lock()
        self.group: Group = meet(rank, world_size, min(max(COLLECTIVE_S, options.wait_s), MAX_COLLECTIVE_S))
        self.place = places(self.group.gather(my_node(options.node_id)), self.group.rank)
        names = names_for(root=self.root, job=options.job, name=options.name, node_id=options.node_id)
        self.link = Link(names, root=self.root, options=options, local_rank=self.place.local_rank)
        local_world = len(self.place.node_ranks)
        self.buffers = Buffers(self.link, options, local_world=local_world)
        self.threads = copy_threads(options.threads, local_world)
        self.guards = Guards(options.staging, self.guard)
        self.lanes = Lanes(local_ranks=local_world)
        self.late: Late | None = None
        self.copier = Copier()
        self._caches: dict[str, image.PlanCache] = {}
        self.outbox = Outbox()
        self._seq = 0
        self.saved = False
        self._busy = False
        self._confirmed: Order | None = None
        self._closed = False
        try:
            self.root_id = agree_on_root(self.storage, self.group, self.place, self.root, options.layout)
            with span("attach", rank=self.place.rank, world=self.group.world):
                together(self.group, lambda: self._register(local_world))
                self.claim = self._new_run(None)
        except BaseException:
            self._let_go(goodbye=False)
            raise

    def _register(self, local_world: int) -> None:
        self.link.register(rank=self.place.rank, local_world=local_world)
        if self.options.slot_bytes:
            self.prepare(self.options.slot_bytes)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One save or restore of an engine at a time. Raises ConfigError in a thread or signal handler in between."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise ConfigError(
                "a save or restore of this engine is under way (in another thread, or interrupted by the "
                "signal handler that calls this): set a flag there and save in the training loop"
            )
        try:
            yield
        finally:
            self._one_at_a_time.release()

    # -- save ----------------------------------------------------------------------------------------------------

    def enter(
        self, step: int, *, storage: bool, tag: str = "", directory: str = "", metrics: Metrics | None = None
    ) -> Entry:
        """Count this save and tell the node about it. Every rank enters every save, whatever happens then.

        Raises ConfigError for a step that is no whole number ≥ 0, or metrics that are no numbers by name.
        """
        self._require_open()
        self.settle()
        self.late = None  # here alone: whoever else waits might forget the next one
        self._seq += 1
        if self.options.when_busy == "skip":  # what all ranks exchange comes first: from here on one may fail alone
            self._busy = any(together(self.group, self.buffers.busy, StagingError))
        problem: ConfigError | None = None
        given: tuple[Metric, ...] = ()
        try:
            given = of_user(metrics)
        except ConfigError as error:  # raised below: the others are on their way into the next exchange
            problem = error
        if self.options.layout == "node-local" and storage:
            self._confirmed, given = agree_on_confirmed(self.storage, self.group, self.place, self.root, given)
        try:
            attempt = self._attempt(step, tag)
        except ConfigError as error:
            order = (self.claim.generation, self._seq)
            self.link.say(entered=order, label=b"", outcome="failed", reason=str(error)[:500], errno=0)
            self.link.wake("failed")
            raise
        parent = os.path.realpath(directory) if directory else self.root
        entry = Entry(attempt, os.path.join(parent, attempt.tag), storage, given)
        if not self.saved:
            leave_other_lines(self.storage, self.root, self.buffers, self.claim)
        self.link.say(entered=attempt.order, label=self.header(entry, ()).pack(), outcome="filling", reason="", errno=0)
        if problem is not None:
            self.fail(entry, problem)
            raise problem
        return entry

    def _attempt(self, step: int, tag: str) -> Attempt:
        number = whole("step", step, 0, MAX_STEP)
        claim, name = self.claim, tag or f"global_step{number}"
        try:
            return Attempt(claim.generation, claim.run, self._seq, number, name, self.root_id)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tag {tag!r} cannot name a directory in the root: {error}") from error

    def save(self, entry: Entry, files: Mapping[str, Planned]) -> Handle:
        """Stage ``files``: all of them now, or what is late in another thread; a storage save is queued then.

        Blocks until one of this rank's buffers is released. Raises StagingError or SaverError; then the attempt is
        marked failed, so that no other rank waits for it. What fails after the return fails the handle, and is told
        at the next save.
        """
        return Saving(self, entry, files).start()

    def guard(self) -> None:
        """Block until what was handed over may change: nothing to do but with ``staging="overlap"``."""
        while (late := self.late) is not None:
            late.guard()
            if late is self.late:  # else a signal handler has saved meanwhile
                return

    def settle(self) -> None:
        """Wait until the save before this is a snapshot, or has failed (see ``report_trouble``). Any thread may."""
        late = self.late
        if late is not None:
            late.join()
            if late.error is not None:
                self.outbox.add(late.work.handle)

    def prepare(self, nbytes: int) -> None:
        """Reserve this rank's slots for files of ``nbytes`` before the first save needs them. Raises ShmFull."""
        self._require_open()
        self.settle()
        self.buffers.reserve(nbytes, Deadline(self.options.wait_s))

    def fail(self, entry: Entry, error: BaseException) -> None:
        """This rank's part of the attempt will not come: the others need not wait for it."""
        reason = f"{type(error).__name__}: {error}"[:500].encode("utf-8", "replace").decode()
        self.link.say(outcome="failed", reason=reason, errno=int(getattr(error, "errno", 0) or 0))
        self.link.wake("failed", entry.attempt.digest)

    def plan(self, name: str, state: Any, owned: Container[int] = ()) -> Planned:
        """Lay out one file; everything but the bytes of tensors is captured now. Raises UnsupportedLeaf.

        ``owned``: storages that may be copied later, since whoever changes them calls ``guard`` before.
        """
        with span("plan", file=name):
            planned = image.plan(state, name, self._caches.setdefault(name, image.PlanCache()))
            return Planned(planned, late=planned.defer(owned), state=state) if owned else Planned(planned)

    def busy_anywhere(self) -> bool:
        """True if some rank would have had to wait for a buffer when this save was entered (``when_busy="skip"``)."""
        return self._busy

    def skipped_handle(self, entry: Entry) -> Handle:
        """The handle of a save that all ranks left out."""
        error = CkptError(f"step {entry.attempt.step} was skipped on all ranks: a buffer was busy (when_busy='skip')")
        self.fail(entry, error)
        log.info("%s", error)
        handle = self.handle(Staged(entry.attempt.step, entry.attempt, skipped=True), entry.commit_dir)
        handle.fail(error)
        handle.reported = True
        return handle

    def report_trouble(self, fresh: Handle | None = None) -> None:
        """Tell of storage saves that failed since the last call: a warning, or their exception (``on_error``)."""
        self.outbox.report(self.options.on_error, fresh)

    def handle(self, staged: Staged, commit_dir: str) -> Handle:
        """``commit_dir`` "": of a snapshot that is not going to storage, which nobody keeps."""
        alone = self.options.layout == "node-local"
        ranks = self.place.node_ranks if alone else range(self.group.world)
        node = self.place.node if alone else None
        return Handle(self.link, staged, Destination(self.storage, commit_dir, ranks, node))

    def header(self, entry: Entry, table: Iterable[SlotFile]) -> Header:
        return Header(
            attempt=entry.attempt,
            claim=self.claim,
            rank=self.place.rank,
            local_rank=self.place.local_rank,
            world=self.group.world,
            node=self.place.node,
            nodes=len(self.place.nodes),
            node_ranks=self.place.node_ranks,
            layout=self.options.layout,
            root=self.root,
            commit_dir=entry.commit_dir,
            retention=self.options.retention,
            confirmed=self._confirmed,
            storage=entry.storage,
            files=tuple(table),
            metrics=entry.metrics,
        )

    # -- wait ----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> tuple[Published, ...]:
        """Block until every storage save has an outcome. Raises the first failure nobody was told of."""
        self.settle()
        return self.outbox.wait(patience(self.options, timeout_s))

    # -- pins ----------------------------------------------------------------------------------------------------

    def pin(self, step: int, reason: str) -> None:
        """Keep the newest checkpoint of ``step``, committed or on its way here. Raises NotFound, StorageError."""
        pins.pin(self.storage, self._pinnable(step)[-1], reason)

    def unpin(self, step: int) -> None:
        """Retention may remove the checkpoints of ``step`` again. Raises NotFound, StorageError."""
        for target in self._pinnable(step):
            pins.unpin(self.storage, target.folder)

    def _pinnable(self, step: int) -> list[pins.Target]:
        self._require_open()
        self.settle()
        number = whole("step", step, 0, MAX_STEP)
        return pins.of_step(self.storage, self.root, self.root_id, number, self.outbox.in_flight())

    # -- restore -------------------------------------------------------------------------------------------------

    def restore(self, load: Callable[[Source], dict[str, Any]], wants: Wants, step: int | None = None) -> RestoreReport:
        """Agree on the newest attempt (or that of ``step``), verify it, ``load`` its state, start a new run from it.

        Collective. ``load(source)`` reads with ``Source.fetch`` and must not communicate on its own account.
        Raises NotFound for a ``step`` that is nowhere, WorldMismatch, Corrupt if nothing that exists is intact.
        """
        self._require_open()
        self.settle()
        layout = self.options.layout

        def ask() -> Facts:
            wanted = None if step is None else whole("step", step, 0, MAX_STEP)
            return look(self.storage, self.buffers.node_slots(), self.root, self.place, layout, wanted)

        with span("restore", step=step) as said:
            share = Share(self.group, self.place, self.link.names)
            how = How(self._open_source, wants, share, load)
            try:
                report = take(self.group, self.place, self.root, ask, self.root_id, layout, how)
            finally:
                share.remove()
            said |= {"step": report.step, "source": report.source, "skipped": len(report.skipped)}
            self.claim = self._new_run(report.attempt)
        return report

    def open_verified(self, candidate: Candidate, wants: Wants) -> Source:
        """``candidate``, whose files every rank has verified. Collective. Raises Corrupt on all ranks alike."""
        how = How(self._open_source, wants, Share(self.group, self.place, self.link.names))
        source, skipped = choose(self.group, self.place, lambda: [candidate], how)
        if source is None:
            reason = skipped[0].reason
            raise Corrupt(f"{candidate.attempt.tag}: {reason}", path=candidate.attempt.tag, want="intact", got=reason)
        return source

    def resumed_from(self, attempt: Attempt | None) -> None:
        """The framework loaded ``attempt`` itself: a new run starts there. Collective."""
        self.claim = self._new_run(attempt)

    def _open_source(self, candidate: Candidate) -> Source:
        source = Source(candidate, self.place, self.buffers.node_slots(), self.storage, self.threads)
        folder = candidate.folder_on(self.place.node)
        if folder is not None and self.place.reads_root(self.options.layout):
            source.lease = Reading(self.storage, *os.path.split(folder))
        return source

    def _new_run(self, resumed_from: Attempt | None) -> RunClaim:
        held = [header for slot in self.buffers.node_slots() if (header := slot.header()) is not None]
        claim = agree_on_run(self.storage, self.group, self.place, self.root, self.options.layout, held, resumed_from)
        self._seq = 0
        self.saved = False
        self.link.say(generation=claim.generation, run=claim.run)
        return claim

    # -- close ---------------------------------------------------------------------------------------------------

    def close(self, *, goodbye: bool = True, timeout_s: float | None = None) -> None:
        """Wait for the storage saves in flight, and for retention; then memory-only snapshots may go. Idempotent.

        With ``goodbye=False`` (an exception is in flight) nothing is waited for and every snapshot stays.
        Raises the first failure nobody was told of.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a forked child that leaves the block says nothing for its parent
        done, deadline = False, patience(self.options, timeout_s)
        try:
            self.settle()
            if goodbye:
                self.outbox.wait(deadline)
                done = True
                self.outbox.await_tidy(self.link, deadline.slice(TIDY_S))
        finally:
            with span("goodbye", clean=done):
                self._let_go(goodbye=done)

    def _let_go(self, *, goodbye: bool) -> None:
        self._closed = True
        self.guards.close()
        self.copier.end()

        def leave() -> None:
            self.buffers.close()
            self.link.close(goodbye=goodbye)

        if self.late is None:
            leave()
        else:
            self.late.afterwards(leave)  # a second Ctrl-C: who is gone fills no slot
        self.group.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed")
        if os.getpid() != self._pid:
            raise ConfigError(f"this engine belongs to process {self._pid}: a forked child must make its own")
