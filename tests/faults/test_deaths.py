"""Ranks and savers that die at every instant: nothing that was complete is lost, and what was begun is done again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from faults.hooks import faults, trace
from faults.programs import all_do, do, leave, obeys, ready
from harness import Lab, Process, alive, until


def start(lab: Lab, fault: str = "", options: dict[str, Any] | None = None, **more: str) -> Any:
    return ready([lab.rank(obeys, options, env=faults(fault, **more))])[0]


def last_step(rank: Process) -> int:
    rank.drain()
    return max((facts["step"] for facts in rank._told), default=1)


def fills(me: Any, count: int) -> None:
    """Save for ever; the test kills this process at some instant."""
    engine = me.engine()
    for step in range(1, 10_000):
        state = {f"rank{me.rank}.pt": {"w": me.coded(step, count)}}
        if step % 5 == 0:
            engine.save_to_storage(step, state)
        else:
            engine.save_to_memory(step, state)
        me.say("saved", step=step, at=time.monotonic())


def test_a_rank_killed_at_any_instant_of_its_saves_restarts_from_a_whole_and_newest_snapshot(lab: Lab) -> None:
    dice = random.Random(7)
    count = 400_000
    for _ in range(8):
        rank = lab.rank(fills, count)
        rank.expect("saved")
        time.sleep(dice.random() * 0.15)  # the instant is random on purpose
        rank.kill()
        steps = last_step(rank)
        after = start(lab)
        found = do(after, "restore", count=count)
        assert found["error"] == "" and found["whole"], found
        assert found["step"] in (steps, steps + 1), (found, steps)
        after.kill()
    lab.clear()


@pytest.mark.parametrize("fault", ["persist:complete:1:kill", "receipt:started:1:kill", "retention:complete:1:kill"])
def test_a_saver_killed_while_it_works_is_replaced_and_its_checkpoint_is_committed(lab: Lab, fault: str) -> None:
    rank = start(lab, fault, once=str(lab.dir / "once"))
    before = lab.saver()
    do(rank, "storage", step=1)
    end = do(rank, "result", step=1)
    assert end["error"] == "" and end["seconds"] < 5, end
    assert do(rank, "storage", step=2)["error"] == ""
    assert do(rank, "result", step=2)["error"] == ""
    until(lambda: lab.saver() not in (None, before), 5)
    leave([rank])
    until(lambda: not lab.left(), 5)
    again = start(lab)
    found = do(again, "restore")
    assert (found["step"], found["source"], found["whole"]) == (2, "storage", True)
    leave([again])


@pytest.mark.parametrize("tag", ["best", ""], ids=["its tag is taken", "retention removes it"])
def test_what_a_saver_published_and_died_before_it_said_so_is_told_by_the_next_one(lab: Lab, tag: str) -> None:
    rank = start(lab, "publish:complete:1:kill", once=str(lab.dir / "once"), options={"keep_last": 1})
    for step in (1, 2, 3):
        assert do(rank, "storage", step=step, tag=tag or f"tag{step}")["error"] == ""
    for step in (3, 2, 1):  # the first is asked when nothing on disk tells of it
        end = do(rank, "result", step=step, timeout_s=10)
        assert end["error"] == "" and end["seconds"] < 5, end
    leave([rank])


def test_an_idle_saver_that_is_killed_loses_nothing(lab: Lab) -> None:
    rank = start(lab)
    do(rank, "memory", step=1)
    saver = lab.saver()
    assert saver
    os.kill(saver, signal.SIGKILL)
    until(lambda: not alive(saver), 5)
    assert do(rank, "memory", step=2)["error"] == ""
    assert do(rank, "storage", step=3)["error"] == ""
    assert do(rank, "result", step=3)["seconds"] < 5
    leave([rank])


@pytest.mark.parametrize("fault", ["persist:started:1:stop", "receipt:started:1:stop", "publish:complete:1:stop"])
def test_both_killed_the_restart_takes_the_newest_snapshot(lab: Lab, fault: str) -> None:
    trail = lab.dir / "trace"
    rank = start(lab, fault, once=str(lab.dir / "once"), trace=str(trail))
    do(rank, "storage", step=1)
    span, phase, *_ = fault.split(":")
    until(lambda: any((e["span"], e["phase"]) == (span, phase) for e in trace(trail)), 10, fault)
    saver = lab.saver()
    assert saver
    assert do(rank, "memory", step=2)["error"] == ""
    rank.kill()
    os.kill(saver, signal.SIGKILL)
    until(lambda: not alive(saver), 5)
    again = start(lab)
    found = do(again, "restore")
    assert (found["step"], found["source"], found["whole"]) == (2, "memory", True)
    assert do(again, "storage", step=3)["error"] == ""
    assert do(again, "result", step=3)["error"] == ""
    leave([again])


def test_a_dead_job_leaves_its_newest_snapshot_as_a_checkpoint_and_nothing_in_memory(lab: Lab) -> None:
    ranks = ready(lab.ranks(obeys, world=2))
    all_do(ranks, "memory", step=1)
    all_do(ranks, "memory", step=2)
    for rank in ranks:
        rank.kill()
    until(lambda: not lab.savers() and not lab.left(), 15, lab.saver_log())
    again = ready(lab.ranks(obeys, world=2))
    for found in all_do(again, "restore"):
        assert (found["step"], found["source"], found["whole"]) == (2, "storage", True)
    leave(again)


def test_a_checkpoint_of_another_root_copied_in_makes_no_snapshot_of_the_dead_superseded(lab: Lab) -> None:
    root, other = lab.root, f"{lab.root}-other"
    lab.root = other
    for generation in (1, 2, 3):
        rank = start(lab)
        do(rank, "restore")
        do(rank, "storage", step=generation)
        assert do(rank, "result", step=generation)["error"] == ""
        leave([rank])
    until(lambda: not lab.left(), 10)
    lab.root = root
    rank = start(lab, options={"keep_last": 1})
    for step in (10, 11, 12):
        do(rank, "storage", step=step)
        assert do(rank, "result", step=step)["error"] == ""
        if step == 10:
            shutil.copytree(f"{other}/global_step3", f"{root}/global_step3")
    kept = {"global_step3", "global_step12"}  # the copy is nobody's to remove
    until(lambda: {name for name in os.listdir(root) if name.startswith("global_step")} == kept, 5)
    do(rank, "memory", step=13)
    rank.kill()
    until(lambda: not lab.savers() and not lab.left(), 15, lab.saver_log())
    again = start(lab)
    found = do(again, "restore")
    assert (found["step"], found["source"], found["whole"]) == (13, "storage", True)
    leave([again])


def test_a_rank_that_dies_before_its_part_fails_the_attempt_of_the_others_within_seconds(lab: Lab) -> None:
    one, other = ready(lab.ranks(obeys, world=2))
    all_do([one, other], "storage", step=1)
    assert [end["error"] for end in all_do([one, other], "result", step=1)] == ["", ""]
    do(one, "storage", step=2)
    other.kill()
    end = do(one, "result", step=2, timeout_s=20)
    assert end["error"] in ("AttemptFailed", "CommitTimeout"), end
    assert end["seconds"] < 5
    one.kill()
    again = ready(lab.ranks(obeys, world=2))
    for found in all_do(again, "restore"):
        assert found["step"] == 1 and found["whole"]
    leave(again)


def test_a_durable_attempt_whose_publication_failed_is_published_when_its_ranks_are_dead(lab: Lab) -> None:
    rank = start(lab, "publish:started:1:raise=1", once=str(lab.dir / "once"), options={"saver": {"retry_s": 0.0}})
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == "StorageError"
    rank.kill()
    until(lambda: not lab.savers() and not lab.left(), 15, lab.saver_log())
    again = start(lab)
    assert do(again, "restore")["step"] == 1
    leave([again])


def test_a_publish_that_died_after_its_manifest_is_finished_by_the_next_saver(lab: Lab) -> None:
    rank = start(lab)
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == ""
    leave([rank])
    until(lambda: not lab.left(), 5)
    folder = Path(lab.root, "global_step1")
    (attempt,) = [path for path in folder.iterdir() if path.name.startswith(".attempt-")]
    for path in folder.glob("*.pt"):  # as it stood just after the manifest
        path.rename(attempt / path.name)
    Path(lab.root, "latest").unlink()
    again = start(lab)
    until(lambda: Path(lab.root, "latest").exists() and list(folder.glob("*.pt")), 5)
    leave([again])
