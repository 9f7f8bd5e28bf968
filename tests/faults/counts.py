"""What a job costs after few and after many saves or lives: short in ``test_resources.py``, long in ``make soak``."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from faults.programs import do, leave, obeys, ready
from harness import Lab, until
from team import committed

GROWTH_KIB = 2048
"""How much more memory of its own a process may have after the last 80 % of its saves."""


def own_kib(pid: int | str) -> int:
    """Private memory of a process; what it shares with others, segments too, does not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def descriptors(pid: int) -> int:
    """Open descriptors of a saver, which opens one for a moment whenever it looks."""
    return min(len(os.listdir(f"/proc/{pid}/fd")) for _ in range(50))


def _files(lab: Lab) -> int:
    return sum(len(names) for _, _, names in os.walk(lab.root))


def memory_cgroup(name: str) -> Path:
    """A new memory cgroup below ours, of version 1 or 2; the test is skipped where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        base = Path("/sys/fs/cgroup/memory" if "memory" in controllers.split(",") else "/sys/fs/cgroup")
        if controllers and base.name != "memory":
            continue
        folder = Path(f"{base}{path}", name)
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists():
            return folder
        folder.rmdir()
    pytest.skip("no memory cgroup can be made here")


def saves_often(me: Any, rounds: int, storage_every: int) -> None:
    """Rank program: tell what it has after 20 % of its saves, and after all of them."""
    with me.engine(keep_last=2) as engine:
        for step in range(1, rounds + 1):
            state = {"w.pt": {"w": me.coded(step, 1000)}}
            if step % storage_every:
                engine.save_to_memory(step, state)
            else:
                engine.save_to_storage(step, state)
            if step in (rounds // 5, rounds):
                engine.wait(30)
                gc.collect()
                maps = {
                    line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "ckpt-" in line
                }
                fds = len(os.listdir("/proc/self/fd"))
                me.say("counted", own_kib=own_kib("self"), has=[fds, threading.active_count(), len(maps)])
                me.hear("go")


def many_saves(lab: Lab, rounds: int, *, storage_every: int) -> str:
    """``rounds`` saves of one rank; what was measured. Raises AssertionError where something grows."""
    rank = lab.rank(saves_often, rounds, storage_every)
    counts, memory = [], []
    for _ in range(2):
        told = rank.expect("counted", 300)
        saver = lab.saver() or 0
        until(lambda: len([name for name in os.listdir(lab.root) if name.startswith("global_step")]) == 2, 10)
        threads = len(os.listdir(f"/proc/{saver}/task"))
        until(lambda: _files(lab) == 8, 10, f"two checkpoints, and no more: {list(os.walk(lab.root))}")
        counts.append((saver, told["has"], descriptors(saver), threads, len(lab.left())))
        memory.append((told["own_kib"], own_kib(saver)))
        rank.tell("go")
    rank.end()
    text = f"{rounds} saves, own memory after a fifth and after all of them (rank, saver): {memory} KiB"
    if counts[0] != counts[1] or any(after - before > GROWTH_KIB for before, after in zip(*memory, strict=True)):
        raise AssertionError(f"{text}; (saver, of the rank, of the saver, threads, names): {counts}")
    return text


def lives(lab: Lab, count: int) -> str:
    """``count`` lives of one rank, each ended by SIGKILL with a save on its way; their one saver does not grow."""
    counts, memory = [], []
    for life in range(1, count + 1):
        (rank,) = ready([lab.rank(obeys, {"keep_last": 1, "saver": {"linger_s": 30.0}})])
        said = [do(rank, "restore"), do(rank, "storage", step=life)]
        if life % 2:
            said.append(do(rank, "result", step=life))
        rank.kill()
        if said[0]["step"] != life - 1 or any(one["error"] for one in said):
            raise AssertionError(f"life {life}: {said}")
        if life in (3, 2 * (count // 2) - 1):
            until(lambda: committed(lab.root)[0][0] == life, 10)  # noqa: B023
            saver = lab.saver() or 0
            counts.append((saver, descriptors(saver), len(os.listdir(f"/proc/{saver}/task")), len(lab.left())))
            memory.append(own_kib(saver))
    (rank,) = ready([lab.rank(obeys, {"keep_last": 1})])
    found = do(rank, "restore")
    leave([rank])
    until(lambda: not lab.savers() and not lab.left(), 10, lab.saver_log())
    text = f"{count} lives, own memory of the saver after 3 and after nearly all: {memory} KiB"
    if found["step"] != count or counts[0] != counts[1] or memory[1] - memory[0] > GROWTH_KIB:
        raise AssertionError(f"{text}; restored {found}; (saver, descriptors, threads, names): {counts}")
    return text
