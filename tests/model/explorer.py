"""Look at every state that a model can reach, breadth first, so that the shortest way to a defect is the one shown.

Three things are checked. *Safety*: ``wrong`` finds nothing in any state, and no move raises Violation or CkptError.
*No deadlock*: where no move is left, ``rests`` agrees. *Every wait ends*: moves that are no faults (``!`` marks a
fault) never lead round in a circle, so without new faults every run comes to a state that rests, whoever is
scheduled when. A look that changes nothing is not a move, so polling is no circle, and a lost message is only one
that nobody acts upon.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ckpt_engine.errors import CkptError

S = TypeVar("S", bound=Hashable)


class Violation(Exception):
    """What a model says when a promise is broken."""


class Counterexample(AssertionError):
    """A way from the start to where a promise is broken."""

    def __init__(self, model: str, promise: str, trace: list[str]) -> None:
        self.promise = promise
        self.trace = trace
        steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(trace, 1))
        super().__init__(f"{model}: {promise}, after {len(trace)} steps:\n{steps}")


class Model(Protocol[S]):
    name: str
    bounds: str

    def world(self) -> contextlib.AbstractContextManager[None]:
        """What is different while it is explored."""

    def start(self) -> Iterable[S]:
        """The first states."""

    def moves(self, state: S) -> Iterator[tuple[str, S]]:
        """What may happen next: (what it is called, what it leads to). A name with ``!`` in front is a fault."""

    def wrong(self, state: S) -> str:
        """The promise that is broken in this state, or ""."""

    def rests(self, state: S) -> str:
        """Why this state, in which nothing more happens by itself, must not be the end, or ""."""


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    bounds: str
    states: int
    transitions: int
    depth: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.model:32} {self.states:8} states {self.transitions:9} transitions, "
            f"depth {self.depth:3}, {self.seconds:5.1f} s   ({self.bounds})"
        )


class _Search(Generic[S]):
    def __init__(self, model: Model[S]) -> None:
        self.model = model
        self.before: dict[S, tuple[S, str] | None] = {}
        self.edges: dict[S, list[S]] = {}

    def trace(self, state: S) -> list[str]:
        steps = []
        while (came := self.before[state]) is not None:
            state, step = came
            steps.append(step)
        return steps[::-1]

    def run(self) -> Report:
        model, begin, transitions = self.model, time.monotonic(), 0
        depth = dict.fromkeys(model.start(), 0)
        self.before = dict.fromkeys(depth)
        todo = deque(depth)
        for state in todo:
            self._judge(state)
        while todo:
            state = todo.popleft()
            own: list[S] = []
            for step, after in self._moves(state):
                if after == state:
                    continue
                transitions += 1
                if after not in self.before:
                    self.before[after] = (state, step)
                    depth[after] = depth[state] + 1
                    self._judge(after)
                    todo.append(after)
                if step[0] != "!":
                    own.append(after)
            if not own and (why := model.rests(state)):
                raise Counterexample(model.name, why, self.trace(state))
            self.edges[state] = own
        self._no_circle()
        seconds = time.monotonic() - begin
        return Report(model.name, model.bounds, len(depth), transitions, max(depth.values()), seconds)

    def _moves(self, state: S) -> Iterator[tuple[str, S]]:
        moves, step = self.model.moves(state), ""
        while True:
            try:
                step, after = next(moves)
            except StopIteration:
                return
            except (Violation, CkptError) as error:
                raise Counterexample(self.model.name, str(error), [*self.trace(state), "and then"]) from error
            yield step, after

    def _judge(self, state: S) -> None:
        if why := self.model.wrong(state):
            raise Counterexample(self.model.name, why, self.trace(state))

    def _no_circle(self) -> None:
        """Kahn's topological sort; what is left over goes round."""
        into = dict.fromkeys(self.edges, 0)
        for targets in self.edges.values():
            for target in targets:
                into[target] += 1
        free = [state for state, count in into.items() if not count]
        done = 0
        while free:
            done += 1
            for target in self.edges[free.pop()]:
                into[target] -= 1
                if not into[target]:
                    free.append(target)
        if done < len(into):
            state = next(state for state, count in into.items() if count)
            raise Counterexample(self.model.name, "a wait without end: this comes round again", self.trace(state))


def explore(model: Model[Any]) -> Report:
    """Every reachable state. Raises Counterexample."""
    with model.world():
        return _Search(model).run()
