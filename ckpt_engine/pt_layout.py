"""The second pass: which span of each storage is a record, and what fills the holes of the pickle.

Fillings depend on nothing but ``Facts``, so they can be kept and a repeat pays for the first pass only (``pt_pickle``).

Sources: ``torch/serialization.py`` (``_save``); the opcodes: ``pickletools.py`` of CPython.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
from array import array
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.serialization import location_tag
from torch.storage import TypedStorage, _dtype_to_storage_type_map

from ckpt_engine.pt_pickle import PROTOCOL, Hole, Skeleton, Survey, View, draw_mark, reach, untyped, with_hole
from ckpt_engine.pt_zip import Records

_HOST = "cpu"


class Layout:
    """Which span of each storage is a record, and what fills the holes. Never changed once it is made."""

    def __init__(self, survey: Survey) -> None:
        facts, storages = survey.facts, survey.storages
        self.facts = facts
        one_each = dict(zip(facts.devices, storages, strict=True))
        tags = {device: location_tag(storage) for device, storage in one_each.items()}
        self.locations = [tags[device] for device in facts.devices]
        if "meta" in {device.type for device in facts.devices}:
            raise NotImplementedError("a storage on the meta device has no bytes")
        self.on_host = [device.type == _HOST for device in facts.devices]
        reaches = [
            *map(reach, facts.dtypes, facts.offsets, facts.sizes, facts.strides),
            *(v[-2:] for v in facts.views),
        ]
        starts, self.ends = [sys.maxsize] * len(storages), [0] * len(storages)
        for number, (first, last) in zip(facts.owners, reaches, strict=True):
            if first < last:
                # No element has more than 16 bytes, so offsets counted in elements of any dtype stay whole.
                starts[number] = min(starts[number], first & ~15)
                self.ends[number] = max(self.ends[number], last)
        self.starts = list(map(min, starts, self.ends))
        dtypes = [*facts.dtypes, *(view[2] for view in facts.views)]
        saved = [dtype if dtype in _dtype_to_storage_type_map() else torch.uint8 for dtype in dtypes]
        several = len(set(saved)) > 1
        self._saved_dtypes = list(dict.fromkeys(zip(facts.owners, saved, strict=True))) if several else []
        self.records = Records(list(map(operator.sub, self.ends, self.starts)))
        self._fillings = _Filler(self, storages).fill(survey.holes)
        self._guards = None if facts.views else _guards_of(survey.holes)
        self._rows: tuple[int, array[int]] = (-1, array("Q"))

    def rows(self, base: int) -> array[int]:
        """Three uint64 for each record: 0, ``base`` + its offset in the file, and its bytes (0 if not on the host)."""
        known, rows = self._rows
        if known != base:
            sizes = map(operator.mul, self.records.sizes, self.on_host)
            columns = (repeat(0, len(self.records)), map(base.__add__, self.records.offsets), sizes)
            rows = array("Q", chain.from_iterable(zip(*columns, strict=True)))
            self._rows = base, rows  # a slot has the same place for it in the next save
        return rows[:]

    def fits(
        self, tensors: list[Any], memo_base: int, owners: list[int], offsets: list[int], grads: list[bool]
    ) -> bool:
        """True if these are the facts of this layout, and all others of ``tensors`` are too; may miss it."""
        facts, guards = self.facts, self._guards
        if guards is None or facts.memo_base != memo_base or facts.grads != grads:
            return False
        return facts.owners == owners and facts.offsets == offsets and bool(guards.check(*tensors))

    def check(self, storages: list[UntypedStorage], addresses: list[int]) -> None:
        """Refuse what facts do not tell: a storage smaller than its tensors, data saved as two types."""
        if not all(map(operator.ge, map(UntypedStorage.nbytes, storages), self.ends)):
            raise RuntimeError("its storage is smaller than the tensor")
        if self._saved_dtypes and (len(self._saved_dtypes) > len(addresses) or len(set(addresses)) < len(addresses)):
            seen: dict[int, torch.dtype] = {}
            for number, dtype in self._saved_dtypes:
                if addresses[number] and seen.setdefault(addresses[number], dtype) is not dtype:
                    raise TwoTypes(addresses[number])

    def fill(self, skeleton: Skeleton) -> bytes:
        """The pickle: into the hole of a tensor goes all of it at first, then where the memo has it."""
        fillings, order = self._fillings, skeleton.order
        if len(order) > len(fillings):
            rest = iter(fillings)
            first: dict[int, bytes] = {}
            fillings = []
            for key in map(id, order):
                if key in first:  # a tensor, so its filling ends in LONG_BINPUT and the place in the memo
                    fillings.append(pickle.LONG_BINGET + first[key][-4:])
                else:
                    first[key] = next(rest)
                    fillings.append(first[key])
        parts = [b""] * (2 * len(order) + 1)
        parts[0::2] = skeleton.pieces
        parts[1::2] = fillings
        return b"".join(parts)


class _Filler(pickle.Pickler):
    """Second pass: pickles what fills the holes as torch.save would, but for the sizes and offsets of storages."""

    def __init__(self, layout: Layout, storages: list[UntypedStorage]) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out, protocol=PROTOCOL)
        self._layout = layout
        self._numbers = {storage._cdata: number for number, storage in enumerate(storages)}

    def fill(self, holes: list[Hole]) -> list[bytes]:
        self.dump([[] for _ in range(self._layout.facts.memo_base - 1)])  # takes the skeleton's part of the memo
        start = self._out.tell()
        mark, separator = draw_mark()
        row: list[object] = [mark]
        for hole in holes:
            if isinstance(hole, Tensor):
                row += (hole, mark)
            elif hole.offset is None:
                row += (hole.storage, mark)
            else:
                row += (hole.storage, self._cut(hole), mark)
        self.dump(tuple(row))
        return self._out.getvalue()[start:].split(separator)[1:-1]

    def persistent_id(self, obj: Any) -> tuple[str, Any, str, str, int] | None:
        """As in ``torch.serialization._save``."""
        if type(obj) is TypedStorage:
            if obj.dtype not in _dtype_to_storage_type_map():
                raise NotImplementedError(f"torch has no way to save {obj.dtype}")
            storage_type, itemsize = getattr(torch, _dtype_to_storage_type_map()[obj.dtype]), obj.dtype.itemsize
        elif type(obj) is UntypedStorage:
            storage_type, itemsize = UntypedStorage, 1
        else:
            return None
        number, layout = self._numbers[untyped(obj)._cdata], self._layout
        return (
            "storage",
            storage_type,
            str(number),
            layout.locations[number],
            layout.records.sizes[number] // itemsize,
        )

    def reducer_override(self, obj: Any) -> Any:
        if not issubclass(type(obj), Tensor):
            return NotImplemented
        function, args = obj.__reduce_ex__(PROTOCOL)
        args = with_hole(function, args)
        if isinstance(args[0], View):
            args = (args[0].storage, self._cut(args[0]), *args[1:])
        return function, args

    def _cut(self, view: View) -> int:
        """The offset counted from the start of the record; 0 where there is no element, and so no place."""
        start = self._layout.starts[self._numbers[untyped(view.storage)._cdata]]
        return (view.offset or 0) - start // view.dtype.itemsize if view.first < view.last else 0


class TwoTypes(RuntimeError):
    """A storage is loaded with one dtype, so torch.save refuses data that would be saved with two."""

    def __init__(self, address: int) -> None:
        super().__init__("its data is in the state once more, viewed as another dtype")
        self.address = address


def _guards_of(tensors: list[Any]) -> Any:
    """Compares class, dtype, device, sizes, strides, and neg and conj bits, of all tensors in one native call.

    It is what torch.compile asks before it runs what it compiled. None where torch has no such thing.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError, ValueError, RuntimeError):
        return None
