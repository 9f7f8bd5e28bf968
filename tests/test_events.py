"""One span: a log line, a counter, and every hook."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from ckpt_engine import events
from ckpt_engine.events import Event, add_hook, counters, span, warn_once


def test_a_span_tells_its_start_and_its_end_to_hooks_counters_and_log(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    remove = add_hook(seen.append)
    before = counters["test-a.complete"]
    with caplog.at_level(logging.DEBUG, "ckpt_engine"), span("test-a", step=3) as facts:
        facts["bytes"] = 7
    remove()
    remove()
    with span("test-a"):
        pass
    assert [(event.name, event.phase) for event in seen] == [("test-a", "started"), ("test-a", "complete")]
    assert seen[1].facts == {"step": 3, "bytes": 7} and seen[1].seconds > 0 == seen[0].seconds
    assert counters["test-a.complete"] == before + 2
    assert "test-a complete step=3 bytes=7 seconds=" in caplog.text


def test_a_span_that_fails_says_why_and_raises_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    remove = add_hook(seen.append)
    with pytest.raises(KeyboardInterrupt), span("test-b"):
        raise KeyboardInterrupt("now")
    remove()
    assert seen[1].phase == "failed" and seen[1].facts["error"] == "KeyboardInterrupt: now"
    assert "test-b failed" in caplog.text


def test_a_hook_that_raises_breaks_the_span_it_was_called_from() -> None:
    def refuse(event: Event) -> None:
        raise OSError(5, event.phase)

    remove = add_hook(refuse)
    try:
        with pytest.raises(OSError, match="started"), span("test-c"):
            raise AssertionError("not reached")
    finally:
        remove()


def test_a_warning_comes_once_for_each_key(caplog: pytest.LogCaptureFixture) -> None:
    for key in ("test-k1", "test-k1", "test-k2"):
        warn_once(key, f"about {key}")
    assert [record.message for record in caplog.records] == ["about test-k1", "about test-k2"]
    assert events.log.name == "ckpt_engine"


def test_a_child_forked_while_another_thread_counts_an_event_is_not_stuck() -> None:
    with events._mutex:
        child = os.fork()
        if not child:
            signal.alarm(10)
            events.warn_once("in the child", "it can speak")
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
