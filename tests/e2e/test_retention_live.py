"""Retention with real savers: across generations, clocks that lie, readers at work, ranks of different speed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, until
from team import Team, committed, faults, hits, kill_saver, whole

from ckpt_engine import cli


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


HELD = {
    "the saver removes": {"verb": "unlink", "path": "global_step1/"},
    "the saver has published, and tells later than the disk": {"verb": "rename", "path": "latest"},
}


@pytest.mark.parametrize("where", HELD)
def test_a_save_is_committed_before_what_it_makes_superfluous_is_gone_and_close_waits_for_that(
    lab: Lab, where: str
) -> None:
    team = Team(lab, "a", keep_last=1).open()
    team.commit(1)
    faults(lab, {"who": "saver", "hold": True, **HELD[where]})
    team.commit(2)
    until(lambda: hits(lab), 10)
    team.save(3)
    team.tell([0], "close")
    assert team.ranks[0].silent(0.5)
    faults(lab)
    team.hear(0)
    assert [name for name in os.listdir(lab.root) if name.startswith("global_step")] == ["global_step2"]
    team.end()


def test_an_engine_that_is_closed_waits_for_no_retention_that_hangs(lab: Lab) -> None:
    team = Team(lab, "a", keep_last=1).open()
    team.commit(1)
    faults(lab, {"who": "saver", "verb": "unlink", "path": "global_step1/", "hold": True})
    team.commit(2)
    until(lambda: hits(lab), 10)
    team.ok("close", timeout_s=0.5)
    faults(lab)
    team.end()


def test_a_tag_that_is_saved_anew_while_retention_removes_it_is_committed(lab: Lab) -> None:
    team = Team(lab, "a", keep_last=1).open()
    team.commit(1, tag="a")
    folder = f"{lab.root}/a"
    writing = {"who": "saver", "verb": "make_dir", "path": f"{folder}/.attempt", "hold": True}
    faults(lab, writing, {"who": "saver", "verb": "rename", "path": f"{folder}/MANIFEST", "hold": True})
    team.commit(2, tag="b")
    until(lambda: hits(lab), 10)
    team.ok("save", step=3, storage=True, tag="a")  # its directory is there
    faults(lab, writing)
    until(lambda: not os.path.isdir(folder) or not os.listdir(folder), 10)
    faults(lab)
    team.ok("result", step=3)
    _until_steps(lab, [3])
    assert whole(lab.root)
    team.leave()


def test_a_disk_that_was_full_costs_no_second_room_and_keeps_nothing_of_what_failed(lab: Lab) -> None:
    whole_file = {"who": "saver", "verb": "rename", "path": "rank0.pt"}
    full = {"who": "saver", "verb": "rename", "path": "sub/model.pt", "errno": errno.ENOSPC}
    team = Team(lab, "a", saver={"retry_s": 10.0}).open()
    faults(lab, whole_file, full)
    team.ok("save", step=1, storage=True)
    until(lambda: sum(hit["path"].endswith("model.pt") for hit in hits(lab)) > 1, 10)
    faults(lab, whole_file)
    team.ok("result", step=1)
    assert sum(hit["path"].endswith("rank0.pt") for hit in hits(lab)) == 1
    team.leave()
    team = Team(lab, "a", saver={"retry_s": 0.0}).open()
    team.restore()
    faults(lab, full)
    team.ok("save", step=2, storage=True)
    assert team.one(0, "result", step=2)["error"] == "StorageFull"
    assert not list(Path(lab.root, "global_step2").rglob("*.pt"))
    faults(lab)
    team.commit(3)
    assert _steps(lab) == [3, 1] and whole(lab.root)
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


# -- rules -----------------------------------------------------------------------------------------------------------


def _save(team: Team, step: int, loss: float | None = None, **how: Any) -> None:
    """Rank 0 gives the metric, the others none."""
    metrics = {} if loss is None else {"metrics": {"eval_loss": loss}}
    team.tell([0], "save", step=step, storage=True, **how, **metrics)
    team.tell(range(1, len(team.ranks)), "save", step=step, storage=True, **how)
    answers = [team.hear(rank) for rank in range(len(team.ranks))]
    assert not [answer for answer in answers if "error" in answer], answers


@pytest.mark.parametrize("keep_last", [1, 2, 3])
@pytest.mark.parametrize("best", [1, 4, 7], ids=["oldest", "middle", "newest"])
def test_the_best_stays_and_the_newest_loads_whoever_is_slow(lab: Lab, keep_last: int, best: int) -> None:
    policy = {"keep_last": keep_last, "keep_best": ["eval_loss", "min"]}
    team = Team(lab, "ab", retention=policy).open()
    for step in range(1, 8):
        slow = "ab"[step % 2]
        faults(lab, {"who": "saver", "node": slow, "verb": "write_new", "path": "/.attempt", "hold": True})
        _save(team, step, 0.1 if step == best else 0.5 + step)
        until(lambda: any(hit["node"] == slow for hit in hits(lab)), 10)  # noqa: B023
        faults(lab)
        team.ok("result", step=step)
        there = _steps(lab)
        assert there[0] == step and (step < best or best in there) and whole(lab.root)
    _until_steps(lab, sorted({best, *range(8 - keep_last, 8)}, reverse=True))
    told = team.ok("call", code=f"report = engine.restore({best}); answer = report.metrics | {{'step': report.step}}")
    assert [(one["eval_loss"], one["step"]) for one in told] == [(0.1, best)] * 2
    team.leave()


SLOW = {
    "a file": ({"verb": "write_new", "path": "/.attempt"}, [1]),
    "its manifest": ({"verb": "rename", "path": "/global_step2/MANIFEST.json"}, [1]),
    "the removal of the one before": ({"verb": "rename", "path": "/global_step1/.removed"}, [2, 1]),
    "the removal of its files": ({"verb": "unlink", "path": "/global_step1/rank"}, [2]),
}
"""What does not return, and the steps that are committed then."""


@pytest.mark.parametrize("where", SLOW)
def test_all_killed_while_a_save_is_slow_with_a_limit_of_one_leave_a_whole_checkpoint(lab: Lab, where: str) -> None:
    team = Team(lab, "aa", keep_last=1).open()
    team.commit(1)
    rule, there = SLOW[where]
    faults(lab, {"who": "saver", **rule, "hold": True})
    team.ok("save", step=2, storage=True)
    until(lambda: hits(lab), 10)
    kill_saver(lab, "a")
    team.kill()
    assert _steps(lab) == there and whole(lab.root)
    faults(lab)
    team = Team(lab, "aa", keep_last=1).open()
    assert team.restore()["step"] == 2
    for step in (3, 4):  # a new saver does not remove what a slot still holds
        team.commit(step)
    _until_steps(lab, [4])
    team.leave()
    assert [name for name in os.listdir(lab.root) if name.startswith("global_step")] == ["global_step4"]


def test_a_pin_counts_once_its_call_has_returned_survives_savers_jobs_and_re_saves(lab: Lab) -> None:
    team = Team(lab, "a", keep_last=1).open()
    faults(lab, {"who": "saver", "verb": "write_new", "path": "/.attempt", "hold": True})
    team.ok("save", step=1, storage=True, tag="kept")
    until(lambda: hits(lab), 10)
    team.ok("call", code="engine.pin(1, 'it is on its way')")
    faults(lab)
    team.commit(2)
    kill_saver(lab, "a")
    for step in (3, 4):  # a new saver does not remove what a slot still holds
        team.commit(step)
    _until_steps(lab, [4, 1])
    team.leave()
    team = Team(lab, "a", keep_last=1).open()
    team.restore()
    team.commit(5, tag="kept")
    team.commit(6)
    team.commit(7)
    _until_steps(lab, [7, 5])
    assert whole(lab.root)
    refused = team.one(0, "call", code="engine.pin(3, 'gone')")
    assert refused["error"] == "NotFound" and "there are [5, 7]" in refused["text"]
    team.ok("call", code="engine.pin(7); engine.unpin(5)")
    team.commit(8)
    _until_steps(lab, [8, 7])
    team.leave()


def test_max_bytes_is_met_or_what_cannot_go_is_told_once(lab: Lab) -> None:
    team = Team(lab, "a").open()
    team.commit(1)
    nbytes = sum(path.stat().st_size for path in Path(lab.root, "global_step1").rglob("*.pt"))
    team.leave()
    team = Team(lab, "a", retention={"max_bytes": 3 * nbytes + nbytes // 2}).open()
    team.restore()
    for step in (2, 3, 4, 5):
        team.commit(step)
    _until_steps(lab, [5, 4, 3])
    assert "cannot be met" not in lab.saver_log(lab.names(node_id="a"))
    team.ok("call", code="for step in (3, 4, 5): engine.pin(step)")
    for step in (6, 7, 8):
        team.commit(step)
        _until_steps(lab, [step, 5, 4, 3])
    assert lab.saver_log(lab.names(node_id="a")).count("cannot be met") == 1
    team.leave()


def test_every_kth_stays_and_nothing_goes_before_its_age(lab: Lab) -> None:
    team = Team(lab, "a", retention={"keep_last": 1, "keep_every": 4}).open()
    for step in range(1, 11):
        team.commit(step)
    _until_steps(lab, [10, 8, 4])
    team.leave()
    team = Team(lab, "a", retention={"keep_last": 1, "min_age_s": 3600.0}).open()
    team.restore()
    for step in (11, 12):
        team.commit(step)
    for entry in Path(lab.root).iterdir():
        os.utime(entry, (1, 1))
    team.commit(13)
    team.leave()
    assert _steps(lab) == [13, 12, 11, 10, 8, 4]


def test_a_file_that_nobody_knows_stays_where_its_checkpoint_was_and_is_told(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    team = Team(lab, "a", keep_last=1).open()
    team.commit(1)
    Path(lab.root, "global_step1", "notes.txt").write_text("mine")
    assert cli.main(["list", lab.root]) == 0
    assert "  foreign, never deleted: 'notes.txt'" in capsys.readouterr().out.splitlines()
    for step in (2, 3):
        team.commit(step)
    _until_steps(lab, [3])
    assert os.listdir(f"{lab.root}/global_step1") == ["notes.txt"]
    assert lab.saver_log(lab.names(node_id="a")).count("keeps 'notes.txt'") == 1
    team.leave()
    assert cli.main(["list", lab.root]) == 0
    assert "global_step1  unmanaged" in capsys.readouterr().out


def test_node_local_roots_judge_by_the_metrics_of_rank_0(lab: Lab) -> None:
    roots = {node: f"{lab.root}-{node}" for node in "ab"}
    policy = {"keep_last": 1, "keep_best": ["eval_loss", "min"]}
    team = Team(lab, "ab", roots=roots, layout="node-local", slots=3, retention=policy).open()
    for step, loss in enumerate((0.5, 0.1, 0.4, 0.3, 0.2), 1):
        _save(team, step, loss)
        team.ok("result", step=step)
    team.leave()
    for root in roots.values():
        steps = [step for step, _ in committed(root)]
        assert steps[0] == 5 and 2 in steps and 1 not in steps


@pytest.mark.parametrize("layout", ["shared", "node-local"])
def test_metrics_that_cannot_be_fail_that_save_on_all_ranks_and_the_next_one_works(lab: Lab, layout: str) -> None:
    team = Team(lab, "ab", layout=layout, retention={"keep_last": 1}).open()
    team.tell([0], "save", step=1, storage=True)
    team.tell([1], "save", step=1, storage=True, metrics={"eval_loss": "low"})
    assert "error" not in team.hear(0)
    bad = team.hear(1)
    assert bad["error"] == "ConfigError" and "'low' is not a number" in bad["text"]
    if layout == "shared":
        assert team.one(0, "result", step=1)["error"] == "AttemptFailed"
    team.ok("save", step=2, storage=True, metrics={"eval_loss": 0.5})
    team.ok("result", step=2)
    assert team.ok("call", code="answer = engine.restore(2).metrics") == [{"event": "done", "eval_loss": 0.5}] * 2
    team.leave()
