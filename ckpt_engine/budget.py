"""How many slots a node can hold: shared memory counts against /dev/shm, the machine and every cgroup level.

Exceeding a cgroup is an OOM kill, not ENOSPC, so all limits are read before a byte is reserved.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine import shm
from ckpt_engine.errors import ShmFull
from ckpt_engine.events import warn_once

_UNLIMITED = 1 << 60
_RESERVE_BYTES = 64 << 20
GROWTH = 1.1
"""A slot is reserved for this much more than the image it was made for."""


@dataclass(frozen=True, slots=True)
class Room:
    """``free_bytes`` that may still be taken, and the limit that says so."""

    free_bytes: int
    limit: str


def room(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Room:
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


def _cgroups(root: Path, proc: Path) -> list[Room]:
    """Free memory of every level of cgroup v2 and of the v1 memory controller."""
    rooms: list[Room] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, limit, use = root, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                base, limit, use = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            level = base / path.lstrip("/")
            while True:
                most, used = _number(level / limit), _number(level / use)
                if most is not None and used is not None and most < _UNLIMITED:
                    free = max(0, most - used + _reclaimable(level / "memory.stat"))
                    rooms.append(Room(free, str(level / limit)))
                if level in (base, level.parent):
                    break
                level = level.parent
    return rooms
