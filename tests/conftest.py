"""Every test that asks for ``lab`` gets a world of its own, and fails if it leaves anything of it behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    it = Lab()
    yield it
    remains = it.close()
    if remains:
        pytest.fail("left behind:\n" + "\n".join(remains))
