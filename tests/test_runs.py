"""Claims have one holder; the line leads to what the newest run came from; leases and offers say what they must."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_model import ROOT_ID, RUN, Dying, Killed, ModelDisk, attempt_of, claim_of
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import runs
from ckpt_engine.errors import ConfigError, Corrupt, StaleRun
from ckpt_engine.manifest import Attempt, Lease, Offer, RunClaim
from ckpt_engine.storage import PosixStorage


@pytest.fixture
def disk() -> ModelDisk:
    disk = ModelDisk()
    disk.make_dir("/root")
    return disk


def test_a_root_keeps_its_id_and_refuses_another_naming_both(disk: ModelDisk) -> None:
    assert runs.root_id(disk, "/root") is None
    runs.adopt_root_id(disk, "/root", ROOT_ID)
    runs.adopt_root_id(disk, "/root", ROOT_ID)
    assert runs.root_id(disk, "/root") == ROOT_ID
    with pytest.raises(ConfigError, match=f"{ROOT_ID}.*cdcd"):
        runs.adopt_root_id(disk, "/root", "cdcd")


def test_a_claim_is_ours_again_and_again_and_nobody_elses(disk: ModelDisk) -> None:
    runs.claim_run(disk, "/root", claim_of(1))
    runs.claim_run(disk, "/root", claim_of(1))
    with pytest.raises(StaleRun) as caught:
        runs.claim_run(disk, "/root", claim_of(1, run="f" * 16))
    assert caught.value.other == RUN
    assert runs.read_runs(disk, "/root") == (claim_of(1),)


def test_a_newer_run_makes_an_older_one_stale(disk: ModelDisk) -> None:
    runs.claim_run(disk, "/root", claim_of(1))
    runs.claim_run(disk, "/root", claim_of(7))
    with pytest.raises(StaleRun, match="generation 7"):
        runs.claim_run(disk, "/root", claim_of(1))


def test_a_damaged_claim_is_never_taken_over_and_does_not_hide_the_others(disk: ModelDisk) -> None:
    runs.claim_run(disk, "/root", claim_of(1))
    disk.write_new("/root/.run-2", b"{")
    disk.write_new("/root/.run-x", b"not ours")
    assert runs.read_runs(disk, "/root") == (claim_of(1),)
    for claim in (claim_of(1), claim_of(2)):
        with pytest.raises(StaleRun):
            runs.claim_run(disk, "/root", claim)


def test_kill_at_every_change_of_a_claim_leaves_it_whole_or_absent() -> None:
    for at in range(5):
        disk = ModelDisk()
        disk.make_dir("/root")
        disk.sync_dir("/")
        try:
            runs.claim_run(Dying(disk, at), "/root", claim_of(1))
        except Killed:
            for choose in (lambda count: 0, lambda count: count - 1):
                left = disk.crash(choose)
                assert runs.read_runs(left, "/root") in ((), (claim_of(1),))
                runs.claim_run(left, "/root", claim_of(1))
        else:
            assert at == 4
            assert runs.read_runs(disk.crash(lambda count: 0), "/root") == (claim_of(1),)


def _claim(root: str, index: int, barrier: Any, wins: Any) -> None:
    barrier.wait(30)
    try:
        runs.claim_run(PosixStorage(), root, claim_of(1, run=f"{index:016x}"))
        wins.put(index)
    except StaleRun as error:
        wins.put(error.other)


def test_of_eight_jobs_that_claim_one_generation_one_wins_and_the_others_name_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, wins = context.Barrier(8), context.SimpleQueue()
    jobs = [context.Process(target=_claim, args=(str(tmp_path), index, barrier, wins)) for index in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    said = [wins.get() for _ in jobs]
    [winner] = [one for one in said if isinstance(one, int)]
    assert [one for one in said if one != winner] == [f"{winner:016x}"] * 7
    assert os.listdir(tmp_path) == [".run-1"]


def run_of(generation: int) -> str:
    return f"{generation:016x}"


def at(generation: int, seq: int) -> Attempt:
    return attempt_of(seq, "tag", generation, run_of(generation))


@st.composite
def histories(draw: st.DrawFn) -> list[RunClaim]:
    """Run 1 starts from nothing; each later one resumes from an attempt of any earlier run."""
    claims = [claim_of(1, None, run_of(1))]
    for generation in range(2, draw(st.integers(1, 7)) + 1):
        parent = at(draw(st.integers(1, generation - 1)), draw(st.integers(0, 4)))
        claims.append(claim_of(generation, parent, run_of(generation)))
    return claims


def ancestors(claims: list[RunClaim]) -> set[tuple[int, int]]:
    found = {(claims[-1].generation, seq) for seq in range(6)}
    last = claims[-1].resumed_from
    while last is not None:
        found |= {(last.generation, seq) for seq in range(last.seq + 1)}
        last = claims[last.generation - 1].resumed_from
    return found


def on_line(claims: list[RunClaim], upto: int) -> set[tuple[int, int]]:
    every = [at(generation, seq) for generation in range(1, upto + 1) for seq in range(6)]
    return {attempt.order for attempt in every if runs.on_the_line(attempt, claims)}


@given(histories(), st.randoms())
def test_where_every_run_has_its_claim_the_line_is_exactly_what_the_newest_run_came_from(
    claims: list[RunClaim], draw: Any
) -> None:
    shuffled = list(claims)
    draw.shuffle(shuffled)
    assert on_line(shuffled, len(claims)) == ancestors(claims)


@given(histories(), st.data())
def test_a_run_without_a_claim_never_takes_every_checkpoint_off_the_line(
    claims: list[RunClaim], data: st.DataObject
) -> None:
    known = [claim for claim in claims if data.draw(st.booleans())]
    line = on_line(known, len(claims))
    written = {(claim.generation, 0) for claim in known}  # only a run with a claim can have committed
    assert not written or line & written


def test_the_line_passes_through_a_run_without_a_claim_and_still_leaves_out_what_a_claimed_one_abandoned() -> None:
    claims = [claim_of(1, None, run_of(1)), claim_of(2, at(1, 3), run_of(2)), claim_of(4, at(3, 5), run_of(4))]
    assert on_line(claims, 4) == ancestors([*claims[:2], claim_of(3, at(2, 5), run_of(3)), claims[2]])
    assert on_line(claims[2:], 4) == {(g, s) for g in (1, 2, 3, 4) for s in range(6)}  # no claim tells


def test_an_attempt_of_the_newest_run_or_of_one_without_a_claim_yet_is_on_the_line() -> None:
    claims = [claim_of(2, at(1, 3), run_of(2)), claim_of(1, None, run_of(1))]
    assert runs.on_the_line(at(2, 9), claims) and runs.on_the_line(at(3, 0), claims) and runs.on_the_line(at(1, 3), [])
    assert runs.on_the_line(at(1, 3), claims) and not runs.on_the_line(at(1, 4), claims)


def test_of_two_jobs_with_one_generation_only_the_claimed_ones_attempts_are_on_the_line() -> None:
    claims = [claim_of(2, at(1, 3), run_of(2)), claim_of(1, None, run_of(1))]
    loser = RunClaim(2, "f" * 16, at(1, 1), 2, 0)
    assert not runs.on_the_line(replace(at(2, 0), run="f" * 16), [*claims, loser])
    assert not runs.on_the_line(replace(at(1, 0), run="f" * 16), [*claims, loser])
    assert runs.on_the_line(at(1, 3), [*claims, loser])


def test_a_claim_that_resumes_from_itself_or_later_cannot_exist_so_the_line_has_no_loop(disk: ModelDisk) -> None:
    for generation in (1, 2):
        with pytest.raises(ValueError):
            claim_of(generation, at(2, 0))


def test_the_newest_common_offer_needs_the_offers_of_all_nodes(disk: ModelDisk) -> None:
    claim = claim_of(1)
    one, two, three = (attempt_of(seq, f"t{seq}") for seq in (1, 2, 3))
    runs.write_offer(disk, "/root", Offer(1, RUN, 0, (one, two, three)))
    assert runs.newest_common(runs.read_offers(disk, "/root", claim, 2)) is None
    runs.write_offer(disk, "/root", Offer(1, RUN, 1, (two, one, replace(three, run="f" * 16))))
    assert runs.newest_common(runs.read_offers(disk, "/root", claim, 2)) == two
    assert runs.read_offers(disk, "/root", claim_of(1, run="f" * 16), 2) == (None, None)
    disk.unlink("/root/.offer-1-node1")
    disk.write_new("/root/.offer-1-node1", b"{")
    assert runs.read_offers(disk, "/root", claim, 2)[1] is None
    assert runs.newest_common([Offer(1, RUN, 0, (one,)), Offer(1, RUN, 1, (two,))]) is None
    assert runs.newest_common([]) is None


def test_a_lease_is_live_until_it_was_seen_unchanged_for_a_minute_of_the_observers_clock(disk: ModelDisk) -> None:
    watch, token = runs.LeaseWatch(), "0" * 16
    runs.write_lease(disk, "/root", Lease(token, "tag", 1))
    assert watch.tags(disk, "/root", 1000.0) == watch.tags(disk, "/root", 1059.0) == {"tag"}
    runs.write_lease(disk, "/root", Lease(token, "tag", 2))
    assert watch.tags(disk, "/root", 1061.0) == watch.tags(disk, "/root", 1120.9) == {"tag"}
    assert watch.tags(disk, "/root", 1121.1) == frozenset()
    runs.write_lease(disk, "/root", Lease(token, "tag", 3))
    assert watch.tags(disk, "/root", 5000.0) == {"tag"}
    runs.drop_lease(disk, "/root", token)
    assert watch.tags(disk, "/root", 5001.0) == frozenset()
    disk.write_new("/root/.reading-" + token, b"?")
    assert watch.tags(disk, "/root", 5002.0) == {""}


def test_a_damaged_root_id_is_reported_and_not_replaced(disk: ModelDisk) -> None:
    disk.write_new("/root/.ckpt-root", b"?")
    with pytest.raises(Corrupt):
        runs.adopt_root_id(disk, "/root", ROOT_ID)
