"""A disk that knows what was written, what is durable, and what a power cut may make of the difference.

The fault model.

* **close syncs nothing.** A file's bytes are durable after an fsync of this very file that succeeded, and no
  earlier. Until then a power cut leaves what was durable before, or the first half of the last write (a torn write), or
  the length without the bytes (zeros), or all of it.
* **Names are durable after fsync of their directory.** A file's own fsync makes none of its names durable. Before the
  sync every name stands for itself: a power cut leaves it in any of the states it went through since, whatever
  became of the names beside it. A rename is two names, and a power cut may tear it: *both* or *neither* may be left.
  File systems with a journal do not tear renames; so two promises that nobody keeps across a torn one are asked for
  only where none is torn: that no file is left without an owner, and that a tool in the root is there again.
* **A directory is a file of its own.** What is made where a removed directory was is new and empty.
* **A write may fail at any step** with EIO or ENOSPC, once or from then on, having done nothing. After an fsync of a
  file has failed its unsynced bytes are lost to the disk though they can still be read: a later fsync succeeds and
  makes nothing durable. After an fsync of a directory has failed a later one may succeed, and then counts.
* **A process that is killed** without a power cut leaves everything it has done, and half of a write.

Steps are those of the system: ``write_new`` is create, write, write, fsync, close.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from disk_model import refuse

from ckpt_engine.errors import Corrupt
from ckpt_engine.storage.base import Entry, Storage

from .choices import Change, Choice, Slot

T = TypeVar("T")

TOP = 0
_TEMP = re.compile(r"\.tmp-\d+-[0-9a-f]{16}")


class Step(NamedTuple):
    """What is about to be done: kind is create, write, fsync, close, rename, link, unlink, mkdir, rmdir or fsyncdir."""

    kind: str
    path: str
    other: str = ""


class Bytes:
    """What a file holds: to its readers, and on the medium."""

    def __init__(self, data: bytes = b"", durable: bytes | None = b"") -> None:
        self.data = data
        self.durable = durable
        self.last = 0
        self.lost = False

    def options(self) -> list[bytes]:
        """What a power cut may leave; the durable bytes first, all of them last."""
        if self.durable == self.data:
            return [self.data]
        torn = self.data[: self.last + (len(self.data) - self.last) // 2]
        return list(dict.fromkeys([self.durable or b"", torn, bytes(len(self.data)), self.data]))


class Cut(NamedTuple):
    """What one power cut left. ``torn``: a rename is there in one half only."""

    disk: FaultDisk
    torn: bool


class FaultDisk(Storage):
    """``before`` is called ahead of every step, and may raise: StorageError refuses it, anything else is a death."""

    def __init__(self, before: Callable[[Step], None] = lambda step: None) -> None:
        self.before = before
        self.dirs: dict[int, dict[str, int]] = {TOP: {}}
        self.safe: dict[int, dict[str, int]] = {TOP: {}}
        self.files: dict[int, Bytes] = {}
        self.pending: list[Change] = []
        self._numbers = itertools.count(1)
        self._renames = itertools.count(1)

    # -- power cuts ----------------------------------------------------------------------------------------------

    def settled(self) -> FaultDisk:
        """The same, all of it durable."""
        return self._left(self.dirs, {number: file.data for number, file in self.files.items()})

    def choices(self) -> list[Choice]:
        """All that a power cut decides now."""
        found: dict[Slot, list[Any]] = {}
        for change in self.pending:
            folder, name = change.slot
            found.setdefault(change.slot, [self.safe[folder].get(name)]).append(change.value)
        names = [Choice(slot, -1, tuple(states)) for slot, states in found.items()]
        dirty = [(number, file.options()) for number, file in self.files.items() if file.durable != file.data]
        return names + [Choice(None, number, tuple(states)) for number, states in dirty if len(states) > 1]

    def cut(self, choices: list[Choice], picked: Iterable[int]) -> Cut:
        """The power goes; ``picked``: which state of each choice is left."""
        dirs = {number: dict(names) for number, names in self.safe.items()}
        data = {number: file.durable or b"" for number, file in self.files.items()}
        level: dict[Slot, int] = {}
        for choice, index in zip(choices, picked, strict=True):
            if choice.slot is None:
                data[choice.file] = choice.states[index]
                continue
            folder, name = choice.slot
            level[choice.slot] = index
            value = choice.states[index]
            dirs[folder].pop(name, None) if value is None else dirs[folder].update({name: value})
        return Cut(self._left(dirs, data), self._is_torn(level))

    def _is_torn(self, level: dict[Slot, int]) -> bool:
        halves: dict[int, set[bool]] = {}
        seen: dict[Slot, int] = {}
        for change in self.pending:
            seen[change.slot] = seen.get(change.slot, 0) + 1
            if change.rename:
                halves.setdefault(change.rename, set()).add(level.get(change.slot, 0) >= seen[change.slot])
        return any(len(both) > 1 for both in halves.values())

    def _left(self, dirs: dict[int, dict[str, int]], data: dict[int, bytes]) -> FaultDisk:
        """A disk with what can be reached from the top, and nothing pending."""
        left = FaultDisk()
        left._numbers = itertools.count(next(self._numbers) + 1_000_000)
        waiting = [TOP]
        while waiting:
            folder = waiting.pop()
            left.dirs[folder] = dict(dirs.get(folder, {}))
            left.safe[folder] = dict(left.dirs[folder])
            for number in left.dirs[folder].values():
                if number in dirs:
                    waiting.append(number)
                elif number not in left.files:
                    left.files[number] = Bytes(data[number], data[number])
        return left

    def key(self) -> tuple[Any, ...]:
        """Equal for two disks that hold the same under the same names; of temporary names all are the same."""
        held = [(path, b"" if number == -1 else self.files[number].data, number == -1) for path, number in self.walk()]
        return tuple(sorted((_TEMP.sub(".tmp", path), data, is_dir) for path, data, is_dir in held))

    def walk(self, folder: int = TOP, path: str = "") -> Iterator[tuple[str, int]]:
        """(path, number of its file, or -1 for a directory)."""
        for name, number in self.dirs[folder].items():
            yield f"{path}/{name}", -1 if number in self.dirs else number
            if number in self.dirs:
                yield from self.walk(number, f"{path}/{name}")

    # -- names ---------------------------------------------------------------------------------------------------

    def find(self, path: str) -> int | None:
        """The number of what lies at ``path``."""
        number: int | None = TOP
        for part in path.split("/"):
            if part:
                number = self.dirs[number].get(part) if number in self.dirs else None
        return number

    def _slot(self, op: str, path: str) -> Slot:
        folder = self.find(os.path.dirname(path))
        if folder is None or folder not in self.dirs:
            raise refuse(op, path, errno.ENOENT)
        return folder, os.path.basename(path)

    def _file(self, op: str, path: str) -> int:
        number = self.find(path)
        if number is None or number in self.dirs:
            raise refuse(op, path, errno.ENOENT if number is None else errno.EISDIR)
        return number

    def _set(self, slot: Slot, value: int | None, rename: int = 0) -> None:
        folder, name = slot
        self.dirs[folder].pop(name, None) if value is None else self.dirs[folder].update({name: value})
        self.pending.append(Change(slot, value, rename))

    def _forget_removed(self) -> None:
        """Directories that no power cut can bring back decide nothing any more."""
        known = {change.value for change in self.pending}.union(*(names.values() for names in self.safe.values()))
        gone = {number for number in self.safe if number != TOP and number not in known and number not in
                {value for names in self.dirs.values() for value in names.values()}}  # fmt: skip
        if gone:
            self.pending = [change for change in self.pending if change.slot[0] not in gone]
            for number in gone:
                del self.safe[number], self.dirs[number]
            self._forget_removed()

    # -- the steps of the system ---------------------------------------------------------------------------------

    def _stopped(self, step: Step, look: Callable[[], T | None]) -> T | None:
        """``look()``, ahead of the step, where what is refused or needless ends, and again: others may act between."""
        if look() is None:
            return None
        self.before(step)
        return look()

    def create(self, path: str) -> int:
        def look() -> Slot:
            slot = self._slot("write", path)
            if slot[1] in self.dirs[slot[0]]:
                raise refuse("write", path, errno.EEXIST)
            return slot

        slot = self._stopped(Step("create", path), look)
        number = next(self._numbers)
        self.files[number] = Bytes()
        self._set(slot or look(), number)
        return number

    def write(self, number: int, data: bytes, offset: int, path: str = "") -> None:
        self.before(Step("write", path))
        file = self.files[number]
        file.last = offset
        file.data = file.data[:offset].ljust(offset, b"\0") + data + file.data[offset + len(data) :]

    def truncate(self, number: int, nbytes: int, path: str = "") -> None:
        self.before(Step("truncate", path))
        file = self.files[number]
        file.data = file.data[:nbytes].ljust(nbytes, b"\0")

    def fsync(self, number: int, path: str = "") -> None:
        file = self.files[number]
        try:
            self.before(Step("fsync", path))
        except BaseException:
            file.lost = True
            raise
        if not file.lost:
            file.durable = file.data

    # -- the verbs of the package --------------------------------------------------------------------------------

    def write_new(
        self, path: str, source: Any, *, offset: int = 0, nbytes: int = -1, direct: bool = False, **_: Any
    ) -> bool:
        data = bytes(memoryview(source)[offset : None if nbytes < 0 else offset + nbytes])
        number = self.create(path)
        half = -(-len(data) // 2)
        for start in (0, half):
            self.write(number, data[start : start + half], start, path)
        self.fsync(number, path)
        self.before(Step("close", path))
        return direct

    def foreign_write(self, path: str, data: bytes) -> None:
        """What a framework does: no fsync at all."""
        self.write(self.create(path), data, 0, path)

    def rename(self, source: str, target: str) -> None:
        def look() -> tuple[int, Slot, Slot]:
            number = self._file("rename", source)
            slots = self._slot("rename", source), self._slot("rename", target)
            if self.find(target) in self.dirs:
                raise refuse("rename", target, errno.EISDIR)
            return number, *slots

        number, old, new = self._stopped(Step("rename", target, source), look) or look()
        if self.find(target) != number:
            group = next(self._renames)
            self._set(old, None, group)
            self._set(new, number, group)

    def link(self, source: str, target: str) -> None:
        def look() -> tuple[int, Slot]:
            number = self._file("link", source)
            slot = self._slot("link", target)
            if self.find(target) is not None:
                raise refuse("link", target, errno.EEXIST)
            return number, slot

        number, slot = self._stopped(Step("link", target, source), look) or look()
        self._set(slot, number)

    def unlink(self, path: str) -> bool:
        def look() -> int | None:
            return None if self.find(path) is None else self._file("unlink", path)

        if self._stopped(Step("unlink", path), look) is None:
            return False
        self._set(self._slot("unlink", path), None)
        return True

    def make_dir(self, path: str) -> bool:
        def look() -> Slot | None:
            slot, there = self._slot("mkdir", path), self.find(path)
            if there is not None and there not in self.dirs:
                raise refuse("mkdir", path, errno.EEXIST)
            return slot if there is None else None

        slot = self._stopped(Step("mkdir", path), look)
        if slot is None:
            return False
        number = next(self._numbers)
        self.dirs[number], self.safe[number] = {}, {}
        self._set(slot, number)
        return True

    def remove_dir(self, path: str) -> bool:
        def look() -> int | None:
            number = self.find(path)
            return None if number is None or self.dirs.get(number, {"": 0}) else number

        if self._stopped(Step("rmdir", path), look) is None:
            return False
        self._set(self._slot("rmdir", path), None)
        return True

    def sync_dir(self, path: str) -> None:
        def look() -> int:
            folder = self.find(path)
            if folder is None or folder not in self.dirs:
                raise refuse("fsync", path, errno.ENOENT)
            return folder

        folder = self._stopped(Step("fsyncdir", path), look)
        self.safe[look()] = dict(self.dirs[look()])
        self.pending = [change for change in self.pending if change.slot[0] != folder]
        self._forget_removed()

    def sync_file(self, path: str) -> None:
        self.fsync(self._file("fsync", path), path)

    def list_dir(self, path: str) -> tuple[Entry, ...]:
        number = self.find(path)
        names = {} if number is None else self.dirs.get(number, {})
        return tuple(sorted(Entry(name, value in self.dirs) for name, value in names.items()))

    def read_small(self, path: str, limit: int) -> bytes | None:
        if self.find(path) is None:
            return None
        data = self.files[self._file("read", path)].data
        if len(data) > limit:
            raise refuse("read", path, errno.EFBIG)
        return data

    def read_into(self, path: str, buffer: Any, *, offset: int, nbytes: int, threads: int = 1) -> int:
        data = self.files[self._file("read", path)].data
        if len(data) < nbytes:
            raise Corrupt(path, path=path, want=nbytes, got=len(data))
        buffer[offset : offset + nbytes] = data[:nbytes]
        return zlib.crc32(data[:nbytes])

    def crc_of_file(self, path: str) -> tuple[int, int]:
        data = self.files[self._file("read", path)].data
        return len(data), zlib.crc32(data)

    def size(self, path: str) -> int | None:
        number = self.find(path)
        return None if number is None else 4096 if number in self.dirs else len(self.files[number].data)

    def same_file(self, one: str, other: str) -> bool:
        number = self.find(one)
        return number is not None and number == self.find(other)

    def free_bytes(self, path: str) -> int:
        return 1 << 40
