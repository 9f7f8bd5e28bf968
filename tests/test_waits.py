"""Deadlines and pauses, on a clock that the test turns."""

from __future__ import annotations

import signal
import time

from ckpt_engine import waits
from ckpt_engine.waits import SLICE_S, Deadline


def test_a_deadline_counts_down_and_never_below_zero() -> None:
    now = [10.0]
    deadline = Deadline(5, lambda: now[0])
    assert (deadline.remaining(), deadline.elapsed(), deadline.expired()) == (5, 0, False)
    assert deadline.slice() == SLICE_S and deadline.slice(0.2) == 0.2
    now[0] = 14.5
    assert deadline.slice() == 0.5
    now[0] = 15.0
    assert deadline.expired() and deadline.remaining() == 0 == deadline.slice()
    now[0] = 99.0
    assert deadline.remaining() == 0 and deadline.elapsed() == 89


def test_no_time_at_all_and_all_the_time_in_the_world() -> None:
    assert Deadline(0).expired()
    assert not Deadline(float("inf")).expired() and Deadline(float("inf")).slice() == SLICE_S


def test_until_looks_at_least_once_and_stops_at_the_deadline() -> None:
    looks = []
    assert waits.until(lambda: bool(looks.append(1)) or True, Deadline(0)) and len(looks) == 1
    begin = time.monotonic()
    assert not waits.until(lambda: False, Deadline(0.1), every_s=0.01)
    assert time.monotonic() - begin < 1


def test_a_signal_handler_runs_during_a_pause() -> None:
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    try:
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        waits.pause(0.3)
        assert seen and seen[0] - begin < 0.29 and time.monotonic() - begin >= 0.29
    finally:
        signal.signal(signal.SIGALRM, before)
