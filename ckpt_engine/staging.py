"""Fill a slot from images: native copies with CRC, then the small bytes. The trainer's door to csrc."""

from __future__ import annotations

import array
import bisect
import contextlib
import ctypes
import itertools
import mmap
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt_engine import _C, shm
from ckpt_engine.device import Lanes, Ticket
from ckpt_engine.errors import StagingError
from ckpt_engine.events import span
from ckpt_engine.header import SlotFile
from ckpt_engine.slots import DATA_OFFSET, Slot

PIECE = 32 << 20
"""Bytes of one native call in the background: a guard waits for one at most before all threads help."""


class Layout(Protocol):
    """What staging needs of a planned file (``image.Image``; ``Blob`` for plain bytes)."""

    nbytes: int
    records: int

    def rows(self, base: int) -> array.array[int]: ...
    def device_records(self) -> Sequence[tuple[int, Any, int]]: ...
    def defer(self, owned: Container[int]) -> list[int]: ...
    def changed(self, obj: object) -> str: ...
    def finish(self, slot: Any, base: int, crcs: bytes | bytearray) -> int: ...
    def release(self) -> None: ...


class Blob:
    """A file that is just bytes, or lies in memory already: copied like a tensor, as one record."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data: bytes | mmap.mmap = data
        self.nbytes = len(data)
        self.records = 1 if data else 0

    def rows(self, base: int) -> array.array[int]:
        return array.array("Q", [_C.address_of(self._data), base, self.nbytes] if self.records else [])

    def device_records(self) -> list[tuple[int, Any, int]]:
        return []

    def defer(self, owned: Container[int]) -> list[int]:
        return []

    def changed(self, obj: object) -> str:
        return ""

    def finish(self, slot: Any, base: int, crcs: bytes | bytearray) -> int:
        return int.from_bytes(crcs, sys.byteorder)

    def release(self) -> None:
        self._data = b""


@dataclass(frozen=True, slots=True)
class Planned:
    """One file of a shard, ready to be copied. ``origin``: see ``manifest.FileEntry``.

    ``late``: the records that may be copied while the training goes on, until their guard; ``state`` holds them.
    """

    layout: Layout
    origin: str = "shard"
    late: Sequence[int] = ()
    state: Any = None


def space(files: Mapping[str, Planned]) -> int:
    """Bytes of data area that these files need: each starts at a multiple of the page."""
    return sum(_pages(file.layout.nbytes) for file in files.values())


class Fill:
    """One slot on its way to its table: ``copy`` what cannot wait; ``copy_late``, ``await_late`` the rest; ``finish``.

    The last three may run in another thread than the first. REQUIRES: the slot is FILLING by us, with ``space(files)``.
    After a crash: it is FILLING, the saver frees it. ``least``: fewer late bytes than this are copied at once.
    ``verify``: the late ones on the host are read now, and their CRC compared with that of their copy.
    """

    def __init__(
        self, slot: Slot, files: Mapping[str, Planned], lanes: Lanes, *, least: int = 1, verify: bool = False
    ) -> None:
        self._slot = slot
        self._files = files
        self._bases = _bases(files)
        self._rows = array.array("Q")
        self._first: dict[str, int] = {}  # number of the first record of each file
        devices = []
        for name, file in files.items():
            self._first[name] = first = len(self._rows) // 3
            self._rows.extend(file.layout.rows(self._bases[name]))
            devices += [(first + n, self._bases[name] + at, source) for n, source, at in file.layout.device_records()]
        self._crcs = array.array("I", bytes(len(self._rows) // 3 * 4))
        self._late = [self._first[name] + record for name, file in files.items() for record in file.late]
        self.late_bytes = sum(self._rows[3 * row + 2] for row in self._late)
        late = set(self._late)
        self.late_bytes += sum(copy[2].numel() for copy in devices if copy[0] in late)
        if self.late_bytes < least:
            self._late, self.late_bytes, late = [], 0, set()
        self._now = lanes.ticket(slot, [copy for copy in devices if copy[0] not in late])
        self._later = lanes.ticket(slot, [copy for copy in devices if copy[0] in late])
        self._planned = {row: _crc_of_memory(self._rows[3 * row], self._rows[3 * row + 2]) for row in late if verify}

    def copy(self, *, threads: int) -> None:
        """Copy all that is not late."""
        rows = self._rows[:]
        for row in self._late:
            rows[3 * row + 2] = 0
        with span("fill", bytes=space(self._files), files=len(self._files), late=self.late_bytes) as facts:
            begin = time.perf_counter()
            self._crcs = array.array("I", _C.copy(self._slot.memory, rows, threads=threads))
            self._now.issue()
            self._sum(self._now, threads)
            facts["copy_s"] = round(time.perf_counter() - begin, 6)

    def copy_late(self, threads: Callable[[], int]) -> None:
        """Copy what is late with ``threads()`` threads, piece by piece; what is on a device is on its way then.

        Raises StagingError, with the name of the tensor, if one was written to meanwhile and that can be seen.
        """
        self._later.issue()
        for first, end, done, nbytes in _pieces([self._rows[3 * row + 2] for row in self._late], PIECE):
            rows = self._late[first:end]
            table = array.array("Q", itertools.chain.from_iterable(self._rows[3 * row : 3 * row + 3] for row in rows))
            if nbytes:
                table = array.array("Q", [table[0] + done, table[1] + done, nbytes])
            crcs = array.array("I", _C.copy(self._slot.memory, table, threads=threads()))
            if done:
                pair = array.array("I", [self._crcs[rows[0]], crcs[0]])
                crcs[0] = _C.crc32_combine(pair, array.array("Q", [0, nbytes]))
            for row, crc in zip(rows, crcs, strict=True):
                self._crcs[row] = crc
        self._refuse_changes()

    def hold(self) -> None:
        """Let what a device does from now on wait for its copies. REQUIRES: ``copy_late`` has returned."""
        self._later.hold()

    def await_late(self, threads: int) -> None:
        """Wait for the devices. The sources are not needed any more then."""
        self._sum(self._later, threads)

    def abandon(self) -> None:
        """Nothing is written into the slot any more."""
        for ticket in (self._now, self._later):
            with contextlib.suppress(RuntimeError):  # of the device; perhaps what is being told of already
                ticket.synchronize()

    def finish(self) -> tuple[SlotFile, ...]:
        """Write the small bytes of each file."""
        done = []
        for name, file in self._files.items():
            first, base = self._first[name], self._bases[name]
            mine = self._crcs[first : first + file.layout.records].tobytes()
            crc = file.layout.finish(self._slot.memory, base, mine)
            _zero_padding(self._slot, base, file.layout.nbytes)
            done.append(SlotFile(name, base - DATA_OFFSET, file.layout.nbytes, crc, file.origin))
        return tuple(done)

    def _sum(self, ticket: Ticket, threads: int) -> None:
        for row, offset, nbytes in ticket.wait():
            self._crcs[row] = _C.crc32(self._slot.memory, offset=offset, nbytes=nbytes, threads=threads)

    def _refuse_changes(self) -> None:
        """Raises StagingError if the copy is not what was planned, as far as that can be told."""
        for name, file in self._files.items():
            where = file.layout.changed(file.state) if file.late else ""
            rows = [self._first[name] + record for record in file.late if self._planned]
            unlike = [row - self._first[name] for row in rows if self._planned[row] != self._crcs[row]]
            if where or unlike:
                raise StagingError(
                    f"{name}: {where or f'tensor record {unlike[0]}'} was written to while it was copied, so this "
                    "snapshot is given up. Nothing but a guarded optimizer may change what is saved before "
                    "wait_staged(); or use staging='blocking'"
                )


def _pieces(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int, int, int]]:
    """(first, end, 0, 0): these numbers together, ``most`` bytes in all; (n, n + 1, start, nbytes): a part of one."""
    ends = [0, *itertools.accumulate(sizes)]
    first = 0
    while first < len(sizes):
        end = bisect.bisect_right(ends, ends[first] + most) - 1
        if end == first:
            end = first + 1
            step = -(-sizes[first] // -(-sizes[first] // most))  # parts of one size
            step = -(-step // shm.PAGE) * shm.PAGE
            for start in range(0, sizes[first], step):
                yield first, end, start, min(step, sizes[first] - start)
        else:
            yield first, end, 0, 0
        first = end


def _crc_of_memory(address: int, nbytes: int) -> int:
    return _C.crc32((ctypes.c_char * nbytes).from_address(address)) if nbytes else 0


def _pages(nbytes: int) -> int:
    return -(-nbytes // shm.PAGE) * shm.PAGE


def _bases(files: Mapping[str, Planned]) -> dict[str, int]:
    bases, base = {}, DATA_OFFSET
    for name, file in files.items():
        bases[name] = base
        base += _pages(file.layout.nbytes)
    return bases


def _zero_padding(slot: Slot, base: int, nbytes: int) -> None:
    end = base + nbytes
    slot.memory[end : base + _pages(nbytes)] = bytes(base + _pages(nbytes) - end)
