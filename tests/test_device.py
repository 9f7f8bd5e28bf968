"""Copies from devices, on a device that is none: its copies happen when somebody waits for them, and not before."""

from __future__ import annotations

import array
import logging
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filling import fill

from ckpt_engine import events, shm
from ckpt_engine.device import Cuda, Lanes, Other
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.slots import DATA_OFFSET, Slot
from ckpt_engine.staging import Fill, Planned

HASH = f"{os.getpid() + 1:016x}"


class Lane:
    """What was started and is not over: an event is the number of copies before it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class Fake:
    """A runtime that notes what it is asked."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.lane = Lane()
        self.did: list[Any] = []

    def register(self, address: int, nbytes: int) -> str:
        self.did.append(("register", nbytes))
        return self.refuses

    def unregister(self, address: int) -> None:
        self.did.append("unregister")

    def begin(self, device: Any) -> Lane:
        self.did.append("begin")
        return self.lane

    def copy(self, target: Any, source: Any, lane: Lane) -> None:
        self.did.append(("copy", source.numel()))
        lane.waiting.append(lambda: target.copy_(source))

    def mark(self, lane: Lane) -> Lane:
        return lane

    def hold(self, device: Any, event: Lane) -> None:
        self.did.append("hold")


class OnDevice:
    """The layout of a file that is nothing but records on a device, one behind the other."""

    def __init__(self, *records: torch.Tensor) -> None:
        self.sources = records
        self.records = len(records)
        self.nbytes = sum(record.numel() for record in records)

    def rows(self, base: int) -> array.array[int]:
        return array.array("Q", [value for _, _, offset in self.device_records() for value in (0, base + offset, 0)])

    def device_records(self) -> list[tuple[int, torch.Tensor, int]]:
        ends = [0]
        for source in self.sources:
            ends.append(ends[-1] + source.numel())
        return [(number, source, ends[number]) for number, source in enumerate(self.sources)]

    def defer(self, owned: object) -> list[int]:
        return list(range(self.records))

    def changed(self, obj: object) -> str:
        return ""

    def finish(self, slot: Any, base: int, crcs: bytes | bytearray) -> int:
        self.crcs = list(array.array("I", bytes(crcs)))
        return zlib.crc32(slot[base : base + self.nbytes])

    def release(self) -> None:
        self.sources = ()


@pytest.fixture
def slot() -> Iterator[Slot]:
    it = Slot.create(SegmentName(HASH, 0, 0, 1), 1 << 20)
    yield it
    it.close()
    for name in Names(HASH).segments():
        shm.unlink(str(name))


@pytest.fixture(autouse=True)
def warnings_anew() -> None:
    events._warned.discard("pinned")


def records(*sizes: int) -> Sequence[torch.Tensor]:
    return [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]


def test_all_is_there_with_its_crc_at_the_return_of_a_blocking_fill(slot: Slot) -> None:
    fake, sources = Fake(), records(100, 5000, 7)
    layout = OnDevice(*sources)
    (row,) = fill(slot, {"a.pt": Planned(layout)}, threads=1, lanes=Lanes(fake))
    data = slot.memory[DATA_OFFSET : DATA_OFFSET + row.nbytes]
    assert data == b"".join(source.numpy().tobytes() for source in sources)
    assert layout.crcs == [zlib.crc32(source.numpy().tobytes()) for source in sources]
    assert [one for one in fake.did if one[0] == "copy"] == [("copy", 5000), ("copy", 100), ("copy", 7)]


def test_late_copies_begin_behind_the_work_of_now_and_hold_back_what_comes_after(slot: Slot) -> None:
    fake, layout = Fake(), OnDevice(*records(100, 5000))
    filling = Fill(slot, {"a.pt": Planned(layout, late=(0, 1))}, Lanes(fake))
    assert fake.did == ["begin"] and filling.late_bytes == 5100
    filling.copy(threads=1)
    assert fake.did == ["begin"], "nothing late was copied before the return"
    filling.copy_late(lambda: 1)
    filling.hold()
    assert [one for one in fake.did if one == "hold"] == ["hold"] and len(fake.lane.waiting) == 2
    filling.await_late(1)
    assert not fake.lane.waiting
    filling.finish()
    assert layout.crcs == [zlib.crc32(source.numpy().tobytes()) for source in layout.sources]


def test_a_late_copy_that_is_given_up_writes_nothing_later(slot: Slot) -> None:
    fake = Fake()
    filling = Fill(slot, {"a.pt": Planned(OnDevice(*records(100)), late=(0,))}, Lanes(fake))
    filling.copy(threads=1)
    filling.copy_late(lambda: 1)
    filling.abandon()
    assert not fake.lane.waiting


def test_a_slot_is_pinned_once_and_given_back_before_it_is_unmapped(slot: Slot) -> None:
    fake = Fake()
    lanes = Lanes(fake)
    for _ in range(3):
        fill(slot, {"a.pt": Planned(OnDevice(*records(10)))}, threads=1, lanes=lanes)
    assert [one for one in fake.did if one[0] == "register"] == [("register", len(slot.memory))]
    slot.close()
    slot.close()
    assert fake.did.count("unregister") == 1


@pytest.mark.parametrize(
    ("refuses", "most", "why"),
    [("cudaHostRegister: out of memory", None, "out of memory"), ("", 1000, "may pin")],
    ids=["the driver refuses", "over the cap"],
)
def test_a_slot_that_cannot_be_pinned_is_filled_and_the_reason_is_told_once(
    slot: Slot, refuses: str, most: int | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake, (source,) = Fake(refuses), records(1000)
    lanes = Lanes(fake, most_bytes=most)
    with caplog.at_level(logging.WARNING, "ckpt_engine"):
        for _ in range(2):
            fill(slot, {"a.pt": Planned(OnDevice(source))}, threads=1, lanes=lanes)
    assert slot.memory[DATA_OFFSET : DATA_OFFSET + 1000] == source.numpy().tobytes()
    assert caplog.text.count("is not pinned") == 1 and why in caplog.text and "pageable" in caplog.text
    slot.close()
    assert "unregister" not in fake.did


def test_each_kind_of_device_gets_its_runtime() -> None:
    lanes = Lanes()
    assert type(lanes.runtime(torch.device("cuda"))) is Cuda
    assert type(lanes.runtime(torch.device("xpu"))) is Other


def test_a_device_that_we_know_nothing_of_is_copied_from_at_once(slot: Slot) -> None:
    (source,) = records(1000)
    fill(slot, {"a.pt": Planned(OnDevice(source))}, threads=1, lanes=Lanes(Other()))
    assert slot.memory[DATA_OFFSET : DATA_OFFSET + 1000] == source.numpy().tobytes()


def test_the_check_for_a_gpu_says_that_there_is_none() -> None:
    """Where there is one, ``benchmarks/gpu_check.py`` is the test."""
    script = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout) == (2, "no GPU\n"), done.stderr
