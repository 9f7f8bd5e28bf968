"""A pin keeps a checkpoint from retention: a small file in its directory, whose presence alone counts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ckpt_engine import disk_names, listing
from ckpt_engine.errors import CkptError, ConfigError, NotFound, StorageError
from ckpt_engine.manifest import Attempt
from ckpt_engine.record import Record, require
from ckpt_engine.storage.base import Storage, is_missing, write_durably

MAX_REASON = 500
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Pin(Record):
    """``.pinned``: why this checkpoint must not go."""

    kind: ClassVar[str] = "pin"

    reason: str

    def _check(self) -> None:
        require(len(self.reason) <= MAX_REASON, f"a reason has at most {MAX_REASON} characters")


def pin(storage: Storage, folder: str, reason: str) -> None:
    """Pin what ``folder`` holds or will hold. Raises ConfigError (the reason), NotFound, StorageError.

    After a crash: pinned or not; pinned once it has returned.
    """
    try:
        data = Pin(reason).to_bytes()
    except ValueError as error:
        raise ConfigError(f"cannot pin {folder}: {error}") from error
    try:
        write_durably(storage, os.path.join(folder, disk_names.PIN), data)
    except StorageError as error:
        if is_missing(error):
            raise NotFound(f"{folder} was removed: there is nothing to pin") from error
        raise


def unpin(storage: Storage, folder: str) -> bool:
    """False: it was not pinned. After a crash: pinned or not; not pinned once it has returned."""
    if not storage.unlink(os.path.join(folder, disk_names.PIN)):
        return False
    storage.sync_dir(folder)
    return True


def reason_of(storage: Storage, folder: str) -> str:
    """Why ``folder`` is pinned; "" if nobody said so, or what lies there is no pin of ours: it pins all the same."""
    path = os.path.join(folder, disk_names.PIN)
    try:
        return Pin.from_bytes(storage.read_small(path, _LIMIT_BYTES) or b"", path).reason
    except CkptError:
        return ""


def folder_of(storage: Storage, root: str, tag: str) -> str:
    """The commit directory ``tag``. Raises NotFound if it holds no checkpoint of ours, committed or on its way."""
    folder = os.path.join(root, tag)
    there = [entry.name for entry in storage.list_dir(folder)]
    if "/" in tag or not any(map(disk_names.is_ours, there)):
        raise NotFound(f"{root} has no checkpoint {tag!r}, committed or on its way: see 'ckpt-engine list {root}'")
    return folder


def folders_of(
    storage: Storage, root: str, root_id: str, step: int, flying: Iterable[tuple[Attempt, str]]
) -> list[str]:
    """Commit directories of ``step``, newest attempt first: committed ones of this root, and those in flight.

    Raises NotFound if there is none, StorageError.
    """
    found = [(one.manifest.attempt, one.commit_dir) for one in listing.list_committed(storage, root).committed]
    known = [(attempt, folder) for attempt, folder in found if attempt.root_id == root_id]
    chosen = [(one.order, folder) for one, folder in (*known, *flying) if one.step == step]
    if not chosen:
        steps = sorted({attempt.step for attempt, _ in known})
        raise NotFound(f"no checkpoint of step {step} is committed or on its way in {root}; there are {steps}")
    return list(dict.fromkeys(folder for _, folder in sorted(chosen, reverse=True)))
