"""What the disk can be asked to do: a few primitive verbs, and the safe orders built from them.

Everything that reads or changes the disk goes through a ``Storage``, so a test can stand in for the disk and
refuse, delay, forget or die at any verb. A name is durable only after ``sync_dir`` of its directory.

Errors: every verb raises StorageError (StorageFull for ENOSPC and EDQUOT) with the errno; nothing else.
"Not there" is an answer where a verb says so and ``StorageError`` with ENOENT elsewhere (see ``is_missing``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ckpt_engine import disk_names, events
from ckpt_engine.errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

T = TypeVar("T")

Progress = tuple["WriteableBuffer", int]
"""A buffer and the position in it of the uint64 to which written bytes are added."""

NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})
"""How a file system says that it has no hard links."""


class Entry(NamedTuple):
    name: str
    is_dir: bool


class Storage(Protocol):
    def write_new(
        self,
        path: str,
        source: ReadableBuffer,
        *,
        offset: int = 0,
        nbytes: int = -1,
        direct: bool = False,
        executable: bool = False,
        progress: Progress | None = None,
    ) -> bool:
        """Create ``path`` (EEXIST if it is there), write ``source[offset:offset+nbytes]``, fsync it.

        ``nbytes`` -1: to the end. ``direct``: past the page cache where possible; True if it was. Modes follow
        ``executable``, the umask and default ACLs. After an error the file is worthless: unlink it, never write or
        sync it again.

        After a crash: anything may be there, or nothing; complete once it has returned, but the name may be gone.
        """

    def rename(self, source: str, target: str) -> None:
        """``target`` is the old file or the new one at every instant."""

    def link(self, source: str, target: str) -> None:
        """A second name for a file; EEXIST if ``target`` is there, one of ``NO_LINKS`` if it cannot be done."""

    def unlink(self, path: str) -> bool:
        """False: it was not there."""

    def make_dir(self, path: str) -> bool:
        """False: it was there. ENOENT if the parent is not."""

    def remove_dir(self, path: str) -> bool:
        """Remove an empty directory; False if it is not there, not empty or in use."""

    def sync_dir(self, path: str) -> None:
        """Names made, moved and removed in ``path`` are durable; does nothing where the platform cannot."""

    def sync_file(self, path: str) -> None:
        """The bytes of a file somebody else wrote are durable."""

    def list_dir(self, path: str) -> tuple[Entry, ...]:
        """Sorted by name; a link counts as what it leads to; () if ``path`` is not a directory."""

    def read_small(self, path: str, limit: int) -> bytes | None:
        """All of a regular file of at most ``limit`` bytes (else EFBIG); None if it is not there. Never blocks."""

    def read_into(self, path: str, buffer: WriteableBuffer, *, offset: int, nbytes: int, threads: int = 1) -> int:
        """Read ``nbytes`` into ``buffer[offset:]``; their CRC-32. Raises Corrupt if the file is shorter."""

    def crc_of_file(self, path: str) -> tuple[int, int]:
        """(size in bytes, CRC-32)."""

    def size(self, path: str) -> int | None:
        """Bytes; None if it is not there."""

    def same_file(self, one: str, other: str) -> bool:
        """Two names of one file (a link that leads to it is not one); False if either is not there."""

    def free_bytes(self, path: str) -> int:
        """What this user may still write in the directory ``path``."""


def is_missing(error: StorageError) -> bool:
    return error.errno == errno.ENOENT


def write_durably(storage: Storage, path: str, data: bytes, *, temp_dir: str | None = None) -> None:
    """Replace ``path`` by ``data``: temporary name → fsync → rename → fsync of the directory.

    ``temp_dir``: where the temporary file lies (default: beside ``path``; elsewhere on the same file system, it makes
    the write conditional: ENOENT if that directory is gone).

    After a crash: the old content or the new; the new once it has returned. Maybe a temporary file to sweep.
    """
    _renamed(storage, path, lambda temp: storage.write_new(temp, data), temp_dir)
    storage.sync_dir(os.path.dirname(path))


def write_range(
    storage: Storage,
    path: str,
    source: ReadableBuffer,
    *,
    offset: int,
    nbytes: int,
    direct: bool = True,
    executable: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Temporary name → fsync → rename for ``source[offset:offset+nbytes]``, straight from a slot; True: by O_DIRECT.

    The name is durable after ``sync_dir``, which is for the caller, who may have more files. ``progress`` may have
    moved when this raises: it is for the caller to set back.

    After a crash: the old content, the new, or no file. Maybe a temporary file to sweep.
    """

    def write(temp: str) -> bool:
        return storage.write_new(
            temp, source, offset=offset, nbytes=nbytes, direct=direct, executable=executable, progress=progress
        )

    return _renamed(storage, path, write)


def create_exclusive(storage: Storage, path: str, data: bytes) -> bool:
    """Create ``path`` with all of ``data`` and durable, once among all callers; False: somebody else did.

    Where the file system has no hard links, ``path`` is created in place, after a warning.

    After a crash: absent or complete; where there are no hard links it may be truncated, which its reader detects.
    """
    folder = os.path.dirname(path)
    temp = os.path.join(folder, disk_names.temp())
    try:
        storage.write_new(temp, data)
        storage.link(temp, path)
    except StorageError as error:
        if error.errno in NO_LINKS:
            events.warn_once("no-links", f"{folder} has no hard links; a crash may truncate {path}")
            return _create_in_place(storage, path, data)
        if error.errno != errno.EEXIST:
            raise
        if not storage.same_file(temp, path):  # NFS may repeat a request that has succeeded
            return False
    finally:
        _discard(storage, temp)
    storage.sync_dir(folder)
    return True


def make_dirs(storage: Storage, path: str) -> None:
    """Make ``path`` and what is missing above it.

    After a crash: once it has returned, every directory it made is there.
    """
    parent = os.path.dirname(path) or "."
    try:
        storage.make_dir(path)
    except StorageError as error:
        if not is_missing(error) or parent in (".", path):
            raise
        make_dirs(storage, parent)
        storage.make_dir(path)
    storage.sync_dir(parent)


def remove_tree(storage: Storage, path: str) -> None:
    """Remove a directory of ours with all that is in it (links, not what they lead to); what is gone is gone.

    After a crash: call it again.
    """
    try:
        storage.unlink(path)  # a link in its place, or what lies in it
    except StorageError as error:
        if error.errno != errno.EISDIR:
            raise
        for entry in storage.list_dir(path):
            remove_tree(storage, os.path.join(path, entry.name))
        storage.remove_dir(path)


def _create_in_place(storage: Storage, path: str, data: bytes) -> bool:
    try:
        storage.write_new(path, data)
    except StorageError as error:
        if error.errno == errno.EEXIST:
            return False
        _discard(storage, path)
        raise
    storage.sync_dir(os.path.dirname(path))
    return True


def _renamed(storage: Storage, path: str, write: Callable[[str], T], temp_dir: str | None = None) -> T:
    temp = os.path.join(os.path.dirname(path) if temp_dir is None else temp_dir, disk_names.temp())
    try:
        result = write(temp)
        storage.rename(temp, path)
    except StorageError:
        _discard(storage, temp)
        raise
    return result


def _discard(storage: Storage, temp: str) -> None:
    with contextlib.suppress(StorageError):  # what stays is swept later; the first error is the one that counts
        storage.unlink(temp)
