"""What a saver says about an attempt and its end: header → places, error → failure record → outcome."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine import commit, errors
from ckpt_engine.control import Outcome
from ckpt_engine.errors import Cancelled, CkptError, PersistError, StaleRun
from ckpt_engine.events import log
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, Failure, Receipt, RunClaim
from ckpt_engine.storage.base import Storage


def node_of(header: Header) -> int | None:
    """The node whose own manifest commits this shard; None on a shared root."""
    return header.node if header.layout == "node-local" else None


def parent_of(header: Header) -> str:
    """The directory that holds the commit directory and ``latest``."""
    return header.commit_dir.rsplit("/", 1)[0] or "/"


def failure_of(error: Exception, rank: int) -> Failure:
    """What a receipt says about ``error``."""
    return Failure(
        rank=rank,
        reason=f"{type(error).__name__}: {error}"[:500],
        op=getattr(error, "op", ""),
        path=str(getattr(error, "path", "")),
        errno=getattr(error, "errno", 0) or 0,
        need_bytes=getattr(error, "need_bytes", 0),
        free_bytes=getattr(error, "free_bytes", 0),
    )


def write_failure(storage: Storage, header: Header, failure: Failure, *, nothing_there: bool) -> None:
    """The failure receipt, so that other nodes need not wait, if any does; best effort, the storage may be the cause.

    ``nothing_there``: nothing of this attempt was written on this node, so its directory may be missing yet.
    """
    if header.decides_alone:
        return
    receipt = Receipt(header.attempt, header.node, header.nodes, header.world, header.layout, (), failure)
    try:
        if nothing_there:  # what fails in a rank may be faster than those that copy
            commit.make_tag_dir(storage, parent_of(header), header.attempt.tag)
        commit.make_attempt_dir(storage, parent_of(header), header.attempt, node=node_of(header))
        commit.write_receipt(storage, parent_of(header), receipt)
    except CkptError as error:
        log.warning("no failure receipt for %s: %s", header.attempt.id, error)


def outcome_from(failure: Failure, header: Header) -> Outcome:
    kind, _, reason = failure.reason.partition(": ")
    known = isinstance(getattr(errors, kind, None), type)
    return Outcome(
        header.attempt.order,
        header.attempt.run,
        "failed",
        kind=kind if known else "AttemptFailed",
        rank=failure.rank,
        reason=(reason if known else failure.reason)[:300],
        op=failure.op,
        path=failure.path[-200:],
        errno=failure.errno,
        need_bytes=failure.need_bytes,
        free_bytes=failure.free_bytes,
    )


def outcome_of(error: CkptError, header: Header, status: str = "failed") -> Outcome:
    missing = getattr(error, "missing_ranks", ())
    return Outcome(
        header.attempt.order,
        header.attempt.run,
        status,
        kind=type(error).__name__,
        reason=str(error)[:300],
        missing=tuple(missing[:64]),
    )


def with_committed(ring: Iterable[Outcome], attempts: Iterable[Attempt]) -> tuple[Outcome, ...]:
    """``ring`` and, by their order, the committed ``attempts`` that it says nothing of: the oldest go first."""
    known = {(old.order, old.run): old for old in ring}
    found = {(one.order, one.run): Outcome(one.order, one.run, "committed") for one in attempts}
    return tuple(sorted((found | known).values(), key=lambda outcome: outcome.order))


def refusal(attempt: Attempt, by: Attempt | None, known: Iterable[RunClaim], *, live: bool) -> PersistError:
    """Why ``publish`` refused: (its run is ``live``) taken over, saved anew as ``by``, or given up by its own job."""
    other = next((one for one in known if one.generation >= attempt.generation and one.run != attempt.run), None)
    if live and other is not None:
        return StaleRun(f"run {other.run} (generation {other.generation}) took over this root", other=other.run)
    why = f"{by.id} is committed under its tag" if by else "it is not on the line of the newest run any more"
    return Cancelled(f"{attempt.id} was given up: {why}")
