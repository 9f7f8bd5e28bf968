"""One span = started/complete/failed → one log line, one counter, and every hook.

A hook is called in the thread of the span, before the log line is written. It is how metrics leave the
process, and where tests stop, kill or delay it: ``CKPT_ENGINE_HOOK=package.module:function`` installs one
in ranks and saver alike (see ``config.hook_from_environment``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("ckpt_engine")

Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Event:
    """``phase`` is started, complete or failed; ``seconds`` is 0 at the start."""

    name: str
    phase: str
    facts: Facts
    seconds: float = 0.0


Hook = Callable[[Event], None]

_hooks: list[Hook] = []
_warned: set[str] = set()
_mutex = threading.Lock()
os.register_at_fork(after_in_child=_mutex._at_fork_reinit)  # type: ignore[attr-defined]  # its holder is not there
counters: Counter[str] = Counter()


def add_hook(hook: Hook) -> Callable[[], None]:
    """Call ``hook`` for every event from now on; the returned function removes it again.

    A hook that raises breaks the span it was called from, as any other failure in that place would.
    """
    _hooks.append(hook)

    def remove() -> None:
        if hook in _hooks:
            _hooks.remove(hook)

    return remove


def emit(event: Event) -> None:
    for hook in tuple(_hooks):
        hook(event)
    with _mutex:
        counters[f"{event.name}.{event.phase}"] += 1
    level = {"started": logging.DEBUG, "failed": logging.WARNING}.get(event.phase, logging.INFO)
    if log.isEnabledFor(level):
        facts = " ".join(f"{key}={value}" for key, value in event.facts.items() if value is not None)
        took = "" if event.phase == "started" else f" seconds={event.seconds:.4f}"
        log.log(level, "%s %s %s%s", event.name, event.phase, facts, took)


@contextmanager
def span(name: str, **facts: object) -> Iterator[dict[str, object]]:
    """Tell the world that ``name`` starts, and how it ended. The caller may add facts to the yielded dict."""
    known: dict[str, object] = dict(facts)
    emit(Event(name, "started", known))
    begin = time.monotonic()
    try:
        yield known
    except BaseException as error:
        known["error"] = f"{type(error).__name__}: {error}"
        emit(Event(name, "failed", known, time.monotonic() - begin))
        raise
    emit(Event(name, "complete", known, time.monotonic() - begin))


def warn_once(key: str, message: str) -> None:
    """Log a warning the first time ``key`` comes by in this process."""
    with _mutex:
        if key in _warned:
            return
        _warned.add(key)
    log.warning("%s", message)
