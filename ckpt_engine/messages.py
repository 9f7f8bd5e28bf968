"""Every packet of both queues as a frozen dataclass ↔ msgpack, and the mailbox that carries them.

A message is only a wake-up: state lives in slot headers and files. Losing, repeating, delaying or reordering any
of them changes latency, never the outcome (invariant 2). So a full queue is not an error, garbage is counted and
logged once, and a queue that the system will not give us, or that is not ours, is replaced by looking every 50 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass
from typing import Any

import msgpack
import posix_ipc

from ckpt_engine.errors import ConfigError
from ckpt_engine.events import counters, warn_once
from ckpt_engine.waits import pause

SIZE_BYTES = 512
DEPTH = 8
LOOK_S = 0.05
"""How often to look where there is no queue."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Rank → saver: look at my slots. ``reason``: queued, joined, failed, goodbye."""

    reason: str
    local_rank: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """Saver → rank: your slot left the hands of the saver."""

    slot: int
    state: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """Saver → rank: this attempt has an outcome (see ``SaverPage.outcomes``)."""

    status: str
    digest: str = ""


Message = Wake | Released | Ended
_KINDS: dict[str, type[Any]] = {"wake": Wake, "released": Released, "ended": Ended}


def encode(message: Message) -> bytes:
    """At most ``SIZE_BYTES``; a field that would not fit is a programming error and raises ConfigError."""
    kind = type(message).__name__.lower()
    data: bytes = msgpack.packb([kind, *(getattr(message, name) for name in message.__slots__)])
    if len(data) > SIZE_BYTES:
        raise ConfigError(f"a {kind} message of {len(data)} bytes does not fit {SIZE_BYTES}")
    return data


def decode(data: bytes) -> Message | None:
    """The message, or None for garbage."""
    try:
        kind, *values = msgpack.unpackb(data)
        message: Message = _KINDS[kind](*values)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None
    expected = {"int": int, "str": str}
    sound = all(
        isinstance(getattr(message, name), expected[str(note)]) for name, note in type(message).__annotations__.items()
    )
    return message if sound else None


class Mailbox:
    """One POSIX message queue, opened or created. ``send`` never blocks, ``receive`` has a deadline."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: posix_ipc.MessageQueue | None = None
        try:
            self._queue = _own_queue(name)
        except (OSError, posix_ipc.Error, ValueError) as error:
            warn_once(
                f"mailbox {name}",
                f"no message queue {name} ({error}); looking every 50 ms instead. Limits: ulimit -q (bytes of "
                "all queues of a user), /proc/sys/fs/mqueue/queues_max",
            )

    def send(self, message: Message) -> bool:
        """False if the queue is full: the peer is awake already. Any thread may send."""
        queue, data = self._queue, encode(message)
        if queue is None:
            return False
        try:
            queue.send(data, timeout=0)
        except (OSError, posix_ipc.Error, ValueError):  # full; closed by another thread; made for smaller messages
            return False
        return True

    def receive(self, timeout_s: float) -> Message | None:
        """The next message within ``timeout_s`` (the caller keeps it ≤ 1 s); None if there is none, or garbage."""
        queue = self._queue
        if queue is None:
            pause(min(timeout_s, LOOK_S))
            return None
        try:
            if timeout_s > 0:  # posix_ipc's own wait would swallow what a signal handler raises, e.g. SystemExit
                ready = select.poll()
                ready.register(queue.mqd, select.POLLIN)
                ready.poll(1000 * timeout_s)
            data, _ = queue.receive(timeout=0)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return None
        except (OSError, posix_ipc.Error, ValueError):  # closed by another thread; made for larger messages
            pause(min(timeout_s, LOOK_S))
            data = b""
        message = decode(data)
        if message is None:
            counters["messages.garbage"] += 1
            warn_once(f"garbage {self.name}", f"garbage in message queue {self.name}: ignored")
        return message

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None


def _own_queue(name: str) -> posix_ipc.MessageQueue:
    queue = posix_ipc.MessageQueue(name, posix_ipc.O_CREAT, mode=0o600, max_messages=DEPTH, max_message_size=SIZE_BYTES)
    owner = os.fstat(queue.mqd).st_uid
    if owner != os.geteuid():
        queue.close()
        raise PermissionError(f"it belongs to uid {owner}")
    return queue


def unlink(name: str) -> None:
    """Remove a queue by name; no error if it is gone."""
    with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):  # gone; another user's
        posix_ipc.unlink_message_queue(name)
