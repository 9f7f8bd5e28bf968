"""The zip layout of a ``.pt`` file: where each header, record and directory entry goes. Knows no torch and no pickle.

::

    local header 0 | tensor record 0 | local header 1 | … | small records | directory | end records

Stored, never compressed; the data of every record starts on a multiple of 64 bytes, so that it can be mapped and used
in place. Tensor records come first: their offsets depend on their sizes alone, and the small records (the pickle) may
grow by a byte without moving them. There are no data descriptors and **no ``.format_version`` record**: where it finds
one, torch may compute the offsets of the others itself, as its own writer would have placed them, instead of asking
the directory (``torch/serialization.py``, ``_load``), and so read our layout wrong.

Sources: PKWARE APPNOTE.TXT 4.3.7 (local header), 4.3.12 (directory), 4.3.14-16 (end records), 4.5.3 (zip64);
``caffe2/serialize/inline_container.cc`` for the names a reader looks for and the ``FB`` padding field.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from ckpt_engine import _C

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGNMENT = 64
_FOLDER = b"archive/"  # what torch calls the top folder when it writes to a buffer; readers take any
_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
_ASCII_DATE = 33  # 1980-01-01, the oldest date a zip can say: equal states give equal bytes
_ZIP64_FIELD = 1
_PADDING_FIELD = 0x4246  # "FB", as torch pads
_PLAIN, _ZIP64 = 10, 45  # version needed to extract: 1.0 and 4.5

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_LOCAL_CRC = 14  # position of the CRC in a local header
_ENTRY_CRC = 16  # … and in a directory entry


class Records:
    """Where n tensor records ``data/0`` … ``data/<n-1>`` of the given sizes lie in a file.

    A pure function of the sizes, never changed after it was built: images of equal layout share one.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = array("Q", sizes)
        self.offsets = array("Q")  # of the data of each record in the file
        self._header_at = array("Q")
        self._header_nbytes = array("Q")
        self._header_crcs = array("Q")
        self._entry_crcs = array("Q")
        headers, directory = bytearray(), bytearray()
        end = 0
        for number, nbytes in enumerate(sizes):
            name = b"%sdata/%d" % (_FOLDER, number)
            header = _local_header(name, nbytes, end)
            self._header_at.append(end)
            self._header_nbytes.append(len(header))
            self._header_crcs.append(len(headers) + _LOCAL_CRC)
            self._entry_crcs.append(len(directory) + _ENTRY_CRC)
            headers += header
            directory += _directory_entry(name, nbytes, end)
            end += len(header)
            self.offsets.append(end)
            end += nbytes
        self.end = end
        self._headers = bytes(headers)
        self._directory = bytes(directory)
        self._lengths = array("Q", bytes(16 * len(self.sizes)))
        self._lengths[0::2] = self._header_nbytes
        self._lengths[1::2] = self.sizes

    def __len__(self) -> int:
        return len(self.sizes)


class Archive:
    """One file: the tensor records, then the small records with their bytes, then the directory."""

    def __init__(self, records: Records, small: Sequence[tuple[str, bytes]]) -> None:
        tail, directory = bytearray(), bytearray(records._directory)
        for text, data in small:
            name, crc, start = _FOLDER + text.encode("ascii"), _C.crc32(data), records.end + len(tail)
            tail += _local_header(name, len(data), start, crc)
            tail += data
            directory += _directory_entry(name, len(data), start, crc)
        self._records = records
        self._directory_at = len(tail)
        tail += directory
        tail += _end_records(len(records) + len(small), records.end + self._directory_at, len(directory))
        self._tail = tail
        self.nbytes = records.end + len(tail)

    def finish(self, slot: Buffer, base: int, crcs: Buffer) -> int:
        """Write everything but the tensor data at ``slot[base:]`` and return the CRC-32 of the whole file.

        ``crcs``: one uint32 per tensor record, of the data that is in the slot already. No work per record in
        Python loops over the slot: the data is not read again.
        """
        records, n = self._records, len(self._records)
        file = memoryview(slot).cast("B")[base : base + self.nbytes]
        if len(file) < self.nbytes:
            raise ValueError(f"the file needs {self.nbytes} bytes at {base}, the buffer has {len(file)} there")
        if len(memoryview(crcs).cast("B")) != 4 * n:
            raise ValueError(f"{n} records need {4 * n} bytes of CRCs")
        headers = bytearray(records._headers)  # a private copy: images of one layout may finish at the same time
        _C.scatter_u32(headers, records._header_crcs, crcs)
        _C.scatter_u32(memoryview(self._tail)[self._directory_at :], records._entry_crcs, crcs)

        start = _C.address_of(headers) - _LOCAL_CRC
        table = array("Q", bytes(24 * (n + 1)))
        table[0::3] = array("Q", [*map(operator.add, records._header_crcs, repeat(start)), _C.address_of(self._tail)])
        table[1::3] = records._header_at + array("Q", [records.end])
        table[2::3] = records._header_nbytes + array("Q", [len(self._tail)])
        small_crcs = array("I", _C.copy(file, table))

        pieces = array("I", bytes(4 * (2 * n + 1)))
        pieces[0::2] = small_crcs
        pieces[1::2] = array("I", bytes(crcs))
        return _C.crc32_combine(pieces, records._lengths + array("Q", [len(self._tail)]))


def _local_header(name: bytes, nbytes: int, start: int, crc: int = 0) -> bytes:
    """APPNOTE 4.3.7, padded so that the data behind it starts on a multiple of ``ALIGNMENT``."""
    extra = struct.pack("<HHQQ", _ZIP64_FIELD, 16, nbytes, nbytes) if nbytes >= _MAX32 else b""
    padding = -(start + _LOCAL.size + len(name) + len(extra) + 4) % ALIGNMENT
    version, size = (_ZIP64 if extra else _PLAIN), min(nbytes, _MAX32)
    extra += struct.pack("<HH", _PADDING_FIELD, padding) + bytes(padding)
    fixed = _LOCAL.pack(0x04034B50, version, 0, 0, 0, _ASCII_DATE, crc, size, size, len(name), len(extra))
    return fixed + name + extra


def _directory_entry(name: bytes, nbytes: int, start: int, crc: int = 0) -> bytes:
    """APPNOTE 4.3.12; of the zip64 fields only those that do not fit 32 bits, in the order of 4.5.3."""
    wide = [value for value in (nbytes, nbytes, start) if value >= _MAX32]
    extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_FIELD, 8 * len(wide), *wide) if wide else b""
    version, size = (_ZIP64 if wide else _PLAIN), min(nbytes, _MAX32)
    fixed = _ENTRY.pack(
        *(0x02014B50, _ZIP64, version, 0, 0, 0, _ASCII_DATE, crc, size, size, len(name), len(extra)),
        *(0, 0, 0, 0, min(start, _MAX32)),
    )
    return fixed + name + extra


def _end_records(count: int, start: int, nbytes: int) -> bytes:
    """APPNOTE 4.3.14-16: the end of the directory that begins at ``start``, with its zip64 twin where needed."""
    end = b""
    if count >= _MAX16 or start >= _MAX32 or nbytes >= _MAX32:
        end = _END64.pack(0x06064B50, _END64.size - 12, _ZIP64, _ZIP64, 0, 0, count, count, nbytes, start)
        end += _LOCATOR64.pack(0x07064B50, 0, start + nbytes, 1)
    short = min(count, _MAX16)
    return end + _END.pack(0x06054B50, 0, 0, short, short, min(nbytes, _MAX32), min(start, _MAX32), 0)
