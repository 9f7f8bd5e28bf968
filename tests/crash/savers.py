"""Production's writer and committer on one disk, stepped by hand: no threads, no shared memory, no clock."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disk_model import ROOT_ID, claim_of, content

from ckpt_engine import commit, runs
from ckpt_engine.config import SaverOptions
from ckpt_engine.control import Outcome
from ckpt_engine.errors import CkptError, StorageError, StorageFull
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.retention import Retention
from ckpt_engine.saver.committer import Committer
from ckpt_engine.saver.persist import Writer
from ckpt_engine.slots import DATA_OFFSET

from .fault_disk import FaultDisk

ROOT = "/root"
Files = dict[int, tuple[str, ...]]
"""Rank → names; ``ext:NAME`` is an external file."""


@dataclass
class History:
    """What savers were told. ``expected``: for a tag the attempts of which one must be committed there now."""

    expected: dict[str, tuple[Attempt, ...]] = field(default_factory=dict)
    told: list[Attempt] = field(default_factory=list)
    whole: list[Attempt] = field(default_factory=list)
    """Told with nothing left to do: plain names and ``latest`` are durable, too."""
    begun: list[Attempt] = field(default_factory=list)
    publishers: int = 1
    """Of a re-save: until all are done one of them may still remove plain names that it takes for old."""

    def begin(self, attempt: Attempt) -> None:
        self.begun.append(attempt)
        if attempt.tag in self.expected:
            self.expected[attempt.tag] += (attempt,)

    def commit(self, attempt: Attempt, *, whole: bool) -> None:
        newest = max((one.order for one in self.told if one.tag == attempt.tag), default=(-1, -1))
        if attempt.order >= newest:
            self.expected[attempt.tag] = (attempt,)
        self.told.append(attempt)
        if whole:
            self.whole.append(attempt)

    def retire(self, keep_last: int | None) -> None:
        """Retention may remove all but the newest from now on."""
        committed = sorted({one.order for one in self.told}, reverse=True)
        for attempt in self.told:
            if keep_last is not None and attempt.order in committed[keep_last:]:
                self.expected.pop(attempt.tag, None)

    def settled(self, attempt: Attempt) -> bool:
        """Nobody has anything left to do for it."""
        return self.whole.count(attempt) >= self.publishers

    def mark(self) -> tuple[Any, ...]:
        return tuple(self.expected.items()), len(self.told), len(self.whole), len(self.begun)


class Staged:
    """Stands for a slot: its bytes, no flags set."""

    progress_offset = 24

    def __init__(self, memory: bytes) -> None:
        self.memory = memory

    def flags(self) -> int:
        return 0

    def reset_progress(self) -> None:
        pass


def begin_root(storage: Any, root: str = ROOT) -> None:
    """What ranks do before their first save."""
    runs.adopt_root_id(storage, root, ROOT_ID)


class Saver:
    """The saver of one node: ``save`` is a whole storage save; errors of the disk are tried again ``tries`` times."""

    def __init__(
        self, storage: Any, history: History, *, node: int = 0, nodes: int = 1, world: int = 2,
        layout: str = "shared", keep_last: int | None = None, tries: int = 4,
    ) -> None:  # fmt: skip
        self.storage, self.history = storage, history
        self.node, self.nodes, self.world, self.layout = node, nodes, world, layout
        self.keep_last, self.tries = keep_last, tries
        self.outcome: Outcome | None = None
        options = SaverOptions(sweep_after_s=0, retry_s=30 if tries > 1 else 0)
        self.committer = Committer(
            storage, options, ended=self._ended, live_run=lambda run: True, held=tuple, look_at_us=lambda: None
        )
        self.writer = Writer(storage, self.committer, lambda rank, message: None, 0)
        self._retain = self.committer.ledger.retain
        self.committer.ledger.retain = self._before_retention  # type: ignore[method-assign]

    def save(self, attempt: Attempt, files: Files, claim: RunClaim | None = None, *, begin: bool = True) -> Outcome:
        """One storage save of this node's ranks, to its outcome. ``files``: of this node's ranks."""
        if begin:
            self.history.begin(attempt)
        self.persist(attempt, files, claim or claim_of(attempt.generation))
        return self.end()

    def persist(self, attempt: Attempt, files: Files, claim: RunClaim) -> None:
        """Step 5 and 6 of a save: files and shard records, or a failure."""
        self.outcome = None
        with contextlib.suppress(StorageError):  # the rank tells its user; here the saver finds the directory or not
            self._again(lambda: commit.make_tag_dir(self.storage, ROOT, attempt.tag))
        for rank in files:
            header, staged = self._stage(attempt, rank, files, claim)
            done: set[str] = set()

            def write(staged: Any = staged, header: Header = header, done: set[str] = done) -> None:
                try:
                    self.writer._write(staged, header, done)
                except StorageError as error:
                    if not isinstance(error, StorageFull):
                        done.clear()
                    raise

            try:
                self._again(write)
            except CkptError as error:
                from ckpt_engine.saver.outcomes import failure_of

                if isinstance(error, StorageFull):
                    self.writer._give_room_back(header)
                self.committer.failed(header, failure_of(error, rank))
            else:
                self.committer.durable(header, self.writer._record or header.shard_record())

    def end(self) -> Outcome:
        """Steps 7 of a save, until there is an outcome."""
        while self.outcome is None:
            self.committer._pass()
        return self.outcome

    def _again(self, what: Callable[[], object]) -> None:
        for left in reversed(range(self.tries)):
            try:
                what()
                return
            except StorageError:
                if not left:
                    raise

    def _stage(self, attempt: Attempt, rank: int, files: Files, claim: RunClaim) -> tuple[Header, Staged]:
        memory, rows = bytearray(DATA_OFFSET), []
        for name in files[rank]:
            plain = name.removeprefix("ext:")
            data = content(attempt, plain)
            origin = "external" if plain != name else "tool" if name.endswith(".py") else "shard"
            rows.append(SlotFile(plain, len(memory) - DATA_OFFSET, len(data), zlib.crc32(data), origin))
            memory += data
        ranks = tuple(files)
        header = Header(
            attempt, claim, rank, ranks.index(rank), self.world, self.node, self.nodes, ranks, self.layout,
            ROOT, f"{ROOT}/{attempt.tag}", Retention(keep_last=self.keep_last), attempt.order, True, tuple(rows),
        )  # fmt: skip
        return header, Staged(bytes(memory))

    def _before_retention(self, header: Header, waiting: Any, open_: Any) -> None:
        self.history.retire(self.keep_last)
        self._retain(header, waiting, open_)

    def _ended(self, header: Header, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome.status == "committed" and header.attempt not in self.history.told:
            self.history.commit(header.attempt, whole=not outcome.reason)


@dataclass(frozen=True)
class World:
    """A disk, what was told of it, and how patient savers on it are."""

    disk: FaultDisk
    history: History
    tries: int = 4

    def saver(self, **how: Any) -> Saver:
        return Saver(self.disk, self.history, tries=self.tries, **how)


Act = Callable[[World], None]


@dataclass
class Pair:
    """``second`` is also called in the middle of ``first``; when both are through, ``done`` is true."""

    world: World
    first: Callable[[], Any]
    second: Callable[[], Any]
    done: Callable[[], bool]
