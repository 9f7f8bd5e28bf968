"""Every span is a place to die: see ``story``. Here the most telling case of each; ``make deaths`` has all of them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from faults import test_late_copies
from faults.story import ACT_OF, PHASES, Case, Story, every_case, telling_cases
from harness import Lab

import ckpt_engine


@pytest.mark.parametrize("case", telling_cases(), ids=str)
def test_a_death_or_a_stop_in_any_span_loses_nothing_and_blocks_nobody(lab: Lab, case: Case) -> None:
    Story(lab, case).run()


def spans_of_the_package() -> set[str]:
    found = set()
    for path in Path(ckpt_engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "span":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path.name}:{node.lineno}: a span has one name, written there"
                found.add(name.value)
    return found


ELSEWHERE = {"copy": test_late_copies}
"""Spans of saves that overlap the training, which the story does not make."""


def test_every_span_has_its_cases() -> None:
    told = "each span belongs to an act of the story (faults/story.py)"
    assert set(ACT_OF) | set(ELSEWHERE) == spans_of_the_package(), told
    for span, module in ELSEWHERE.items():
        assert all(f'"{span}:{phase}"' in inspect.getsource(module) for phase in PHASES)
    assert {(case.span, case.phase) for case in telling_cases()} == {(s, p) for s in ACT_OF for p in PHASES}
    assert set(telling_cases()) <= set(every_case())
