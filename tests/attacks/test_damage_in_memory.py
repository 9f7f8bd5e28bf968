"""Slots and control pages with damaged or hostile bytes: no snapshot, no crash, nothing written elsewhere.

First one process, byte by byte; then real ranks and savers, whose memory a test spoils behind their backs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from attacks.hostile import put_raw_header, repacked
from faults.programs import do, leave, obeys, ready
from harness import Lab, Process, kill, until

from ckpt_engine import _C, control, shm
from ckpt_engine.control import Page, RankPage, SaverPage
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.retention import Retention
from ckpt_engine.slots import DATA_OFFSET, Slot, open_all
from ckpt_engine.states import LEASED, STATES, State, Word

HASH = "a77ac4000000" + f"{os.getpid() & 0xFFFF:04x}"
ATTEMPT = Attempt(3, "a" * 16, 7, 100, "global_step100", "b" * 16)
GOOD = Header(
    ATTEMPT, RunClaim(3, "a" * 16, None, 2, 0), 1, 1, 2, 0, 1, (0, 1), "shared", "/r", "/r/global_step100",
    Retention(keep_last=3), None, True, (SlotFile("a.pt", 0, 100, 5), SlotFile("sub/b.pt", 4096, 100, 6)),
)  # fmt: skip
FAULTY: dict[str, Any] = {
    "a file that starts beyond the slot": {"files": [("a.pt", 1 << 40, 1, 0, "shard")]},
    "a file that ends beyond the slot": {"files": [("a.pt", 4096, 1 << 40, 0, "shard")]},
    "offset and size that overflow 64 bits": {"files": [("a.pt", 2**64 - 4096, 8192, 0, "shard")]},
    "a size of 2^63": {"files": [("a.pt", 0, 2**63, 0, "shard")]},
    "a negative offset": {"files": [("a.pt", -262144, 100, 0, "shard")]},
    "a negative size": {"files": [("a.pt", 0, -1, 0, "shard")]},
    "a name with ..": {"files": [("../../etc/x", 0, 1, 0, "shard")]},
    "an absolute name": {"files": [("/etc/x", 0, 1, 0, "shard")]},
    "an external name with ..": {"files": [("../x", 0, 0, 0, "external")]},
    "a tool in a subdirectory": {"files": [("sub/x.py", 0, 1, 0, "tool")]},
    "a name of ours": {"files": [("MANIFEST.json", 0, 1, 0, "shard")]},
    "a name with NUL": {"files": [("a\0b", 0, 1, 0, "shard")]},
    "a name twice": {"files": [("a", 0, 1, 0, "shard"), ("a", 0, 1, 0, "shard")]},
    "a name that is a number": {"files": [(7, 0, 1, 0, "shard")]},
    "a row too short": {"files": [("a", 0, 1)]},
    "files that are none": {"files": 7},
    "a tag that leaves the root": {"attempt": {**ATTEMPT.to_dict(), "tag": "../x"}},
    "a commit directory of another tag": {"commit_dir": "/r/global_step99"},
    "a commit directory with ..": {"commit_dir": "/r/../etc/global_step100"},
    "a relative commit directory": {"commit_dir": "r/global_step100"},
    "a commit directory with NUL": {"commit_dir": "/r\0/global_step100"},
    "a commit directory that is a number": {"commit_dir": 7},
    "a relative root": {"root": "r"},
    "a root that is a list": {"root": []},
    "a rank beyond the world": {"rank": 2},
    "another local rank": {"local_rank": 0},
    "a local rank of 10^9": {"local_rank": 10**9},
    "a world of 2^62": {"world": 2**62, "nodes": 2**62},
    "a node beyond the nodes": {"node": 1},
    "ranks twice": {"node_ranks": [1, 1]},
    "no ranks": {"node_ranks": []},
    "a layout of the future": {"layout": "striped"},
    "keep none": {"retention": {"keep_last": 0}},
    "keep text": {"retention": {"keep_last": "3"}},
    "keep by a rule of the future": {"retention": {"keep_odd": 1}},
    "no retention": {"retention": None},
    "a best by no mode": {"retention": {"keep_best": ["loss", "least"]}},
    "a metric that is no number": {"metrics": [{"name": "loss", "value": float("nan")}]},
    "a metric twice": {"metrics": [{"name": "loss", "value": 1.0}] * 2},
    "confirmed by one number": {"confirmed": [1]},
    "confirmed by text": {"confirmed": "ab"},
    "storage of 2": {"storage": 2},
    "a claim that is none": {"claim": None},
    "a field too many": {"more": 1},
}


@pytest.fixture
def slot() -> Iterator[Slot]:
    names = Names(HASH)
    made = Slot.create(names.segment(1, 0, 1), 10_000)
    assert made.change("rank", made.word(), State.FILLING)
    made.put_header(GOOD)
    assert made.change("rank", made.word(), State.READY, ATTEMPT)
    yield made
    made.close()
    for file_name in names.shm_files():
        shm.unlink("/" + file_name)


def opened(slot: Slot) -> Slot | None:
    return Slot.open(slot.name)


def test_the_slot_of_these_tests_is_a_snapshot(slot: Slot) -> None:
    found = opened(slot)
    assert found is not None and found.snapshot() == (Word(State.READY, 0, 3, 7), GOOD)
    assert Header.parse(repacked(GOOD)) == GOOD
    found.close()


@pytest.mark.parametrize("what", FAULTY)
def test_a_header_with_a_right_checksum_and_a_wrong_field_is_no_snapshot(slot: Slot, what: str) -> None:
    put_raw_header(slot, repacked(GOOD, **FAULTY[what]))
    found = opened(slot)
    assert found is not None and found.header() is None and found.snapshot() is None
    found.close()


@pytest.mark.parametrize(
    "junk", [b"\xc1", b"\x01", b"\x90", b"\x80", b"\xa1x", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff"]
)
def test_a_header_that_is_no_header_is_no_snapshot(slot: Slot, junk: bytes) -> None:
    put_raw_header(slot, junk)
    assert slot.header() is None and Header.parse(junk) is None


def test_any_flipped_bit_of_the_header_page_is_another_word_no_slot_or_no_snapshot(slot: Slot) -> None:
    """Magic, version, state word, progress, capacity, flags and the references to both records; all 64 bytes."""
    for position in range(64):
        for bit in range(8):
            slot.memory[position] ^= 1 << bit
            found = opened(slot)
            if found is not None:
                found.snapshot()
                found.view()
                found.error()
                found.flags()
                found.progress()
                assert found.capacity <= 12288
                found.close()
            slot.memory[position] ^= 1 << bit
    assert slot.snapshot() is not None


@pytest.mark.parametrize("state", sorted(set(range(256)) - STATES.keys())[::31])
def test_a_state_that_does_not_exist_is_no_snapshot_cannot_be_changed_and_is_dropped(slot: Slot, state: int) -> None:
    other = opened(slot)
    assert other is not None
    known = {slot.name: other}
    slot.memory[16 + 7] = state
    assert slot.word().state is State.FREE and slot.snapshot() is None and not slot.sound()
    assert not slot.change("rank", slot.word(), State.FILLING)
    assert open_all([slot.name], known) == {}
    other.close()


def test_a_capacity_beyond_the_segment_is_never_believed(slot: Slot) -> None:
    _C.store(slot.memory, 32, 1 << 40)
    assert slot.capacity == 12288 and opened(slot) is None


def test_an_error_record_of_junk_is_no_error(slot: Slot) -> None:
    for junk in (b"\xc1", b"\x01", b"\x90", b"\x81\xa4rank\xa1x", b"\x91" * 2000, msgpack.packb({"rank": "x"})):
        slot._put_record(4096, 56, junk)
        assert slot.error() is None


PAGES: list[Any] = [
    7, "x", None, [], {"pid": "x"}, {"pid": 2**64 - 1}, {"pid": True}, {"entered": 7}, {"entered": [1]},
    {"entered": ["a", "b"]}, {"label": "text"}, {"label": 7}, {"outcome": 7}, {"reason": b"x"}, {"goodbye": 1},
    {"run": None}, {"slots": 1.5}, {"generation": [1]}, {"epoch": "x"}, {"outcomes": 7},
    {"outcomes": [7]}, {"outcomes": [{}]}, {"outcomes": ["x"]}, {"outcomes": [b"\xc1"]},
    {"outcomes": [msgpack.packb({})]}, {"outcomes": [msgpack.packb({"order": 7, "run": "", "status": ""})]},
    {"outcomes": [msgpack.packb({"order": [1, 2], "run": "", "status": "", "missing": "x"})]},
    {"ready": 2}, {"version": 1},
]  # fmt: skip


@pytest.mark.parametrize("junk", PAGES, ids=repr)
def test_a_control_page_of_wrong_types_is_no_record(junk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Names(HASH).rank_control(0)
    page = Page.own(name)
    try:
        monkeypatch.setattr(control, "_pack", lambda record: msgpack.packb(junk))
        page.write(RankPage())
        for kind in (RankPage, SaverPage):
            if not isinstance(junk, dict) or junk.keys() <= {spec.name for spec in fields(kind)}:
                assert page.read(kind) is None
    finally:
        page.close()
        shm.unlink(name)


def test_any_flipped_bit_of_a_control_page_is_the_record_an_older_one_or_none() -> None:
    name = Names(HASH).rank_control(0)
    page = Page.own(name)
    old, new = RankPage(rank=1, reason="old"), RankPage(rank=2, reason="new")
    page.write(old)
    page.write(new)
    memory = page._mapping.memory
    try:
        for position in [*range(24), *range(4096, 4140), *range(34816, 34860)]:
            for bit in range(8):
                memory[position] ^= 1 << bit
                page._last = (0, None)
                assert page.read(RankPage) in (new, old, None)
                memory[position] ^= 1 << bit
        for counter in (2**64 - 1, 2**64 - 2, 2**63):  # the writer goes on, whatever stands there
            _C.store(memory, 8, counter)
            for _ in range(3):
                page.write(new)
                assert page.read(RankPage) == new
    finally:
        page.close()
        shm.unlink(name)


# -- real ranks and savers -------------------------------------------------------------------------------------------


def segments(lab: Lab) -> list[SegmentName]:
    return lab.names().segments()


def spoil(name: SegmentName, **fields: Any) -> None:
    """Change fields of a sealed header behind everybody's back, with a right checksum."""
    slot = Slot.open(name)
    assert slot is not None
    header = slot.header()
    assert header is not None
    put_raw_header(slot, repacked(header, **fields))
    slot.close()


def held(lab: Lab, step: int) -> SegmentName:
    for name in segments(lab):
        slot = Slot.open(name)
        found = slot.snapshot() if slot else None
        if slot is not None:
            slot.close()
        if found is not None and found[1].attempt.step == step:
            return name
    raise AssertionError(f"no slot holds step {step}")


def start(lab: Lab, **options: Any) -> Process:
    return ready([lab.rank(obeys, options)])[0]


@pytest.mark.parametrize("what", ["data", "header", "beyond", "state", "magic", "names", "root"])
def test_a_damaged_snapshot_is_not_restored_and_the_next_older_one_is(lab: Lab, what: str) -> None:
    rank = start(lab, saver={"linger_s": 60.0})
    for step in (1, 2, 3):
        assert do(rank, "memory" if step > 1 else "storage", step=step)["error"] == ""
        if step == 1:
            assert do(rank, "result", step=1)["error"] == ""
    rank.kill()
    name = held(lab, 3)
    path = Path("/dev/shm" + str(name))
    if what in ("data", "header", "state", "magic"):
        position = {"data": DATA_OFFSET + 5000, "header": 8300, "state": 23, "magic": 0}[what]
        with open(path, "r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 0x80]))
    elif what == "beyond":
        spoil(name, files=[("rank0.pt", 0, 1 << 33, 0, "shard")])
    elif what == "names":
        spoil(name, files=[("../../rank0.pt", 0, 10, 0, "shard")])
    else:
        spoil(name, root=str(lab.dir), commit_dir=str(lab.dir / "global_step3"))
    again = start(lab)
    said = do(again, "restore")
    assert said["error"] == "" and said["whole"] and said["step"] == 2, said
    # Once in memory, and once more on disk if the saver was faster with it than the restart.
    assert what != "data" or said["skipped"] in (1, 2), "a snapshot that was skipped is not told"
    assert do(again, "storage", step=4)["error"] == ""
    assert do(again, "result", step=4)["error"] == ""
    leave([again])
    assert not (lab.dir / "global_step3").exists() and not (lab.dir.parent / "rank0.pt").exists()
    until(lambda: not lab.savers(), 15)
    lab.clear()


@pytest.mark.parametrize("what", ["names", "root", "directory"])
def test_a_queued_slot_with_a_hostile_header_is_given_up_told_and_writes_nowhere(lab: Lab, what: str) -> None:
    """A slot whose header says to write elsewhere, queued for a saver that starts only then."""
    rank = start(lab, saver={"linger_s": 60.0})
    assert do(rank, "storage", step=1)["error"] == "" and do(rank, "result", step=1)["error"] == ""
    assert do(rank, "memory", step=2)["error"] == ""
    name = held(lab, 2)
    before = sorted(os.listdir(lab.dir)), sorted(os.listdir(lab.root))
    pid = lab.saver()
    assert pid is not None
    os.kill(pid, 19)
    fields: dict[str, Any] = {
        "names": {"files": [("../../../escaped.pt", 0, 10, 0, "shard")]},
        "root": {"root": str(lab.dir), "commit_dir": str(lab.dir / "global_step2")},
        "directory": {"commit_dir": str(lab.dir / "elsewhere")},
    }[what]
    spoil(name, **fields)
    slot = Slot.open(name)
    assert slot is not None
    assert slot.change("rank", slot.word(), State.QUEUED)
    kill(pid)
    assert do(rank, "storage", step=3)["error"] == ""
    assert do(rank, "result", step=3)["error"] == ""  # starts another saver
    until(lambda: slot.word().state not in LEASED, 20, "the slot was given up")
    slot.close()
    assert do(rank, "storage", step=4)["error"] == ""
    assert do(rank, "result", step=4)["error"] == ""
    log = lab.saver_log()
    assert "was damaged in shared memory" in log and "Traceback" not in log, log
    after = sorted(os.listdir(lab.dir)), sorted(set(os.listdir(lab.root)) - {"global_step3", "global_step4", "latest"})
    assert set(after[1]) <= set(before[1]) and after[0] == before[0], (before, after)
    assert not Path(lab.root).parent.joinpath("escaped.pt").exists()
    leave([rank])


def test_a_saver_survives_random_bytes_in_every_header_and_page_of_its_node(lab: Lab) -> None:
    dice = random.Random(5)
    rank = start(lab)
    assert do(rank, "storage", step=1)["error"] == "" and do(rank, "result", step=1)["error"] == ""
    assert do(rank, "memory", step=2)["error"] == ""
    saver = lab.saver()
    names = lab.names()
    planted = []
    for number in range(5, 12):  # ranks and slots that never were, full of junk with a right magic
        segment = Path("/dev/shm" + str(names.segment(number, 0, 1)))
        body = bytearray(dice.randbytes(DATA_OFFSET + 8192))
        body[:16] = b"CKPTSLOT" + (1).to_bytes(8, "little")
        body[16:24] = bytes(7) + bytes([dice.choice(sorted(STATES))])
        body[32:40] = (4096).to_bytes(8, "little")
        segment.write_bytes(body)
        segment.chmod(0o600)
        page = Path("/dev/shm" + names.rank_control(number))
        page.write_bytes(b"CKPTPAGE" + dice.randbytes(65528))
        page.chmod(0o600)
        planted += [segment, page]
    own = Page.find(names.rank_control(20))
    assert own is None
    page20 = Page.own(names.rank_control(20))
    page20.write(replace(RankPage(rank=20, outcome="failed"), label=b"\x93no header", run="c" * 16, entered=(1, 1)))
    page20.close()
    assert do(rank, "memory", step=3)["error"] == ""
    assert do(rank, "storage", step=4)["error"] == "" and do(rank, "result", step=4)["error"] == ""
    assert lab.saver() == saver, "the saver died of what it read"
    assert "Traceback" not in lab.saver_log()
    leave([rank])
    until(lambda: not lab.savers() and not lab.left(), 20, "the saver leaves, and takes the junk of its user along")
