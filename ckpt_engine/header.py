"""What a slot says of the attempt in it: a rank seals it with this, a saver needs nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack

from ckpt_engine.errors import CkptError
from ckpt_engine.manifest import Attempt, FileEntry, RunClaim, ShardRecord
from ckpt_engine.metrics import Metric
from ckpt_engine.record import require
from ckpt_engine.retention import Retention
from ckpt_engine.states import Order

_MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class SlotFile:
    """One file of a shard: where it lies in the data area, and what it must be on disk."""

    name: str
    offset: int
    nbytes: int
    crc32: int
    origin: str = "shard"

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.name, self.nbytes, self.crc32, self.origin)


@dataclass(frozen=True, slots=True)
class Header:
    """All that persist and publish need to know of a snapshot: a restarted saver needs nothing else."""

    attempt: Attempt
    claim: RunClaim
    rank: int
    local_rank: int
    world: int
    node: int
    nodes: int
    node_ranks: tuple[int, ...]
    layout: str
    root: str
    commit_dir: str
    retention: Retention
    confirmed: Order | None
    storage: bool
    files: tuple[SlotFile, ...]
    metrics: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError unless this can be persisted as it says, below ``commit_dir`` and nowhere else."""
        require(type(self.attempt) is Attempt and type(self.claim) is RunClaim, "attempt or claim is none")
        self.shard_record()  # checks ranks, nodes, layout, names, sizes
        require(type(self.local_rank) is int, "local_rank is not a number")
        require(self.node_ranks.index(self.rank) == self.local_rank, f"rank {self.rank} is not local {self.local_rank}")
        for path in (self.root, self.commit_dir):
            require(type(path) is str and os.path.isabs(path) and os.path.normpath(path) == path, "not a plain path")
            require("\0" not in path and len(os.fsencode(path)) <= _MAX_PATH, "not a path")
        require(os.path.basename(self.commit_dir) == self.attempt.tag, "the commit directory is not the tag's")
        require(type(self.retention) is Retention, "retention")
        numbers = () if self.confirmed is None else self.confirmed
        require(len(numbers) in (0, 2) and all(type(number) is int for number in numbers), "confirmed")
        require(type(self.storage) is bool, "storage")
        require(all(type(file.offset) is int and file.offset >= 0 for file in self.files), "an offset")

    @property
    def decides_alone(self) -> bool:
        """True if no other node waits for this one's receipt: its shard records say it all."""
        return self.nodes == 1 or self.layout == "node-local"

    def shard_record(self, entries: Iterable[FileEntry] | None = None) -> ShardRecord:
        """What becomes durable; ``entries``: the files as they are on disk, where they were not staged by us."""
        return ShardRecord(
            attempt=self.attempt,
            rank=self.rank,
            world=self.world,
            node=self.node,
            nodes=self.nodes,
            node_ranks=self.node_ranks,
            files=tuple(file.entry for file in self.files) if entries is None else tuple(entries),
            layout=self.layout,
            resumed_from=self.claim.resumed_from,
            metrics=self.metrics,
        )

    def pack(self) -> bytes:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        values["attempt"] = self.attempt.to_dict()
        values["claim"] = self.claim.to_dict()
        values["retention"] = self.retention.to_dict()
        values["metrics"] = [metric.to_dict() for metric in self.metrics]
        values["files"] = [(f.name, f.offset, f.nbytes, f.crc32, f.origin) for f in self.files]
        packed: bytes = msgpack.packb(values, unicode_errors="surrogateescape")
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        values = msgpack.unpackb(data, unicode_errors="surrogateescape")
        values["attempt"] = Attempt.from_dict(values["attempt"])
        values["claim"] = RunClaim.from_dict(values["claim"])
        values["retention"] = Retention(**values["retention"])
        values["metrics"] = tuple(map(Metric.from_dict, values["metrics"]))
        values["files"] = tuple(SlotFile(*row) for row in values["files"])
        values["node_ranks"] = tuple(values["node_ranks"])
        values["confirmed"] = tuple(values["confirmed"]) if values["confirmed"] else None
        return cls(**values)

    @classmethod
    def parse(cls, data: bytes) -> Header | None:
        """``unpack``, or None for whatever else ``data`` may be."""
        with contextlib.suppress(
            CkptError, ValueError, TypeError, KeyError, AttributeError, RecursionError, msgpack.UnpackException
        ):
            return cls.unpack(data)
        return None


def order_in(packed: bytes) -> Order | None:
    """The order of the attempt that a packed header is of, at a tenth of the cost of ``Header.parse``."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
        attempt = msgpack.unpackb(packed, unicode_errors="surrogateescape")["attempt"]
        generation, seq = attempt["generation"], attempt["seq"]
        if type(generation) is int and type(seq) is int:
            return (generation, seq)
    return None
