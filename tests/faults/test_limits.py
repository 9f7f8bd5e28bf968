"""What the machine refuses, shared memory, queues, what others own: an error that names the limit, or a way round."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from faults.counts import memory_cgroup
from faults.programs import all_do, do, leave, obeys, ready
from harness import NOBODY, Lab, Process, until

MIB = (1 << 20) // 8  # elements of a coded tensor in one MiB

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs namespaces and other users")


def within(lab: Lab, size: str) -> Process:
    return lab.small_shm(size)


def end(lab: Lab, space: Process) -> None:
    """Let the namespace, and with it all that is in it, go."""
    until(lambda: not lab.savers(), 15, "savers")
    space.tell("end")
    space.end()


def test_a_state_larger_than_dev_shm_is_an_error_before_the_first_byte_and_a_smaller_one_works(lab: Lab) -> None:
    space = within(lab, "4m")
    (rank,) = ready([lab.rank(obeys, within=space)])
    said = do(rank, "memory", step=1, count=64 * MIB)
    assert said["error"] == "ShmFull" and said["limit"] == "/dev/shm" and said["need_bytes"] > 64 << 20, said
    assert said["free_bytes"] < 4 << 20 and "--shm-size" in said["text"]
    assert do(rank, "memory", step=2, count=MIB // 4)["error"] == ""
    assert do(rank, "storage", step=3, count=MIB // 4)["error"] == ""
    assert do(rank, "result", step=3)["error"] == ""
    leave([rank])
    end(lab, space)


def test_room_for_one_slot_only_is_a_warning_and_works(lab: Lab) -> None:
    space = within(lab, "8m")
    (rank,) = ready([lab.rank(obeys, within=space)])
    for step in (1, 2, 3):
        assert do(rank, "storage", step=step, count=4 * MIB)["error"] == ""
        assert do(rank, "result", step=step)["error"] == ""
    assert "going on with one slot per rank" in rank.log.read_text()
    leave([rank])
    end(lab, space)


def test_only_the_fourth_rank_does_not_fit_and_all_ranks_learn_it(lab: Lab) -> None:
    space = within(lab, "24m")
    ranks = ready(lab.ranks(obeys, world=4, within=space))
    for number, rank in enumerate(ranks):
        rank.tell("do", verb="storage", step=1, count=40 * MIB if number == 3 else MIB)
    said = [rank.expect("storage") for rank in ranks]
    assert [one["error"] for one in said] == ["", "", "", "ShmFull"], said
    ends = all_do(ranks[:3], "result", step=1)
    assert all(one["error"] == "AttemptFailed" and one["rank"] == 3 and one["seconds"] < 5 for one in ends), ends
    assert all("/dev/shm cannot hold" in one["text"] for one in ends), ends
    assert [one["error"] for one in all_do(ranks, "storage", step=2, count=MIB)] == [""] * 4
    assert [one["error"] for one in all_do(ranks, "result", step=2)] == [""] * 4
    leave(ranks)
    end(lab, space)


def test_a_state_that_outgrows_its_slot_gets_a_larger_one_where_there_is_room(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    for step, count in enumerate((MIB, MIB, 3 * MIB, 3 * MIB, 9 * MIB, MIB), 1):
        assert do(rank, "storage", step=step, count=count)["error"] == ""
        assert do(rank, "result", step=step)["error"] == ""
    segments = [name for name in lab.left() if "-s0-" in name or "-s1-" in name]
    until(lambda: len([name for name in lab.left() if "-s0-" in name or "-s1-" in name]) == 2, 5, str(segments))
    rank.kill()
    (again,) = ready([lab.rank(obeys)])
    assert do(again, "restore", count=MIB)["whole"]
    leave([again])


def test_growth_without_room_for_old_and_new_gives_the_old_memory_back_first(lab: Lab) -> None:
    space = within(lab, "20m")
    ranks = ready(lab.ranks(obeys, world=2, within=space))
    for step in (1, 2):
        assert [one["error"] for one in all_do(ranks, "memory", step=step, count=3 * MIB)] == ["", ""]
    said = all_do(ranks, "storage", step=3, count=4 * MIB)
    assert [one["error"] for one in said] == ["", ""], said
    assert [one["error"] for one in all_do(ranks, "result", step=3)] == ["", ""]
    leave(ranks)
    end(lab, space)


def test_growth_with_room_for_one_slot_only_goes_on_with_one(lab: Lab) -> None:
    space = within(lab, "14m")
    ranks = ready([lab.rank(obeys, within=space)])
    for step in (1, 2):
        assert do(ranks[0], "storage", step=step, count=3 * MIB)["error"] == ""
    for step in (3, 4, 5):
        said = do(ranks[0], "storage", step=step, count=11 * MIB)
        assert said["error"] == "", said
        assert do(ranks[0], "result", step=step)["error"] == ""
    assert "slots=1 from now on" in ranks[0].log.read_text()
    ranks[0].kill()
    (again,) = ready([lab.rank(obeys, within=space)])
    assert (said := do(again, "restore", count=11 * MIB))["whole"] and said["step"] == 5, said
    leave([again])
    end(lab, space)


def test_growth_with_room_for_two_of_three_slots_goes_on_with_two(lab: Lab) -> None:
    space = within(lab, "29m")
    (rank,) = ready([lab.rank(obeys, {"slots": 3}, within=space)])
    for step in (1, 2, 3):
        assert do(rank, "memory", step=step, count=3 * MIB)["error"] == ""
    for step in (4, 5, 6, 7):
        assert (said := do(rank, "memory", step=step, count=11 * MIB))["error"] == "", said
    told = rank.log.read_text()
    assert "slots=2 from now on" in told and "slots=1 from now on" not in told
    leave([rank])
    end(lab, space)


def test_growth_beyond_every_limit_is_an_error_and_a_smaller_state_works_again(lab: Lab) -> None:
    space = within(lab, "12m")
    (rank,) = ready([lab.rank(obeys, within=space)])
    for step in (1, 2):
        assert do(rank, "memory", step=step, count=3 * MIB)["error"] == ""
    said = do(rank, "memory", step=3, count=40 * MIB)
    assert said["error"] == "ShmFull" and said["limit"] == "/dev/shm" and said["seconds"] < 5, said
    assert do(rank, "storage", step=4, count=3 * MIB)["error"] == ""
    assert do(rank, "result", step=4)["error"] == ""
    leave([rank])
    end(lab, space)


def in_a_cgroup(me: Any, folder: str) -> None:
    """Live in a memory cgroup of 160 MiB; the states themselves are pages never touched, which cost nothing."""
    import mmap

    import torch

    from ckpt_engine.errors import ShmFull

    def untouched(mib: int) -> Any:
        pages = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)

    limit = "memory.limit_in_bytes" if Path(folder, "memory.limit_in_bytes").exists() else "memory.max"
    Path(folder, limit).write_text(str(160 << 20))
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    with me.engine() as engine:
        engine.save_to_memory(1, {"a": untouched(64)})
        try:
            engine.save_to_memory(2, {"a": untouched(300)})
        except ShmFull as error:
            me.say("full", limit=error.limit, need=error.need_bytes)
        engine.save_to_storage(3, {"a": untouched(64)}).result(30)
        me.say("saved")


def test_a_memory_cgroup_is_an_error_that_names_it_and_never_an_oom_kill(lab: Lab) -> None:
    folder = memory_cgroup(lab.dir.name)
    try:
        rank = lab.rank(in_a_cgroup, str(folder))
        said = rank.expect("full")
        assert str(folder) in said["limit"] and said["need"] > 300 << 20
        rank.expect("saved")
        assert "going on with one slot per rank" in rank.log.read_text()
        rank.end()
        until(lambda: not lab.savers(), 10)
    finally:
        lab.clear()
        until(lambda: not (folder / "cgroup.procs").read_text(), 5)
        folder.rmdir()


def no_queues(me: Any, options: dict[str, Any]) -> None:
    """RLIMIT_MSGQUEUE of 0: no queue for this user (root may ignore it, so be another)."""
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    obeys(me, options)


def test_without_any_message_queue_all_works_a_little_later(lab: Lab) -> None:
    Path(lab.root).mkdir(mode=0o777)
    os.chmod(lab.root, 0o777)
    rank = lab.rank(no_queues, {"slots": 1}, uid=NOBODY)
    ready([rank])
    for step in (1, 2, 3):
        assert do(rank, "storage", step=step)["error"] == ""
    said = do(rank, "result", step=3)
    assert said["error"] == "" and said["seconds"] < 2
    assert "looking every 50 ms" in rank.log.read_text()
    leave([rank])
    until(lambda: not lab.savers(), 10)


def exhausts_queues(me: Any) -> None:
    """Take every queue that this user may have, then work; give them back at the end."""
    import posix_ipc

    taken = []
    try:
        for number in range(10_000):
            taken.append(
                posix_ipc.MessageQueue(f"/ckpt-taken-{os.getpid()}-{number}", posix_ipc.O_CREX, max_messages=10)
            )
    except (OSError, posix_ipc.Error):
        pass
    me.say("taken", count=len(taken))
    try:
        obeys(me)
    finally:
        for queue in taken:
            queue.close()
            queue.unlink()


def test_a_user_whose_queues_are_exhausted_by_others_can_save(lab: Lab) -> None:
    Path(lab.root).mkdir()
    os.chmod(lab.root, 0o777)
    nobody_else = 100_000 + os.getpid() % 100_000  # whose limit no other run of this test can exhaust
    rank = lab.rank(exhausts_queues, uid=nobody_else)
    assert 0 < rank.expect("taken")["count"] < 10_000
    ready([rank])
    assert do(rank, "storage", step=1)["error"] == ""
    assert do(rank, "result", step=1)["error"] == ""
    leave([rank])


def test_sixteen_local_ranks_fit_the_default_queue_limit_of_a_user(lab: Lab) -> None:
    Path(lab.root).mkdir()
    os.chmod(lab.root, 0o777)
    ranks = ready([lab.rank(obeys, {"name": f"r{number}"}, uid=NOBODY) for number in range(4)])
    assert [one["error"] for one in all_do(ranks, "memory", step=1)] == [""] * 4
    assert not any("looking every 50 ms" in rank.log.read_text() for rank in ranks)
    leave(ranks)


def test_two_users_on_one_root_and_node_never_meet(lab: Lab) -> None:
    Path(lab.root).mkdir()
    os.chmod(lab.root, 0o777)
    (mine,) = ready([lab.rank(obeys)])
    (other,) = ready([lab.rank(obeys, uid=NOBODY)])
    assert lab.saver() and len(lab.savers()) == 2
    for rank in (mine, other):
        assert do(rank, "memory", step=1)["error"] == ""
    leave([mine])
    assert do(other, "memory", step=2)["error"] == ""
    leave([other])


def test_a_run_directory_of_another_user_is_refused_by_name(lab: Lab) -> None:
    run_dir = lab.names().run_dir
    run_dir.mkdir()
    os.chown(run_dir, NOBODY, NOBODY)
    rank = lab.rank(obeys)
    said = rank.expect("raised")
    assert said["type"] == "ConfigError" and str(run_dir) in said["text"]
    rank.join()
    lab.clear()


def test_a_run_directory_open_to_others_is_refused_by_name(lab: Lab) -> None:
    run_dir = lab.names().run_dir
    run_dir.mkdir()
    os.chmod(run_dir, 0o755)
    rank = lab.rank(obeys)
    said = rank.expect("raised")
    assert said["type"] == "ConfigError" and "755" in said["text"]
    rank.join()
    lab.clear()


def test_what_a_crashed_job_and_strangers_left_under_our_names_does_not_hinder_a_start(lab: Lab) -> None:
    names = lab.names()
    shm = Path("/dev/shm")
    torn = shm / str(names.segment(0, 0, 1)).lstrip("/")
    torn.write_bytes(b"CKPT")  # born, never reserved
    foreign = shm / str(names.segment(0, 1, 1)).lstrip("/")
    foreign.write_bytes(bytes(8 << 20))
    os.chown(foreign, NOBODY, NOBODY)
    magic = shm / str(names.segment(1, 0, 1)).lstrip("/")
    magic.write_bytes(b"NOTASLOT" + bytes(8 << 20))
    closed = shm / str(names.segment(0, 2, 1)).lstrip("/")
    closed.write_bytes(b"CKPTSLOT" + bytes(8 << 20))
    closed.chmod(0)
    (shm / names.rank_control(0).lstrip("/")).write_bytes(b"torn")
    (rank,) = ready([lab.rank(obeys)])
    assert do(rank, "storage", step=1)["error"] == ""
    assert do(rank, "result", step=1)["error"] == ""
    assert foreign.exists()
    os.chown(foreign, 0, 0)
    leave([rank])


def test_the_same_rank_twice_is_refused_with_the_pid_of_the_first(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    second = lab.rank(obeys)
    said = second.expect("raised")
    assert said["type"] == "ConfigError" and f"pid {rank.pid}" in said["text"]
    second.join()
    assert do(rank, "memory", step=1)["error"] == ""
    leave([rank])
