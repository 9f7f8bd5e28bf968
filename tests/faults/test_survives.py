"""``docs/survives.md`` keeps its word: every row names tests, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

from faults.story import every_case

PAPER = Path(__file__).resolve().parents[2] / "docs" / "survives.md"


def rows() -> list[str]:
    lines = PAPER.read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| what happens")]


def test_every_row_names_tests_that_exist() -> None:
    assert len(rows()) >= 30
    for row in rows():
        tests = re.findall(r"\[([^\]]+)\]\((\S+?\.py)\)", row.split(" | ")[-1])
        assert tests, f"no test: {row}"
        for promise, file in tests:
            name = "test_" + promise.replace(" ", "_")
            path = PAPER.parent / file
            assert path.exists() and f"def {name}(" in path.read_text(), f"{file} has no {name}"


def test_the_paper_counts_the_deaths() -> None:
    assert f"({len(every_case())} cases," in PAPER.read_text()
