"""Slots: header, word and flags in shared memory; what is torn, foreign or just changing is no snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from harness import Lab

from ckpt_engine import _C, shm, slots
from ckpt_engine.errors import CkptError, ConfigError, ShmFull, SlotTooSmall, StagingError
from ckpt_engine.header import Header, SlotFile, order_in
from ckpt_engine.manifest import Attempt, Failure, RunClaim
from ckpt_engine.metrics import Metric
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.retention import Retention
from ckpt_engine.slots import BREAKPOINT, CANCEL, DATA_OFFSET, RETIRED, Slot, open_all
from ckpt_engine.states import SNAPSHOT, SlotView, State, Word

HASH = f"{os.getpid():016x}"
ATTEMPT = Attempt(generation=3, run="a" * 16, seq=7, step=100, tag="global_step100", root_id="b" * 16)


def header(attempt: Attempt = ATTEMPT, **changes: Any) -> Header:
    values: dict[str, Any] = {
        "attempt": attempt,
        "claim": RunClaim(attempt.generation, attempt.run, None, 2, 0),
        "rank": 1,
        "local_rank": 1,
        "world": 2,
        "node": 0,
        "nodes": 1,
        "node_ranks": (0, 1),
        "layout": "shared",
        "root": "/r\udcff",
        "commit_dir": "/r\udcff/global_step100",
        "retention": Retention(keep_last=3, keep_best=("eval_loss", "min"), min_age_s=0.5),
        "metrics": (Metric("eval_loss", 0.25),),
        "confirmed": None,
        "storage": True,
        "files": (SlotFile("a/ü.pt", 0, 10, 123), SlotFile("b.pt", 4096, 0, 0, "external")),
    }
    return Header(**{**values, **changes})


@pytest.fixture
def name() -> Iterator[SegmentName]:
    it = SegmentName(HASH, 1, 0, 1)
    yield it
    for segment in Names(HASH).segments():
        shm.unlink(str(segment))


@pytest.fixture
def slot(name: SegmentName) -> Iterator[Slot]:
    it = Slot.create(name, 10_000)
    yield it
    it.close()


def to(slot: Slot, *states: State, attempt: Attempt = ATTEMPT) -> None:
    for state in states:
        actor = "rank" if state in (State.FILLING, State.READY) else "saver"
        if state is State.READY:
            slot.put_header(header(attempt))
        assert slot.change(actor, slot.word(), state, attempt if state is State.READY else None, incarnation=9)


def test_a_new_slot_is_free_reserved_private_and_a_multiple_of_the_page(slot: Slot, name: SegmentName) -> None:
    status = os.stat("/dev/shm" + str(name))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= DATA_OFFSET + 10_000, "reserved, not promised"
    assert slot.capacity == 12288 and slot.word() == Word() and slot.snapshot() is None
    with pytest.raises(FileExistsError):
        Slot.create(name, 1)


def test_a_sealed_slot_says_in_another_mapping_what_was_put_into_it(slot: Slot, name: SegmentName) -> None:
    to(slot, State.FILLING, State.READY)
    other = Slot.open(name)
    assert other is not None
    found = other.snapshot()
    assert found is not None and found[1] == header() and found[0] == Word(State.READY, 9, 3, 7)
    assert other.view().order == (3, 7)
    other.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-1],
        lambda packed: b"",
        lambda packed: msgpack.packb([1]),
        lambda packed: msgpack.packb({"attempt": [3, 7]}),
        lambda packed: msgpack.packb({"attempt": {"generation": 3, "seq": True}}),
        lambda packed: msgpack.packb({"attempt": {"generation": 3.0, "seq": 7}}),
        lambda packed: msgpack.packb({"attempt": {"generation": 4, "seq": 7}}),
    ],
)
def test_a_view_has_no_order_where_the_header_record_is_anything_else(slot: Slot, damage: Any) -> None:
    to(slot, State.FILLING, State.READY)
    assert order_in(header().pack()) == (3, 7)
    slot._put_record(slots._HEADER, slots._HEADER_REF, damage(header().pack()))
    other = Slot.open(slot.name)
    assert other is not None
    for one in (slot, other):
        assert one.snapshot() is None and one.view() == SlotView(
            slot.name.local_rank, slot.name.slot, State.READY, None
        )
    other.close()


def test_only_complete_states_are_snapshots(slot: Slot) -> None:
    seen = {}
    for path in (
        [State.FILLING, State.READY, State.QUEUED, State.PERSISTING, State.DURABLE],
        [
            State.FILLING,
            State.READY,
            State.QUEUED,
            State.PERSISTING,
            State.FAILED,
            State.QUEUED,
            State.PERSISTING,
            State.FREE,
        ],
    ):
        for state in path:
            to(slot, state)
            seen[state] = slot.snapshot() is not None
    assert {state for state, is_snapshot in seen.items() if is_snapshot} == set(SNAPSHOT)


def test_a_header_of_another_attempt_than_the_word_says_is_no_snapshot(slot: Slot) -> None:
    to(slot, State.FILLING)
    slot.put_header(header(Attempt(generation=3, run="a" * 16, seq=8, step=1, tag=ATTEMPT.tag, root_id="b" * 16)))
    assert slot.change("rank", slot.word(), State.READY, ATTEMPT)
    assert slot.snapshot() is None


@pytest.mark.parametrize("position", [8192, 8200, 8300, 48, 52])
def test_a_flipped_bit_anywhere_in_the_header_is_no_snapshot(slot: Slot, position: int) -> None:
    to(slot, State.FILLING, State.READY)
    slot.memory[position] = slot.memory[position] ^ 0x10
    assert slot.header() is None and slot.snapshot() is None
    slot.memory[position] = slot.memory[position] ^ 0x10
    assert slot.snapshot() is not None


def test_a_new_fill_forgets_header_flags_progress_and_error_but_not_that_it_is_retired(slot: Slot) -> None:
    to(slot, State.FILLING, State.READY)
    slot.put_error(Failure(1, "why"))
    slot.set_flags(CANCEL | BREAKPOINT | RETIRED)
    assert slot.error() == Failure(1, "why")
    to(slot, State.FILLING)
    slot.clear_for_fill()
    assert (slot.flags(), slot.error(), slot.header(), slot.progress()) == (RETIRED, None, None, 0)


def test_a_change_from_a_word_that_is_not_there_any_more_does_nothing(slot: Slot) -> None:
    to(slot, State.FILLING)
    old = slot.word()
    assert slot.change("rank", old, State.FREE)
    assert slot.change("rank", slot.word(), State.FILLING, incarnation=10)
    assert not slot.change("saver", old, State.FREE), "the fill of another incarnation is another fill"
    assert slot.word().state is State.FILLING
    with pytest.raises(CkptError, match="must not"):
        slot.change("saver", slot.word(), State.READY)


def test_a_table_of_files_that_does_not_fit_is_an_error_that_says_how_large_it_is(slot: Slot) -> None:
    to(slot, State.FILLING)
    files = tuple(SlotFile(f"{number:0200}", 0, 1, 1) for number in range(2000))
    with pytest.raises(SlotTooSmall, match="2000 files") as caught:
        slot.put_header(header(files=files))
    assert caught.value.need_bytes > caught.value.have_bytes == DATA_OFFSET - 8192
    slot.put_header(header(files=files[:1000]))
    assert slot.header() is not None


def test_an_error_larger_than_its_record_is_cut_and_not_lost(slot: Slot) -> None:
    slot.put_error(Failure(1, "x" * 5000, path="/" + "\udcff" * 5000))
    assert slot.error() == Failure(1, "x" * 500, path="\udcff" * 500)
    slot.put_error(Failure(1, "y"))
    assert slot.error() == Failure(1, "y")


def spoiled(name: SegmentName, position: int, data: bytes) -> Path:
    path = Path("/dev/shm" + str(name))
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)
    return path


@pytest.mark.parametrize(
    ("position", "data"),
    [(0, b"X"), (8, b"\x02"), (23, b"\x07"), (23, b"\xff"), (32, b"\xff" * 8)],
    ids=["magic", "version", "state 7", "state 255", "capacity"],
)
def test_what_is_no_slot_of_this_version_is_not_opened(
    slot: Slot, name: SegmentName, position: int, data: bytes
) -> None:
    spoiled(name, position, data)
    assert Slot.open(name) is None
    assert open_all([name], {}) == {}


@pytest.mark.parametrize("size", [0, 1, 4096, DATA_OFFSET, 4097])
def test_a_segment_that_was_never_reserved_is_not_opened(name: SegmentName, size: int) -> None:
    Path("/dev/shm" + str(name)).write_bytes(b"CKPTSLOT"[:size] + bytes(max(0, size - 8)))
    assert Slot.open(name) is None


def test_a_slot_made_again_under_its_name_is_mapped_anew(slot: Slot, name: SegmentName) -> None:
    known = open_all([name], {})
    first = known[name]
    shm.unlink(str(name))
    second = Slot.create(name, 50_000)
    assert open_all([name], known)[name].capacity == second.capacity != first.capacity
    shm.unlink(str(name))
    assert open_all([], known) == {}
    second.close()


def opens(me: Any, text: str) -> None:
    name = SegmentName(*[part if index == 0 else int(part) for index, part in enumerate(text.split("/"))])
    try:
        me.say("opened", result=Slot.open(name) is not None)
    except ConfigError as error:
        me.say("refused", text=str(error), listed=len(open_all([name], {})))


@pytest.mark.skipif("os.geteuid() != 0")
def test_a_slot_of_another_user_or_of_mode_000_is_refused_by_name(lab: Lab, slot: Slot, name: SegmentName) -> None:
    said = lab.rank(opens, f"{name.hash}/1/0/1", uid=65534).expect("refused")
    assert str(name) in said["text"] and said["listed"] == 0
    Path("/dev/shm" + str(name)).chmod(0)
    os.chown("/dev/shm" + str(name), 65534, 65534)
    said = lab.rank(opens, f"{name.hash}/1/0/1", uid=65534).expect("refused")
    assert "may not be opened" in said["text"]
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        Slot.open(name)
    for process in lab._processes:
        process.join()


def test_memory_that_is_not_there_is_shm_full_and_leaves_no_segment(name: SegmentName) -> None:
    with pytest.raises(ShmFull, match="--shm-size") as caught:
        Slot.create(name, 1 << 45)
    assert caught.value.limit == "/dev/shm" and Names(HASH).segments() == []


def test_a_mapping_that_is_still_exported_survives_its_close(slot: Slot) -> None:
    view = memoryview(slot.memory)[DATA_OFFSET:]
    slot.close()
    view[0] = 7
    view.release()


def test_a_fill_that_is_taken_away_is_an_error_of_that_rank(slot: Slot) -> None:
    from ckpt_engine.saving import seal

    to(slot, State.FILLING)
    assert slot.change("saver", slot.word(), State.FREE)
    with pytest.raises(StagingError, match="taken away"):
        seal(slot, header())
    assert slot.word().state is State.FREE


def test_words_and_layout_are_where_the_format_says(slot: Slot) -> None:
    to(slot, State.FILLING, State.READY)
    assert slot.memory[:8] == b"CKPTSLOT" and _C.load(slot.memory, 8) == 1
    assert _C.load(slot.memory, 16) == Word(State.READY, 9, 3, 7).pack()
    assert DATA_OFFSET % 4096 == 0 and slots._HEADER == 8192
