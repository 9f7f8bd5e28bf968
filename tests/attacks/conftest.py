"""A root for every test to spoil, and an alarm: whatever lies in it, nothing waits for it."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks.hostile import Root


@pytest.fixture(scope="session")
def pristine() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckpt-attacks-", dir="/dev/shm"))  # where an fsync costs nothing
    Root.make(folder / "pristine")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def root(pristine: Path) -> Iterator[Root]:
    folder = pristine / "one"
    shutil.copytree(pristine / "pristine", folder, symlinks=True)
    yield Root(folder)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    def rings(*_: object) -> None:
        raise TimeoutError("something waited for what lay in its way")

    before = signal.signal(signal.SIGALRM, rings)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
