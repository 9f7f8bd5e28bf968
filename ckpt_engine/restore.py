"""Choose the newest (attempt, source) that all ranks can serve, verify it, hand over private state.

All ranks see the same facts (one gather), so the choice is a pure function that each computes for itself. Files that
a node lacks are broadcast in one planned sequence; then every rank verifies what it wants, all compare notes, and
damage anywhere moves everybody to the next older candidate.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_engine import _C, listing, runs
from ckpt_engine.buffers import Buffers
from ckpt_engine.errors import CkptError, Corrupt, NotFound, StorageError, WorldMismatch
from ckpt_engine.events import log, span
from ckpt_engine.group import Group, Place
from ckpt_engine.manifest import Attempt, Committed, FileEntry, RunClaim
from ckpt_engine.names import SegmentName
from ckpt_engine.slots import DATA_OFFSET, Header, Slot
from ckpt_engine.storage.base import Storage

Wants = Callable[[Sequence[tuple[int, FileEntry]]], tuple[Iterable[str], Iterable[str]]]
"""(rank, file) of all files of an attempt → the names this rank verifies and keeps, and those it may read later."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate that was not used, and why."""

    attempt: str
    step: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore found. ``source``: "memory", "storage" or None (nothing to restore: ``step`` is 0).

    ``state``: {file name: object} of this rank (plain engine). ``client_state``: what the framework stored beside.
    ``skipped``: newer candidates that could not be used. ``unmanaged``: tags without a manifest in the root, written
    by someone else. ``verified_bytes``: bytes whose CRC this rank checked.
    """

    step: int
    source: str | None
    attempt: Attempt | None = None
    tag: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    unmanaged: tuple[str, ...] = ()
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's snapshot in the shared memory of one node."""

    node: int
    segment: SegmentName
    header: Header


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank contributes to the choice; most ranks contribute nothing."""

    held: tuple[Held, ...] = ()
    committed: tuple[Committed, ...] = ()
    claims: tuple[RunClaim, ...] = ()
    on_disk: bool = False
    damaged: tuple[str, ...] = ()
    unmanaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve one attempt: (rank, file) of all its files, and where each lies."""

    attempt: Attempt
    source: str
    world: int
    files: tuple[tuple[int, FileEntry], ...]
    held: tuple[Held, ...] = ()
    committed: tuple[Committed, ...] = ()

    def named(self, name: str) -> tuple[int, FileEntry]:
        for rank, entry in self.files:
            if entry.name == name:
                return rank, entry
        raise NotFound(f"{name} is not part of {self.attempt.tag} ({self.source}); it holds {self.names()[:8]}")

    def names(self) -> list[str]:
        return [entry.name for _, entry in self.files]


def look(storage: Storage, buffers: Buffers, root: str, place: Place, layout: str) -> Facts:
    """What this rank can tell: one rank per node lists memory, rank 0 (or one per node) lists storage."""
    held: list[Held] = []
    if place.leader:
        for slot in buffers.node_slots():
            found = slot.snapshot()
            if found is not None and found[1].root == root:
                held.append(Held(place.node, slot.name, found[1]))
    if not (place.leader if layout == "node-local" else place.rank == 0):
        return Facts(tuple(held), claims=tuple({h.header.claim.run: h.header.claim for h in held}.values()))
    found_there = listing.list_committed(storage, root)
    node = place.node if layout == "node-local" else None
    claims = {claim.run: claim for claim in runs.read_runs(storage, root)}
    claims |= {h.header.claim.run: h.header.claim for h in held}
    return Facts(
        tuple(held),
        tuple(one for one in found_there.committed if one.manifest.node == node),
        tuple(claims.values()),
        True,
        tuple(str(damage) for damage in found_there.damaged),
        listing.unmanaged(storage, root),
    )


def candidates(
    facts: Sequence[Facts], root_id: str, step: int | None
) -> tuple[list[Candidate], tuple[Skipped, ...]]:
    """Every complete candidate, best first (newest attempt, memory before storage). Pure.

    Without ``step`` only attempts on the line count; with it, all attempts of that step.
    """
    claims = {claim.run: claim for fact in sorted(facts, key=lambda f: not f.on_disk) for claim in fact.claims}.values()
    found = _from_memory([h for fact in facts for h in fact.held], root_id)
    found += _from_storage([one for fact in facts for one in fact.committed], root_id)
    skipped = [Skipped("", 0, "storage", text) for fact in facts for text in fact.damaged]
    if step is not None:
        chosen = [one for one in found if one.attempt.step == step]
    else:
        chosen = [one for one in found if runs.on_the_line(one.attempt, claims)]
    return sorted(chosen, key=lambda c: (c.attempt.order, c.source == "memory"), reverse=True), tuple(skipped)


def _from_memory(held: Sequence[Held], root_id: str) -> list[Candidate]:
    by_attempt: dict[Attempt, dict[int, Held]] = {}
    for one in held:
        if one.header.attempt.root_id == root_id:
            by_attempt.setdefault(one.header.attempt, {})[one.header.rank] = one
    made = []
    for attempt, parts in by_attempt.items():
        world = next(iter(parts.values())).header.world
        if set(parts) == set(range(world)):
            files = tuple((rank, file.entry) for rank, part in sorted(parts.items()) for file in part.header.files)
            files = tuple((rank, entry) for rank, entry in files if entry.origin == "shard")
            made.append(Candidate(attempt, "memory", world, files, held=tuple(parts.values())))
    return made


def _from_storage(committed: Sequence[Committed], root_id: str) -> list[Candidate]:
    by_attempt: dict[Attempt, list[Committed]] = {}
    for one in committed:
        if one.manifest.attempt.root_id == root_id:
            by_attempt.setdefault(one.manifest.attempt, []).append(one)
    made = []
    for attempt, parts in by_attempt.items():
        shards = {shard.rank: shard.files for one in parts for shard in one.manifest.shards}
        world = parts[0].manifest.world
        if set(shards) != set(range(world)):
            continue  # node-local: some node has no manifest of it
        files = tuple((rank, e) for rank, entries in sorted(shards.items()) for e in entries if e.origin != "tool")
        made.append(Candidate(attempt, "storage", world, files, committed=tuple(parts)))
    return made


class Source:
    """The files of one candidate as this rank reads them: verified, private, one at a time."""

    def __init__(self, candidate: Candidate, buffers: Buffers, storage: Storage, threads: int) -> None:
        self.candidate = candidate
        self.verified_bytes = 0
        self._threads = threads
        self._storage = storage
        self._slots: dict[str, tuple[Slot, int]] = {}
        self._remote: dict[str, str] = {}
        self._kept: dict[str, int] = {}
        if candidate.source == "memory":
            here = {slot.name: slot for slot in buffers.node_slots()}
            for held in candidate.held:
                slot = here.get(held.segment)
                if slot is not None:
                    self._slots |= {file.name: (slot, DATA_OFFSET + file.offset) for file in held.header.files}

    def lacks(self, names: Iterable[str]) -> set[str]:
        """Names that are not in the memory of this node."""
        return {name for name in names if name not in self._slots} if self.candidate.source == "memory" else set()

    def local_buffer(self, name: str) -> memoryview:
        slot, start = self._slots[name]
        return memoryview(slot.memory)[start : start + self.candidate.named(name)[1].nbytes]

    def add_remote(self, name: str, path: str) -> None:
        self._remote[name] = path

    def fetch(self, name: str) -> int:
        """A private, verified copy of ``name`` as a memory file (memfd); the caller closes the descriptor.

        Raises Corrupt if the bytes are not what was saved, StorageError if they cannot be read.
        """
        if name in self._kept:
            return self._kept.pop(name)
        _, entry = self.candidate.named(name)
        fd = os.memfd_create("ckpt-restore", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(1, entry.nbytes))
            with mmap.mmap(fd, max(1, entry.nbytes)) as memory:
                self._check(name, entry, self._read(name, entry, memory))
            os.ftruncate(fd, entry.nbytes)
        except BaseException:
            os.close(fd)
            raise
        self.verified_bytes += entry.nbytes
        return fd

    def keep(self, name: str) -> None:
        """Fetch ``name`` now, for a later ``fetch``."""
        if name not in self._kept:
            self._kept[name] = self.fetch(name)

    def report(self) -> RestoreReport:
        attempt = self.candidate.attempt
        return RestoreReport(attempt.step, self.candidate.source, attempt, attempt.tag)

    def close(self) -> None:
        """Drop what was kept and nobody fetched."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def _read(self, name: str, entry: FileEntry, memory: mmap.mmap) -> int:
        if name in self._slots:
            import array

            slot, start = self._slots[name]
            table = array.array("Q", [_C.address_of(slot.memory) + start, 0, entry.nbytes])
            return int.from_bytes(_C.copy(memory, table, threads=self._threads), "little")
        if name in self._remote:
            return self._storage.read_into(
                self._remote[name], memory, offset=0, nbytes=entry.nbytes, threads=self._threads
            )
        for one in self.candidate.committed:
            if entry in one.manifest.files():
                with contextlib.suppress(NotFound):  # removed meanwhile, or on another node
                    listing.read_verified(self._storage, one, entry, memory, threads=self._threads)
                    return entry.crc32
        raise Corrupt(f"{name} of {self.candidate.attempt.tag} is gone", path=name, want=entry.crc32, got=None)

    def _check(self, name: str, entry: FileEntry, crc: int) -> None:
        if crc != entry.crc32:
            raise Corrupt(
                f"{name} of {self.candidate.attempt.tag} in {self.candidate.source}: CRC-32 is {crc:08x}, "
                f"{entry.crc32:08x} was saved",
                path=name,
                want=entry.crc32,
                got=crc,
            )


def choose(
    group: Group,
    place: Place,
    found: Sequence[Candidate],
    open_source: Callable[[Candidate], Source],
    wants: Wants,
    share_dir: Callable[[], str],
) -> tuple[Source | None, tuple[Skipped, ...]]:
    """The first candidate that every rank verified, opened; None if there is none. Collective.

    Raises WorldMismatch if the newest candidate was saved by another number of ranks.
    """
    skipped: list[Skipped] = []
    for candidate in found:
        if candidate.world != group.world:
            raise WorldMismatch(
                f"{candidate.attempt.tag} was saved by {candidate.world} ranks, this job has {group.world}. Convert it with "
                "DeepSpeed's ds_to_universal.py and load the universal checkpoint, or start as many ranks as then",
                want=candidate.world,
                got=group.world,
            )
        with span("verify", step=candidate.attempt.step, source=candidate.source) as facts:
            source, problems = _try(group, place, candidate, open_source, wants, share_dir)
            facts["problems"] = len(problems)
        if source is not None and not problems:
            return source, tuple(skipped)
        if source is not None:
            source.close()
        log.warning("cannot restore %s from %s: %s", candidate.attempt.tag, candidate.source, "; ".join(problems))
        skipped.append(
            Skipped(candidate.attempt.tag, candidate.attempt.step, candidate.source, "; ".join(problems)[:500])
        )
    return None, tuple(skipped)


def _try(
    group: Group,
    place: Place,
    candidate: Candidate,
    open_source: Callable[[Candidate], Source],
    wants: Wants,
    share_dir: Callable[[], str],
) -> tuple[Source | None, list[str]]:
    """One candidate on all ranks; the problems of all ranks. Each gather is reached by every rank, come what may."""
    source: Source | None = None
    mine: list[str] = []
    lacks: list[str] = []
    problem = ""
    try:
        source = open_source(candidate)
        verified, later = wants(candidate.files)
        mine = sorted(set(verified))
        lacks = sorted(source.lacks({*mine, *later}))
    except (CkptError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    told = group.gather((problem, place.node, lacks))
    if source is None or any(text for text, _, _ in told):
        return source, [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(told) if text]
    problem = _exchange(group, place, source, [(name, node) for _, node, names in told for name in names], share_dir)
    try:
        for name in mine if not problem else ():
            source.keep(name)
    except (CkptError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    return source, [f"rank {rank}: {text}" for rank, text in enumerate(group.gather(problem)) if text]


def _exchange(
    group: Group,
    place: Place,
    source: Source,
    lacking: Sequence[tuple[str, int]],
    share_dir: Callable[[], str],
) -> str:
    """Bring each (name, node) of ``lacking`` into one file on that node; the same broadcasts on all ranks."""
    if not lacking:
        return ""
    trouble = ""
    for name in sorted({name for name, _ in lacking}):
        rank, entry = source.candidate.named(name)
        holder = next(held for held in source.candidate.held if held.header.rank == rank)
        sender = place.nodes[holder.node][0]
        path = os.path.join(share_dir(), f"remote-{name.replace('/', '%')}")
        mine = (name, place.node) in lacking
        buffer: Any = None
        try:
            if group.rank == sender:
                buffer = source.local_buffer(name)
            elif mine and place.leader:
                buffer = _reserve(path, entry.nbytes)
        except (OSError, CkptError) as error:
            trouble = f"{type(error).__name__}: {error}"
        group.send_bytes(sender, buffer, entry.nbytes)
        if mine:
            source.add_remote(name, path)
    group.gather(())  # every file is complete before anybody reads one
    return trouble


def nothing_usable(root: str, step: int | None, facts: Sequence[Facts], skipped: Sequence[Skipped]) -> None:
    """Returns if there is provably nothing to restore. Raises NotFound or Corrupt: never a silent start from scratch."""
    known = {one.manifest.attempt.step for fact in facts for one in fact.committed}
    known |= {held.header.attempt.step for fact in facts for held in fact.held}
    if step is not None and not skipped:
        raise NotFound(f"no checkpoint of step {step} in {root}; there are {sorted(known)}")
    if any(fact.committed for fact in facts) or skipped:
        told = "; ".join(f"{one.attempt or one.source}: {one.reason}" for one in skipped) or "none is on the line"
        raise Corrupt(
            f"{root} holds checkpoints of steps {sorted(known)}, but none that all ranks can use: {told}. To start from "
            "scratch on purpose, use an empty root",
            path=root,
            want="an intact checkpoint",
            got=told,
        )


def _reserve(path: str, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, max(1, nbytes))
        os.ftruncate(fd, max(1, nbytes))
        return mmap.mmap(fd, max(1, nbytes))
    except OSError as error:
        raise StorageError.of(error, op="reserve", path=path) from error
    finally:
        os.close(fd)
