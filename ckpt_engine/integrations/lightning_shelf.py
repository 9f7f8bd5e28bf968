"""The directory of a ModelCheckpoint: which of its names are ours, what they lead to, and how they go.

With DeepSpeed ``<name>.ckpt`` is the commit directory. Else it is a link to ``ckpt_engine/<tag>/<name>.ckpt``; the tag
is the name, with ``%2F`` for a slash. Of rank 0, but for ``tag``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable

from ckpt_engine import listing, sweep
from ckpt_engine.disk_names import check_tag, is_manifest
from ckpt_engine.integrations.lightning_later import Later, link
from ckpt_engine.manifest import Committed
from ckpt_engine.storage.base import Storage, write_durably

FOLDER = "ckpt_engine"
_SNAPSHOT = "ckpt_engine-snapshot-"
_SEEN = "seen-of-lightning.json"


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
        parent, name = os.path.split(os.path.abspath(path))
        inside = os.path.relpath(os.path.join(os.path.realpath(parent), name), self._folder)
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
        if self._deepspeed and os.path.islink(path) and self.tag(path):
            os.unlink(path)

    def show(self, path: str, later: Later) -> None:
        """Its link: at once, unless it would hide a file that is not ours; then when there is something to show."""
        with self._lock:
            self._shown.add(path)
            target = os.path.join(self.root, self.tag(path), os.path.basename(path))
            if self._deepspeed:
                return
            if os.path.lexists(path) and not os.path.islink(path):
                later.add(lambda: link(target, path))
            else:
                link(target, path)

    def show_as(self, target: str, path: str) -> None:
        """``save_last="link"``: from now on ``path`` is a link to ``target``, whatever it was."""
        if not os.path.exists(target):
            return
        if os.path.isdir(path) and not os.path.islink(path):
            for one in self._committed(path):
                sweep.remove_checkpoint(self._storage, one)
            shutil.rmtree(path, ignore_errors=True)
        link(target, path)

    # -- what goes -----------------------------------------------------------------------------------------------

    def failed(self, path: str) -> None:
        """The save did not become a checkpoint: a link to nothing goes."""
        with self._lock:
            if os.path.islink(path) and not os.path.exists(path):
                os.unlink(path)

    def remove(self, path: str, later: Later) -> None:
        """The checkpoint that Lightning calls ``path``; its files go aside, in a thread. A pinned one stays."""
        with self._lock:
            self._shown.discard(path)
        found = self._committed(path)
        for one in found:
            later.aside(lambda one=one: self._remove(path, one))  # type: ignore[misc]
        if not found:
            if os.path.islink(path):
                os.unlink(path)
            else:
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
        """What nobody needs after the next commit, as paths.

        Checkpoints that savers made of snapshots when the ranks had died; and those whose link somebody removed.
        """
        folders = {os.path.basename(folder) for folder in listing.tag_dirs(self._storage, self.root)}
        old = [tag for tag in folders if re.fullmatch(rf"{re.escape(_SNAPSHOT)}\d+", tag)]
        if not self._deepspeed:
            old += [tag for tag in folders if tag not in old and not self._is_shown(tag)]
        return [self.path(tag) for tag in old]

    def _is_shown(self, tag: str) -> bool:
        path = self.path(tag)
        return os.path.lexists(path) and os.path.realpath(path).startswith(os.path.join(self.root, tag, ""))

    # -- what Lightning wrote without us -------------------------------------------------------------------------

    def is_news(self, path: str) -> bool:
        """True if ``path`` is a checkpoint of Lightning's own, and was not there when we last committed one."""
        what = self._foreign(path)
        return bool(what) and what != self._known().get(os.path.abspath(path))

    def seen(self, path: str) -> None:
        """From now on ours are newer."""
        what = self._foreign(path)
        if what:
            known = {**self._known(), os.path.abspath(path): what}
            text = json.dumps({path: facts for path, facts in known.items() if os.path.exists(path)})
            write_durably(self._storage, os.path.join(self.root, _SEEN), text.encode())

    def _known(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.root, _SEEN), encoding="utf-8") as file:
            return dict(json.load(file))
        return {}

    def _foreign(self, path: str) -> str:
        """What tells this checkpoint of Lightning's own from a later one; "" if it is ours, or not there."""
        ours = os.path.realpath(path).startswith(os.path.join(self.root, "")) if not self._deepspeed else False
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                facts = os.stat(os.path.join(path, "latest"))
                stamps = [os.stat(os.path.join(path, name)) for name in os.listdir(path) if is_manifest(name)]
                ours = any(stamp.st_mtime_ns >= facts.st_mtime_ns for stamp in stamps)  # else written into, later
            else:
                facts = os.stat(path)
            return "" if ours else f"{facts.st_mtime_ns} {facts.st_size}"
        return ""
