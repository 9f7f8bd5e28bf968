"""What a power cut decides, and which of its decisions are looked at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

Slot = tuple[int, str]
"""A name: (directory, name in it)."""


class Change(NamedTuple):
    """A name that is not durable yet: what it stands for now. Both halves of a rename have its number."""

    slot: Slot
    value: int | None
    rename: int


class Choice(NamedTuple):
    """One thing that a power cut decides: a name or the bytes of a file, and its possible states, oldest first."""

    slot: Slot | None
    file: int
    states: tuple[Any, ...]


def selections(choices: list[Choice], log: list[Change], bound: int) -> Iterator[tuple[int, ...]]:
    """Which states to leave: every combination if there are at most ``bound``; if it is 0 two, all old and all new.

    Of more combinations than ``bound`` these: all old; all new; every prefix of the changes, in the order of their
    making; each single choice, and each whole rename, that goes the other way while all others are old, or all new;
    and pairs of such choices while there is room within ``bound``.
    """
    sizes = [len(choice.states) for choice in choices]
    if math.prod(sizes) <= bound:
        yield from itertools.product(*map(range, sizes))
        return
    old, new = [0] * len(sizes), [size - 1 for size in sizes]
    yield from (tuple(old), tuple(new))
    if not bound:
        return
    place: dict[Slot | None, int] = {choice.slot: index for index, choice in enumerate(choices) if choice.slot}
    prefix = list(old)
    for change in log:
        prefix[place[change.slot]] += 1
        yield tuple(prefix)
    halves = _renames(log, place)
    singles = [(index,) for index in range(len(sizes))]
    pairs = [two for two in itertools.combinations(range(len(sizes)), 2) if two not in halves]
    count = 0
    for among in (*singles, *halves, *pairs):
        for base in (old, new):
            for states in itertools.product(*(range(sizes[index]) for index in among)):
                if any(state == base[index] for state, index in zip(states, among, strict=True)):
                    continue
                count += 1
                if count > bound and among not in halves and len(among) > 1:
                    return
                changed = list(base)
                for state, index in zip(states, among, strict=True):
                    changed[index] = state
                yield tuple(changed)


def _renames(log: list[Change], place: dict[Slot | None, int]) -> list[tuple[int, int]]:
    """The two choices that each rename is."""
    found: dict[int, list[int]] = {}
    for change in log:
        if change.rename:
            found.setdefault(change.rename, []).append(place[change.slot])
    return sorted({(min(both), max(both)) for both in found.values() if len(both) == 2})
