"""DeepSpeed on two simulated nodes: neither sees the other's shared memory, nor, if so configured, its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed_team import Team, committed
from harness import Lab

NODES = [{"node_id": "a"}, {"node_id": "b"}]
LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def team_on_two_nodes(lab: Lab, roots: list[str], options: dict[str, Any], **how: Any) -> Team:
    team = Team(lab, alone=True)
    team.ok("build", **how)
    answers = team.each("attach", [{**node, "root": root, **options} for node, root in zip(NODES, roots, strict=True)])
    assert answers == [{}, {}], answers
    return team


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("local", [False, True], ids=["shared-root", "node-local-roots"])
def test_two_nodes_restore_from_the_memory_of_both_and_from_storage(lab: Lab, stage: int, local: bool) -> None:
    """The model states of ZeRO-1 lie on one node alone: the other gets them over the network."""
    how: dict[str, Any] = {"stage": stage, "dtype": "bf16", **(LOCAL if local else {})}
    roots = [f"{lab.dir}/disk-of-a", f"{lab.dir}/disk-of-b"] if local else [lab.root, lab.root]
    team = team_on_two_nodes(lab, roots, {}, **how)
    at_3 = team.ok("train", first=0, last=3)
    team.commit(3)
    at_5 = team.ok("train", first=3, last=5)
    team.ok("save", step=5)
    at_7 = team.ok("train", first=5, last=7)
    team.kill()

    team = team_on_two_nodes(lab, roots, {}, **how)
    assert [(r["step"], r["source"]) for r in team.ok("restore")] == [(5, "memory")] * 2
    assert team.ok("train", first=5, last=7) == at_7
    team.close()
    assert {Path(root, "latest").read_text() for root in roots} <= {"global_step3", "global_step5"}

    team.ok("build", **how)
    others = [{**node, "root": root, "job": "other"} for node, root in zip(NODES, roots, strict=True)]
    assert team.each("attach", others) == [{}, {}]
    assert [(r["step"], r["source"]) for r in team.ok("restore", step=3)] == [(3, "storage")] * 2
    assert [a["digest"] for a in team.ok("digest")] == [a["digest"] for a in at_3]
    assert team.ok("train", first=3, last=5) == at_5
    answers = team.each("load", [{"root": root, "tag": "global_step3"} for root in roots])
    assert [answer.get("steps") for answer in answers] == [3, 3], answers
    assert team.ok("train", first=3, last=5) == at_5
    if not local:
        assert committed(lab.root)["global_step3"] == 3
    team.leave()


def test_weights_alone_come_from_the_memory_of_both_nodes(lab: Lab) -> None:
    """ZeRO-3 without optimizer states: DeepSpeed opens the shards of all ranks itself, those of the other node, too."""
    roots = [lab.root, lab.root]
    team = team_on_two_nodes(lab, roots, {}, stage=3)
    at_3 = team.ok("train", first=0, last=3)
    team.ok("save", step=3)
    team.kill()
    team = team_on_two_nodes(lab, roots, {}, stage=3)
    reports = team.ok("restore", load_optimizer_states=False)
    assert [(r["step"], r["source"]) for r in reports] == [(3, "memory")] * 2
    assert [a["digest"] for a in team.ok("digest")] == [a["digest"] for a in at_3]
    team.leave()
