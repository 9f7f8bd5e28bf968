"""What Lightning would have removed is noted until it is gone: a run that dies in between leaves it to the next one."""

from __future__ import annotations

import threading
from pathlib import Path

from ckpt_engine.integrations.lightning_later import Later


def test_a_removal_is_noted_until_it_is_done_and_not_only_until_it_begins(tmp_path: Path) -> None:
    later = Later(str(tmp_path / "to-remove.txt"), failed=lambda path: None)
    going, done, old = threading.Event(), threading.Event(), str(tmp_path / "old.ckpt")

    def remove() -> None:
        later.aside(lambda: going.set() or done.wait(20), removes=old)  # type: ignore[func-returns-value]

    later.add(remove, removes=old)
    later.run()
    assert going.wait(10) and later.noted() == [old], "a run that is killed now leaves it to the next one"
    later.run()
    assert later.noted() == [old] and not later.removes(old)
    done.set()
    later.end()
    assert later.noted() == []


def test_what_is_saved_anew_while_it_is_removed_is_not_noted_for_the_next_run(tmp_path: Path) -> None:
    later = Later(str(tmp_path / "to-remove.txt"), failed=lambda path: None)
    done, one, two = threading.Event(), str(tmp_path / "one.ckpt"), str(tmp_path / "two.ckpt")
    for path in (one, two):
        later.add(lambda path=path: later.aside(lambda: done.wait(20), removes=path), removes=path)  # type: ignore[misc]
    later.run()
    assert later.noted() == [one, two]
    later.saved(None, one)
    assert later.noted() == [two]
    done.set()
    later.end()
    assert later.noted() == []
