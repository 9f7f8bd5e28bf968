"""Ranks on one node: save and restore through real processes, a saver and gloo."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Lab
from team import Team, committed, whole


def test_two_ranks_save_and_restore_from_memory_and_storage(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    assert team.restore()["source"] is None
    team.commit(0)
    assert team.restore()["step"] == 0
    team.save(5)
    found = team.restore()
    assert (found["step"], found["source"]) == (5, "memory")
    team.ok("save", step=6, storage=True)
    team.commit(7)
    assert [a["step"] for a in team.ok("result", step=6)] == [6, 6]
    team.leave()
    assert [step for step, _ in committed(lab.root)] == [7, 6, 0] and whole(lab.root)
    team = Team(lab, "aa").open()
    found = team.restore(files=["sub/model.pt"])
    assert (found["step"], found["source"]) == (7, "storage")
    assert team.restore(step=0)["step"] == 0
    team.leave()


def test_a_step_that_is_no_whole_number_is_refused_and_shifts_nothing_on_the_other_ranks(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    for step in (-1, True, 1.0, "1", None):
        assert team.one(1, "save", step=step, storage=True, empty=True)["error"] == "ConfigError"
    for tag in ("a/b", "..", "latest", "", 7):
        answer = team.one(0, "save", step=1, storage=False, tag=tag)
        assert answer.get("error") == ("ConfigError" if tag else None), (tag, answer)
    # Both ranks have entered five saves, one of them in vain: from here on they agree again.
    team.commit(2)
    assert team.restore()["step"] == 2
    team.leave()


def test_tags_name_directories_and_latest_follows_the_newest_attempt(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    team.commit(30, tag="thirty")
    team.commit(20, tag="été 20")
    assert committed(lab.root) == [(20, "été 20"), (30, "thirty")]
    with open(f"{lab.root}/latest", encoding="utf-8") as file:
        assert file.read() == "été 20"
    found = team.restore()
    assert (found["step"], found["source"]) == (20, "memory")
    team.leave()


def solitary(me: Any, how: dict[str, Any]) -> None:
    with me.engine(**how) as engine:
        engine.save_to_storage(3, {"w.pt": {"w": me.coded(3)}}).result()
        me.say("saved", step=engine.restore().step)


def test_without_a_process_group_one_rank_of_a_world_of_one_saves(lab: Lab) -> None:
    for how in ({}, {"rank": 0, "world_size": 1}):
        rank = lab.rank(solitary, how)
        assert rank.expect("saved")["step"] == 3
        rank.end()


@pytest.mark.parametrize(
    "how",
    [
        {"rank": 0},
        {"world_size": 1},
        {"rank": 1, "world_size": 1},
        {"rank": -1, "world_size": 1},
        {"rank": True, "world_size": 1},
        {"rank": 0, "world_size": 1.0},
        {"rank": 0, "world_size": 0},
        {"rank": 0, "world_size": 2},
    ],
)
def test_a_rank_that_cannot_be_right_is_refused_at_start(lab: Lab, how: dict[str, Any]) -> None:
    rank = lab.rank(solitary, how)
    assert rank.expect("raised")["type"] == "ConfigError"
    rank.join()


def test_a_rank_that_torchrun_started_is_not_taken_for_a_world_of_one(lab: Lab) -> None:
    rank = lab.rank(solitary, {}, env={"WORLD_SIZE": "4", "RANK": "2"})
    raised = rank.expect("raised")
    assert raised["type"] == "ConfigError" and "init_process_group" in raised["text"]
    rank.join()


def test_rank_0_alone_can_have_an_engine_in_a_process_group(lab: Lab) -> None:
    team = Team(lab, "aa", rank=0, world_size=1)
    team.ok("call", code="me.meet()")
    assert team.one(0, "open") == {"event": "done"}
    assert team.one(0, "save", step=4, storage=True)["step"] == 4
    assert team.one(0, "result", step=4)["step"] == 4
    assert team.one(0, "restore")["step"] == 4
    assert team.one(0, "close") == {"event": "done"}
    team.end()


def test_four_ranks_restore_what_each_of_them_saved_rng_included(lab: Lab) -> None:
    team = Team(lab, "aaaa").open()
    team.save(10)
    team.commit(11)
    assert team.restore()["step"] == 11
    team.kill()
    team = Team(lab, "aaaa").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (11, "memory")
    team.leave()


def test_ranks_that_use_one_file_name_are_told_so_and_never_get_each_others_bytes(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    code = """
handle = engine.save_to_storage(1, {"same.pt": {"w": me.coded(1)}})
try:
    handle.result()
except Exception as error:
    answer = {"kind": type(error).__name__, "told": str(error)}
own = engine.restore().state["same.pt"]["w"]
answer["mine"] = bool((own == me.coded(1)).all())
"""
    for answer in team.ok("call", code=code):
        assert answer["kind"] == "AttemptFailed" and "same.pt" in answer["told"] and answer["mine"], answer
    team.commit(2)
    team.leave()


def test_a_wrong_step_on_one_rank_does_not_leave_the_others_in_restore(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    team.commit(1)
    team.tell([0], "restore", step=1)
    team.tell([1], "restore", step=-1)
    answers = [team.hear(rank) for rank in (0, 1)]
    assert [answer["error"] for answer in answers] == ["RestoreError", "ConfigError"], answers
    team.tell([0], "restore", step=1)
    team.tell([1], "restore")
    answers = [team.hear(rank) for rank in (0, 1)]
    assert [answer["error"] for answer in answers] == ["ConfigError", "ConfigError"], answers
    assert team.restore(step=1)["step"] == 1
    team.leave()


def test_a_rank_that_cannot_load_does_not_leave_the_others_in_restore(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    team.commit(1)
    code = """
import torch
from ckpt_engine import plain
real = plain._load
def broken(source, name, *rest):
    if me.rank == 1:
        raise ZeroDivisionError("no such class here")
    return real(source, name, *rest)
plain._load = broken
try:
    engine.restore()
except Exception as error:
    answer = {"kind": type(error).__name__, "told": str(error)}
plain._load = real
"""
    zero, one = team.ok("call", code=code)
    assert one["kind"] == "ZeroDivisionError" and zero["kind"] == "RestoreError" and "rank 1" in zero["told"]
    assert team.restore()["step"] == 1
    team.leave()


def test_restored_state_is_private_and_outlives_the_engine(lab: Lab) -> None:
    team = Team(lab, "aa").open()
    team.save(1)
    team.restore()
    for step in (2, 3, 4):  # both slots are filled again
        team.save(step)
        team.ok("check")
    team.ok("close")
    team.ok("check")
    team.end()
