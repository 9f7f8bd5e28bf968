"""Another user of the machine: what he may see, plant and hinder. uid 65534 attacks root's job, uid 4242 nobody's job.

The job's names are predictable on purpose (a restart must find them), and /dev/shm is open to everyone; so whatever
lies under a name of ours is looked at before it is used.
"""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from faults.programs import do, leave, obeys, ready
from harness import NOBODY, Lab, Process, until

from ckpt_engine import locks, messages, shm
from ckpt_engine.errors import ConfigError
from ckpt_engine.messages import DEPTH, SIZE_BYTES
from ckpt_engine.names import SHM, Names, names_for

STRANGER = 4242

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs other users")


def as_user(uid: int, act: Callable[[], object]) -> str:
    """What ``act`` raises when ``uid`` does it ("" = nothing), in a child of this process."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
        except BaseException as error:
            os.write(here, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(0)
    os.close(here)
    said = b""
    while piece := os.read(there, 4096):
        said += piece
    os.close(there)
    os.waitpid(pid, 0)
    return said.decode()


def job(lab: Lab, **options: Any) -> tuple[Process, Names]:
    """A job of uid 65534 on a root of its own."""
    Path(lab.root).mkdir(mode=0o755, exist_ok=True)
    os.chown(lab.root, NOBODY, NOBODY)
    names = names_for(root=lab.root, uid=NOBODY)
    lab._hashes.add(names.hash)
    return lab.rank(obeys, options, uid=NOBODY), names


def plant(path: Path, make: Callable[[Path], object], uid: int = STRANGER) -> None:
    make(path)
    os.chown(path, uid, uid, follow_symlinks=False)


# -- what others may see ---------------------------------------------------------------------------------------------


def masked(me: Any, mask: int, options: dict[str, Any]) -> None:
    os.umask(mask)
    obeys(me, options)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177])
def test_segments_queues_locks_and_run_directory_are_private_whatever_the_umask(lab: Lab, mask: int) -> None:
    (rank,) = ready([lab.rank(masked, mask, {})])
    assert do(rank, "storage", step=1)["error"] == "" and do(rank, "result", step=1)["error"] == ""
    names = lab.names()
    seen = {path: path.lstat() for path in [*(SHM / name for name in names.shm_files()), *names.run_dir.iterdir()]}
    assert len(seen) >= 7
    for path, status in seen.items():
        assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_uid == 0, path
    assert stat.S_IMODE(names.run_dir.lstat().st_mode) & 0o077 == 0
    for name in (names.events_queue, names.notify_queue(0)):
        queue = posix_ipc.MessageQueue(name)
        assert stat.S_IMODE(os.fstat(queue.mqd).st_mode) == 0o600
        queue.close()
    leave([rank])


def test_another_user_can_read_change_or_remove_nothing_of_a_job(lab: Lab) -> None:
    (rank,) = ready([lab.rank(obeys)])
    assert do(rank, "memory", step=1)["error"] == ""
    names = lab.names()
    for name in names.shm_files():
        for flags in (os.O_RDONLY, os.O_WRONLY):
            assert "PermissionError" in as_user(NOBODY, lambda n=name, f=flags: os.open(SHM / n, f))  # type: ignore[misc]
        assert "PermissionError" in as_user(NOBODY, lambda n=name: os.unlink(SHM / n))  # type: ignore[misc]
        assert "PermissionError" in as_user(NOBODY, lambda n=name: os.rename(SHM / n, SHM / "mine"))  # type: ignore[misc]
    for act in (
        lambda: os.listdir(names.run_dir),
        lambda: os.rename(names.run_dir, SHM / "mine"),
        lambda: os.symlink("/etc/passwd", names.saver_log),
        lambda: os.symlink("/etc/passwd", names.rank_lock(1)),
        lambda: os.mkdir(names.restore_dir("0123abcd")),
        lambda: os.open(names.spawn_lock, os.O_RDWR),
    ):
        assert "PermissionError" in as_user(NOBODY, act)
    for name in (names.events_queue, names.notify_queue(0)):
        assert "PermissionsError" in as_user(NOBODY, lambda n=name: posix_ipc.MessageQueue(n))  # type: ignore[misc]
        assert "PermissionsError" in as_user(NOBODY, lambda n=name: posix_ipc.unlink_message_queue(n))  # type: ignore[misc]
    assert "PermissionError" in as_user(NOBODY, lambda: os.kill(rank.pid, 9))
    assert "PermissionError" in as_user(NOBODY, lambda: os.listdir(f"/proc/{rank.pid}/fd")), "memfds are private"
    leave([rank])


DEFAULT_ACL = struct.pack("<I" + "HHI" * 5, 2, *(
    1, 7, 0xFFFFFFFF,  # owner
    2, 5, STRANGER,  # this user reads
    4, 7, 0xFFFFFFFF, 16, 7, 0xFFFFFFFF, 32, 5, 0xFFFFFFFF,  # group, mask, others
))  # fmt: skip


@pytest.mark.parametrize("acl", [False, True])
def test_checkpoint_files_follow_umask_setgid_and_default_acls_as_torch_save_would(lab: Lab, acl: bool) -> None:
    root = Path(lab.root)
    root.mkdir()
    os.chown(root, 0, 7777)
    root.chmod(0o2775)
    if acl:
        try:
            os.setxattr(root, "system.posix_acl_default", DEFAULT_ACL)
        except OSError as error:
            pytest.skip(f"no ACLs here: {error}")
    (rank,) = ready([lab.rank(masked, 0o002, {})])
    assert do(rank, "storage", step=1)["error"] == "" and do(rank, "result", step=1)["error"] == ""
    probe = root / "probe"
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; os.umask(2); open(sys.argv[1], 'w'); os.mkdir(sys.argv[1] + 'd')",
            probe,
        ],
        check=True,
    )
    file, folder = probe.stat().st_mode, Path(f"{probe}d").stat().st_mode
    seen = [path for path in root.rglob("*") if not path.name.startswith("probe")]
    assert len(seen) >= 5
    for path in seen:
        status = path.lstat()
        assert status.st_gid == 7777, f"{path} lost the group of its root"
        assert stat.S_IMODE(status.st_mode) == stat.S_IMODE(folder if path.is_dir() else file), path
        assert not acl or "system.posix_acl_access" in os.listxattr(path), path
    leave([rank])


# -- what others may plant -------------------------------------------------------------------------------------------


SQUATS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(bytes(8 << 20)),
    "an open file": lambda path: (path.write_bytes(bytes(65536)), path.chmod(0o666)),
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link loop": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
}


@pytest.mark.parametrize("what", SQUATS)
def test_whatever_a_stranger_plants_under_names_of_slots_and_ranks_hinders_nobody(lab: Lab, what: str) -> None:
    names = names_for(root=lab.root, uid=NOBODY)
    planted = [SHM / str(names.segment(rank, slot, edition))[1:] for rank, slot, edition in (
        (0, 0, 1), (0, 1, 1), (0, 0, 999_999), (0, 1, 7), (3, 0, 1))]  # fmt: skip
    planted += [SHM / names.rank_control(number)[1:] for number in (1, 63, 999_999)]
    for path in planted:
        plant(path, SQUATS[what])
    before = Path("/etc/passwd").read_bytes()
    try:
        rank, _ = job(lab)
        ready([rank])
        for step in (1, 2, 3):
            assert do(rank, "storage", step=step)["error"] == ""
            assert do(rank, "result", step=step)["error"] == ""
        assert do(rank, "memory", step=4)["error"] == ""
        assert "Traceback" not in lab.saver_log(names)
        begin = os.times().elapsed
        leave([rank])
        until(lambda: not lab.savers(), 15, "the saver leaves as ever: nobody died")
        assert os.times().elapsed - begin < 10
        assert not names.run_dir.exists() and not (Path(lab.root) / "global_step4").exists()
        assert all(os.path.lexists(path) for path in planted), "a user's saver removed what is not his"
    finally:
        for path in planted:
            (path.rmdir if path.is_dir() and not path.is_symlink() else path.unlink)()
    assert Path("/etc/passwd").read_bytes() == before


@pytest.mark.parametrize("what", SQUATS)
@pytest.mark.parametrize("where", ["rank page", "saver page", "run directory"])
def test_a_name_that_a_job_needs_for_itself_is_refused_with_its_path_and_nothing_is_touched(
    lab: Lab, where: str, what: str
) -> None:
    names = names_for(root=lab.root, uid=NOBODY)
    pages = {"rank page": SHM / names.rank_control(0)[1:], "saver page": SHM / names.saver_control[1:]}
    path = pages.get(where, names.run_dir)
    plant(path, SQUATS[what])
    mark = path.lstat()
    try:
        rank, _ = job(lab)
        said = rank.expect("raised", 40)
        assert said["type"] in ("ConfigError", "SaverUnavailable") and str(path) in said["text"], said
        rank.join()
        assert path.lstat().st_ino == mark.st_ino and path.lstat().st_mtime_ns == mark.st_mtime_ns
    finally:
        (path.rmdir if path.is_dir() and not path.is_symlink() else path.unlink)()
    lab.clear()


def test_queues_that_a_stranger_made_are_not_used_and_all_works_a_little_later(lab: Lab) -> None:
    names = names_for(root=lab.root, uid=NOBODY)
    boxes = []
    for name in (names.events_queue, names.notify_queue(0)):
        box = posix_ipc.MessageQueue(
            name, posix_ipc.O_CREX, mode=0o666, max_messages=DEPTH, max_message_size=SIZE_BYTES
        )
        os.fchmod(box.mqd, 0o666)
        os.fchown(box.mqd, STRANGER, STRANGER)
        box.send(b"\x93\xa4wake\xa4leave\x00")
        boxes.append(box)
    try:
        rank, _ = job(lab)
        ready([rank])
        assert do(rank, "storage", step=1)["error"] == "" and do(rank, "result", step=1)["error"] == ""
        assert [box.current_messages for box in boxes] == [1, 1], "a stranger's queue was read or written"
        assert f"belongs to uid {STRANGER}" in rank.log.read_text()
        leave([rank])
        until(lambda: not lab.savers(), 15)
    finally:
        for box in boxes:
            box.close()
            box.unlink()


def test_a_link_to_a_directory_of_ours_in_place_of_the_run_directory_is_refused(lab: Lab) -> None:
    """It is ours once it is followed: only the name itself tells."""
    names = names_for(root=lab.root, uid=NOBODY)
    own = lab.dir / "own"
    own.mkdir(mode=0o700)
    os.chown(own, NOBODY, NOBODY)
    plant(names.run_dir, lambda path: path.symlink_to(own))
    try:
        rank, _ = job(lab)
        assert str(names.run_dir) in rank.expect("raised")["text"]
        rank.join()
        assert os.listdir(own) == []
    finally:
        names.run_dir.unlink()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    names = Names("5ec0000000000000"[:12] + f"{os.getpid() & 0xFFFF:04x}")
    locks.make_run_dir(names.run_dir)
    yield names.run_dir
    for path in names.run_dir.iterdir():
        path.unlink()
    names.run_dir.rmdir()


def test_a_lock_file_of_another_user_is_refused_he_could_hold_the_dead_alive(run_dir: Path) -> None:
    path = run_dir / "saver.lock"
    path.touch(0o600)
    os.chown(path, NOBODY, NOBODY)
    for act in (lambda: locks.holder(path), lambda: locks.lock_file(path).try_lock()):
        with pytest.raises(ConfigError, match=f"belongs to uid {NOBODY}"):
            act()


def test_a_link_or_a_pipe_in_place_of_a_lock_file_is_an_error_and_no_wait(run_dir: Path) -> None:
    link, pipe = run_dir / "rank-0.lock", run_dir / "rank-1.lock"
    link.symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        locks.lock_file(link).try_lock()
    with pytest.raises(OSError):
        locks.holder(link)
    os.mkfifo(pipe, 0o600)
    assert locks.holder(pipe) is None


def test_the_log_of_a_saver_is_never_written_through_a_link(lab: Lab) -> None:
    names = lab.names()
    locks.make_run_dir(names.run_dir)
    target = lab.dir / "target"
    target.touch()
    names.saver_log.symlink_to(target)
    rank = lab.rank(obeys)
    said = rank.expect("raised")
    assert said["type"] == "SaverUnavailable", said
    rank.join()
    assert target.read_bytes() == b""
    lab.clear()


def test_shared_memory_of_another_user_is_neither_mapped_nor_removed(lab: Lab) -> None:
    name = f"/ckpt-test-foreign-{os.getpid()}"
    path = Path("/dev/shm" + name)
    plant(path, lambda p: (p.write_bytes(bytes(8192)), p.chmod(0o666)))
    try:
        with pytest.raises(ConfigError, match=f"belongs to uid {STRANGER}"):
            shm.open_existing(name)
        assert as_user(NOBODY, lambda: shm.unlink(name)) == "" and path.exists()
        assert "ConfigError" in as_user(NOBODY, lambda: shm.open_existing(name))
    finally:
        path.unlink()
    messages.unlink(name)


def test_gc_steps_over_what_others_planted_under_our_names(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_engine import cli

    names = lab.names()
    monkeypatch.setattr(cli, "_hashes", lambda: [names.hash])  # what other jobs left on this machine is not ours
    own = shm.create(names.rank_control(0), 65536)
    own.close()
    foreign = SHM / str(names.segment(0, 0, 1))[1:]
    plant(foreign, lambda path: path.symlink_to("/etc/passwd"))
    plant(names.run_dir, os.mkdir)
    assert cli.main(["gc", "--delete"]) == 0
    assert names.run_dir.exists()
    lab.clear()
