"""After the manifest: plain names, then ``latest``. Nothing here can undo a commit, so every step may be repeated.

A file gets its plain name as a second link, synced, before its first name (below the attempt's directory) goes. Where
an older checkpoint has to give way under the same names, the first name stays as long as the manifest does. So
savers that publish at once, each removing what it takes for old, never remove the last name of a file that
a manifest names. Without hard links a rename has to do, and then old names are replaced, not cleared.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Sequence

from ckpt_engine import disk_names
from ckpt_engine.errors import Corrupt, StorageError
from ckpt_engine.listing import in_tag, list_committed, read_manifest, read_manifest_at
from ckpt_engine.manifest import Committed, Manifest
from ckpt_engine.storage.base import NO_LINKS, Storage, is_missing, remove_tree, write_durably


def finish(storage: Storage, root: str, manifest: Manifest, *, keep_copies: bool) -> StorageError | None:
    """Settle and update ``latest``; what went wrong is told, not raised: the checkpoint is committed."""
    try:
        done_with = _settle(storage, root, manifest, keep_copies)
        update_latest(storage, root, manifest.attempt.root_id, manifest)
        done_with()
    except StorageError as error:
        return error
    return None


def roll_forward(storage: Storage, root: str, tag: str) -> tuple[StorageError, ...]:
    """Finish what an interrupted publish of ``tag`` left to do; what could not be done. Cheap if there is nothing.

    After a crash: call it again.
    """
    trouble = []
    for one in in_tag(storage, os.path.join(root, tag))[0]:
        if one.manifest.attempt.tag == tag:
            trouble.append(finish(storage, root, one.manifest, keep_copies=True))
    return tuple(error for error in trouble if error is not None)


def update_latest(storage: Storage, root: str, root_id: str, settled: Manifest | None = None) -> None:
    """``latest`` names the newest committed tag of this root, and still does if another saver commits meanwhile.

    The newest's plain names come first, unless its caller has ``settled`` it: who published it may have died in them.

    After a crash: the old name or a newer one.
    """
    path = os.path.join(root, disk_names.LATEST)
    written = None
    while (newest := _newest(storage, root, root_id)) is not None and newest.commit_dir != written:
        written = newest.commit_dir
        data = os.fsencode(os.path.basename(written))
        if not _holds(storage, path, data):
            if newest.manifest != settled and newest.manifest.attempt.tag == os.path.basename(written):
                _settle(storage, root, newest.manifest, keep_copies=True)
            write_durably(storage, path, data)
        else:
            storage.sync_dir(root)  # it may be another saver's, who has not come to its sync


def names_of_peers(storage: Storage, folder: str, manifest: Manifest) -> set[str]:
    """Names that manifests of other nodes use here, where node-local roots turn out to be one directory.

    Each looks after its own manifest is there, so of two that use one name at least one sees the other and
    keeps its hands off; the file of that one stays below its attempt's directory, where readers look first.
    """
    names: set[str] = set()
    for peer in range(manifest.nodes if manifest.node is not None else 0):
        if peer != manifest.node:
            with contextlib.suppress(Corrupt):
                other = read_manifest(storage, folder, peer)
                names |= {entry.name for entry in other.files()} if other else set()
    return names


def parents_of(names: Iterable[str]) -> list[str]:
    """The relative directories ``names`` lie in, outermost first."""
    found: set[str] = set()
    for name in names:
        parts = name.split("/")
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return sorted(found)


def sync_dirs_of(storage: Storage, folder: str, names: Sequence[str]) -> None:
    """The directories that ``names`` lie in, ``folder`` itself included."""
    for parent in parents_of(names):
        storage.sync_dir(os.path.join(folder, parent))
    if names:
        storage.sync_dir(folder)


def make_parents(storage: Storage, folder: str, names: Iterable[str]) -> None:
    for parent in parents_of(names):
        path = os.path.join(folder, parent)
        storage.make_dir(path)
        storage.sync_dir(os.path.dirname(path))


def _settle(storage: Storage, root: str, manifest: Manifest, keep_copies: bool) -> Callable[[], None]:
    """Order: clear the older checkpoint's names, sync, link, sync. Returns how to drop what is done with then."""
    folder = os.path.join(root, manifest.attempt.tag)
    storage.sync_dir(folder)  # the manifest may be another publisher's, who has not come to its sync
    copies = os.path.join(folder, disk_names.attempt_dir(manifest.attempt.id, manifest.node))
    tombstones = _tombstones(storage, folder, manifest)
    taken = names_of_peers(storage, folder, manifest)
    own = [entry.name for entry in manifest.files() if entry.origin == "shard" and entry.name not in taken]
    there = [name for name in own if storage.size(os.path.join(copies, name)) is not None]
    waiting = [name for name in there if not storage.same_file(os.path.join(copies, name), os.path.join(folder, name))]
    if tombstones:
        old = {entry.name for older in tombstones.values() for entry in older.files() if entry.origin == "shard"}
        keep = taken | {entry.name for entry in manifest.files() if entry.origin == "external"}
        _clear(storage, folder, old - keep - set(own), parents_of(own))
        if waiting and _has_links(storage, copies, waiting[0]):
            _clear(storage, folder, old.intersection(waiting), parents_of(own))
    _install_all(storage, copies, folder, waiting)
    sync_dirs_of(storage, folder, there)  # links of another saver, too
    tools = [entry.name for entry in manifest.files() if entry.origin == "tool"]
    moved = [_move_if_there(storage, os.path.join(copies, name), os.path.join(root, name)) for name in tools]
    if any(moved):
        storage.sync_dir(root)

    def drop() -> None:
        for path, older in tombstones.items():
            remove_tree(storage, os.path.join(folder, disk_names.attempt_dir(older.attempt.id, older.node)))
            storage.unlink(path)
        if not (keep_copies or tombstones):
            for name in there:
                storage.unlink(os.path.join(copies, name))

    return drop


def _clear(storage: Storage, folder: str, doomed: Collection[str], needed: Collection[str]) -> None:
    """Stock tools shall find a whole checkpoint or a missing file: old names go, durably, before new ones come."""
    for name in sorted(doomed):
        storage.unlink(os.path.join(folder, name))
    for parent in reversed(parents_of(doomed)):
        path = os.path.join(folder, parent)
        if (parent in needed or not storage.remove_dir(path)) and storage.size(path) is not None:
            storage.sync_dir(path)
    storage.sync_dir(folder)  # even if another saver has removed them all: it may not have come to its sync


def _install_all(storage: Storage, copies: str, folder: str, names: list[str]) -> None:
    """Model states last: loaders look for them first."""
    make_parents(storage, folder, names)
    for name in sorted(names, key=lambda name: (name.endswith("model_states.pt"), name)):
        _install(storage, os.path.join(copies, name), os.path.join(folder, name))


def _tombstones(storage: Storage, folder: str, manifest: Manifest) -> dict[str, Manifest]:
    """Older manifests whose names have to go. One that equals the current manifest is of a re-save not yet decided."""
    found = {}
    for entry in storage.list_dir(folder):
        name = disk_names.parse_tombstone(entry.name)
        if name is not None and name.node == manifest.node:
            path = os.path.join(folder, entry.name)
            older = buried(storage, path)
            if older is not None and older.attempt != manifest.attempt:
                found[path] = older
    return found


def buried(storage: Storage, path: str) -> Manifest | None:
    """The manifest in a tombstone; None if it is gone, damaged, or another's than its name says."""
    try:
        older = read_manifest_at(storage, path)
    except Corrupt:
        return None
    own = older is not None and disk_names.tombstone(older.attempt.id, older.node) == os.path.basename(path)
    return older if own else None


def _install(storage: Storage, copy: str, plain: str) -> None:
    try:
        storage.link(copy, plain)
    except StorageError as error:
        if error.errno in NO_LINKS:
            _move_if_there(storage, copy, plain)
        elif error.errno == errno.EEXIST:
            _replace(storage, copy, plain)
        elif not is_missing(error):  # missing: another saver has done it
            raise


def _replace(storage: Storage, copy: str, plain: str) -> None:
    if storage.same_file(copy, plain):
        return
    temp = os.path.join(os.path.dirname(plain), disk_names.temp())
    try:
        storage.link(copy, temp)
    except StorageError as error:
        if not is_missing(error):
            raise
        return
    storage.rename(temp, plain)


def _move_if_there(storage: Storage, source: str, target: str) -> bool:
    if storage.size(source) is None or storage.same_file(source, target):  # a rename between two links does nothing
        storage.unlink(source)
        return False
    try:
        storage.rename(source, target)
    except StorageError as error:
        if not is_missing(error):
            raise
        return False
    return True


def _has_links(storage: Storage, folder: str, name: str) -> bool:
    temp = os.path.join(folder, disk_names.temp())
    try:
        storage.link(os.path.join(folder, name), temp)
    except StorageError as error:
        return error.errno not in NO_LINKS
    storage.unlink(temp)
    return True


def _holds(storage: Storage, path: str, data: bytes) -> bool:
    try:
        return storage.read_small(path, len(data)) == data
    except StorageError:  # longer, a directory, a dead link: to be replaced
        return False


def _newest(storage: Storage, root: str, root_id: str) -> Committed | None:
    found = list_committed(storage, root).committed
    return next((one for one in found if one.manifest.attempt.root_id == root_id), None)
