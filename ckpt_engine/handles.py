"""What a save returns, and how its outcome is learnt: from the saver's ring, else from the manifest itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine import errors
from ckpt_engine.control import Outcome
from ckpt_engine.errors import AttemptFailed, Cancelled, CkptError, CommitTimeout, StorageError, StorageFull
from ckpt_engine.link import Link
from ckpt_engine.manifest import Attempt
from ckpt_engine.waits import Deadline


@dataclass(frozen=True, slots=True)
class Staged:
    """A snapshot in memory; it survives the death of this process from now on.

    ``wait_s``: seconds until a buffer was released, by ``waited_for`` ("" = none was needed). ``copy_s``: seconds of
    planning and copying. ``skipped``: True if ``when_busy="skip"`` left this save out on all ranks.
    """

    step: int
    attempt: Attempt
    wait_s: float = 0.0
    waited_for: str = ""
    copy_s: float = 0.0
    nbytes: int = 0
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """A committed checkpoint: all of it is durable, and ``path`` holds its manifest."""

    step: int
    attempt: Attempt
    path: str


class Handle:
    """One storage save on its way. Its exception is where trouble after staging shows."""

    def __init__(
        self, link: Link, staged: Staged, path: str, look: Callable[[], bool], missing: Callable[[], tuple[int, ...]]
    ) -> None:
        self.staged = staged
        self.path = path
        self._link = link
        self._look = look
        self._missing = missing
        self._end: Published | CkptError | None = None
        self.reported = False

    @property
    def step(self) -> int:
        return self.staged.step

    def done(self) -> bool:
        """True if it is known how this save ended; never blocks on storage."""
        return self._poll(look=False)

    def result(self, timeout_s: float | None = None) -> Published:
        """Block until committed. ``timeout_s`` None: the node's ``commit_s`` and a little more.

        Raises what went wrong: StorageFull, StorageError, AttemptFailed, StaleRun, Cancelled, CommitTimeout (with the
        ranks whose part is missing), SaverDied. The snapshot in memory and older checkpoints are intact.
        """
        deadline = Deadline(self._link.options.saver.commit_s + 60.0 if timeout_s is None else timeout_s)
        if not self._poll(look=True) and not self._link.wait(lambda: self._poll(look=True), deadline):
            missing = self._missing()
            raise CommitTimeout(
                f"step {self.step} is not committed after {deadline.elapsed():.1f} s: no receipt of ranks {missing}. It "
                "may still be; look again with result(), and see whether these ranks entered the save",
                missing_ranks=missing,
            )
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
        """It ended before it reached the saver."""
        self._end = error

    def _poll(self, *, look: bool) -> bool:
        if self._end is not None:
            return True
        page = self._link.outcomes()
        attempt = self.staged.attempt
        for outcome in page.outcomes if page is not None else ():
            if (outcome.order, outcome.run) == (attempt.order, attempt.run):
                self._end = self._published() if outcome.status == "committed" else error_of(outcome, attempt)
                return True
        if look and self._look():
            self._end = self._published()
        return self._end is not None

    def _published(self) -> Published:
        return Published(self.step, self.staged.attempt, self.path)


def error_of(outcome: Outcome, attempt: Attempt) -> CkptError:
    """The exception that an outcome stands for."""
    text = f"step {attempt.step} (tag {attempt.tag}): {outcome.reason}"
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

