"""Other hands on the root: a second job, directories that vanish, a disk that cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import NOBODY, Lab, until
from team import Team, committed, faults, hits, whole

READ_ONLY = [
    {"verb": verb, "errno": errno.EROFS} for verb in ("write_new", "rename", "link", "unlink", "make_dir", "remove_dir")
]


def test_of_two_jobs_on_one_root_the_second_is_told_and_nothing_is_mixed(lab: Lab) -> None:
    one = Team(lab, "ab", job="one").open()
    two = Team(lab, "ab", job="two").open()
    one.commit(1, line="one")
    two.ok("save", step=1, storage=True, line="two")
    for answer in two.all("result", step=1):
        assert answer["error"] == "StaleRun" and "generation 1" in answer["text"].replace("(", ""), answer
    two.save(2, line="two")  # its training goes on
    one.commit(2, line="one")
    assert committed(lab.root) == [(2, "global_step2"), (1, "global_step1")] and whole(lab.root)
    assert one.restore(step=1)["line"] == "one"
    one.leave()
    two.leave()


def test_of_two_jobs_on_one_root_a_newer_run_takes_over(lab: Lab) -> None:
    one = Team(lab, "ab", job="one").open()
    one.commit(1, line="one")
    two = Team(lab, "ab", job="two").open()
    assert two.restore()["step"] == 1
    two.commit(2, line="two")
    one.ok("save", step=2, storage=True, line="one")
    for answer in one.all("result", step=2):
        assert answer["error"] == "StaleRun", answer
    assert two.restore(step=2)["line"] == "two" and [step for step, _ in committed(lab.root)] == [2, 1]
    one.leave()
    two.leave()


def test_a_tag_directory_that_is_removed_in_flight_cancels_the_save_and_the_next_one_works(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    faults(lab, {"who": "saver", "verb": "write_new", "direct": True, "hold": True})
    team.ok("save", step=2, storage=True)
    until(lambda: {hit["node"] for hit in hits(lab)} == {"a", "b"}, 10)
    shutil.rmtree(f"{lab.root}/global_step2")
    faults(lab)
    for answer in team.all("result", step=2):
        assert answer["error"] == "Cancelled", answer
    team.commit(3)
    assert [step for step, _ in committed(lab.root)] == [3, 1] and not os.path.exists(f"{lab.root}/global_step2")
    team.leave()


def test_a_root_that_is_removed_in_flight_cancels_the_save_and_the_next_one_works(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    faults(lab, {"who": "saver", "verb": "write_new", "direct": True, "hold": True})
    team.ok("save", step=2, storage=True)
    until(lambda: {hit["node"] for hit in hits(lab)} == {"a", "b"}, 10)
    shutil.rmtree(lab.root)
    faults(lab)
    for answer in team.all("result", step=2):
        assert answer["error"] == "Cancelled", answer
    team.commit(3)
    assert committed(lab.root) == [(3, "global_step3")] and whole(lab.root)
    team.leave()
    team = Team(lab, "ab").open()
    assert team.restore()["step"] == 3
    team.leave()


def test_a_root_that_cannot_be_made_is_refused_at_start_on_all_ranks(lab: Lab) -> None:
    Path(lab.root).write_text("a file")
    for root in (lab.root, f"{lab.root}/below", "/proc/nothing/here"):
        team = Team(lab, "ab", roots={"a": root, "b": root})
        for answer in team.all("open"):
            assert answer["error"] == "ConfigError" and root in answer["text"], answer
        team.end()


def unprivileged(me: Any) -> None:
    me.engine()


@pytest.mark.skipif("os.geteuid() != 0")
def test_a_root_without_write_permission_is_refused_at_start(lab: Lab) -> None:
    os.mkdir(lab.root, 0o755)
    rank = lab.rank(unprivileged, uid=NOBODY)
    raised = rank.expect("raised")
    assert raised["type"] == "ConfigError" and "Permission denied" in raised["text"], raised
    rank.join()


def test_a_root_that_becomes_read_only_fails_storage_saves_at_once_and_memory_goes_on(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"commit_s": 2.0, "retry_s": 0.2}).open()
    team.commit(1)
    faults(lab, *READ_ONLY)
    team.save(2)
    team.ok("save", step=3, storage=True)
    for answer in team.all("result", step=3):
        assert answer["error"] == "StorageError" and answer["errno"] == errno.EROFS, answer
    team.save(4)
    found = team.restore()
    assert (found["step"], found["source"]) == (4, "memory")
    faults(lab)
    team.commit(5)
    assert [step for step, _ in committed(lab.root)] == [5, 1]
    team.leave()


def test_a_read_only_root_can_be_restored_from(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.leave()
    faults(lab, *READ_ONLY)
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (1, "storage")
    team.save(2)
    assert team.restore()["source"] == "memory"
    team.leave()


def test_a_start_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    second = Team(lab, "cb")  # rank 1 finds its place on node b taken by the first job
    answers = second.all("open")
    assert "another live job" in answers[1]["text"] and "rank 1" in answers[0]["text"], answers
    assert {answer["error"] for answer in answers} == {"ConfigError"}
    team.leave()
    second.ok("open")
    assert second.restore()["step"] == 1
    second.commit(2)
    second.leave()


def test_jobs_that_come_to_a_new_root_in_the_same_instant_agree_on_its_id(lab: Lab) -> None:
    ranks = [lab.rank(attaches, f"job-{number}") for number in range(4)]
    for rank in ranks:
        rank.expect("there")
    for rank in ranks:
        rank.tell("go")
    assert len({rank.expect("attached")["root_id"] for rank in ranks}) == 1
    for rank in ranks:
        rank.end()


def attaches(me: Any, job: str) -> None:
    from ckpt_engine import CheckpointEngine

    me.say("there")
    me.hear("go")
    with CheckpointEngine(me.root, job=job) as ckpt:
        me.say("attached", root_id=ckpt._core.root_id)


def test_a_root_that_is_removed_under_a_job_is_the_same_root_after_its_next_save(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    shutil.rmtree(lab.root)
    team.commit(2)
    team.save(3)
    team.kill()
    team = Team(lab, "ab").open()
    assert (found := team.restore())["step"] == 3 and found["source"] == "memory", found
    team.commit(4)
    team.leave()
    assert committed(lab.root) == [(4, "global_step4"), (2, "global_step2")] and whole(lab.root)


def test_a_root_that_another_job_made_anew_gets_nothing_of_the_one_before(lab: Lab) -> None:
    one = Team(lab, "a", job="one").open()
    one.commit(1)
    shutil.rmtree(lab.root)
    two = Team(lab, "a", job="two").open()
    two.commit(1, line="two")
    one.ok("save", step=2, storage=True)
    (answer,) = one.all("result", step=2)
    assert answer["error"] == "StaleRun" and "was removed, and what lies there now is the root" in answer["text"], (
        answer
    )
    one.save(3)  # its training goes on
    one.kill()
    two.leave()
    assert committed(lab.root) == [(1, "global_step1")] and whole(lab.root)
    one = Team(lab, "a", job="one").open()
    found = one.restore()
    assert found["line"] == "two" and any("removed root" in one[2] for one in found["skipped"]), found
    one.leave()
