"""The whole root is removed, and made anew, under a job that lives: what is saved from then on counts."""

from __future__ import annotations

import os
import shutil

from harness import Lab, until
from team import Team, committed, until_committed, whole


def gone_and_made_anew(lab: Lab) -> Team:
    team = Team(lab, "ab", saver={"linger_s": 1.0}).open()
    team.commit(1)
    until(lambda: os.path.exists(f"{lab.root}/latest"), 10)
    shutil.rmtree(lab.root)
    os.mkdir(lab.root)
    return team


def test_what_is_committed_after_a_root_was_made_anew_is_restored_by_the_next_job(lab: Lab) -> None:
    team = gone_and_made_anew(lab)
    team.save(2)
    team.commit(3)
    assert committed(lab.root) == [(3, "global_step3")] and whole(lab.root)
    team.leave()
    until(lambda: not lab.savers(), 15)
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (3, "storage")
    team.commit(4)
    team.leave()


def test_what_the_dead_held_in_memory_when_their_root_was_made_anew_is_persisted_there(lab: Lab) -> None:
    team = gone_and_made_anew(lab)
    team.save(2)
    team.kill()
    until_committed(lab.root, 2)
    team = Team(lab, "ab").open()
    assert team.restore()["step"] == 2
    team.leave()


def test_a_restart_on_an_empty_root_starts_anew_and_tells_of_the_snapshot_it_left(lab: Lab) -> None:
    """Whoever empties a root to start from scratch must not get the state back that he removed."""
    team = gone_and_made_anew(lab)
    team.save(2)
    team.kill()
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (0, None)
    assert (2, "memory") in [tuple(one[:2]) for one in found["skipped"]] and "removed root" in found["skipped"][0][2]
    team.commit(1)
    team.leave()
