"""F3, the fault this engine was built against: a save must never overtake the saver, and nobody may wait for ever.

Four local ranks save to memory and to storage as fast as they can. Every checkpoint that is reported as committed holds
exactly its own step's bytes, whatever happens to the notifications.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from faults.hooks import faults, trace
from faults.programs import leave, obeys, ready
from harness import Lab, until
from nursery import coded

from ckpt_engine.messages import Mailbox, Released

COUNT = 512


def hurries(me: Any, rounds: int, waits: bool) -> None:
    """Rounds of both saves; every tenth checkpoint is waited for, if this rank waits at all."""
    engine = me.engine(wait_s=20.0, keep_last=2, slots=3)
    me.say("ready")
    me.hear("go")
    handles, longest = [], 0.0
    for step in range(1, rounds + 1):
        begin = time.monotonic()
        engine.save_to_memory(step, {f"rank{me.rank}.pt": {"w": me.coded(step, COUNT)}})
        handle = engine.save_to_storage(step, {f"rank{me.rank}.pt": {"w": me.coded(step, COUNT)}})
        longest = max(longest, time.monotonic() - begin)
        handles.append(handle)
        if waits and step % 10 == 0:
            handle.result(20)
    published = [handle.result(20).step for handle in handles]  # or its exception
    me.say("done", published=len(published), longest=longest)
    engine.close()


@pytest.mark.parametrize("variant", ["as it is", "one never waits", "drop", "twice", "one queue full"])
def test_saves_as_fast_as_possible_commit_exactly_their_steps_bytes(lab: Lab, variant: str) -> None:
    import torch

    rounds = 200 if variant == "as it is" else 60
    archive = lab.dir / "archive"
    env = faults(archive=f"{lab.root}:{archive}") | (
        {"CKPT_ENGINE_NOTIFY": variant} if variant in ("drop", "twice") else {}
    )
    ranks = [
        lab.rank(
            hurries,
            rounds,
            rank != 2 or variant != "one never waits",
            rank=rank,
            world=4,
            group=str(lab.dir / "g"),
            env=env,
        )
        for rank in range(4)
    ]
    for rank in ranks:
        rank.expect("ready")
    if variant == "one queue full":
        box = Mailbox(lab.names().notify_queue(2))
        while box.send(Released(0, 0, "stale")):
            pass
        box.close()
    for rank in ranks:
        rank.tell("go")
    for rank in ranks:
        said = rank.expect("done", 60)
        assert said["published"] == rounds and said["longest"] < 20, said
    for rank in ranks:
        rank.end()
    for step in range(1, rounds + 1):
        for rank_number in range(4):
            path = archive / f"global_step{step}" / f"rank{rank_number}.pt"
            found = torch.load(path, weights_only=True)["w"]
            assert torch.equal(found, coded(step, rank_number, COUNT)), (step, rank_number)


def test_with_one_slot_and_slow_storage_each_rank_is_released_by_its_own_slot_at_once(lab: Lab) -> None:
    trail = lab.dir / "trace"
    env = faults("persist:complete:*:delay=1", trace=str(trail))
    ranks = ready(lab.ranks(obeys, {"slots": 1, "saver": {"stall_s": 60.0}}, world=4, env=env))
    for rank in ranks:
        rank.tell("do", verb="storage", step=1)
    for rank in ranks:
        assert rank.expect("storage")["wait_s"] < 0.5
    for rank in ranks:
        rank.tell("do", verb="memory", step=2)
    ends = [rank.expect("memory") for rank in ranks]
    durable = {e["rank"]: e["at"] + 1 for e in trace(trail) if (e["span"], e["phase"]) == ("persist", "complete")}
    late = {number: ends[number]["at"] - durable[number] for number in range(4)}
    print("released late by", {number: f"{1000 * value:.0f} ms" for number, value in late.items()})
    assert all(value > -0.01 for value in late.values()), late
    assert sorted(late.values())[-2] < 0.05 and max(late.values()) < 0.2, late  # one may meet a busy machine
    waits = sorted(end["wait_s"] for end in ends)
    assert all(later - earlier > 0.7 for earlier, later in itertools.pairwise(waits)), waits
    for end in ends:
        assert end["waited_for"].startswith("global_step1 (") and "attempt g1-" in end["waited_for"]
    leave(ranks)


def test_a_snapshot_is_never_refilled_while_the_saver_has_it(lab: Lab) -> None:
    """B01: the saver is slow with step 100 while 101, 102, ... are saved to memory."""
    import torch

    env = faults("persist:started:*:delay=0.3")
    (rank,) = ready([lab.rank(obeys, env=env)])
    rank.tell("do", verb="storage", step=100)
    rank.expect("storage")
    for step in range(101, 110):
        rank.tell("do", verb="memory", step=step)
        assert rank.expect("memory")["error"] == ""
    rank.tell("do", verb="result", step=100)
    assert rank.expect("result")["error"] == ""
    found = torch.load(Path(lab.root, "global_step100", "rank0.pt"), weights_only=True)["w"]
    assert torch.equal(found, coded(100, 0, len(found)))
    leave([rank])
    until(lambda: not lab.left(), 5)
