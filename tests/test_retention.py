"""Retention never takes the newest, the last, the read, the unfinished or the foreign; properties, not cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError
from ckpt_engine.manifest import Attempt, Committed, Manifest, Shard
from ckpt_engine.retention import Retention, victims

ROOT_ID = "ab" * 8


def committed(
    generation: int, seq: int, step: int = 0, tag: str = "", node: int | None = None, root_id: str = ROOT_ID
) -> Committed:
    attempt = Attempt(generation, "0" * 16, seq, step, tag or f"tag{generation}-{seq}", root_id)
    layout = "shared" if node is None else "node-local"
    shards = (Shard(0, ()), Shard(1, ())) if node is None else (Shard(node, ()),)
    return Committed(Manifest(attempt, 2, layout, node, 2, shards), f"/root/{attempt.tag}")


def ids(found: list[Committed]) -> list[tuple[int, int]]:
    return [one.order for one in found]


sets = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 1000)), unique_by=lambda t: t[:2])


@given(sets, st.integers(1, 5), st.sets(st.integers(0, 9)), st.randoms())
def test_victims_are_older_than_the_newest_n_oldest_first_and_never_protected(
    drawn: list[tuple[int, int, int]], keep_last: int, shielded: set[int], draw: object
) -> None:
    found = [committed(*one) for one in drawn]
    draw.shuffle(found)  # type: ignore[attr-defined]
    protected = {one.manifest.attempt.tag for one in found if one.order[1] in shielded}
    doomed = victims(found, Retention(keep_last=keep_last), root_id=ROOT_ID, protected=protected)
    newest = sorted((one.order for one in found), reverse=True)[:keep_last]
    assert ids(doomed) == sorted(ids(doomed))
    assert not set(ids(doomed)) & set(newest)
    assert not {one.manifest.attempt.tag for one in doomed} & protected
    assert len(found) - len(doomed) >= min(len(found), keep_last)
    gone = set(newest) | {one.order for one in found if one.manifest.attempt.tag in protected} | set(ids(doomed))
    assert gone == {one.order for one in found}


@given(sets, st.integers(1, 5), st.integers(1, 5), st.data())
def test_two_deleters_with_stale_views_never_remove_the_newest(
    drawn: list[tuple[int, int, int]], one_keeps: int, other_keeps: int, data: st.DataObject
) -> None:
    found = [committed(*one) for one in drawn]
    stale = [one for one in found if data.draw(st.booleans())]
    doomed = victims(found, Retention(keep_last=one_keeps), root_id=ROOT_ID)
    doomed += victims(stale, Retention(keep_last=other_keeps), root_id=ROOT_ID)
    assert not found or max(one.order for one in found) not in ids(doomed)


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
