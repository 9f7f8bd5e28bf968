"""The choice: a pure function of what the nodes found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError, Corrupt, NotFound
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import Attempt, Committed, FileEntry, Manifest, RunClaim, Shard
from ckpt_engine.names import SegmentName
from ckpt_engine.restore import Choice, Facts, Skipped, candidates, nothing_usable
from ckpt_engine.retention import Retention
from ckpt_engine.source import Candidate, Held

ROOT, OTHER = "root-1", "root-2"


def run(generation: int) -> str:
    return f"{generation:016x}"


def attempt(generation: int, seq: int, step: int = -1, root_id: str = ROOT) -> Attempt:
    step = seq if step < 0 else step
    return Attempt(generation, run(generation), seq, step, f"global_step{step}", root_id)


def claim(generation: int, resumed_from: Attempt | None = None) -> RunClaim:
    return RunClaim(generation, run(generation), resumed_from, 2, 0)


def held(one: Attempt, rank: int, node: int = 0, world: int = 2, resumed_from: Attempt | None = None) -> Held:
    header = Header(
        attempt=one,
        claim=claim(one.generation, resumed_from),
        rank=rank,
        local_rank=0,
        world=world,
        node=node,
        nodes=2,
        node_ranks=(rank,),
        layout="shared",
        root="/root",
        commit_dir=f"/root/{one.tag}",
        retention=Retention(),
        confirmed=None,
        storage=True,
        files=(SlotFile(f"rank{rank}.pt", 0, 8, 1), SlotFile("notes.txt", 8, 8, 1, "external")),
    )
    return Held(node, SegmentName("0" * 16, rank, one.seq % 2, 1), header)


def stored(one: Attempt, node: int | None = None, ranks: tuple[int, ...] = (0, 1)) -> Committed:
    shards = tuple(Shard(rank, (FileEntry(f"rank{rank}.pt", 8, 1),)) for rank in ranks)
    layout = "shared" if node is None else "node-local"
    return Committed(Manifest(one, 2, layout, node, 2, shards), f"/root/{one.tag}")


def facts(
    *memory: Held, disk: tuple[Committed, ...] = (), claims: tuple[RunClaim, ...] = (), step: int | None = None
) -> list[Facts]:
    return [Facts(0, step, memory, disk, claims), Facts(1, step)]


def chosen(found: Choice) -> list[tuple[tuple[int, int], str]]:
    return [(one.attempt.order, one.source) for one in found.candidates]


def both(one: Attempt) -> tuple[Held, Held]:
    return held(one, 0, 0), held(one, 1, 1)


def test_the_newest_attempt_comes_first_and_memory_before_storage_at_the_same_attempt() -> None:
    found = candidates(
        facts(*both(attempt(1, 2)), *both(attempt(1, 3)), disk=(stored(attempt(1, 2)), stored(attempt(1, 1)))),
        ROOT,
        "shared",
    )
    assert chosen(found) == [((1, 3), "memory"), ((1, 2), "memory"), ((1, 2), "storage"), ((1, 1), "storage")]
    assert found.damaged == () and found.partial == ()


def test_equal_steps_of_different_attempts_never_make_one_candidate() -> None:
    one, other = attempt(1, 1, step=5), attempt(2, 1, step=5)
    found = candidates(facts(held(one, 0), held(other, 1, resumed_from=one)), ROOT, "shared")
    assert found.candidates == () and len(found.partial) == 2


def test_an_attempt_that_a_rank_lacks_is_told_but_not_taken() -> None:
    found = candidates(facts(*both(attempt(1, 1)), held(attempt(1, 2), 0)), ROOT, "shared")
    assert chosen(found) == [((1, 1), "memory")]
    (told,) = found.newer_than(attempt(1, 1))
    assert (told.step, told.source, told.reason) == (2, "memory", "nothing of ranks [1]")
    assert found.newer_than(attempt(1, 2)) == ()


def test_an_abandoned_line_counts_only_if_its_step_is_asked_for() -> None:
    fifty, sixty, new = attempt(1, 1, 50), attempt(1, 2, 60), attempt(2, 1, 51)
    disk = (stored(new), stored(sixty), stored(fifty))
    claims = (claim(2, fifty), claim(1))
    assert chosen(candidates(facts(disk=disk, claims=claims), ROOT, "shared")) == [
        ((2, 1), "storage"),
        ((1, 1), "storage"),
    ]
    assert chosen(candidates(facts(disk=disk, claims=claims, step=60), ROOT, "shared")) == [((1, 2), "storage")]


def test_a_claim_on_disk_beats_one_in_a_header_of_the_same_generation() -> None:
    old = attempt(1, 1)
    late = replace(held(attempt(2, 1), 1, 1).header, claim=replace(claim(2), run="f" * 16))
    there = replace(held(attempt(2, 1), 1, 1), header=late)
    on_disk = facts(disk=(stored(old),), claims=(claim(2, old),))
    assert chosen(candidates([Facts(1, None, (there,)), *on_disk], ROOT, "shared")) == [((1, 1), "storage")]


def test_what_memory_holds_of_a_removed_root_abandons_nothing_of_the_one_that_is_there() -> None:
    removed = attempt(7, 1, 70, OTHER)
    found = candidates(facts(*both(removed), disk=(stored(attempt(1, 1)),), claims=(claim(1),)), ROOT, "shared")
    assert chosen(found) == [((1, 1), "storage")]
    assert [one.step for one in found.newer_than(found.candidates[0].attempt)] == [70]


def test_checkpoints_of_another_root_count_where_there_is_none_of_this_one_or_by_step() -> None:
    foreign, own = attempt(7, 1, 70, OTHER), attempt(1, 1, 10)
    assert chosen(candidates(facts(disk=(stored(foreign),)), ROOT, "shared")) == [((7, 1), "storage")]
    assert chosen(candidates(facts(disk=(stored(foreign), stored(own))), ROOT, "shared")) == [((1, 1), "storage")]
    assert chosen(candidates(facts(*both(own), disk=(stored(foreign),)), ROOT, "shared")) == [((1, 1), "memory")]
    assert chosen(candidates(facts(disk=(stored(foreign), stored(own)), step=70), ROOT, "shared")) == [
        ((7, 1), "storage")
    ]
    assert chosen(candidates(facts(*both(foreign)), ROOT, "shared")) == []


def test_files_of_the_framework_and_tools_are_no_part_of_a_memory_candidate() -> None:
    (one,) = candidates(facts(*both(attempt(1, 1))), ROOT, "shared").candidates
    assert one.names() == ["rank0.pt", "rank1.pt"]


def test_node_local_parts_make_one_candidate_and_know_who_can_read_them() -> None:
    one = attempt(1, 1)
    here, there = stored(one, 0, (0,)), stored(one, 1, (1,))
    told = [Facts(0, None, committed=(here,)), Facts(1, None, committed=(there,))]
    (found,) = candidates(told, ROOT, "node-local").candidates
    assert (found.nodes_of((0, "rank0.pt")), found.nodes_of((1, "rank1.pt"))) == (frozenset({0}), frozenset({1}))
    assert candidates(told[:1], ROOT, "node-local").candidates == ()
    same = [Facts(node, None, committed=(here, there)) for node in (0, 1)]
    (found,) = candidates(same, ROOT, "node-local").candidates
    assert found.nodes_of((1, "rank1.pt")) == frozenset({0, 1})


def test_ranks_that_ask_for_different_steps_are_told_so() -> None:
    with pytest.raises(ConfigError, match="different steps"):
        candidates([Facts(0, None), Facts(0, 3)], ROOT, "shared")


def test_of_two_files_of_one_name_a_rank_reads_its_own() -> None:
    files = ((0, FileEntry("same.pt", 1, 1)), (1, FileEntry("same.pt", 1, 2)))
    one = Candidate(attempt(1, 1), "storage", 2, files)
    assert [one.named("same.pt", rank)[0] for rank in (0, 1, 2)] == [0, 1, 0]
    with pytest.raises(NotFound, match=r"typo\.pt"):
        one.named("typo.pt")


def test_nothing_to_restore_is_proved_or_it_is_an_error() -> None:
    empty = Choice(())
    nothing_usable("/root", facts(), empty, ())
    nothing_usable("/root", facts(held(attempt(1, 1), 0)), empty, ())  # uncommitted, and not whole
    with pytest.raises(NotFound, match=r"\[1\]"):
        nothing_usable("/root", facts(disk=(stored(attempt(1, 1)),), step=9), empty, ())
    with pytest.raises(Corrupt, match="none is on the line"):
        nothing_usable("/root", facts(disk=(stored(attempt(1, 1)),)), empty, ())
    with pytest.raises(Corrupt, match="cut"):
        nothing_usable("/root", facts(), Choice((), (Skipped("", 0, "storage", "cut"),)), ())


orders = st.tuples(st.integers(1, 4), st.integers(1, 4))


@given(st.lists(st.tuples(orders, st.integers(0, 1))), st.lists(orders, unique=True))
def test_a_candidate_is_whole_and_never_older_than_the_next(
    parts: list[tuple[tuple[int, int], int]], disk: list[tuple[int, int]]
) -> None:
    memory = [held(attempt(*order), rank) for order, rank in parts]
    found = candidates(facts(*memory, disk=tuple(stored(attempt(*order)) for order in disk)), ROOT, "shared")
    order = [(one.attempt.order, one.source == "memory") for one in found.candidates]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(order)
    for one in found.candidates:
        assert {rank for rank, _ in one.files} == {0, 1}
        assert {held.header.attempt for held in one.held} <= {one.attempt}
