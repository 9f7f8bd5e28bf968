"""The typed manifest and its grammar: what every durable record says, and what a reader must reject."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from ckpt_engine import disk_names
from ckpt_engine.metrics import Metric, check_metrics
from ckpt_engine.record import Record, digest_of, require

LAYOUTS = ("shared", "node-local")
ORIGINS = ("shard", "external", "tool")
MAX_WORLD = 1 << 20
"""More ranks than there are: what a reader loops over has a bound."""


@dataclass(frozen=True, slots=True)
class Attempt(Record):
    """One try at one checkpoint. Identity is the whole record; order is (generation, seq), never the step.

    ``run``: 16 hexadecimal digits drawn by rank 0 for this run, so that two jobs that agreed on one
    generation never share a name. ``seq`` counts entries into a save call, ``step`` optimizer steps.
    """

    kind: ClassVar[str] = "attempt"

    generation: int
    run: str
    seq: int
    step: int
    tag: str
    root_id: str

    def _check(self) -> None:
        _require_run(self.run)
        disk_names.check_tag(self.tag)
        require(0 < len(self.root_id) <= 64 and self.root_id.isprintable(), "root_id is empty, long or not printable")

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)

    @property
    def id(self) -> str:
        """Names its directory: ``.attempt-<id>``; parsed by ``disk_names.parse_attempt_dir``."""
        return disk_names.attempt_id(self.generation, self.run, self.seq)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over all fields."""
        return digest_of(self.to_dict())


@dataclass(frozen=True, slots=True)
class FileEntry(Record):
    """One file of a shard; ``name`` is relative to the commit directory, posix, may contain ``/``.

    ``origin``: "shard": moved by us; "external": written by the framework under its plain name, synced and
    checksummed by the saver; "tool": a script for the root itself, replaced freely, never verified or removed.
    """

    kind: ClassVar[str] = "file entry"

    name: str
    nbytes: int
    crc32: int
    origin: str = "shard"

    def _check(self) -> None:
        disk_names.check_file_name(self.name)
        require(self.crc32 < 2**32, f"crc32 {self.crc32} is out of range")
        require(self.origin in ORIGINS, f"origin {self.origin!r} is unknown")
        if self.origin == "tool":
            disk_names.check_tag(self.name)


@dataclass(frozen=True, slots=True)
class Shard(Record):
    """The files of one rank, as a manifest names them."""

    kind: ClassVar[str] = "shard"

    rank: int
    files: tuple[FileEntry, ...]

    def _check(self) -> None:
        _require_distinct_files(self.files)


@dataclass(frozen=True, slots=True)
class ShardRecord(Record):
    """``.shard-<rank>.json``: this rank's files are durable here. Written before its slot is released."""

    kind: ClassVar[str] = "shard record"
    _newer: ClassVar[frozenset[str]] = frozenset({"metrics"})

    attempt: Attempt
    rank: int
    world: int
    node: int
    nodes: int
    node_ranks: tuple[int, ...]
    files: tuple[FileEntry, ...]
    layout: str = "shared"
    resumed_from: Attempt | None = None
    metrics: tuple[Metric, ...] = ()

    def _check(self) -> None:
        _require_node(self.node, self.nodes, self.world, self.layout)
        _require_ascending(self.node_ranks, self.world)
        require(self.rank in self.node_ranks, f"rank {self.rank} is not on its own node")
        _require_distinct_files(self.files)
        check_metrics(self.metrics)

    @property
    def local_node(self) -> int | None:
        """The node whose own manifest will name this shard; None on a shared root."""
        return self.node if self.layout == "node-local" else None


@dataclass(frozen=True, slots=True)
class Failure(Record):
    """Why a node has no shards to offer; ``rank`` is -1 where it is not known which."""

    kind: ClassVar[str] = "failure"
    _least: ClassVar[int] = -1

    rank: int
    reason: str
    op: str = ""
    path: str = ""
    errno: int = 0
    need_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Receipt(Record):
    """One node's durable statement: all shards of my ranks are safe here, or ``failed``, because."""

    kind: ClassVar[str] = "receipt"

    attempt: Attempt
    node: int
    nodes: int
    world: int
    layout: str
    shards: tuple[ShardRecord, ...]
    failed: Failure | None = None

    def _check(self) -> None:
        _require_node(self.node, self.nodes, self.world, self.layout)
        _require_ascending([shard.rank for shard in self.shards], self.world)
        mine = (self.attempt, self.node, self.nodes, self.world, self.layout)
        for shard in self.shards:
            theirs = (shard.attempt, shard.node, shard.nodes, shard.world, shard.layout)
            require(theirs == mine, f"the shard record of rank {shard.rank} belongs to another attempt or node")
        if self.failed is None:
            require(self.missing_ranks() == (), f"no shard record of ranks {self.missing_ranks()}")
            require(len({(shard.node_ranks, shard.resumed_from) for shard in self.shards}) == 1, "records disagree")

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of this node without a shard record; (-1,) if there is not one."""
        have = {shard.rank for shard in self.shards}
        return tuple(rank for rank in self.shards[0].node_ranks if rank not in have) if self.shards else (-1,)

    @property
    def local_node(self) -> int | None:
        return self.node if self.layout == "node-local" else None

    @classmethod
    def of(cls, records: Iterable[ShardRecord]) -> Receipt:
        """The complete receipt of one node. Raises ValueError: a rank is missing, or records of two attempts."""
        shards = tuple(sorted(records, key=lambda record: record.rank))
        require(len(shards) > 0, "no shard record")
        one = shards[0]
        return cls(one.attempt, one.node, one.nodes, one.world, one.layout, shards)


@dataclass(frozen=True, slots=True)
class Manifest(Record):
    """Present if and only if the checkpoint is committed (on ``node``, where the layout is node-local)."""

    kind: ClassVar[str] = "manifest"
    _newer: ClassVar[frozenset[str]] = frozenset({"metrics"})

    attempt: Attempt
    world: int
    layout: str
    node: int | None
    nodes: int
    shards: tuple[Shard, ...]
    resumed_from: Attempt | None = None
    metrics: tuple[Metric, ...] = ()

    def _check(self) -> None:
        _require_node(self.node or 0, self.nodes, self.world, self.layout)
        require((self.node is None) == (self.layout == "shared"), "node and layout contradict each other")
        ranks = [shard.rank for shard in self.shards]
        _require_ascending(ranks, self.world)
        require(len(ranks) == self.world if self.node is None else len(ranks) > 0, "ranks are missing")
        _require_distinct_files(self.files())
        check_metrics(self.metrics)

    def files(self) -> Iterator[FileEntry]:
        """Every file of every rank."""
        return (entry for shard in self.shards for entry in shard.files)

    @classmethod
    def of(cls, receipts: Iterable[Receipt]) -> Manifest:
        """The manifest of complete receipts: of all nodes, or of one where the layout is node-local.

        Deterministic; the metrics are those of the lowest rank. Raises ValueError with the reason: a rank missing or
        twice, two attempts, one name twice.
        """
        ordered = sorted(receipts, key=lambda receipt: receipt.node)
        require(len(ordered) > 0 and all(receipt.failed is None for receipt in ordered), "a node failed")
        records = sorted((record for receipt in ordered for record in receipt.shards), key=lambda record: record.rank)
        same = {(r.attempt, r.world, r.nodes, r.layout, r.local_node, r.resumed_from) for r in records}
        require(len(same) == 1, "the receipts are not of one attempt")
        one = records[0]
        shards = tuple(Shard(record.rank, record.files) for record in records)
        whose = (one.attempt, one.world, one.layout, one.local_node, one.nodes)
        return cls(*whose, shards, one.resumed_from, one.metrics)


@dataclass(frozen=True, slots=True)
class Committed:
    """A manifest that was found in ``commit_dir``: a checkpoint that counts."""

    manifest: Manifest
    commit_dir: str
    pinned: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.manifest.attempt.order

    @property
    def nbytes(self) -> int:
        """Bytes of its files; tools lie in the root, once for all."""
        return sum(entry.nbytes for entry in self.manifest.files() if entry.origin != "tool")


@dataclass(frozen=True, slots=True)
class RunClaim(Record):
    """``.run-<generation>``: this run writes here, and what it resumed from."""

    kind: ClassVar[str] = "run claim"

    generation: int
    run: str
    resumed_from: Attempt | None
    world: int
    time_unix_s: int

    def _check(self) -> None:
        _require_run(self.run)
        require(self.resumed_from is None or self.resumed_from.generation < self.generation, "resumed from the future")


@dataclass(frozen=True, slots=True)
class Offer(Record):
    """``.offer-<generation>-node<i>``: the attempts a node holds complete in memory after its ranks died."""

    kind: ClassVar[str] = "offer"

    generation: int
    run: str
    node: int
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Lease(Record):
    """``.reading-<token>``: somebody reads ``tag`` ("" = anything); ``beat`` moves while the reader lives."""

    kind: ClassVar[str] = "lease"

    token: str
    tag: str
    beat: int


@dataclass(frozen=True, slots=True)
class RootId(Record):
    """``.ckpt-root``: the random id of this root."""

    kind: ClassVar[str] = "root id"

    root_id: str


def _require_run(run: str) -> None:
    require(len(run) == 16 and not set(run) - set("0123456789abcdef"), f"run {run!r:.40} is not 16 hex digits")


def _require_node(node: int, nodes: int, world: int, layout: str) -> None:
    require(layout in LAYOUTS, f"layout {layout!r:.40} is unknown")
    require(node < nodes <= world <= MAX_WORLD, f"node {node} of {nodes} with {world} ranks")


def _require_ascending(ranks: Iterable[int], world: int) -> None:
    last = -1
    for rank in ranks:
        require(last < rank < world, f"rank {rank} is twice there, out of order or not below {world}")
        last = rank


def _require_distinct_files(files: Iterable[FileEntry]) -> None:
    names: set[str] = set()
    for entry in files:
        require(entry.name not in names, f"{entry.name!r:.200} is written twice")
        names.add(entry.name)
    for name in names:
        parent = name
        while parent := parent.rpartition("/")[0]:
            require(parent not in names, f"{parent!r:.200} is both a file and a directory")
