"""The native contract: raw bytes in, raw bytes out, the GIL released at the door.

A *buffer* is anything with the writable (or, where marked, readable) C-contiguous buffer protocol:
the ``mmap`` of a slot, a ``bytearray``, a ``memoryview``. Every offset and length is checked against
the buffer before a byte moves; nonsense raises ``ValueError`` (or ``OverflowError`` for a number that
does not fit 64 bits), never a crash. CRC-32 is the zip polynomial (APPNOTE.TXT 4.4.7, reflected
0xEDB88320): equal to ``zlib.crc32``.
"""

from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

def cpu_kernels() -> list[str]:
    """Copy kernels this CPU can run, best first, e.g. ``["avx512", "avx2", "portable"]``."""

def copy(
    dst: Buffer, table: Buffer, *, threads: int = 1, kernel: str = "", crc: bool = True, fresh: bool = False
) -> bytes:
    """Copy n ranges into ``dst`` in one pass and return their CRC-32s (n little-endian uint32).

    ``table``: n rows of three native uint64: source address, offset in ``dst``, nbytes. Rows may be
    empty (nbytes 0: address ignored, CRC 0). Rows must not overlap in ``dst`` (not checked). With
    ``crc=False`` only the copy is done and the result is empty. ``threads``: 1..64, this call's thread
    included. ``kernel``: one of ``cpu_kernels()``; empty = best. ``fresh``: nobody has touched the
    memory of ``dst``; that is done first then, a piece at a time, since faults within the copy take
    longer. All bytes are globally visible (store fence) when it returns.

    Raises ValueError: row out of ``dst``, null or wrapping source address, table not n*24 bytes, bad
    thread count or unknown kernel. REQUIRES: every source range is readable memory.
    """

def crc32(data: Buffer, crc: int = 0, *, offset: int = 0, nbytes: int = -1, threads: int = 1) -> int:
    """CRC-32 of ``data[offset:offset+nbytes]`` (-1: to the end) continued from ``crc``; data is only read."""

def crc32_combine(crcs: Buffer, lengths: Buffer) -> int:
    """CRC-32 of the concatenation of n pieces. ``crcs``: n uint32; ``lengths``: n uint64 (bytes)."""

def address_of(data: Buffer) -> int:
    """Address of the first byte of a buffer (read-only buffers allowed)."""

def scatter_u32(dst: Buffer, positions: Buffer, values: Buffer) -> None:
    """Write ``values[i]`` (uint32, little-endian) at byte ``positions[i]`` (uint64, any alignment) of ``dst``."""

def free_of_links(path: str | bytes) -> bool:
    """True if ``path`` exists, and neither it nor a directory on the way is a symbolic link; False if that is not so,
    or cannot be asked here (before Linux 5.6).
    """

def hole_marker(
    bare: tuple[type, ...],
    asked: tuple[type, ...],
    order: list[Any],
    mark: int,
    ask: Callable[[Any], int | None],
) -> Callable[[Any], int | None]:
    """``persistent_id`` for a pickler. An object whose class is one of ``bare`` and that has no attributes is appended
    to ``order``, and ``mark`` returned; of one whose class is among ``asked``, what ``ask(object)`` returns; None for
    all others. Classes count, not their subclasses.
    """

def load(word: Buffer, offset: int) -> int:
    """Atomic acquire load of the uint64 at ``offset`` (8-aligned) of a buffer."""

def store(word: Buffer, offset: int, value: int) -> None:
    """Atomic release store of a uint64."""

def compare_exchange(word: Buffer, offset: int, expected: int, desired: int) -> bool:
    """Sequentially consistent compare-and-swap of a uint64; True if it was ``expected``."""

def fence() -> None:
    """Full memory fence, non-temporal stores included."""

def write_file(
    path: str,
    source: Buffer,
    *,
    offset: int,
    nbytes: int,
    direct: bool = True,
    chunk_bytes: int = 8 << 20,
    threads: int = 1,
    mode: int = 0o666,
    progress: Buffer | None = None,
    progress_offset: int = 0,
    limit: Buffer | None = None,
) -> bool:
    """Create ``path`` (O_CREAT | O_EXCL | O_CLOEXEC, ``mode`` under the umask), write
    ``source[offset:offset+nbytes]`` and fsync it.

    O_DIRECT straight from ``source`` where ``direct`` and its address are 4096-aligned and the file
    system allows it (the last partial block goes out padded with zeros, then ftruncate to ``nbytes``);
    buffered with early write-back elsewhere. Returns True if O_DIRECT was used. ``threads``: chunks that are
    under way at the same time; the space of a file of several chunks is reserved before the first (ENOSPC). After
    each write its bytes are *added* to the uint64 ``progress[progress_offset]`` (atomic). ``limit``: a uint64, bytes
    per second from now on, 0 = no limit; it may be changed meanwhile. EINTR and short writes are continued. Raises
    OSError with errno and filename of the call that failed (the file is left for the caller to unlink).

    After a crash: the file may hold anything; it is a temporary name and means nothing.
    """

def read_file(path: str, dst: Buffer, *, offset: int, nbytes: int, threads: int = 1) -> int:
    """Read exactly ``nbytes`` of ``path`` from its start into ``dst[offset:]``; returns their CRC-32.

    Reads in parallel, with the CRC in the same pass: what is in the page cache from there, the rest by O_DIRECT
    where address and file system allow it. Fresh memory is touched on the way. Raises OSError (errno kept),
    EOFError if the file is shorter than ``nbytes``, ValueError if it does not fit ``dst``.
    """

class Populate:
    """Touch the pages of a writable mapping in the background, so that the first fill costs no faults.

    Runs in its own thread without the GIL, in pieces of 16 MiB (MADV_POPULATE_WRITE; a byte-wise
    read-and-write-back with atomics where the kernel has no such advice, since the memory may be in use).
    Failures (ENOMEM, EFAULT) end it quietly: populating is an optimisation.
    """

    def __init__(self, buffer: Buffer, *, offset: int = 0, nbytes: int = -1) -> None: ...
    def stop(self) -> None:
        """End early and wait for the thread; idempotent. Called by the destructor."""
    def wait(self, timeout_s: float) -> bool:
        """True when all pages were touched (or it gave up) within ``timeout_s``."""
    def done_bytes(self) -> int: ...
