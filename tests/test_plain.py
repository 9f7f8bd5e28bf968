"""The face for plain PyTorch stays as it is, and one process needs nothing but itself."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_engine import CheckpointEngine, SaverOptions, checkpointer
from ckpt_engine.errors import ConfigError
from ckpt_engine.messages import Mailbox, unlink
from ckpt_engine.restore import look
from ckpt_engine.waits import Deadline, until

OPTIONS = ["keep_last", "retention", "slots", "when_busy", "wait_s", "on_error", "staging", "verify_staging"]
OPTIONS += ["slot_bytes", "threads", "layout", "job", "name", "saver", "rank", "world_size", "node_id"]


@pytest.fixture
def engine(tmp_path: Path):  # type: ignore[no-untyped-def]
    engine = CheckpointEngine(tmp_path / "root", node_id=str(tmp_path), saver=SaverOptions(linger_s=0.0))
    yield engine
    engine.close()


def test_the_options_are_these_seventeen_by_keyword() -> None:
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
    engine.save_to_memory(1, {"a.pt": {}})
    with pytest.raises(ConfigError, match="already"):
        CheckpointEngine(tmp_path / "root", node_id=str(tmp_path))
    look = f"from ckpt_engine import cli; cli.main(['gc', '--root', {str(tmp_path / 'root')!r}])"
    told = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout
    assert told.startswith("live  /dev/shm/ckpt-"), "the refused engine took the life of the first one"
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


def test_a_forked_child_has_no_part_in_the_engine_of_its_parent(engine: CheckpointEngine) -> None:
    engine.save_to_memory(1, {"a.pt": {}})
    child = os.fork()
    if not child:
        try:
            engine.save_to_memory(2, {"a.pt": {}})
        except ConfigError as error:
            engine.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.save_to_memory(2, {"a.pt": {}}).step == 2
    assert engine.restore().step == 2


def test_a_save_from_a_signal_handler_inside_a_save_is_refused_and_harms_nothing(engine: CheckpointEngine) -> None:
    told = []

    class Pickled:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            try:
                engine.save_to_memory(9, {"a.pt": {}})
            except ConfigError as error:
                told.append(str(error))
            return dict, ()

    engine.save_to_memory(1, {"a.pt": Pickled()})
    assert told and "under way" in told[0]
    assert engine.restore().step == 1


def test_what_a_signal_handler_raises_while_a_result_is_awaited_reaches_the_caller(tmp_path: Path) -> None:
    box = Mailbox(f"/ckpt-test-{os.getpid()}-events")

    def stop(*_: object) -> None:
        raise SystemExit(7)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(SystemExit):
            box.receive(5.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        box.close()
        unlink(box.name)


@pytest.mark.parametrize("state", [{"a": 1, "a/b": 2}, {"..": 1}, {"": 1}])
def test_names_that_cannot_be_files_together_are_refused_before_a_byte(
    engine: CheckpointEngine, state: dict[str, int]
) -> None:
    with pytest.raises(ConfigError):
        engine.save_to_memory(1, state)
    assert engine.save_to_memory(2, {"a": 1}).step == 2


def test_a_tag_that_the_file_system_uses_itself_is_refused(engine: CheckpointEngine) -> None:
    with pytest.raises(ConfigError, match=r"lost\+found"):
        engine.save_to_storage(1, {"a": 1}, tag="lost+found")


@pytest.mark.parametrize("tags", [("same", "same"), ("one", "two")], ids=["saved anew", "removed"])
def test_what_goes_between_the_look_and_the_lease_does_not_hide_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: tuple[str, str]
) -> None:
    brief = SaverOptions(linger_s=0.0)
    looks: list[int] = []
    root = tmp_path / "root"
    with (
        CheckpointEngine(root, node_id=str(tmp_path), saver=brief, keep_last=1) as writer,
        CheckpointEngine(root, node_id=str(tmp_path), saver=brief, job="reader") as reader,
    ):
        writer.save_to_storage(1, {"a.pt": 1}, tag=tags[0]).result()

        def look_and_lose(*arguments: object) -> object:
            found = look(*arguments)  # type: ignore[arg-type]
            looks.append(1)
            if len(looks) == 1:
                writer.save_to_storage(2, {"a.pt": 2}, tag=tags[1]).result()
                if tags[0] != tags[1]:
                    assert until(lambda: not (root / tags[0] / "a.pt").exists(), Deadline(20.0))
            return found

        monkeypatch.setattr(checkpointer, "look", look_and_lose)
        report = reader.restore()
    assert (report.step, report.tag, report.state["a.pt"]) == (2, tags[1], 2)
    assert len(looks) == 2 and [one.step for one in report.skipped] == [1]
