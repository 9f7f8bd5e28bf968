"""The directory of a ModelCheckpoint: which of its names are ours, what they lead to, and how they go.

With DeepSpeed ``<name>.ckpt`` is the commit directory. Else it is a link to ``ckpt_engine/<tag>/<name>.ckpt``; the tag
is the name, with ``%2F`` for a slash. Of rank 0, but for ``tag``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine import listing, sweep
from ckpt_engine.disk_names import PIN, check_tag, is_manifest
from ckpt_engine.events import log
from ckpt_engine.integrations.lightning_later import Later, link
from ckpt_engine.manifest import Committed
from ckpt_engine.storage.base import Storage, write_durably

FOLDER = "ckpt_engine"
_SNAPSHOT = "ckpt_engine-snapshot-"
_SEEN = "seen-of-lightning.json"


def place(path: Any) -> str:
    """One name for one place, however the way there is written."""
    parent, name = os.path.split(str(os.path.abspath(path)))
    return os.path.join(os.path.realpath(parent), name)


class Shelf:
    """``folder``: a real path, that of the ModelCheckpoint. ``own_remove``: Lightning's."""

    def __init__(self, storage: Storage, folder: str, *, deepspeed: bool, own_remove: Callable[[str], None]) -> None:
        self.root = folder if deepspeed else os.path.join(folder, FOLDER)
        self._storage = storage
        self._folder = folder
        self._deepspeed = deepspeed
        self._own_remove = own_remove
        self._lock = threading.Lock()
        self._shown: set[str] = set()

    def tag(self, path: str) -> str:
        """The directory in the root for ``path``, "" if it is not ours."""
        inside = self._key(path)
        tag = inside if self._deepspeed else inside.replace("%", "%25").replace("/", "%2F")
        with contextlib.suppress(ValueError):
            check_tag(tag)
            return "" if inside.split("/")[0] in ("..", FOLDER) else tag
        return ""

    def path(self, tag: str) -> str:
        """What Lightning calls it."""
        return os.path.join(self._folder, tag if self._deepspeed else tag.replace("%2F", "/").replace("%25", "%"))

    @staticmethod
    def snapshot(step: int) -> str:
        """The tag of a snapshot in memory."""
        return f"{_SNAPSHOT}{step}"

    # -- what comes ----------------------------------------------------------------------------------------------

    def make_way(self, path: str) -> None:
        """Where a link is, DeepSpeed's directory is to come; what the link named is still there."""
        if self._deepspeed and self.tag(path) and os.path.islink(path):
            with contextlib.suppress(OSError):  # the save will say so
                os.unlink(path)

    def show(self, path: str, later: Later) -> None:
        """Its link: at once, unless it would hide a file that is not ours; then when there is something to show."""
        with self._lock:
            self._shown.add(path)
            target = os.path.join(self.root, self.tag(path), os.path.basename(path))
            if self._deepspeed:
                return
            hides = os.path.exists(path) and not self._leads_to(path, os.path.dirname(target))
            if hides or (os.path.lexists(path) and not os.path.islink(path)):
                later.add(lambda: link(target, path) if os.path.exists(target) else None)
            else:
                link(target, path)

    @staticmethod
    def _leads_to(path: str, folder: str) -> bool:
        return os.path.realpath(path).startswith(os.path.join(folder, ""))

    def show_as(self, target: str, path: str) -> None:
        """``save_last="link"``: from now on ``path`` is a link to ``target``, whatever it was."""
        if target == path or not os.path.exists(target):
            return
        if os.path.isdir(path) and not os.path.islink(path):
            if PIN in os.listdir(path):
                log.warning("%s is pinned: it stays, and is no link to %s", path, target)
                return
            self.sweep(self.tag(path))
            shutil.rmtree(path, ignore_errors=True)
        link(target, path)

    # -- what goes -----------------------------------------------------------------------------------------------

    def failed(self, path: str) -> None:
        """The save did not become a checkpoint: a link to nothing goes."""
        with self._lock:
            self._shown.discard(path)
            if os.path.islink(path) and not os.path.exists(path):
                os.unlink(path)

    def remove(self, path: str, later: Later) -> None:
        """The checkpoint that Lightning calls ``path``; its files go aside, in a thread. A pinned one stays."""
        with self._lock:
            self._shown.discard(path)
        found = self._committed(path)
        for one in found:
            later.aside(functools.partial(self._remove, path, one), removes=path)
        if not found and os.path.islink(path):
            os.unlink(path)
        elif not os.path.islink(path) and not (found and self._deepspeed):
            self._own_remove(path)

    def _remove(self, path: str, one: Committed) -> None:
        sweep.remove_checkpoint(self._storage, one)
        with self._lock:  # saved anew meanwhile, the link is as it should be
            if os.path.islink(path) and not os.path.exists(path) and path not in self._shown:
                os.unlink(path)

    def _committed(self, path: str) -> list[Committed]:
        folder = os.path.join(self.root, self.tag(path) or FOLDER)
        return list(listing.in_tag(self._storage, folder)[0]) if os.path.isdir(folder) else []

    def stale(self) -> list[str]:
        """Tags that nobody needs after the next commit.

        Checkpoints that savers made of snapshots when the ranks had died; and those that no link leads to any more.
        """
        found = listing.list_committed(self._storage, self.root).committed
        tags = [os.path.basename(one.commit_dir) for one in found]
        old = [tag for tag in tags if re.fullmatch(rf"{re.escape(_SNAPSHOT)}\d+", tag)]
        if not self._deepspeed:
            shown = {os.path.dirname(os.path.realpath(path)) for path in self._links()}
            old += [tag for tag in tags if tag not in old and os.path.join(self.root, tag) not in shown]
        return old

    def _links(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if os.path.join(folder, name) != self.root]
            yield from (path for name in names if os.path.islink(path := os.path.join(folder, name)))

    def sweep(self, tag: str) -> None:
        """Un-commit what is there, and remove its files; a pinned one stays."""
        for one in self._committed(self.path(tag)):
            sweep.remove_checkpoint(self._storage, one)

    # -- what Lightning wrote without us -------------------------------------------------------------------------

    def is_older(self, path: str, generation: int) -> bool:
        """True if ours, of that ``generation``, is newer than ``path`` of Lightning's own; or if that is not there."""
        what = self._foreign(path)
        facts, since = self._known().get(self._key(path), ("", 0))
        return not what or (what == facts and generation >= since)

    def note(self, generation: int, *paths: str) -> None:
        """What is there of Lightning's own is older than all that we save from this generation on."""
        known = self._known()
        mine = [os.path.join(self._folder, name) for name in os.listdir(self._folder) if name.endswith(".ckpt")]
        told = {self._key(path): what for path in (*mine, *paths) if (what := self._foreign(path))}
        new = {
            key: (what, generation if known.get(key, ("",))[0] != what else known[key][1]) for key, what in told.items()
        }
        if new != known:
            write_durably(self._storage, os.path.join(self.root, _SEEN), json.dumps(new).encode())

    def _key(self, path: str) -> str:
        return os.path.relpath(place(path), self._folder)

    def _known(self) -> dict[str, tuple[str, int]]:
        with (
            contextlib.suppress(OSError, ValueError, TypeError, AttributeError),
            open(os.path.join(self.root, _SEEN), encoding="utf-8") as file,
        ):
            return {key: (str(what), int(since)) for key, (what, since) in json.load(file).items()}
        return {}

    def _foreign(self, path: str) -> str:
        """What tells this checkpoint of Lightning's own from a later one; "" if it is ours, or not there."""
        ours = not self._deepspeed and self._leads_to(path, self.root)
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                facts = os.stat(os.path.join(path, "latest"))
                stamps = [os.stat(os.path.join(path, name)) for name in os.listdir(path) if is_manifest(name)]
                ours = any(stamp.st_mtime_ns >= facts.st_mtime_ns for stamp in stamps)  # else written into, later
            else:
                facts = os.stat(path)
            return "" if ours else f"{facts.st_mtime_ns} {facts.st_size}"
        return ""
