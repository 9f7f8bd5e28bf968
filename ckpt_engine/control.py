"""Control pages: small records in shared memory that one process writes and all others may read at any instant.

A page keeps two copies and a counter; the writer fills the copy that is not current, then steps the counter.
So a reader always finds one whole record, even if the writer was killed in the middle. Layout, little-endian::

    0     magic "CKPTPAGE"
    8     uint64 counter: copy (counter & 1) is current, 0 = nothing written yet
    16    uint64 wish of others: the epoch of the saver that is asked to leave
    4096  copy 0: uint32 length, uint32 CRC-32, msgpack without what has its default; of each outcome apart, as bytes
    34816 copy 1
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgpack

from ckpt_engine import _C, __version__, shm
from ckpt_engine.errors import CkptError
from ckpt_engine.record import require
from ckpt_engine.states import Order

PROTOCOL = f"{__version__}/3"
"""Ranks and saver must agree on this text; it changes with the layout of slots, pages or messages."""

_MAGIC = b"CKPTPAGE"
_NBYTES = 65536
_COPY = 30720  # 64 outcomes; the two longest paths there are
_HEAD = struct.Struct("<II")
_MOST_KNOWN = 256  # outcomes, packed and unpacked: most of a ring was in the ring before


@dataclass(frozen=True, slots=True)
class RankPage:
    """What a rank says about itself. ``entered`` is the last attempt it entered, ``outcome`` how that went."""

    pid: int = 0
    rank: int = -1
    incarnation: int = 0
    local_world: int = 1
    slots: int = 0
    generation: int = 0
    run: str = ""
    entered: Order = (0, 0)
    label: bytes = b""  # the header of that attempt, packed, without files
    outcome: str = ""  # "", filling, sealed, failed
    reason: str = ""
    errno: int = 0
    goodbye: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended: ``status`` is committed, failed or cancelled."""

    order: Order
    run: str
    status: str
    kind: str = ""  # class name in errors, for a failure
    rank: int = -1
    reason: str = ""
    op: str = ""
    path: str = ""
    errno: int = 0
    need_bytes: int = 0
    free_bytes: int = 0
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SaverPage:
    """What the saver says about itself; ``outcomes`` is the ring of the newest endings, newest last."""

    pid: int = 0
    version: str = ""
    epoch: int = 0
    ready: bool = False
    leaving: bool = False
    stuck: str = ""  # the call to its file system that has not returned for longest
    tidying: bool = False  # it removes what a commit made superfluous; that is told before
    outcomes: tuple[Outcome, ...] = ()


_T = TypeVar("_T", RankPage, SaverPage)


def _pack(record: Any) -> bytes:
    packed: bytes = msgpack.packb(record, default=_plain, unicode_errors="surrogateescape")
    return packed


def _plain(record: Any) -> bytes | dict[str, Any]:
    return _packed(record) if type(record) is Outcome else _without_defaults(record)


@functools.lru_cache(_MOST_KNOWN)
def _packed(outcome: Outcome) -> bytes:
    packed: bytes = msgpack.packb(_without_defaults(outcome), unicode_errors="surrogateescape")
    return packed


@functools.lru_cache(_MOST_KNOWN)
def _outcome(packed: bytes) -> Outcome:
    return _revive(Outcome, msgpack.unpackb(packed, unicode_errors="surrogateescape"))  # type: ignore[no-any-return]


def _without_defaults(record: Any) -> dict[str, Any]:
    values = ((spec, getattr(record, spec.name)) for spec in fields(record))
    return {spec.name: value for spec, value in values if value != spec.default}


def _revive(kind: type[Any], values: Any) -> Any:
    """Raises ValueError, TypeError for values that no writer of ours gives."""
    known = {spec.name for spec in fields(kind)}
    require(type(values) is dict, "not a record")
    clean = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known}
    if kind is SaverPage:
        clean["outcomes"] = tuple(map(_outcome, clean.get("outcomes", ())))
    record = kind(**clean)
    for spec in fields(kind):
        require(_SOUND[spec.type](getattr(record, spec.name)), f"{spec.name} is not {spec.type}")
    return record


def _is_number(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


_SOUND: dict[Any, Callable[[Any], bool]] = {
    "int": _is_number,
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "bytes": lambda value: type(value) is bytes,
    "Order": lambda value: type(value) is tuple and len(value) == 2 and all(map(_is_number, value)),
    "tuple[int, ...]": lambda value: type(value) is tuple and all(map(_is_number, value)),
    "tuple[Outcome, ...]": lambda value: type(value) is tuple,  # made by _revive
}
"""What fits a field, by its annotation."""


class Page:
    """One control page; ``write`` only in the process that owns it."""

    def __init__(self, mapping: shm.Mapping) -> None:
        self._mapping = mapping
        self._mutex = threading.Lock()
        self._last: tuple[int, Any] = (0, None)  # counter and record: the same counter, the same record

    @classmethod
    def own(cls, name: str) -> Page:
        """Open or create the page that this process is going to write. REQUIRES: its lock file is held."""
        mapping = shm.open_existing(name)
        if mapping is not None and mapping.nbytes != _NBYTES:
            mapping.close()
            mapping = None
        if mapping is None:
            shm.unlink(name)  # torn by the death of its creator, and its lock is ours
            mapping = shm.create(name, _NBYTES)
        mapping.memory[: len(_MAGIC)] = _MAGIC
        return cls(mapping)

    @classmethod
    def find(cls, name: str) -> Page | None:
        mapping = shm.open_existing(name)
        if mapping is None:
            return None
        if mapping.nbytes != _NBYTES or mapping.memory[: len(_MAGIC)] != _MAGIC:
            mapping.close()
            return None
        return cls(mapping)

    def write(self, record: RankPage | SaverPage) -> None:
        """Replace the record. After a crash: the previous one is intact."""
        data = _pack(record)
        if len(data) > _COPY - _HEAD.size:
            raise CkptError(f"a control record of {len(data)} bytes does not fit its page")
        with self._mutex:
            counter = (_C.load(self._mapping.memory, 8) + 1) % 2**64 or 2
            start = 4096 + (counter & 1) * _COPY
            self._mapping.memory[start : start + _HEAD.size + len(data)] = (
                _HEAD.pack(len(data), zlib.crc32(data)) + data
            )
            _C.store(self._mapping.memory, 8, counter)

    @staticmethod
    def fits(record: RankPage | SaverPage) -> bool:
        return len(_pack(record)) <= _COPY - _HEAD.size

    def read(self, kind: type[_T]) -> _T | None:
        """The current record; None if nothing valid was ever written."""
        for _ in range(100):
            counter = _C.load(self._mapping.memory, 8)
            if counter == 0:
                return None
            seen, record = self._last
            if counter == seen and type(record) is kind:
                return record
            start = 4096 + (counter & 1) * _COPY
            length, crc = _HEAD.unpack_from(self._mapping.memory, start)
            data = self._mapping.memory[start + _HEAD.size : start + _HEAD.size + min(length, _COPY)]
            if zlib.crc32(data) == crc and len(data) == length:
                with contextlib.suppress(ValueError, TypeError, RecursionError, msgpack.UnpackException):
                    found: _T = _revive(kind, msgpack.unpackb(data, unicode_errors="surrogateescape"))
                    self._last = (counter, found)
                    return found
            if _C.load(self._mapping.memory, 8) == counter:
                return None
        return None

    def ask_to_leave(self, epoch: int) -> None:
        """Any process may ask the saver of ``epoch`` to make room for another version; its successor need not care."""
        _C.store(self._mapping.memory, 16, epoch)

    def asked_to_leave(self, epoch: int) -> bool:
        return _C.load(self._mapping.memory, 16) == epoch

    def unlinked(self) -> bool:
        return self._mapping.unlinked()

    def close(self) -> None:
        self._mapping.close()
