"""The trainer's end: joining while others leave, two engines in a process, a failed start, a fork at a bad moment."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faults.programs import do, leave, obeys, ready
from harness import Lab, alive, until


def fails_then_starts(me: Any) -> None:
    from ckpt_engine.errors import SaverUnavailable

    python, sys.executable = sys.executable, "/bin/false"
    for _ in range(3):
        try:
            me.engine()
        except SaverUnavailable:
            me.say("unavailable")
    sys.executable = python
    with me.engine() as engine:
        me.say("saved", step=engine.save_to_memory(1, {}).step)


def test_a_start_that_failed_holds_nothing_and_can_be_tried_again(lab: Lab) -> None:
    rank = lab.rank(fails_then_starts)
    for _ in range(3):
        rank.expect("unavailable", 5)
    assert rank.expect("saved")["step"] == 1
    rank.end()


def two_engines(me: Any) -> None:
    from ckpt_engine.errors import ConfigError

    one = me.engine(name="one")
    other = me.engine(name="other", job="another")
    try:
        me.engine(name="one")
    except ConfigError as error:
        me.say("refused", text=str(error))
    for step in range(1, 6):
        one.save_to_memory(step, {"a": {"w": me.coded(step)}})
        other.save_to_memory(step, {"a": {"w": me.coded(step + 100)}})
    found = [int(engine.restore().state["a"]["w"][0]) for engine in (one, other)]
    me.say("restored", found=found)
    one.close()
    other.close()
    one.close()


def test_two_engines_of_one_process_never_meet_and_a_third_of_the_same_name_is_refused(lab: Lab) -> None:
    rank = lab.rank(two_engines)
    assert "already" in rank.expect("refused")["text"]
    assert rank.expect("restored")["found"] == [5_000_000, 105_000_000]
    rank.end()


def comes_and_goes(me: Any, rounds: int) -> None:
    for number in range(rounds):
        with me.engine() as engine:
            engine.save_to_storage(number, {"a": {"w": me.coded(number)}})
    me.say("done")


def test_a_rank_that_joins_while_the_saver_retires_finds_one_each_time(lab: Lab) -> None:
    rank = lab.rank(comes_and_goes, 20)
    rank.expect("done", 40)
    rank.end()


def starts(me: Any) -> None:
    me.say("begin")
    engine = me.engine()
    engine.save_to_memory(1, {"a": {"w": me.coded(1)}})
    me.say("up")
    me.hear("end")


def test_a_trainer_killed_at_any_point_of_its_start_does_not_hinder_the_next(lab: Lab) -> None:
    dice = random.Random(3)
    for _ in range(10):
        rank = lab.rank(starts)
        rank.expect("begin")
        time.sleep(dice.random() * 0.4)  # the instant is random on purpose
        rank.kill()
    (rank,) = ready([lab.rank(obeys)])
    do(rank, "storage", step=2)
    assert do(rank, "result", step=2)["error"] == ""
    until(lambda: len(lab.savers()) == 1, 10)  # one that a dead rank had just started finds the lock taken
    leave([rank])


def forks_while_pages_are_touched(me: Any) -> None:
    """A worker that is forked while a thread of the engine runs, and drops what it inherited."""
    engine = me.engine()
    engine.save_to_memory(1, {"a": {"w": me.coded(1, 20_000_000)}})
    child = os.fork()
    if child == 0:
        del engine
        gc.collect()
        os._exit(0)
    me.say("forked", child=child)
    end = time.monotonic() + 10
    while time.monotonic() < end and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.01)
    me.say("ended", soon=time.monotonic() < end)
    engine.close()


def test_a_worker_forked_at_a_bad_moment_ends_by_itself(lab: Lab) -> None:
    rank = lab.rank(forks_while_pages_are_touched)
    child = rank.expect("forked")["child"]
    said = rank.expect("ended")
    if alive(child):
        os.kill(child, signal.SIGKILL)
    assert said["soon"]
    rank.end()


def test_a_saver_killed_again_and_again_between_saves_is_there_again_each_time(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    for step in range(1, 11):
        saver = lab.saver()
        assert do(rank, "memory", step=step)["error"] == ""
        if saver:
            os.kill(saver, signal.SIGKILL)
        do(rank, "storage", step=step)
        assert do(rank, "result", step=step)["error"] == ""
    until(lambda: len(lab.savers()) == 1, 5)
    leave([rank])


@pytest.mark.parametrize("what", ["file", "link"])
def test_something_else_in_place_of_the_run_directory_is_refused_by_name(lab: Lab, what: str) -> None:
    run_dir = lab.names().run_dir
    if what == "file":
        run_dir.touch()
    else:
        run_dir.symlink_to(lab.dir)
    rank = lab.rank(obeys)
    said = rank.expect("raised")
    assert said["type"] == "ConfigError" and str(run_dir) in said["text"]
    rank.join()
    assert Path(lab.dir).is_dir()
    lab.clear()
