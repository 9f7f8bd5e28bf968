"""Remove what may go: a checkpoint that retention gave up, and what nothing refers to.

A manifest goes first, by becoming a tombstone: from then on the checkpoint does not count, and whoever comes next
can finish. Names that are not ours, and files no manifest of ours named, are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ckpt_engine import disk_names, runs
from ckpt_engine.disk_names import AttemptName
from ckpt_engine.errors import Corrupt, StorageError
from ckpt_engine.listing import in_tag, list_committed, open_path, paths_of, read_manifest_at, tag_dirs
from ckpt_engine.manifest import Committed, Manifest
from ckpt_engine.settle import buried, names_of_peers, parents_of, roll_forward
from ckpt_engine.storage.base import NO_LINKS, Storage, remove_tree


@dataclass(frozen=True, slots=True)
class Removal:
    """``done``: nothing of the checkpoint is left; ``kept``: names that stay in its directory, foreign or for later."""

    done: bool
    kept: tuple[str, ...] = ()


def remove_checkpoint(storage: Storage, committed: Committed) -> Removal:
    """Un-commit a checkpoint, then remove its files; idempotent, by any number of savers at once.

    Does nothing if it is pinned, the manifest names another attempt meanwhile, or a later one is on its way under this
    tag. Whoever pins writes the pin, then looks for the manifest; here the manifest goes, then comes a look for a pin:
    of two at once, one sees the other.
    REQUIRES: the caller writes no receipt or manifest for this tag while it runs.

    After a crash: still committed, or a tombstone that ``sweep`` follows up.
    """
    folder, manifest = committed.commit_dir, committed.manifest
    path = os.path.join(folder, disk_names.manifest(manifest.node))
    grave = os.path.join(folder, disk_names.tombstone(manifest.attempt.id, manifest.node))
    names = storage.list_dir(folder)
    coming = [name for entry in names if (name := disk_names.parse_attempt_dir(entry.name)) is not None]
    wanted = any(name.order > committed.order for name in coming) or disk_names.PIN in [entry.name for entry in names]
    if wanted or not _is_still(storage, path, manifest):
        return Removal(False, tuple(entry.name for entry in names))
    try:
        storage.rename(path, grave)
    except StorageError:
        if storage.size(path) is not None:
            raise
    return _bury(storage, folder, grave)


def sweep(
    storage: Storage,
    root: str,
    *,
    node: int,
    live: Collection[str],
    sweep_after_s: float,
    age_of: Callable[[str], float],
) -> tuple[str, ...]:
    """Finish interrupted publishes, remove leftovers; the paths that went. Leaves a tag with a damaged manifest alone.

    ``live``: ids of attempts that a local slot holds, or whose outcome this saver still awaits. ``age_of``: seconds
    since anything was seen to change at a path. An attempt's leftovers go when a later attempt is committed and
    they are ``sweep_after_s`` old; at once, where they are of this ``node`` alone and it made no receipt.

    After a crash: call it again.
    """
    newest = next((one.order for one in committed_here(storage, root)), (-1, -1))
    job = _Sweep(storage, root, node, live, newest, lambda path: age_of(path) >= sweep_after_s)
    job.run()
    return tuple(job.gone)


def committed_here(storage: Storage, root: str) -> list[Committed]:
    """The committed checkpoints that were made for this root, newest first; none if its id is lost or damaged.

    One of another root, which somebody copied in, does not count: orders of two roots cannot be compared.
    """
    try:
        own = runs.root_id(storage, root)
    except Corrupt:
        return []
    return [one for one in list_committed(storage, root).committed if one.manifest.attempt.root_id == own]


@dataclass(frozen=True, slots=True)
class _Sweep:
    storage: Storage
    root: str
    node: int
    live: Collection[str]
    newest: tuple[int, int]
    is_old: Callable[[str], bool]
    gone: list[str] = field(default_factory=list)

    def run(self) -> None:
        for entry in self.storage.list_dir(self.root):
            path = os.path.join(self.root, entry.name)
            if (disk_names.parse_lease(entry.name) and self.is_old(path)) or self._is_past_offer(path, entry.name):
                with contextlib.suppress(StorageError):  # a directory in its place
                    self._unlink(path)
        self._temps(self.root)
        for folder in tag_dirs(self.storage, self.root):
            with contextlib.suppress(StorageError):  # one directory in trouble does not keep the others
                self._tag(folder)

    def _is_past_offer(self, path: str, name: str) -> bool:
        generation, node = disk_names.parse_offer(name) or (self.newest[0], -1)
        return generation < self.newest[0] and (node == self.node or self.is_old(path))

    def _tag(self, folder: str) -> None:
        committed, damaged = in_tag(self.storage, folder)
        if damaged:
            return
        before = len(self.gone)
        for one in committed:
            if unsettled(self.storage, one):
                roll_forward(self.storage, self.root, os.path.basename(folder))
        manifests = {one.manifest.node: one.manifest for one in committed}
        for entry in self.storage.list_dir(folder):
            path = os.path.join(folder, entry.name)
            grave = disk_names.parse_tombstone(entry.name)
            attempt = disk_names.parse_attempt_dir(entry.name)
            if grave is not None:
                self._tombstone(path, grave, manifests.get(grave.node))
            elif attempt is not None and self._may_go(path, attempt, manifests.get(attempt.node)):
                remove_tree(self.storage, path)
                self.gone.append(path)
        self._temps(folder)
        if len(self.gone) > before and not committed:
            self.storage.remove_dir(folder)

    def _tombstone(self, path: str, name: AttemptName, current: Manifest | None) -> None:
        if current is None:
            _bury(self.storage, os.path.dirname(path), path)
        elif current.attempt.id != name.id:
            roll_forward(self.storage, self.root, current.attempt.tag)
        elif self.is_old(path):  # of a re-save that never came to its manifest
            self.storage.unlink(path)
        if self.storage.size(path) is None:
            self.gone.append(path)

    def _may_go(self, path: str, name: AttemptName, current: Manifest | None) -> bool:
        if name.id in self.live:
            return False
        if current is not None and current.attempt.id == name.id:
            self._temps(path)
            return not any(self._has(path, entry.name) for entry in current.files() if entry.origin != "external")
        if name.order >= self.newest:
            return False
        alone = name.node == self.node and not self._has(path, disk_names.receipt(self.node))
        return alone or self.is_old(path)

    def _temps(self, folder: str) -> None:
        for entry in self.storage.list_dir(folder):
            path = os.path.join(folder, entry.name)
            if disk_names.is_temp(entry.name) and self.is_old(path):
                self._unlink(path)

    def _has(self, folder: str, name: str) -> bool:
        return self.storage.size(os.path.join(folder, name)) is not None

    def _unlink(self, path: str) -> None:
        if self.storage.unlink(path):
            self.gone.append(path)


def unsettled(storage: Storage, one: Committed) -> bool:
    """A publish that died after its manifest: some first name has no plain name beside it."""
    name = disk_names.attempt_dir(one.manifest.attempt.id, one.manifest.node)
    if storage.size(os.path.join(one.commit_dir, name)) is None:
        return False
    pairs = [paths_of(one, entry) for entry in one.manifest.files() if entry.origin != "external"]
    return any(storage.size(first) is not None and not storage.same_file(first, plain) for first, plain in pairs)


def _is_still(storage: Storage, path: str, manifest: Manifest) -> bool:
    try:
        now = read_manifest_at(storage, path)
    except Corrupt:
        return False
    return now is None or now.attempt == manifest.attempt


def _is_whole(storage: Storage, folder: str, manifest: Manifest, names: Collection[str]) -> bool:
    """False: its files have begun to go, or what lies under their names may be of another checkpoint."""
    files = [entry for entry in manifest.files() if entry.origin != "tool"]
    found = [(open_path(storage, Committed(manifest, folder), entry), entry.nbytes) for entry in files]
    alone = sum(disk_names.parse_tombstone(name) is not None for name in names) == 1
    return alone and all(path is not None and storage.size(path) == nbytes for path, nbytes in found)


def _take_back(storage: Storage, grave: str, path: str) -> None:
    """A manifest again, unless there is another one. After a crash: that, or a tombstone that will come back."""
    try:
        storage.link(grave, path)
    except StorageError as error:
        if error.errno in NO_LINKS:
            storage.rename(grave, path)
        elif error.errno != errno.EEXIST:
            raise
    else:
        storage.unlink(grave)
    storage.sync_dir(os.path.dirname(path))


def _bury(storage: Storage, folder: str, grave: str) -> Removal:
    """Remove the files a tombstone names, the attempt's directory, the tombstone, and the directory if it is empty.

    But if it was pinned in the instant at which its manifest went, that comes back.
    """
    manifest = buried(storage, grave)
    names = [entry.name for entry in storage.list_dir(folder)]
    if manifest is not None and disk_names.PIN in names and _is_whole(storage, folder, manifest, names):
        _take_back(storage, grave, os.path.join(folder, disk_names.manifest(manifest.node)))
        return Removal(False, tuple(names))
    done = manifest is None or _remove_files(storage, folder, manifest)
    if manifest is not None and done:
        storage.unlink(grave)
        storage.remove_dir(folder)
    kept = tuple(entry.name for entry in storage.list_dir(folder))
    return Removal(done and os.path.basename(grave) not in kept, kept)


def _remove_files(storage: Storage, folder: str, manifest: Manifest) -> bool:
    """False: something could not be removed, or a new manifest has come; the tombstone stays."""
    committed = os.path.join(folder, disk_names.manifest(manifest.node))
    taken = names_of_peers(storage, folder, manifest)
    names = [entry.name for entry in manifest.files() if entry.origin != "tool" and entry.name not in taken]
    try:
        storage.sync_dir(folder)  # the tombstone may be another saver's, who has not come to its sync
        for name in names:
            if storage.size(committed) is not None:
                return False
            storage.unlink(os.path.join(folder, name))
        remove_tree(storage, os.path.join(folder, disk_names.attempt_dir(manifest.attempt.id, manifest.node)))
        for parent in reversed(parents_of(names)):
            storage.remove_dir(os.path.join(folder, parent))
        storage.sync_dir(folder)
    except StorageError:  # busy, or permissions: a later sweep tries again
        return False
    return True
