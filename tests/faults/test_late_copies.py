"""Ranks that die while a save is copied behind the training: what was there before is what a restart finds."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from faults.hooks import faults
from faults.programs import do, leave, obeys, ready
from harness import Lab


def trains(me: Any, storage: bool) -> None:
    """Save 1, 2, 3 … with a step after each, which waits for the copy."""
    import torch

    weight = torch.nn.Parameter(me.coded(0, 100_000).double())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    engine = me.engine(staging="overlap")
    engine.guard(optimizer)
    for step in range(1, 100):
        with torch.no_grad():
            weight.copy_(me.coded(step, 100_000))
        state = {f"rank{me.rank}.pt": {"w": weight.detach()}}
        if storage:
            engine.save_to_storage(step, state)
        else:
            engine.save_to_memory(step, state)
        me.say("saved", step=step)
        weight.grad = torch.ones_like(weight)
        optimizer.step()


@pytest.mark.parametrize(
    ("fault", "storage", "left"),
    [
        ("copy:started", True, 2),
        ("copy:complete", False, 2),
        ("seal:started", True, 2),
        ("seal:complete", False, 3),
        ("queue:complete", True, 3),
    ],
)
def test_a_rank_killed_in_a_late_copy_keeps_its_previous_snapshot(
    lab: Lab, fault: str, storage: bool, left: int
) -> None:
    rank = lab.rank(trains, storage, env=faults(f"{fault}:3:kill"))
    assert rank.join() == -signal.SIGKILL
    rank.drain()
    assert [facts["step"] for facts in rank._told][:2] == [1, 2]
    again = ready([lab.rank(obeys, None)])[0]
    found = do(again, "restore", count=100_000)
    assert (found["step"], found["source"], found["whole"]) == (left, "memory", True)
    assert do(again, "storage", step=9)["error"] == ""
    assert do(again, "result", step=9)["error"] == ""
    leave([again])


def test_a_seal_that_fails_late_fails_the_handle_and_frees_the_slot(lab: Lab) -> None:
    rank = lab.rank(fails_late, env=faults("seal:started:2:raise=5"))
    said = rank.expect("end")
    assert said["error"] == "StorageError" and "write /on/order" in said["text"] and said["then"] == [1, 3]
    rank.end()


def fails_late(me: Any) -> None:
    import torch

    from ckpt_engine.errors import CkptError

    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with me.engine(staging="overlap") as engine:
        engine.guard(optimizer)
        engine.save_to_storage(1, {"a.pt": {"w": weight}}).result(20)
        handle, told = engine.save_to_storage(2, {"a.pt": {"w": weight}}), None
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        try:
            handle.result(20)
        except CkptError as error:
            told = error
        before = engine.restore().step
        engine.save_to_storage(3, {"a.pt": {"w": weight}}).result(20)
        me.say("end", error=type(told).__name__, text=str(told), then=[before, engine.restore().step])
