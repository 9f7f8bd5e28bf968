"""Receipts, completeness, publish: pure functions over ``storage``.

The life of an attempt on disk: every rank's files and shard record below the attempt's directory → one receipt per
node, if there are several → whoever sees all receipts writes the manifest (now the checkpoint counts) → plain names
→ ``latest``.
Any number of savers may do the last three at once, and die anywhere in them (see ``settle``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckpt_engine import disk_names
from ckpt_engine.errors import Cancelled, Corrupt, PersistError, StorageError
from ckpt_engine.listing import manifest_or_none
from ckpt_engine.manifest import Attempt, Failure, FileEntry, Manifest, Receipt, RunClaim, ShardRecord
from ckpt_engine.record import MAX_RECORD_BYTES
from ckpt_engine.runs import on_the_line
from ckpt_engine.settle import finish, make_parents, sync_dirs_of
from ckpt_engine.storage.base import Storage, is_missing, make_dirs, write_durably


@dataclass(frozen=True, slots=True)
class Published:
    """Committed. ``trouble``: what went wrong after the manifest, for ``settle.roll_forward`` to mend."""

    manifest: Manifest
    trouble: StorageError | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not yet. ``missing_ranks``: all ranks no receipt speaks for."""

    missing_nodes: tuple[int, ...]
    missing_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    failure: Failure


@dataclass(frozen=True, slots=True)
class NotOnLine:
    """Refused: the attempt was abandoned, or ``by``, a later one, is committed under the same tag."""

    by: Attempt | None = None


Outcome = Published | Waiting | Failed | NotOnLine


def commit_dir(root: str, tag: str) -> str:
    return os.path.join(root, tag)


def attempt_path(root: str, attempt: Attempt, name: str = "", *, node: int | None = None) -> str:
    """Where ``name`` lies until its manifest is written. ``node``: only where the layout is node-local."""
    folder = os.path.join(commit_dir(root, attempt.tag), disk_names.attempt_dir(attempt.id, node))
    return os.path.join(folder, name) if name else folder


@contextlib.contextmanager
def cancelled_if_gone(attempt: Attempt) -> Iterator[None]:
    """ENOENT inside means that somebody removed the checkpoint's directory: Cancelled. It is never made again."""
    try:
        yield
    except StorageError as error:
        if not is_missing(error):
            raise
        raise Cancelled(f"{attempt.tag} (step {attempt.step}): its directory was removed meanwhile") from error


def make_tag_dir(storage: Storage, root: str, tag: str) -> None:
    """For ranks, before QUEUED. Makes its parents too, which are durable once it has returned.

    It is durable itself when ``make_attempt_dir`` has returned: the training does not wait for a disk that is busy.
    """
    path = commit_dir(root, tag)
    try:
        storage.make_dir(path)
    except StorageError as error:
        if not is_missing(error):
            raise
        make_dirs(storage, path)


def make_attempt_dir(
    storage: Storage, root: str, attempt: Attempt, names: Iterable[str] = (), *, node: int | None = None
) -> None:
    """For savers, before the first file: the attempt's directory and those within it that ``names`` need.

    Raises Cancelled if the tag's directory is gone. After a crash: all there once it has returned.
    """
    folder = attempt_path(root, attempt, node=node)
    with cancelled_if_gone(attempt):
        storage.make_dir(folder)
        storage.sync_dir(commit_dir(root, attempt.tag))
        storage.sync_dir(root)
        make_parents(storage, folder, names)


def seal_external(storage: Storage, root: str, attempt: Attempt, name: str) -> FileEntry:
    """A file the framework wrote under its plain name, made durable and checksummed.

    Raises Cancelled if it is gone; PersistError, which nobody tries again, if its fsync failed: the next one would
    succeed, though the bytes that the first lost are nowhere else.
    """
    folder = commit_dir(root, attempt.tag)
    path = os.path.join(folder, name)
    with cancelled_if_gone(attempt):
        try:
            storage.sync_file(path)
        except StorageError as error:
            if is_missing(error):
                raise
            raise PersistError(f"{path} may be lost, and only its writer has its bytes: {error}") from error
        sync_dirs_of(storage, folder, [name])
        storage.sync_dir(root)
        nbytes, crc = storage.crc_of_file(path)
    return FileEntry(name, nbytes, crc, "external")


def write_shard_record(storage: Storage, root: str, record: ShardRecord) -> None:
    """This rank's files are safe here. REQUIRES: each went through ``write_range`` or ``seal_external``.

    Raises Cancelled, StorageError. After a crash: the record or none; files without a record do not count.
    """
    folder = attempt_path(root, record.attempt, node=record.local_node)
    with cancelled_if_gone(record.attempt):
        sync_dirs_of(storage, folder, [entry.name for entry in record.files if entry.origin != "external"])
        write_durably(storage, os.path.join(folder, disk_names.shard_record(record.rank)), record.to_bytes())


def drop_unfinished(
    storage: Storage, root: str, attempt: Attempt, rank: int, names: Iterable[str], *, node: int | None = None
) -> None:
    """Remove what is there of a rank's part, unless its record is: that counts, as of an earlier saver.

    After a crash: files without a record do not count.
    """
    folder = attempt_path(root, attempt, node=node)
    if storage.size(os.path.join(folder, disk_names.shard_record(rank))) is None:
        for name in names:
            storage.unlink(os.path.join(folder, name))


def read_shard_records(
    storage: Storage, root: str, attempt: Attempt, ranks: Iterable[int], *, node: int | None = None
) -> tuple[ShardRecord, ...]:
    """The records of ``ranks`` that are there, opened by name. A damaged one, or another attempt's, is not there."""
    found = []
    for rank in ranks:
        path = attempt_path(root, attempt, disk_names.shard_record(rank), node=node)
        with contextlib.suppress(Corrupt):
            data = storage.read_small(path, MAX_RECORD_BYTES)
            record = None if data is None else ShardRecord.from_bytes(data, path)
            if record is not None and record.attempt == attempt and record.rank == rank:
                found.append(record)
    return tuple(found)


def write_receipt(storage: Storage, root: str, receipt: Receipt) -> Receipt:
    """This node's statement; what now stands. A complete one is never replaced by a failed one: peers may have used it.

    Raises Cancelled, StorageError. After a crash: the receipt or none.
    """
    path = attempt_path(root, receipt.attempt, disk_names.receipt(receipt.node), node=receipt.local_node)
    if receipt.failed is not None:
        standing = _read_receipt(storage, path, receipt.attempt, receipt.node)
        if isinstance(standing, Receipt) and standing.failed is None:
            return standing
    with cancelled_if_gone(receipt.attempt):
        write_durably(storage, path, receipt.to_bytes())
    return receipt


def read_receipts(
    storage: Storage, root: str, attempt: Attempt, nodes: Iterable[int], *, node: int | None = None
) -> dict[int, Receipt | Failure]:
    """The receipts of ``nodes`` that are there, opened by name; a damaged one, or another attempt's, is a Failure."""
    found = {}
    for peer in nodes:
        path = attempt_path(root, attempt, disk_names.receipt(peer), node=node)
        receipt = _read_receipt(storage, path, attempt, peer)
        if receipt is not None:
            found[peer] = receipt
    return found


def try_publish(
    storage: Storage,
    root: str,
    attempt: Attempt,
    *,
    nodes: int,
    world: int,
    runs: Iterable[RunClaim],
    node: int | None = None,
    own: Receipt | None = None,
) -> Outcome:
    """Publish ``attempt`` if every receipt is there; idempotent, by any number of savers at once.

    ``runs``: as of now (``read_runs``). ``node``: this node, where the layout is node-local: it publishes its own.
    ``own``: the receipt of a node that needs no other's; none on disk is asked then.
    Raises Cancelled: the directory is gone; StorageError: try again.

    After a crash: what was committed here before, or this attempt; ``settle.roll_forward`` finishes the rest.
    """
    folder = commit_dir(root, attempt.tag)
    older = manifest_or_none(storage, folder, node)
    if older is not None and older.attempt == attempt:  # a peer's, who may have died right after it
        return Published(older, finish(storage, root, older, keep_copies=True))
    if older is not None and older.attempt.order >= attempt.order:
        return NotOnLine(older.attempt)
    if not on_the_line(attempt, runs):
        return NotOnLine()
    decided = _decide(storage, root, attempt, nodes, world, node, own)
    if not isinstance(decided, Manifest):
        return decided
    try:
        _write_manifest(storage, root, decided, older)
    except Cancelled:
        if manifest_or_none(storage, folder, node) == decided:  # a peer published it and has tidied up
            return Published(decided, finish(storage, root, decided, keep_copies=True))
        raise
    return Published(decided, finish(storage, root, decided, keep_copies=older is not None))


def _decide(
    storage: Storage, root: str, attempt: Attempt, nodes: int, world: int, node: int | None, own: Receipt | None
) -> Manifest | Waiting | Failed:
    wanted = range(nodes) if node is None else [node]
    found: dict[int, Receipt | Failure]
    found = read_receipts(storage, root, attempt, wanted, node=node) if own is None else {own.node: own}
    receipts = [receipt for receipt in found.values() if isinstance(receipt, Receipt)]
    for answer in found.values():
        failure = answer if isinstance(answer, Failure) else answer.failed
        if failure is not None:
            return Failed(failure)
    missing = tuple(peer for peer in wanted if peer not in found)
    if missing:
        covered = {shard.rank for receipt in receipts for shard in receipt.shards}
        return Waiting(missing, tuple(rank for rank in range(world) if rank not in covered))
    try:
        manifest = Manifest.of(receipts)
    except ValueError as error:
        return Failed(Failure(-1, f"the receipts contradict each other: {error}"))
    if (manifest.world, manifest.nodes, manifest.node) != (world, nodes, node):
        return Failed(
            Failure(-1, f"the receipts are of {manifest.world} ranks on {manifest.nodes} nodes, not {world} on {nodes}")
        )
    return manifest


def _write_manifest(storage: Storage, root: str, manifest: Manifest, older: Manifest | None) -> None:
    """The switch. The older manifest lives on as a tombstone, so that its names can be cleared after any crash."""
    folder = commit_dir(root, manifest.attempt.tag)
    with cancelled_if_gone(manifest.attempt):
        if older is not None:
            path = os.path.join(folder, disk_names.tombstone(older.attempt.id, older.node))
            write_durably(storage, path, older.to_bytes())
        # The temporary file lies in the attempt's directory: no manifest can come up once its files were removed.
        temp_dir = attempt_path(root, manifest.attempt, node=manifest.node)
        path = os.path.join(folder, disk_names.manifest(manifest.node))
        write_durably(storage, path, manifest.to_bytes(), temp_dir=temp_dir)


def _read_receipt(storage: Storage, path: str, attempt: Attempt, node: int) -> Receipt | Failure | None:
    data = storage.read_small(path, MAX_RECORD_BYTES)
    if data is None:
        return None
    try:
        receipt = Receipt.from_bytes(data, path)
    except Corrupt as error:
        return Failure(-1, str(error), "read", path)
    if receipt.attempt != attempt or receipt.node != node:
        return Failure(-1, f"{path} is the receipt of another attempt or node", "read", path)
    return receipt
