"""Retention with real savers: across generations, clocks that lie, readers at work, ranks of different speed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, until
from team import Team, committed, faults, hits, whole


def _steps(lab: Lab) -> list[int]:
    return [step for step, _ in committed(lab.root)]


def _until_steps(lab: Lab, steps: list[int]) -> None:
    until(lambda: _steps(lab) == steps, 10, f"{steps}, there are {_steps(lab)}")


def test_what_is_kept_goes_by_attempts_and_never_by_step_or_clock(lab: Lab) -> None:
    team = Team(lab, "ab", keep_last=3).open()
    for step in (400, 500, 600, 700):
        team.commit(step)
    _until_steps(lab, [700, 600, 500])
    team.leave()
    for number, entry in enumerate(sorted(Path(lab.root).iterdir())):
        os.utime(entry, (4e9 - 1e6 * number, 4e9 - 1e6 * number))  # the future, and backwards
    team = Team(lab, "ab", keep_last=2).open()
    team.restore(step=500)
    team.commit(100)
    _until_steps(lab, [100, 700])
    for entry in Path(lab.root).iterdir():
        os.utime(entry, (1, 1))
    team.commit(200)
    _until_steps(lab, [200, 100])
    team.commit(300)
    _until_steps(lab, [300, 200])
    assert whole(lab.root) and team.restore()["step"] == 300
    team.leave()
    assert not [name for name in os.listdir(lab.root) if name.startswith("global_step") and name[-3:] not in "200 300"]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_after_each_of_many_commits_the_newest_loads_whoever_is_slow(lab: Lab, keep_last: int) -> None:
    team = Team(lab, "ab", keep_last=keep_last).open()
    for step in range(1, 11):
        slow = "ab"[step % 2]
        faults(lab, {"who": "saver", "node": slow, "verb": "write_new", "path": "/.attempt", "hold": True})
        team.ok("save", step=step, storage=True)
        until(lambda: any(hit["node"] == slow for hit in hits(lab)), 10)  # noqa: B023
        faults(lab)
        team.ok("result", step=step)
        there = _steps(lab)
        assert there[0] == step and len(there) >= min(step, keep_last) and whole(lab.root)
    _until_steps(lab, list(range(10, 10 - keep_last, -1)))
    team.leave()


def reader(me: Any, step: int) -> None:
    """An observer with names of its own: restores one step and goes."""
    with me.engine(name="reader", node_id="r") as engine:
        me.say("open")
        me.hear("read")
        report = engine.restore(step)
        me.say("read", step=report.step, value=float(report.state["rank0.pt"]["w"][0]))


def test_a_checkpoint_that_is_being_read_stays_until_it_is_read(lab: Lab) -> None:
    team = Team(lab, "a", keep_last=1).open()
    team.commit(1)
    env = {
        "CKPT_ENGINE_HOOK": "faulty:hook",
        "CKPT_ENGINE_FAULTS": str(lab.dir / "faults"),
        "CKPT_ENGINE_NODE": "r",
    }
    observer = lab.rank(reader, 1, env=env)
    observer.expect("open")
    faults(lab, {"who": "rank", "node": "r", "verb": "read_into", "hold": True})
    observer.tell("read")
    until(lambda: hits(lab), 10)
    team.commit(2)
    team.commit(3)
    _until_steps(lab, [3, 1])
    faults(lab)
    assert observer.expect("read") == {"event": "read", "step": 1, "value": 1e6}
    observer.end()
    team.commit(4)
    _until_steps(lab, [4])
    team.leave()
