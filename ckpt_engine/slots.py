"""Staging buffers: one shared-memory segment per slot, its header, and its state machine.

The header is the truth; queue messages only wake. Layout of a segment, little-endian::

    0      magic "CKPTSLOT"                   40  uint64 flags: 1 cancel asked, 2 breakpoint save, 4 retired
    8      uint64 format version              48  uint32 length, uint32 CRC-32 of the header record
    16     uint64 state word (states.Word)    56  uint32 length, uint32 CRC-32 of the error record
    24     uint64 bytes persisted so far
    32     uint64 capacity in bytes
    4096   error record, msgpack, ≤ 4 KiB: written by the saver before FAILED
    8192   header record, msgpack: written by the rank before READY
    262144 data: the files, each at a multiple of 4096

Who writes what: the rank everything while the slot is FILLING; the saver progress and error record while it is
PERSISTING; the state word by compare-exchange as ``states`` allows. A reader that owns nothing takes nothing: it
reads the word, copies, verifies the CRC and reads the word again; a change means: not a snapshot.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack

from ckpt_engine import _C, shm
from ckpt_engine.errors import CkptError, ConfigError, SlotTooSmall
from ckpt_engine.events import warn_once
from ckpt_engine.header import Header, order_in
from ckpt_engine.manifest import Attempt, Failure
from ckpt_engine.names import SegmentName
from ckpt_engine.states import SNAPSHOT, STATES, Order, SlotView, State, Word, check_transition

_MAGIC = b"CKPTSLOT"
_VERSION = 1
_WORD, _PROGRESS, _CAPACITY, _FLAGS = 16, 24, 32, 40
_HEADER_REF, _ERROR_REF = 48, 56
_ERROR, _HEADER = 4096, 8192
DATA_OFFSET = 262144
_REF = struct.Struct("<II")

CANCEL, BREAKPOINT, RETIRED = 1, 2, 4


class Slot:
    """One slot of one rank, mapped."""

    def __init__(self, name: SegmentName, mapping: shm.Mapping) -> None:
        self.name = name
        self._mapping = mapping
        self._cached: tuple[int, Header] | None = None
        self.before_unmap: Callable[[], None] | None = None

    @classmethod
    def create(cls, name: SegmentName, capacity: int) -> Slot:
        """Reserve a new FREE slot for ``capacity`` bytes of files. Raises ShmFull, FileExistsError."""
        mapping = shm.create(str(name), DATA_OFFSET + -(-capacity // shm.PAGE) * shm.PAGE)
        _C.store(mapping.memory, 8, _VERSION)
        _C.store(mapping.memory, _CAPACITY, mapping.nbytes - DATA_OFFSET)
        _C.fence()
        mapping.memory[: len(_MAGIC)] = _MAGIC
        return cls(name, mapping)

    @classmethod
    def open(cls, name: SegmentName) -> Slot | None:
        """Map an existing slot; None if it is gone, not born or no slot. Raises ConfigError: another user's."""
        mapping = shm.open_existing(str(name))
        if mapping is None:
            return None
        memory = mapping.memory
        whole = mapping.nbytes > DATA_OFFSET and memory[: len(_MAGIC)] == _MAGIC and _C.load(memory, 8) == _VERSION
        if not whole or _C.load(memory, _CAPACITY) > mapping.nbytes - DATA_OFFSET or memory[_WORD + 7] not in STATES:
            mapping.close()
            return None
        return cls(name, mapping)

    @property
    def memory(self) -> Any:
        """The whole segment; files start at ``DATA_OFFSET``."""
        return self._mapping.memory

    @property
    def capacity(self) -> int:
        return min(_C.load(self.memory, _CAPACITY), self._mapping.nbytes - DATA_OFFSET)

    def sound(self) -> bool:
        """False if the state word is damaged: nobody can change it any more."""
        return bool(self.memory[_WORD + 7] in STATES)

    def word(self) -> Word:
        return Word.unpack(_C.load(self.memory, _WORD))

    def change(
        self, actor: str, old: Word, state: State, attempt: Attempt | None = None, *, incarnation: int = -1
    ) -> bool:
        """Compare-exchange ``old`` → ``state``; False if the word is not ``old`` any more.

        Raises CkptError if the change is not ``actor``'s to make.
        """
        check_transition(actor, old.state, state)
        new = Word(
            state,
            old.incarnation if incarnation < 0 else incarnation,
            old.generation if attempt is None else attempt.generation,
            old.seq if attempt is None else attempt.seq,
        )
        _C.fence()  # what was written before is visible before the word, non-temporal stores included
        return _C.compare_exchange(self.memory, _WORD, old.pack(), new.pack())

    def flags(self) -> int:
        return _C.load(self.memory, _FLAGS)

    def set_flags(self, flags: int) -> None:
        """Set bits; each bit has one writer at a time (rank: cancel, retired; saver: breakpoint)."""
        while not _C.compare_exchange(self.memory, _FLAGS, old := self.flags(), old | flags):
            pass

    def clear_for_fill(self) -> None:
        """Forget flags, progress and errors of the last attempt. REQUIRES: FILLING, by us."""
        _C.store(self.memory, _FLAGS, self.flags() & RETIRED)
        _C.store(self.memory, _PROGRESS, 0)
        self.memory[_HEADER_REF : _HEADER_REF + 16] = bytes(16)
        self._cached = None
        _C.fence()

    def put_header(self, header: Header) -> None:
        """REQUIRES: FILLING, by us. Raises SlotTooSmall if the table of files does not fit."""
        data = header.pack()
        if len(data) > DATA_OFFSET - _HEADER:
            raise SlotTooSmall(
                f"the table of {len(header.files)} files needs {len(data)} bytes, a slot header has "
                f"{DATA_OFFSET - _HEADER}: save fewer files per rank (a state dict is one file: {{'model.pt': state}})",
                need_bytes=len(data),
                have_bytes=DATA_OFFSET - _HEADER,
            )
        self._cached = (self._put_record(_HEADER, _HEADER_REF, data), header)

    def header(self) -> Header | None:
        """The header record, if it is whole. Not yet a snapshot: see ``snapshot``."""
        if (found := self._whole_header()) is None:
            return None
        data, crc = found
        if self._cached is not None and self._cached[0] == crc:
            return self._cached[1]
        header = Header.parse(data)
        if header is None or not self._describes_this(header):
            return None
        self._cached = (crc, header)
        return header

    def _whole_header(self) -> tuple[bytes, int] | None:
        return self._record(_HEADER, _HEADER_REF, DATA_OFFSET - _HEADER)

    def _describes_this(self, header: Header) -> bool:
        """Is it of this rank, and does every file lie within the data area? Native code copies from there."""
        room = self._mapping.nbytes - DATA_OFFSET
        inside = all(file.offset + file.nbytes <= room for file in header.files)
        return inside and header.local_rank == self.name.local_rank

    def snapshot(self) -> tuple[Word, Header] | None:
        """The sealed attempt in this slot as of now; None if there is none or it is just changing."""
        word = self.word()
        header = self.header() if word.state in SNAPSHOT else None
        return (word, header) if header is not None and self._still_holds(word, header.attempt.order) else None

    def view(self) -> SlotView:
        """What ``snapshot`` is of, if all the rest of its header is in order: a rank views every slot of its node."""
        word = self.word()
        order = self._order() if word.state in SNAPSHOT else None
        held = order is not None and self._still_holds(word, order)
        state = word.state if held else self.word().state
        return SlotView(self.name.local_rank, self.name.slot, state, order if held else None)

    def _order(self) -> Order | None:
        data, crc = self._whole_header() or (b"", -1)
        if self._cached is not None and self._cached[0] == crc:
            return self._cached[1].attempt.order
        return order_in(data)

    def _still_holds(self, word: Word, order: Order) -> bool:
        """Only the state may have moved, within the snapshot states."""
        now = self.word()
        same = (now.incarnation, now.generation, now.seq) == (word.incarnation, word.generation, word.seq)
        return now.state in SNAPSHOT and same and word.is_of(order)

    @property
    def progress_offset(self) -> int:
        """Offset of the progress word in ``memory``, for ``_C.write_file``."""
        return _PROGRESS

    def reset_progress(self) -> None:
        """REQUIRES: PERSISTING, by the saver."""
        _C.store(self.memory, _PROGRESS, 0)

    def progress(self) -> int:
        return _C.load(self.memory, _PROGRESS)

    def put_error(self, failure: Failure) -> None:
        """REQUIRES: PERSISTING, by the saver."""
        cut = replace(failure, reason=failure.reason[:500], path=failure.path[-500:])  # ≤ 4 bytes a character
        self._put_record(_ERROR, _ERROR_REF, msgpack.packb(cut.to_dict(), unicode_errors="surrogateescape"))

    def error(self) -> Failure | None:
        if (found := self._record(_ERROR, _ERROR_REF, 4096)) is None:
            return None
        with contextlib.suppress(CkptError, ValueError, TypeError, RecursionError, msgpack.UnpackException):
            values: Mapping[str, object] = msgpack.unpackb(found[0], unicode_errors="surrogateescape")
            return Failure.from_dict(values)
        return None

    def unlinked(self) -> bool:
        return self._mapping.unlinked()

    def close(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()
        self._mapping.close()

    def _put_record(self, start: int, ref: int, data: bytes) -> int:
        """The CRC of what was put."""
        crc = zlib.crc32(data)
        self.memory[start : start + len(data)] = data
        self.memory[ref : ref + _REF.size] = _REF.pack(len(data), crc)
        _C.fence()
        return crc

    def _record(self, start: int, ref: int, limit: int) -> tuple[bytes, int] | None:
        """A record and its CRC, if it is whole."""
        length, crc = _REF.unpack_from(self.memory, ref)
        if not 0 < length <= limit:
            return None
        data: bytes = self.memory[start : start + length]
        return (data, crc) if zlib.crc32(data) == crc else None


def open_all(names: list[SegmentName], known: dict[SegmentName, Slot]) -> dict[SegmentName, Slot]:
    """Map what is listed, keep what is mapped already, drop what is gone. A segment of another user is not ours."""
    for gone in [name for name, slot in known.items() if name not in names or slot.unlinked() or not slot.sound()]:
        del known[gone]  # unmapped when the last user, the writer perhaps, lets go
    for name in names:
        try:
            if name not in known and (slot := Slot.open(name)) is not None:
                known[name] = slot
        except ConfigError as error:
            warn_once(str(name), f"{error}; it is left alone")
    return known
