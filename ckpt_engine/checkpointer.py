"""The trainer's story, read from top to bottom: meet, save, wait, restore, close.

``Checkpointer`` is the whole engine without a framework; ``CheckpointEngine`` is its face for plain PyTorch, and
``integrations`` put a framework's verbs in front of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine import commit, image, listing, runs
from ckpt_engine.agreement import agree_on_root, agree_on_run
from ckpt_engine.buffers import Buffers, Lease, seal
from ckpt_engine.config import Options, copy_threads, hook_from_environment, require_linux, whole
from ckpt_engine.errors import CkptError, ConfigError, Corrupt, StorageError
from ckpt_engine.events import log, span
from ckpt_engine.group import Group, meet, my_node, places
from ckpt_engine.handles import Handle, Published, Staged
from ckpt_engine.link import Link
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.names import names_for
from ckpt_engine.restore import Candidate, RestoreReport, Source, Wants, candidates, choose, look, nothing_usable
from ckpt_engine.slots import Header
from ckpt_engine.staging import Planned, fill, space
from ckpt_engine.states import LEASED, Order, State
from ckpt_engine.storage.base import make_dirs
from ckpt_engine.storage.posix import PosixStorage
from ckpt_engine.waits import Deadline

MAX_STEP = 2**53


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry into a save call: its attempt, and where it would be committed."""

    attempt: Attempt
    commit_dir: str
    storage: bool
    begin: float


class Checkpointer:
    """One engine of one rank, from attach to goodbye. Made collectively by all ranks."""

    def __init__(
        self, root: str | os.PathLike[str], options: Options, *, rank: int | None, world_size: int | None
    ) -> None:
        require_linux()
        hook_from_environment()
        self.root = os.path.realpath(os.fspath(root))
        self.options = options
        self.storage = PosixStorage()
        self.group: Group = meet(rank, world_size, options.wait_s)
        nodes = self.group.gather((my_node(options.node_id), self.root))
        self.place = places([node for node, _ in nodes], self.group.rank) if len(nodes) > 1 else places(["here"], 0)
        if self.group.world == 1 and self.group.rank != 0:
            raise ConfigError("a world of one rank has rank 0 only")
        _same_root(nodes, options.layout)
        self.root_id = agree_on_root(self.storage, self.group, self.place, self.root, options.layout)
        names = names_for(root=self.root, job=options.job, name=options.name, node_id=options.node_id)
        self.link = Link(names, root=self.root, options=options, local_rank=self.place.local_rank)
        local_world = len(self.place.node_ranks)
        self._together(lambda: self.link.register(rank=self.place.rank, local_world=local_world))
        self.buffers = Buffers(self.link, options, local_world=local_world)
        self._threads = copy_threads(options.threads, local_world)
        self._caches: dict[str, image.PlanCache] = {}
        self._handles: list[Handle] = []
        self._seq = 0
        self._saved = False
        self._confirmed: Order | None = None
        self._closed = False
        self.claim = self._new_run(None)

    # -- save ----------------------------------------------------------------------------------------------------

    def enter(self, step: int, *, storage: bool, tag: str = "", directory: str = "") -> Entry:
        """Count this save and tell the node about it. Every rank enters every save, whatever happens then.

        Raises ConfigError for a step that is no whole number ≥ 0.
        """
        self._require_open()
        number = whole("step", step, 0, MAX_STEP)
        self._seq += 1
        attempt = Attempt(
            generation=self.claim.generation,
            run=self.claim.run,
            seq=self._seq,
            step=number,
            tag=tag or f"global_step{number}",
            root_id=self.root_id,
        )
        parent = os.path.realpath(directory) if directory else self.root
        entry = Entry(attempt, os.path.join(parent, attempt.tag), storage, time.monotonic())
        if not self._saved:
            self._leave_other_lines()
        if self.options.layout == "node-local" and storage:
            self._confirmed = self._agree_on_confirmed()
        self.link.say(
            entered=attempt.order, label=self._header(entry, ()).pack(), outcome="filling", reason="", errno=0
        )
        return entry

    def stage(self, entry: Entry, files: Mapping[str, Planned]) -> Staged:
        """Fill a slot with ``files`` and seal it; blocks until one of this rank's buffers is released.

        Raises StagingError or SaverError; then the attempt is marked failed, so that no other rank waits for it.
        """
        attempt = entry.attempt
        try:
            with span("lease", step=attempt.step, bytes=(need := space(files))) as facts:
                lease = self.buffers.lease(need, Deadline(self.options.wait_s))
                facts["wait_s"] = round(lease.waited_s, 6)
            begin = time.monotonic()
            self._fill_and_seal(entry, files, lease)
        except BaseException as error:
            self.fail(entry, error)
            raise
        finally:
            for file in files.values():
                file.layout.release()
        self._saved = True
        self.link.say(outcome="sealed")
        return Staged(
            step=attempt.step,
            attempt=attempt,
            wait_s=lease.waited_s,
            waited_for=lease.blocker,
            copy_s=time.monotonic() - begin,
            nbytes=need,
        )

    def _fill_and_seal(self, entry: Entry, files: Mapping[str, Planned], lease: Lease) -> None:
        slot = lease.slot
        try:
            table = fill(slot, files, threads=self._threads)
            with span("seal", step=entry.attempt.step, attempt=entry.attempt.id):
                seal(slot, self._header(entry, table))
        except BaseException:
            word = slot.word()
            if word.state is State.FILLING:
                slot.change("rank", word, State.FREE)
            raise

    def queue(self, entry: Entry, staged: Staged) -> Handle:
        """Hand a sealed snapshot to the saver. Storage trouble fails the handle, never the training loop."""
        handle = self._handle(staged, entry.commit_dir)
        self._handles.append(handle)
        try:
            with span("queue", step=entry.attempt.step, attempt=entry.attempt.id):
                make_dirs(self.storage, entry.commit_dir)
                for slot in self.buffers.mine():
                    found = slot.snapshot()
                    if found is not None and found[1].attempt == entry.attempt:
                        slot.change("rank", found[0], State.QUEUED)
        except StorageError as error:
            handle.fail(error)
            self.fail(entry, error)
        self.link.wake("queued", entry.attempt.digest)
        return handle

    def in_memory(self, staged: Staged) -> Handle:
        """The handle of a snapshot that is not going to storage; nobody keeps it."""
        return self._handle(staged, "")

    def fail(self, entry: Entry, error: BaseException) -> None:
        """This rank's part of the attempt will not come: the others need not wait for it."""
        reason = f"{type(error).__name__}: {error}"[:500]
        self.link.say(outcome="failed", reason=reason, errno=int(getattr(error, "errno", 0) or 0))
        self.link.wake("failed", entry.attempt.digest)

    def plan(self, name: str, state: Any, origin: str = "shard") -> Planned:
        """Lay out one file; everything but the bytes of tensors is captured now. Raises UnsupportedLeaf."""
        with span("plan", file=name):
            return Planned(image.plan(state, name, self._caches.setdefault(name, image.PlanCache())), origin)

    def busy_anywhere(self) -> bool:
        """True if some rank would have to wait for a buffer; one tiny exchange among all ranks."""
        return any(self.group.gather(self.buffers.busy()))

    def skipped(self, entry: Entry) -> Staged:
        """The record of a save that all ranks left out."""
        self.fail(entry, CkptError("skipped: a buffer was busy"))
        log.info("save of step %d skipped: a buffer was busy", entry.attempt.step)
        return Staged(entry.attempt.step, entry.attempt, skipped=True)

    def skipped_handle(self, entry: Entry) -> Handle:
        handle = self._handle(self.skipped(entry), entry.commit_dir)
        handle.fail(CkptError(f"step {entry.attempt.step} was skipped on all ranks: a buffer was busy (when_busy='skip')"))
        handle.reported = True
        return handle

    def report_trouble(self) -> None:
        """Tell of storage saves that failed since the last call: a warning, or their exception (``on_error``)."""
        failed = [(handle, error) for handle in self._handles if (error := handle.trouble()) is not None]
        self._handles = [handle for handle in self._handles if not handle.done() or handle.trouble() is not None]
        for handle, error in failed:
            handle.reported = True
            log.warning("the save of step %d did not become a checkpoint: %s", handle.step, error)
        if failed and self.options.on_error == "raise":
            raise failed[0][1]

    def _handle(self, staged: Staged, commit_dir: str) -> Handle:
        node = self.place.node if self.options.layout == "node-local" else None
        attempt = staged.attempt

        def on_disk() -> bool:
            found = listing.read_manifest(self.storage, commit_dir, node)
            return found is not None and found.attempt == attempt

        def missing() -> tuple[int, ...]:
            ranks = self.place.node_ranks if node is not None else tuple(range(self.group.world))
            records = commit.read_shard_records(
                self.storage, os.path.dirname(commit_dir), attempt, ranks, node=node
            )
            return tuple(sorted(set(ranks) - {record.rank for record in records}))

        return Handle(self.link, staged, commit_dir, on_disk, missing)

    def _header(self, entry: Entry, table: Any) -> Header:
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
            keep_last=self.options.retention.keep_last,
            confirmed=self._confirmed,
            storage=entry.storage,
            files=tuple(table),
        )

    # -- wait ----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> tuple[Published, ...]:
        """Block until every storage save has an outcome. Raises the first failure nobody was told of."""
        deadline = Deadline(self.options.saver.commit_s + 60.0 if timeout_s is None else timeout_s)
        published, first = [], None
        for handle in [handle for handle in self._handles if not handle.reported]:
            try:
                published.append(handle.result(deadline.remaining()))
            except CkptError as error:
                first = first or error
        self._handles = [handle for handle in self._handles if not handle.done()]
        if first is not None:
            raise first
        return tuple(published)

    # -- restore -------------------------------------------------------------------------------------------------

    def restore(self, load: Callable[[Source], dict[str, Any]], wants: Wants, step: int | None = None) -> RestoreReport:
        """Agree on the newest attempt (or that of ``step``), verify it, ``load`` its state, start a new run from it.

        Collective. ``load(source)`` reads with ``Source.fetch`` and must not communicate on its own account.
        Raises NotFound for a ``step`` that is nowhere, WorldMismatch, Corrupt if nothing that exists is intact.
        """
        self._require_open()
        wanted = None if step is None else whole("step", step, 0, MAX_STEP)
        with span("restore", step=step) as said:
            facts = self.group.gather(look(self.storage, self.buffers, self.root, self.place, self.options.layout))
            found, skipped = candidates(facts, self.root_id, wanted)
            report = RestoreReport(0, None, unmanaged=tuple(tag for fact in facts for tag in fact.unmanaged))
            share = RestoreDir(self)
            try:
                source, more = choose(self.group, self.place, found, self._open_source, wants, share.path)
                report = replace(report, skipped=skipped + more)
                if source is None:
                    nothing_usable(self.root, wanted, facts, report.skipped)
                else:
                    report = replace(source.report(), skipped=report.skipped, unmanaged=report.unmanaged)
                    report = replace(report, state=load(source), verified_bytes=source.verified_bytes)
                    source.close()
            finally:
                self.group.gather(())  # nobody fills a slot before everybody has read
                share.remove()
            said |= {"step": report.step, "source": report.source, "skipped": len(report.skipped)}
            self.claim = self._new_run(report.attempt)
        return report

    def open_verified(self, candidate: Candidate, wants: Wants) -> Source:
        """``candidate``, whose files every rank has verified. Collective. Raises Corrupt on all ranks alike."""
        source, skipped = choose(self.group, self.place, [candidate], self._open_source, wants, lambda: "")
        if source is None:
            reason = skipped[0].reason
            raise Corrupt(f"{candidate.attempt.tag}: {reason}", path=candidate.attempt.tag, want="intact", got=reason)
        return source

    def resumed_from(self, attempt: Attempt | None) -> None:
        """The framework loaded ``attempt`` itself: a new run starts there. Collective."""
        self.claim = self._new_run(attempt)

    def _open_source(self, candidate: Candidate) -> Source:
        return Source(candidate, self.buffers, self.storage, self._threads)

    def _new_run(self, resumed_from: Attempt | None) -> RunClaim:
        claim = agree_on_run(
            self.storage, self.group, self.place, self.root, self.options.layout, self.buffers.node_slots(), resumed_from
        )
        self._seq = 0
        self._saved = False
        self.link.say(generation=claim.generation, run=claim.run)
        return claim

    def _leave_other_lines(self) -> None:
        """Before the first fill of a run: free what is not the attempt we resumed from (invariant 9)."""
        held = [found[1] for slot in self.buffers.node_slots() if (found := slot.snapshot())]
        known = (*runs.read_runs(self.storage, self.root), *(header.claim for header in held), self.claim)

        def unwanted(header: Header, state: State) -> bool:
            if header.attempt == self.claim.resumed_from or header.claim.run == self.claim.run:
                return False
            return state not in LEASED or not runs.on_the_line(header.attempt, known)

        self.buffers.drop(unwanted)

    def _agree_on_confirmed(self) -> Order | None:
        """Node-local roots: the newest attempt that every node has committed; rides on the save."""
        mine: Order | None = None
        if self.place.leader:
            committed = listing.list_committed(self.storage, self.root).committed
            mine = max((one.order for one in committed if one.manifest.node == self.place.node), default=(0, 0))
        orders = [order for order in self.group.gather(mine) if order is not None]
        return min(orders, default=None)

    # -- close ---------------------------------------------------------------------------------------------------

    def close(self, *, goodbye: bool = True, timeout_s: float | None = None) -> None:
        """Wait for the storage saves in flight, then say goodbye: memory-only snapshots may go. Idempotent.

        With ``goodbye=False`` (an exception is in flight) nothing is waited for and every snapshot stays.
        Raises the first failure nobody was told of.
        """
        if self._closed:
            return
        self._closed = True
        first: CkptError | None = None
        if goodbye:
            try:
                self.wait(timeout_s)
            except CkptError as error:
                first = error
        self.buffers.close()
        self.link.close(goodbye=goodbye and first is None)
        self.group.close()
        if first is not None:
            raise first

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed")

    def _together(self, act: Callable[[], None]) -> None:
        """Do ``act`` on all ranks; if one fails all raise, so that nobody waits for a rank that gave up."""
        error: CkptError | None = None
        try:
            act()
        except CkptError as caught:
            error = caught
        told = self.group.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        if problems:
            self.link.close(goodbye=True)
            raise ConfigError("; ".join(problems))


class RestoreDir:
    """A directory in shared memory that all local ranks use during one restore; made when first asked for."""

    def __init__(self, owner: Checkpointer) -> None:
        self._owner = owner
        token = owner.group.gather(secrets.token_hex(4) if owner.group.rank == 0 else "")[0]
        self._path = owner.link.names.restore_dir(token)

    def path(self) -> str:
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        return str(self._path)

    def remove(self) -> None:
        if self._owner.place.leader:
            shutil.rmtree(self._path, ignore_errors=True)


def _same_root(nodes: list[tuple[str, str]], layout: str) -> None:
    roots = sorted({root for _, root in nodes})
    if len(roots) > 1 and layout == "shared":
        raise ConfigError(f"the ranks were given different roots {roots[:4]}: a shared root is one directory for all")

