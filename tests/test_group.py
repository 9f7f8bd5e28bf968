"""Who is who, and errors that reach every rank."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.errors import ConfigError, RestoreError, StorageError
from ckpt_engine.group import Alone, Place, meet, places, together


class Staged:
    """A group of two as rank 0 sees it: what rank 1 contributes is given."""

    rank = 0
    world = 2

    def __init__(self, other: Any) -> None:
        self.other = other
        self.gathers = 0

    def gather(self, value: Any) -> list[Any]:
        self.gathers += 1
        return [value, self.other]

    def send_bytes(self, source: int, buffer: Any, nbytes: int) -> None:
        return

    def close(self) -> None:
        return


def test_places_number_nodes_by_their_first_rank_and_local_ranks_by_order() -> None:
    assert places("abab", 2) == Place(2, 4, 0, 1, ((0, 2), (1, 3)))
    assert places("ba", 1) == Place(1, 2, 1, 0, ((0,), (1,)))
    leaders = [places("aabb", rank).leader for rank in range(4)]
    assert leaders == [True, False, True, False]
    assert [places("aabb", rank).reads_root("shared") for rank in range(4)] == [True, False, False, False]
    assert [places("aabb", rank).reads_root("node-local") for rank in range(4)] == leaders


@pytest.mark.parametrize(
    ("rank", "world"), [(0, None), (None, 1), (True, 1), (0, True), (0, 1.0), (1, 1), (-1, 1), (0, 0), (1, 2)]
)
def test_there_is_no_default_rank(rank: Any, world: Any) -> None:
    with pytest.raises(ConfigError):
        meet(rank, world, 1.0)


def test_a_launched_process_without_a_group_is_not_taken_for_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        meet(None, None, 1.0)
    assert meet(0, 1, 1.0).world == 1
    for value in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", value)
        assert meet(None, None, 1.0).world == 1


def test_together_returns_what_every_rank_did() -> None:
    assert together(Alone(), lambda: 3) == [3]
    assert together(Staged((4, "")), lambda: 3) == [3, 4]


def test_together_raises_on_all_ranks_the_own_error_where_it_happened() -> None:
    def fails() -> None:
        raise StorageError("mine", op="read", path="/x", errno=5)

    group = Staged((None, "OSError: theirs"))
    with pytest.raises(StorageError, match="mine"):
        together(group, fails)
    with pytest.raises(RestoreError, match="rank 1: OSError: theirs"):
        together(group, lambda: 3, RestoreError)
    assert group.gathers == 2
