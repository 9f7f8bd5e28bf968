"""What a job costs does not grow: memory, descriptors, threads, segments, queues; and what it is told to end by."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from faults.counts import lives, many_saves, memory_cgroup
from faults.hooks import faults
from faults.programs import all_do, do, leave, obeys, ready
from harness import Lab, alive, kill, until
from team import committed, whole


def test_a_thousand_saves_leave_no_memory_descriptor_thread_segment_queue_or_file_behind(lab: Lab) -> None:
    print(many_saves(lab, 1000, storage_every=10))


def test_ranks_that_are_killed_again_and_again_cost_their_saver_nothing(lab: Lab) -> None:
    print(lives(lab, 12))


def test_workers_that_outlive_their_rank_hinder_neither_its_restart_nor_its_end(lab: Lab) -> None:
    """B20: a data loader forks its workers after the engine was made; they have its memory, queues and descriptors."""
    (rank,) = ready([lab.rank(obeys, {"saver": {"linger_s": 30.0}})])
    do(rank, "storage", step=1)
    workers = [do(rank, "fork", seconds=60)["child"] for _ in range(2)]
    do(rank, "memory", step=2)
    rank.kill()
    (again,) = ready([lab.rank(obeys)])
    assert do(again, "restore")["step"] == 2
    assert do(again, "storage", step=3)["error"] == ""
    assert do(again, "result", step=3)["error"] == ""
    leave([again])
    until(lambda: not lab.savers() and not lab.left(), 5, lab.saver_log())
    assert all(alive(pid) for pid in workers)
    for pid in workers:
        kill(pid)


def has_handlers(me: Any) -> None:
    """A user's own handlers, one that reaps every child among them, before the engine is made."""
    seen: list[int] = []

    def reaps(number: int, frame: Any) -> None:
        seen.append(number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def notes(number: int, frame: Any) -> None:
        seen.append(number)

    mine = {signal.SIGCHLD: reaps, signal.SIGTERM: notes, signal.SIGINT: notes, signal.SIGUSR1: notes}
    for number, handler in mine.items():
        signal.signal(number, handler)
    with me.engine() as engine:
        for step in range(1, 6):
            handle = engine.save_to_storage(step, {"w.pt": {"w": me.coded(step, 1000)}})
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            handle.result(30)
            me.say("saved")
            me.hear("go")
    kept = all(signal.getsignal(number) is handler for number, handler in mine.items())
    me.say("done", kept=kept, seen={str(int(number)): seen.count(number) for number in mine})


def test_the_users_signal_handlers_stay_and_work_even_one_that_reaps_our_saver(lab: Lab) -> None:
    rank = lab.rank(has_handlers)
    for step in range(1, 6):
        rank.expect("saved")
        if step in (2, 4):
            saver = lab.saver()
            assert saver
            kill(saver)
        rank.tell("go")
    told = rank.expect("done")
    assert told["kept"]
    seen = told["seen"]
    assert [seen[str(int(number))] for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == [5, 5, 5], seen
    assert seen[str(int(signal.SIGCHLD))] >= 2
    rank.end()


def test_a_preempted_node_has_its_newest_snapshot_on_disk_before_the_saver_ends(lab: Lab) -> None:
    """SIGTERM to all of them at once, 30 s to live, and a storage save still on its way."""
    env = faults("persist:started:*:delay=0.3")
    ranks = ready(lab.ranks(obeys, {"saver": {"term_s": 30.0, "linger_s": 30.0}}, world=2, env=env))
    all_do(ranks, "storage", step=1)
    all_do(ranks, "memory", step=2)
    saver = lab.saver()
    assert saver
    begin = time.monotonic()
    for pid in (*(rank.pid for rank in ranks), saver):
        os.kill(pid, signal.SIGTERM)
    until(lambda: not alive(saver), 25, lab.saver_log())
    assert committed(lab.root)[0][0] == 2 and whole(lab.root), f"{committed(lab.root)}\n{lab.saver_log()}"
    assert time.monotonic() - begin < 25 and "is not committed" not in lab.saver_log()
    lab.clear()  # the node is gone, and what was in its memory
    ranks = ready(lab.ranks(obeys, world=2))
    for found in all_do(ranks, "restore"):
        assert (found["step"], found["source"], found["whole"]) == (2, "storage", True)
    leave(ranks)


def test_a_saver_whose_time_after_sigterm_is_too_short_says_what_is_only_in_memory(lab: Lab) -> None:
    env = faults("persist:started:2:delay=20", once=str(lab.dir / "once"))
    (rank,) = ready([lab.rank(obeys, {"saver": {"term_s": 0.5}}, env=env)])
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == ""
    do(rank, "memory", step=2)
    saver = lab.saver()
    assert saver
    os.kill(rank.pid, signal.SIGTERM)
    os.kill(saver, signal.SIGTERM)
    until(lambda: not alive(saver), 15, lab.saver_log())
    said = [line for line in lab.saver_log().splitlines() if "is not committed" in line]
    assert len(said) == 1 and "global_step2" in said[0], lab.saver_log()
    (again,) = ready([lab.rank(obeys)])
    found = do(again, "restore")
    assert (found["step"], found["source"], found["whole"]) == (2, "memory", True)
    do(again, "memory", step=3)
    leave([again])


STATE_MIB, SAVES = 48, 12


def fits_barely(me: Any, folder: str) -> None:
    """Limit the cgroup to what two slots need and 8 MiB; then work. Pages that were only ever read cost nothing."""
    import mmap

    import torch

    from ckpt_engine.budget import GROWTH

    v1 = Path(folder, "memory.limit_in_bytes").exists()
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    pages = mmap.mmap(-1, STATE_MIB << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    state = {"w.pt": {"w": torch.frombuffer(pages, dtype=torch.uint8)}}
    with me.engine(keep_last=1) as engine:
        slots = 2 * int(STATE_MIB * GROWTH + 1) << 20
        most = int(Path(folder, used).read_text()) + slots * 16 // 15 + (8 << 20)
        Path(folder, limit).write_text(str(most))
        for step in range(1, SAVES + 1):
            engine.save_to_memory(2 * step, state)
            engine.save_to_storage(2 * step + 1, state).result(30)
        me.say("saved", limit=most, used=int(Path(folder, used).read_text()))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a memory cgroup")
def test_a_memory_limit_just_above_need_is_enough_for_two_slots_and_kills_nobody(lab: Lab) -> None:
    folder = memory_cgroup(lab.dir.name)
    try:
        rank = lab.rank(fits_barely, str(folder))
        told = rank.expect("saved", 60)
        rank.end()
        print(f"limit {told['limit'] >> 20} MiB, used {told['used'] >> 20} MiB")
        assert "one slot" not in rank.log.read_text()
        events = folder / "memory.oom_control"
        text = (events if events.exists() else folder / "memory.events").read_text()
        assert "oom_kill 0" in text, text
        until(lambda: not lab.savers(), 10)
    finally:
        lab.clear()
        until(lambda: not (folder / "cgroup.procs").read_text(), 5)
        folder.rmdir()
