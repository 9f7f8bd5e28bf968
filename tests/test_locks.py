"""Locks that tell who lives: two processes, forks, replaced files, threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, until

from ckpt_engine import locks
from ckpt_engine.errors import ConfigError
from ckpt_engine.waits import Deadline


def holds(me: Any, path: str) -> None:
    lock = locks.lock_file(Path(path))
    me.say("locked", got=lock.try_lock())
    while True:
        verb = me.hear("do")["verb"]
        if verb == "fork":
            child = os.fork()
            if child == 0:
                threading.Event().wait(30)
                os._exit(0)
            me.say("forked", child=child)
        elif verb == "unlock":
            lock.unlock()
            me.say("unlocked")
        elif verb == "keep":
            me.say("kept", held=lock.keep())


def test_another_process_sees_the_holder_and_cannot_lock_until_it_dies(lab: Lab) -> None:
    path = lab.dir / "a.lock"
    rank = lab.rank(holds, str(path))
    assert rank.expect("locked")["got"]
    assert locks.holder(path) == rank.pid
    mine = locks.lock_file(path)
    assert not mine.try_lock()
    assert not mine.lock(Deadline(0.05))
    rank.kill()
    assert locks.holder(path) is None
    assert mine.try_lock()
    mine.unlock()
    path.unlink()


def test_a_forked_child_does_not_keep_its_dead_parent_alive_and_its_end_does_not_free_a_living_one(lab: Lab) -> None:
    path = lab.dir / "a.lock"
    rank = lab.rank(holds, str(path))
    rank.expect("locked")
    rank.tell("do", verb="fork")
    child = rank.expect("forked")["child"]
    rank.tell("do", verb="fork")
    second = rank.expect("forked")["child"]
    os.kill(child, 9)
    until(lambda: locks.holder(path) == rank.pid, 1)
    rank.kill()
    assert locks.holder(path) is None
    os.kill(second, 9)


def test_a_file_that_was_replaced_is_locked_anew_and_its_old_lock_means_nothing(lab: Lab) -> None:
    path = lab.dir / "a.lock"
    rank = lab.rank(holds, str(path))
    rank.expect("locked")
    path.unlink()
    assert locks.holder(path) is None
    rank.tell("do", verb="keep")
    assert rank.expect("kept")["held"] is True
    assert locks.holder(path) == rank.pid
    path.unlink()
    mine = locks.lock_file(path)
    assert mine.try_lock()
    rank.tell("do", verb="keep")
    assert rank.expect("kept")["held"] is False, "somebody else was faster"
    mine.unlock()
    rank.kill()


def test_a_process_never_probes_itself_and_never_locks_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    lock = locks.lock_file(path)
    assert locks.lock_file(path) is lock
    assert lock.try_lock() and not lock.try_lock()
    with pytest.raises(ConfigError, match="cannot probe itself"):
        locks.holder(path)
    lock.unlock()
    assert locks.holder(path) is None
    assert lock.try_lock()
    lock.unlock()


def test_a_lock_whose_directory_is_gone_can_be_locked_again_later(tmp_path: Path) -> None:
    lock = locks.lock_file(tmp_path / "run" / "a.lock")
    with pytest.raises(FileNotFoundError):
        lock.try_lock()
    assert locks.holder(lock.path) is None
    (tmp_path / "run").mkdir()
    assert lock.try_lock()
    lock.unlock()


def test_a_symbolic_link_in_place_of_a_lock_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        locks.lock_file(tmp_path / "a.lock").try_lock()
    assert not (tmp_path / "elsewhere").exists()


def test_threads_may_probe_at_once_and_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    inside, worst, errors = [0], [0], []

    def work() -> None:
        try:
            for _ in range(200):
                locks.holder(tmp_path / "b.lock")
                if locks.lock_file(path).lock(Deadline(5)):
                    inside[0] += 1
                    worst[0] = max(worst[0], inside[0])
                    inside[0] -= 1
                    locks.lock_file(path).unlock()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and worst[0] == 1


def test_a_probe_of_a_held_lock_by_its_own_process_does_not_drop_it(lab: Lab) -> None:
    path = lab.dir / "a.lock"
    lock = locks.lock_file(path)
    assert lock.try_lock()
    with pytest.raises(ConfigError):
        locks.holder(path)
    rank = lab.rank(holds, str(path))
    assert rank.expect("locked")["got"] is False
    rank.kill()
    lock.unlock()
