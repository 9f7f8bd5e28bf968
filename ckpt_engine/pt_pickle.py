"""objects → the pickle of a ``.pt`` file, in two passes, with every storage cut to the bytes that are referenced.

The first pass (``Skeleton``) pickles the object with a *hole* for every tensor, and so captures all the rest by value.
Then all tensors are known, hence which bytes of each storage are needed. The second pass (``Layout``) pickles what
fills the holes: torch's own reduction of each tensor, its storage being a record that holds just these bytes.
Fillings depend on nothing but ``Facts``, so they can be kept and a repeat pays for the first pass only.

Sources: ``torch/serialization.py`` (``_save``), ``torch/_tensor.py`` (``__reduce_ex__``), ``torch/_utils.py``
(``_rebuild_…``); the opcodes: ``pickletools.py`` of CPython. Nothing of torch is patched.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import secrets
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_qtensor, _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.nn import Parameter
from torch.serialization import location_tag
from torch.storage import TypedStorage, _dtype_to_storage_type_map

from ckpt_engine.pt_zip import Records

_PROTOCOL = 2  # torch.save's
_HOST = "cpu"
_NO_STORAGE = {"meta", "xla", "maia", "mtia"}  # devices whose tensors torch reduces without a storage
_PACKED = {torch.quint4x2, torch.quint2x4}  # several elements in a byte: never cut
# Functions whose arguments begin with (storage, offset, size, stride), and are six at least.
_CUTTABLE = {_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_qtensor}


class View(NamedTuple):
    """A storage where a reduction has it, with the offset that follows it there (None: a storage saved itself)."""

    storage: TypedStorage | UntypedStorage
    dtype: torch.dtype
    offset: int | None
    first: int  # bytes [first, last) of the storage are referenced
    last: int


Hole = Tensor | View  # a tensor that is nothing but its data leaves one hole, others leave one for their storage


class Skeleton(pickle.Pickler):
    """First pass: pickles an object, once, but for its tensors and storages.

    ``pieces``: the stream, cut at its holes. ``order``: which hole is where; a tensor met again is the same hole.
    """

    def __init__(self, obj: object) -> None:
        out = io.BytesIO()
        super().__init__(out, protocol=_PROTOCOL)
        self.holes: list[Hole] = []
        self.order: list[int] = []
        self._seen: dict[int, int] = {}  # id of a tensor → its hole, which keeps it alive
        self._kinds = _Kinds()
        self._mark, separator = _draw_mark()
        self.dump(obj)
        end = out.tell()
        self.dump([])  # PROTO 2, EMPTY_LIST, (LONG_)BINPUT n, STOP: n is the number of memo entries so far
        stream = out.getvalue()
        self.memo_size = int.from_bytes(stream[end + 4 : -1], "little")
        self.pieces = stream[:end].split(separator + pickle.BINPERSID)
        if len(self.pieces) != len(self.order) + 1:
            raise RuntimeError(f"{len(self.order)} holes were left in the pickle, {len(self.pieces) - 1} were found")

    def persistent_id(self, obj: Any) -> int | None:
        kind = self._kinds[type(obj)]
        if kind is None:
            return None
        index = len(self.holes)
        if kind is Tensor:
            if obj.__dict__ or obj.layout is not torch.strided or obj.is_quantized or obj.is_nested:
                return None
            if not obj.is_cpu and obj.device.type in _NO_STORAGE:
                return None
            index = self._seen.setdefault(id(obj), index)
            if index == len(self.holes):
                self.holes.append(obj)
        elif kind is View:
            self.holes.append(obj)
        else:
            dtype = obj.dtype if isinstance(obj, TypedStorage) else torch.uint8
            self.holes.append(View(obj, dtype, None, 0, _untyped(obj).nbytes()))
        self.order.append(index)
        return self._mark  # an int, because these leave no trace in the memo

    def reducer_override(self, obj: Any) -> Any:
        """Tensors that are more than their data: as torch reduces them, but with a hole for the storage."""
        if not isinstance(obj, Tensor) or type(obj) in copyreg.dispatch_table:
            return NotImplemented
        reduced = _reduce(obj)
        return reduced if isinstance(reduced, str) else (reduced[0], _with_holes(*reduced[:2]), *reduced[2:])


class _Kinds(dict[type, Any]):
    """Type → Tensor (itself or Parameter), TypedStorage (any storage), View, or None: pickle it as any object."""

    def __missing__(self, cls: type) -> Any:
        kind: Any = None
        if cls in copyreg.dispatch_table:
            pass
        elif cls is Tensor or cls is Parameter:
            kind = Tensor
        elif cls is UntypedStorage or issubclass(cls, TypedStorage):
            kind = TypedStorage
        elif cls is View:
            kind = View
        self[cls] = kind
        return kind


def _with_holes(function: Any, args: Any) -> Any:
    """The arguments of a reduction, with one hole in place of storage and offset.

    One for two, since a tuple of more than three is written as MARK … TUPLE, which says nothing of its length.
    """
    if function is _rebuild_from_type_v2:
        inner, cls, inner_args, state = args
        return inner, cls, _with_holes(inner, inner_args), state
    if function not in _CUTTABLE:
        return args
    storage, offset, size, stride = args[:4]
    dtype = args[6] if function is _rebuild_tensor_v3 else storage.dtype
    reach = (0, _untyped(storage).nbytes()) if dtype in _PACKED else _reach(dtype, offset, size, stride)
    return (View(storage, dtype, offset, *reach), *args[2:])


def _reduce(tensor: Any) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)


class Facts(NamedTuple):
    """All that the fillings depend on, a column each: equal facts, equal bytes."""

    memo_base: int  # memo entries below are the skeleton's, those above the fillings'
    devices: list[torch.device]  # of the storages
    owners: list[int]  # the storage of each tensor, then of each view
    views: list[tuple[Any, ...]]  # of each its hole, the class of its storage, and the rest of it
    classes: list[type]  # from here on: of the tensors
    dtypes: list[torch.dtype]
    offsets: list[int]
    sizes: list[torch.Size]
    strides: list[tuple[int, ...]]
    grads: list[bool]
    negs: list[bool]
    conjs: list[bool]


def survey(skeleton: Skeleton) -> tuple[Facts, list[UntypedStorage]]:
    """The facts, and the storages in the order of their records.

    Storages are told apart by their C++ object, as torch.save does: all empty ones have the same, null, address.
    """
    tensors = [hole for hole in skeleton.holes if isinstance(hole, Tensor)]
    views = [(index, hole) for index, hole in enumerate(skeleton.holes) if isinstance(hole, View)]
    owners = [tensor.untyped_storage() for tensor in tensors] + [_untyped(view.storage) for _, view in views]
    ids = [storage._cdata for storage in owners]
    storages = dict(zip(ids, owners, strict=True))
    numbers = {cdata: number for number, cdata in enumerate(storages)}
    dtypes = [tensor.dtype for tensor in tensors]
    facts = Facts(
        # A power of two: a growing state seldom moves it, and a reader hardly wastes memory.
        memo_base=1 << max(8, skeleton.memo_size.bit_length()),
        devices=[storage.device for storage in storages.values()],
        owners=[numbers[cdata] for cdata in ids],
        views=[(index, type(view.storage), *view[1:]) for index, view in views],
        classes=[type(tensor) for tensor in tensors],
        dtypes=dtypes,
        offsets=[int(tensor.storage_offset()) for tensor in tensors],
        sizes=[tensor.shape for tensor in tensors],
        strides=[tensor.stride() for tensor in tensors],
        grads=[tensor.requires_grad for tensor in tensors],
        negs=[tensor.is_neg() for tensor in tensors],
        conjs=[tensor.is_conj() for tensor in tensors] if any(dtype.is_complex for dtype in set(dtypes)) else [],
    )
    return facts, list(storages.values())


class Layout:
    """Which span of each storage is a record, and what fills the holes. Never changed once it is made."""

    def __init__(self, facts: Facts, holes: list[Hole], storages: list[UntypedStorage]) -> None:
        self.facts = facts
        tags = {device: location_tag(storage) for device, storage in zip(facts.devices, storages, strict=True)}
        self.locations = [tags[device] for device in facts.devices]
        if "meta" in {device.type for device in facts.devices}:
            raise NotImplementedError("a storage on the meta device has no bytes")
        self.on_host = [device.type == _HOST for device in facts.devices]
        reaches = [
            *map(_reach, facts.dtypes, facts.offsets, facts.sizes, facts.strides),
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
        self._saved_dtypes = list(dict.fromkeys(zip(facts.owners, saved, strict=True)))
        self.records = Records(list(map(int.__sub__, self.ends, self.starts)))
        self._fillings = _Filler(self, storages).fill(holes)

    def check(self, storages: list[UntypedStorage], addresses: list[int]) -> None:
        """Refuse what facts do not tell: a storage smaller than its tensors, data saved as two types."""
        if not all(map(int.__ge__, map(UntypedStorage.nbytes, storages), self.ends)):
            raise RuntimeError("its storage is smaller than the tensor")
        if len(self._saved_dtypes) > len(addresses) or len(set(addresses)) < len(addresses):
            seen: dict[int, torch.dtype] = {}
            for number, dtype in self._saved_dtypes:
                if addresses[number] and seen.setdefault(addresses[number], dtype) is not dtype:
                    raise TwoTypes(addresses[number])

    def fill(self, order: list[int]) -> list[bytes]:
        """What goes into the holes of a stream in this order: all of a tensor at first, then where the memo has it."""
        if len(order) == len(self._fillings):
            return self._fillings
        filled, met = [], set()
        for index in order:
            filling = self._fillings[index]
            # Only tensors are met again, and their fillings end in LONG_BINPUT and its argument.
            filled.append(pickle.LONG_BINGET + filling[-4:] if index in met else filling)
            met.add(index)
        return filled


class _Filler(pickle.Pickler):
    """Second pass: pickles what fills the holes as torch.save would, but for the sizes and offsets of storages."""

    def __init__(self, layout: Layout, storages: list[UntypedStorage]) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out, protocol=_PROTOCOL)
        self._layout = layout
        self._numbers = {storage._cdata: number for number, storage in enumerate(storages)}

    def fill(self, holes: list[Hole]) -> list[bytes]:
        self.dump([[] for _ in range(self._layout.facts.memo_base - 1)])  # takes the skeleton's part of the memo
        start = self._out.tell()
        mark, separator = _draw_mark()
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
        storage_type: Any = UntypedStorage
        itemsize = 1
        if isinstance(obj, TypedStorage):
            typed: Any = obj
            storage_type, itemsize = getattr(torch, typed._pickle_storage_type()), obj.dtype.itemsize
        elif not isinstance(obj, UntypedStorage):
            return None
        number, layout = self._numbers[_untyped(obj)._cdata], self._layout
        return (
            "storage",
            storage_type,
            str(number),
            layout.locations[number],
            layout.records.sizes[number] // itemsize,
        )

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        function, args = _reduce(obj)
        args = _with_holes(function, args)
        if isinstance(args[0], View):
            args = (args[0].storage, self._cut(args[0]), *args[1:])
        return function, args

    def _cut(self, view: View) -> int:
        """The offset counted from the start of the record; 0 where there is no element, and so no place."""
        start = self._layout.starts[self._numbers[_untyped(view.storage)._cdata]]
        return (view.offset or 0) - start // view.dtype.itemsize if view.first < view.last else 0


class TwoTypes(RuntimeError):
    """A storage is loaded with one dtype, so torch.save refuses data that would be saved with two."""

    def __init__(self, address: int) -> None:
        super().__init__("its data is in the state once more, viewed as another dtype")
        self.address = address


def _reach(dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """The bytes [first, last) of its storage that a tensor references."""
    if 0 in size:
        return 0, 0
    last = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return offset * dtype.itemsize, last * dtype.itemsize


def _untyped(storage: TypedStorage | UntypedStorage) -> UntypedStorage:
    return storage._untyped_storage if isinstance(storage, TypedStorage) else storage


def _draw_mark() -> tuple[int, bytes]:
    """An int that no state contains but by a chance of 2**-120, and its opcode."""
    value = secrets.token_bytes(15) + b"Z"
    return int.from_bytes(value, "little"), pickle.LONG1 + bytes([len(value)]) + value
