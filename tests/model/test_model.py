"""Within the bounds that each model states, no promise is broken; and where one is broken on purpose, it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from .bugs import BUGS, REPAIRED, Bug
from .explorer import Counterexample, Model, explore
from .suite import MODELS


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build().name)
def test_no_state_breaks_a_promise_none_is_a_deadlock_and_every_wait_ends(build: Callable[[], Model[Any]]) -> None:
    report = explore(build())
    print(report)
    assert report.states > 900


@pytest.mark.parametrize("bug", [*BUGS, *REPAIRED], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_and_the_way_to_it_shown(bug: Bug) -> None:
    with bug.planted(), pytest.raises(Counterexample) as found:
        explore(bug.model())
    print(found.value)
    assert bug.promise in found.value.promise
    assert found.value.trace and str(len(found.value.trace)) in str(found.value)


class Circle:
    """A model that goes round for ever, then one that stops too early."""

    name, bounds = "circle", "3 states"

    def __init__(self, size: int, rest: str = "") -> None:
        self.size, self.rest = size, rest

    def world(self) -> Any:
        return contextlib.nullcontext()

    def start(self) -> list[int]:
        return [0]

    def moves(self, state: int) -> Any:
        if state < self.size or not self.rest:
            yield "on", (state + 1) % (self.size + 1)

    def wrong(self, state: int) -> str:
        return ""

    def rests(self, state: int) -> str:
        return self.rest


def test_the_explorer_tells_of_waits_without_end_and_of_deadlocks() -> None:
    with pytest.raises(Counterexample, match="without end"):
        explore(Circle(2))
    with pytest.raises(Counterexample, match="stuck") as found:
        explore(Circle(2, "stuck"))
    assert found.value.trace == ["on", "on"]
