"""A pin keeps a checkpoint from retention: a small file in its directory, whose presence alone counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ckpt_engine import disk_names, listing
from ckpt_engine.errors import CkptError, ConfigError, NotFound, StorageError
from ckpt_engine.manifest import Attempt
from ckpt_engine.record import Record, require
from ckpt_engine.states import Order
from ckpt_engine.storage.base import Storage, is_missing, write_durably

MAX_REASON = 500
_LIMIT_BYTES = 1 << 16


class Target(NamedTuple):
    """What may be pinned. Not ``committed``: on its way; the pin waits for it."""

    order: Order
    folder: str
    committed: bool


@dataclass(frozen=True, slots=True)
class Pin(Record):
    """``.pinned``: why this checkpoint must not go."""

    kind: ClassVar[str] = "pin"

    reason: str

    def _check(self) -> None:
        require(len(self.reason) <= MAX_REASON, f"a reason has at most {MAX_REASON} characters")


def pin(storage: Storage, target: Target, reason: str) -> None:
    """Raises ConfigError (for the reason), NotFound if it was removed meanwhile, StorageError.

    After a crash: pinned or not; pinned once it has returned.
    """
    folder = target.folder
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
    # Retention that comes later sees the pin; here is a look whether it was faster.
    if target.committed and not any(disk_names.is_manifest(entry.name) for entry in storage.list_dir(folder)):
        storage.unlink(os.path.join(folder, disk_names.PIN))
        raise NotFound(f"{folder} was removed meanwhile: there is nothing to pin")


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


def by_tag(storage: Storage, root: str, tag: str) -> Target:
    """The checkpoint ``tag``. Raises NotFound if it holds no checkpoint of ours, committed or on its way."""
    folder, there = os.path.join(root, tag), list[str]()
    with contextlib.suppress(ValueError):
        disk_names.check_tag(tag)
        there = [entry.name for entry in storage.list_dir(folder)]
    if not any(map(disk_names.is_ours, there)):
        raise NotFound(f"{root} has no checkpoint {tag!r}, committed or on its way: see 'ckpt-engine list {root}'")
    return Target((0, 0), folder, committed=any(map(disk_names.is_manifest, there)))


def of_step(
    storage: Storage, root: str, root_id: str, step: int, in_flight: Iterable[tuple[Attempt, str]]
) -> list[Target]:
    """Checkpoints of ``step``, oldest first: committed ones of this root, and those on their way.

    Raises NotFound if there is none, StorageError.
    """
    stored = listing.list_committed(storage, root).committed
    known = [(one.manifest.attempt, one.commit_dir, True) for one in stored if one.manifest.attempt.root_id == root_id]
    known += [(attempt, folder, False) for attempt, folder in in_flight]
    found = sorted(Target(one.order, folder, committed) for one, folder, committed in known if one.step == step)
    if not found:
        steps = sorted({one.step for one, _, _ in known})
        raise NotFound(f"no checkpoint of step {step} is committed or on its way in {root}; there are {steps}")
    return found
