"""The verbs keep their order, their errno and the file modes; one name, many writers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_model import Dying, ModelDisk, Watched, paths, refuse

from ckpt_engine import disk_names
from ckpt_engine.errors import Corrupt, StorageError, StorageFull
from ckpt_engine.storage import PosixStorage
from ckpt_engine.storage.base import create_exclusive, make_dirs, remove_tree, write_durably, write_range


@pytest.fixture
def disk() -> PosixStorage:
    return PosixStorage()


def changes(action: Callable[[Any], object], disk: Any) -> list[str]:
    watched = Dying(disk, -1)
    action(watched)
    return [verb for verb, _ in watched.changes]


def no_temps(folder: Path) -> bool:
    return not any(disk_names.is_temp(os.path.basename(path)) for path in paths(PosixStorage(), str(folder)))


def test_a_durable_write_is_temp_fsync_rename_then_fsync_of_the_directory(disk: PosixStorage, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    assert changes(lambda s: write_durably(s, path, b"1"), disk) == ["write_new", "rename", "sync_dir"]
    assert changes(lambda s: write_range(s, path, b"012", offset=1, nbytes=2), disk) == ["write_new", "rename"]
    assert Path(path).read_bytes() == b"12"
    assert changes(lambda s: create_exclusive(s, path + "y", b"1"), disk) == ["write_new", "link", "unlink", "sync_dir"]


def test_each_new_directory_is_followed_by_fsync_of_its_parent(disk: PosixStorage, tmp_path: Path) -> None:
    watched = Dying(disk, -1)
    make_dirs(watched, str(tmp_path / "a" / "b"))
    made = [(verb, os.path.relpath(args[0], tmp_path)) for verb, args in watched.changes]
    assert made[-4:] == [("make_dir", "a"), ("sync_dir", "."), ("make_dir", "a/b"), ("sync_dir", "a")]
    assert changes(lambda s: make_dirs(s, str(tmp_path / "a" / "b")), disk) == ["make_dir", "sync_dir"]


def test_write_range_goes_straight_from_the_slot_and_counts_progress(disk: PosixStorage, tmp_path: Path) -> None:
    source = bytearray(os.urandom(3 << 20))
    progress = bytearray(16)
    write_range(disk, str(tmp_path / "x"), source, offset=4096, nbytes=(2 << 20) + 5, progress=(progress, 8))
    assert (tmp_path / "x").read_bytes() == source[4096 : 4096 + (2 << 20) + 5]
    assert int.from_bytes(progress[8:], "little") >= (2 << 20) + 5


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_a_failed_write_leaves_the_old_file_no_temp_and_is_retried_into_a_new_one(
    disk: PosixStorage, tmp_path: Path, number: int
) -> None:
    path = str(tmp_path / "x")
    write_durably(disk, path, b"old")
    temps: list[str] = []

    def fail_once(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "write_new":
            temps.append(args[0])
            if len(temps) == 1:
                disk.write_new(args[0], b"ne")
                raise refuse("fsync", args[0], number)

    failing = Watched(disk, fail_once)
    with pytest.raises(StorageError) as caught:
        write_durably(failing, path, b"new")
    assert caught.value.errno == number and isinstance(caught.value, StorageFull) == (number == errno.ENOSPC)
    assert Path(path).read_bytes() == b"old" and no_temps(tmp_path)
    write_durably(failing, path, b"new")
    assert Path(path).read_bytes() == b"new" and temps[0] != temps[1]


def test_every_error_keeps_its_errno_and_its_cause(disk: PosixStorage, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "x")
    attempts: list[Callable[[], object]] = [
        lambda: disk.write_new(missing, b""),
        lambda: disk.rename(missing, missing),
        lambda: disk.link(missing, missing),
        lambda: disk.make_dir(missing),
        lambda: disk.sync_dir(missing),
        lambda: disk.sync_file(missing),
        lambda: disk.read_into(missing, bytearray(1), offset=0, nbytes=1),
        lambda: disk.crc_of_file(missing),
        lambda: disk.free_bytes(missing),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError) as caught:
            attempt()
        assert caught.value.errno == errno.ENOENT and isinstance(caught.value.__cause__, OSError)
        assert caught.value.path == missing


def test_not_there_is_an_answer(disk: PosixStorage, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "x")
    (tmp_path / "file").touch()
    for path in (missing, str(tmp_path / "file" / "x")):
        assert disk.unlink(path) is False and disk.remove_dir(path) is False
        assert disk.list_dir(path) == () and disk.size(path) is None and disk.read_small(path, 10) is None
        assert disk.same_file(path, path) is False
    assert disk.remove_dir(str(tmp_path)) is False
    assert disk.make_dir(str(tmp_path)) is False
    with pytest.raises(StorageError):
        disk.make_dir(str(tmp_path / "file"))


def test_reading_small_files_is_bounded_and_never_waits_on_a_pipe(disk: PosixStorage, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert disk.read_small(str(tmp_path / "x"), 5) == b"12345"
    for name, number in [("x", errno.EFBIG), ("pipe", errno.EINVAL), (".", errno.EINVAL), ("loop", errno.ELOOP)]:
        with pytest.raises(StorageError) as caught:
            disk.read_small(str(tmp_path / name), 4)
        assert caught.value.errno == number
    assert [entry.name for entry in disk.list_dir(str(tmp_path))] == ["loop", "pipe", "x"]


def test_a_short_file_is_corrupt_and_names_both_sizes(disk: PosixStorage, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    with pytest.raises(Corrupt) as caught:
        disk.read_into(str(tmp_path / "x"), bytearray(10), offset=0, nbytes=10)
    assert (caught.value.want, caught.value.got) == (10, 5)


def test_fsync_of_a_directory_is_a_quiet_no_op_where_the_platform_refuses_it(
    disk: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_sync(fd: int) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "fsync", refuse_sync)
    disk.sync_dir(str(tmp_path))
    (tmp_path / "x").touch()
    with pytest.raises(StorageError):
        disk.sync_file(str(tmp_path / "x"))


def test_create_exclusive_has_one_winner_with_and_without_hard_links(tmp_path: Path) -> None:
    def no_links(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "link":
            raise refuse("link", args[1], errno.EPERM)

    for index, disk in enumerate([PosixStorage(), Watched(PosixStorage(), no_links)]):
        path = str(tmp_path / str(index))
        assert create_exclusive(disk, path, b"first") is True
        assert create_exclusive(disk, path, b"second") is False
        assert Path(path).read_bytes() == b"first" and no_temps(tmp_path)


def test_create_exclusive_knows_its_own_link_when_nfs_repeats_the_request(disk: PosixStorage, tmp_path: Path) -> None:
    def twice(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "link":
            disk.link(*args)

    assert create_exclusive(Watched(disk, twice), str(tmp_path / "x"), b"1") is True
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_says_what_it_needs_and_has_and_leaves_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = """
import os, sys
from ckpt_engine.errors import StorageFull
from ckpt_engine.storage import PosixStorage
from ckpt_engine.storage.base import write_durably, write_range
disk = PosixStorage()
write_durably(disk, "/mnt/old", b"old")
try:
    write_range(disk, "/mnt/x", bytes(16 << 20), offset=0, nbytes=16 << 20)
except StorageFull as error:
    print(error.errno, error.need_bytes, 0 <= error.free_bytes < 8 << 20, os.listdir("/mnt"))
write_range(disk, "/mnt/small", bytes(1 << 20), offset=0, nbytes=1 << 20)
"""
    unshare = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /mnt && exec "$0" -c "$1"']
    done = subprocess.run([*unshare, sys.executable, script], capture_output=True, text=True, timeout=60)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("mounting is not allowed here")
    assert (done.stdout, done.returncode) == (f"28 {16 << 20} True ['old']\n", 0), done.stderr


def test_modes_follow_umask_and_setgid(disk: PosixStorage, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o2770)
    before = os.umask(0o027)
    try:
        make_dirs(disk, str(tmp_path / "d"))
        for name, write in {
            "a": lambda path: write_durably(disk, path, b"1"),
            "b": lambda path: write_range(disk, path, b"1", offset=0, nbytes=1),
            "c": lambda path: create_exclusive(disk, path, b"1"),
        }.items():
            write(str(tmp_path / "d" / name))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "d").st_mode) & 0o777 == 0o750
    assert os.stat(tmp_path / "d").st_mode & stat.S_ISGID
    for name in "abc":
        status = os.stat(tmp_path / "d" / name)
        assert stat.S_IMODE(status.st_mode) == 0o640 and status.st_gid == os.stat(tmp_path).st_gid


def test_remove_tree_removes_links_and_not_what_they_lead_to(disk: PosixStorage, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep").touch()
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "x").touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    remove_tree(disk, str(tmp_path / "in"))
    remove_tree(disk, str(tmp_path / "in"))
    assert sorted(os.listdir(tmp_path)) == ["out"] and os.listdir(tmp_path / "out") == ["keep"]


def _write_rounds(folders: list[str], writes: bool, barrier: Any, errors: Any) -> None:
    try:
        disk = PosixStorage()
        for turn in range(25):
            barrier.wait(30)
            for folder in folders if writes else []:
                write_durably(disk, os.path.join(folder, "prefetch.json"), b"%06d" % turn * 1000)
            barrier.wait(30)
            for folder in folders:
                assert Path(folder, "prefetch.json").read_bytes() == b"%06d" % turn * 1000
    except BaseException as error:
        errors.put(repr(error))
        barrier.abort()


@pytest.mark.parametrize("writers", ["all", "global main", "local main"])
@pytest.mark.parametrize("layout", ["node-local", "shared"])
def test_f1_many_ranks_write_one_file_without_error_or_leftover(tmp_path: Path, layout: str, writers: str) -> None:
    context = multiprocessing.get_context("fork")
    barrier, errors = context.Barrier(8), context.SimpleQueue()
    nodes = [tmp_path / ("shared" if layout == "shared" else f"node{rank // 4}") for rank in range(8)]
    for folder in set(nodes):
        folder.mkdir()
    folders = [[str(folder)] for folder in nodes]
    if writers == "global main":  # it has to reach every node's directory: nobody else writes
        folders[0] = sorted({str(folder) for folder in nodes})
    writes = {"all": range(8), "global main": [0], "local main": [0, 4]}[writers]
    ranks = [
        context.Process(target=_write_rounds, args=(folders[rank], rank in writes, barrier, errors))
        for rank in range(8)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert errors.empty(), errors.get()
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert all(os.listdir(folder) == ["prefetch.json"] for folder in set(nodes))


def test_the_model_disk_of_these_tests_keeps_the_same_promises_as_the_real_one(tmp_path: Path) -> None:
    def check(disk: Any, root: str) -> None:
        disk.make_dir(root)
        disk.make_dir(f"{root}/d")
        write_durably(disk, f"{root}/a", b"1")
        disk.link(f"{root}/a", f"{root}/b")
        disk.rename(f"{root}/a", f"{root}/b")  # two names of one file: nothing happens
        for refused, number in [
            (lambda: disk.link(f"{root}/a", f"{root}/b"), errno.EEXIST),
            (lambda: disk.write_new(f"{root}/a", b"2"), errno.EEXIST),
            (lambda: disk.rename(f"{root}/c", f"{root}/b"), errno.ENOENT),
            (lambda: disk.rename(f"{root}/a", f"{root}/d"), errno.EISDIR),
            (lambda: disk.unlink(f"{root}/d"), errno.EISDIR),
            (lambda: disk.make_dir(f"{root}/x/y"), errno.ENOENT),
        ]:
            with pytest.raises(StorageError) as caught:
                refused()
            assert caught.value.errno == number
        assert disk.same_file(f"{root}/a", f"{root}/b") and disk.remove_dir(root) is False
        assert [entry.name for entry in disk.list_dir(root)] == ["a", "b", "d"]

    check(ModelDisk(), "/r")
    check(PosixStorage(), str(tmp_path / "r"))
