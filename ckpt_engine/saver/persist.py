"""Sealed slot → files → shard record → release. One thread, one slot at a time, breakpoint saves and older ones first.

The life of a slot here: QUEUED → PERSISTING; a redo after a saver's death first looks for a manifest that names the
attempt; every file goes to the attempt directory (O_DIRECT straight from the slot, fsync, rename), several at a time,
and the directory is synced; then the shard record, durable; only then DURABLE and the rank is told. What fails is tried
again from the still-leased slot into new temporary files; then the slot is FAILED and says why.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ckpt_engine import commit
from ckpt_engine.disk_names import SCRIPTS
from ckpt_engine.errors import Cancelled, CkptError, StorageError, StorageFull
from ckpt_engine.events import log, span
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import ShardRecord
from ckpt_engine.messages import Message, Released
from ckpt_engine.saver.committer import Committer
from ckpt_engine.saver.outcomes import failure_of, node_of, parent_of
from ckpt_engine.slots import BREAKPOINT, CANCEL, DATA_OFFSET, Slot
from ckpt_engine.states import State, Word
from ckpt_engine.storage.base import Storage, write_range
from ckpt_engine.storage.posix import calls_under_way
from ckpt_engine.waits import SLICE_S, Deadline, pause

RETRYABLE = frozenset(
    {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT, errno.EBUSY}
)


@dataclass(frozen=True, slots=True)
class Job:
    slot: Slot
    word: Word
    header: Header

    @property
    def turn(self) -> tuple[int, ...]:
        """Smaller = earlier: breakpoint saves, newest first; then what ranks queued, oldest first."""
        generation, seq = self.header.attempt.order
        if self.slot.flags() & BREAKPOINT:
            return (1, -generation, -seq, self.header.rank)
        return (2, generation, seq, self.header.rank)


_LAST = (0,)


class Writer(threading.Thread):
    """The one writer of a saver, until a write does not return (see ``successor``)."""

    def __init__(
        self,
        storage: Storage,
        committer: Committer,
        tell: Callable[[int, Message], None],
        retry_s: float,
        *,
        at_once: int = 1,
    ) -> None:
        super().__init__(name="writer", daemon=True)
        self._storage = storage
        self._committer = committer
        self._tell = tell
        self._retry_s = retry_s
        self._at_once = at_once
        self._jobs: queue.PriorityQueue[tuple[tuple[int, ...], int, Job | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._stop_asked = threading.Event()
        self._record: ShardRecord | None = None
        self.current: Job | None = None
        self._succeeded = False

    def successor(self) -> Writer:
        """Started, for the slots behind one whose write does not return; this one ends when that has returned.

        There are never more than slots: each of those that wait holds one.
        """
        other = Writer(self._storage, self._committer, self._tell, self._retry_s, at_once=self._at_once)
        other._jobs, other._count, other._stop_asked = self._jobs, self._count, self._stop_asked
        self._succeeded = True
        other.start()
        return other

    def submit(self, job: Job) -> None:
        self._jobs.put((job.turn, next(self._count), job))

    def idle(self) -> bool:
        """True if all that was submitted has ended."""
        return self._jobs.unfinished_tasks == 0

    def stop(self) -> None:
        """Finish the slot in hand, take no other."""
        self._stop_asked.set()
        self._jobs.put((_LAST, next(self._count), None))

    def run(self) -> None:
        while not self._succeeded and (job := self._jobs.get()[2]) is not None:
            self.current = job
            try:
                self._persist(job)
            except Exception:  # the segment was taken away under us; the one writer goes on
                log.exception("defect while persisting %s", job.slot.name)
            self.current = None
            self._jobs.task_done()

    def _persist(self, job: Job) -> None:
        slot, header = job.slot, job.header
        if not slot.change("saver", job.word, State.PERSISTING):
            return  # the rank took it back (another line)
        leased = slot.word()
        end = State.FAILED
        self._record = None
        try:
            attempt = header.attempt
            with span("persist", step=attempt.step, rank=header.rank, attempt=attempt.id) as facts:
                facts["bytes"] = sum(file.nbytes for file in header.files)
                self._with_retries(slot, header)
            end = State.DURABLE
        except Cancelled as error:
            end = State.FREE
            self._committer.cancelled(header, str(error))
        except Exception as error:  # a defect, too, is a failed attempt: it must not end the only writer
            if not isinstance(error, CkptError):
                log.exception("defect while persisting %s", slot.name)
            failure = failure_of(error, header.rank)
            if isinstance(error, StorageFull):  # else what is there of it keeps every later save from finding room
                self._give_room_back(header)
            slot.put_error(failure)
            self._committer.failed(header, failure)
        if end is State.DURABLE:  # told before the release: else the rank could be seen to go on without its part
            self._committer.durable(header, self._record or header.shard_record())
        slot.change("saver", leased, end)
        self._tell(header.local_rank, Released(slot.name.slot, int(end), header.attempt.digest))

    def _with_retries(self, slot: Slot, header: Header) -> None:
        deadline, pause_s = Deadline(self._retry_s), 0.05
        done: set[str] = set()
        while True:
            try:
                return self._write(slot, header, done)
            except StorageError as error:
                if not isinstance(error, StorageFull):
                    done.clear()  # what was synced before an I/O error may be damaged, too
                if error.errno not in RETRYABLE or deadline.expired() or self._stop_asked.wait(deadline.slice(pause_s)):
                    raise
                log.warning("persist of %s failed (%s): trying again", header.attempt.id, error)
                pause_s = min(2 * pause_s, 2.0)

    def _write(self, slot: Slot, header: Header, done: set[str]) -> None:
        """All files and the shard record of one rank, durable; nothing is written twice for a published attempt.

        ``done``: files that are there from an earlier try, and grows.
        """
        hurried = bool(slot.flags() & BREAKPOINT)
        while self._committer.tidying and not hurried and not _hangs():  # it makes room, and may remove our directory
            pause(0.005)
        self._require_wanted(slot, header)
        if self._committer.ledger.is_published(header):
            return
        self._committer.ledger.claim(header)
        storage, root, attempt, node = self._storage, parent_of(header), header.attempt, node_of(header)
        if self._committer.ledger.removed_from(header.commit_dir) or hurried:
            commit.make_tag_dir(storage, root, attempt.tag)
        commit.make_attempt_dir(storage, root, attempt, [file.name for file in header.files], node=node)
        slot.reset_progress()

        def write(file: SlotFile) -> None:
            self._require_wanted(slot, header)
            if file.name in done:
                return
            with commit.cancelled_if_gone(attempt):
                write_range(
                    storage,
                    commit.attempt_path(root, attempt, file.name, node=node),
                    slot.memory,
                    offset=DATA_OFFSET + file.offset,
                    nbytes=file.nbytes,
                    executable=file.name in SCRIPTS,
                    progress=(slot.memory, slot.progress_offset),
                )
            done.add(file.name)

        each([partial(write, file) for file in header.files if file.origin != "external"], at_once=self._at_once)
        self._require_wanted(slot, header)
        self._record = header.shard_record(
            commit.seal_external(storage, root, attempt, file.name) if file.origin == "external" else file.entry
            for file in header.files
        )
        commit.write_shard_record(storage, root, self._record)

    def _give_room_back(self, header: Header) -> None:
        """Remove what is on disk of this part, which failed."""
        names = [file.name for file in header.files if file.origin != "external"]
        try:
            commit.drop_unfinished(
                self._storage, parent_of(header), header.attempt, header.rank, names, node=node_of(header)
            )
        except StorageError as error:
            log.warning("%s keeps its place on a full disk: %s", header.attempt.id, error)

    @staticmethod
    def _require_wanted(slot: Slot, header: Header) -> None:
        if slot.flags() & CANCEL:
            raise Cancelled(f"{header.attempt.id} was given up: its run was abandoned")


def _hangs() -> bool:
    """True if some call to the file system takes its time: nobody waits for that."""
    return any(call.since.elapsed() > SLICE_S for call in calls_under_way().values())


def each(tasks: Iterable[Callable[[], None]], *, at_once: int) -> None:
    """Call every task, ``at_once`` of them at a time. After an error none begins; it is raised when all have ended.

    A task that never returns is never given up, and holds up nobody who leaves.
    """
    waiting, errors = deque(tasks), list[BaseException]()

    def work() -> None:
        while waiting and not errors:
            with contextlib.suppress(IndexError):  # another took the last one
                task = waiting.popleft()
                try:
                    task()
                except BaseException as error:  # raised below, in the thread that asked
                    errors.append(error)

    helpers = [threading.Thread(target=work, name="writer", daemon=True) for _ in range(min(at_once, len(waiting)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
