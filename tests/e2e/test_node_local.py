"""Each node has a directory of its own: it commits there, and restore takes what is committed everywhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness import Lab, until
from team import Team, committed, faults, whole

LOCAL = {"layout": "node-local"}


def _roots(lab: Lab, nodes: str = "ab") -> dict[str, str]:
    return {node: f"{lab.root}/{node}" for node in nodes}


def _steps(root: str) -> list[int]:
    return [step for step, _ in committed(root)]


def test_each_node_commits_its_own_part_and_all_restore_the_newest_common_one(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "aabb", roots=roots, **LOCAL).open()
    for step in (1, 2, 3):
        team.commit(step)
    assert team.restore()["source"] == "memory"
    team.leave()
    for root in roots.values():
        assert _steps(root) == [3, 2, 1] and whole(root)
        with open(f"{root}/latest") as file:
            assert file.read() == "global_step3"
    assert not os.path.exists(f"{roots['a']}/global_step3/rank2.pt")
    shutil.rmtree(f"{roots['b']}/global_step3")
    team = Team(lab, "aabb", roots=roots, **LOCAL).open()
    found = team.restore(files=["sub/model.pt"])  # on node b nobody has it: it comes from node a
    assert (found["step"], found["source"]) == (2, "storage")
    assert found["skipped"] == [[3, "storage", "nothing of ranks [2, 3]"]]
    team.commit(4)
    team.leave()
    leftovers = [n for _, _, names in os.walk(lab.root) for n in names if n.startswith((".tmp-", ".reading-"))]
    assert not leftovers


def test_ranks_that_moved_get_their_files_from_the_other_nodes_directory(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    team.commit(1)
    team.commit(2)
    team.leave()
    team = Team(lab, "ba", roots=roots, **LOCAL).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "storage")
    team.commit(3)
    assert team.restore()["step"] == 3
    team.leave()


def test_each_node_holds_a_lease_in_its_own_directory_while_it_reads(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    team.commit(1)
    team.leave()
    faults(lab, {"who": "rank", "verb": "read_into", "hold": True})
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    team.tell([0, 1], "restore")
    for root in roots.values():
        until(lambda: [name for name in os.listdir(root) if name.startswith(".reading-")], 10)  # noqa: B023
    assert all(len([n for n in os.listdir(root) if n.startswith(".reading-")]) == 1 for root in roots.values())
    faults(lab)
    assert [team.hear(rank)["step"] for rank in (0, 1)] == [1, 1]
    team.leave()


def test_damage_on_one_node_takes_all_nodes_to_the_older_checkpoint(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    team.commit(1)
    team.commit(2)
    team.leave()
    os.truncate(f"{roots['b']}/global_step2/rank1.pt", 10)
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    found = team.restore()
    assert found["step"] == 1 and "rank 1" in found["skipped"][0][2]
    team.leave()


def test_retention_removes_only_what_is_older_than_the_newest_committed_on_all_nodes(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "ab", roots=roots, keep_last=1, slots=3, **LOCAL).open()
    team.commit(1)
    faults(lab, {"who": "saver", "node": "b", "verb": "write_new", "direct": True, "hold": True})
    for step in (2, 3):  # node b commits neither
        team.ok("save", step=step, storage=True)
        assert team.one(0, "result", step=step)["step"] == step
    assert 1 in _steps(roots["a"]) and _steps(roots["b"]) == [1]
    assert team.restore()["step"] == 3  # from memory
    faults(lab)
    for step in (4, 5, 6):
        team.commit(step)
    for root in roots.values():
        until(lambda: _steps(root)[0] == 6 and 1 not in _steps(root) and whole(root), 10)  # noqa: B023
    team.leave()
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    assert team.restore()["step"] == 6
    team.leave()


def test_node_local_on_what_is_one_directory_collides_nowhere(lab: Lab) -> None:
    team = Team(lab, "aabb", keep_last=2, **LOCAL).open()
    for step in range(1, 6):
        team.commit(step)
    until(lambda: sorted(set(_steps(lab.root))) == [4, 5], 10)
    team.leave()
    team = Team(lab, "aabb", **LOCAL).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (5, "storage")
    team.leave()
    # The layout may change: what is there says for itself how it lies.
    team = Team(lab, "aabb").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (5, "storage")
    team.commit(6)
    assert team.restore()["step"] == 6
    team.leave()


def test_two_directories_declared_as_one_are_refused_at_start(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "ab", roots=roots)
    for answer in team.all("open"):
        assert answer["error"] == "ConfigError" and all(root in answer["text"] for root in roots.values())
    team.end()


def test_two_roots_with_ids_of_their_own_are_not_taken_for_one(lab: Lab) -> None:
    roots = _roots(lab)
    for node in "ab":
        alone = Team(lab, node, roots=roots).open()
        alone.commit(1)
        alone.leave()
    assert len({Path(root, ".ckpt-root").read_text() for root in roots.values()}) == 2
    team = Team(lab, "ab", roots=roots, **LOCAL)
    for answer in team.all("open"):
        assert answer["error"] == "ConfigError" and "ids" in answer["text"], answer
    team.end()


def test_the_dead_of_node_local_roots_commit_what_they_held_and_restore_takes_the_common_one(lab: Lab) -> None:
    roots = _roots(lab)
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    team.save(1)
    team.save(2)
    team.one(0, "save", step=3, storage=False)
    team.kill()
    until(lambda: _steps(roots["a"])[:2] == [3, 2] and _steps(roots["b"])[:1] == [2], 20, "the savers commit")
    until(lambda: not lab.savers(), 10)
    team = Team(lab, "ab", roots=roots, **LOCAL).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "storage")
    team.leave()
