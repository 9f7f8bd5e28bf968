"""Faults on order, in ranks and savers: ``CKPT_ENGINE_HOOK=faults.hooks:obey``; see ``faults`` for the environment.

CKPT_ENGINE_FAULT   "span[@rank]:phase:nth:action", several separated by ";". nth counts the events of that kind in
                    this process, "*" is every one. Actions: kill, stop, exit=CODE, delay=SECONDS, raise=ERRNO.
CKPT_ENGINE_WHEN    a file: as long as it is not there, no fault happens, and no event counts.
CKPT_ENGINE_ONCE    a file that only one process gets to make: the others let the fault pass (a restarted saver).
                    It holds the pid of that process.
CKPT_ENGINE_TRACE   a file to which every event is added as a line of JSON, with the monotonic time.
CKPT_ENGINE_NOTIFY  "drop" loses every third message of this process, "twice" sends each one twice.
CKPT_ENGINE_ARCHIVE "root:directory": links to every published file are kept there, whatever retention removes.
CKPT_ENGINE_PRETEND the version a saver says it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ckpt_engine.errors import StorageError
from ckpt_engine.events import Event
from ckpt_engine.messages import Mailbox, Message

_seen: Counter[str] = Counter()


def faults(fault: str = "", **more: str) -> dict[str, str]:
    """The environment for these faults: ``faults("persist:started:1:kill", once=path, trace=path)``."""
    env = {f"CKPT_ENGINE_{key.upper()}": str(value) for key, value in more.items()}
    return {"CKPT_ENGINE_HOOK": "faults.hooks:obey", "CKPT_ENGINE_FAULT": fault, **env}


def trace(path: Path) -> list[dict[str, Any]]:
    """What was traced so far."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []


def obey(event: Event) -> None:
    path = os.environ.get("CKPT_ENGINE_TRACE")
    if path:
        facts = {key: value for key, value in event.facts.items() if isinstance(value, int | float | str)}
        line = json.dumps(
            {**facts, "span": event.name, "phase": event.phase, "at": time.monotonic(), "pid": os.getpid()}
        )
        with open(path, "a") as file:
            file.write(line + "\n")
    if "CKPT_ENGINE_ARCHIVE" in os.environ and (event.name, event.phase) == ("publish", "complete"):
        root, _, archive = os.environ["CKPT_ENGINE_ARCHIVE"].partition(":")
        tag = f"global_step{event.facts['step']}"
        if os.path.exists(f"{root}/{tag}/MANIFEST.json"):
            os.makedirs(f"{archive}/{tag}", exist_ok=True)
            for name in os.listdir(f"{root}/{tag}"):
                if name.endswith(".pt"):
                    os.link(f"{root}/{tag}/{name}", f"{archive}/{tag}/{name}")
    if not os.path.exists(os.environ.get("CKPT_ENGINE_WHEN", "/")):
        return
    for order in filter(None, os.environ.get("CKPT_ENGINE_FAULT", "").split(";")):
        where, phase, nth, action = order.split(":")
        name, _, rank = where.partition("@")
        if (event.name, event.phase) != (name, phase) or (rank and event.facts.get("rank") != int(rank)):
            continue
        _seen[order] += 1
        if nth in ("*", str(_seen[order])) and _allowed():
            _act(*action.partition("=")[::2])


def _allowed() -> bool:
    once = os.environ.get("CKPT_ENGINE_ONCE")
    try:
        if once:
            file = os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(file, str(os.getpid()).encode())
            os.close(file)
    except FileExistsError:
        return False
    return True


def _act(verb: str, value: str) -> None:
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread gets no further; nor do the others
    elif verb == "exit":
        os._exit(int(value))
    elif verb == "delay":
        time.sleep(float(value))
    elif verb == "raise":
        raise StorageError.of(OSError(int(value), "on order"), op="write", path="/on/order")
    else:
        raise ValueError(f"unknown action {verb!r}")


def _unreliable(send: Any, how: str) -> Any:
    def sends(box: Mailbox, message: Message) -> bool:
        _seen["messages"] += 1
        if how == "drop" and _seen["messages"] % 3 == 0:
            return True
        return bool(send(box, message) and (how != "twice" or send(box, message)))

    return sends


if "CKPT_ENGINE_NOTIFY" in os.environ:
    Mailbox.send = _unreliable(Mailbox.send, os.environ["CKPT_ENGINE_NOTIFY"])  # type: ignore[method-assign]
if "CKPT_ENGINE_PRETEND" in os.environ and "ckpt_engine.saver.server" in sys.modules:
    sys.modules["ckpt_engine.saver.server"].PROTOCOL = os.environ["CKPT_ENGINE_PRETEND"]  # type: ignore[attr-defined]
