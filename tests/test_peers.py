"""The rivals of the benchmarks are described so that a conductor without them can read it, and pinned exactly."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
NAMES = sorted(file.stem for file in PEERS.glob("*.py"))


@pytest.fixture(autouse=True)
def benchmarks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PEERS.parent)


def test_every_adaptor_has_its_requirements_and_a_line_in_the_table() -> None:
    assert sorted(file.stem for file in PEERS.glob("*.txt")) == NAMES
    table = (PEERS / "README.md").read_text()
    for name in NAMES:
        first = next(line for line in (PEERS / f"{name}.txt").read_text().splitlines() if not line.startswith("#"))
        version = first.partition("==")[2]
        assert re.search(rf"^\| [^|]+ \| {re.escape(version)} \|", table, re.MULTILINE), f"{name} {version}"


@pytest.mark.parametrize("name", NAMES)
def test_requirements_leave_nothing_to_choose(name: str) -> None:
    lines = (PEERS / f"{name}.txt").read_text().splitlines()
    assert lines[0].startswith("# --no-deps")
    pins = [line for line in lines if not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins), pins


@pytest.mark.parametrize("name", NAMES)
def test_an_adaptor_can_be_read_without_its_rival_and_says_that_it_is_missing(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    module = importlib.import_module(f"peers.{name}")
    assert module.__doc__
    for row, kind in module.SYSTEMS:
        system = getattr(module, kind)(tmp_path)
        assert row and system.memory >= 1
        with pytest.raises(ModuleNotFoundError, match=name):
            system.start({})
    assert not list(tmp_path.iterdir())
