"""Options: whatever cannot be right is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckpt_engine import events
from ckpt_engine.config import Options, SaverOptions, hook_from_environment, omp_threads, saver_environment, whole
from ckpt_engine.errors import ConfigError

BAD: list[tuple[str, Any]] = [
    ("job", 3),
    ("job", "x" * 201),
    ("name", "a\0b"),
    ("node_id", None),
    ("layout", "local"),
    ("layout", None),
    ("slots", 0),
    ("slots", 9),
    ("slots", 2.0),
    ("slots", True),
    ("slots", "2"),
    ("wait_s", -1),
    ("wait_s", float("nan")),
    ("wait_s", "10"),
    ("wait_s", True),
    ("when_busy", "drop"),
    ("on_error", "ignore"),
    ("staging", "fast"),
    ("staging", True),
    ("verify_staging", "yes"),
    ("slot_bytes", -1),
    ("slot_bytes", 1.5),
    ("threads", -1),
    ("threads", 65),
    ("retention", 3),
    ("saver", {"start_s": 3}),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_an_option_that_cannot_be_right_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        Options(**{key: value})


@pytest.mark.parametrize("key", [spec.name for spec in dataclasses.fields(SaverOptions)])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", None, True])
def test_a_saver_option_that_is_no_time_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        SaverOptions(**{key: value})


def test_unknown_options_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown saver option 'linger'.*linger_s"):
        SaverOptions.from_dict({"linger": 3})
    with pytest.raises(TypeError):
        Options(slot=2)  # type: ignore[call-arg]


def test_options_survive_the_way_to_the_saver() -> None:
    options = SaverOptions(start_s=1, linger_s=0.5)
    assert SaverOptions.from_dict(options.to_dict()) == options


def test_the_defaults_are_the_documented_ones() -> None:
    assert (Options().slots, Options().wait_s, Options().when_busy, Options().on_error) == (2, 1800, "wait", "warn")
    assert (Options().staging, Options().verify_staging, Options().slot_bytes) == ("blocking", False, 0)
    saver = SaverOptions()
    assert (saver.start_s, saver.stall_s, saver.grace_s, saver.linger_s) == (30, 120, 30, 3600)
    assert (saver.commit_s, saver.sweep_after_s) == (600, 3600)


def test_whole_numbers_of_any_integer_type_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    assert whole("step", numpy.int64(7), 0, 10) == 7
    with pytest.raises(ConfigError, match="whole number"):
        whole("step", numpy.float64(7), 0, 10)


@pytest.mark.parametrize(("text", "number"), [("4", 4), (" 2,3", 2), ("", 0), ("many", 0), ("-1", 0)])
def test_of_omp_num_threads_the_first_level_counts(text: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert omp_threads() == number


def test_a_saver_inherits_few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CKPT_ENGINE_HOOK", "a:b")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    found = saver_environment("/package")
    assert found["PYTHONPATH"] == "/package:/mine" and found["CKPT_ENGINE_HOOK"] == "a:b" and "PATH" in found
    assert "SECRET_TOKEN" not in found and "RANK" not in found


@pytest.mark.parametrize("spec", ["nothing", "no.such.module:f", "os:no_such_function", ":", "os:"])
def test_a_hook_that_cannot_be_found_is_an_error_that_names_it(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_HOOK", spec)
    with pytest.raises(ConfigError, match="CKPT_ENGINE_HOOK"):
        hook_from_environment()


def test_a_hook_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_HOOK", "builtins:id")
    hook_from_environment()
    hook_from_environment()
    assert events._hooks.count(id) == 1
    events._hooks.remove(id)
