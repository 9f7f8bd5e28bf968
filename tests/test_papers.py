"""The papers keep their word: what they point to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAPERS = sorted(REPOSITORY.glob("*.md")) + sorted((REPOSITORY / "docs").glob("**/*.md"))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_every_link_of_a_paper_leads_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", paper.read_text()):
        assert re.match(r"https?://", target) or (paper.parent / target).exists(), f"{paper.name} links to {target}"


def test_every_row_of_what_survives_what_names_a_test_that_exists() -> None:
    rows = re.findall(r"\| \[([^\]]+)\]\((tests/\S+\.py)\) \|", (REPOSITORY / "README.md").read_text())
    assert len(rows) >= 8
    for promise, file in rows:
        name = "test_" + promise.replace(" ", "_")
        assert f"def {name}(" in (REPOSITORY / file).read_text(), f"{file} has no {name}"


def test_every_room_of_the_package_is_in_the_architecture() -> None:
    told = (REPOSITORY / "ARCHITECTURE.md").read_text()
    package = REPOSITORY / "ckpt_engine"
    rooms = {path.stem for path in package.glob("**/*.py")} - {"__init__"}
    missing = sorted(room for room in rooms if not re.search(rf"[`/{{,]{room}[`,}} ]", told))
    assert not missing, f"ARCHITECTURE.md does not mention {missing}"
