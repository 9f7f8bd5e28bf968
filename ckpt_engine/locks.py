"""Alive = holds a POSIX record lock on its own file in the run directory; the kernel lets go when it dies.

Record locks belong to a process, not to a descriptor: a forked data-loader worker does not keep its parent
alive, and *any* close of the file drops them. So each lock file is opened once per process (the table below),
never written, never renamed, and a process never probes what it holds itself. Record locks do not exclude
threads: a mutex goes with each file. Source: fcntl(2), "Advisory record locking".
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

from ckpt_engine.errors import ConfigError
from ckpt_engine.waits import Deadline, pause

_FLOCK = "hhlli4x"  # struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid


class LockFile:
    """One lock file of this process. ``with lock.held(deadline)``, or ``try_lock`` to keep it for life."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._fd = -1

    def try_lock(self) -> bool:
        """True if the lock is now ours. After a crash: the kernel has released it."""
        if not self._mutex.acquire(blocking=False):
            return False
        if self._lock_file():
            return True
        self._mutex.release()
        return False

    def lock(self, deadline: Deadline) -> bool:
        """``try_lock`` until the deadline."""
        while not self.try_lock():
            if deadline.expired():
                return False
            pause(deadline.slice(0.005))
        return True

    def unlock(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._mutex.release()

    @property
    def locked_here(self) -> bool:
        return self._mutex.locked()

    def _lock_file(self) -> bool:
        while True:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise
            if self._is_the_file_at_path():
                return True
            os.close(self._fd)  # a retiring saver unlinked it under us: this lock means nothing
            self._fd = -1

    def _is_the_file_at_path(self) -> bool:
        mine = os.fstat(self._fd)
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino)


_table: dict[Path, LockFile] = {}
_table_mutex = threading.Lock()
os.register_at_fork(after_in_child=_table.clear)  # the child holds none of its parent's locks


def lock_file(path: Path) -> LockFile:
    """The one LockFile of this process for ``path``."""
    with _table_mutex:
        return _table.setdefault(path, LockFile(path))


def holder(path: Path) -> int | None:
    """Pid of the other process that holds ``path`` (0 if it lives in another pid namespace), None if nobody does.

    Raises ConfigError if this process holds it: a record lock never shows to its owner.
    """
    mine = lock_file(path)
    if not mine._mutex.acquire(blocking=False):
        raise ConfigError(f"{path} is held by this process: it cannot probe itself")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    else:
        try:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question))
        finally:
            os.close(fd)
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        mine._mutex.release()
