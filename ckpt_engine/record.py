"""What every durable record can do: check itself, become plain data, and lie on disk in an envelope.

A record is frozen and checks itself when it is built, so a record that exists is a valid one.
On disk it is canonical JSON in ASCII (sorted keys, no spaces), so that equal records are equal bytes
and any truncation or flipped bit shows::

    {"body":{...},"checksum":"<16 hex digits>","format_version":1,"kind":"manifest"}
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, TypeVar

from ckpt_engine import errors

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 64 << 20

R = TypeVar("R", bound="Record")


class Record:
    """Base of everything durable: ``to_dict``/``from_dict`` for headers, ``to_bytes``/``from_bytes`` for files."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    _least: ClassVar[int] = 0
    _newer: ClassVar[frozenset[str]] = frozenset()
    """Fields left out where they are empty, so that a record without them is what it was before there were any."""

    def __post_init__(self) -> None:
        for name, field in _fields(type(self)).items():
            value = getattr(self, name)
            if not field.fits(value):
                raise ValueError(f"{name} is {value!r:.80}, want {field.kind.__name__}")
            if type(value) is int and not self._least <= value < 2**63:
                raise ValueError(f"{name} {value} is out of range")
        self._check()

    def _check(self) -> None:
        """Raise ValueError if the fields contradict each other."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings, numbers and None."""
        values = ((name, getattr(self, name)) for name in _fields(type(self)))
        return {name: _plain(value) for name, value in values if value != () or name not in self._newer}

    @classmethod
    def from_dict(cls: type[R], data: object, path: str = "") -> R:
        """The record ``data`` describes. Raises Corrupt (naming ``path``) for anything else than a valid one."""
        try:
            record: R = _record(data, cls)
        except (ValueError, TypeError, KeyError) as error:
            raise errors.Corrupt(
                f"{path}: not a valid {cls.kind}: {error}", path=path, want=cls.kind, got=None
            ) from error
        return record

    def to_bytes(self) -> bytes:
        """Equal records give equal bytes."""
        return _canonical(_envelope(self.to_dict(), self.kind))

    @classmethod
    def from_bytes(cls: type[R], data: bytes, path: str) -> R:
        """The inverse of ``to_bytes``. Raises Corrupt: truncated, altered, another kind or another format version."""
        try:
            envelope = json.loads(data.decode("ascii"))
            require(type(envelope) is dict, "not a JSON object")
            version = envelope.get("format_version")
            require(
                type(version) is int and version == FORMAT_VERSION,
                f"format version {version!r:.40}, this program reads {FORMAT_VERSION}",
            )
            require(envelope.get("kind") == cls.kind, f"kind {envelope.get('kind')!r:.40}")
            want = _envelope(envelope.get("body"), cls.kind)
            require(envelope.get("checksum") == want["checksum"], "checksum differs")
            require(_canonical(want) == data, "not in canonical form")
        except (ValueError, TypeError, RecursionError) as error:
            raise errors.Corrupt(
                f"{path}: not a valid {cls.kind}: {error}", path=path, want=cls.kind, got=None
            ) from error
        return cls.from_dict(envelope["body"], path)


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


class _Field(NamedTuple):
    """The grammar of a field: ``kind``, ``tuple[kind, ...]`` (``many``) or ``kind | None`` (``optional``)."""

    kind: Any
    many: bool
    optional: bool

    def fits(self, value: object) -> bool:
        if self.many:
            return type(value) is tuple and all(type(item) is self.kind for item in value)
        return type(value) is self.kind or (self.optional and value is None)

    def typed(self, value: Any) -> Any:
        """``value`` with dicts turned into records and lists into tuples; the record checks the rest."""
        if self.many:
            require(type(value) is list, f"want a list, got {value!r:.80}")
            return tuple(_record(item, self.kind) for item in value)
        return None if self.optional and value is None else _record(value, self.kind)


_known_fields: dict[Any, dict[str, _Field]] = {}


def _fields(cls: Any) -> dict[str, _Field]:
    fields = _known_fields.get(cls)
    if fields is None:
        hints = typing.get_type_hints(cls)
        fields = _known_fields[cls] = {field.name: _field(hints[field.name]) for field in dataclasses.fields(cls)}
    return fields


def _field(hint: Any) -> _Field:
    many, optional = typing.get_origin(hint) is tuple, typing.get_origin(hint) is types.UnionType
    return _Field(typing.get_args(hint)[0] if many or optional else hint, many, optional)


def _record(value: Any, kind: Any) -> Any:
    if not issubclass(kind, Record):
        return value
    fields = _fields(kind)
    known = type(value) is dict and fields.keys() - kind._newer <= value.keys() <= fields.keys()
    require(known, f"want the fields {list(fields)}")
    require(not any(value[name] == [] for name in kind._newer & value.keys()), "an empty field that is left out")
    return kind(**{name: fields[name].typed(item) for name, item in value.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return [_plain(item) for item in value] if type(value) is tuple else value


def _envelope(body: object, kind: str) -> dict[str, object]:
    return {"body": body, "checksum": digest_of(body), "format_version": FORMAT_VERSION, "kind": kind}


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(value: object) -> str:
    return blake2b(_canonical(value), digest_size=8).hexdigest()
