"""How many examples hypothesis tries: few in ``make test``, many under ``HYPOTHESIS_PROFILE=fuzz`` (``make fuzz``)."""

from __future__ import annotations

import os

from hypothesis import settings

USUAL = 100

settings.register_profile("usual", max_examples=USUAL, deadline=None)
settings.register_profile("fuzz", max_examples=20 * USUAL, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


def examples(usual: int) -> int:
    """``usual``, or as many times more as the profile asks for."""
    return max(1, usual * settings.default.max_examples // USUAL)
