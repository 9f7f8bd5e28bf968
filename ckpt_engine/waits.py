"""Every wait has a deadline and is made of short slices; this is where the package waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE_S = 1.0
"""No wait is longer before it looks at the state of the world again (invariant 3)."""


class Deadline:
    """``seconds`` from now on the monotonic clock."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = now()
        self._end = self._start + seconds

    def remaining(self) -> float:
        return max(0.0, self._end - self._now())

    def elapsed(self) -> float:
        return self._now() - self._start

    def expired(self) -> bool:
        return self._now() >= self._end

    def slice(self, at_most_s: float = SLICE_S) -> float:
        """Seconds to wait before the next look."""
        return min(at_most_s, self.remaining())


def pause(seconds: float) -> None:
    """Do nothing for ``seconds`` in this thread; signals are still handled."""
    threading.Event().wait(seconds)


def until(condition: Callable[[], bool], deadline: Deadline, every_s: float = 0.02) -> bool:
    """Look until ``condition()`` is true (→ True) or the deadline passes (→ False). Looks at least once."""
    while not condition():
        if deadline.expired():
            return False
        pause(deadline.slice(every_s))
    return True
