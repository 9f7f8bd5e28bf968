"""The process that ranks are forked from, and what a rank program can do. See ``harness``."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import selectors
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SAVER = {"start_s": 20.0, "grace_s": 1.0, "linger_s": 0.2, "commit_s": 20.0, "retry_s": 2.0, "term_s": 5.0}
"""Saver options of a rank that names no other: the usual life, but short."""

MOUNT_NAMESPACE, IPC_NAMESPACE = 0x00020000, 0x08000000
PRIVATE, BIND = (1 << 18) | (1 << 14), 1 << 12


class Me:
    """A rank program's view of itself: ``rank``, ``world``, ``root``, scratch space ``dir``, and its test."""

    def __init__(self, *, rank: int, world: int, root: str, group: str, dir: str, events: int, commands: int) -> None:
        self.rank = rank
        self.world = world
        self.root = root
        self.dir = dir
        self._group = group
        self._events = events
        self._commands = commands
        self._buffer = b""

    def say(self, event: str, **facts: Any) -> None:
        os.write(self._events, json.dumps({"event": event, **facts}).encode() + b"\n")

    def hear(self, command: str, within_s: float = 60.0) -> dict[str, Any]:
        """The next command; it must be ``command``."""
        end = time.monotonic() + within_s
        while b"\n" not in self._buffer:
            with selectors.DefaultSelector() as ready:
                ready.register(self._commands, selectors.EVENT_READ)
                if not ready.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"{command!r} was not heard within {within_s:g} s")
            data = os.read(self._commands, 1 << 16)
            if not data:
                raise EOFError(f"the test went away; {command!r} was awaited")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        facts: dict[str, Any] = json.loads(line)
        if facts["command"] != command:
            raise ValueError(f"heard {facts}, {command!r} was awaited")
        return facts

    def meet(self, timeout_s: float = 60.0) -> None:
        """Make the gloo group of this rank's peers; done by ``engine`` where it is needed."""
        import datetime

        import torch.distributed as dist

        if self._group and not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._group}",
                rank=self.rank,
                world_size=self.world,
                timeout=datetime.timedelta(seconds=timeout_s),
            )

    def engine(self, **options: Any) -> Any:
        """A CheckpointEngine on the test's root; ``saver`` is a dict that changes ``SAVER``, ``retention`` one too."""
        from ckpt_engine import CheckpointEngine, Retention, SaverOptions

        self.meet()
        saver = SaverOptions(**{**SAVER, **options.pop("saver", {})})
        policy = Retention(**options.pop("retention")) if "retention" in options else None
        return CheckpointEngine(options.pop("root", self.root), saver=saver, retention=policy, **options)

    def coded(self, step: int, count: int = 1000) -> Any:
        """A tensor that tells its step, its rank and each position, so that a tear or a mix-up shows."""
        return coded(step, self.rank, count)


def coded(step: int, rank: int, count: int = 1000) -> Any:
    import torch

    return torch.arange(count, dtype=torch.int64) % 1000 + rank * 1000 + step * 1_000_000


def _become(request: dict[str, Any]) -> None:
    """Namespaces and user of this rank."""
    if request["within"] is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("ipc", "mnt"):
            with open(f"/proc/{request['within']}/ns/{kind}") as space:
                if libc.setns(space.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns {kind}")
    if request["uid"] is not None:
        _open_the_interpreter()
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
        os.environ["HOME"] = "/tmp"


def _open_the_interpreter() -> None:
    """Another user must be able to run this Python, even if it lies in a closed home: in a mount namespace of ours."""
    home = os.path.realpath(sys.base_prefix)
    closed = [path for path in map(str, Path(home).parents) if not os.stat(path).st_mode & 0o001]
    if not closed:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def bind() -> int:
        return libc.mount(f"/proc/self/fd/{inside}".encode(), home.encode(), None, BIND, None)

    failed = libc.unshare(MOUNT_NAMESPACE) or libc.mount(b"none", b"/", None, PRIVATE, None)
    inside = os.open(home, os.O_PATH)
    failed = failed or libc.mount(b"tmpfs", closed[-1].encode(), b"tmpfs", 0, b"mode=755")
    if failed or os.makedirs(home) or bind():
        raise OSError(ctypes.get_errno(), "cannot show the interpreter to another user")
    os.close(inside)


def _live(request: dict[str, Any], events: int, commands: int, log: int) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    os.environ.update(request["env"])
    me = Me(**request["me"], events=events, commands=commands)
    _note_identities(me)
    try:
        _become(request)
        spec = importlib.util.spec_from_file_location(Path(request["module"]).stem, request["module"])
        if spec is None or spec.loader is None:
            raise ImportError(request["module"])
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        getattr(module, request["function"])(me, *request["args"])
    except BaseException as error:
        traceback.print_exc()
        if not isinstance(error, SystemExit):
            me.say("raised", type=type(error).__name__, text=str(error))
            return 1
        return int(error.code or 0)
    return 0


def _note_identities(me: Me) -> None:
    """Tell the test every name an engine of this rank goes by, so that it knows where to look for what is left."""
    from ckpt_engine import names

    plain = names.names_for

    def noted(**identity: Any) -> Any:
        found = plain(**identity)
        me.say("identity", hash=found.hash)
        return found

    names.names_for = noted
    for module in list(sys.modules.values()):
        if getattr(module, "names_for", None) is plain:
            module.names_for = noted  # type: ignore[attr-defined]


def main(control: socket.socket, preload: list[str]) -> int:
    import torch.distributed  # noqa: F401  # what makes it worth to be forked

    import ckpt_engine.plain  # noqa: F401

    for name in preload:
        importlib.import_module(name)
    gc.freeze()  # what was imported is never garbage: no rank looks through it, or copies it by doing so
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not data:
            return 0
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child:  # an orphan: the test process adopts it, and can wait for it
                control.send(str(child).encode())
                os._exit(0)
            control.close()
            code = _live(json.loads(data), *fds)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # the nursery's own end is not the rank's
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as it:
        sys.exit(main(it, sys.argv[2:]))
