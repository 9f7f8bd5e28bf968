"""One save of one rank, from the lease of its slot to its seal and its place in the queue, in one thread or two."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_engine import commit
from ckpt_engine.buffers import Lease
from ckpt_engine.errors import CkptError, StagingError, StorageError
from ckpt_engine.events import span
from ckpt_engine.handles import Handle, Staged
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt
from ckpt_engine.metrics import Metric, by_name
from ckpt_engine.overlap import Late
from ckpt_engine.slots import Slot
from ckpt_engine.staging import Fill, Planned, space
from ckpt_engine.states import State
from ckpt_engine.waits import Deadline

if TYPE_CHECKING:
    from ckpt_engine.checkpointer import Checkpointer


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry into a save call: its attempt, and where it would be committed."""

    attempt: Attempt
    commit_dir: str
    storage: bool
    metrics: tuple[Metric, ...] = ()


class Saving:
    """``start`` leases a slot and copies what is not late; then comes ``copy``, ``seal``, or, in their place, ``fail``.

    They run in the caller's thread if nothing is late, else in that of ``overlap.Late``. After a crash in any of them
    the slot is FILLING, no snapshot, and the saver frees it.
    """

    def __init__(self, core: Checkpointer, entry: Entry, files: Mapping[str, Planned]) -> None:
        self._core = core
        self._entry = entry
        self._files = files
        self._slot: Slot | None = None
        self._fill: Fill | None = None
        self._handle: Handle | None = None

    def start(self) -> Handle:
        """The handle of a snapshot, or of one that ``core.late`` is making. Raises StagingError, SaverError."""
        core, entry, need = self._core, self._entry, space(self._files)
        try:
            lease = self._lease(need)
            begin, self._slot = time.monotonic(), lease.slot
            self._fill = fill = Fill(
                lease.slot,
                self._files,
                core.lanes,
                least=core.guards.least_bytes,
                verify=core.options.verify_staging,
            )
            fill.copy(threads=core.threads)
            if not fill.late_bytes:
                self._seal()
            core.saved = True
            staged = Staged(
                step=entry.attempt.step,
                attempt=entry.attempt,
                wait_s=lease.waited_s,
                waited_for=lease.blocker,
                copy_s=time.monotonic() - begin,
                nbytes=need,
                late_bytes=fill.late_bytes,
                metrics=by_name(entry.metrics),
            )
            self._handle = handle = core.handle(staged, entry.commit_dir if entry.storage else "")
            if fill.late_bytes:
                core.late = Late(self, core.threads)  # before anyone knows of the handle: from here on it has an end
            if entry.storage:
                core.outbox.add(handle)
            if not fill.late_bytes:
                self._hand_over(handle)
        except BaseException as error:  # Ctrl-C, too: nobody would bring it to an end
            core.late = None
            self.fail(error)
            raise
        if core.late is not None:
            core.late.start(core.copier)
        return handle

    @property
    def handle(self) -> Handle:
        if self._handle is None:
            raise StagingError("this save did not start")
        return self._handle

    def copy(self, threads: Callable[[], int]) -> None:
        """Read what is late."""
        if self._fill is not None:
            with span("copy", step=self._entry.attempt.step, bytes=self._fill.late_bytes):
                self._fill.copy_late(threads)

    def hold(self) -> None:
        """Let what a device does from now on wait for its copies."""
        fill = self._fill
        if fill is not None:
            fill.hold()

    def seal(self) -> None:
        """A snapshot from here on; a storage save goes to the saver."""
        self._seal()
        self._hand_over(self.handle)

    def fail(self, error: BaseException) -> None:
        """Give the slot back and tell the node, and whoever holds the handle."""
        if self._fill is not None:
            self._fill.abandon()
        self._release()
        slot = self._slot
        if slot is not None and (word := slot.word()).state is State.FILLING:
            slot.change("rank", word, State.FREE)
        if self._handle is not None:
            self._handle.fail(
                error if isinstance(error, CkptError) else StagingError(f"{type(error).__name__}: {error}")
            )
        self._core.fail(self._entry, error)

    def _lease(self, need: int) -> Lease:
        core = self._core
        with span("lease", step=self._entry.attempt.step, bytes=need) as facts:
            lease = core.buffers.lease(need, Deadline(core.options.wait_s))
            facts["wait_s"] = round(lease.waited_s, 6)
        return lease

    def _seal(self) -> None:
        core, entry = self._core, self._entry
        if self._slot is None or self._fill is None:
            raise StagingError(f"the slot of step {entry.attempt.step} was never filled")
        self._fill.await_late(core.threads)
        self._release()
        table, self._fill = self._fill.finish(), None
        with span("seal", step=entry.attempt.step, attempt=entry.attempt.id):
            seal(self._slot, core.header(entry, table))
        core.link.say(outcome="sealed")

    def _hand_over(self, handle: Handle) -> None:
        self._core.link.look_after_saver()
        if self._entry.storage:
            self._queue(handle)

    def _queue(self, handle: Handle) -> None:
        """Hand a sealed snapshot to the saver. Storage trouble fails the handle, never the training loop."""
        core, entry = self._core, self._entry
        try:
            with span("queue", step=entry.attempt.step, attempt=entry.attempt.id):
                commit.make_tag_dir(core.storage, os.path.dirname(entry.commit_dir), entry.attempt.tag)
                held = False
                for slot in core.buffers.mine():
                    found = slot.snapshot()
                    if found is not None and found[1].attempt == entry.attempt:
                        held = True
                        if found[0].state is State.READY:
                            slot.change("rank", found[0], State.QUEUED)  # or the saver did: SIGTERM, or a peer died
                if not held:
                    raise StagingError(f"the slot of step {entry.attempt.step} disappeared before it was queued")
        except (StorageError, StagingError) as error:
            handle.fail(error)
            core.fail(entry, error)
        with span("wake", step=entry.attempt.step):
            core.link.wake("queued", entry.attempt.digest)

    def _release(self) -> None:
        """Let go of the tensors, and of the state they were in."""
        for file in self._files.values():
            file.layout.release()
        self._files = {}


def seal(slot: Slot, header: Header) -> None:
    """FILLING → READY: complete, checksummed, immutable; a snapshot from now on."""
    slot.put_header(header)
    word = slot.word()
    if word.state is not State.FILLING or not slot.change("rank", word, State.READY, header.attempt):
        raise StagingError(f"slot {slot.name} was taken away while it was filled")
