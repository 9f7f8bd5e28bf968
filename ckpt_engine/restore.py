"""Choose the newest (attempt, source) that all ranks can serve, verify it, hand over private state.

All ranks see the same facts (one gather), so the choice is a pure function that each computes for itself. Files that
a node lacks are broadcast in one planned sequence; then every rank verifies what it wants, all compare notes, and
damage anywhere moves everybody to the next candidate, as the root is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_engine import listing, runs
from ckpt_engine.agreement import NFS_STALE_S
from ckpt_engine.errors import ConfigError, Corrupt, NotFound, RestoreError, WorldMismatch
from ckpt_engine.events import log, span
from ckpt_engine.group import Group, Place, together
from ckpt_engine.manifest import Attempt, Committed, FileEntry, RunClaim
from ckpt_engine.slots import Slot
from ckpt_engine.source import Candidate, Held, Share, Source
from ckpt_engine.storage.base import Storage

MAX_TRIED = 1000  # a root whose owner is always faster has to be read at another time
Wants = Callable[[Sequence[tuple[int, FileEntry]]], tuple[Iterable[str], Iterable[str]]]
"""(rank, file) of all files of an attempt → the names this rank verifies and keeps, and those it may read later."""


@dataclass(frozen=True, slots=True)
class How:
    """How one rank reads: opens a candidate, says what it wants of it, and shares memory with its node; then loads.

    ``load(source)`` reads with ``Source.fetch`` and must not communicate on its own account.
    """

    open_source: Callable[[Candidate], Source]
    wants: Wants
    share: Share
    load: Callable[[Source], Mapping[str, Any]] = lambda source: {}


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was tried or seen before what was used, and why it was not used."""

    attempt: str
    step: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore found. ``source``: "memory", "storage" or None (nothing to restore: ``step`` is 0).

    ``state``: {file name: object} of this rank (plain engine). ``client_state``: what the framework stored beside.
    ``skipped``: better ones that could not be used. ``unmanaged``: tags without a manifest in the root, written
    by someone else. ``verified_bytes``: bytes whose CRC this rank checked. ``metrics``: given at the save.
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
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank contributes: most only the step they were asked for. Claims of what is held are in its headers."""

    node: int
    step: int | None
    held: tuple[Held, ...] = ()
    committed: tuple[Committed, ...] = ()
    claims: tuple[RunClaim, ...] = ()
    damaged: tuple[str, ...] = ()
    unmanaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """``candidates``: best first. ``damaged``: what was committed once and cannot be read. ``partial``: never whole."""

    candidates: tuple[Candidate, ...]
    damaged: tuple[Skipped, ...] = ()
    partial: tuple[tuple[Attempt, Skipped], ...] = ()

    def newer_than(self, attempt: Attempt | None) -> tuple[Skipped, ...]:
        """The partial ones that a user may miss."""
        return tuple(told for one, told in self.partial if attempt is None or one.order > attempt.order)


def look(storage: Storage, slots: Iterable[Slot], root: str, place: Place, layout: str, step: int | None) -> Facts:
    """What this rank can tell: one rank per node lists memory, rank 0 (or one per node) lists storage."""
    held: list[Held] = []
    for slot in slots if place.leader else ():
        found = slot.snapshot()
        if found is not None and found[1].root == root:
            held.append(Held(place.node, slot.name, found[1]))
    if not place.reads_root(layout):
        return Facts(place.node, step, tuple(held))
    there = listing.list_committed(storage, root)
    return Facts(
        place.node,
        step,
        tuple(held),
        there.committed,
        runs.read_runs(storage, root),
        tuple(str(damage) for damage in there.damaged),
        listing.unmanaged(storage, root),
    )


def candidates(facts: Sequence[Facts], root_id: str, layout: str) -> Choice:
    """Every complete candidate, best first (newest attempt, memory before storage). Pure.

    Without a step only attempts on the line count; with it, all of that step. Checkpoints of another root, that
    somebody copied here, count where there is none of this one, or where their step is asked for.
    """
    step, *others = {fact.step for fact in facts}
    if others:
        raise ConfigError(f"the ranks were asked for different steps: {sorted(map(str, (step, *others)))}")
    partial: list[tuple[Attempt, Skipped]] = []
    held = [one for fact in facts for one in fact.held]
    claims = [claim for fact in facts for claim in fact.claims]
    claims += {one.header.claim: None for one in held if one.header.attempt.root_id == root_id}
    found = _from_memory(held, root_id, partial)
    stored = _from_storage(facts, layout, partial)
    own = [one for one in stored if one.attempt.root_id == root_id]
    found += stored if step is not None else own or (stored if not found else [])
    damaged = tuple(Skipped("", 0, "storage", text) for fact in facts for text in fact.damaged)

    def counts(attempt: Attempt) -> bool:
        if step is not None:
            return attempt.step == step
        return attempt.root_id != root_id or runs.on_the_line(attempt, claims)

    def rank(one: Candidate) -> tuple[bool, tuple[int, int], bool]:
        return (one.attempt.root_id == root_id, one.attempt.order, one.source == "memory")

    chosen = sorted((one for one in found if counts(one.attempt)), key=rank, reverse=True)
    return Choice(tuple(chosen), damaged, tuple(one for one in partial if counts(one[0])))


def _from_memory(held: Sequence[Held], root_id: str, partial: list[tuple[Attempt, Skipped]]) -> list[Candidate]:
    by_attempt: dict[Attempt, dict[int, Held]] = {}
    for one in held:
        by_attempt.setdefault(one.header.attempt, {})[one.header.rank] = one
    made = []
    for attempt, parts in by_attempt.items():
        if attempt.root_id != root_id:
            partial.append(
                (attempt, Skipped(attempt.tag, attempt.step, "memory", f"of a removed root {attempt.root_id}"))
            )
        world = next(iter(parts.values())).header.world
        if attempt.root_id != root_id or not _whole(attempt, "memory", world, parts, partial):
            continue
        files = tuple((rank, file.entry) for rank, part in sorted(parts.items()) for file in part.header.files)
        files = tuple((rank, entry) for rank, entry in files if entry.origin == "shard")
        made.append(Candidate(attempt, "memory", world, files, held=tuple(parts.values())))
    return made


def _from_storage(facts: Sequence[Facts], layout: str, partial: list[tuple[Attempt, Skipped]]) -> list[Candidate]:
    """One for each attempt whose manifests, wherever they were found, speak for all ranks."""
    by_attempt: dict[Attempt, dict[int | None, tuple[Committed, set[int]]]] = {}
    for fact in facts:
        for one in fact.committed:
            parts = by_attempt.setdefault(one.manifest.attempt, {})
            parts.setdefault(one.manifest.node, (one, set()))[1].add(fact.node)
    made = []
    for attempt, parts in by_attempt.items():
        committed = tuple(one for one, _ in parts.values())
        shards = {shard.rank: shard.files for one in committed for shard in one.manifest.shards}
        world = committed[0].manifest.world
        if not _whole(attempt, "storage", world, shards, partial):
            continue
        files = tuple((rank, e) for rank, entries in sorted(shards.items()) for e in entries if e.origin != "tool")
        readers = tuple(frozenset(nodes) for _, nodes in parts.values()) if layout == "node-local" else ()
        made.append(Candidate(attempt, "storage", world, files, committed=committed, readers=readers))
    return made


def _whole(
    attempt: Attempt, source: str, world: int, ranks: Iterable[int], partial: list[tuple[Attempt, Skipped]]
) -> bool:
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        partial.append((attempt, Skipped(attempt.tag, attempt.step, source, f"nothing of ranks {missing[:8]}")))
    return not missing


def take(
    group: Group, place: Place, root: str, ask: Callable[[], Facts], root_id: str, layout: str, how: How
) -> RestoreReport:
    """The report of what all ranks chose, verified and loaded. Collective; an error on one rank is one on all.

    ``ask``: what this rank can tell now; asked before each candidate, for the last one may have gone or been replaced.
    """
    facts, choice = list[Facts](), Choice(())

    def again() -> Sequence[Candidate]:
        nonlocal facts, choice
        facts = together(group, ask, RestoreError)
        choice = candidates(facts, root_id, layout)
        return choice.candidates

    source, tried = choose(group, place, again, how)
    report = RestoreReport(0, None)
    if source is None:
        nothing_usable(root, facts, choice, tried)
    else:
        chosen, loaded = source, dict[str, Any]()
        try:  # nobody goes on, and fills a slot, before everybody has read
            together(group, lambda: loaded.update(how.load(chosen)), RestoreError)
        finally:
            source.close()
        one = source.candidate
        report = RestoreReport(one.attempt.step, one.source, one.attempt, one.attempt.tag, loaded)
        report = replace(report, verified_bytes=source.verified_bytes, metrics=one.metrics)
    return replace(
        report,
        skipped=(*choice.damaged, *tried, *choice.newer_than(report.attempt)),
        unmanaged=tuple(dict.fromkeys(tag for fact in facts for tag in fact.unmanaged)),
    )


def choose(
    group: Group, place: Place, look: Callable[[], Sequence[Candidate]], how: How
) -> tuple[Source | None, tuple[Skipped, ...]]:
    """The best candidate that every rank verified, opened; None if there is none. Collective.

    ``look``: the candidates there are now, the same on all ranks, best first; none is tried twice.
    Raises WorldMismatch if the newest candidate was saved by another number of ranks.
    """
    skipped, tried = list[Skipped](), set[tuple[Attempt, str]]()
    while len(tried) < MAX_TRIED:
        candidate = next((one for one in look() if (one.attempt, one.source) not in tried), None)
        if candidate is None:
            break
        tried.add((candidate.attempt, candidate.source))
        if candidate.world != group.world:
            raise WorldMismatch(
                f"{candidate.attempt.tag} was saved by {candidate.world} ranks, this job has {group.world}. Start as "
                "many as then; or convert it: DeepSpeed's ds_to_universal.py makes a universal checkpoint of it, and "
                "'ckpt-engine export' writes what FSDP2 and plain PyTorch saved for any number of ranks (docs/fsdp.md)",
                want=candidate.world,
                got=group.world,
            )
        with span("verify", step=candidate.attempt.step, source=candidate.source) as facts:
            source, problems = _try(group, place, candidate, how)
            facts["problems"] = len(problems)
        if source is not None and not problems:
            return source, tuple(skipped)
        if source is not None:
            source.close()
        reason = "; ".join(problems)[:500]
        if problems and all(": NotFound: " in problem for problem in problems):
            raise NotFound(reason)  # the caller's mistake: an older checkpoint would not be what was asked for
        log.warning("cannot restore %s from %s: %s", candidate.attempt.tag, candidate.source, reason)
        skipped.append(Skipped(candidate.attempt.tag, candidate.attempt.step, candidate.source, reason))
    return None, tuple(skipped)


def _try(group: Group, place: Place, candidate: Candidate, how: How) -> tuple[Source | None, list[str]]:
    """One candidate on all ranks; the problems of all ranks. Each gather is reached by every rank, come what may."""
    source: Source | None = None
    mine: list[str] = []
    plan: tuple[set[tuple[int, str]], set[str]] = (set(), set())
    problem = ""
    try:
        source = how.open_source(candidate)
        verified, later = how.wants(candidate.files)
        mine = sorted(set(verified))
        plan = (source.lacks({*mine, *later}), source.absent() if place.rank == 0 else set())
    except Exception as error:  # all ranks are told, below
        problem = f"{type(error).__name__}: {error}"
    told = group.gather((problem, place.node, *plan))
    problems = [f"rank {rank}: {one[0]}" for rank, one in enumerate(told) if one[0]]
    if source is None or problems:
        return source, problems
    gone = told[0][3]  # rank 0 listed the storage: what it does not see either will not show up
    try:
        source.exchange(group, [(key, node) for _, node, keys, _ in told for key in keys], how.share)
    except Exception as error:  # all ranks are told, below
        problem = f"{type(error).__name__}: {error}"
    group.gather(())  # every file is complete before anybody reads one
    try:
        for name in mine if not problem else ():
            patient = candidate.source == "storage" and not candidate.readers and name not in gone
            source.keep(name, NFS_STALE_S if patient else 0.0)
    except Exception as error:  # all ranks are told, below
        problem = f"{type(error).__name__}: {error}"
    return source, [f"rank {rank}: {text}" for rank, text in enumerate(group.gather(problem)) if text]


def nothing_usable(root: str, facts: Sequence[Facts], choice: Choice, tried: Sequence[Skipped]) -> None:
    """Returns if there is provably nothing to restore. Raises NotFound, Corrupt: never a silent start from scratch."""
    step = facts[0].step
    known = {one.manifest.attempt.step for fact in facts for one in fact.committed}
    known |= {held.header.attempt.step for fact in facts for held in fact.held}
    skipped = (*choice.damaged, *tried)
    if step is not None and not skipped:
        raise NotFound(f"no checkpoint of step {step} in {root}; there are {sorted(known)}")
    if any(fact.committed for fact in facts) or skipped:
        skipped += choice.newer_than(None)
        told = "; ".join(f"{one.attempt or one.source}: {one.reason}" for one in skipped) or "none is on the line"
        raise Corrupt(
            f"{root} holds checkpoints of steps {sorted(known)}, but none that all ranks can use: {told}. To start "
            "from scratch on purpose, use an empty root",
            path=root,
            want="an intact checkpoint",
            got=told,
        )
