"""Who writes to a root and what came from what: its id, the claims of runs, the line, offers, reading leases."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ckpt_engine import disk_names
from ckpt_engine.errors import ConfigError, Corrupt, StaleRun, StorageError
from ckpt_engine.manifest import Attempt, Lease, Offer, RootId, RunClaim
from ckpt_engine.record import Record
from ckpt_engine.storage.base import Storage, create_exclusive, make_dirs, write_durably

_LIMIT_BYTES = 1 << 20
LEASE_STALE_S = 60.0
_ENDLESS = 2**63

R = TypeVar("R", bound=Record)


def root_id(storage: Storage, root: str) -> str | None:
    """The id of this root; None if it has none yet. Raises Corrupt."""
    found = _read(storage, os.path.join(root, disk_names.ROOT_ID), RootId)
    return found.root_id if found else None


def adopt_root_id(storage: Storage, root: str, id: str) -> None:
    """This root is ``id`` from now on; makes the directory. Raises ConfigError, naming both, if it is another.

    After a crash: no id or this one.
    """
    make_dirs(storage, root)
    if create_exclusive(storage, os.path.join(root, disk_names.ROOT_ID), RootId(id).to_bytes()):
        return
    found = root_id(storage, root)
    if found != id:
        raise ConfigError(f"{root} is the root {found}, not {id}: is every rank given the same directory?")


def claim_run(storage: Storage, root: str, claim: RunClaim) -> None:
    """The generation is ours, for ever; idempotent. Call before the first write and before each publish.

    Raises StaleRun: another run holds this generation, or a newer one has come.

    After a crash: claimed or not; a claim is never half there, except where there are no hard links.
    """
    path = os.path.join(root, disk_names.run_claim(claim.generation))
    try:
        holder = _read(storage, path, RunClaim)
        if holder is None and not create_exclusive(storage, path, claim.to_bytes()):
            holder = _read(storage, path, RunClaim)
    except Corrupt as error:
        raise StaleRun(f"{path} is damaged; start again for a new generation", other="unknown") from error
    if holder is not None and holder.run != claim.run:
        raise StaleRun(f"run {holder.run} has claimed generation {claim.generation} of {root}", other=holder.run)
    newer = _newest_generation(storage, root, claim.generation)
    if newer > claim.generation:
        raise StaleRun(f"a newer run, generation {newer}, writes to {root}", other=f"generation {newer}")


def read_runs(storage: Storage, root: str) -> tuple[RunClaim, ...]:
    """The claims that can be read, newest first; a damaged one is left out."""
    claims = []
    for entry in storage.list_dir(root):
        if disk_names.parse_run_claim(entry.name) is not None:
            try:
                claim = _read(storage, os.path.join(root, entry.name), RunClaim)
            except (Corrupt, StorageError):
                continue
            if claim is not None and disk_names.run_claim(claim.generation) == entry.name:
                claims.append(claim)
    return tuple(sorted(claims, key=lambda claim: claim.generation, reverse=True))


def on_the_line(attempt: Attempt, runs: Iterable[RunClaim]) -> bool:
    """Did the newest run come out of ``attempt`` (or make it)? Pure.

    ``runs``: claims on disk first, then those in slot headers; of two for one generation the first counts. The line
    goes from the newest run to the attempt it resumed from, to that attempt's run, and so on. A generation without a
    claim wrote nothing here (the claim comes before its first file), so it has abandoned nothing: the line
    passes through it to the newest claimed run below. Without any claim every attempt is on the line.
    """
    return any(
        stretch.generation == attempt.generation and stretch.run in (attempt.run, None) and attempt.seq <= stretch.seq
        for stretch in _line(attempt.generation, runs)
    )


def left_behind(attempt: Attempt, claim: RunClaim, known: Iterable[RunClaim], *, leased: bool) -> bool:
    """May the run of ``claim`` give up this snapshot before its first save (invariant 9)? Pure.

    What it resumed from stays; what is ``leased`` to the saver, queued or being written, stays on the line.
    """
    if attempt == claim.resumed_from or attempt.run == claim.run:
        return False
    return not leased or not on_the_line(attempt, known)


def write_offer(storage: Storage, root: str, offer: Offer) -> None:
    """Tell the other savers what this node holds complete. After a crash: the old offer or this one."""
    write_durably(storage, os.path.join(root, disk_names.offer(offer.generation, offer.node)), offer.to_bytes())


def read_offers(storage: Storage, root: str, claim: RunClaim, nodes: int) -> tuple[Offer | None, ...]:
    """The offers of all ``nodes`` for this run, opened by name; None where there is none yet."""
    found: list[Offer | None] = []
    for node in range(nodes):
        try:
            offer = _read(storage, os.path.join(root, disk_names.offer(claim.generation, node)), Offer)
        except Corrupt:
            offer = None
        found.append(offer if offer is not None and offer.run == claim.run and offer.node == node else None)
    return tuple(found)


def newest_common(offers: Sequence[Offer | None]) -> Attempt | None:
    """The newest attempt that every node offers; None if there is none, or an offer is missing. Pure."""
    held = [set(offer.attempts) for offer in offers if offer is not None]
    common = set.intersection(*held) if held and len(held) == len(offers) else set()
    return max(common, key=lambda attempt: attempt.order, default=None)


def write_lease(storage: Storage, root: str, lease: Lease) -> None:
    """Keep retention away from ``lease.tag`` ("": from all). Write again every 10 s with a higher ``beat``."""
    write_durably(storage, os.path.join(root, disk_names.lease(lease.token)), lease.to_bytes())


def drop_lease(storage: Storage, root: str, token: str) -> None:
    storage.unlink(os.path.join(root, disk_names.lease(token)))


class LeaseWatch:
    """Which tags are being read, as this observer sees it: a lease unchanged for ``LEASE_STALE_S`` is stale.

    Only the observer's own monotonic clock counts, never a time written by somebody else.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes, float]] = {}

    def tags(self, storage: Storage, root: str, now: float) -> frozenset[str]:
        """Tags under a live lease; "" stands for every tag (so does a damaged lease). ``now``: monotonic seconds."""
        names = [entry.name for entry in storage.list_dir(root) if disk_names.parse_lease(entry.name)]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        tags = [self._tag(storage, os.path.join(root, name), name, now) for name in names]
        return frozenset(tag for tag in tags if tag is not None)

    def _tag(self, storage: Storage, path: str, name: str, now: float) -> str | None:
        try:
            data = storage.read_small(path, _LIMIT_BYTES)
        except StorageError:  # a directory, a pipe, more than a lease: damaged like any other, and stale in time
            data = b""
        if data is None:
            return None
        known, since = self._seen.get(name, (None, now))
        if known != data:
            since = now
        self._seen[name] = (data, since)
        if now - since >= LEASE_STALE_S:
            return None
        try:
            return Lease.from_bytes(data, path).tag
        except Corrupt:
            return ""


class _Stretch(NamedTuple):
    """Part of the line: attempts of one run up to ``seq``. ``run`` None: of any."""

    generation: int
    run: str | None
    seq: int


def _line(wanted: int, runs: Iterable[RunClaim]) -> Iterator[_Stretch]:
    """The line, newest first; ``wanted`` names the generation to show where no claim tells one from another."""
    claims: dict[int, RunClaim] = {}
    for claim in runs:
        claims.setdefault(claim.generation, claim)
    here = _newest_below(claims, _ENDLESS)
    if here is None or wanted > here.generation:
        yield _Stretch(wanted, None, _ENDLESS)
    while here is not None:
        yield here
        claimed = claims.get(here.generation)
        if claimed is None or claimed.run != here.run:
            below = _newest_below(claims, here.generation)
            if below is None and wanted < here.generation:
                yield _Stretch(wanted, None, _ENDLESS)
            here = below
        else:
            last = claimed.resumed_from
            here = None if last is None else _Stretch(last.generation, last.run, last.seq)


def _newest_below(claims: Mapping[int, RunClaim], generation: int) -> _Stretch | None:
    newest = max((known for known in claims if known < generation), default=None)
    return None if newest is None else _Stretch(newest, claims[newest].run, _ENDLESS)


def _newest_generation(storage: Storage, root: str, at_least: int) -> int:
    """By listing, and by name: a listing may be stale on NFS."""
    found = [disk_names.parse_run_claim(entry.name) or 0 for entry in storage.list_dir(root)]
    next_one = at_least + 1
    there = storage.size(os.path.join(root, disk_names.run_claim(next_one))) is not None
    return max([at_least, *found, *([next_one] if there else [])])


def _read(storage: Storage, path: str, kind: type[R]) -> R | None:
    data = storage.read_small(path, _LIMIT_BYTES)
    return None if data is None else kind.from_bytes(data, path)
