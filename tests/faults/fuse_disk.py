"""Checkpoint roots on real file systems that refuse on order: behind FUSE (see ``fuse_passthrough``) or on a mount."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, until

MNT_DETACH = 2
FULL = (errno.ENOSPC, errno.EDQUOT)
TIRED = {"retry_s": 0.15}
"""Savers that give up soon."""
PASSTHROUGH = Path(__file__).with_name("fuse_passthrough.py")


def why_no_fuse() -> str:
    """What is missing here for a file system of our own; "" if nothing is."""
    if os.geteuid() != 0:
        return "needs root to mount"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    if importlib.util.find_spec("fuse") is None:
        return "no fusepy (see requirements-dev.txt)"
    return "" if find_library("fuse") else "no libfuse 2 (Debian: libfuse2)"


class Disk:
    """A file system that obeys rules."""

    def __init__(self, lab: Lab) -> None:
        home = lab.dir / "disk"
        self.mount, self._rules, self._hits = home / "mnt", home / "rules", home / "hits"
        self.files = home / "files"  # what other clients of it see
        for folder in (self.mount, self.files):
            folder.mkdir(parents=True, exist_ok=True)
        self._log = home / "log"
        self._process = self._serve()
        until(lambda: os.path.ismount(self.mount) or self._process.poll() is not None, 20)
        if self._process.poll() is not None:
            pytest.skip(f"cannot mount: {self._log.read_text()[-300:]}")

    def _serve(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PASSTHROUGH), str(self.files), str(self.mount), str(self._rules)]
        with self._log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def root(self) -> str:
        """A checkpoint root on it; a directory of its own, so that it can be removed."""
        return str(self.mount / "checkpoints")

    def obey(self, *rules: dict[str, Any]) -> None:
        """From now on these rules count, and no others."""
        new = self._rules.with_suffix(".new")
        new.write_text(json.dumps(rules))
        os.replace(new, self._rules)

    def hits(self) -> list[dict[str, Any]]:
        """What rules hit since they were last forgotten."""
        return [json.loads(line) for line in self._hits.read_text().splitlines()] if self._hits.exists() else []

    def forget(self) -> None:
        self._hits.unlink(missing_ok=True)

    def break_down(self) -> None:
        """Its server dies: every call that waits, and every later one, fails with ENOTCONN or ECONNABORTED."""
        self._process.kill()
        self._process.wait(10)

    def mount_again(self) -> None:
        """After ``break_down``: the same files, in the same place."""
        unmount(self.mount)
        self._process = self._serve()
        until(lambda: os.path.ismount(self.mount), 20)

    def close(self) -> None:
        """Let go all that waits, and unmount."""
        self.obey()
        unmount(self.mount)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._process.kill()
        self._process.wait(10)


def unmount(path: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(path), MNT_DETACH)


def until_savers_left(lab: Lab) -> None:
    """Savers that the test has no more use for go by themselves; what they stand on must stay until then."""
    with contextlib.suppress(AssertionError):
        until(lambda: not lab.savers(), 10)


@contextlib.contextmanager
def mounted(lab: Lab, *arguments: str, name: str = "small") -> Iterator[Path]:
    """A real file system for the time of a test: ``mount ARGUMENTS DIRECTORY``. Skips where that is refused."""
    place = lab.dir / name
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield place
        until_savers_left(lab)
    finally:
        unmount(place)


# -- what tests ask --------------------------------------------------------------------------------------------------


def settled(root: str, tag: str) -> bool:
    """Every file has its plain name, and ``latest`` says so."""
    names = ["MANIFEST.json", "rank0.pt", "rank1.pt", "sub/model.pt"]
    told = ""
    with contextlib.suppress(FileNotFoundError):  # not yet, or replaced right now
        told = Path(root, "latest").read_text()
    return told == tag and all(os.path.exists(f"{root}/{tag}/{name}") for name in names)


def refused(answers: list[dict[str, Any]], number: int) -> None:
    """Every rank was told, with class, number and path."""
    for answer in answers:
        told = (answer.get("error"), answer.get("errno")) == (
            "StorageFull" if number in FULL else "StorageError",
            number,
        )
        if not (told and "/checkpoints" in answer["path"] and answer["path"] in answer["text"]):
            raise AssertionError((number, answer))  # no assert: this is no test module, see python -O
