"""Every parser of what others may have written: an answer or its one documented error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from attacks.hostile import disk, envelope, put_raw_header, repacked
from attacks.test_damage_in_memory import ATTEMPT, GOOD
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import disk_names, messages, names, shm
from ckpt_engine.control import Outcome, Page, RankPage, SaverPage
from ckpt_engine.errors import Corrupt, StorageError
from ckpt_engine.header import Header
from ckpt_engine.listing import read_manifest_at
from ckpt_engine.manifest import (
    MAX_WORLD,
    Failure,
    FileEntry,
    Lease,
    Manifest,
    Offer,
    Receipt,
    RootId,
    RunClaim,
    ShardRecord,
)
from ckpt_engine.names import Names
from ckpt_engine.record import MAX_RECORD_BYTES
from ckpt_engine.slots import Slot
from ckpt_engine.states import State, Word

KINDS = (Manifest, ShardRecord, Receipt, RunClaim, Offer, Lease, RootId)
HASH = "f0220000ffff" + f"{os.getpid() & 0xFFFF:04x}"
MANIFEST = Manifest.of([Receipt.of([ShardRecord(ATTEMPT, 0, 1, 0, 1, (0,), (FileEntry("a.pt", 1, 2),))])])

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    made = Slot.create(Names(HASH).segment(1, 0, 1), 10_000)
    assert made.change("rank", made.word(), State.FILLING)
    made.put_header(GOOD)
    assert made.change("rank", made.word(), State.READY, ATTEMPT)
    yield made
    made.close()
    shm.unlink(str(made.name))


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    it = Page.own(Names(HASH).rank_control(1))
    yield it
    it.close()
    shm.unlink(Names(HASH).rank_control(1))


@given(st.binary(max_size=600))
def test_any_bytes_are_a_record_or_corrupt(data: bytes) -> None:
    for kind in KINDS:
        with contextlib.suppress(Corrupt):
            kind.from_bytes(data, "p")


@given(JSON, st.sampled_from([*KINDS]))
def test_any_json_with_a_right_checksum_is_a_record_or_corrupt(body: object, kind: Any) -> None:
    with contextlib.suppress(Corrupt):
        kind.from_bytes(envelope(body, kind.kind), "p")


RECORDS = (
    MANIFEST,
    ShardRecord(
        ATTEMPT, 0, 1, 0, 1, (0,), (FileEntry("a.pt", 1, 2), FileEntry("sub/b.pt", 3, 4)), resumed_from=ATTEMPT
    ),
    Receipt.of([ShardRecord(ATTEMPT, 0, 1, 0, 1, (0,), (FileEntry("a.pt", 1, 2),))]),
    Receipt(ATTEMPT, 0, 1, 1, "shared", (), Failure(0, "no space", "write", "/r", 28, 10, 1)),
    RunClaim(4, "c" * 16, ATTEMPT, 2, 1_700_000_000),
    Offer(4, "c" * 16, 0, (ATTEMPT,)),
    Lease("0123456789abcdef", "global_step100", 3),
    RootId("b" * 16),
)


@settings(max_examples=examples(300))
@given(st.sampled_from(RECORDS), st.data())
def test_any_record_with_any_part_replaced_is_a_record_that_says_it_again_or_corrupt(
    record: Any, data: st.DataObject
) -> None:
    body: Any = record.to_dict()
    place, key = data.draw(st.sampled_from(_places(body)))
    place[key] = data.draw(JSON)
    with contextlib.suppress(Corrupt):
        made = type(record).from_bytes(envelope(body, record.kind), "p")
        assert type(record).from_bytes(made.to_bytes(), "p") == made


@settings(max_examples=examples(300))
@given(st.sampled_from(RECORDS), st.data())
def test_any_byte_of_a_record_that_is_changed_taken_or_added_makes_it_corrupt(record: Any, data: st.DataObject) -> None:
    whole = record.to_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    other = bytes([data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))])
    for spoiled in (whole[:at] + other + whole[at + 1 :], whole[:at], whole[:at] + other + whole[at:]):
        with pytest.raises(Corrupt):
            type(record).from_bytes(spoiled, "p")
    assert type(record).from_bytes(whole, "p") == record


@given(st.data())
def test_a_manifest_with_any_part_replaced_is_a_manifest_or_corrupt(data: st.DataObject) -> None:
    body: Any = MANIFEST.to_dict()
    place, key = data.draw(st.sampled_from(_places(body)))
    place[key] = data.draw(JSON)
    with contextlib.suppress(Corrupt):
        made = Manifest.from_bytes(envelope(body), "p")
        assert made.world <= MAX_WORLD and all(".." not in entry.name.split("/") for entry in made.files())


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [found for key in keys for found in [(value, key), *_places(value[key])]]


@given(st.binary(max_size=400) | VALUES.map(lambda value: msgpack.packb(value)))
def test_any_bytes_are_a_header_or_none_and_a_label_too(slot: Slot, data: bytes) -> None:
    assert Header.parse(data) is None or isinstance(Header.parse(data), Header)
    if data:
        put_raw_header(slot, data)
        slot._cached = None
        slot.snapshot()
        slot._put_record(4096, 56, data)
        slot.error()


@settings(max_examples=examples(300))
@given(st.sampled_from(list(Header.__slots__)), VALUES)
def test_a_header_with_any_field_replaced_is_none_or_stays_within_its_slot(slot: Slot, name: str, junk: Any) -> None:
    put_raw_header(slot, repacked(GOOD, **{name: junk}))
    slot._cached = None
    header = slot.header()
    if header is not None:
        assert os.path.basename(header.commit_dir) == header.attempt.tag
        assert all(file.offset >= 0 and file.offset + file.nbytes <= 12288 for file in header.files)
        assert header.shard_record().rank == header.rank and header.local_rank == 1


@settings(max_examples=examples(300))
@given(st.data())
def test_a_header_with_any_inner_part_replaced_is_none_or_stays_within_its_slot(
    slot: Slot, data: st.DataObject
) -> None:
    values: Any = msgpack.unpackb(GOOD.pack(), unicode_errors="surrogateescape")
    place, key = data.draw(st.sampled_from(_places(values)))
    place[key] = data.draw(VALUES)
    put_raw_header(slot, msgpack.packb(values, unicode_errors="surrogateescape"))
    slot._cached = None
    header = slot.header()
    if header is not None:
        assert Header.parse(header.pack()) == header
        assert all(file.offset >= 0 and file.offset + file.nbytes <= 12288 for file in header.files)
        assert all(".." not in file.name.split("/") and not os.path.isabs(file.name) for file in header.files)


@settings(max_examples=examples(300))
@given(st.integers(0, 63), st.integers(0, 2**64 - 1))
def test_any_word_of_a_slot_page_is_read_without_an_error(slot: Slot, word: int, value: int) -> None:
    before = bytes(slot.memory[:64])
    place = 8 * (word % 8)
    slot.memory[place : place + 8] = value.to_bytes(8, "little")
    found = Slot.open(slot.name)
    if found is not None:
        found.snapshot(), found.view(), found.error(), found.flags(), found.progress(), found.capacity, found.sound()
        found.close()
    slot.memory[:64] = before


@given(st.integers(0, 2**64 - 1))
def test_any_number_is_a_state_word(value: int) -> None:
    assert Word.unpack(value).state in State


PAGE_VALUES = st.dictionaries(
    st.sampled_from([*RankPage.__slots__, *SaverPage.__slots__, *Outcome.__slots__]), VALUES, max_size=6
)


@settings(max_examples=examples(300))
@given(st.binary(max_size=300) | VALUES.map(msgpack.packb) | PAGE_VALUES.map(msgpack.packb))
def test_any_record_of_a_control_page_is_sound_or_none(page: Page, data: bytes) -> None:
    import zlib

    from ckpt_engine import _C

    memory = page._mapping.memory
    start = 4096 + (1 & _C.load(memory, 8)) * 30720
    _C.store(memory, 8, (_C.load(memory, 8) + 2) % 2**64 or 2)  # the same copy, and a reader looks again
    memory[start : start + 8 + len(data)] = (
        len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data
    )
    rank, saver = page.read(RankPage), page.read(SaverPage)
    assert rank is None or (rank.entered > (-(2**63), 0)) in (True, False)
    assert saver is None or all(isinstance(one, Outcome) for one in saver.outcomes)
    if saver is not None:  # what was read can be said again
        assert isinstance(Page.fits(saver), bool)


@given(st.binary(max_size=messages.SIZE_BYTES) | VALUES.map(msgpack.packb))
def test_any_packet_is_a_message_or_none(data: bytes) -> None:
    message = messages.decode(data)
    assert message is None or messages.decode(messages.encode(message)) == message


@given(
    st.text(max_size=60) | st.from_regex(r"\.?(ckpt|run|offer|reading|attempt|removed|shard|MANIFEST)[-0-9a-g.]{0,40}")
)
def test_any_name_is_ours_or_not_and_never_an_error(name: str) -> None:
    for parse in (
        disk_names.parse_run_claim, disk_names.parse_offer, disk_names.parse_lease, disk_names.parse_attempt_dir,
        disk_names.parse_tombstone, disk_names.is_manifest, disk_names.is_record, disk_names.is_ours,
        disk_names.is_temp, names.parse_segment, names.parse_rank_control,
    ):  # fmt: skip
        parse(name)  # type: ignore[operator]
    with contextlib.suppress(ValueError):
        disk_names.check_file_name(name)
        assert not os.path.isabs(name) and os.path.normpath(name) == name and not name.startswith("..")


# -- bounds ----------------------------------------------------------------------------------------------------------


def peak_bytes(act: Any) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_gibibyte_of_json_is_refused_by_its_size_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "MANIFEST.json"
    path.touch()
    os.truncate(path, 1 << 30)

    def refused() -> None:
        with pytest.raises(StorageError) as caught:
            read_manifest_at(disk, str(path))
        assert caught.value.errno == 27 and caught.value.path == str(path)

    assert peak_bytes(refused) < 1 << 20
    os.truncate(path, MAX_RECORD_BYTES + 1)
    assert peak_bytes(refused) < 1 << 20


HUGE_BODIES: dict[str, Any] = {
    "names that are all slashes": {
        **MANIFEST.to_dict(),
        "shards": [{"rank": 0, "files": [
            {"name": f"{number}/" + "a/" * 1900 + "a", "nbytes": 1, "crc32": 1, "origin": "shard"}
            for number in range(500)
        ]}],
    },
    "a world of 2^62 on as many nodes": {
        **MANIFEST.to_dict(), "world": 2**62, "nodes": 2**62, "node": 0, "layout": "node-local",
    },
    "many shards of nothing": {**MANIFEST.to_dict(), "shards": [0] * 100_000},
    "a number of 4000 digits": {**MANIFEST.to_dict(), "world": 10**4000},
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE_BODIES)
def test_a_record_that_would_cost_much_more_than_its_size_is_refused_cheaply(what: str) -> None:
    data = envelope(HUGE_BODIES[what])

    def refused() -> None:
        with pytest.raises(Corrupt):
            Manifest.from_bytes(data, "p")

    assert peak_bytes(refused) < 30 * len(data) + (1 << 20)


def test_the_largest_world_there_may_be_is_looked_at_in_bounded_time() -> None:
    from ckpt_engine import restore
    from ckpt_engine.manifest import Committed

    body = {**MANIFEST.to_dict(), "world": MAX_WORLD, "nodes": MAX_WORLD, "node": 0, "layout": "node-local"}
    one = Committed(Manifest.from_bytes(envelope(body), "p"), "/r/global_step100")
    choice = restore.candidates([restore.Facts(0, None, committed=(one,))], ATTEMPT.root_id, "shared")
    assert choice.candidates == () and len(choice.partial) == 1


@pytest.mark.parametrize("junk", [b"[" * 200_000, b'{"body":' * 50_000, b"9" * 100_000, b'"' + b"\\u0000" * 100_000])
def test_deep_and_long_json_is_corrupt_and_no_recursion_error(junk: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(Corrupt):
            kind.from_bytes(junk, "p")
    with pytest.raises(Corrupt):
        Manifest.from_bytes(json.dumps({"body": json.loads("[" * 400 + "]" * 400)}).encode(), "p")


@pytest.mark.parametrize(
    "junk", [b"\x91" * 100_000, b"\x81\xa1x" * 30_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_deep_and_long_msgpack_is_nothing(junk: bytes, page: Page) -> None:
    assert Header.parse(junk) is None and messages.decode(junk) is None
    assert peak_bytes(lambda: Header.parse(junk)) < 64 << 20
