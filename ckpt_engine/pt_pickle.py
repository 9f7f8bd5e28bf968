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
import operator
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
_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, *_PACKED}
# Their arguments begin with (storage, offset, size, stride), and are six at least.
_CUTTABLE = {_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_qtensor}


class View(NamedTuple):
    """A storage in a reduction, with the offset that follows it there (None: a storage saved itself)."""

    storage: TypedStorage | UntypedStorage
    dtype: torch.dtype
    offset: int | None
    first: int  # bytes [first, last) of the storage are referenced
    last: int


Hole = Tensor | View  # a *plain* tensor, which is nothing but its data, is a hole itself; of others, the storage is


class Skeleton(pickle.Pickler):
    """First pass: pickles an object, once, but for its tensors and storages.

    ``pieces``: the stream, cut at its holes. ``order``: what belongs into each; a tensor may be met again.
    ``strict``: whether to look at every tensor before it is taken for a plain one; see ``survey``.
    """

    def __init__(self, obj: object, *, strict: bool) -> None:
        out = io.BytesIO()
        super().__init__(out, protocol=_PROTOCOL)
        self.order: list[Hole] = []
        self.rich: list[Tensor] = []  # tensors that are more than their data
        self.has_views = False
        self._strict = strict
        self._classes = {Tensor, Parameter, TypedStorage, UntypedStorage, View} - copyreg.dispatch_table.keys()
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
        cls = type(obj)
        if cls not in self._classes:
            return None
        if cls is Tensor or cls is Parameter:
            if obj.__dict__ or (self._strict and not _is_plain(obj)):
                return None
        else:
            self.has_views = True
            if cls is not View:
                dtype = obj.dtype if cls is TypedStorage else torch.uint8
                obj = View(obj, dtype, None, 0, _untyped(obj).nbytes())
        self.order.append(obj)
        return self._mark  # an int, because these leave no trace in the memo

    def reducer_override(self, obj: Any) -> Any:
        """Tensors that are more than their data: as torch reduces them, but with a hole for the storage."""
        cls = type(obj)
        if not issubclass(cls, Tensor) or cls in copyreg.dispatch_table:
            return NotImplemented
        reduced = obj.__reduce_ex__(_PROTOCOL)
        self.rich.append(obj)
        return reduced if isinstance(reduced, str) else (reduced[0], _with_hole(*reduced[:2]), *reduced[2:])


def _is_plain(tensor: Any) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.device.type not in _NO_STORAGE


def _with_hole(function: Any, args: Any) -> Any:
    """The arguments of a reduction, with one hole in place of storage and offset.

    One for two, since a tuple of more than three is written as MARK … TUPLE, which says nothing of its length.
    """
    if function is _rebuild_from_type_v2:
        inner, cls, inner_args, state = args
        return inner, cls, _with_hole(inner, inner_args), state
    if function not in _CUTTABLE:
        return args
    storage, offset, size, stride = args[:4]
    dtype = args[6] if function is _rebuild_tensor_v3 else storage.dtype
    reach = (0, _untyped(storage).nbytes()) if dtype in _PACKED else _reach(dtype, offset, size, stride)
    return (View(storage, dtype, offset, *reach), *args[2:])


class Facts(NamedTuple):
    """All that the fillings depend on, a column each: equal facts, equal bytes."""

    memo_base: int  # memo entries below are the skeleton's, those above the fillings'
    devices: list[torch.device]  # of the storages
    owners: list[int]  # the storage of each tensor, then of each view
    views: list[tuple[Any, ...]]  # for each view its hole, the class of its storage, and the rest of it
    classes: list[type]  # from here on: of the tensors
    dtypes: list[torch.dtype]
    offsets: list[int]
    sizes: list[torch.Size]
    strides: list[tuple[int, ...]]
    grads: list[bool]
    negs: list[bool]
    conjs: list[bool]  # empty if none is complex


class Survey:
    """What the first pass found: the holes, each once, the storages in the order of their records, and the facts."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.holes = list({id(hole): hole for hole in skeleton.order}.values())
        tensors: list[Any] = self.holes
        views: list[tuple[int, View]] = []
        if skeleton.has_views:
            views = [(index, hole) for index, hole in enumerate(self.holes) if isinstance(hole, View)]
            tensors = [hole for hole in self.holes if isinstance(hole, Tensor)]
        # Storages are told apart by their C++ object, as torch.save does: all empty ones have the same, null, address.
        self.storages = [*map(Tensor.untyped_storage, tensors), *(_untyped(view.storage) for _, view in views)]
        ids = [storage._cdata for storage in self.storages]
        owners = list(range(len(ids)))
        if len(set(ids)) < len(ids):
            unique = dict(zip(ids, self.storages, strict=True))
            numbers = {cdata: number for number, cdata in enumerate(unique)}
            owners = [numbers[cdata] for cdata in ids]
            self.storages = list(unique.values())
        offsets: Any = map(Tensor.storage_offset, tensors)
        dtypes = [tensor.dtype for tensor in tensors]
        self.facts = Facts(
            # A power of two: a growing state seldom moves it, and a reader hardly wastes memory.
            memo_base=1 << max(8, skeleton.memo_size.bit_length()),
            devices=[storage.device for storage in self.storages],
            owners=owners,
            views=[(index, type(view.storage), *view[1:]) for index, view in views],
            classes=list(map(type, tensors)),
            dtypes=dtypes,
            offsets=list(offsets),
            sizes=[tensor.shape for tensor in tensors],
            strides=list(map(Tensor.stride, tensors)),
            grads=[tensor.requires_grad for tensor in tensors],
            negs=list(map(Tensor.is_neg, tensors)),
            conjs=list(map(Tensor.is_conj, tensors)) if any(dtype.is_complex for dtype in set(dtypes)) else [],
        )


def survey(obj: object) -> Survey:
    """The first pass. Trusts that tensors are plain, since a look at each would double its cost, then verifies."""
    try:
        found = Survey(Skeleton(obj, strict=False))
        devices = {device.type for device in set(found.facts.devices)}
        if _QUANTISED.isdisjoint(found.facts.dtypes) and _NO_STORAGE.isdisjoint(devices):
            return found
    except RuntimeError:
        pass  # sparse and opaque tensors have no storage, nested ones have no shape
    return Survey(Skeleton(obj, strict=True))


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
        self.records = Records(list(map(operator.sub, self.ends, self.starts)))
        self._fillings = _Filler(self, storages).fill(survey.holes)

    def check(self, storages: list[UntypedStorage], addresses: list[int]) -> None:
        """Refuse what facts do not tell: a storage smaller than its tensors, data saved as two types."""
        if not all(map(operator.ge, map(UntypedStorage.nbytes, storages), self.ends)):
            raise RuntimeError("its storage is smaller than the tensor")
        if len(self._saved_dtypes) > len(addresses) or len(set(addresses)) < len(addresses):
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
        if type(obj) is TypedStorage:
            if obj.dtype not in _dtype_to_storage_type_map():
                raise NotImplementedError(f"torch has no way to save {obj.dtype}")
            storage_type, itemsize = getattr(torch, _dtype_to_storage_type_map()[obj.dtype]), obj.dtype.itemsize
        elif type(obj) is UntypedStorage:
            storage_type, itemsize = UntypedStorage, 1
        else:
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
        if not issubclass(type(obj), Tensor):
            return NotImplemented
        function, args = obj.__reduce_ex__(_PROTOCOL)
        args = _with_hole(function, args)
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
