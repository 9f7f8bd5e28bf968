"""File systems that are full or read-only, as the kernel makes them: a small tmpfs, an ext4 in a file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from faults.fuse_disk import TIRED, mounted, refused, settled
from harness import Lab, until
from team import Team, committed, whole


def image(lab: Lab) -> str:
    """A small ext4 in a file."""
    path = lab.dir / "ext4.img"
    path.touch()
    os.truncate(path, 16 << 20)
    make = shutil.which("mkfs.ext4") or pytest.skip("no mkfs.ext4")
    subprocess.run([make, "-q", "-m0", str(path)], check=True)
    return str(path)


def fill(place: Path) -> None:
    """Leave no block free."""
    with contextlib.suppress(OSError), open(place / "filler", "wb", buffering=0) as file:
        for nbytes in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(nbytes)):
                    pass
        os.fsync(file.fileno())


def litter(place: Path) -> None:
    """Leave no inode free."""
    (place / "filler").mkdir()
    with contextlib.suppress(OSError):
        for number in range(1000):
            (place / "filler" / str(number)).touch()


def clean(place: Path) -> None:
    shutil.rmtree(place / "filler") if (place / "filler").is_dir() else os.unlink(place / "filler")


@pytest.mark.parametrize("kind", ["tmpfs without blocks", "tmpfs without inodes", "ext4 without blocks"])
def test_a_full_file_system_fails_the_save_says_what_is_free_and_the_next_one_works(lab: Lab, kind: str) -> None:
    how = ["-t", "tmpfs", "-o", "size=4m,nr_inodes=100", "none"] if "tmpfs" in kind else ["-o", "loop", image(lab)]
    with mounted(lab, *how) as place:
        lab.root = str(place / "checkpoints")
        team = Team(lab, "aa", saver=TIRED).open()
        team.commit(1)
        (litter if "inodes" in kind else fill)(place)
        team.ok("save", step=2, storage=True, count=40_000)
        answers = team.all("result", step=2)
        refused(answers, errno.ENOSPC)
        assert all((answer["free_bytes"] > 1 << 20) == ("inodes" in kind) for answer in answers), answers
        assert [step for step, _ in committed(lab.root)] == [1] and whole(lab.root)
        clean(place)
        team.commit(3, count=40_000)
        assert [step for step, _ in committed(lab.root)] == [3, 1] and whole(lab.root)
        team.leave()


def test_a_read_only_remount_fails_storage_saves_and_a_restart_on_it_goes_on_from_memory(lab: Lab) -> None:
    with mounted(lab, "-o", "loop", image(lab)) as place:
        lab.root = str(place / "checkpoints")
        team = Team(lab, "aa", saver={**TIRED, "linger_s": 60.0}).open()
        team.commit(1)
        until(lambda: settled(lab.root, "global_step1"), 10)
        until(lambda: remount(place, "ro"), 10)
        team.ok("save", step=2, storage=True)
        refused(team.all("result", step=2), errno.EROFS)
        team.save(3)
        team.kill()
        team = Team(lab, "aa", saver=TIRED).open()
        found = team.restore()
        assert (found["step"], found["source"]) == (3, "memory")
        until(lambda: remount(place, "rw"), 10)
        team.commit(4)
        assert committed(lab.root)[0][0] == 4 and whole(lab.root)
        team.leave()


def remount(place: Path, how: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{how}", str(place)], capture_output=True).returncode == 0
