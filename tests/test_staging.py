"""Fill: every file at a page, every byte summed as it is copied, nothing of the last fill left between them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import torch
from filling import fill
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import image, shm
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.slots import DATA_OFFSET, Slot
from ckpt_engine.staging import Blob, Planned, space

HASH = f"{os.getpid():016x}"


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    it = Slot.create(SegmentName(HASH, 0, 0, 1), 1 << 20)
    yield it
    it.close()
    for name in Names(HASH).segments():
        shm.unlink(str(name))


@given(st.lists(st.binary(max_size=9000), max_size=6))
@settings(max_examples=30, deadline=None)
def test_files_lie_at_pages_with_their_crc_and_zeros_after_them(slot: Slot, contents: list[bytes]) -> None:
    files = {f"f{number}": Planned(Blob(data), "external") for number, data in enumerate(contents)}
    need = space(files)
    slot.memory[DATA_OFFSET : DATA_OFFSET + need] = b"\xee" * need
    table = fill(slot, files, threads=2)
    end = 0
    for data, row in zip(contents, table, strict=True):
        assert (row.offset, row.nbytes, row.crc32, row.origin) == (end, len(data), zlib.crc32(data), "external")
        start = DATA_OFFSET + row.offset
        assert slot.memory[start : start + len(data)] == data
        end = row.offset + -(-len(data) // 4096) * 4096
        assert not any(slot.memory[start + len(data) : DATA_OFFSET + end])
    assert end == need


def test_tensors_are_copied_at_the_call_and_the_file_is_what_its_crc_says(slot: Slot) -> None:
    tensor = torch.arange(10_000, dtype=torch.float32)
    planned = Planned(image.plan({"w": tensor}, "m.pt", image.PlanCache()))
    (row,) = fill(slot, {"m.pt": planned}, threads=2)
    planned.layout.release()
    start = DATA_OFFSET + row.offset
    data = slot.memory[start : start + row.nbytes]
    tensor.zero_()
    assert zlib.crc32(data) == row.crc32
    assert slot.memory[start : start + row.nbytes] == data


def test_nothing_to_save_is_a_table_without_rows(slot: Slot) -> None:
    assert space({}) == 0 and fill(slot, {}, threads=1) == ()
