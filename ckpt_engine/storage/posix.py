"""The disk verbs on a POSIX file system; the only place where OSError becomes StorageError."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckpt_engine import _C
from ckpt_engine.errors import Corrupt, StorageError, StorageFull
from ckpt_engine.storage.base import Entry, Progress, Storage
from ckpt_engine.waits import Deadline

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_CANNOT_REMOVE = frozenset({*_ABSENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY})
_CHUNK_BYTES = 8 << 20
_WRITES, _READS = 2, 4  # pieces of one file in flight; more gained nothing (docs/performance.md)


class Call(NamedTuple):
    """A verb that has not returned yet; ``since`` is when it began."""

    op: str
    path: str
    since: Deadline


_under_way: dict[int, Call] = {}


def calls_under_way() -> dict[int, Call]:
    """By thread of this process. For those who wonder what a thread waits for: it may be for ever."""
    return dict(_under_way)


class PosixStorage(Storage):
    """See ``Storage`` for the promises."""

    def __init__(self) -> None:
        self._limit = array("Q", [0])

    def limit_writes(self, bytes_per_s: int) -> None:
        """No file is written faster from now on, the one in hand included; 0 = as fast as it goes."""
        _C.store(self._limit, 0, bytes_per_s)

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
        count = memoryview(source).nbytes - offset if nbytes < 0 else nbytes
        counter, position = progress or (None, 0)
        with _translated("write", path, need_bytes=count):
            _refuse_links(path)
            return _C.write_file(
                path,
                source,
                offset=offset,
                nbytes=count,
                direct=direct,
                threads=_WRITES,
                limit=self._limit,
                mode=0o777 if executable else 0o666,
                progress=counter,
                progress_offset=position,
            )

    def rename(self, source: str, target: str) -> None:
        with _translated("rename", target):
            _refuse_links(source, target)
            os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        with _translated("link", target):
            _refuse_links(source, target)
            os.link(source, target)

    def unlink(self, path: str) -> bool:
        with _translated("unlink", path, quiet=_ABSENT):
            _refuse_links(path)
            os.unlink(path)
            return True
        return False

    def make_dir(self, path: str) -> bool:
        with _translated("mkdir", path):
            _refuse_links(path)
            try:
                with contextlib.suppress(InterruptedError):  # Python repeats some calls, not this one
                    os.mkdir(path)
                    return True
                os.mkdir(path)
            except FileExistsError:
                if os.path.islink(path) or not os.path.isdir(path):
                    raise
                return False
        return True

    def remove_dir(self, path: str) -> bool:
        with _translated("rmdir", path, quiet=_CANNOT_REMOVE):
            _refuse_links(path)
            os.rmdir(path)
            return True
        return False

    def sync_dir(self, path: str) -> None:
        with _translated("fsync", path, quiet=_CANNOT_SYNC):
            _sync(path or ".", os.O_DIRECTORY)

    def sync_file(self, path: str) -> None:
        with _translated("fsync", path):
            _sync(path, 0)

    def list_dir(self, path: str) -> tuple[Entry, ...]:
        with _translated("list", path, quiet=_ABSENT), os.scandir(path or ".") as found:
            return tuple(sorted(Entry(one.name, _is_dir(one)) for one in found))
        return ()

    def read_small(self, path: str, limit: int) -> bytes | None:
        with _translated("read", path, quiet=_ABSENT), _opened(path) as fd:
            if (nbytes := os.fstat(fd).st_size) > limit:
                raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
            data = bytearray()
            while piece := os.read(fd, max(nbytes, 4095) + 1):  # it may grow
                data += piece
                if len(data) > limit:
                    raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
            return bytes(data)
        return None

    def read_into(self, path: str, buffer: WriteableBuffer, *, offset: int, nbytes: int, threads: int = 1) -> int:
        with _translated("read", path):
            try:
                return _C.read_file(path, buffer, offset=offset, nbytes=nbytes, threads=max(threads, _READS))
            except EOFError as error:
                got = self.size(path)
                message = f"{path}: truncated, want {nbytes} bytes and found {got}"
                raise Corrupt(message, path=path, want=nbytes, got=got) from error

    def crc_of_file(self, path: str) -> tuple[int, int]:
        chunk = bytearray(_CHUNK_BYTES)
        nbytes = crc = 0
        with _translated("read", path), _opened(path) as fd:
            while count := os.readv(fd, [chunk]):
                crc = _C.crc32(chunk, crc, nbytes=count)
                nbytes += count
        return nbytes, crc

    def size(self, path: str) -> int | None:
        with _translated("stat", path, quiet=_ABSENT):
            return os.stat(path).st_size
        return None

    def same_file(self, one: str, other: str) -> bool:
        with _translated("stat", one, quiet=_ABSENT):
            return os.path.samestat(os.lstat(one), os.lstat(other))
        return False

    def free_bytes(self, path: str) -> int:
        with _translated("statvfs", path):
            usage = os.statvfs(path or ".")
            return usage.f_bavail * usage.f_frsize


@contextlib.contextmanager
def _translated(op: str, path: str, *, quiet: frozenset[int] = frozenset(), need_bytes: int = 0) -> Iterator[None]:
    """OSError in our words; an errno in ``quiet`` is swallowed, and the caller says what it means."""
    me = threading.get_ident()
    outer = _under_way.get(me)
    _under_way[me] = Call(op, path, Deadline(0.0))
    try:
        yield
    except OSError as error:
        if error.errno in quiet:
            return
        if error.errno in _FULL:
            raise _full(op, path, error.errno, need_bytes) from error
        raise StorageError.of(error, op=op, path=path) from error
    finally:
        if outer is None:
            del _under_way[me]
        else:
            _under_way[me] = outer


def _full(op: str, path: str, number: int, need_bytes: int) -> StorageFull:
    free_bytes = -1
    with contextlib.suppress(OSError):
        usage = os.statvfs(os.path.dirname(path) or ".")
        free_bytes = usage.f_bavail * usage.f_frsize
    message = f"{op} {path}: {os.strerror(number)}: need {need_bytes} bytes, {free_bytes} free"
    return StorageFull(message, op=op, path=path, errno=number, need_bytes=need_bytes, free_bytes=free_bytes)


def _refuse_links(*paths: str) -> None:
    """ELOOP if a directory on the way is a link: what we make, move or remove stays below the real path of the root.

    Roots are real paths, so such a link was put there by others. Who may do that at the very instant wins the race.
    """
    for folder in dict.fromkeys(map(os.path.dirname, map(os.path.abspath, paths))):  # mostly it is the same
        if not _C.free_of_links(folder) and os.path.realpath(folder) != folder:
            raise OSError(errno.ELOOP, "a link in place of a directory", folder)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a regular file: a pipe or a directory in its place is EINVAL, never a wait."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        yield fd
    finally:
        os.close(fd)


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, or gone
        return False
