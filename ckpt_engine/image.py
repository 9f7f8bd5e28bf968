"""objects → ``.pt`` layout; with ``pt_pickle``, ``pt_layout`` and ``pt_zip`` all that knows the torch zip."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import mmap
import operator
import pickle
import reprlib
import sys
from array import array
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch._weights_only_unpickler
from torch import Tensor, UntypedStorage

from ckpt_engine import config
from ckpt_engine.errors import RestoreError, UnsupportedLeaf
from ckpt_engine.pt_layout import Layout, TwoTypes
from ckpt_engine.pt_pickle import Survey, survey
from ckpt_engine.pt_zip import Archive

if TYPE_CHECKING:
    from typing_extensions import Buffer

_cdata_of = operator.attrgetter("_cdata")
_version_of = operator.attrgetter("_version")


class Image:
    """The layout of one file, with everything but the bytes of its tensors; made by ``plan``.

    Holds the storages until ``release``, so that their addresses stay valid. Whoever changes their bytes before they
    are copied changes the snapshot.
    """

    def __init__(self, archive: Archive, layout: Layout, found: Survey, addresses: list[int]) -> None:
        self.nbytes = archive.nbytes
        self.records = len(layout.records)
        self._archive = archive
        self._layout = layout
        self._found: Survey | None = found
        self._storages = found.storages
        self._addresses = addresses
        self._watched: list[Tensor] = []
        self._versions: list[int] = []

    def rows(self, base: int) -> array[int]:
        """The table for ``_C.copy`` into a slot where this file starts at ``base``: one row for each record.

        A row is three uint64: source address, ``base`` + offset in the file, nbytes (0 if not in host memory).
        REQUIRES: not released.
        """
        layout = self._layout
        table = layout.rows(base)
        starting = map(operator.add, self._addresses, layout.starts) if any(layout.starts) else self._addresses
        table[0::3] = array("Q", starting)
        return table

    def device_records(self) -> list[tuple[int, Tensor, int]]:
        """(record, its bytes as a 1-D uint8 tensor on its device, offset in the file), for all not in host memory."""
        found: list[tuple[int, Tensor, int]] = []
        if all(self._layout.on_host):
            return found
        for number, storage in enumerate(self._storages):
            if not self._layout.on_host[number]:
                size = (self._layout.records.sizes[number],)
                view = torch.empty(0, dtype=torch.uint8, device=storage.device)
                view.set_(storage, self._layout.starts[number], size, (1,))
                found.append((number, view, self._layout.records.offsets[number]))
        return found

    def defer(self, owned: Container[int]) -> list[int]:
        """The records whose storages (told by their ``_cdata``) are ``owned``; from now on ``changed`` watches them."""
        flags = list(map(owned.__contains__, map(_cdata_of, self._storages)))
        late = list(itertools.compress(range(len(flags)), flags))
        if late and self._found is not None:
            tensors = (hole for hole in self._found.holes if isinstance(hole, Tensor))
            owners = self._found.facts.owners  # those of views come behind
            changing = list(itertools.compress(tensors, map(flags.__getitem__, owners)))
            changing += [tensor for tensor in self._found.skeleton.rich if _storage_of(tensor) in owned]
            self._watch(changing)
        return late

    def _watch(self, tensors: list[Tensor]) -> None:
        try:
            self._versions = list(map(_version_of, tensors))
        except RuntimeError:  # those of inference count no versions
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            self._versions = list(map(_version_of, tensors))
        self._watched = tensors

    def changed(self, obj: object) -> str:
        """The path in ``obj`` of a tensor that was written to since ``defer``, "" if torch knows of none.

        What is written by fused optimizers, through ``.data`` or through numpy is not counted by torch.
        """
        written = map(operator.ne, map(_version_of, self._watched), self._versions)
        tensor = next(itertools.compress(self._watched, written), None)
        if tensor is not None:
            return _path_to(obj, tensor)
        if any(map(operator.ne, map(UntypedStorage.data_ptr, self._storages), self._addresses)):
            return "(a storage that was resized)"
        return ""

    def finish(self, slot: Buffer, base: int, crcs: bytearray | bytes) -> int:
        """Write all small bytes of the file that starts at ``slot[base]`` and return the CRC-32 of the whole file.

        ``crcs``: a uint32 for each record in order, of the bytes at its place (0 for an empty one), as ``_C.copy``
        returns them. REQUIRES: those bytes are there. May be called again, for another slot as well.
        """
        return self._archive.finish(slot, base, crcs)

    def release(self) -> None:
        """Drop the references to the tensors: what ``rows`` gave is void. ``finish`` still works; idempotent."""
        self._found = None
        self._storages = []
        self._addresses = []
        self._watched = []
        self._versions = []


class PlanCache:
    """The last layout of the tensors of one file: makes ``plan`` faster, never different. Holds no tensor."""

    def __init__(self) -> None:
        self._last: Layout | None = None


def plan(obj: object, name: str = "", cache: PlanCache | None = None) -> Image:
    """Lay ``obj`` out as the ``.pt`` file torch.save would write; everything but the bytes of tensors is captured now.

    Loaded, it equals what torch.save gives: values, dtype, shape, stride, requires_grad, class, attributes, sharing.
    Only the sizes of storages differ: a record holds what is referenced of a storage, from its first to its last byte.
    ``name`` is for messages. Raises UnsupportedLeaf with the path of the leaf for what torch.save refuses.
    """
    try:
        with _uncollected():
            return _plan(obj, cache)
    except MemoryError:
        raise
    except Exception as error:
        path, leaf = _find_culprit(obj, error)
        where, kind = f"{name}: {path or '(root)'}", type(leaf).__name__
        advice = "put its values into the state instead"
        raise UnsupportedLeaf(f"{where} ({kind}) cannot be saved, {advice}: {error}", path=where) from error


def load(memory: mmap.mmap, name: str, *, map_location: Any = None, weights_only: bool = False) -> object:
    """The object in ``memory``, a whole file that is verified and nobody else's: its tensors live there and keep it.

    Raises RestoreError, naming the file ``name``, where torch cannot make sense of it here.
    """
    try:
        if not _CAN_LOAD_IN_PLACE or config.torch_load_has_orders():
            return torch.load(memory, map_location=map_location, weights_only=weights_only)  # type: ignore[arg-type]
        unpickler = torch._weights_only_unpickler if weights_only else pickle
        whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        read: Any = torch.serialization._load
        with torch.serialization._open_zipfile_reader(memory) as reader:  # type: ignore[arg-type]  # reads and seeks
            return read(reader, map_location, unpickler, overall_storage=whole, encoding="utf-8")
    except MemoryError:
        raise
    except Exception as error:
        hint = (
            "more than tensors and containers needs weights_only=False" if weights_only else "its classes must be here"
        )
        raise RestoreError(f"{name} cannot be loaded ({hint}): {error}") from error


def _can_load_in_place() -> bool:
    """True if torch has what its ``load(mmap=True)`` is made of; ``load`` maps a file, and ours is in memory."""
    parts = (getattr(torch.serialization, "_load", None), getattr(torch.serialization, "_open_zipfile_reader", None))
    return all(parts) and "overall_storage" in inspect.signature(torch.serialization._load).parameters


_CAN_LOAD_IN_PLACE = _can_load_in_place()
"""If not, ``torch.load`` copies every tensor once more."""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Thousands of small objects come, and stay for a moment: no reason to look through all that the program has."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _plan(obj: object, cache: PlanCache | None) -> Image:
    layout = cache._last if cache is not None else None
    found = survey(obj, layout)
    if layout is None or layout.facts != found.facts:
        layout = Layout(found)
    addresses = list(map(UntypedStorage.data_ptr, found.storages))
    layout.check(found.storages, addresses)
    if cache is not None:
        cache._last = layout
    small = [("byteorder", sys.byteorder.encode()), ("version", b"3\n"), ("data.pkl", layout.fill(found.skeleton))]
    return Image(Archive(layout.records, small), layout, found, addresses)


def _find_culprit(obj: object, error: Exception) -> tuple[str, object]:
    """The path and the object of the first leaf that cannot be saved; only for a message, so it may take its time."""

    def fails(child: object) -> bool:
        try:
            if not isinstance(error, TwoTypes):
                _plan(child, None)
                return False
            return any(storage.data_ptr() == error.address for storage in survey(child).storages)
        except Exception:  # whatever it is: this is where it happens
            return True

    return _descend(obj, fails)


def _storage_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper: copied at once
        return 0


def _path_to(obj: object, tensor: Tensor) -> str:
    return _descend(obj, lambda child: _holds(child, tensor))[0] or "a tensor"


def _holds(obj: object, tensor: Tensor) -> bool:
    found = survey(obj)
    return any(tensor is one for one in (*found.holes, *found.skeleton.rich))


def _descend(obj: object, fails: Callable[[object], bool]) -> tuple[str, object]:
    path, met = "", {id(obj)}
    while True:
        for step, child in _children(obj):
            if id(child) not in met and fails(child):
                path, obj = path + step, child
                met.add(id(child))
                break
        else:
            return path, obj


def _children(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{reprlib.repr(key)}]", value
            yield f"(key {reprlib.repr(key)})", key
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from ((f"(element {reprlib.repr(value)})", value) for value in obj)
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", value) for name, value in attributes.items())
