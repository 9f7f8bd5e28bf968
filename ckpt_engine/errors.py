"""One tree of errors; facts are attributes, the message says what to do.

::

    CkptError
    ├── ConfigError                      an option, a directory or a rank that cannot be right
    ├── StagingError                     stage 1: this rank could not fill a slot
    │   ├── SlotTooSmall(need_bytes, have_bytes)
    │   ├── ShmFull(need_bytes, free_bytes, limit)
    │   ├── UnsupportedLeaf(path)
    │   └── BufferBusy(rank, waited_s, attempt)
    ├── SaverError                       the node's daemon
    │   ├── SaverUnavailable
    │   ├── SaverDied
    │   └── VersionMismatch(want, got)
    ├── PersistError                     stage 2: this attempt did not become a checkpoint
    │   ├── StorageError(op, path, errno)
    │   │   └── StorageFull(path, need_bytes, free_bytes)
    │   ├── CommitTimeout(missing_ranks)
    │   ├── AttemptFailed(rank, reason)
    │   ├── Cancelled
    │   └── StaleRun(other)
    └── RestoreError
        ├── NotFound
        ├── Corrupt(path, want, got)
        └── WorldMismatch(want, got)

Foreign errors are translated at two seams only: ``storage`` (OSError) and ``link`` (queues, locks, processes).
"""

from __future__ import annotations

import os


class CkptError(Exception):
    """Anything this package raises on purpose."""


class ConfigError(CkptError, ValueError):
    """The call cannot be right as it stands; nothing was changed."""


class StagingError(CkptError):
    """This rank could not fill a slot; every earlier snapshot is intact."""


class SlotTooSmall(StagingError):
    def __init__(self, message: str, *, need_bytes: int, have_bytes: int) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class ShmFull(StagingError):
    """``limit`` names the limit that binds, e.g. ``/dev/shm`` or a cgroup file."""

    def __init__(self, message: str, *, need_bytes: int, free_bytes: int, limit: str) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes
        self.limit = limit


class UnsupportedLeaf(StagingError):
    """``path`` leads to the leaf, e.g. ``model.pt: ['optimizer']['state'][3]``."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class BufferBusy(StagingError):
    """No slot of this rank was released within ``wait_s``; ``attempt`` is what held it."""

    def __init__(self, message: str, *, rank: int, waited_s: float, attempt: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.waited_s = waited_s
        self.attempt = attempt


class SaverError(CkptError):
    """The saver daemon of this node cannot do its work; what is in shared memory is safe."""


class SaverUnavailable(SaverError):
    pass


class SaverDied(SaverError):
    pass


class VersionMismatch(SaverError):
    def __init__(self, message: str, *, want: str, got: str) -> None:
        super().__init__(message)
        self.want = want
        self.got = got


class PersistError(CkptError):
    """An attempt did not become a checkpoint; older checkpoints and the snapshot in memory are intact."""


class StorageError(PersistError):
    """The storage refused ``op`` on ``path`` with ``errno``."""

    def __init__(self, message: str, *, op: str, path: str, errno: int) -> None:
        super().__init__(message)
        self.op = op
        self.path = path
        self.errno = errno

    @classmethod
    def of(cls, error: OSError, *, op: str, path: str) -> StorageError:
        """The same failure in our words; keeps errno. Use with ``raise … from``."""
        number = error.errno or 0
        return cls(f"{op} {path}: {os.strerror(number)} (errno {number})", op=op, path=path, errno=number)


class StorageFull(StorageError):
    def __init__(self, message: str, *, op: str, path: str, errno: int, need_bytes: int, free_bytes: int) -> None:
        super().__init__(message, op=op, path=path, errno=errno)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class CommitTimeout(PersistError):
    def __init__(self, message: str, *, missing_ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing_ranks = missing_ranks


class AttemptFailed(PersistError):
    """Some rank of the attempt failed; ``rank`` is -1 where it is not known which."""

    def __init__(self, message: str, *, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class Cancelled(PersistError):
    """The checkpoint directory was removed while the checkpoint was in flight, or its run was abandoned."""


class StaleRun(PersistError):
    """Another job writes to this root; ``other`` names its run."""

    def __init__(self, message: str, *, other: str) -> None:
        super().__init__(message)
        self.other = other


class RestoreError(CkptError):
    pass


class NotFound(RestoreError):
    pass


class Corrupt(RestoreError):
    """Bytes differ from what was saved: ``want`` and ``got`` are CRC-32s or sizes, as the message says."""

    def __init__(self, message: str, *, path: str, want: object, got: object) -> None:
        super().__init__(message)
        self.path = path
        self.want = want
        self.got = got


class WorldMismatch(RestoreError):
    def __init__(self, message: str, *, want: int, got: int) -> None:
        super().__init__(message)
        self.want = want
        self.got = got
