"""Runs and lines: roll-back, evaluation, and checkpoints saved anew under one tag."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Lab, until
from team import Team, committed, faults, hits, kill_saver, until_committed, whole


def test_an_abandoned_line_is_not_restored_by_default_and_can_still_be_asked_for(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    for step in (40, 50, 60):
        team.commit(step, line="A")
    assert team.restore(step=50)["line"] == "A"
    team.commit(52, line="B")
    team.leave()
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["line"]) == (52, "B")
    assert team.restore(step=60)["line"] == "A"
    shard = Path(lab.root, "global_step52", "rank1.pt")
    shard.write_bytes(shard.read_bytes()[:-1])
    found = team.restore()
    assert found["step"] == 50 and found["skipped"][0][0] == 52
    team.leave()


def test_the_newest_of_the_new_line_wins_though_the_old_one_has_a_higher_step(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"linger_s": 60.0}).open()
    team.commit(50, line="A")
    team.commit(60, line="A")
    team.restore(step=50)
    team.save(51, line="B")
    team.kill()
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["line"]) == (51, "B")
    team.leave()
    lab.clear()


def test_a_persist_of_the_abandoned_line_that_is_under_way_is_cancelled(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(50, line="A")
    faults(lab, {"who": "saver", "verb": "write_new", "direct": True, "hold": True})
    team.ok("save", step=60, storage=True, line="A")
    until(lambda: {hit["node"] for hit in hits(lab)} == {"a", "b"}, 10)
    team.restore(step=50)
    team.save(51, line="B")
    faults(lab)
    for answer in team.all("result", step=60):
        assert answer["error"] == "Cancelled", answer
    team.commit(52, line="B")
    assert [step for step, _ in committed(lab.root)] == [52, 50] and whole(lab.root)
    team.leave()


def test_to_evaluate_an_old_checkpoint_moves_nothing(lab: Lab) -> None:
    team = Team(lab, "ab", saver={"linger_s": 60.0}).open()
    team.commit(50)
    team.commit(60)
    team.save(65)
    team.kill()
    before = set(Path(lab.root).rglob("*"))
    evaluation = Team(lab, "ab").open()
    assert evaluation.restore(step=50)["step"] == 50
    evaluation.leave()
    until_committed(lab.root, 65)
    assert not [path for path in before if not path.exists() and not path.name.startswith(".")]
    team = Team(lab, "ab").open()
    assert team.restore()["step"] == 65
    team.leave()
    lab.clear()


def test_the_goodbye_of_an_evaluation_does_not_drop_what_the_dead_left_in_memory(lab: Lab) -> None:
    faults(lab, {"who": "saver", "verb": "write_new", "direct": True, "path": "global_step65", "hold": True})
    team = Team(lab, "ab", saver={"linger_s": 60.0}).open()
    team.commit(60)
    team.save(65)
    team.kill()
    for node in "ab":
        kill_saver(lab, node)
    evaluation = Team(lab, "ab", saver={"linger_s": 60.0}).open()
    assert evaluation.restore(step=60)["step"] == 60
    evaluation.leave()
    faults(lab)
    team = Team(lab, "ab").open()
    assert team.restore()["step"] == 65
    team.leave()
    lab.clear()


@pytest.mark.parametrize(
    ("verb", "path"),
    [("write_new", "/.attempt"), ("rename", "MANIFEST.json"), ("link", "last/rank"), ("unlink", ".removed-")],
)
def test_a_tag_saved_anew_is_the_old_or_the_new_one_when_everything_dies_in_the_middle(
    lab: Lab, verb: str, path: str
) -> None:
    team = Team(lab, "ab").open()
    team.commit(1, tag="last")
    team.commit(2, tag="last")
    faults(lab, {"who": "saver", "verb": verb, "path": path, "hold": True})
    team.ok("save", step=3, storage=True, tag="last")
    until(lambda: hits(lab), 10)
    team.kill()
    for node in "ab":
        kill_saver(lab, node)
        for name in lab.names(node_id=node).segments():
            Path(f"/dev/shm{name}").unlink()  # the memory of the nodes is lost as well
    faults(lab)
    team = Team(lab, "ab").open()
    found = team.restore()
    assert found["step"] in (2, 3) and whole(lab.root)
    team.commit(4, tag="last")
    assert committed(lab.root) == [(4, "last")] and whole(lab.root)
    team.leave()
