"""Two simulated nodes, each with a saver of its own, on one shared root."""

from __future__ import annotations

import errno
import os
import signal

import pytest
from harness import Lab, until
from team import Team, committed, faults, hits, kill_saver, slots, until_committed, whole

SHORT = {"saver": {"commit_s": 2.0, "retry_s": 0.3}}


def test_a_commit_needs_the_receipts_of_both_nodes(lab: Lab) -> None:
    faults(lab, {"who": "saver", "node": "b", "verb": "write_new", "path": "/.receipt-", "hold": True})
    faults(lab, {"who": "saver", "node": "b", "verb": "write_new", "path": "/.attempt-", "hold": True})
    team = Team(lab, "ab").open()
    team.ok("save", step=1, storage=True)
    until(lambda: any(".receipt-node0000" in name for _, _, names in os.walk(lab.root) for name in names), 10)
    assert team.one(0, "result", step=1, timeout_s=0.2)["missing_ranks"] == [1]
    assert committed(lab.root) == [] and not os.path.exists(f"{lab.root}/latest")
    faults(lab)
    assert [answer["step"] for answer in team.ok("result", step=1)] == [1, 1]
    assert committed(lab.root) == [(1, "global_step1")] and whole(lab.root)
    with open(f"{lab.root}/latest") as file:
        assert file.read() == "global_step1"
    team.leave()


@pytest.mark.parametrize(("nodes", "layout"), [("aa", "shared"), ("ab", "node-local")])
def test_a_node_that_decides_alone_writes_no_receipt_whatever_comes_of_the_save(
    lab: Lab, nodes: str, layout: str
) -> None:
    team = Team(lab, nodes, layout=layout, **SHORT).open()
    faults(lab, {"who": "saver", "verb": "rename", "path": "/.receipt-", "errno": errno.EIO})
    team.commit(1)
    faults(
        lab,
        {"who": "saver", "verb": "rename", "path": "/.receipt-", "errno": errno.EIO},
        {"who": "saver", "verb": "write_new", "direct": True, "errno": errno.EACCES},
    )
    team.ok("save", step=2, storage=True)
    assert all("error" in answer for answer in team.all("result", step=2))
    assert not [name for _, _, names in os.walk(lab.root) for name in names if ".receipt" in name]
    faults(lab)
    team.commit(3)
    assert not [name for _, _, names in os.walk(lab.root) for name in names if ".receipt" in name]
    team.leave()


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, "StorageFull"), (errno.EIO, "StorageError")])
def test_a_node_whose_storage_fails_fails_both_handles_and_the_next_save_commits(
    lab: Lab, number: int, kind: str
) -> None:
    team = Team(lab, "ab", saver={"commit_s": 20.0, "retry_s": 0.3}).open()
    team.commit(1)
    faults(lab, {"who": "saver", "node": "b", "verb": "write_new", "direct": True, "errno": number})
    team.ok("save", step=2, storage=True)
    for answer in team.all("result", step=2):
        assert answer["error"] == kind and answer["errno"] == number and "step 2" in answer["text"], answer
    assert committed(lab.root) == [(1, "global_step1")] and whole(lab.root)
    faults(lab)
    team.commit(3)
    assert [step for step, _ in committed(lab.root)] == [3, 1] and whole(lab.root)
    team.leave()


def test_a_failure_that_passes_is_not_even_noticed(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    faults(lab, {"who": "saver", "node": "b", "verb": "write_new", "path": "/.attempt", "errno": errno.EIO})
    team.ok("save", step=1, storage=True)
    until(lambda: len(hits(lab)) >= 2, 10)
    faults(lab)
    assert [answer["step"] for answer in team.ok("result", step=1)] == [1, 1]
    team.leave()


def test_a_rank_that_never_saves_blocks_nobody_and_is_named(lab: Lab) -> None:
    team = Team(lab, "aabb", **SHORT).open()
    answers = team.some([0, 1, 3], "save", step=7, storage=True)
    assert all(answer["seconds"] < 2 for answer in answers)
    assert all(answer["sum"] == 4 for answer in team.ok("reduce"))
    for answer in team.some([0, 1, 3], "result", step=7):
        assert answer["error"] == "CommitTimeout" and answer["missing_ranks"] == [2], answer
    team.one(2, "save", step=7, storage=False)  # it catches up: the same number of entries again
    team.commit(8)
    assert committed(lab.root) == [(8, "global_step8")]
    team.leave()


def test_a_save_that_one_node_never_entered_keeps_none_of_those_that_follow(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"commit_s": 60.0}).open()
    team.one(0, "save", step=1, storage=True, tag="last")
    team.one(1, "save", step=1, storage=False, tag="last")
    for step in (2, 3):
        team.commit(step)
    team.commit(4, tag="last")
    answer = team.one(0, "result", step=1)
    assert answer["error"] == "Cancelled" and "committed under its tag" in answer["text"], answer
    assert committed(lab.root) == [(4, "last"), (3, "global_step3"), (2, "global_step2")] and whole(lab.root)
    team.leave()


def test_only_rank_0_saves_and_returns_at_once(lab: Lab) -> None:
    team = Team(lab, "aabb").open()
    assert team.one(0, "save", step=7, storage=True)["seconds"] < 2
    answer = team.one(0, "result", step=7, timeout_s=1.0)
    assert answer["error"] == "CommitTimeout" and answer["missing_ranks"] == [1, 2, 3], answer
    team.some([1, 2, 3], "save", step=7, storage=True)
    assert [answer["step"] for answer in team.ok("result", step=7)] == [7] * 4
    team.leave()


def test_nodes_that_die_one_save_apart_commit_the_newest_attempt_common_to_both(lab: Lab) -> None:
    team = Team(lab, "aabb").open()
    team.commit(1)
    team.save(2)
    team.some([0, 1], "save", step=3, storage=False)
    team.kill()
    until_committed(lab.root, 2)
    assert [step for step, _ in committed(lab.root)] == [2, 1] and whole(lab.root)
    team = Team(lab, "aabb").open()
    assert team.restore()["step"] == 2
    team.leave()
    until(lambda: not lab.savers(), 10)
    team = Team(lab, "aabb").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "storage")
    team.leave()


def test_without_any_storage_save_the_savers_still_commit_what_all_nodes_hold(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"linger_s": 30.0}).open()
    team.save(1)
    team.save(2)
    team.one(1, "save", step=3, storage=False)
    team.kill()
    until_committed(lab.root, 2)
    for node in "ab":
        kill_saver(lab, node)
    lab_names = [lab.names(node_id=node) for node in "ab"]
    assert all(slots(names) for names in lab_names)
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "memory")
    team.leave()


def test_a_job_that_is_back_before_its_savers_agreed_takes_their_question_back(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"commit_s": 60.0, "linger_s": 0.5}).open()
    team.save(1)
    kill_saver(lab, "b")  # so node b offers nothing, and node a waits for its offer
    team.kill()
    until(lambda: any(name.startswith(".offer") for name in os.listdir(lab.root)), 10)
    team = Team(lab, "ab", saver={"commit_s": 60.0, "linger_s": 0.5}).open()
    assert team.restore()["step"] == 1
    team.commit(2)
    team.leave()
    until(lambda: not lab.savers() and not lab.left(), 10)  # and not after commit_s


def test_the_end_of_a_life_that_only_read_does_not_wait_for_a_node_that_has_nothing(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"commit_s": 60.0}).open()
    team.commit(1)
    team.kill()
    for name in lab.names(node_id="b").segments():
        os.unlink(f"/dev/shm{name}")
    team = Team(lab, "ab", saver={"commit_s": 60.0}).open()
    assert team.restore()["step"] == 1
    team.leave()
    until(lambda: not lab.savers() and not lab.left(), 10)


def test_a_job_that_goes_back_to_an_attempt_in_flight_does_not_lose_it(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    faults(lab, {"who": "saver", "node": "b", "verb": "write_new", "direct": True, "hold": True})
    team.ok("save", step=1, storage=True)
    assert team.restore()["step"] == 1  # a new run, resumed from what node b has not written yet
    team.ok("save", step=2, storage=True)
    answer = team.one(0, "result", step=1, timeout_s=1.5)
    assert answer["error"] == "CommitTimeout" and answer["missing_ranks"] == [1], answer
    faults(lab)
    for step in (1, 2):
        assert [answer["step"] for answer in team.ok("result", step=step)] == [step, step]
    assert [step for step, _ in committed(lab.root)] == [2, 1] and whole(lab.root)
    team.leave()


def test_a_late_persist_of_an_older_run_never_replaces_a_newer_runs_checkpoint(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"linger_s": 0.5}).open()
    team.commit(1)
    old_savers = [lab.saver(lab.names(node_id=node)) for node in "ab"]
    faults(lab, *({"who": "saver", "node": node, "verb": "write_new", "direct": True, "hold": True} for node in "ab"))
    team.ok("save", step=2, storage=True)
    until(lambda: {hit["node"] for hit in hits(lab)} == {"a", "b"}, 10)
    for pid in old_savers:
        os.kill(pid or 0, signal.SIGSTOP)
    team.kill()
    # Other nodes take the job over: nobody there knows what the stopped savers hold.
    newer = Team(lab, "cd").open()
    assert newer.restore()["step"] == 1
    newer.commit(2, line="new")
    newer.commit(3, line="new")
    faults(lab)
    for pid in old_savers:
        os.kill(pid or 0, signal.SIGCONT)
    until(lambda: not any(lab.saver(lab.names(node_id=node)) for node in "ab"), 20, "the old savers leave")
    assert [step for step, _ in committed(lab.root)] == [3, 2, 1] and whole(lab.root)
    found = newer.restore(step=2)
    assert (found["step"], found["line"]) == (2, "new")
    with open(f"{lab.root}/latest") as file:
        assert file.read() == "global_step3"
    newer.leave()
    lab.clear()
