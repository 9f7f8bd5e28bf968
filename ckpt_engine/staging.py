"""Fill a slot from images: one batched native copy with CRC, then the small bytes. The trainer's door to csrc."""

from __future__ import annotations

import array
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt_engine import _C, shm
from ckpt_engine.events import span
from ckpt_engine.slots import DATA_OFFSET, Slot, SlotFile


class Layout(Protocol):
    """What staging needs of a planned file (``image.Image``; ``Blob`` for plain bytes)."""

    nbytes: int
    records: int

    def rows(self, base: int) -> array.array[int]: ...
    def device_records(self) -> Sequence[tuple[int, Any, int]]: ...
    def finish(self, slot: Any, base: int, crcs: bytes | bytearray) -> int: ...
    def release(self) -> None: ...


class Blob:
    """A file that is just bytes, e.g. a small script."""

    records = 0

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def rows(self, base: int) -> array.array[int]:
        return array.array("Q")

    def device_records(self) -> list[tuple[int, Any, int]]:
        return []

    def finish(self, slot: Any, base: int, crcs: bytes | bytearray) -> int:
        slot[base : base + self.nbytes] = self._data
        return _C.crc32(self._data)

    def release(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Planned:
    """One file of a shard, ready to be copied. ``origin``: see ``manifest.FileEntry``."""

    layout: Layout
    origin: str = "shard"


def space(files: Mapping[str, Planned]) -> int:
    """Bytes of data area that these files need: each starts at a multiple of the page."""
    return sum(_pages(file.layout.nbytes) for file in files.values())


def fill(slot: Slot, files: Mapping[str, Planned], *, threads: int) -> tuple[SlotFile, ...]:
    """Copy all files into ``slot`` and return its table. REQUIRES: FILLING by us, ``space(files)`` ≤ capacity.

    The tensors are read now: whatever happens to them after the return does not change the slot.
    After a crash: the slot is FILLING, the saver frees it.
    """
    bases = _bases(files)
    with span("fill", bytes=sum(file.layout.nbytes for file in files.values()), files=len(files)) as facts:
        begin = time.perf_counter()
        table = array.array("Q")
        for name, file in files.items():
            table.extend(file.layout.rows(bases[name]))
        crcs = bytearray(_C.copy(slot.memory, table, threads=threads))
        done, row = [], 0
        for name, file in files.items():
            mine = crcs[4 * row : 4 * (row + file.layout.records)]
            _copy_from_device(slot, file.layout, bases[name], mine)
            crc = file.layout.finish(slot.memory, bases[name], mine)
            _zero_padding(slot, bases[name], file.layout.nbytes)
            done.append(SlotFile(name, bases[name] - DATA_OFFSET, file.layout.nbytes, crc, file.origin))
            row += file.layout.records
        facts["copy_s"] = round(time.perf_counter() - begin, 6)
    return tuple(done)


def _pages(nbytes: int) -> int:
    return -(-nbytes // shm.PAGE) * shm.PAGE


def _bases(files: Mapping[str, Planned]) -> dict[str, int]:
    bases, base = {}, DATA_OFFSET
    for name, file in files.items():
        bases[name] = base
        base += _pages(file.layout.nbytes)
    return bases


def _copy_from_device(slot: Slot, layout: Layout, base: int, crcs: bytearray) -> None:
    """Records that are not in host memory: copied by torch, then summed in a second pass over the slot."""
    records = layout.device_records()
    if not records:
        return
    import torch

    for index, source, offset in records:
        start, size = base + offset, source.numel()
        torch.frombuffer(slot.memory, dtype=torch.uint8, offset=start, count=size).copy_(source)
        crc = _C.crc32(slot.memory, offset=start, nbytes=size)
        crcs[4 * index : 4 * index + 4] = crc.to_bytes(4, "little")


def _zero_padding(slot: Slot, base: int, nbytes: int) -> None:
    end = base + nbytes
    slot.memory[end : base + _pages(nbytes)] = bytes(base + _pages(nbytes) - end)
