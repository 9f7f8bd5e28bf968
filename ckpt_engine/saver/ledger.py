"""What the disk tells a saver, runs, commits and leftovers, and what may go from it after a commit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from ckpt_engine import commit, disk_names, listing, retention, runs, settle, sweep
from ckpt_engine.config import SaverOptions
from ckpt_engine.control import Outcome
from ckpt_engine.errors import CkptError, ConfigError, Corrupt, StaleRun, StorageError
from ckpt_engine.events import log, span, warn_once
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, Committed, Manifest, RunClaim, ShardRecord
from ckpt_engine.record import MAX_RECORD_BYTES
from ckpt_engine.saver.outcomes import node_of, parent_of
from ckpt_engine.states import Order
from ckpt_engine.storage.base import Storage
from ckpt_engine.waits import Deadline


class Ledger:
    """Asked in the committing thread, where not said otherwise: every question goes to the disk."""

    def __init__(self, storage: Storage, options: SaverOptions, held: Callable[[], tuple[Header, ...]]) -> None:
        self._storage = storage
        self._options = options
        self._held = held
        self._leases = runs.LeaseWatch()
        self._ages = Ages()
        self._claimed: set[str] = set()
        self._seen: dict[Attempt, float] = {}
        self._tidied: dict[str, bool] = {}

    def runs(self, root: str) -> tuple[RunClaim, ...]:
        """All runs known: claims in the root and claims in slot headers."""
        claims = {claim.run: claim for claim in runs.read_runs(self._storage, root)}
        claims |= {header.claim.run: header.claim for header in self._held()}
        return tuple(claims.values())

    def committed(self, header: Header) -> list[Committed]:
        """Committed checkpoints of this header's root id (of its node, where node-local), newest first."""
        found = [(one, one.manifest) for one in listing.list_committed(self._storage, header.root).committed]
        wanted = (header.attempt.root_id, node_of(header))
        return [one for one, manifest in found if (manifest.attempt.root_id, manifest.node) == wanted]

    def newest_committed(self, header: Header) -> Order:
        found = self.committed(header)
        return found[0].order if found else (0, 0)

    def is_published(self, header: Header) -> bool:
        """True if a manifest names this attempt already: a redo after a saver's death. In the writer's thread."""
        found = listing.manifest_or_none(self._storage, header.commit_dir, node_of(header))
        return found is not None and found.attempt == header.attempt

    def claim(self, header: Header) -> None:
        """Before the first byte: this is the root the snapshot was made for, and the number of its run is ours.

        A root that was removed under a job that goes on saving is the same root again: it gets its id and claim back.
        Raises StaleRun: another run has that number, or another root lies there now. In the writer's thread.
        """
        id = header.attempt.root_id
        try:
            there = runs.root_id(self._storage, header.root)
        except Corrupt as error:
            log.warning("%s: saving goes on; the next start will ask for a repair", error)
            there = id
        if there not in (None, id):
            raise StaleRun(f"{header.root} was removed, and what lies there now is the root {there}", other=f"{there}")
        keeper = node_of(header) is not None or header.node == 0
        if not keeper or (there and header.claim.run in self._claimed):
            return
        with span("claim", generation=header.claim.generation, run=header.claim.run):
            try:
                if there is None:
                    runs.adopt_root_id(self._storage, header.root, id)
            except ConfigError as error:  # another job made a new root of it in this instant
                raise StaleRun(str(error), other=header.root) from error
            runs.claim_run(self._storage, header.root, header.claim)
        self._claimed.add(header.claim.run)

    def recover(
        self,
        headers: Collection[Header],
        root: str,
        durable: Callable[[Header, ShardRecord], None],
        ended: Callable[[list[Attempt]], None],
    ) -> bool:
        """After a saver's death: tell what is committed, while it is there to be seen; then of durable shards that no
        manifest covers; and finish the newest publish."""
        with span("recover", held=len(headers)):
            ended(self.published(headers))
            for header, record in self.unpublished(headers):
                durable(header, record)
            committed = sweep.committed_here(self._storage, root)
            if committed:
                for trouble in settle.roll_forward(self._storage, root, committed[0].manifest.attempt.tag):
                    log.warning("%s: %s", committed[0].commit_dir, trouble)
        return True

    def published(self, headers: Iterable[Header]) -> list[Attempt]:
        """What manifests and tombstones say was committed in the runs of ``headers``."""
        wanted = {(parent_of(header), node_of(header), header.attempt.run) for header in headers}
        found: list[Manifest | None] = []
        for place, node in {(place, node) for place, node, _ in wanted}:
            for folder in listing.tag_dirs(self._storage, place):
                for entry in self._storage.list_dir(folder):
                    grave = disk_names.parse_tombstone(entry.name)
                    with contextlib.suppress(StorageError):  # a directory in its place
                        if entry.name == disk_names.manifest(node):
                            found.append(listing.manifest_or_none(self._storage, folder, node))
                        elif grave is not None and (place, node, grave.run) in wanted:
                            found.append(settle.buried(self._storage, f"{folder}/{entry.name}"))
        runs_wanted = {(node, run) for _, node, run in wanted}
        return [one.attempt for one in found if one and (one.node, one.attempt.run) in runs_wanted]

    def unpublished(self, headers: Iterable[Header]) -> Iterator[tuple[Header, ShardRecord]]:
        """What this node made durable in the runs of ``headers`` and no manifest covers, with a header like theirs."""
        by_place = {(parent_of(header), header.node, header.attempt.run): header for header in headers}
        for (root, node, run), header in by_place.items():
            for record in self._shard_records(root, run):
                if record.rank in header.node_ranks and record.node == node:
                    place = commit.commit_dir(root, record.attempt.tag)
                    local = header.node_ranks.index(record.rank)
                    like = replace(header, attempt=record.attempt, rank=record.rank, local_rank=local, commit_dir=place)
                    yield replace(like, files=(), storage=True), record

    def _shard_records(self, root: str, run: str) -> Iterator[ShardRecord]:
        for folder in listing.tag_dirs(self._storage, root):
            for entry in self._storage.list_dir(folder):
                name = disk_names.parse_attempt_dir(entry.name)
                if name is None or name.run != run:
                    continue
                manifest = listing.manifest_or_none(self._storage, folder, name.node)
                if manifest is not None and manifest.attempt.order >= name.order:
                    continue
                for path in self._storage.list_dir(f"{folder}/{entry.name}"):
                    if disk_names.is_record(path.name) and path.name.startswith(".shard-"):
                        with contextlib.suppress(CkptError):
                            full = f"{folder}/{entry.name}/{path.name}"
                            data = self._storage.read_small(full, MAX_RECORD_BYTES)
                            record = ShardRecord.from_bytes(data or b"", full)
                            own = disk_names.shard_record(record.rank)
                            if commit.attempt_path(root, record.attempt, own, node=record.local_node) == full:
                                yield record  # else somebody moved it here from another attempt

    def named(self, header: Header, deadline: Deadline) -> Outcome | None:
        """Try again to finish the names and ``latest`` of what is committed; None: look again before ``deadline``.

        Whatever is not done then is left to the next commit, or the next saver.
        """
        attempt, trouble = header.attempt, ""
        try:
            for error in settle.roll_forward(self._storage, parent_of(header), attempt.tag):
                trouble = str(error)
        except CkptError as error:
            trouble = str(error)
        if trouble and not deadline.expired():
            return None
        reason = f"its plain names or latest are not done: {trouble}"[:300] if trouble else ""
        return Outcome(attempt.order, attempt.run, "committed", reason=reason)

    def removed_from(self, folder: str) -> bool:
        """True, once, if retention or sweep removed something from ``folder``, and perhaps the directory with it.

        In the writer's thread: a rank that saves anew under that tag may have seen the directory just before.
        """
        return self._tidied.pop(folder, False)

    def retain(self, header: Header, waiting: Collection[Attempt], open_: Callable[[Attempt], bool]) -> None:
        """Retention and sweep after ``latest``; not in another's directory; never fatal.

        ``waiting``: attempts without an outcome; ``open_`` tells that of one that a slot holds.
        """
        if parent_of(header) != header.root:
            return
        storage, root = self._storage, header.root
        try:
            committed = self.committed(header)
            if not committed or committed[0].manifest.attempt != header.attempt:
                return
            live = frozenset(held.attempt for held in self._held()).union(waiting)
            read = self._leases.tags(storage, root, time.monotonic())
            busy = {attempt.tag for attempt in live if attempt != header.attempt and open_(attempt)}
            policy, root_id = header.retention, header.attempt.root_id
            with span("retention", committed=len(committed), keep_last=policy.keep_last) as facts:
                victims = retention.victims(
                    committed if "" not in read else (),
                    policy,
                    root_id=root_id,
                    protected=busy | read,
                    confirmed=header.confirmed,
                    ages_s=self._seen_for_s(committed),
                )
                for old in victims:
                    self._remove(old)
                facts["removed"] = len(victims)
            if policy.max_bytes is not None:
                kept = retention.kept_bytes(committed, policy, root_id=root_id)
                if kept > policy.max_bytes:
                    what = f"max_bytes={policy.max_bytes} cannot be met in {root}: what has to stay takes {kept} bytes"
                    warn_once(
                        f"max_bytes {policy.max_bytes} {root}",
                        f"{what}. Unpin, keep less, or allow more; nothing is removed for it",
                    )
            gone = sweep.sweep(
                storage,
                root,
                node=header.node,
                live=[attempt.id for attempt in live],
                sweep_after_s=self._options.sweep_after_s,
                age_of=self._ages.of,
            )
            self._note(map(os.path.dirname, gone))
        except CkptError as error:
            log.warning("retention after %s: %s; the next commit tries again", header.attempt.id, error)

    def _note(self, folders: Iterable[str]) -> None:
        self._tidied |= dict.fromkeys(folders, True)
        for old in list(self._tidied)[:-256]:
            self._tidied.pop(old, None)

    def _seen_for_s(self, committed: Iterable[Committed]) -> dict[Attempt, float]:
        """How long this saver has seen each of them committed, on its own monotonic clock; not by a writer's clock."""
        now = time.monotonic()
        attempts = [one.manifest.attempt for one in committed]
        self._seen = {attempt: self._seen.get(attempt, now) for attempt in attempts}
        return {attempt: now - since for attempt, since in self._seen.items()}

    def _remove(self, old: Committed) -> None:
        """One that cannot be removed (its directory is a link, or another user's) does not keep the others."""
        self._note([old.commit_dir])
        try:
            left = sweep.remove_checkpoint(self._storage, old).kept
            foreign = [name for name in left if not disk_names.is_ours(name)]
            if foreign:
                where = f"{old.commit_dir} keeps {', '.join(map(repr, foreign[:8]))}"
                warn_once(f"foreign {old.commit_dir}", f"{where}, which the checkpoint removed from there did not name")
        except StorageError as error:
            log.warning("retention leaves %s: %s", old.commit_dir, error)


class Ages:
    """How long nothing was seen to change at a path, on this observer's monotonic clock; not by others' clocks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def of(self, path: str) -> float:
        now = time.monotonic()
        try:
            mark = os.stat(path).st_mtime_ns
        except OSError:
            return 0.0
        known, since = self._seen.get(path, (mark, now))
        if known != mark:
            since = now
        self._seen[path] = (mark, since)
        return now - since
