"""Pure functions of production that an exploration calls a million times with the same arguments, remembered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ckpt_engine import disk_names
from ckpt_engine.record import Record

_PURE = (
    "is_ours", "is_temp", "is_manifest", "is_record", "check_file_name", "parse_attempt_dir", "parse_tombstone",
    "parse_run_claim", "parse_lease", "parse_offer",
)  # fmt: skip


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Inside, a record of the same bytes is parsed once, and a name is once. Errors are never remembered."""
    from_bytes = Record.__dict__["from_bytes"]
    known: dict[tuple[type, bytes], Any] = {}

    def parse(cls: type, data: bytes, path: str) -> Any:
        found = known.get((cls, data))
        if found is None:
            found = known[cls, data] = from_bytes.__func__(cls, data, path)
        return found

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, Record, "from_bytes", from_bytes)
        Record.from_bytes = classmethod(parse)  # type: ignore[method-assign, assignment]
        for name in _PURE:
            plain = getattr(disk_names, name)
            stack.callback(setattr, disk_names, name, plain)
            setattr(disk_names, name, functools.lru_cache(1 << 14)(plain))
        yield
