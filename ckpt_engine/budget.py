"""What this node has for us. Memory: how many slots it can hold; processors: how many threads copy into them.

Shared memory counts against /dev/shm, the machine and every cgroup level. Exceeding a cgroup is an OOM kill, not
ENOSPC, so all limits are read before a byte is reserved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine import config, shm
from ckpt_engine.errors import ShmFull
from ckpt_engine.events import warn_once

_UNLIMITED = 1 << 60
_RESERVE_BYTES = 64 << 20
_MOST_THREADS = 8
_CGROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
GROWTH = 1.1
"""A slot is reserved for this much more than the image it was made for."""


@dataclass(frozen=True, slots=True)
class Room:
    """``free_bytes`` that may still be taken, and the limit that says so."""

    free_bytes: int
    limit: str


def room(cgroup_root: Path = _CGROUPS, proc: Path = _PROC) -> Room:
    """The tightest of tmpfs free, MemAvailable and (limit - use) of every cgroup above this process."""
    rooms = [
        Room(shm.free_bytes(), "/dev/shm"),
        Room(_mem_available(proc), "MemAvailable"),
        *_cgroups(cgroup_root, proc),
    ]
    tightest = min(rooms, key=lambda found: found.free_bytes)
    reserve = min(_RESERVE_BYTES, tightest.free_bytes // 16)
    return Room(max(0, tightest.free_bytes - reserve), tightest.limit)


def slots_for_node(*, wanted: int, slot_bytes: int, local_ranks: int, held_bytes: int, found: Room) -> int:
    """Slots per rank that fit: ``wanted``, or 1 with a warning. Raises ShmFull if not even one fits.

    ``held_bytes``: what slots of this engine hold already on the node (counted as available).
    """
    have = found.free_bytes + held_bytes
    if wanted * slot_bytes * local_ranks <= have:
        return wanted
    if slot_bytes * local_ranks <= have:
        warn_once(
            "one slot",
            f"{wanted} slots of {slot_bytes} bytes for {local_ranks} local ranks do not fit {found.limit} "
            f"({have} bytes free): going on with one slot per rank, so a crash during a save falls back to storage",
        )
        return 1
    raise ShmFull(
        f"one slot of {slot_bytes} bytes for each of {local_ranks} local ranks needs {slot_bytes * local_ranks} bytes; "
        f"{found.limit} leaves {have}. Enlarge it (docker: --shm-size; Kubernetes: emptyDir medium Memory and the "
        "memory limit; bare: mount -o remount,size=… /dev/shm) or save a smaller state",
        need_bytes=slot_bytes * local_ranks,
        free_bytes=have,
        limit=found.limit,
    )


def copy_threads(asked: int, local_world: int, cgroup_root: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """Threads for one copy: what was asked, else this rank's share of the processors (1..8).

    That is what affinity and the quota of every cgroup leave to one of ``local_world`` ranks, or OMP_NUM_THREADS where
    that is less: whoever sets it has divided the machine already.
    """
    if asked:
        return asked
    processors = min([len(os.sched_getaffinity(0)), *_quotas(cgroup_root, proc)])
    share = min(int(processors) // max(1, local_world), config.omp_threads() or _MOST_THREADS)
    return max(1, min(_MOST_THREADS, share))


def _quotas(root: Path, proc: Path) -> Iterator[float]:
    """Processors that a cgroup may use at once, for each level that has such a limit."""
    for level, unified in _levels(root, proc, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if unified:
                quota, period = (level / "cpu.max").read_text().split()
            else:
                quota, period = ((level / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            if int(quota) > 0:
                yield int(quota) / int(period)


def _mem_available(proc: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _UNLIMITED


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        text = path.read_text().strip()
        return None if text == "max" else int(text)
    return None


def _reclaimable(path: Path) -> int:
    """Page cache that the kernel gives back before it kills: inactive_file of memory.stat."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


def _cgroups(root: Path, proc: Path) -> Iterator[Room]:
    """Free memory of every level of cgroup v2 and of the v1 memory controller."""
    for level, unified in _levels(root, proc, "memory"):
        limit = level / ("memory.max" if unified else "memory.limit_in_bytes")
        most, used = _number(limit), _number(level / ("memory.current" if unified else "memory.usage_in_bytes"))
        if most is not None and used is not None and most < _UNLIMITED:
            yield Room(max(0, most - used + _reclaimable(level / "memory.stat")), str(limit))


def _levels(root: Path, proc: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Every cgroup that this process is in, of v2 (True) and of the v1 ``controller``, from its own to the root."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = root / controller if controllers else root
            level = base / path.lstrip("/")
            while True:
                yield level, not controllers
                if level in (base, level.parent):
                    break
                level = level.parent
