"""Reserve, open and map named shared memory: untracked, 0600, ours alone.

Python's ``multiprocessing.shared_memory`` is not used: its tracker unlinks what must outlive its opener.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref

import posix_ipc

from ckpt_engine.errors import ConfigError, ShmFull, StagingError

PAGE = 4096


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked worker that outlives a segment would keep its memory taken: it has no use for it."""
    for mapping in list(_mappings):
        mapping.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class Mapping:
    """One mapped segment. Closing it never harms the segment; only ``unlink`` removes the name."""

    def __init__(self, name: str, fd: int, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._fd = fd
        self.memory = mmap.mmap(fd, nbytes)  # raises OSError; the descriptor is still the caller's then
        _mappings.add(self)

    def unlinked(self) -> bool:
        """True if someone removed the name (logind's RemoveIPC, an administrator): it will not outlive us."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Unmap. A view that is still exported keeps the memory until it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(BufferError):
                self.memory.close()

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            self.close()


def create(name: str, nbytes: int) -> Mapping:
    """Create ``name`` with ``nbytes`` (a multiple of the page) really reserved, filled with zeros.

    Raises FileExistsError, or ShmFull: posix_fallocate says ENOSPC now where a later store would be SIGBUS.
    After a crash: a segment without magic, which readers ignore and the saver removes.
    """
    try:
        segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError as error:
        raise FileExistsError(errno.EEXIST, "shared memory exists", name) from error
    try:
        os.posix_fallocate(segment.fd, 0, nbytes)
        return Mapping(name, segment.fd, nbytes)
    except OSError as error:
        os.close(segment.fd)
        unlink(name)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = free_bytes()
        raise ShmFull(
            f"/dev/shm cannot hold {nbytes} bytes more ({free} free): enlarge it (docker: --shm-size, "
            "Kubernetes: an emptyDir of medium Memory) or use fewer slots",
            need_bytes=nbytes,
            free_bytes=free,
            limit="/dev/shm",
        ) from error


def open_existing(name: str) -> Mapping | None:
    """Map ``name``; None if there is none, or if its creator has not reserved it yet.

    Raises ConfigError if it belongs to another user, or is a link, a directory or a socket.
    """
    try:
        segment = posix_ipc.SharedMemory(name)
    except posix_ipc.ExistentialError:
        return None
    except posix_ipc.PermissionsError as error:
        raise ConfigError(f"/dev/shm{name} exists but may not be opened by uid {os.geteuid()}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"/dev/shm{name} is not shared memory ({error}): remove it") from error
    status = os.fstat(segment.fd)
    if status.st_uid != os.geteuid():
        os.close(segment.fd)
        raise ConfigError(f"/dev/shm{name} belongs to uid {status.st_uid}, not to uid {os.geteuid()}: refused")
    if status.st_size < PAGE or status.st_size % PAGE:
        os.close(segment.fd)
        return None
    try:
        return Mapping(name, segment.fd, status.st_size)
    except OSError as error:
        os.close(segment.fd)
        raise StagingError(f"cannot map /dev/shm{name}: {error}") from error


def unlink(name: str) -> None:
    """Remove the name; no error if it is gone, or is not ours to remove."""
    with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError, IsADirectoryError):
        posix_ipc.unlink_shared_memory(name)


def free_bytes() -> int:
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize
