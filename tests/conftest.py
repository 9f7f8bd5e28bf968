"""Every test that asks for ``lab`` gets a world of its own, and fails if it leaves anything of it behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from harness import Lab

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a forked child cannot use the pool of its parent
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture
def lab() -> Iterator[Lab]:
    it = Lab()
    yield it
    remains = it.close()
    if remains:
        pytest.fail("left behind:\n" + "\n".join(remains))
