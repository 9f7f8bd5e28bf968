"""F1 and F2, the founding cases that are about many processes and one directory."""

from __future__ import annotations

import errno
import os

import pytest
from harness import Lab, until
from team import Team, committed, faults, hits, whole


def _litter(root: str) -> list[str]:
    return [name for _, _, names in os.walk(root) for name in names if name.startswith((".tmp-", ".reading-"))]


@pytest.mark.parametrize("layout", ["shared", "node-local"])
def test_f1_eight_processes_on_two_nodes_save_fifty_rounds_without_an_error_or_a_temporary_file(
    lab: Lab, layout: str
) -> None:
    roots = {node: f"{lab.root}/{node if layout == 'node-local' else 'all'}" for node in "ab"}
    team = Team(lab, "aaaabbbb", roots=roots, layout=layout, keep_last=2).open()
    for answer in team.ok("rounds", first=1, count=25, tag="last", within_s=100):  # one name, again and again
        assert answer["errors"] == []
    for answer in team.ok("rounds", first=26, count=25, within_s=100):
        assert answer["errors"] == []
    for root in set(roots.values()):
        until(lambda: [step for step, _ in committed(root)][:2] == [50, 49] and whole(root), 10)  # noqa: B023
        assert not _litter(root)
    assert team.restore()["step"] == 50
    team.leave()


@pytest.mark.parametrize("layout", ["shared", "node-local"])
def test_f2_no_directory_is_ever_renamed(lab: Lab, layout: str) -> None:
    faults(lab, {"verb": "rename", "directory": True, "errno": errno.EXDEV})
    team = Team(lab, "aabb", layout=layout, keep_last=2).open()
    for answer in [*team.ok("rounds", first=1, count=6), *team.ok("rounds", first=7, count=6, tag="last")]:
        assert answer["errors"] == []
    assert hits(lab) == [] and committed(lab.root)[0][0] == 12 and whole(lab.root)
    assert team.restore()["step"] == 12
    team.leave()


def test_without_hard_links_and_directory_syncs_saves_commit_and_restore(lab: Lab) -> None:
    faults(lab, {"verb": "link", "errno": errno.ENOTSUP})
    team = Team(lab, "ab", keep_last=2).open()
    for answer in [*team.ok("rounds", first=1, count=4), *team.ok("rounds", first=5, count=3, tag="last")]:
        assert answer["errors"] == []
    assert hits(lab) and committed(lab.root)[0] == (7, "last") and whole(lab.root)
    team.leave()
    team = Team(lab, "ab").open()
    found = team.restore()
    assert (found["step"], found["source"]) == (7, "storage")
    team.leave()
