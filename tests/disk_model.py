"""Disks for tests: one that loses what was not synced, one that dies, and turns for several savers on one disk."""

from __future__ import annotations

import errno
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine import commit, disk_names, listing, retention, runs, settle, sweep
from ckpt_engine.errors import Corrupt, StorageError, StorageFull
from ckpt_engine.manifest import Attempt, FileEntry, Receipt, RunClaim, ShardRecord
from ckpt_engine.storage.base import Entry, Storage, write_range

RUN = "0" * 16
ROOT_ID = "ab" * 8
CHANGES = ("write_new", "rename", "link", "unlink", "make_dir", "remove_dir", "sync_dir", "sync_file")
VERBS = (*CHANGES, "list_dir", "read_small", "read_into", "crc_of_file", "size", "same_file", "free_bytes")


class Killed(BaseException):
    """The process is gone; nothing may catch this."""


def refuse(op: str, path: str, number: int) -> StorageError:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"{op} {path}", op=op, path=path, errno=number, need_bytes=1, free_bytes=0)
    return StorageError(f"{op} {path}: {os.strerror(number)}", op=op, path=path, errno=number)


class ModelDisk:
    """A disk in memory. File bytes are durable when ``write_new`` returns; every change of a name, each half of a
    rename on its own, is durable only after ``sync_dir`` of its directory, and may or may not be before."""

    DIR = -1

    def __init__(self, names: dict[str, int] | None = None, data: dict[int, bytes] | None = None) -> None:
        self.now: dict[str, int] = dict(names) if names is not None else {"/": self.DIR}
        self.safe = dict(self.now)
        self.pending: list[tuple[str, int | None]] = []
        self.data = dict(data or {})

    def crash(self, choose: Callable[[int], int]) -> ModelDisk:
        """What a power cut leaves: for each unsynced name, state number ``choose(count)`` of those it went through."""
        names = dict(self.safe)
        for name in dict.fromkeys(name for name, _ in self.pending):
            states = [self.safe.get(name), *(value for other, value in self.pending if other == name)]
            value = states[choose(len(states))]
            names.pop(name, None) if value is None else names.update({name: value})
        whole = {n: v for n, v in names.items() if all(names.get(up) == self.DIR for up in self._above(n))}
        return ModelDisk(whole, self.data)

    @staticmethod
    def _above(name: str) -> Iterator[str]:
        while name != "/":
            name = os.path.dirname(name)
            yield name

    def _set(self, path: str, value: int | None) -> None:
        self.now.pop(path, None) if value is None else self.now.update({path: value})
        self.pending.append((path, value))

    def _file(self, op: str, path: str) -> int:
        number = self.now.get(path)
        if number is None or number == self.DIR:
            raise refuse(op, path, errno.ENOENT if number is None else errno.EISDIR)
        return number

    def _room(self, op: str, path: str) -> None:
        if self.now.get(os.path.dirname(path)) != self.DIR:
            raise refuse(op, path, errno.ENOENT)

    def write_new(
        self, path: str, source: Any, *, offset: int = 0, nbytes: int = -1, direct: bool = False, **_: Any
    ) -> bool:
        self._room("write", path)
        if path in self.now:
            raise refuse("write", path, errno.EEXIST)
        number = len(self.data)
        self.data[number] = bytes(memoryview(source)[offset : None if nbytes < 0 else offset + nbytes])
        self._set(path, number)
        return direct

    def rename(self, source: str, target: str) -> None:
        number = self._file("rename", source)
        self._room("rename", target)
        if self.now.get(target) == self.DIR:
            raise refuse("rename", target, errno.EISDIR)
        if self.now.get(target) != number:
            self._set(source, None)
            self._set(target, number)

    def link(self, source: str, target: str) -> None:
        number = self._file("link", source)
        self._room("link", target)
        if target in self.now:
            raise refuse("link", target, errno.EEXIST)
        self._set(target, number)

    def unlink(self, path: str) -> bool:
        if path not in self.now:
            return False
        self._file("unlink", path)
        self._set(path, None)
        return True

    def make_dir(self, path: str) -> bool:
        self._room("mkdir", path)
        if path in self.now:
            if self.now[path] != self.DIR:
                raise refuse("mkdir", path, errno.EEXIST)
            return False
        if path not in self.safe:  # a new directory has nothing in it, whatever lay in one of the same name
            self.safe = {name: value for name, value in self.safe.items() if not name.startswith(f"{path}/")}
            self.pending = [one for one in self.pending if not one[0].startswith(f"{path}/")]
        self._set(path, self.DIR)
        return True

    def remove_dir(self, path: str) -> bool:
        if self.now.get(path) != self.DIR or self.list_dir(path):
            return False
        self._set(path, None)
        return True

    def sync_dir(self, path: str) -> None:
        if self.now.get(path) != self.DIR:
            raise refuse("fsync", path, errno.ENOENT)
        for name, value in self.pending:
            if os.path.dirname(name) == path and name != "/":
                self.safe.pop(name, None) if value is None else self.safe.update({name: value})
        self.pending = [one for one in self.pending if os.path.dirname(one[0]) != path]

    def sync_file(self, path: str) -> None:
        self._file("fsync", path)

    def list_dir(self, path: str) -> tuple[Entry, ...]:
        up = f"{path}/"
        inside = [(name[len(up) :], value) for name, value in self.now.items() if name.startswith(up)]
        return tuple(sorted(Entry(name, value == self.DIR) for name, value in inside if "/" not in name))

    def read_small(self, path: str, limit: int) -> bytes | None:
        if path not in self.now:
            return None
        data = self.data[self._file("read", path)]
        if len(data) > limit:
            raise refuse("read", path, errno.EFBIG)
        return data

    def read_into(self, path: str, buffer: Any, *, offset: int, nbytes: int, threads: int = 1) -> int:
        data = self.data[self._file("read", path)]
        if len(data) < nbytes:
            raise Corrupt(path, path=path, want=nbytes, got=len(data))
        buffer[offset : offset + nbytes] = data[:nbytes]
        return zlib.crc32(data[:nbytes])

    def crc_of_file(self, path: str) -> tuple[int, int]:
        data = self.data[self._file("read", path)]
        return len(data), zlib.crc32(data)

    def size(self, path: str) -> int | None:
        number = self.now.get(path)
        return None if number is None else 4096 if number == self.DIR else len(self.data[number])

    def same_file(self, one: str, other: str) -> bool:
        return one in self.now and self.now[one] == self.now.get(other)

    def free_bytes(self, path: str) -> int:
        return 1 << 40


class Watched:
    """A disk that calls ``before(verb, args)`` ahead of every operation."""

    def __init__(self, disk: Any, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.disk = disk
        for verb in VERBS:
            setattr(self, verb, self._wrap(verb, before))

    def _wrap(self, verb: str, before: Callable[[str, tuple[Any, ...]], None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before(verb, args)
            return getattr(self.disk, verb)(*args, **kwargs)

        return call


class Dying(Watched):
    """A disk whose process dies at change number ``at``; a write in progress leaves half of its bytes."""

    def __init__(self, disk: Any, at: int) -> None:
        super().__init__(disk, self._before)
        self.left = at
        self.changes: list[tuple[str, tuple[Any, ...]]] = []

    def _before(self, verb: str, args: tuple[Any, ...]) -> None:
        if verb in CHANGES:
            if self.left == 0:
                if verb == "write_new":
                    data = bytes(memoryview(args[1]))
                    self.disk.write_new(args[0], data[: len(data) // 2])
                raise Killed
            self.left -= 1
            self.changes.append((verb, args))


class Script(random.Random):
    """A draw for ``take_turns`` that lets each thread in turn do a number of operations, then the rest in order."""

    def __init__(self, *turns: tuple[int, int]) -> None:
        super().__init__(0)
        self.order = [index for index, count in turns for _ in range(count)]

    def random(self) -> float:
        return 1.0

    def choice(self, among: Any) -> Any:
        while self.order:
            index = self.order.pop(0)
            if index in among:
                return index
        return among[0]


def take_turns(disk: Any, jobs: list[Callable[[Any], None]], draw: random.Random, kill_at: int = -1) -> int:
    """Run ``jobs`` in threads, one operation of one of them at a time, in an order drawn from ``draw``: sometimes
    turn about, sometimes one far ahead of the others.

    All die at operation ``kill_at``. Returns the number of operations; raises what a job raised.
    """
    wants = [threading.Semaphore(0) for _ in jobs]
    moved = threading.Semaphore(0)
    alive = set(range(len(jobs)))
    killed = False
    errors: list[BaseException] = []

    def body(index: int) -> None:
        def before(verb: str, args: tuple[Any, ...]) -> None:
            moved.release()
            wants[index].acquire()
            if killed:
                raise Killed

        try:
            jobs[index](Watched(disk, before))
        except Killed:
            pass
        except BaseException as error:
            errors.append(error)
        alive.discard(index)
        moved.release()

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
        moved.acquire()
    count, index, stay = 0, 0, draw.choice([0.0, 0.5, 0.9, 0.97]) if type(draw) is random.Random else 0.0
    while alive:
        killed = killed or count == kill_at
        if index not in alive or draw.random() >= stay:
            index = draw.choice(sorted(alive))
        wants[index].release()
        moved.acquire()
        count += 1
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return count


def attempt_of(seq: int, tag: str, generation: int = 1, run: str = RUN) -> Attempt:
    return Attempt(generation, run, seq, 10 * seq, tag, ROOT_ID)


def claim_of(generation: int, resumed_from: Attempt | None = None, run: str = RUN) -> RunClaim:
    return RunClaim(generation, run, resumed_from, 2, 0)


def content(attempt: Attempt, name: str) -> bytes:
    """Bytes nobody else could have written."""
    return f"{attempt.id} {name} ".encode() * (1 + zlib.crc32(name.encode()) % 3)


def write_shard(
    storage: Storage,
    root: str,
    attempt: Attempt,
    rank: int,
    names: tuple[str, ...],
    *,
    world: int = 2,
    node: int = 0,
    nodes: int = 1,
    layout: str = "shared",
    node_ranks: tuple[int, ...] | None = None,
) -> ShardRecord:
    """What a saver does with one slot: files and shard record, durable. ``ext:NAME`` is an external file."""
    local = node if layout == "node-local" else None
    commit.make_tag_dir(storage, root, attempt.tag)
    own = [name for name in names if not name.startswith("ext:")]
    commit.make_attempt_dir(storage, root, attempt, own, node=local)
    entries = [commit.seal_external(storage, root, attempt, n[4:]) for n in names if n.startswith("ext:")]
    for name in own:
        data = content(attempt, name)
        write_range(storage, commit.attempt_path(root, attempt, name, node=local), data, offset=0, nbytes=len(data))
        origin = "tool" if name.endswith(".py") else "shard"
        entries.append(FileEntry(name, len(data), zlib.crc32(data), origin))
    ranks = node_ranks or tuple(range(world))
    record = ShardRecord(attempt, rank, world, node, nodes, ranks, tuple(entries), layout)
    commit.write_shard_record(storage, root, record)
    return record


def write_node(
    storage: Storage,
    root: str,
    attempt: Attempt,
    files: dict[int, tuple[str, ...]],
    *,
    world: int = 2,
    node: int = 0,
    nodes: int = 1,
    layout: str = "shared",
) -> None:
    """All shards of one node, and its receipt."""
    records = [
        write_shard(
            storage, root, attempt, rank, names,
            world=world, node=node, nodes=nodes, layout=layout, node_ranks=tuple(files),
        )
        for rank, names in files.items()
    ]  # fmt: skip
    commit.write_receipt(storage, root, Receipt.of(records))


def publish(
    storage: Storage, root: str, attempt: Attempt, *, world: int = 2, nodes: int = 1, node: int | None = None
) -> Any:
    known = runs.read_runs(storage, root)
    return commit.try_publish(storage, root, attempt, nodes=nodes, world=world, runs=known, node=node)


def retain(storage: Storage, root: str, keep_last: int, confirmed: tuple[int, int] | None = None) -> None:
    policy = retention.Retention(keep_last=keep_last)
    found = listing.list_committed(storage, root).committed
    for old in retention.victims(found, policy, root_id=ROOT_ID, confirmed=confirmed):
        sweep.remove_checkpoint(storage, old)


def recover(storage: Storage, root: str) -> None:
    """What whoever starts next does."""
    for folder in list(listing.tag_dirs(storage, root)):
        trouble = settle.roll_forward(storage, root, os.path.basename(folder))  # outside of the assert: -O drops that
        assert trouble == ()
    sweep.sweep(storage, root, node=0, live=(), sweep_after_s=0, age_of=lambda path: 1.0)


def paths(storage: Storage, folder: str) -> Iterator[str]:
    for entry in storage.list_dir(folder):
        path = os.path.join(folder, entry.name)
        if entry.is_dir:
            yield from paths(storage, path)
        else:
            yield path


def authors(storage: Storage, folder: str) -> set[str]:
    """Ids of the attempts whose bytes a tool that knows nothing of us finds under plain names."""
    found = set()
    for path in paths(storage, folder):
        inside = os.path.relpath(path, folder)
        if not any(disk_names.is_ours(part) for part in inside.split("/")) and path.endswith(".pt"):
            found.add((storage.read_small(path, 1 << 20) or b"").split(b" ")[0].decode())
    return found
