"""Ranks that die while a save is copied behind the training: what was there before is what a restart finds."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults.hooks import faults
from faults.programs import do, leave, obeys, ready
from harness import Lab


def trains(me: Any, storage: bool) -> None:
    """Save 1, 2, 3 … and change what was saved after each, once it is copied."""
    weight = me.coded(0, 100_000)
    engine = me.engine(staging="overlap")
    engine.guard([weight])
    for step in range(1, 100):
        weight.copy_(me.coded(step, 100_000))
        state = {f"rank{me.rank}.pt": {"w": weight}}
        if storage:
            engine.save_to_storage(step, state)
        else:
            engine.save_to_memory(step, state)
        me.say("saved", step=step)
        engine.wait_staged()


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


LEAVES = """
import sys, time
sys.path.insert(0, sys.argv[1])
from nursery import SAVER, coded
from ckpt_engine import CheckpointEngine, SaverOptions, events
engine = CheckpointEngine(sys.argv[2], staging="overlap", saver=SaverOptions(**SAVER))
weight = coded(1, 0, 20_000)
engine.guard([weight])
events.add_hook(lambda event: time.sleep(0.3) if (event.name, event.phase) == ("copy", "started") else None)
engine.save_to_memory(1, {"rank0.pt": {"w": weight}})
raise KeyError("and nobody closes the engine")
"""


def test_an_interpreter_that_ends_without_a_close_finishes_its_copy(lab: Lab) -> None:
    here = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", LEAVES, here, lab.root], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "KeyError" in done.stderr, done.stderr
    again = ready([lab.rank(obeys, None)])[0]
    found = do(again, "restore")
    assert (found["step"], found["whole"]) == (1, True)  # from memory, or the saver was faster and made a checkpoint
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

    weight = torch.ones(1000)
    with me.engine(staging="overlap") as engine:
        engine.guard([weight])
        engine.save_to_storage(1, {"a.pt": {"w": weight}}).result(20)
        handle, told = engine.save_to_storage(2, {"a.pt": {"w": weight}}), None
        engine.wait_staged()  # says it in the log, and does not raise
        try:
            handle.result(20)
        except CkptError as error:
            told = error
        before = engine.restore().step
        engine.save_to_storage(3, {"a.pt": {"w": weight}}).result(20)
        me.say("end", error=type(told).__name__, text=str(told), then=[before, engine.restore().step])
