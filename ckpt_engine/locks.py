"""Alive = holds a POSIX record lock on its own file in the run directory; the kernel lets go when it dies.

Record locks belong to a process, not to a descriptor: a forked data-loader worker does not keep its parent
alive, and *any* close of the file drops them. So each lock file is opened once per process (the table below),
never written, never renamed, and a process never probes what it holds itself. Record locks do not exclude
threads: a mutex goes with each file. Source: fcntl(2), "Advisory record locking".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

from ckpt_engine.errors import ConfigError
from ckpt_engine.waits import Deadline, pause

_FLOCK = "hhlli4x"  # struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class LockFile:
    """One lock file of this process; see ``lock_file``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False
        self._mutex = threading.Lock()  # guards the descriptor for an instant; nobody waits while holding it
        self._fd = -1

    def try_lock(self) -> bool:
        """True if the lock is now ours; False if another process, or another thread of this one, has it.

        Raises OSError, FileNotFoundError if the directory is gone. After a crash: the kernel has released it.
        """
        with self._mutex:
            if self.held:
                return False
            self.held = self._lock_file()
            return self.held

    def lock(self, deadline: Deadline) -> bool:
        """``try_lock`` until the deadline."""
        while not self.try_lock():
            if deadline.expired():
                return False
            pause(deadline.slice(0.005))
        return True

    def unlock(self) -> None:
        with self._mutex:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
            self.held = False

    def keep(self) -> bool:
        """Still ours; if somebody removed the file, locked anew. False: another process was faster.

        REQUIRES: held. Raises OSError, FileNotFoundError if the directory is gone.
        """
        with self._mutex:
            self.held = self._is_the_file_at_path() or self._lock_file()
            return self.held

    def holder(self) -> int | None:
        """See ``holder``; the mutex keeps this process from locking the file while the probe closes it."""
        with self._mutex:
            if self.held:
                raise ConfigError(f"{self.path} is held by this process: it cannot probe itself")
            try:
                fd = _opened(self.path)
            except FileNotFoundError:
                return None
            try:
                question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question))
            finally:
                os.close(fd)
            return None if kind == fcntl.F_UNLCK else int(pid)

    def _lock_file(self) -> bool:
        while True:
            if self._fd < 0:
                self._fd = _opened(self.path, os.O_CREAT)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise
            if self._is_the_file_at_path():
                return True
            os.close(self._fd)  # it was removed under us: this lock means nothing
            self._fd = -1

    def _is_the_file_at_path(self) -> bool:
        mine = os.fstat(self._fd)
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino)


def _opened(path: Path, more: int = 0) -> int:
    """Raises ConfigError for a file of another user: he could hold a dead process alive."""
    fd = os.open(path, _FLAGS | more, 0o600)
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        os.close(fd)
        raise ConfigError(f"{path} belongs to uid {owner}, not to uid {os.geteuid()}: remove it")
    return fd


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
    return lock_file(path).holder()


def make_run_dir(path: Path) -> None:
    """Create the run directory, 0700 and ours. Raises ConfigError if somebody else made it."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return  # a retiring saver removed it just now; the caller tries again
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{path} exists and is not a directory of uid {os.geteuid()}: remove it")
    if status.st_mode & 0o077:
        raise ConfigError(f"{path} is open to others (mode {status.st_mode & 0o777:o}): remove it")
