"""What a root holds: committed, damaged and foreign checkpoints; where their files lie; whether they are whole.

A root is read by listing it, never by ``latest``. Damage is an answer, not an exception.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_engine import disk_names
from ckpt_engine.errors import Corrupt, NotFound, StorageError
from ckpt_engine.manifest import Committed, FileEntry, Manifest
from ckpt_engine.record import MAX_RECORD_BYTES
from ckpt_engine.storage.base import Storage, is_missing

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_KEPT, _KEPT_BYTES = 16, 1 << 20
"""How many parsed manifests are kept, and how long they may be."""


@dataclass(frozen=True, slots=True)
class Listing:
    """``committed``: newest first by (generation, seq); ``damaged``: manifests that cannot be read, and why."""

    committed: tuple[Committed, ...]
    damaged: tuple[Corrupt | StorageError, ...]


def read_manifest(storage: Storage, commit_dir: str, node: int | None = None) -> Manifest | None:
    """The manifest of ``commit_dir`` (of ``node``, where node-local), None if there is none. Raises Corrupt."""
    return read_manifest_at(storage, os.path.join(commit_dir, disk_names.manifest(node)))


def manifest_or_none(storage: Storage, commit_dir: str, node: int | None) -> Manifest | None:
    """For writers: a damaged manifest gives way like a missing one. Raises StorageError if it cannot be read."""
    try:
        return read_manifest(storage, commit_dir, node)
    except Corrupt:
        return None


def read_manifest_at(storage: Storage, path: str) -> Manifest | None:
    data = storage.read_small(path, MAX_RECORD_BYTES)
    if data is None:
        return None
    return _parsed(data, path) if len(data) <= _KEPT_BYTES else Manifest.from_bytes(data, path)


@functools.lru_cache(_KEPT)
def _parsed(data: bytes, path: str) -> Manifest:
    """Each commit reads the manifests there are several times, and most of them have not changed."""
    return Manifest.from_bytes(data, path)


def list_committed(storage: Storage, root: str) -> Listing:
    """Every committed checkpoint of ``root``. Raises StorageError only if ``root`` itself cannot be read."""
    committed: list[Committed] = []
    damaged: list[Corrupt | StorageError] = []
    for folder in tag_dirs(storage, root):
        found, broken = in_tag(storage, folder)
        committed += found
        damaged += broken
    # Of two names of one checkpoint (somebody linked or copied it) its own comes first.
    committed.sort(
        key=lambda one: (one.order, os.path.basename(one.commit_dir) == one.manifest.attempt.tag), reverse=True
    )
    return Listing(tuple(committed), tuple(damaged))


def tag_dirs(storage: Storage, root: str) -> Iterator[str]:
    """Directories of ``root`` that can be commit directories."""
    for entry in storage.list_dir(root):
        if entry.is_dir and entry.name != disk_names.LOST_AND_FOUND and not disk_names.is_ours(entry.name):
            yield os.path.join(root, entry.name)


def in_tag(storage: Storage, commit_dir: str) -> tuple[list[Committed], list[Corrupt | StorageError]]:
    """The manifests of one commit directory (several where node-local roots are one directory), and damaged ones."""
    found: list[Committed] = []
    broken: list[Corrupt | StorageError] = []
    try:
        there = [entry.name for entry in storage.list_dir(commit_dir)]
    except StorageError as error:
        return found, [error]
    for name in filter(disk_names.is_manifest, there):
        try:
            manifest = read_manifest_at(storage, os.path.join(commit_dir, name))
            if manifest is not None and disk_names.manifest(manifest.node) == name:
                found.append(Committed(manifest, commit_dir, disk_names.PIN in there))
        except (Corrupt, StorageError) as error:
            broken.append(error)
    return found, broken


def unmanaged(storage: Storage, root: str) -> tuple[str, ...]:
    """Tags that hold files and no trace of us: plain checkpoints of DeepSpeed or anyone. Never deleted."""
    found = []
    for folder in tag_dirs(storage, root):
        names = [entry.name for entry in storage.list_dir(folder)]
        if names and not any(disk_names.is_ours(name) for name in names):
            found.append(os.path.basename(folder))
    return tuple(found)


def foreign(storage: Storage, committed: Committed) -> tuple[str, ...]:
    """Names in a commit directory that neither its manifest nor its format know: never touched, they outlive it."""
    known = {entry.name.partition("/")[0] for entry in committed.manifest.files()}
    names = [entry.name for entry in storage.list_dir(committed.commit_dir)]
    return tuple(name for name in names if name not in known and not disk_names.is_ours(name))


def highest_generation(storage: Storage, root: str) -> int:
    """The highest generation that left a trace in ``root``, damaged or not; 0 if none did."""
    generations = [0]
    for entry in storage.list_dir(root):
        generations.append(disk_names.parse_run_claim(entry.name) or 0)
        generations.append((disk_names.parse_offer(entry.name) or (0,))[0])
    for folder in tag_dirs(storage, root):
        for entry in storage.list_dir(folder):
            name = disk_names.parse_attempt_dir(entry.name) or disk_names.parse_tombstone(entry.name)
            generations.append(name.generation if name else 0)
    generations += [one.manifest.attempt.generation for one in list_committed(storage, root).committed]
    return max(generations)


def paths_of(committed: Committed, entry: FileEntry) -> tuple[str, ...]:
    """Where a reader looks for a file, in this order: below the attempt's directory, under its plain name."""
    plain = os.path.join(committed.commit_dir, entry.name)
    if entry.origin == "external":
        return (plain,)
    manifest = committed.manifest
    folder = disk_names.attempt_dir(manifest.attempt.id, manifest.node)
    return (os.path.join(committed.commit_dir, folder, entry.name), plain)


def open_path(storage: Storage, committed: Committed, entry: FileEntry) -> str | None:
    """The path that holds ``entry`` now; None if none does. It may move: prefer ``read_verified``."""
    return next((path for path in paths_of(committed, entry) if storage.size(path) is not None), None)


def read_verified(
    storage: Storage,
    committed: Committed,
    entry: FileEntry,
    buffer: WriteableBuffer,
    *,
    offset: int = 0,
    threads: int = 1,
) -> str:
    """Read ``entry`` into ``buffer[offset:]``, checked against size and CRC-32; the path it was read from.

    Raises Corrupt: the bytes differ, or no file is there; NotFound: the checkpoint was removed or saved anew
    meanwhile, so list again; StorageError.
    """
    damage: Corrupt | None = None
    for path in paths_of(committed, entry):
        try:
            got = storage.read_into(path, buffer, offset=offset, nbytes=entry.nbytes, threads=threads)
            if got == entry.crc32 and storage.size(path) in (entry.nbytes, None):
                return path
            damage = _differs(path, entry, got)
        except Corrupt as error:
            damage = error
        except StorageError as error:
            if not is_missing(error):
                raise
    _require_current(storage, committed)
    raise damage or _differs(paths_of(committed, entry)[-1], entry, None)


def verify(storage: Storage, committed: Committed) -> tuple[Corrupt, ...]:
    """Read every file of a checkpoint; what is wrong, () if it is whole. Raises NotFound as ``read_verified`` does."""
    wrong: list[Corrupt] = []
    for entry in committed.manifest.files():
        if entry.origin != "tool":
            damage = _check(storage, committed, entry)
            wrong += [damage] if damage else []
    if wrong:
        _require_current(storage, committed)
    return tuple(wrong)


def _check(storage: Storage, committed: Committed, entry: FileEntry) -> Corrupt | None:
    damage = _differs(paths_of(committed, entry)[-1], entry, None)
    for path in paths_of(committed, entry):
        try:
            nbytes, crc = storage.crc_of_file(path)
        except StorageError as error:
            if not is_missing(error):
                damage = _differs(path, entry, error)
            continue
        if (nbytes, crc) == (entry.nbytes, entry.crc32):
            return None
        damage = _differs(path, entry, crc if nbytes == entry.nbytes else f"{nbytes} bytes")
    return damage


def _differs(path: str, entry: FileEntry, got: object) -> Corrupt:
    found = "missing" if got is None else f"found {got}"
    message = f"{path}: want CRC-32 {entry.crc32} over {entry.nbytes} bytes, {found}"
    return Corrupt(message, path=path, want=entry.crc32, got=got)


def _require_current(storage: Storage, committed: Committed) -> None:
    """Before damage is reported: is this still the manifest? A re-save moves files away under its reader."""
    now = read_manifest(storage, committed.commit_dir, committed.manifest.node)
    if now is None or now.attempt != committed.manifest.attempt:
        raise NotFound(f"{committed.commit_dir}: this checkpoint was removed or saved anew while it was read")
