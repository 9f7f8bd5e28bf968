"""Real processes for tests: ranks that run a function of the test module, and a look at all they may leave behind.

A *lab* is the world of one test: a checkpoint root of its own, so names of its own in /dev/shm. ``lab.rank(program)``
starts a process that calls ``program(me, *args)``; the two talk in lines: ``me.say("saved", step=3)`` there is
``rank.expect("saved")["step"]`` here, ``rank.tell("go")`` here is ``me.hear("go")`` there. Every wait has a deadline
and fails with what the process said last. Nothing sleeps and hopes.

Ranks are forked from one process (the nursery, ``nursery.py``) that has imported torch already, so that one costs
20 ms and not 3 s. The test process adopts what they leave (PR_SET_CHILD_SUBREAPER), so no zombie goes unseen.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import posix_ipc
from nursery import IPC_NAMESPACE, MOUNT_NAMESPACE, PRIVATE

from ckpt_engine import locks
from ckpt_engine.control import Page, SaverPage
from ckpt_engine.errors import ConfigError
from ckpt_engine.names import SHM, Names, names_for

TESTS = Path(__file__).resolve().parent
NOBODY = 65534
PR_SET_CHILD_SUBREAPER = 36


def until(condition: Callable[[], Any], within_s: float, what: str = "") -> Any:
    """``condition()`` as soon as it is true. Fails at the deadline."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:g} s: {what or inspect.getsource(condition).strip()}")
        time.sleep(0.002)
    return found


def alive(pid: int) -> bool:
    """True for a process that still runs; a zombie does not, once the last of its threads has let go of its locks."""
    try:
        return not leader_died(pid) or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def leader_died(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal one process of this test; after SIGKILL the kernel has let go of its locks."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        until(lambda: not alive(pid), 10, f"death of {pid}")


class Process:
    """One rank program, as the test sees it."""

    def __init__(self, pid: int, events: int, commands: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.hashes: set[str] = set()
        self._code: int | None = None
        self._events = events
        self._commands = commands
        self._buffer = b""
        self._told: list[dict[str, Any]] = []
        self._eof = False

    def expect(self, event: str, within_s: float = 20.0) -> dict[str, Any]:
        """The next thing the process says; fails if it is not ``event``, or does not come, or the process ended."""
        facts = self.hear(within_s, event)
        if facts["event"] != event:
            self._fail(f"said {facts}; {event!r} was expected")
        return facts

    def hear(self, within_s: float = 20.0, event: str = "a word") -> dict[str, Any]:
        """The next thing the process says, whatever it is; fails if there is none."""
        end = time.monotonic() + within_s
        while not self._told:
            if not self._read(end - time.monotonic()):
                self._fail(f"{'ended' if self._eof else f'was silent for {within_s:g} s'}; {event!r} was expected")
        return self._told.pop(0)

    def began(self) -> bool:
        """True once it has begun to make an engine."""
        self.drain()
        return bool(self.hashes)

    def silent(self, for_s: float) -> bool:
        """True if it says nothing for that long."""
        end = time.monotonic() + for_s
        while not self._told and self._read(end - time.monotonic()):
            pass
        return not self._told

    def tell(self, command: str, **facts: Any) -> None:
        os.write(self._commands, json.dumps({"command": command, **facts}).encode() + b"\n")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._code is None:
            kill(self.pid, number)
        if number == signal.SIGKILL:
            self.join()

    def join(self, within_s: float = 20.0) -> int:
        """The exit code, as ``subprocess`` gives it."""
        if self._code is None:
            try:
                found = until(self._reap, within_s, "exit")
            except AssertionError:
                self._fail(f"did not end within {within_s:g} s")
            self._code = os.waitstatus_to_exitcode(found[1])
        return self._code

    def _reap(self) -> tuple[int, int] | None:
        """(pid, status) once it has ended; until the process that forked it is gone, it is not ours to wait for."""
        try:
            done = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return done if done[0] else None

    def end(self, within_s: float = 20.0) -> None:
        """It should end by itself, with nothing more to say."""
        code = self.join(within_s)
        self.drain()
        if code != 0 or self._told:
            self._fail(f"ended with code {code} and said {self._told}")

    def drain(self) -> None:
        while self._read(0):
            pass

    def close(self) -> None:
        self.drain()
        os.close(self._events)
        os.close(self._commands)

    def _read(self, timeout_s: float) -> bool:
        """Take what it said; False if there was nothing within the time, or nothing will come any more."""
        if self._eof:
            return False
        with selectors.DefaultSelector() as ready:
            ready.register(self._events, selectors.EVENT_READ)
            if not ready.select(max(0.0, timeout_s)):
                return False
        data = os.read(self._events, 1 << 16)
        self._eof = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for facts in map(json.loads, lines):
            if facts["event"] == "identity":
                self.hashes.add(facts["hash"])
            else:
                self._told.append(facts)
        return bool(data)

    def _fail(self, text: str) -> NoReturn:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise AssertionError(f"{self.log.stem} (pid {self.pid}) {text}\n--- its output:\n{tail}")


class _Nursery:
    """A process that ranks are forked from; made once per test session for each list of imports, when first needed."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = [f"-W{option}" for option in sys.warnoptions] + ["-O"] * sys.flags.optimize
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, *flags, str(TESTS / "nursery.py"), str(there.fileno()), *preload]
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=env)
        there.close()
        atexit.register(self.close)

    def born(self, request: dict[str, Any], events: int, commands: int, log: int) -> int:
        socket.send_fds(self._here, [json.dumps(request).encode()], [events, commands, log])
        self._here.settimeout(60)
        return int(self._here.recv(64))

    def close(self) -> None:
        self._here.close()
        self._process.wait(10)


_nurseries: dict[tuple[str, ...], _Nursery] = {}


def _nursery(preload: tuple[str, ...]) -> _Nursery:
    if preload not in _nurseries:
        _nurseries[preload] = _Nursery(preload)
    return _nurseries[preload]


class Lab:
    """The world of one test. ``dir`` is scratch space, ``root`` the checkpoint directory."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="ckpt-lab-"))
        self.dir.chmod(0o755)  # other users take part in some tests
        self.root = str(self.dir / "checkpoints")
        self._processes: list[Process] = []
        self._hashes: set[str] = set()
        self._groups = 0

    # -- ranks -------------------------------------------------------------------------------------------------------

    def rank(
        self,
        program: Callable[..., None],
        *args: Any,
        rank: int = 0,
        world: int = 1,
        group: str = "",
        env: dict[str, str] | None = None,
        uid: int | None = None,
        within: Process | None = None,
        preload: tuple[str, ...] = (),
    ) -> Process:
        """A process that calls ``program(me, *args)``; ``program`` is a function of a test module, ``args`` are JSON.

        ``group``: a file through which ``world`` ranks meet (see ``ranks``). ``uid``: run as that user. ``within``:
        live in the mount and IPC namespaces of that process (see ``small_shm``). ``preload``: modules that its nursery
        imports, beside torch; each list has a nursery of its own.
        """
        log = self.dir / f"{len(self._processes):03}-{program.__name__}-{rank}.log"
        request = {
            "module": inspect.getfile(program),
            "function": program.__name__,
            "args": args,
            "me": {"rank": rank, "world": world, "root": self.root, "group": group, "dir": str(self.dir)},
            "env": env or {},
            "uid": uid,
            "within": within.pid if within else None,
        }
        events, events_there = os.pipe()
        commands_there, commands = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            pid = _nursery(preload).born(request, events_there, commands_there, output)
        finally:
            for fd in (events_there, commands_there, output):
                os.close(fd)
        process = Process(pid, events, commands, log)
        self._processes.append(process)
        return process

    def ranks(self, program: Callable[..., None], *args: Any, world: int, **how: Any) -> list[Process]:
        """``world`` ranks that form one gloo group."""
        self._groups += 1
        group = str(self.dir / f"group-{self._groups}")
        return [self.rank(program, *args, rank=rank, world=world, group=group, **how) for rank in range(world)]

    def small_shm(self, size: str, **how: Any) -> Process:
        """A process with a /dev/shm of ``size`` and queues of its own; others may live ``within`` it. Needs root."""
        process = self.rank(small_shm, size, **how)
        process.expect("mounted")
        return process

    # -- the saver ---------------------------------------------------------------------------------------------------

    def names(self, **identity: str) -> Names:
        found = names_for(root=self.root, **identity)
        self._hashes.add(found.hash)
        return found

    def saver(self, names: Names | None = None) -> int | None:
        """Pid of the saver that serves us."""
        try:
            return locks.holder((names or self.names()).saver_lock)
        except ConfigError:
            return os.getpid()

    def saver_page(self, names: Names | None = None) -> SaverPage | None:
        page = Page.find((names or self.names()).saver_control)
        try:
            return page.read(SaverPage) if page else None
        finally:
            if page:
                page.close()

    def savers(self) -> list[int]:
        """Every saver process of this test, in whatever state its lock is."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                words = Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "ckpt_engine.saver" in words and any(word.startswith(str(self.dir)) for word in words):
                    found.append(int(pid))
        return sorted(found)

    def saver_log(self, names: Names | None = None) -> str:
        try:
            return (names or self.names()).saver_log.read_text(errors="replace")
        except OSError:
            return ""

    # -- the end -----------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """What this test still has in shared memory and message queues."""
        for process in self._processes:
            process.drain()
        self.names()
        hashes = self._hashes.union(*(process.hashes for process in self._processes))
        files = [f"/dev/shm/{name}" for name in os.listdir(SHM) if any(name.startswith(f"ckpt-{h}") for h in hashes)]
        queues = [name for h in hashes for name in _queues(Names(h)) if _queue_exists(name)]
        return sorted(files) + sorted(queues)

    def clear(self) -> None:
        """End every process of this test and remove all it left: for a test that has seen that what must stay stays."""
        for process in self._processes:
            process.kill()
        for pid in self.savers():
            kill(pid)
        for name in self.left():
            if not name.startswith(str(SHM)):
                posix_ipc.unlink_message_queue(name)
            elif os.path.isdir(name) and not os.path.islink(name):
                shutil.rmtree(name)
            else:
                os.unlink(name)

    def close(self, patience_s: float = 10.0) -> list[str]:
        """End the test; what should not have been there any more, once the savers had their time to leave."""
        remains = [f"process {p.log.stem}" for p in self._processes if p._code is None and alive(p.pid)]
        for process in self._processes:
            process.kill()
        with contextlib.suppress(AssertionError):
            until(lambda: not self.savers() and not self.left(), patience_s)
        logs = self.saver_log().splitlines()[-15:]
        remains += [f"saver {pid}" for pid in self.savers()] + self.left()
        self.clear()
        for process in self._processes:
            process.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphaned savers
                pass
        shutil.rmtree(self.dir, ignore_errors=True)
        return remains + logs if remains else []


def small_shm(me: Any, size: str) -> None:
    """Rank program: hold a namespace with a /dev/shm of ``size``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(MOUNT_NAMESPACE | IPC_NAMESPACE) or libc.mount(b"none", b"/", None, PRIVATE, None):
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size},mode=1777".encode()):
        raise OSError(ctypes.get_errno(), "mount")
    me.say("mounted")
    me.hear("end", within_s=600)


def _queues(names: Names) -> list[str]:
    return [names.events_queue, *(names.notify_queue(local_rank) for local_rank in range(16))]


def _queue_exists(name: str) -> bool:
    try:
        posix_ipc.MessageQueue(name).close()
    except posix_ipc.ExistentialError:
        return False
    except posix_ipc.PermissionsError:
        return True
    return True
