"""The files of one candidate as a rank reads them: from the memory of its node, from disk, or from another node."""

from __future__ import annotations

import array
import errno
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt_engine import _C, budget, listing
from ckpt_engine.errors import Corrupt, NotFound, ShmFull, StorageError
from ckpt_engine.group import Group, Place
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, Committed, FileEntry
from ckpt_engine.metrics import by_name
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.reading import Reading
from ckpt_engine.slots import DATA_OFFSET, Slot
from ckpt_engine.storage.base import Storage
from ckpt_engine.waits import Deadline, pause

_PASSING = frozenset({errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
_PASSING_S = 5.0

Key = tuple[int, str]
"""(rank that wrote it, name) of a file."""


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's snapshot in the shared memory of one node."""

    node: int
    segment: SegmentName
    header: Header


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve one attempt: (rank, file) of all its files, and where each lies.

    ``readers``: for each of ``committed`` the nodes that can read it; () = all of them, as on a shared root.
    """

    attempt: Attempt
    source: str
    world: int
    files: tuple[tuple[int, FileEntry], ...]
    held: tuple[Held, ...] = ()
    committed: tuple[Committed, ...] = ()
    readers: tuple[frozenset[int], ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """As they were given at the save."""
        held = [one.header.metrics for one in self.held if one.header.rank == 0]
        return by_name(next(iter(held + [one.manifest.metrics for one in self.committed]), ()))

    def named(self, name: str, rank: int = -1) -> tuple[int, FileEntry]:
        """(writer, file) under ``name``; of several the one that ``rank`` wrote. Raises NotFound."""
        found = [(writer, entry) for writer, entry in self.files if entry.name == name]
        if not found:
            raise NotFound(f"{name} is not part of {self.attempt.tag} ({self.source}); it holds {self.names()[:8]}")
        return next((one for one in found if one[0] == rank), found[0])

    def names(self) -> list[str]:
        return [entry.name for _, entry in self.files]

    def folder_on(self, node: int) -> str | None:
        """The commit directory that ``node`` reads from; None if it reads no storage for this."""
        seen = zip(self.committed, self.readers or [frozenset({node})] * len(self.committed), strict=True)
        return next((one.commit_dir for one, nodes in seen if node in nodes), None)

    def nodes_of(self, key: Key) -> frozenset[int] | None:
        """The nodes on which this file can be read; None = all."""
        if self.source == "memory":
            return frozenset(held.node for held in self.held if held.header.rank == key[0])
        if not self.readers:
            return None
        found = [nodes for one, nodes in zip(self.committed, self.readers, strict=True) if _has(one, key)]
        return frozenset[int]().union(*found)


class Source:
    """Verified, private copies of the files of ``candidate``, one at a time."""

    def __init__(
        self, candidate: Candidate, place: Place, slots: Iterable[Slot], storage: Storage, threads: int
    ) -> None:
        self.candidate = candidate
        self.verified_bytes = 0
        self.lease: Reading | None = None
        self._place = place
        self._threads = threads
        self._storage = storage
        self._slots: dict[Key, tuple[Slot, int]] = {}
        self._remote: dict[Key, str] = {}
        self._kept: dict[str, mmap.mmap] = {}
        here = {slot.name: slot for slot in slots}
        for held in candidate.held:
            if (slot := here.get(held.segment)) is not None:
                for file in held.header.files:
                    self._slots[held.header.rank, file.name] = (slot, DATA_OFFSET + file.offset)

    def lacks(self, names: Iterable[str]) -> set[Key]:
        """Which of these files this node cannot read by itself. Raises NotFound for a name that no rank saved."""
        keys = {(writer, entry.name) for writer, entry in map(self._named, names)}
        return {key for key in keys if self._place.node not in (self.candidate.nodes_of(key) or {self._place.node})}

    def absent(self) -> set[str]:
        """Names that are not where the manifest says, as this rank sees it (which may be stale on others)."""
        gone = set()
        for one in self.candidate.committed:
            for entry in one.manifest.files():
                if entry.origin != "tool" and listing.open_path(self._storage, one, entry) is None:
                    gone.add(entry.name)
        return gone

    def fetch(self, name: str) -> mmap.mmap:
        """A verified copy of ``name`` in memory of the caller's own.

        Raises Corrupt if the bytes are not what was saved, StorageError if they cannot be read.
        """
        if name in self._kept:
            return self._kept.pop(name)
        writer, entry = self._named(name)
        memory = mmap.mmap(-1, max(1, entry.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._check(name, entry, self._read((writer, name), entry, memory))
        self.verified_bytes += entry.nbytes
        return memory

    def keep(self, name: str, patience_s: float = 0.0) -> None:
        """Fetch ``name`` now, for a later ``fetch``. ``patience_s``: how long a missing file may still show up."""
        missing, passing = Deadline(patience_s), Deadline(_PASSING_S)
        while name not in self._kept:
            try:
                self._kept[name] = self.fetch(name)
            except (Corrupt, StorageError) as error:
                absent = isinstance(error, Corrupt) and error.got is None
                deadline = missing if absent else passing
                if not (absent or getattr(error, "errno", 0) in _PASSING) or deadline.expired():
                    raise
                pause(deadline.slice(0.2))

    def close(self) -> None:
        """Drop what was kept and nobody fetched, and the lease."""
        self._kept.clear()
        if self.lease is not None:
            self.lease.close()

    # -- between nodes -------------------------------------------------------------------------------------------

    def exchange(self, group: Group, lacking: Iterable[tuple[Key, int]], share: Share) -> None:
        """Bring each (file, node) of ``lacking`` into one file on that node: the same broadcasts on all ranks.

        Collective; a rank that raises has taken part to the end.
        """
        wanted = sorted(set(lacking))
        trouble: Exception | None = None
        for number, key in enumerate(sorted({key for key, _ in wanted})):
            nbytes = self._named(key[1], key[0])[1].nbytes
            sender = self._place.nodes[min(self.candidate.nodes_of(key) or {0})][0]
            mine = (key, self._place.node) in wanted
            buffer: Any = None
            try:
                if group.rank == sender:
                    buffer = self._to_send(key, nbytes)
                elif mine and self._place.leader:
                    buffer = _reserve(share.path(self.candidate, number), nbytes)
            except Exception as error:  # the broadcasts go on: the others are in them
                trouble = trouble or error
            group.send_bytes(sender, buffer, nbytes)
            if mine:
                self._remote[key] = share.path(self.candidate, number)
        if trouble is not None:
            raise trouble

    def _to_send(self, key: Key, nbytes: int) -> Any:
        if key in self._slots:
            slot, start = self._slots[key]
            return memoryview(slot.memory)[start : start + nbytes]
        memory = mmap.mmap(-1, max(1, nbytes))
        self._read(key, self._named(key[1], key[0])[1], memory)
        return memory

    # -- reading -------------------------------------------------------------------------------------------------

    def _named(self, name: str, writer: int = -1) -> tuple[int, FileEntry]:
        return self.candidate.named(name, self._place.rank if writer < 0 else writer)

    def _read(self, key: Key, entry: FileEntry, memory: mmap.mmap) -> int:
        if key in self._slots:
            slot, start = self._slots[key]
            table = array.array("Q", [_C.address_of(slot.memory) + start, 0, entry.nbytes])
            return int.from_bytes(_C.copy(memory, table, threads=self._threads, fresh=True), "little")
        if key in self._remote:
            return self._storage.read_into(
                self._remote[key], memory, offset=0, nbytes=entry.nbytes, threads=self._threads
            )
        for one in self.candidate.committed:
            if _has(one, key):
                try:
                    listing.read_verified(self._storage, one, entry, memory, threads=self._threads)
                    return entry.crc32
                except NotFound as error:  # removed meanwhile, or not visible here yet
                    now = listing.manifest_or_none(self._storage, one.commit_dir, one.manifest.node)
                    if now is not None and now.attempt.order > one.order:
                        raise Corrupt(str(error), path=entry.name, want=entry.crc32, got=now.attempt.id) from error
        raise Corrupt(
            f"{entry.name} of {self.candidate.attempt.tag} is gone", path=entry.name, want=entry.crc32, got=None
        )

    def _check(self, name: str, entry: FileEntry, crc: int) -> None:
        if crc != entry.crc32:
            raise Corrupt(
                f"{name} of {self.candidate.attempt.tag} in {self.candidate.source}: CRC-32 is {crc:08x}, "
                f"{entry.crc32:08x} was saved",
                path=name,
                want=entry.crc32,
                got=crc,
            )


class Share:
    """Files in shared memory that the local ranks use together during one restore. Made collectively."""

    def __init__(self, group: Group, place: Place, names: Names) -> None:
        self._leader = place.leader
        self._path = names.restore_dir(group.gather(secrets.token_hex(4))[0])

    def path(self, candidate: Candidate, number: int) -> str:
        """Where this node keeps the ``number``-th file that it lacks of ``candidate``."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        return str(self._path / f"{candidate.attempt.id}-{candidate.source}-{number}")

    def remove(self) -> None:
        if self._leader:
            shutil.rmtree(self._path, ignore_errors=True)


def _has(one: Committed, key: Key) -> bool:
    return any(shard.rank == key[0] and any(e.name == key[1] for e in shard.files) for shard in one.manifest.shards)


def _reserve(path: str, nbytes: int) -> mmap.mmap:
    """``nbytes`` of shared memory under ``path``. Raises ShmFull."""
    room = budget.room()
    if room.free_bytes < nbytes:
        raise ShmFull(
            f"{nbytes} bytes of another node have to pass through shared memory; {room.limit} leaves {room.free_bytes}",
            need_bytes=nbytes,
            free_bytes=room.free_bytes,
            limit=room.limit,
        )
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, max(1, nbytes))
        return mmap.mmap(fd, max(1, nbytes))
    finally:
        os.close(fd)
