"""The face for plain PyTorch stays as it is, and one process needs nothing but itself."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from ckpt_engine import CheckpointEngine, SaverOptions
from ckpt_engine.errors import ConfigError

OPTIONS = ["keep_last", "slots", "when_busy", "wait_s", "on_error", "layout", "job", "name"]
OPTIONS += ["saver", "rank", "world_size", "node_id"]


@pytest.fixture
def engine(tmp_path: Path):  # type: ignore[no-untyped-def]
    engine = CheckpointEngine(tmp_path / "root", node_id=str(tmp_path), saver=SaverOptions(linger_s=0.0))
    yield engine
    engine.close()


def test_the_options_are_these_twelve_by_keyword() -> None:
    parameters = inspect.signature(CheckpointEngine).parameters
    assert list(parameters) == ["root", *OPTIONS]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)


def test_what_is_saved_is_what_comes_back_and_is_private(engine: CheckpointEngine) -> None:
    net = torch.nn.Linear(3, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    engine.save_to_storage(1, {"model.pt": net.state_dict(), "more/meta.pt": {"a": [1, "b", None]}}).result()
    with torch.no_grad():
        net.weight.zero_()
    report = engine.restore()
    assert (report.step, report.source, report.tag) == (1, "memory", "global_step1")
    assert report.verified_bytes > 0 and report.state["more/meta.pt"] == {"a": [1, "b", None]}
    assert all(torch.equal(report.state["model.pt"][name], value) for name, value in before.items())
    report.state["model.pt"]["weight"].zero_()
    again = engine.restore(files=["model.pt"])
    assert torch.equal(again.state["model.pt"]["weight"], before["weight"])


@pytest.mark.parametrize("name", ["", "/absolute", "../up", "a//b", "MANIFEST.json", ".shard-00000.json", 7])
def test_a_file_name_that_cannot_be_is_refused_and_the_next_save_works(engine: CheckpointEngine, name: object) -> None:
    with pytest.raises(ConfigError):
        engine.save_to_memory(1, {name: {}})  # type: ignore[dict-item]
    engine.save_to_memory(2, {"a.pt": {}})
    assert engine.restore().step == 2


def test_a_state_that_is_no_mapping_is_refused(engine: CheckpointEngine) -> None:
    with pytest.raises(ConfigError, match="file name"):
        engine.save_to_memory(1, [torch.ones(1)])  # type: ignore[arg-type]


def test_two_engines_of_one_name_in_one_process_are_refused(engine: CheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already"):
        CheckpointEngine(tmp_path / "root", node_id=str(tmp_path))
    with CheckpointEngine(
        tmp_path / "root", node_id=str(tmp_path), name="other", saver=SaverOptions(linger_s=0.0)
    ) as other:
        other.save_to_memory(1, {"a.pt": {}})
        engine.save_to_memory(5, {"a.pt": {}})
        assert (other.restore().step, engine.restore().step) == (1, 5)


def test_an_empty_root_and_a_text_for_files_are_the_callers_mistakes(engine: CheckpointEngine) -> None:
    with pytest.raises(ConfigError, match="root is empty"):
        CheckpointEngine("")
    with pytest.raises(ConfigError, match=r"\['model.pt'\]"):
        engine.restore(files="model.pt")
