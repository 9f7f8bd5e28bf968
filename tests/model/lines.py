"""All small histories of a root: runs that save, die, lose a node's memory, come back, or are rolled back.

The restore that ends each run, and the offers of savers whose ranks died, are production's; what they ought to find
is worked out from the true parents of the runs, which only the model knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ckpt_engine import restore, runs
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import Attempt, Committed, FileEntry, Manifest, Offer, RunClaim, Shard
from ckpt_engine.names import SegmentName
from ckpt_engine.retention import Retention
from ckpt_engine.source import Held

from .explorer import Violation

ROOT_ID = "ab" * 8
WORLD = 2  # one rank on each of two nodes


class Save(NamedTuple):
    attempt: Attempt
    held: tuple[bool, bool]
    committed: bool = False

    @property
    def complete(self) -> bool:
        return self.committed or all(self.held)


class History(NamedTuple):
    claims: tuple[RunClaim, ...]  # of all runs there ever were, oldest first
    claimed: frozenset[str] = frozenset()  # those that made it to the disk
    saves: tuple[Save, ...] = ()
    losses: int = 0
    ended: bool = False


class Lines:
    def __init__(self, *, runs: int = 3, saves: int = 2, losses: int = 1) -> None:
        self.name = "lines, restore and offers"
        self.bounds = f"{runs} runs of {saves} saves on 2 nodes with 2 slots, {losses} node losing its memory"
        self._runs, self._saves, self._losses = runs, saves, losses

    def world(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self) -> Iterable[History]:
        yield History((RunClaim(1, f"{1:016x}", None, WORLD, 0),))

    def wrong(self, history: History) -> str:
        return ""

    def rests(self, history: History) -> str:
        return "" if history.ended or len(history.claims) == self._runs else "no restore is possible"

    # -- what may happen -----------------------------------------------------------------------------------------

    def moves(self, history: History) -> Iterator[tuple[str, History]]:
        now = history.claims[-1]
        seq = 1 + sum(save.attempt.run == now.run for save in history.saves)
        if not history.ended and seq <= self._saves:
            step = 1 + max([s.attempt.step for s in history.saves if s.attempt.run == now.run], default=_from(now))
            attempt = Attempt(now.generation, now.run, seq, step, f"step{step}", ROOT_ID)
            for how, save in (
                ("memory", Save(attempt, (True, True))),
                ("storage", Save(attempt, (True, True), True)),
                ("half a memory", Save(attempt, (True, False))),
                ("the other half of a memory", Save(attempt, (False, True))),
            ):
                yield f"a {how} save of {attempt.order}, step {step}", self._saved(history, save)
        if not history.ended:
            yield "all ranks end", history._replace(ended=True)
            return
        for node in range(WORLD):
            if history.losses < self._losses and any(save.held[node] for save in history.saves):
                gone = (save._replace(held=_without(save.held, node)) for save in history.saves)
                yield f"! node {node} loses its memory", history._replace(saves=tuple(gone), losses=history.losses + 1)
        if len(history.claims) < self._runs:
            found = self._restore(history, None)
            yield f"a restore finds {found and found.order}", self._next_run(history, found)
            for step in sorted({save.attempt.step for save in history.saves if save.complete}):
                back = self._restore(history, step)
                yield f"a roll-back to step {step} finds {back and back.order}", self._next_run(history, back)

    def _saved(self, history: History, save: Save) -> History:
        """Ranks that take part free what other runs left, but for what they resumed from, and keep their newest two."""
        now = history.claims[-1]
        saves = list(history.saves)
        for node in (node for node in range(WORLD) if save.held[node]):
            mine = [one.attempt for one in saves if one.attempt.run == now.run and one.held[node]]
            for index, one in enumerate(saves):
                stays = one.attempt in mine[-1:]
                stays = stays or not (mine or runs.left_behind(one.attempt, now, (), leased=False))
                if not stays:
                    saves[index] = one._replace(held=_without(one.held, node))
        history = history._replace(saves=(*(one for one in saves if one.committed or any(one.held)), save))
        return history._replace(claimed=history.claimed | {now.run}) if save.committed else history

    def _next_run(self, history: History, found: Attempt | None) -> History:
        traces = [save.attempt.generation for save in history.saves]
        traces += [claim.generation for claim in history.claims if claim.run in history.claimed]
        number = len(history.claims) + 1
        generation = 1 + max([*traces, found.generation if found else 0, 0])
        claim = RunClaim(generation, f"{number:016x}", found, WORLD, 0)
        return history._replace(claims=(*history.claims, claim), ended=False)

    # -- production's answers, and what they ought to be -----------------------------------------------------------

    def _restore(self, history: History, step: int | None) -> Attempt | None:
        claims = {claim.run: claim for claim in history.claims}
        facts = []
        for node in range(WORLD):
            held = [save for save in history.saves if save.held[node]]
            facts.append(
                restore.Facts(
                    node,
                    step,
                    tuple(
                        Held(node, SegmentName("0" * 16, 0, 0, 1), header_of(s.attempt, claims[s.attempt.run], node))
                        for s in held
                    ),
                    tuple(committed_of(s.attempt) for s in history.saves if s.committed and node == 0),
                    tuple(claims[run] for run in sorted(history.claimed) if node == 0),
                )
            )
        found = restore.candidates(facts, ROOT_ID, "shared").candidates
        for one in found:
            if {entry.crc32 for _, entry in one.files} != {mark(one.attempt)}:
                raise Violation(f"invariant 9: {one.attempt.order} was put together from several attempts")
            if one.attempt not in [save.attempt for save in history.saves if save.complete]:
                raise Violation(f"invariant 13: {one.attempt.order} is offered and is not complete")
        chosen = found[0].attempt if found else None
        self._offers(history)
        if step is None:
            self._judge(history, chosen)
        return chosen

    def _offers(self, history: History) -> None:
        run = history.claims[-1].run
        offers = [Offer(9, run, n, tuple(s.attempt for s in history.saves if s.held[n])) for n in range(WORLD)]
        both = max((s.attempt.order for s in history.saves if all(s.held)), default=None)
        common = runs.newest_common(offers)
        if (common and common.order) != both:
            raise Violation(f"the savers would persist {common and common.order}, all hold {both}")

    def _judge(self, history: History, chosen: Attempt | None) -> None:
        known = history.claimed | {save.attempt.run for save in history.saves if any(save.held)}
        newest = max((c for c in history.claims if c.run in known), key=lambda c: c.generation, default=None)
        if newest is None:
            return
        line, whole = self._line(history, newest, known)
        due = max((s.attempt.order for s in history.saves if s.complete and s.attempt in line), default=None)
        if due is not None and (chosen is None or chosen.order < due):
            raise Violation(f"invariant 13: the restore finds {chosen and chosen.order}, there is {due}")
        if chosen is not None and whole and chosen not in line:
            raise Violation(f"{chosen.order} was given up by a roll-back and is restored")

    @staticmethod
    def _line(history: History, newest: RunClaim, known: Iterable[str]) -> tuple[set[Attempt], bool]:
        """What the newest run truly came out of; and whether every run on that way has left a trace."""
        line: set[Attempt] = set()
        claim: RunClaim | None = newest
        last, whole = 1 << 30, True
        while claim is not None:
            run = claim.run
            line |= {s.attempt for s in history.saves if s.attempt.run == run and s.attempt.seq <= last}
            whole = whole and run in known
            if claim.resumed_from is None:
                break
            last = claim.resumed_from.seq
            claim = next(one for one in history.claims if one.run == claim.resumed_from.run)
        return line, whole


def _from(claim: RunClaim) -> int:
    return claim.resumed_from.step if claim.resumed_from is not None else 0


def _without(held: tuple[bool, bool], node: int) -> tuple[bool, bool]:
    return (False, held[1]) if node == 0 else (held[0], False)


def mark(attempt: Attempt) -> int:
    """A checksum that only the files of this attempt have."""
    return int(attempt.run, 16) * 1000 + attempt.seq


@lru_cache(None)
def header_of(attempt: Attempt, claim: RunClaim, rank: int) -> Header:
    return Header(
        attempt, claim, rank, 0, WORLD, rank, WORLD, (rank,), "shared", "/root", f"/root/{attempt.tag}",
        Retention(), None, False, (SlotFile(f"{rank}.pt", 0, 1, mark(attempt)),),
    )  # fmt: skip


@lru_cache(None)
def committed_of(attempt: Attempt) -> Committed:
    shards = tuple(Shard(rank, (FileEntry(f"{rank}.pt", 1, mark(attempt)),)) for rank in range(WORLD))
    return Committed(Manifest(attempt, WORLD, "shared", None, WORLD, shards), f"/root/{attempt.tag}")
