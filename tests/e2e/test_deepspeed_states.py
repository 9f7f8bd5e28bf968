"""Every kind of DeepSpeed state comes back bit for bit: from memory after SIGKILL of all ranks, and from storage.

And what lies on disk is what DeepSpeed would have written, file for file and leaf for leaf, and no larger.
"""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_team import Team
from harness import Lab

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STATES = {
    **{
        f"zero{stage}-{dtype}": {"stage": stage, "dtype": dtype}
        for stage in range(4)
        for dtype in ("fp32", "bf16", "fp16")
    },
    "zero1-offload": {"stage": 1, "dtype": "bf16", "zero": OFFLOAD},
    "zero2-offload": {"stage": 2, "zero": OFFLOAD},
    "zero3-offload": {"stage": 3, "dtype": "bf16", "zero": OFFLOAD},
    "pipe-zero0": {"name": "pipe", "stage": 0},  # with bf16, DeepSpeed 0.19 cannot load what it saved: KeyError
    "pipe-zero1": {"name": "pipe", "stage": 1, "dtype": "bf16"},
    "moe-zero0": {"name": "moe", "stage": 0},
    "moe-zero1": {"name": "moe", "stage": 1, "dtype": "bf16"},
    "frozen-zero2": {"name": "frozen", "stage": 2, "dtype": "bf16"},
    "frozen-zero3": {"name": "frozen", "stage": 3},
}


@pytest.mark.parametrize("state", STATES)
def test_a_restored_engine_goes_on_bit_for_bit(lab: Lab, state: str) -> None:
    how: dict[str, Any] = STATES[state]
    team = Team(lab)
    team.ok("build", **how)
    at_3 = team.ok("train", first=0, last=3)
    team.ok("store", root=f"{lab.dir}/stock")
    team.ok("attach")
    team.commit(3)
    team.tell(0, "same_as_stock", ours=f"{lab.root}/global_step3", theirs=f"{lab.dir}/stock/global_step3")
    assert team.hear(0)["unlike"] == []
    at_5 = team.ok("train", first=3, last=5)
    team.ok("save", step=5)
    at_8 = team.ok("train", first=5, last=8)
    assert len({answer["digest"] for answer in at_3 + at_5 + at_8}) >= 3, "training changes the parameters"
    team.kill()

    team = Team(lab).start(**how)
    assert team.one("restore") | {"client": []} == {
        "step": 5,
        "source": "memory",
        "tag": "global_step5",
        "unmanaged": [],
        "skipped": 0,
        "client": [],
        "steps": 5,
    }
    assert [a["digest"] for a in team.ok("digest")] == [a["digest"] for a in at_5]
    assert team.ok("train", first=5, last=8) == at_8
    team.ok("close")

    team.start(**how, options={"job": "another job finds no snapshot"})
    report = team.one("restore", step=3)
    assert (report["step"], report["source"], report["steps"]) == (3, "storage", 3)
    assert [a["digest"] for a in team.ok("digest")] == [a["digest"] for a in at_3]
    assert team.ok("train", first=3, last=5) == at_5
    assert team.ok("train", first=5, last=8) == at_8
    team.leave()
