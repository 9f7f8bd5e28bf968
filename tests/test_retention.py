"""Retention never takes the newest, the last, the read, the unfinished or the foreign; properties, not cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError
from ckpt_engine.manifest import Attempt, Committed, FileEntry, Manifest, Shard
from ckpt_engine.metrics import Metric
from ckpt_engine.retention import Retention, kept_bytes, one_policy, victims

ROOT_ID = "ab" * 8


def committed(
    generation: int,
    seq: int,
    step: int = 0,
    tag: str = "",
    node: int | None = None,
    root_id: str = ROOT_ID,
    *,
    nbytes: int = 0,
    loss: float | None = None,
    pinned: bool = False,
) -> Committed:
    attempt = Attempt(generation, "0" * 16, seq, step, tag or f"tag{generation}-{seq}", root_id)
    layout = "shared" if node is None else "node-local"
    files = (FileEntry("a.pt", nbytes, 0), FileEntry("tool.py", 1 << 40, 0, "tool"))
    shards = (Shard(0, files), Shard(1, ())) if node is None else (Shard(node, files),)
    metrics = () if loss is None else (Metric("loss", loss), Metric("other", -loss))
    return Committed(Manifest(attempt, 2, layout, node, 2, shards, None, metrics), f"/root/{attempt.tag}", pinned)


def ids(found: Iterable[Committed]) -> list[tuple[int, int]]:
    return [one.order for one in found]


def doomed(found: Iterable[Committed], policy: Retention, **how: Any) -> set[tuple[int, int]]:
    return set(ids(victims(found, policy, root_id=ROOT_ID, **how)))


checkpoints = st.builds(
    committed,
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(0, 40),
    nbytes=st.integers(0, 9),
    loss=st.none() | st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
    pinned=st.sampled_from([False, False, False, True]),
)
roots = st.lists(checkpoints, unique_by=lambda one: one.order, max_size=12)
bests = st.tuples(st.sampled_from(["loss", "other", "unknown"]), st.sampled_from(["min", "max"]), st.integers(1, 3))
policies = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 10),
    keep_best=st.none() | bests,
    max_bytes=st.none() | st.integers(1, 40),
    min_age_s=st.sampled_from([0.0, 0.0, 5.0]),
)


def views(found: list[Committed], data: st.DataObject) -> list[Committed]:
    """What a deleter sees whose listing is not of now."""
    return [one for one in found if data.draw(st.booleans())]


def may_go(found: list[Committed], policy: Retention, **how: Any) -> set[tuple[int, int]]:
    """What no rule keeps, whether or not it has to go to meet ``max_bytes``."""
    if policy.keep_last is None and policy.max_bytes is None:
        return set()
    return doomed(found, replace(policy, keep_last=policy.keep_last or 1, max_bytes=None), **how)


def kept_by_a_rule(found: list[Committed], policy: Retention) -> set[tuple[int, int]]:
    """The table of docs/retention.md, rule by rule."""
    newest_first = sorted(found, key=lambda one: one.order, reverse=True)
    kept = set(ids(newest_first[: policy.keep_last or 1])) | {one.order for one in found if one.pinned}
    if policy.keep_every:
        kept |= {one.order for one in found if one.manifest.attempt.step % policy.keep_every == 0}
    if policy.keep_best:
        metric, mode, number = policy.keep_best  # type: ignore[misc]
        rated = [(m.value, one) for one in newest_first for m in one.manifest.metrics if m.name == metric]
        rated.sort(key=lambda pair: pair[0], reverse=mode == "max")  # stable: of equal ones the newer
        kept |= {one.order for _, one in rated[:number]}
    return kept


@given(roots, policies, st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.randoms())
def test_what_goes_is_what_no_rule_keeps_oldest_first_and_the_newest_never(
    found: list[Committed], policy: Retention, shielded: set[int], young: set[int], draw: Any
) -> None:
    draw.shuffle(found)
    protected = {one.manifest.attempt.tag for one in found if one.order[1] in shielded}
    ages_s = {one.manifest.attempt: 4.0 if one.order[1] in young else 5.0 for one in found}
    gone = victims(found, policy, root_id=ROOT_ID, protected=protected, ages_s=ages_s)
    assert ids(gone) == sorted(ids(gone))
    kept = kept_by_a_rule(found, policy)
    kept |= {one.order for one in found if one.manifest.attempt.tag in protected}
    kept |= {one.order for one in found if one.order[1] in young and policy.min_age_s}
    free = sorted(set(ids(found)) - kept)
    assert not found or max(ids(found)) not in ids(gone)
    if policy.keep_last is None and policy.max_bytes is None:
        assert gone == []
    elif policy.max_bytes is None:
        assert ids(gone) == free
    else:
        assert ids(gone) == free[: len(gone)]


@given(roots, policies)
def test_max_bytes_is_met_or_what_has_to_stay_is_larger_and_no_more_goes_than_needed(
    found: list[Committed], policy: Retention
) -> None:
    policy = replace(policy, max_bytes=policy.max_bytes or 7, min_age_s=0.0)
    gone = victims(found, policy, root_id=ROOT_ID)
    left = sum(one.nbytes for one in found) - sum(one.nbytes for one in gone)
    assert policy.max_bytes is not None
    assert left <= policy.max_bytes or left == kept_bytes(found, policy, root_id=ROOT_ID)
    assert not gone or left + gone[-1].nbytes > policy.max_bytes


@given(roots, policies)
def test_when_what_may_go_is_gone_nothing_more_goes(found: list[Committed], policy: Retention) -> None:
    ages_s = {one.manifest.attempt: 9.0 for one in found}
    gone = doomed(found, policy, ages_s=ages_s)
    assert doomed([one for one in found if one.order not in gone], policy, ages_s=ages_s) == set()


@given(roots, policies, st.data())
def test_two_deleters_with_stale_views_take_nothing_that_a_rule_keeps_and_never_the_newest(
    found: list[Committed], policy: Retention, data: st.DataObject
) -> None:
    ages_s = {one.manifest.attempt: 9.0 for one in found}
    gone = doomed(views(found, data), policy, ages_s=ages_s) | doomed(views(found, data), policy, ages_s=ages_s)
    assert gone <= may_go(found, policy, ages_s=ages_s)
    assert not gone & kept_by_a_rule(found, policy)
    assert not found or max(ids(found)) not in gone


@given(roots, policies, st.data())
def test_a_stale_view_removes_less(found: list[Committed], policy: Retention, data: st.DataObject) -> None:
    """With ``keep_best`` under ``max_bytes`` where all have one size: else a view without a small best keeps a large
    one in its place, and another one goes for that."""
    if policy.keep_best is not None and policy.max_bytes is not None:
        found = [committed(*one.order, one.manifest.attempt.step, nbytes=3) for one in found]
    ages_s = {one.manifest.attempt: 9.0 for one in found}
    assert doomed(views(found, data), policy, ages_s=ages_s) <= doomed(found, policy, ages_s=ages_s)


def test_a_new_run_that_starts_at_a_lower_step_is_newer() -> None:
    old = [committed(1, seq, step) for seq, step in enumerate((500, 600, 700))]
    new = [committed(2, seq, step) for seq, step in enumerate((100, 200, 300))]
    assert ids(victims(old + new, Retention(keep_last=2), root_id=ROOT_ID)) == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_nothing_goes_without_a_limit() -> None:
    assert victims([committed(1, seq) for seq in range(9)], Retention(), root_id=ROOT_ID) == []


@pytest.mark.parametrize("limit", [0, -1, True, 1.0, "2"])
def test_a_limit_that_could_mean_keep_nothing_is_refused(limit: object) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Retention(keep_last=limit)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Retention(keep_lsat=1)  # type: ignore[call-arg]


def losses(*values: float | None, **how: Any) -> list[Committed]:
    return [committed(1, seq, seq, loss=value, nbytes=10, **how) for seq, value in enumerate(values)]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
@pytest.mark.parametrize("best", [0, 2, 4])
def test_the_best_stays_where_ever_it_is(keep_last: int, best: int) -> None:
    found = losses(*(0.1 if seq == best else 0.5 for seq in range(5)))
    gone = doomed(found, Retention(keep_last=keep_last, keep_best=("loss", "min")))
    assert gone == {(1, seq) for seq in range(5 - keep_last)} - {(1, best)}


def test_of_equal_ones_the_newer_is_best_and_one_without_the_metric_never() -> None:
    found = losses(0.5, 0.1, 0.1, None, None)
    assert doomed(found, Retention(keep_last=1, keep_best=("loss", "min"))) == {(1, 0), (1, 1), (1, 3)}
    assert doomed(found, Retention(keep_last=1, keep_best=("loss", "max"))) == {(1, 1), (1, 2), (1, 3)}
    assert doomed(found, Retention(keep_last=1, keep_best=("loss", "min", 2))) == {(1, 0), (1, 3)}
    assert doomed(found, Retention(keep_last=1, keep_best=("other name", "min"))) == {(1, 0), (1, 1), (1, 2), (1, 3)}


def test_max_bytes_takes_the_oldest_that_no_rule_keeps_and_no_more() -> None:
    found = losses(0.5, 0.1, 0.4, 0.3, 0.2)
    assert doomed(found, Retention(max_bytes=50)) == set()
    assert doomed(found, Retention(max_bytes=49)) == {(1, 0)}
    assert doomed(found, Retention(max_bytes=25, keep_best=("loss", "min"))) == {(1, 0), (1, 2), (1, 3)}
    assert doomed(found, Retention(max_bytes=1, keep_last=3)) == {(1, 0), (1, 1)}
    assert kept_bytes(found, Retention(max_bytes=1, keep_last=3), root_id=ROOT_ID) == 30
    pinned = losses(None, pinned=True) + found[1:]
    assert doomed(pinned, Retention(max_bytes=1)) == {(1, 1), (1, 2), (1, 3)}


def test_what_was_seen_for_less_than_min_age_stays_and_so_does_what_was_never_seen() -> None:
    found = losses(None, None, None)
    policy = Retention(keep_last=1, min_age_s=60.0)
    ages_s = {found[0].manifest.attempt: 60.0, found[1].manifest.attempt: 59.9}
    assert doomed(found, policy) == set()
    assert doomed(found, policy, ages_s=ages_s) == {(1, 0)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep_every": 0}, "keep_every must be"),
        ({"keep_every": True}, "keep_every must be"),
        ({"max_bytes": 1e12}, "max_bytes must be a whole number"),
        ({"max_bytes": 2**63}, "max_bytes must be"),
        ({"min_age_s": -1}, "min_age_s must be"),
        ({"min_age_s": float("nan")}, "min_age_s must be"),
        ({"min_age_s": "1"}, "min_age_s must be"),
        ({"keep_best": "eval_loss"}, "keep_best must be"),
        ({"keep_best": ("eval_loss",)}, "keep_best must be"),
        ({"keep_best": (3, "min")}, "keep_best must be"),
        ({"keep_best": ("", "min")}, "keep_best must be"),
        ({"keep_best": ("eval_loss", "least")}, "'min' or 'max', not 'least'"),
        ({"keep_best": ("eval_loss", "min", 0)}, "number of keep_best"),
    ],
)
def test_a_policy_that_cannot_be_right_says_which_rule_and_why(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Retention(**given)


def test_keep_last_is_short_for_a_policy_and_both_are_refused() -> None:
    assert one_policy(3, None) == Retention(keep_last=3)
    assert one_policy(None, Retention(max_bytes=1)) == Retention(max_bytes=1)
    with pytest.raises(ConfigError, match="both given"):
        one_policy(3, Retention(keep_last=3))


@given(policies)
def test_a_policy_survives_a_slot_header(policy: Retention) -> None:
    assert Retention(**msgpack.unpackb(msgpack.packb(policy.to_dict()))) == policy


def test_checkpoints_of_another_root_and_renamed_ones_are_neither_victims_nor_counted() -> None:
    renamed = Committed(committed(9, 0).manifest, "/root/best")
    foreign = committed(9, 1, root_id="cd" * 8)
    own = [committed(1, 0), committed(1, 1)]
    assert ids(victims([renamed, foreign, *own], Retention(keep_last=1), root_id=ROOT_ID)) == [(1, 0)]


def test_node_local_goes_only_what_is_older_than_the_newest_that_all_nodes_confirmed() -> None:
    found = [committed(1, seq, node=node) for seq in range(5) for node in (0, 1)]
    policy = Retention(keep_last=1)
    assert victims(found, policy, root_id=ROOT_ID) == []
    assert ids(victims(found, policy, root_id=ROOT_ID, confirmed=(1, 2))) == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert ids(victims(found, Retention(keep_last=4), root_id=ROOT_ID, confirmed=(1, 4))) == [(1, 0), (1, 0)]
