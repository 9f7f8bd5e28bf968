"""Processes of ``worker.py``: start them, ask them, weigh them, kill them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = "CKPT_ENGINE_BENCH"
"""A variable that all processes of a crew inherit, our saver among them, so that its memory can be found."""

PROCESS_MIB = 300
"""What a process with torch takes for itself."""


class NotRun(Exception):
    """A system that could not be measured, and why."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every system of one comparison has in common. ``mib`` is of all ranks together."""

    mib: int
    tensors: int
    ranks: int = 1
    threads: int = 1
    multiplications: int = 4

    @property
    def rank_mib(self) -> int:
        return max(1, self.mib // self.ranks)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A system: rows named ``names``, made by ``target`` ("module:Class") under ``python``."""

    names: tuple[str, ...]
    variants: tuple[str, ...]
    target: str
    memory: float
    python: str = sys.executable

    def need_mib(self, setting: Setting) -> int:
        """Memory of all its processes."""
        return int(self.memory * setting.mib) + PROCESS_MIB * setting.ranks


class Crew:
    """The ranks of one system. A context manager: leaving it ends all that runs and removes the directory."""

    def __init__(
        self,
        spec: Spec,
        setting: Setting,
        work: Path,
        *,
        resumes: Crew | None = None,
        under: Sequence[str] = (),
        most_s: float = 300,
    ) -> None:
        """``resumes``: a crew that was killed, with the same ``work``. ``under``: a command that runs each rank."""
        self.spec, self.setting, self.work, self.most_s = spec, setting, work, most_s
        self.under = list(under)
        self.resuming = resumes is not None
        self.mark = resumes.mark if resumes is not None else uuid.uuid4().hex
        self.step = 0
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Crew:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Crew:
        self.work.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        setting = self.setting
        cores = len(os.sched_getaffinity(0))
        environment = os.environ | {
            MARK: self.mark,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, cores // setting.ranks)),
            "PYTHONWARNINGS": "ignore",
        }
        environment.setdefault("DS_ACCELERATOR", "cpu")
        for rank in range(setting.ranks):
            words = [*self.under, self.spec.python, str(HERE / "worker.py"), self.spec.target, "--work", str(self.work)]
            words += ["--mib", str(setting.rank_mib), "--tensors", str(max(1, setting.tensors // setting.ranks))]
            words += ["--threads", str(setting.threads), "--multiplications", str(setting.multiplications)]
            words += ["--rank", str(rank), "--world", str(setting.ranks), "--timeout-s", str(self.most_s)]
            words += ["--resuming"] * self.resuming
            with open(self.log(rank), "a") as log:
                self.processes.append(
                    subprocess.Popen(
                        words,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=environment,
                        text=True,
                        start_new_session=True,
                    )
                )
        return self

    def close(self) -> None:
        """End all processes, helpers and daemons too, and remove what they kept in memory and on disk."""
        self.kill()
        kill_and_wait(marked(self.mark))
        for process in self.processes:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if (self.work / "root").is_dir():
            collect = "import sys; from ckpt_engine.cli import main; sys.exit(main())"
            words = [sys.executable, "-c", collect, "gc", "--root", str(self.work / "root"), "--delete"]
            subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
        shutil.rmtree(self.work, ignore_errors=True)

    def log(self, rank: int) -> Path:
        return self.work / f"rank{rank}.log"

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def ask(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Give a command to all ranks; their answers. Raises NotRun with the reason, and nothing is left of it then."""
        line = json.dumps({"do": do, **more}) + "\n"
        try:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            answers = [self._answer(rank, do) for rank in range(len(self.processes))]
        except (BrokenPipeError, NotRun) as error:
            reason = str(error) if isinstance(error, NotRun) else f"it ended before {do}: {self._last_words(0)}"
            self.kill()
            raise NotRun(reason) from error
        for answer in answers:
            if not answer["ok"]:
                self.kill()
                raise NotRun(f"{do}: {answer['error']}")
        return answers

    def _answer(self, rank: int, do: str) -> dict[str, Any]:
        stream = self.processes[rank].stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(self.most_s):
                raise NotRun(f"no answer to {do} within {self.most_s:.0f} s")
        line = stream.readline()
        if not line:
            raise NotRun(f"it died in {do}: {self._last_words(rank)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self, rank: int) -> str:
        lines = [line.strip() for line in self.log(rank).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "without a word"

    def kill(self) -> None:
        """SIGKILL to every rank and all of their descendants, as an out-of-memory killer or a scheduler would."""
        kill_and_wait([pid for process in self.processes for pid in (process.pid, *descendants(process.pid))])
        for process in self.processes:
            process.wait()

    # -- memory --------------------------------------------------------------------------------------------------

    def memory_mib(self) -> float:
        """Proportional set sizes of all its processes: what they share, shared memory included, counts once."""
        return sum(map(pss_kib, marked(self.mark))) / 1024


def kill_and_wait(pids: Sequence[int]) -> None:
    """SIGKILL; returns when their files are closed and so their locks free, whoever their parents are."""
    with contextlib.ExitStack() as stack:
        ending = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                stack.callback(os.close, handle)
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                ending.append(handle)
        for handle in ending:
            select.select([handle], [], [], 60)


def descendants(pid: int) -> list[int]:
    """Of a process, by /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, open_ = [], [pid]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def marked(mark: str) -> list[int]:
    """Processes that inherited ``MARK=mark``."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def pss_kib(pid: int) -> int:
    """Its anonymous and its shared memory, without files and libraries; 0 if it is gone."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1])
    return total


@contextlib.contextmanager
def watched(every_s: float = 0.02) -> Iterator[list[float]]:
    """Samples, while the block runs, of how many MiB of anonymous and shared memory the machine holds more than before.

    That is what one system took while all others are at rest; it costs next to nothing, unlike ``Crew.memory_mib``.
    """
    samples = [0.0]
    over = threading.Event()
    before = held_mib()

    def watch() -> None:
        while not over.wait(every_s):
            samples.append(held_mib() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def held_mib() -> float:
    """Anonymous and shared memory of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("AnonPages:", "Shmem:"))) / 1024


def free_mib() -> int:
    """Memory that could be used now, and the room in /dev/shm: the lesser of both."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            room = os.statvfs("/dev/shm")
            return min(int(line.split()[1]) // 1024, room.f_bavail * room.f_frsize >> 20)
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def refuse_unless_free(need_mib: int, advice: str) -> None:
    """Ends the program, with numbers, where that much memory is not to be had."""
    if need_mib > (free := free_mib()):
        sys.exit(f"needs {need_mib} MiB of memory, {free} MiB are free: {advice}")


def settle() -> None:
    """Nothing of what was measured before is still on its way to the disk."""
    os.sync()
    time.sleep(0.05)
