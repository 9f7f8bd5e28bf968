"""What a caller sees: skipping, errors told once, deadlines, the end in all its forms."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from harness import Lab, until
from team import Team, committed, faults, hits, kill_saver, slots, until_committed

HELD = {"who": "saver", "verb": "write_new", "direct": True, "hold": True}
REFUSED = """
try:
    engine.save_to_storage(2, {"bad.pt": {"f": lambda: 0}})
except Exception as error:
    answer = {"kind": type(error).__name__}
"""
BROKEN = {"who": "saver", "verb": "write_new", "direct": True, "errno": errno.EACCES}


def test_when_busy_skip_skips_on_all_ranks_or_on_none(lab: Lab) -> None:
    team = Team(lab, "ab", when_busy="skip").open()
    team.commit(1)
    faults(lab, HELD | {"node": "b"})
    for step in (2, 3):
        team.ok("save", step=step, storage=True)
    answers = team.ok("save", step=4, storage=True)
    assert [answer["skipped"] for answer in answers] == [True, True]
    for answer in team.all("result", step=4):
        assert answer["error"] == "CkptError" and "skipped" in answer["text"]
    faults(lab)
    team.ok("result", step=3)
    answers = team.commit(5)
    assert team.restore()["step"] == 5 and [step for step, _ in committed(lab.root)] == [5, 3, 2, 1]
    team.leave()


def test_when_busy_wait_waits_for_a_buffer_and_gives_up_after_wait_s(lab: Lab) -> None:
    team = Team(lab, "aa", wait_s=1.0).open()
    faults(lab, HELD)
    for step in (1, 2):
        team.ok("save", step=step, storage=True)
    for answer in team.all("save", step=3, storage=False):
        assert answer["error"] == "BufferBusy" and "global_step1" in answer["attempt"], answer
    faults(lab)
    for step in (1, 2):
        team.ok("result", step=step)
    team.commit(4)
    team.leave()


def test_on_error_raise_raises_at_the_next_save_on_every_rank_and_once(lab: Lab) -> None:
    team = Team(lab, "ab", on_error="raise").open()
    faults(lab, BROKEN | {"node": "b"})
    team.ok("save", step=1, storage=True)
    until(lambda: all(answer["done"] for answer in team.all("done", step=1)), 10)
    faults(lab)
    for answer in team.all("save", step=2, storage=True):
        assert answer["error"] == "StorageError" and "step 1" in answer["text"], answer
    assert [answer["steps"] for answer in team.ok("wait")] == [[2], [2]]
    team.commit(3)
    team.leave()


def test_on_error_warn_tells_in_the_log_and_goes_on(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    faults(lab, BROKEN | {"node": "b"})
    team.ok("save", step=1, storage=True)
    until(lambda: all(answer["done"] for answer in team.all("done", step=1)), 10)
    faults(lab)
    team.commit(2)
    for process in team.ranks:
        assert "the save of step 1 did not become a checkpoint" in process.log.read_text()
    team.leave()


def test_wait_and_close_raise_what_nobody_was_told_of_and_only_that(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    faults(lab, BROKEN | {"node": "a"})
    team.ok("save", step=1, storage=True)
    assert all(answer["error"] == "StorageError" for answer in team.all("wait"))
    assert [answer["steps"] for answer in team.ok("wait")] == [[], []]
    team.ok("save", step=2, storage=True)
    assert all(answer["error"] == "StorageError" for answer in team.all("result", step=2))
    team.ok("save", step=3, storage=True)
    assert all(answer["error"] == "StorageError" and "step 3" in answer["text"] for answer in team.all("close"))
    team.ok("close")
    assert all(answer["error"] == "ConfigError" for answer in team.all("save", step=4, storage=False))
    team.end()
    faults(lab)
    until_committed(lab.root, 3)  # what failed is tried again when the ranks are gone


def test_close_in_mid_flight_waits_for_the_commit(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    faults(lab, HELD)
    team.ok("save", step=1, storage=True)
    team.tell([0, 1], "close")
    assert team.ranks[0].silent(0.5)
    faults(lab)
    assert [team.hear(rank) for rank in (0, 1)] == [{"event": "done"}] * 2
    assert committed(lab.root) == [(1, "global_step1")]
    team.end()


def test_a_result_can_be_asked_for_with_a_deadline_again_and_again(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    faults(lab, HELD)
    team.ok("save", step=1, storage=True)
    for timeout_s in (0, 0.1):
        begin = time.monotonic()
        for answer in team.all("result", step=1, timeout_s=timeout_s):
            assert answer["error"] == "CommitTimeout" and answer["missing_ranks"] == [0, 1], answer
        assert time.monotonic() - begin < 3
    assert [answer["done"] for answer in team.ok("done", step=1)] == [False, False]
    faults(lab)
    for _ in range(2):
        assert [answer["path"] for answer in team.ok("result", step=1)] == [f"{lab.root}/global_step1"] * 2
    team.leave()


def test_an_exception_in_the_loop_keeps_the_snapshots(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"linger_s": 60.0}).open()
    team.commit(1)
    team.save(2)
    team.ok("leave_by_exception")
    team.end()
    until_committed(lab.root, 2)
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "memory")
    team.leave()
    lab.clear()


@pytest.mark.parametrize("savers_too", [False, True])
def test_a_snapshot_survives_the_death_of_every_rank_though_nothing_was_ever_stored(lab: Lab, savers_too: bool) -> None:
    team = Team(lab, "aabb", saver={"linger_s": 60.0}).open()
    team.save(41)
    team.save(42)
    time.sleep(0.3)  # the promise: 0.3 s after the return
    if savers_too:
        for node in "ab":
            kill_saver(lab, node)
    team.kill()
    team = Team(lab, "aabb", saver={"linger_s": 60.0}).open()
    found = team.restore()
    assert (found["step"], found["source"], found["skipped"]) == (42, "memory", [])
    team.commit(43)
    team.leave()


def test_a_clean_end_drops_what_was_only_in_memory(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.save(2)
    team.leave()
    until(lambda: not lab.left() and not lab.savers(), 10)
    assert [step for step, _ in committed(lab.root)] == [1]


def test_an_engine_that_is_closed_can_be_opened_again_in_the_same_process(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    for step in (1, 2, 3):
        team.commit(step)
        team.ok("close")
        team.ok("open")
        assert team.restore()["step"] == step
    team.leave()


def test_a_save_with_nothing_on_some_ranks_is_whole(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.tell([0], "save", step=1, storage=True)
    team.tell([1], "save", step=1, storage=True, empty=True)
    assert [team.hear(rank)["step"] for rank in (0, 1)] == [1, 1]
    team.ok("result", step=1)
    code = "answer = {'step': engine.restore().step, 'files': sorted(engine.restore().state)}"
    zero, one = team.ok("call", code=code)
    assert (zero["step"], one["step"]) == (1, 1) and one["files"] == [] and "rank0.pt" in zero["files"]
    team.leave()


def test_a_rank_that_fails_to_stage_fails_the_attempt_everywhere_and_the_next_one_works(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.tell([0], "save", step=2, storage=True)
    team.tell([1], "call", code=REFUSED)
    assert team.hear(0)["step"] == 2 and team.hear(1)["kind"] == "UnsupportedLeaf"
    answer = team.one(0, "result", step=2)
    assert answer["error"] == "AttemptFailed" and answer["rank"] == 1 and "bad.pt" in answer["reason"], answer
    team.commit(3)
    assert [step for step, _ in committed(lab.root)] == [3, 1]
    team.leave()


def test_a_rank_that_fails_before_the_others_have_come_to_the_disk_fails_them_all_the_same(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    assert team.one(1, "call", code=REFUSED)["kind"] == "UnsupportedLeaf"
    until(lambda: "failed Attempt(" in lab.saver_log(lab.names(node_id="b")), 10)
    assert team.one(0, "save", step=2, storage=True)["step"] == 2
    answer = team.one(0, "result", step=2)
    assert answer["error"] == "AttemptFailed" and answer["rank"] == 1 and "bad.pt" in answer["reason"], answer
    team.commit(3)
    assert [step for step, _ in committed(lab.root)] == [3, 1]
    team.leave()


def test_memory_saves_touch_no_disk(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.save(1)
    before = sorted(os.listdir(lab.root))
    faults(lab, {"verb": "*"})
    for step in range(2, 8):
        team.save(step)
    assert hits(lab) == [] and sorted(os.listdir(lab.root)) == before
    assert all(slots(lab.names(node_id=node)) for node in "ab") and Path(lab.root).is_dir()
    faults(lab)
    team.leave()


@pytest.mark.parametrize("options", [{"when_busy": "skip"}, {"layout": "node-local"}])
def test_a_refused_save_on_one_rank_leaves_nobody_in_the_exchange_of_a_save(lab: Lab, options: dict[str, str]) -> None:
    team = Team(lab, "ab", saver={"commit_s": 2.0}, **options).open()
    team.tell([0], "save", step=1, storage=True)
    team.tell([1], "save", step=-1, storage=True, empty=True)
    answers = [team.hear(rank) for rank in (0, 1)]
    assert answers[0]["step"] == 1 and answers[1]["error"] == "ConfigError"
    team.commit(2)
    assert team.restore()["step"] == 2
    alone = team.one(0, "result", step=1)
    assert alone.get("error") == (None if "layout" in options else "CommitTimeout"), alone
    team.leave()
