"""The pure rules of slots: transitions, the word, and which slot may be filled."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import CkptError
from ckpt_engine.states import (
    LEASED,
    SNAPSHOT,
    TRANSITIONS,
    Order,
    SlotView,
    State,
    Told,
    Word,
    check_transition,
    hopeless,
    newest_common,
    tended,
    victim,
)

ALLOWED = """
FREE FILLING rank
FILLING READY rank
FILLING FREE rank saver
READY QUEUED rank saver
READY FILLING rank
READY FREE rank
QUEUED PERSISTING saver
QUEUED FREE rank
PERSISTING DURABLE saver
PERSISTING FAILED saver
PERSISTING FREE saver
PERSISTING QUEUED saver
DURABLE FILLING rank
DURABLE FREE rank
FAILED FILLING rank
FAILED FREE rank
FAILED QUEUED saver
"""


def test_the_table_of_transitions_is_the_one_of_the_design_and_nothing_else_is_allowed() -> None:
    allowed = {
        (actor, State[old], State[new])
        for old, new, *actors in map(str.split, ALLOWED.strip().splitlines())
        for actor in actors
    }
    for actor, old, new in itertools.product(TRANSITIONS, State, State):
        if (actor, old, new) in allowed:
            check_transition(actor, old, new)
        else:
            with pytest.raises(CkptError, match="must not"):
                check_transition(actor, old, new)


def test_no_rank_touches_a_slot_that_the_saver_has_but_to_take_back_what_is_queued() -> None:
    for old, new in TRANSITIONS["rank"]:
        assert old not in LEASED or (old, new) == (State.QUEUED, State.FREE)


@given(st.sampled_from(State), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_word_comes_back_as_it_went_but_for_its_high_bits(state: State, inc: int, gen: int, seq: int) -> None:
    packed = Word(state, inc, gen, seq).pack()
    assert 0 <= packed < 2**64
    assert Word.unpack(packed) == Word(state, inc & 0xFFFFFF, gen & 0xFF, seq & 0xFFFFFF)


def test_the_same_state_of_another_fill_is_another_word() -> None:
    one = Word(State.READY, 1, 1, 5)
    assert len({one.pack(), Word(State.READY, 2, 1, 5).pack(), Word(State.READY, 1, 1, 6).pack()}) == 3


def never(_: Order) -> bool:
    return False


STATES = tuple(State)
ORDERS: tuple[Order | None, ...] = (None, (1, 1), (1, 2), (1, 3))


def views(rank: int, count: int) -> list[list[SlotView]]:
    """Every way that ``count`` slots of a rank can look."""
    one = [(state, order) for state in STATES for order in ORDERS if (order is not None) == (state in SNAPSHOT)]
    return [
        [SlotView(rank, slot, state, order) for slot, (state, order) in enumerate(found)]
        for found in itertools.product(one, repeat=count)
    ]


@pytest.mark.parametrize("hopeless", [False, True])
def test_the_victim_is_never_leased_and_never_the_newest_common_attempt(hopeless: bool) -> None:
    """Exhaustive: two ranks, two slots each, three attempts, every state."""
    peers = [SlotView(1, 0, State.READY, (1, 1)), SlotView(1, 1, State.READY, (1, 2))]
    for mine in views(0, 2):
        for theirs in ([peers[0]], peers, [peers[1]], []):
            kept = newest_common([*mine, *theirs], {0, 1})
            chosen = victim(mine, kept, lambda order: hopeless)
            if chosen is None:
                assert all(view.state in LEASED or view.order is not None for view in mine)
                continue
            assert chosen.state not in LEASED
            spare = [view for view in mine if view is not chosen and view.order == kept]
            assert kept is None or chosen.order != kept or spare, (mine, theirs)


def test_the_order_of_choice_is_free_then_done_then_older_then_hopeless() -> None:
    free = SlotView(0, 0, State.FREE, None)
    done = SlotView(0, 1, State.DURABLE, (1, 1))
    failed = SlotView(0, 1, State.FAILED, (1, 1))
    older = SlotView(0, 2, State.READY, (1, 2))
    kept = SlotView(0, 3, State.READY, (1, 3))
    newer = SlotView(0, 4, State.READY, (1, 4))
    assert victim([newer, kept, older, done, free], (1, 3), never) is free
    assert victim([newer, kept, older, done], (1, 3), never) is done
    assert victim([newer, kept, older, failed], (1, 3), never) is failed
    assert victim([newer, kept, older], (1, 3), never) is older
    assert victim([newer, kept], (1, 3), never) is None
    assert victim([newer, kept], (1, 3), lambda order: order == (1, 4)) is newer
    assert victim([kept], (1, 3), never) is kept, "one slot only: weaker, and documented"
    assert victim([SlotView(0, 0, State.QUEUED, (1, 3))], (1, 3), never) is None


def test_the_newest_common_attempt_needs_every_local_rank() -> None:
    held = [
        SlotView(0, 0, State.READY, (1, 1)),
        SlotView(0, 1, State.DURABLE, (1, 2)),
        SlotView(1, 0, State.QUEUED, (1, 1)),
        SlotView(1, 1, State.FILLING, None),
        SlotView(7, 0, State.READY, (1, 9)),
    ]
    assert newest_common(held, {0, 1}) == (1, 1)
    assert newest_common(held, {0}) == (1, 2)
    assert newest_common(held, {0, 2}) is None
    assert newest_common(held, ()) is None


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans()), max_size=60))
def test_with_two_slots_a_common_snapshot_exists_at_every_instant_after_the_first(
    moves: list[tuple[str, bool]],
) -> None:
    """Two ranks that each fill whatever the rule lets them, in any interleaving (invariant 12)."""
    slots = {rank: [SlotView(rank, k, State.FREE, None) for k in (0, 1)] for rank in (0, 1)}
    seq = {0: 0, 1: 0}
    seen = False
    for who, finishes in moves:
        rank = 0 if who == "a" else 1
        every = [*slots[0], *slots[1]]
        if seq[rank] > seq[1 - rank]:
            continue  # the framework's collective orders the ranks between saves
        chosen = victim(slots[rank], newest_common(every, {0, 1}), never)
        if chosen is None:
            continue
        slots[rank][chosen.slot] = SlotView(rank, chosen.slot, State.FILLING, None)
        assert not seen or newest_common([*slots[0], *slots[1]], {0, 1}) is not None
        if finishes:
            seq[rank] += 1
            slots[rank][chosen.slot] = SlotView(rank, chosen.slot, State.READY, (1, seq[rank]))
        else:
            slots[rank][chosen.slot] = SlotView(rank, chosen.slot, State.FREE, None)
        seen = seen or newest_common([*slots[0], *slots[1]], {0, 1}) is not None
        assert not seen or newest_common([*slots[0], *slots[1]], {0, 1}) is not None


def test_the_saver_frees_the_fill_of_a_dead_life_and_of_no_later_one() -> None:
    for life, dead, freed in [(3, 3, True), (2, 3, True), (4, 3, False), (0xFFFFFF, 1, True), (1, 0xFFFFFF, False)]:
        state = tended(Word(State.FILLING, life), handed=None, dead=dead)
        assert (state is State.FREE) == freed, (life, dead)
    assert tended(Word(State.FILLING, 3), handed=None, dead=None) is None


def test_what_a_dead_saver_was_writing_is_queued_again_and_what_this_one_writes_is_not() -> None:
    word = Word(State.PERSISTING, 1, 1, 5)
    assert tended(word, handed=None, dead=None) is State.QUEUED
    assert tended(word, handed=Word(State.QUEUED, 1, 1, 4), dead=None) is State.QUEUED
    assert tended(word, handed=Word(State.QUEUED, 1, 1, 5), dead=None) is None


def test_an_attempt_is_hopeless_if_a_peer_died_failed_or_went_on_without_it() -> None:
    holds = [SlotView(1, 0, State.READY, (1, 2))]
    for told, expected in [
        (Told(True, (1, 2)), False), (Told(True, (1, 1)), False), (Told(True, (1, 2), failed=True), True),
        (Told(True, (1, 3)), True), (Told(False, (1, 2)), True),
    ]:  # fmt: skip
        assert hopeless((1, 2), [], {1: told}) is expected
        assert hopeless((1, 2), holds, {1: told}) is False
