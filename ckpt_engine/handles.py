"""What a save returns, and how its outcome is learnt: from the saver's ring, else from the manifest itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt_engine import commit, errors, listing, sweep
from ckpt_engine.config import Options
from ckpt_engine.control import Outcome
from ckpt_engine.errors import AttemptFailed, Cancelled, CkptError, CommitTimeout, Corrupt, StorageError, StorageFull
from ckpt_engine.events import log
from ckpt_engine.link import Link
from ckpt_engine.manifest import Attempt, Committed
from ckpt_engine.messages import LOOK_S
from ckpt_engine.storage.base import Storage
from ckpt_engine.waits import SLICE_S, Deadline


@dataclass(frozen=True, slots=True)
class Staged:
    """A snapshot in memory; it survives the death of this process from now on.

    ``wait_s``: seconds until a buffer was released, by ``waited_for`` ("" = none was needed). ``copy_s``: seconds of
    planning and copying. ``skipped``: True if ``when_busy="skip"`` left this save out on all ranks. ``late_bytes``:
    still to be copied at the return (``staging="overlap"``): it is a snapshot when ``wait_staged`` returns, or earlier.
    """

    step: int
    attempt: Attempt
    wait_s: float = 0.0
    waited_for: str = ""
    copy_s: float = 0.0
    nbytes: int = 0
    skipped: bool = False
    late_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Published:
    """A committed checkpoint: all of it is durable, and ``path`` holds its manifest; ``metrics``: as this rank gave."""

    step: int
    attempt: Attempt
    path: str
    metrics: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a handle looks for its manifest: that of all ``ranks`` in ``path``, or of one ``node`` there."""

    storage: Storage
    path: str
    ranks: Sequence[int]
    node: int | None = None

    def holds(self, attempt: Attempt) -> bool:
        """True if its manifest is there, and its files have their plain names; what cannot be read now may be later."""
        with contextlib.suppress(Corrupt, StorageError):
            found = listing.read_manifest(self.storage, self.path, self.node)
            if found is not None and found.attempt == attempt:
                return not sweep.unsettled(self.storage, Committed(found, self.path))
        return False

    def missing(self, attempt: Attempt) -> tuple[int, ...]:
        """Ranks whose part is not there."""
        found: set[int] = set()
        with contextlib.suppress(StorageError):
            parent = os.path.dirname(self.path)
            records = commit.read_shard_records(self.storage, parent, attempt, self.ranks, node=self.node)
            found = {record.rank for record in records}
        return tuple(sorted(set(self.ranks) - found))


def patience(options: Options, timeout_s: float | None) -> Deadline:
    """``timeout_s`` from now; None: what a node has for a commit, and a little more."""
    return Deadline(options.saver.commit_s + 60.0 if timeout_s is None else timeout_s)


class Handle:
    """One storage save on its way. Its exception is where trouble after staging shows."""

    def __init__(self, link: Link, staged: Staged, destination: Destination) -> None:
        self.staged = staged
        self.path = destination.path
        self._link = link
        self._destination = destination
        self._end: Published | CkptError | None = None
        self.reported = False

    @property
    def step(self) -> int:
        return self.staged.step

    def __repr__(self) -> str:
        end = self._end
        told = "no outcome yet" if end is None else f"failed: {end}" if isinstance(end, CkptError) else "committed"
        return f"<Handle of step {self.step}: {told}>"

    def done(self) -> bool:
        """True if it is known how this save ended; never blocks on storage."""
        return self._poll(look=False)

    def result(self, timeout_s: float | None = None) -> Published:
        """Block until committed. ``timeout_s`` None: the node's ``commit_s`` and a little more.

        Raises what went wrong: StorageFull, StorageError, AttemptFailed, StaleRun, Cancelled, CommitTimeout (with the
        ranks whose part is missing), SaverDied. The snapshot in memory and older checkpoints are intact.
        """
        deadline, silent = patience(self._link.options, timeout_s), Deadline(SLICE_S)

        def known() -> bool:
            return self._look() if silent.expired() else self.done()  # the saver tells it when ``latest`` is there, too

        if not known() and not self._link.wait(known, deadline) and not self._look():
            raise self._late(deadline.elapsed())
        if isinstance(self._end, Published):
            return self._end
        self.reported = True
        raise self._end or CkptError("no outcome")

    def trouble(self) -> CkptError | None:
        """The failure of this save, if it failed and nobody was told; does not block."""
        if self.reported or not self.done() or not isinstance(self._end, CkptError):
            return None
        return self._end

    def fail(self, error: CkptError) -> None:
        """It ended before it reached the saver, if it has no end yet."""
        self._end = self._end or error

    def _late(self, seconds: float) -> CommitTimeout:
        text = f"step {self.step} is not committed after {seconds:.1f} s"
        if stuck := self._stuck():
            text += f": the saver waits for the file system: {stuck}. Look again with result()"
            return CommitTimeout(text, missing_ranks=())
        missing = self._destination.missing(self.staged.attempt)
        lacks = f"no receipt of ranks {missing}" if missing else "every part is there, its manifest is not"
        advice = "look again with result(), and see whether these ranks entered the save"
        return CommitTimeout(f"{text}: {lacks}. It may still be; {advice}", missing_ranks=missing)

    def _stuck(self) -> str:
        page = self._link.outcomes()
        return page.stuck if page is not None else ""

    def _look(self) -> bool:
        """``done``, and a look at the disk, unless the saver does not come back from there."""
        return self._poll(look=not self._stuck())

    def _poll(self, *, look: bool) -> bool:
        if self._end is not None:
            return True
        page = self._link.outcomes()
        attempt = self.staged.attempt
        for outcome in page.outcomes if page is not None else ():
            if (outcome.order, outcome.run) == (attempt.order, attempt.run):
                self._end = self._published() if outcome.status == "committed" else self._failed(outcome)
                if outcome.status == "committed" and outcome.reason:
                    log.warning("step %d is committed, but %s", self.step, outcome.reason)
                return True
        if look and self._destination.holds(attempt):
            self._end = self._published()
        return self._end is not None

    def _failed(self, outcome: Outcome) -> CkptError:
        error = error_of(outcome, self.staged.attempt)
        if isinstance(error, CommitTimeout):  # a saver knows the missing nodes; the disk knows the ranks
            error.missing_ranks = self._destination.missing(self.staged.attempt) or error.missing_ranks
        return error

    def _published(self) -> Published:
        return Published(self.step, self.staged.attempt, self.path, self.staged.metrics)


class Outbox:
    """The storage saves of one rank that have no outcome yet, or one that nobody was told of."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self.newest: Handle | None = None

    def add(self, handle: Handle) -> None:
        self.newest = handle
        if handle not in self._handles:
            self._handles.append(handle)

    def in_flight(self) -> list[tuple[Attempt, str]]:
        """(attempt, commit directory) of the saves that have no outcome, as far as is known."""
        return [(one.staged.attempt, one.path) for one in self._handles if not one.done()]

    def report(self, on_error: str, fresh: Handle | None = None) -> None:
        """Tell of saves that failed since the last call: a warning, or the first one's exception (``on_error``).

        Not of ``fresh``, whose caller has its handle yet to come: if nobody looks there, the next call tells.
        """
        ended = [handle for handle in self._handles if handle is not fresh]
        failed = [(handle, error) for handle in ended if (error := handle.trouble()) is not None]
        for handle, error in failed:
            handle.reported = True
            log.warning("the save of step %d did not become a checkpoint: %s", handle.step, error)
        self._forget([handle for handle in ended if handle.done()])
        if failed and on_error == "raise":
            raise failed[0][1]

    def wait(self, deadline: Deadline) -> tuple[Published, ...]:
        """Block until every save has an outcome; raises the first failure nobody was told of."""
        published, first = [], None
        for handle in [one for one in self._handles if not one.reported]:
            try:
                published.append(handle.result(deadline.remaining()))
            except CkptError as error:
                first = first or error
        self._forget([handle for handle in self._handles if handle.done()])
        if first is not None:
            raise first
        return tuple(published)

    def await_tidy(self, link: Link, timeout_s: float) -> None:
        """Wait until the saver has removed what the last commit made superfluous, unless it has trouble with that."""
        last = self.newest
        committed = last is not None and isinstance(last._end, Published)
        newest = (last.staged.attempt.order, last.staged.attempt.run) if last is not None and committed else None

        def tidy() -> bool:
            page = link.outcomes()
            if page is None or page.leaving or page.stuck:
                return True
            told = newest is None or newest in [(one.order, one.run) for one in page.outcomes]
            return told and not page.tidying

        with contextlib.suppress(errors.SaverError, errors.ConfigError):
            link.wait(tidy, Deadline(timeout_s), lambda: LOOK_S)

    def _forget(self, ended: Iterable[Handle]) -> None:
        """In place: another thread may be adding one."""
        for handle in ended:
            with contextlib.suppress(ValueError):
                self._handles.remove(handle)


def error_of(outcome: Outcome, attempt: Attempt) -> CkptError:
    """The exception that an outcome stands for."""
    who = f"rank {outcome.rank}: " if outcome.rank >= 0 and f"rank {outcome.rank}" not in outcome.reason else ""
    text = f"step {attempt.step} (tag {attempt.tag}): {who}{outcome.reason}"
    if outcome.status == "cancelled":
        return Cancelled(text)
    if outcome.kind == "StorageFull":
        return StorageFull(
            text,
            op=outcome.op,
            path=outcome.path,
            errno=outcome.errno,
            need_bytes=outcome.need_bytes,
            free_bytes=outcome.free_bytes,
        )
    if outcome.kind == "StorageError":
        return StorageError(text, op=outcome.op, path=outcome.path, errno=outcome.errno)
    if outcome.kind == "CommitTimeout":
        return CommitTimeout(text, missing_ranks=outcome.missing)
    if outcome.kind == "StaleRun":
        return errors.StaleRun(text, other=outcome.path)
    return AttemptFailed(text, rank=outcome.rank, reason=outcome.reason)
