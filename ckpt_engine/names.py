"""Every shared-memory, queue and lock name is built and parsed here (names on disk: ``disk_names``).

``hash`` stands for (uid, job id, real path of the root, engine name, node id), so two jobs, two users and two
engines of one process never meet, and a restart by hand finds what its predecessor left.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
MAX_EDITION = 999_999
_HASH = "[0-9a-f]{16}"
_SEGMENT = re.compile(rf"ckpt-({_HASH})-r(\d{{1,6}})-s(\d{{1,3}})-e(\d{{1,6}})")
_RANK_LOCK = re.compile(r"rank-(\d{1,6})\.lock")
_CONTROL = re.compile(rf"ckpt-({_HASH})-(?:r(\d{{1,6}})|saver)-ctl")


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    hash: str
    local_rank: int
    slot: int
    edition: int

    def __str__(self) -> str:
        return f"/ckpt-{self.hash}-r{self.local_rank}-s{self.slot}-e{self.edition}"


def parse_segment(file_name: str) -> SegmentName | None:
    """The slot behind a file name of /dev/shm; None for anything else."""
    match = _SEGMENT.fullmatch(file_name)
    return SegmentName(match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def parse_rank_control(file_name: str) -> int | None:
    """The local rank behind the file name of a rank's control page."""
    match = _CONTROL.fullmatch(file_name)
    return int(match[2]) if match and match[2] else None


@dataclass(frozen=True, slots=True)
class Names:
    """All names of one engine on one node."""

    hash: str

    def segment(self, local_rank: int, slot: int, edition: int) -> SegmentName:
        return SegmentName(self.hash, local_rank, slot, edition)

    def rank_control(self, local_rank: int) -> str:
        return f"/ckpt-{self.hash}-r{local_rank}-ctl"

    @property
    def saver_control(self) -> str:
        return f"/ckpt-{self.hash}-saver-ctl"

    @property
    def events_queue(self) -> str:
        return f"/ckpt-{self.hash}-events"

    def notify_queue(self, local_rank: int) -> str:
        return f"/ckpt-{self.hash}-notify-{local_rank}"

    @property
    def run_dir(self) -> Path:
        return SHM / f"ckpt-{self.hash}"

    @property
    def spawn_lock(self) -> Path:
        return self.run_dir / "spawn.lock"

    @property
    def budget_lock(self) -> Path:
        return self.run_dir / "budget.lock"

    @property
    def saver_lock(self) -> Path:
        return self.run_dir / "saver.lock"

    @property
    def saver_log(self) -> Path:
        return self.run_dir / "saver.log"

    def rank_lock(self, local_rank: int) -> Path:
        return self.run_dir / f"rank-{local_rank}.lock"

    def restore_dir(self, token: str) -> Path:
        """Where placeholders stand while DeepSpeed restores from memory."""
        return self.run_dir / f"restore-{token}"

    def shm_files(self) -> list[str]:
        """File names in /dev/shm that belong to this engine, the run directory excluded."""
        prefix = f"ckpt-{self.hash}-"
        return sorted(name for name in os.listdir(SHM) if name.startswith(prefix))

    def segments(self) -> list[SegmentName]:
        return sorted(found for name in self.shm_files() if (found := parse_segment(name)))

    def rank_locks(self) -> dict[int, Path]:
        """Local rank → lock file, for all that ever registered here: by lock file or, should that be gone, by page.

        A page of another user is no rank of ours: anybody may make files in /dev/shm.
        """
        try:
            locks = [_RANK_LOCK.fullmatch(name) for name in os.listdir(self.run_dir)]
        except FileNotFoundError:
            locks = []
        found = {int(match[1]) for match in locks if match}
        found |= {
            rank for name in self.shm_files() if (rank := parse_rank_control(name)) is not None and _is_ours(SHM / name)
        }
        return {local_rank: self.rank_lock(local_rank) for local_rank in sorted(found)}


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def this_node() -> str:
    """Boot id + IPC namespace: processes with the same value see the same shared memory and queues."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/ipc')}"


def names_for(*, root: str, job: str = "", name: str = "default", node_id: str = "", uid: int | None = None) -> Names:
    """The names of the engine ``name`` of ``job`` on ``root`` (any path; its real path counts) at this node."""
    parts = (str(os.geteuid() if uid is None else uid), job, os.path.realpath(root), name, node_id or this_node())
    text = "\0".join(parts).encode("utf-8", "surrogateescape")
    return Names(hashlib.blake2b(text, digest_size=8).hexdigest())
