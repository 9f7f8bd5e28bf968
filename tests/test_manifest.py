"""Records check themselves, survive the disk bit for bit, and hostile ones are refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import disk_names
from ckpt_engine.errors import Corrupt
from ckpt_engine.manifest import (
    Attempt,
    Failure,
    FileEntry,
    Lease,
    Manifest,
    Offer,
    Receipt,
    RootId,
    RunClaim,
    Shard,
    ShardRecord,
)
from ckpt_engine.record import Record, digest_of

RUN = "0123456789abcdef"
ATTEMPT = Attempt(3, RUN, 7, 100, "global_step100", "ab" * 8)


def record(rank: int, *names: str, **changes: Any) -> ShardRecord:
    files = tuple(FileEntry(name, 10, 5) for name in names or (f"rank{rank}.pt",))
    facts = {"attempt": ATTEMPT, "world": 2, "node": rank, "nodes": 2, "node_ranks": (rank,), "files": files}
    return ShardRecord(rank=rank, **{**facts, **changes})


def receipts() -> list[Receipt]:
    return [Receipt.of([record(0, "model.pt", "a/b/c.pt")]), Receipt.of([record(1)])]


RECORDS: list[Record] = [
    ATTEMPT,
    replace(ATTEMPT, tag="größe 1 \udcff"),
    FileEntry("a/b.pt", 2**63 - 1, 2**32 - 1, "external"),
    Shard(0, ()),
    record(0),
    record(0, resumed_from=ATTEMPT, layout="node-local"),
    Failure(-1, "disk full", "write", "/x", 28, 10, -1),
    *receipts(),
    Receipt(ATTEMPT, 1, 2, 2, "shared", (), Failure(1, "gone")),
    Manifest.of(receipts()),
    RunClaim(4, RUN, ATTEMPT, 2, 1_700_000_000),
    Offer(4, RUN, 0, (ATTEMPT,)),
    Lease("0" * 16, "", 3),
    RootId("ab"),
]


@pytest.mark.parametrize("one", RECORDS, ids=lambda one: one.kind)
def test_a_record_survives_the_disk_and_a_header(one: Record) -> None:
    assert type(one).from_bytes(one.to_bytes(), "p") == one
    assert type(one).from_dict(json.loads(json.dumps(one.to_dict())), "p") == one


@pytest.mark.parametrize("one", RECORDS, ids=lambda one: one.kind)
def test_every_truncation_and_every_flipped_bit_of_a_record_is_refused(one: Record) -> None:
    data = one.to_bytes()
    for end in range(0, len(data), 7):
        with pytest.raises(Corrupt):
            type(one).from_bytes(data[:end], "p")
    for bit in range(0, 8 * len(data), 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            type(one).from_bytes(bytes(flipped), "p")


def test_same_receipts_in_any_order_give_the_same_manifest_bytes() -> None:
    one, other = receipts()
    assert Manifest.of([one, other]).to_bytes() == Manifest.of([other, one]).to_bytes()


def test_order_is_generation_then_seq_and_never_the_step() -> None:
    late = replace(ATTEMPT, generation=4, seq=0, step=1)
    assert late.order > ATTEMPT.order
    assert replace(ATTEMPT, seq=8).order > ATTEMPT.order


def test_the_id_of_an_attempt_is_parsed_back_from_its_directory() -> None:
    for node in (None, 0, 12345):
        name = disk_names.parse_attempt_dir(disk_names.attempt_dir(ATTEMPT.id, node))
        assert name is not None
        assert (name.order, name.run, name.node, name.id) == (ATTEMPT.order, RUN, node, ATTEMPT.id)


def test_attempts_that_differ_in_any_field_differ_in_digest() -> None:
    others = [
        replace(ATTEMPT, generation=4),
        replace(ATTEMPT, run="f" * 16),
        replace(ATTEMPT, seq=8),
        replace(ATTEMPT, step=101),
        replace(ATTEMPT, tag="x"),
        replace(ATTEMPT, root_id="cd"),
    ]
    assert len({one.digest for one in [ATTEMPT, *others]}) == 7
    assert len(ATTEMPT.digest) == 16


BAD_NAMES = [
    "", ".", "..", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\0b", "x" * 256, "/".join(["d"] * 2500),
    "MANIFEST.json", "MANIFEST-node0001.json", ".attempt-g1-0123456789abcdef-q2", "a/.tmp-1-0123456789abcdef",
    ".shard-00000.json", ".receipt-node0000.json", ".ckpt-root", ".run-3", ".removed-g1-0123456789abcdef-q2.json",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_name_that_leaves_its_directory_or_is_ours_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        FileEntry(name, 1, 1)
    with pytest.raises(Corrupt, match="the/path"):
        FileEntry.from_dict({"name": name, "nbytes": 1, "crc32": 1, "origin": "shard"}, "the/path")


@pytest.mark.parametrize("tag", [*BAD_NAMES, "a/b", "latest"])
def test_a_tag_that_is_not_one_directory_of_the_root_is_refused(tag: str) -> None:
    with pytest.raises(ValueError):
        replace(ATTEMPT, tag=tag)


@pytest.mark.parametrize(
    "make",
    [
        lambda: replace(ATTEMPT, generation=-1),
        lambda: replace(ATTEMPT, seq=2**63),
        lambda: replace(ATTEMPT, step=True),
        lambda: replace(ATTEMPT, step=1.0),
        lambda: replace(ATTEMPT, run="ABCDEF0123456789"),
        lambda: replace(ATTEMPT, root_id=""),
        lambda: FileEntry("a", -1, 0),
        lambda: FileEntry("a", 0, 2**32),
        lambda: FileEntry("a", 0, 0, "elsewhere"),
        lambda: FileEntry("a/b.py", 0, 0, "tool"),
        lambda: record(0, "a", "a"),
        lambda: record(0, "a", "a/b"),
        lambda: record(0, world=0),
        lambda: record(0, node=2),
        lambda: record(0, node_ranks=(1,)),
        lambda: record(0, node_ranks=(0, 0)),
        lambda: record(0, layout="striped"),
        lambda: Receipt.of([record(0, node_ranks=(0, 1))]),
        lambda: Receipt.of([]),
        lambda: Receipt.of([record(0), record(0)]),
        lambda: Receipt.of([record(0), record(1)]),
        lambda: Manifest.of([]),
        lambda: Manifest.of(receipts()[:1]),
        lambda: Manifest.of([receipts()[0], receipts()[0]]),
        lambda: Manifest.of([receipts()[0], Receipt.of([record(1, "model.pt")])]),
        lambda: Manifest.of([receipts()[0], Receipt.of([record(1, attempt=replace(ATTEMPT, seq=8))])]),
        lambda: Manifest.of([receipts()[0], Receipt(ATTEMPT, 1, 2, 2, "shared", (), Failure(1, "no"))]),
        lambda: replace(Manifest.of(receipts()), node=0),
        lambda: RunClaim(3, RUN, ATTEMPT, 1, 0),
    ],
)
def test_a_record_that_contradicts_itself_cannot_be_built(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


def envelope(body: object, **changes: object) -> bytes:
    whole = {"body": body, "checksum": digest_of(body), "format_version": 1, "kind": "manifest", **changes}
    return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()


def test_hostile_manifests_are_refused_by_name_and_never_crash() -> None:
    body = Manifest.of(receipts()).to_dict()
    assert Manifest.from_bytes(envelope(body), "p")
    hostile = [
        b"", b"null", b"[]", b"\xff", b"{" * 100_000, b"[" * 100_000, b"1" * 100_000, b'{"body":NaN}',
        envelope(body, format_version=2), envelope(body, format_version=True), envelope(body, kind="receipt"),
        envelope(body, checksum="0" * 16), envelope(body, more=1), envelope(body) + b"\n",
        envelope({**body, "more": 1}), envelope({**body, "world": 2.0}), envelope({**body, "world": 10**30}),
        envelope({**body, "shards": {}}), envelope({**body, "shards": [[]]}), envelope({**body, "attempt": None}),
        envelope({**body, "shards": body["shards"][:1]}), envelope({**body, "shards": body["shards"] * 2}),
        envelope({key: body[key] for key in body if key != "node"}), envelope([body]), envelope(None),
    ]  # fmt: skip
    for data in hostile:
        with pytest.raises(Corrupt) as caught:
            Manifest.from_bytes(data, "/root/tag/MANIFEST.json")
        assert caught.value.path == "/root/tag/MANIFEST.json"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(JSON, st.sampled_from(RECORDS))
def test_whatever_lies_in_a_field_is_a_record_or_corrupt(junk: object, one: Record) -> None:
    for name in one.to_dict():
        with contextlib.suppress(Corrupt):
            assert isinstance(type(one).from_dict({**one.to_dict(), name: junk}, "p"), type(one))
