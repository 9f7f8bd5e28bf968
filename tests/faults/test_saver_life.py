"""How a saver comes, stays and goes: started by anybody, stopped, replaced, told to leave, and never for ever."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faults.hooks import faults
from faults.programs import all_do, do, leave, obeys, ready
from harness import Lab, alive, until

PACKAGE_PARENT = Path(__file__).resolve().parent.parent.parent


def starts_at_once(me: Any, rounds: int) -> None:
    """Make and leave an engine of a name of its own again and again, when told."""
    for _ in range(rounds):
        name = me.hear("start")["name"]
        with me.engine(name=name) as engine:
            me.say("up", saver=engine._core.link.saver().pid)
            me.hear("leave")
        me.say("down")


def test_eight_processes_that_start_at_once_end_up_with_exactly_one_saver(lab: Lab) -> None:
    rounds = 20
    ranks = [lab.rank(starts_at_once, rounds, rank=rank, world=8, group=str(lab.dir / "group")) for rank in range(8)]
    for number in range(rounds):
        for rank in ranks:
            rank.tell("start", name=f"n{number}")
        pids = {rank.expect("up")["saver"] for rank in ranks}
        assert len(pids) == 1
        until(lambda: len(lab.savers()) == 1, 5)
        for rank in ranks:
            rank.tell("leave")
        for rank in ranks:
            rank.expect("down")
        until(lambda: not lab.savers(), 10)
    for rank in ranks:
        rank.end()


def test_a_stopped_saver_makes_no_wait_longer_than_its_deadline_and_goes_on_when_it_continues(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys, {"wait_s": 0.7, "slots": 1})])
    saver = lab.saver()
    assert saver
    os.kill(saver, signal.SIGSTOP)
    assert do(rank, "storage", step=1)["error"] == ""
    end = do(rank, "result", step=1, timeout_s=0.5)
    assert end["error"] == "CommitTimeout" and 0.4 < end["seconds"] < 2 and end["missing_ranks"] == [0]
    busy = do(rank, "storage", step=2)
    assert busy["error"] == "BufferBusy" and 0.6 < busy["seconds"] < 2.2 and "global_step1" in busy["attempt"]
    os.kill(saver, signal.SIGCONT)
    assert do(rank, "result", step=1)["error"] == ""
    assert do(rank, "storage", step=3)["error"] == ""
    assert do(rank, "result", step=3)["error"] == ""
    assert lab.saver() == saver
    leave([rank])


def test_a_saver_of_another_version_is_asked_to_leave_and_replaced(lab: Lab) -> None:
    names = lab.names()
    process = run_saver(lab, "--stay", env=faults(pretend="0.0.9/1"))
    until(lambda: (page := lab.saver_page(names)) and page.ready, 5)
    assert lab.saver() == process.pid
    (rank,) = ready([lab.rank(obeys)])
    assert process.wait(10) == 0
    page = lab.saver_page()
    assert page and page.version != "0.0.9/1" and page.pid == lab.saver()
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == ""
    leave([rank])


def run_saver(lab: Lab, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """``ckpt-engine saver run`` as a person or a service would start it."""
    path = os.pathsep.join([str(PACKAGE_PARENT), str(PACKAGE_PARENT / "tests")])
    command = [sys.executable, "-m", "ckpt_engine.saver", "run", "--root", lab.root, *options]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **(env or {})}, stderr=subprocess.DEVNULL)


def test_a_saver_that_was_told_to_stay_outlives_clean_ends_and_leaves_on_sigterm(lab: Lab) -> None:
    saver = run_saver(lab, "--stay", "--options", '{"grace_s": 0.2, "linger_s": 0.2}')
    until(lambda: (page := lab.saver_page()) and page.ready, 5)
    for step in (1, 2):
        (rank,) = ready([lab.rank(obeys)])
        assert lab.saver() == saver.pid
        do(rank, "storage", step=step)
        assert do(rank, "result", step=step)["error"] == ""
        leave([rank])
    assert saver.poll() is None
    saver.terminate()
    assert saver.wait(5) == 0
    lab.clear()  # a service that is stopped keeps its snapshots for its successor


def test_a_second_saver_by_hand_leaves_at_once(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    assert run_saver(lab).wait(10) == 3
    leave([rank])


def breaks_python(me: Any) -> None:
    """Whatever is started with this Python ends at once."""
    sys.executable = me.dir + "/python"
    Path(sys.executable).write_text("#!/bin/sh\necho no module named sense >&2\nexit 1\n")
    os.chmod(sys.executable, 0o755)
    obeys(me)


def no_python(me: Any) -> None:
    sys.executable = me.dir + "/no-such-python"
    obeys(me)


def log_is_a_directory(me: Any) -> None:
    from ckpt_engine.locks import make_run_dir
    from ckpt_engine.names import names_for

    names = names_for(root=me.root)
    make_run_dir(names.run_dir)
    names.saver_log.mkdir()
    obeys(me)


@pytest.mark.parametrize("program", [breaks_python, no_python, log_is_a_directory])
def test_a_saver_that_cannot_start_is_an_error_that_names_its_log_and_blocks_nobody(lab: Lab, program: Any) -> None:
    rank = lab.rank(program)
    said = rank.expect("raised", 5)
    assert said["type"] == "SaverUnavailable"
    assert any(word in said["text"] for word in ("saver.log", "no-such-python")), said
    if program is breaks_python:
        assert "no module named sense" in said["text"]
    rank.join()
    lab.clear()


def test_sigterm_persists_the_newest_common_snapshot_within_its_budget(lab: Lab) -> None:
    ranks = ready(lab.ranks(obeys, world=2))
    all_do(ranks, "memory", step=1)
    all_do(ranks, "memory", step=2)
    saver = lab.saver()
    assert saver
    begin = time.monotonic()
    os.kill(saver, signal.SIGTERM)
    manifest = Path(lab.root, "global_step2", "MANIFEST.json")
    until(manifest.exists, 5, lab.saver_log())
    until(lambda: not alive(saver), 8)
    assert time.monotonic() - begin < 8
    assert [said["error"] for said in all_do(ranks, "storage", step=3)] == ["", ""]
    assert [said["error"] for said in all_do(ranks, "result", step=3)] == ["", ""]
    leave(ranks)


def test_an_exception_is_not_a_goodbye(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys, {"saver": {"linger_s": 30.0}})])
    do(rank, "memory", step=5)
    rank.tell("do", verb="raise")
    assert rank.expect("raised")["type"] == "KeyError"
    rank.join()
    (again,) = ready([lab.rank(obeys)])
    found = do(again, "restore")
    assert (found["step"], found["source"]) == (5, "memory")
    do(again, "memory", step=6)  # a goodbye of one who only read would not speak for the dead
    leave([again])


def test_the_end_of_the_interpreter_is_not_a_goodbye(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys, {"saver": {"linger_s": 30.0}})])
    do(rank, "memory", step=5)
    rank.tell("do", verb="exit")
    rank.end()
    (again,) = ready([lab.rank(obeys)])
    assert do(again, "restore")["step"] == 5
    do(again, "memory", step=6)
    leave([again])


@pytest.mark.parametrize("how", ["return", "kill"])
def test_a_trainer_that_ends_right_after_its_last_save_leaves_it_committed_and_nothing_else(lab: Lab, how: str) -> None:
    """B08: the saver is its own session and finishes what was accepted."""
    (rank,) = ready([lab.rank(obeys, env=faults("persist:started:1:delay=1"))])
    assert do(rank, "storage", step=9)["seconds"] < 0.9
    if how == "kill":
        rank.kill()
    else:
        rank.tell("do", verb="exit")
        rank.end()
    assert not Path(lab.root, "global_step9", "MANIFEST.json").exists()
    until(lambda: not lab.savers() and not lab.left(), 10, lab.saver_log())
    assert Path(lab.root, "global_step9", "MANIFEST.json").exists()


def test_a_restart_within_linger_is_served_by_the_same_saver_and_killed_savers_leave_no_zombies(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys, {"saver": {"linger_s": 30.0}})])
    do(rank, "memory", step=1)
    saver = lab.saver()
    rank.kill()
    (rank,) = ready([lab.rank(obeys)])
    assert lab.saver() == saver and saver
    assert do(rank, "restore")["step"] == 1
    for step in range(2, 7):
        saver = lab.saver()
        assert saver
        os.kill(saver, signal.SIGKILL)
        do(rank, "storage", step=step)
        assert do(rank, "result", step=step)["error"] == ""
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
    if children.exists():
        assert all(alive(int(pid)) for pid in children.read_text().split())
    leave([rank])


@pytest.mark.parametrize("verb", ["memory", "storage"])
def test_a_saver_that_died_unseen_is_replaced_by_the_next_save_though_nobody_waits_for_anything(
    lab: Lab, verb: str
) -> None:
    (rank,) = ready([lab.rank(obeys)])
    do(rank, "memory", step=1)
    saver = lab.saver()
    assert saver
    os.kill(saver, signal.SIGKILL)
    until(lambda: not alive(saver), 5)
    assert do(rank, verb, step=2)["error"] == ""
    if verb == "memory":  # the death of its rank finds somebody who saves for it
        rank.kill()
    until(Path(lab.root, "global_step2", "MANIFEST.json").exists, 10, lab.saver_log())
    if verb == "storage":
        leave([rank])
    until(lambda: not lab.savers() and not lab.left(), 10, lab.saver_log())


def test_a_worker_forked_from_a_rank_does_not_keep_it_alive(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    do(rank, "memory", step=3)
    child = do(rank, "fork", seconds=60)["child"]
    rank.kill()
    until(lambda: Path(lab.root, "global_step3", "MANIFEST.json").exists(), 10, lab.saver_log())
    until(lambda: not lab.savers() and not lab.left(), 10)
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_storage_that_is_gone_keeps_the_snapshot_in_memory_after_the_saver_has_left(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys, {"saver": {"retry_s": 0.3}})])
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == ""
    do(rank, "storage", step=2)
    do(rank, "result", step=2)
    os.rename(lab.root, lab.root + ".away")
    Path(lab.root).write_text("not a directory")
    assert do(rank, "memory", step=3)["error"] == ""
    rank.kill()
    until(lambda: not lab.savers(), 15, lab.saver_log())
    assert any("-s0-" in name or "-s1-" in name for name in lab.left())
    os.unlink(lab.root)
    os.rename(lab.root + ".away", lab.root)
    (again,) = ready([lab.rank(obeys)])
    found = do(again, "restore")
    assert (found["step"], found["source"], found["whole"]) == (3, "memory", True)
    leave([again])


def test_a_write_that_fails_is_reported_and_its_snapshot_is_persisted_at_the_end(lab: Lab) -> None:
    env = faults("persist:started:2:raise=28", once=str(lab.dir / "once"))
    (rank,) = ready([lab.rank(obeys, {"saver": {"retry_s": 0.2}}, env=env)])
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == ""
    do(rank, "storage", step=2)
    end = do(rank, "result", step=2)
    assert end["error"] == "StorageError" and end["errno"] == 28, end
    leave([rank])
    until(lambda: not lab.savers() and not lab.left(), 10, lab.saver_log())
    assert Path(lab.root, "global_step2", "MANIFEST.json").exists()


def test_the_run_directory_and_all_segments_removed_under_a_live_job_are_made_anew(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    do(rank, "storage", step=1)
    assert do(rank, "result", step=1)["error"] == ""
    before = lab.saver()
    for name in lab.left():  # what logind's RemoveIPC does
        if name.startswith("/dev/shm/") and os.path.isfile(name):
            os.unlink(name)
    for file in Path(lab.names().run_dir).iterdir():
        file.unlink()
    Path(lab.names().run_dir).rmdir()
    assert do(rank, "memory", step=2)["error"] == ""
    assert do(rank, "storage", step=3)["error"] == ""
    assert do(rank, "result", step=3)["error"] == ""
    until(lambda: len(lab.savers()) == 1, 5)
    assert before is not None
    (again,) = [lab.rank(obeys)]
    assert again.expect("raised")["type"] == "ConfigError"  # the rank holds its lock again
    again.join()
    leave([rank])


def test_a_saver_is_ready_soon_and_small_and_knows_neither_torch_nor_pickle(lab: Lab) -> None:
    modules = subprocess.run(
        [sys.executable, "-c", "import ckpt_engine.saver.__main__, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "pickle", "_pickle", "numpy", "multiprocessing"} & set(modules)
    times = []
    for number in range(5):
        names = lab.names(name=f"n{number}")
        begin = time.monotonic()
        saver = run_saver(lab, "--name", f"n{number}", "--options", '{"grace_s": 0.5}')
        until(lambda: (page := lab.saver_page(names)) and page.ready, 5)  # noqa: B023
        times.append(time.monotonic() - begin)
        rss = next(
            int(x.split()[1]) for x in Path(f"/proc/{saver.pid}/status").read_text().splitlines() if "VmRSS" in x
        )
        assert rss < 40_000, f"{rss} kB"
        assert saver.wait(5) == 0
    print(f"ready after {statistics.median(times):.3f} s (median of 5), {rss} kB")
    assert statistics.median(times) < 2.0


def test_stall_is_reported_while_the_write_hangs_and_the_slot_comes_back_later(lab: Lab) -> None:
    env = faults("persist:started:1:delay=2.5", once=str(lab.dir / "once"))
    (rank,) = ready([lab.rank(obeys, {"saver": {"stall_s": 0.5}}, env=env)])
    do(rank, "storage", step=1)
    end = do(rank, "result", step=1)
    assert end["error"] == "AttemptFailed" and "stalled" in end["text"] and end["seconds"] < 2.4, end
    assert do(rank, "memory", step=2)["error"] == ""
    do(rank, "storage", step=3)
    assert do(rank, "result", step=3)["error"] == ""
    leave([rank])
