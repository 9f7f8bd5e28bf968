"""One rank cannot do its part: nobody hangs, everybody is told, and the next save is a checkpoint again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from faults.hooks import faults, trace
from faults.programs import all_do, do, leave, obeys, ready
from harness import Lab, until


def next_one_commits(ranks: list[Any], step: int) -> None:
    assert [said["error"] for said in all_do(ranks, "storage", step=step)] == [""] * len(ranks)
    assert [said["error"] for said in all_do(ranks, "result", step=step)] == [""] * len(ranks)


def test_a_leaf_that_one_rank_cannot_save_fails_the_attempt_on_all_ranks_by_name(lab: Lab) -> None:
    ranks = ready(lab.ranks(obeys, world=3))
    for number, rank in enumerate(ranks):
        rank.tell("do", verb="storage", step=1, bad=number == 1)
    said = [rank.expect("storage") for rank in ranks]
    assert said[0]["error"] == said[2]["error"] == "" and said[1]["error"] not in ("", "AssertionError"), said
    for rank in (ranks[0], ranks[2]):
        end = do(rank, "result", step=1)
        assert end["error"] == "AttemptFailed" and end["rank"] == 1 and end["seconds"] < 5, end
    assert not Path(lab.root, "global_step1", "MANIFEST.json").exists()
    next_one_commits(ranks, 2)
    leave(ranks)


def test_a_rank_whose_buffers_stay_busy_is_told_and_so_are_the_others(lab: Lab) -> None:
    trail = lab.dir / "trace"
    env = faults("persist@1:started:1:delay=2", trace=str(trail))
    ranks = ready(lab.ranks(obeys, {"slots": 1, "wait_s": 0.5}, world=2, env=env))
    for number, phase in ((0, "complete"), (1, "started")):
        do(ranks[number], "storage", step=1)
        until(lambda: ("persist", number, phase) in {(e["span"], e.get("rank"), e["phase"]) for e in trace(trail)}, 10)  # noqa: B023
    assert do(ranks[0], "memory", step=2)["error"] == ""
    said = do(ranks[1], "storage", step=2)
    assert said["error"] == "BufferBusy" and said["rank"] == 1 and "PERSISTING" in said["attempt"], said
    assert [end["error"] for end in all_do(ranks, "result", step=1)] == ["", ""]
    next_one_commits(ranks, 4)
    leave(ranks)


@pytest.mark.parametrize("action", ["raise=5", "raise=28", "raise=13"])
def test_a_write_that_fails_on_one_rank_fails_the_attempt_on_all_ranks_with_its_errno(lab: Lab, action: str) -> None:
    """B14: the writer survives, the next checkpoint works without a restart."""
    env = faults(f"persist@1:started:2:{action}")
    ranks = ready(lab.ranks(obeys, {"saver": {"retry_s": 0.2}}, world=4, env=env))
    next_one_commits(ranks, 1)
    saver = lab.saver()
    all_do(ranks, "storage", step=3)
    for end in all_do(ranks, "result", step=3):
        assert end["error"] == "StorageError" and end["errno"] == int(action.partition("=")[2]), end
    assert not Path(lab.root, "global_step3", "MANIFEST.json").exists()
    next_one_commits(ranks, 4)
    assert lab.saver() == saver
    leave(ranks)
    until(lambda: not lab.left(), 10, lab.saver_log())


def test_a_saver_that_exits_in_the_middle_is_replaced_and_the_attempt_commits(lab: Lab) -> None:
    env = faults("persist@2:started:1:exit=17", once=str(lab.dir / "once"))
    ranks = ready(lab.ranks(obeys, world=4, env=env))
    next_one_commits(ranks, 1)
    leave(ranks)


def test_only_one_rank_calls_save_and_its_handle_names_the_ranks_that_did_not(lab: Lab) -> None:
    """B50: it does not block; it just never commits, and says who is missing."""
    ranks = ready(lab.ranks(obeys, world=4))
    said = do(ranks[0], "storage", step=7)
    assert said["error"] == "" and said["seconds"] < 2
    end = do(ranks[0], "result", step=7, timeout_s=1)
    assert end["error"] == "CommitTimeout" and end["missing_ranks"] == [1, 2, 3] and end["seconds"] < 2, end
    for rank in ranks[1:]:  # late, but they come
        do(rank, "storage", step=7)
    assert [end["error"] for end in all_do(ranks, "result", step=7)] == [""] * 4
    leave(ranks)


def test_a_local_write_that_takes_longer_than_commit_s_is_not_a_timeout(lab: Lab) -> None:
    env = faults("persist:started:*:delay=0.8")
    ranks = ready(lab.ranks(obeys, {"saver": {"commit_s": 1.5}}, world=3, env=env))
    next_one_commits(ranks, 1)
    leave(ranks)


def test_a_directory_that_somebody_removes_while_it_is_written_is_a_cancelled_save(lab: Lab) -> None:
    trail = lab.dir / "trace"
    env = faults("persist:started:1:delay=0.5", trace=str(trail))
    (rank,) = ready([lab.rank(obeys, env=env)])
    do(rank, "storage", step=1)
    until(lambda: any(event["span"] == "persist" for event in trace(trail)), 5)
    os.rmdir(Path(lab.root, "global_step1"))
    end = do(rank, "result", step=1)
    assert end["error"] == "Cancelled", end
    assert not Path(lab.root, "global_step1").exists()
    next_one_commits([rank], 2)
    leave([rank])


def waits_in_a_thread(me: Any) -> None:
    """``handle.result`` in threads while the main thread saves (and nobody is confused)."""
    import threading

    engine = me.engine(slots=2)
    errors: list[str] = []

    def wait(handle: Any) -> None:
        try:
            handle.result(30)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = []
    for step in range(1, 31):
        handle = engine.save_to_storage(step, {"w.pt": {"w": me.coded(step, 100)}})
        threads += [threading.Thread(target=wait, args=[handle]) for _ in range(2)]
        for thread in threads[-2:]:
            thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    me.say("done", errors=errors)


def test_results_may_be_awaited_in_threads_while_the_main_thread_saves(lab: Lab) -> None:
    rank = lab.rank(waits_in_a_thread)
    assert rank.expect("done", 60)["errors"] == []
    rank.end()


def test_signals_at_random_moments_do_no_harm(lab: Lab) -> None:
    """B57: the user's own handler runs between any two bytecodes of ours."""
    rank = lab.rank(handles_signals)
    rank.expect("ready")
    for _ in range(300):
        rank.kill(signal.SIGUSR1)
    told = rank.expect("done", 60)
    assert told["signals"] > 0 and told["published"] == told["saves"]
    rank.end()


def handles_signals(me: Any) -> None:
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with me.engine() as engine:
        me.say("ready")
        handles = [engine.save_to_storage(step, {"w.pt": {"w": me.coded(step, 1000)}}) for step in range(1, 40)]
        published = sum(handle.result(30).step > 0 for handle in handles)
    me.say("done", signals=len(seen), published=published, saves=len(handles))
