"""Metrics are finite numbers by name, few and small; what a save gives is what its manifest says."""

from __future__ import annotations

import json
from collections import UserDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_manifest import ATTEMPT, envelope, receipts, record

from ckpt_engine.errors import ConfigError, Corrupt
from ckpt_engine.manifest import Manifest, Receipt, ShardRecord
from ckpt_engine.metrics import MAX_METRICS, Metric, by_name, of_user

LOSS = (Metric("acc", 1.0), Metric("loss", 0.25))


def test_numbers_of_any_kind_become_floats_in_the_order_of_their_names() -> None:
    given = UserDict({"b": 1, "a": np.float32(0.5), "d": torch.tensor(2.0), "c": True})
    assert of_user(given) == (Metric("a", 0.5), Metric("b", 1.0), Metric("c", 1.0), Metric("d", 2.0))
    assert of_user(None) == of_user({}) == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_what_is_not_finite_is_left_out_with_a_warning(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert by_name(of_user({"loss": value, "acc": 1.0})) == {"acc": 1.0}
    assert "the metric loss is" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.3, "not a float"),
        ([("loss", 0.3)], "not a list"),
        ({3: 0.3}, "3 is not a printable text"),
        ({"": 0.3}, "empty or longer"),
        ({"ü" * 51: 0.3}, "longer than 100 bytes"),
        ({"a\nb": 0.3}, "not a printable text"),
        ({"\udcff": 0.3}, "not a printable text"),
        ({"loss": "0.3"}, "'0.3' is not a number"),
        ({"loss": None}, "None is not a number"),
        ({"loss": 10**400}, "cannot be kept"),
        ({"loss": torch.ones(2)}, "cannot be kept"),
        ({f"m{number}": 0.0 for number in range(MAX_METRICS + 1)}, "65 metrics were given, at most 64"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of_user(given)


def test_the_manifest_has_the_metrics_of_the_lowest_rank_whatever_others_gave() -> None:
    one = Receipt.of([record(0, metrics=LOSS)])
    for others in ((), LOSS, (Metric("else", 1.0),)):
        assert Manifest.of([Receipt.of([record(1, metrics=others)]), one]).metrics == LOSS
    assert Manifest.of([Receipt.of([record(0)]), Receipt.of([record(1, metrics=LOSS)])]).metrics == ()
    both = [record(0, node=0, node_ranks=(0, 1), nodes=1, metrics=LOSS), record(1, node=0, node_ranks=(0, 1), nodes=1)]
    assert Manifest.of([Receipt.of(both)]).metrics == LOSS


def test_a_manifest_without_metrics_is_what_it_was_before_there_were_any() -> None:
    plain = Manifest.of(receipts())
    assert "metrics" not in plain.to_dict() and Manifest.from_bytes(envelope(plain.to_dict()), "p") == plain
    with pytest.raises(Corrupt, match="left out"):
        Manifest.from_bytes(envelope({**plain.to_dict(), "metrics": []}), "p")


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {},
        {"loss": 0.5},
        [{"name": "loss", "value": 1}],
        [{"name": "loss", "value": "0.5"}],
        [{"name": "loss", "value": True}],
        [{"name": "loss"}],
        [{"name": "a\x1b[2J", "value": 0.5}],
        [{"name": "b", "value": 0.5}, {"name": "a", "value": 0.5}],
        [{"name": "a", "value": 0.5}] * 2,
        [{"name": f"{number:03}", "value": 0.5} for number in range(MAX_METRICS + 1)],
    ],
)
def test_hostile_metrics_make_a_record_that_is_refused(metrics: object) -> None:
    body = Manifest.of(receipts()).to_dict()
    with pytest.raises(Corrupt):
        Manifest.from_bytes(envelope({**body, "metrics": metrics}), "p")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "0.50", "5e-1", "1E5"])
def test_a_number_that_is_not_finite_or_written_another_way_is_refused(number: str) -> None:
    data = replace(Manifest.of(receipts()), metrics=(Metric("loss", 0.5),)).to_bytes()
    assert data.count(b'"value":0.5}') == 1
    with pytest.raises(Corrupt):
        Manifest.from_bytes(data.replace(b'"value":0.5}', f'"value":{number}}}'.encode()), "p")


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=25), st.floats(allow_nan=False)))
def test_metrics_survive_the_disk_bit_for_bit(given: dict[str, float]) -> None:
    kept = {name: value for name, value in given.items() if name.isprintable() and abs(value) != float("inf")}
    one = ShardRecord(ATTEMPT, 0, 1, 0, 1, (0,), (), metrics=of_user(kept))
    again = ShardRecord.from_bytes(one.to_bytes(), "p")
    assert again == one and json.dumps(by_name(again.metrics)) == json.dumps(dict(sorted(kept.items())))
