"""What ``strace`` saw, replayed into the model: the real disk, the native writer and real processes, held to it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .checks import require
from .fault_disk import FaultDisk

TRACED = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,fsync,fdatasync,syncfs,"
    "rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,copy_file_range"
)
MARK = "/ckpt-mark/"
"""A program says something to who replays it: it removes a directory of this name, which is not there."""
_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>.*)")
_DONE = re.compile(r"(?P<name>\w+)\((?P<args>.*)\) += (?P<result>-?\d+)(?P<rest>.*)", re.S)
_ARGUMENT = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"(?:\.\.\.)?|<[^>]*>|\{[^}]*\}|\[[^\]]*\]|[^,"<{\[])+)')


class Call(NamedTuple):
    name: str
    args: tuple[str, ...]
    result: int
    opened: str
    """The path of the descriptor that it returned."""


def missing() -> str:
    """Why nothing can be traced here; "" if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True, text=True)
    return "" if probe.returncode == 0 else f"strace may not trace here: {probe.stderr.strip()[:200]}"


def trace(program: list[str], log: Path, environment: Mapping[str, str], within_s: float = 120.0) -> list[Call]:
    """Run ``program`` and whatever it starts to their ends; their calls in the order in which they returned."""
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(1 << 22), "-o", str(log), "-e", f"trace={TRACED}"]
    done = subprocess.run(
        [*strace, sys.executable, *program],
        env=dict(environment), cwd=log.parent, capture_output=True, text=True, timeout=within_s,
    )  # fmt: skip
    require(done.returncode == 0, "the traced program ends well", done.stdout + done.stderr)
    return list(calls(log.read_text()))


def calls(text: str) -> Iterator[Call]:
    begun: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match["call"].startswith(("+++", "---")):
            continue
        pid, call = match["pid"], match["call"]
        if call.endswith("<unfinished ...>"):
            begun[pid] = call.removesuffix("<unfinished ...>").rstrip()
            continue
        if call.startswith("<... "):
            call = begun.pop(pid, "") + call.partition(" resumed>")[2]
        done = _DONE.fullmatch(call)
        if done is not None:
            opened = re.search(r"<([^>]*)>", done["rest"])
            args = tuple(part.strip() for part in _ARGUMENT.findall(done["args"]))
            yield Call(done["name"], args, int(done["result"]), _text(opened[1]).decode() if opened else "")


def _text(quoted: str) -> bytes:
    """The bytes of what strace printed with -xx."""
    require(not quoted.endswith("..."), "strace printed all of it", quoted[:80])
    inner = quoted.strip('"')
    return bytes.fromhex(inner.replace("\\x", "")) if inner.startswith("\\x") else inner.encode()


def _path(at: str, name: str) -> str:
    """The absolute path that a call means by a directory descriptor and a name."""
    inside = re.search(r"<([^>]*)>", at)
    return os.path.normpath(os.path.join(_text(inside[1]).decode() if inside else "/", _text(name).decode()))


class Replay:
    """Does to a ``FaultDisk`` what the calls did to a directory of the real one; what it does not know it refuses."""

    def __init__(self, disk: FaultDisk, real_root: str, root: str) -> None:
        self.disk, self.real_root, self.root = disk, real_root, root
        self.known = 0

    def do(self, call: Call) -> str | None:
        """Replays one call; what the program marked with it, if it is a mark."""
        name, args = call.name, call.args
        if name == "rmdir" and _text(args[0]).decode().startswith(MARK):
            return _text(args[0]).decode().removeprefix(MARK)
        if call.result < 0:
            return None
        paths = [self._inside(path) for path in self._paths(name, args)]
        if not any(paths):
            return None
        if name in ("open", "openat", "creat"):
            self._open(paths[0] or "", args, call)
            return None
        self.known += 1
        first, second = (paths[0] or "", paths[-1] or "")
        require(all(paths), "no call reaches from the root to elsewhere", call)
        if name in ("rename", "renameat", "renameat2"):
            self.disk.rename(first, second)
        elif name in ("link", "linkat"):
            self.disk.link(first, second)
        elif name in ("mkdir", "mkdirat"):
            self.disk.make_dir(first)
        elif name == "rmdir" or (name == "unlinkat" and "AT_REMOVEDIR" in args[-1]):
            self.disk.remove_dir(first)
        elif name in ("unlink", "unlinkat"):
            self.disk.unlink(first)
        elif name == "pwrite64":
            self.disk.write(self._file(first), _text(args[1])[: call.result], int(args[3]), first)
        elif name == "ftruncate":
            self.disk.truncate(self._file(first), int(args[1]), first)
        elif name == "fallocate":
            require(args[1] == "0", "space is reserved from the start of a file, and makes it as long", call)
            self.disk.truncate(self._file(first), int(args[2]) + int(args[3]), first)
        elif name in ("fsync", "fdatasync"):
            number = self.disk.find(first)
            self.disk.sync_dir(first) if number in self.disk.dirs else self.disk.fsync(self._file(first), first)
        else:
            require(False, "the replay knows every call that changes the root", call)
        return None

    def _open(self, path: str, args: tuple[str, ...], call: Call) -> None:
        flags = args[2] if call.name == "openat" else args[1] if call.name == "open" else "O_CREAT"
        if "O_CREAT" in flags and self.disk.find(path) is None:
            self.known += 1
            self.disk.create(path)
        require("O_TRUNC" not in flags, "nothing is truncated in place", call)

    def _file(self, path: str) -> int:
        number = self.disk.find(path)
        require(number in self.disk.files, "a call on a file that the model has", path)
        return number or 0

    def _inside(self, path: str) -> str | None:
        if path == self.real_root or path.startswith(f"{self.real_root}/"):
            return self.root + path[len(self.real_root) :]
        return None

    @staticmethod
    def _paths(name: str, args: tuple[str, ...]) -> list[str]:
        if name in ("renameat", "renameat2", "linkat"):
            return [_path(args[0], args[1]), _path(args[2], args[3])]
        if name in ("openat", "unlinkat", "mkdirat"):
            return [_path(args[0], args[1])]
        if name in ("rename", "link"):
            return [_path("", args[0]), _path("", args[1])]
        if name == "symlink":
            return [_path("", args[1])]
        if name == "symlinkat":
            return [_path(args[1], args[2])]
        if args[0].startswith('"'):
            return [_path("", args[0])]
        return [_path(args[0], '""').removesuffix(" (deleted)")]


def require_same_tree(disk: FaultDisk, real_root: str, root: str) -> None:
    """The model ends with the names, the bytes and the links of the real directory."""
    modelled = {path[len(root) :]: number for path, number in disk.walk() if path.startswith(f"{root}/")}
    real: dict[str, int] = {}
    for folder, folders, files in os.walk(real_root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            real[path[len(real_root) :]] = -1 if name in folders else os.stat(path).st_ino
    require(set(modelled) == set(real), "model and disk end with the same names", set(modelled) ^ set(real))
    for path, number in modelled.items():
        if number != -1:
            same = Path(real_root + path).read_bytes() == disk.files[number].data
            require(same, "model and disk end with the same bytes", path)
    links = {(modelled[path], real[path]) for path in modelled if modelled[path] != -1}
    require(len(links) == len({one for one, _ in links}) == len({two for _, two in links}), "the same hard links")
