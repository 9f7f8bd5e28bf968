"""DeepSpeed with ``staging="overlap"``: its step waits for the copy, gradient accumulation does not; no tears."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_team import Member, Team
from harness import Lab

STATES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0, "dtype": "fp32"},
    "zero1": {"stage": 1, "dtype": "bf16"},
    "zero2": {"stage": 2, "dtype": "fp32"},
    "zero3": {"stage": 3, "dtype": "bf16"},
    "pipe": {"name": "pipe", "stage": 1, "dtype": "bf16"},
}


def held_back(member: Member, first: int, last: int, seconds: float) -> dict[str, Any]:
    """Train, while every copy in the background begins ``seconds`` late: a step that did not wait would be in it."""
    import time

    from ckpt_engine import events

    copies = []

    def wait(event: events.Event) -> None:
        if (event.name, event.phase) == ("copy", "started"):
            copies.append(event.facts["bytes"])
            time.sleep(seconds)

    remove = events.add_hook(wait)
    try:
        for step in range(first, last):
            member.save(step)
            member.train(first=step, last=step + 1)
    finally:
        remove()
    return {"copies": copies}


def accumulated(member: Member) -> dict[str, Any]:
    """A save, a micro step that must not wait, and the step at the boundary, which must."""
    import threading

    from ckpt_engine import events

    gate = threading.Event()

    def wait(event: events.Event) -> None:
        if (event.name, event.phase) == ("copy", "started"):
            gate.wait(20)

    remove = events.add_hook(wait)
    try:
        member.save(0)
        before = member.digest()["digest"]
        member.train(first=0, last=1)
        waited = gate.is_set() or member.digest()["digest"] != before
        threading.Timer(0.1, gate.set).start()
        member.train(first=1, last=2)
        return {"waited": waited, "too early": not gate.is_set(), "steps": member.engine.global_steps}
    finally:
        gate.set()
        remove()


@pytest.mark.parametrize("state", STATES)
def test_a_step_waits_for_the_copy_and_what_is_restored_is_what_was_saved(lab: Lab, state: str) -> None:
    how = STATES[state]
    team = Team(lab).start(**how, options={"staging": "overlap"})
    team.ok("train", first=0, last=3)
    at_3 = team.ok("digest")
    answers = team.run(held_back, first=3, last=4, seconds=0.1)
    ranks = answers[:1] if state == "zero0" else answers  # there only the first has something to save
    assert all(len(answer["copies"]) == 1 and answer["copies"][0] > 0 for answer in ranks)
    at_6 = team.ok("train", first=4, last=6)
    team.kill()
    team = Team(lab).start(**how, options={"staging": "overlap"})
    assert {(report["step"], report["source"]) for report in team.ok("restore")} == {(3, "memory")}
    assert team.ok("digest") == at_3
    team.ok("train", first=3, last=4)
    assert team.ok("train", first=4, last=6) == at_6
    team.commit(6)
    team.leave()


def test_gradient_accumulation_does_not_wait_and_its_boundary_does(lab: Lab) -> None:
    team = Team(lab).start(stage=1, dtype="bf16", gradient_accumulation_steps=2, options={"staging": "overlap"})
    assert team.run(accumulated) == [{"waited": False, "too early": False, "steps": 1}] * 2
    team.kill()
    team = Team(lab).start(stage=1, dtype="bf16", gradient_accumulation_steps=2)
    assert {report["step"] for report in team.ok("restore")} == {0}
    team.leave()
