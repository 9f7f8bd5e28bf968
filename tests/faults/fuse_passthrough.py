"""A file system that passes everything on to a directory, and refuses what a file of rules says.

``python fuse_passthrough.py DIRECTORY MOUNTPOINT RULES``: needs root, /dev/fuse, libfuse 2 and fusepy. RULES is JSON, a
list that is read anew whenever it is replaced. A rule has

op      an operation or a list of them: getattr, opendir, readdir, open, create, read, write, truncate, fsync, fsyncdir,
        rename, link, unlink, mkdir, rmdir, statfs
path    a regular expression searched in the path below MOUNTPOINT (either of the two, of a rename or link)
data    a regular expression searched in what has been written to the open file so far (write, fsync)
direct  true or false: only where the file is, or is not, open with O_DIRECT (write, fsync)
count   how often it applies; without it, as long as it is there
and one of
errno   refuse with this number
hold    wait as long as the rule is there, then go on
short   write at most so many bytes, and say so
late_s  names that others make are not there before they have been looked for so long: a client whose cache knows
        better. ``op`` is not needed; ``pids`` and ``command`` (part of a command line) say who that client is

What a rule hit is added to the file ``hits`` beside RULES, with the time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuse

FILE_KINDS = ("st_atime", "st_ctime", "st_gid", "st_ino", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")
FIGURES = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize")


class Rules:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark: tuple[int, int] | None = None
        self._rules: list[dict[str, Any]] = []
        self._used: dict[str, int] = {}
        self._mutex = threading.Lock()

    def now(self) -> list[dict[str, Any]]:
        mark = None
        try:
            found = os.stat(self._path)
            mark = (found.st_ino, found.st_mtime_ns)
            if mark != self._mark:
                self._rules = json.loads(self._path.read_text())
        except FileNotFoundError:
            self._rules = []
        self._mark = mark
        return self._rules

    def apply(self, op: str, *paths: str, data: bytes = b"", direct: bool | None = None) -> int | None:
        """Obey the rules for one call: raises what they refuse with; returns how much may be written, None = all."""
        who = fuse.fuse_get_context()[2]
        limit = None
        for rule in list(self.now()):
            if self._fits(rule, op, paths, data, direct) and self._counts(rule):
                self._note(rule, op, paths[-1], who)
                while rule.get("hold") and rule in self.now():
                    time.sleep(0.005)
                if "errno" in rule:
                    raise OSError(rule["errno"], os.strerror(rule["errno"]))
                limit = rule.get("short", limit)
        return limit

    def late_s(self) -> float:
        """For whom asks now; 0 if it sees every name at once."""
        rule = next((rule for rule in self.now() if "late_s" in rule), None)
        if rule is None:
            return 0.0
        who = fuse.fuse_get_context()[2]
        with contextlib.suppress(OSError):
            if who in rule["pids"] or rule["command"].encode() in Path(f"/proc/{who}/cmdline").read_bytes():
                return float(rule["late_s"])
        return 0.0

    def any_late(self) -> bool:
        return any("late_s" in rule for rule in self.now())

    def _fits(self, rule: dict[str, Any], op: str, paths: tuple[str, ...], data: bytes, direct: bool | None) -> bool:
        wanted = rule.get("op", [])
        return (
            op in ([wanted] if isinstance(wanted, str) else wanted)
            and any(re.search(rule.get("path", ""), path) for path in paths)
            and re.search(rule.get("data", "").encode("latin-1"), data, re.DOTALL) is not None
            and rule.get("direct", direct) == direct
        )

    def _counts(self, rule: dict[str, Any]) -> bool:
        with self._mutex:
            key = json.dumps(rule, sort_keys=True)
            self._used[key] = self._used.get(key, 0) + 1
            return self._used[key] <= rule.get("count", sys.maxsize)

    def _note(self, rule: dict[str, Any], op: str, path: str, who: int) -> None:
        line = json.dumps({"op": op, "path": path, "who": who, "at": time.monotonic(), "rule": rule}) + "\n"
        fd = os.open(self._path.parent / "hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, line.encode())
        os.close(fd)


class Passthrough(fuse.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, directory: str, rules: Rules) -> None:
        self._directory = directory
        self._rules = rules
        self._written: dict[int, bytes] = {}
        self._seen: dict[str, float] = {}
        self._late = False

    def _at(self, path: str) -> str:
        """Where ``path`` really is; ENOENT for a name, or one above it, that this client does not see yet."""
        names = path.strip("/").split("/")
        for depth in range(1, len(names) + 1):
            if self._is_late("/" + "/".join(names[:depth])):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._directory + path

    def _is_late(self, path: str) -> bool:
        if self._rules.any_late() != self._late:
            self._late = not self._late
            self._seen = dict.fromkeys(self._all(), 0.0)
        seconds = self._rules.late_s()
        if not seconds:
            return False
        if not os.path.lexists(self._directory + path):
            self._seen.pop(path, None)
            return False
        return time.monotonic() < self._seen.setdefault(path, time.monotonic()) + seconds

    def _all(self) -> list[str]:
        start = len(self._directory)
        return [
            os.path.join(folder, name)[start:]
            for folder, folders, files in os.walk(self._directory)
            for name in folders + files
        ]

    @contextlib.contextmanager
    def _makes(self, path: str) -> Iterator[None]:
        """Whoever makes a name knows it, and who is told that it is there already; as on NFS."""
        self._at(os.path.dirname(path))
        try:
            yield
        finally:
            if self._rules.late_s():
                self._seen[path] = 0.0

    # -- names -------------------------------------------------------------------------------------------------------

    def getattr(self, path: str, _info: Any = None) -> dict[str, Any]:
        self._rules.apply("getattr", path)
        found = os.fstat(_info.fh) if _info is not None else os.lstat(self._at(path))
        facts = {key: getattr(found, key) for key in FILE_KINDS}
        return facts | {key: getattr(found, f"{key}_ns") for key in ("st_atime", "st_mtime", "st_ctime")}

    def access(self, path: str, mode: int) -> int:
        if not os.access(self._at(path), mode):
            raise OSError(errno.EACCES, path)
        return 0

    def opendir(self, path: str) -> int:
        self._rules.apply("opendir", path)
        return os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, path: str, _fd: int) -> list[str]:
        self._rules.apply("readdir", path)
        names = os.listdir(self._at(path))
        return [".", "..", *(name for name in names if not self._is_late(os.path.join(path, name)))]

    def releasedir(self, _path: str, fd: int) -> None:
        os.close(fd)

    def fsyncdir(self, path: str, _datasync: int, fd: int) -> None:
        self._rules.apply("fsyncdir", path)
        os.fsync(fd)

    def mkdir(self, path: str, mode: int) -> None:
        self._rules.apply("mkdir", path)
        with self._makes(path):
            os.mkdir(self._directory + path, mode)

    def rmdir(self, path: str) -> None:
        self._rules.apply("rmdir", path)
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        self._rules.apply("unlink", path)
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        self._rules.apply("rename", old, new)
        with self._makes(new):
            os.rename(self._at(old), self._directory + new)

    def link(self, new: str, old: str) -> None:
        self._rules.apply("link", old, new)
        with self._makes(new):
            os.link(self._at(old), self._directory + new)

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        os.utime(self._at(path), ns=times)

    def statfs(self, path: str) -> dict[str, int]:
        self._rules.apply("statfs", path)
        found = os.statvfs(self._directory)
        return {key: getattr(found, key) for key in FIGURES}

    # -- bytes -------------------------------------------------------------------------------------------------------

    def open(self, path: str, info: Any) -> int:
        self._rules.apply("open", path)
        info.fh = os.open(self._at(path), info.flags & ~os.O_DIRECT)
        return 0

    def create(self, path: str, mode: int, info: Any) -> int:
        self._rules.apply("create", path)
        with self._makes(path):
            info.fh = os.open(self._directory + path, info.flags & ~os.O_DIRECT | os.O_CREAT, mode)
        self._written[info.fh] = b""
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        self._rules.apply("read", path)
        return os.pread(info.fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, info: Any) -> int:
        direct = bool(info.flags & os.O_DIRECT)
        self._written[info.fh] = (self._written.get(info.fh, b"") + data)[: 1 << 16]
        limit = self._rules.apply("write", path, data=self._written[info.fh], direct=direct)
        return os.pwrite(info.fh, data[:limit], offset)

    def truncate(self, path: str, length: int, info: Any = None) -> None:
        self._rules.apply("truncate", path)
        os.truncate(self._at(path) if info is None else info.fh, length)

    def flush(self, _path: str, _info: Any) -> int:
        return 0

    def fsync(self, path: str, _datasync: int, info: Any) -> None:
        self._rules.apply("fsync", path, data=self._written.get(info.fh, b""))
        os.fsync(info.fh)

    def release(self, _path: str, info: Any) -> None:
        self._written.pop(info.fh, None)
        os.close(info.fh)


def main(directory: str, mountpoint: str, rules: str) -> None:
    fuse.FUSE(
        Passthrough(directory, Rules(Path(rules))),
        mountpoint,
        foreground=True,
        raw_fi=True,
        big_writes=True,
        use_ino=True,  # two links are one file
        hard_remove=True,
        attr_timeout=0,
        entry_timeout=0,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
