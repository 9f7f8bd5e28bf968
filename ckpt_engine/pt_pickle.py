"""objects → the pickle of a ``.pt`` file, in two passes, with every storage cut to the bytes that are referenced.

The first pass (``Skeleton``) pickles the object with a *hole* for every tensor, and so captures all the rest by value.
Then all tensors are known, hence which bytes of each storage are needed. The second pass (``pt_layout``) pickles what
fills the holes: torch's own reduction of each tensor, its storage being a record that holds just these bytes.

Sources: ``torch/serialization.py`` (``_save``), ``torch/_tensor.py`` (``__reduce_ex__``), ``torch/_utils.py``
(``_rebuild_…``); the opcodes: ``pickletools.py`` of CPython. Nothing of torch is patched.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_qtensor, _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.nn import Parameter
from torch.storage import TypedStorage

from ckpt_engine import _C

if TYPE_CHECKING:
    from ckpt_engine.pt_layout import Layout

PROTOCOL = 2  # torch.save's
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
        super().__init__(out, protocol=PROTOCOL)
        self.order: list[Hole] = []
        self.rich: list[Tensor] = []  # tensors that are more than their data
        views: list[View] = []
        mark, separator = draw_mark()
        asked = {Tensor, Parameter, TypedStorage, UntypedStorage, View} - copyreg.dispatch_table.keys()
        bare = set() if strict else asked & {Tensor, Parameter}
        ask = partial(_asked, self.order, views, mark)  # without a reference to this object: no cycle keeps the tensors
        self.persistent_id = _C.hole_marker(tuple(bare), tuple(asked - bare), self.order, mark, ask)  # type: ignore[method-assign]
        self.dump(obj)
        self.has_views = bool(views)
        end = out.tell()
        self.dump([])  # PROTO 2, EMPTY_LIST, (LONG_)BINPUT n, STOP: n is the number of memo entries so far
        stream = out.getvalue()
        self.memo_size = int.from_bytes(stream[end + 4 : -1], "little")
        self.pieces = stream[:end].split(separator + pickle.BINPERSID)
        if len(self.pieces) != len(self.order) + 1:
            raise RuntimeError(f"{len(self.order)} holes were left in the pickle, {len(self.pieces) - 1} were found")

    def reducer_override(self, obj: Any) -> Any:
        """Tensors that are more than their data: as torch reduces them, but with a hole for the storage."""
        cls = type(obj)
        if not issubclass(cls, Tensor) or cls in copyreg.dispatch_table:
            return NotImplemented
        reduced = obj.__reduce_ex__(PROTOCOL)
        self.rich.append(obj)
        return reduced if isinstance(reduced, str) else (reduced[0], with_hole(*reduced[:2]), *reduced[2:])


def _asked(order: list[Hole], views: list[View], mark: int, obj: Any) -> int | None:
    """Whether a storage, or a tensor that has to be looked at, leaves a hole: ``mark``, an int, since these leave no
    trace in the memo."""
    if isinstance(obj, Tensor):
        if obj.__dict__ or not _is_plain(obj):
            return None
    else:
        if not isinstance(obj, View):
            dtype = obj.dtype if isinstance(obj, TypedStorage) else torch.uint8
            obj = View(obj, dtype, None, 0, untyped(obj).nbytes())
        views.append(obj)
    order.append(obj)
    return mark


def _is_plain(tensor: Any) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.device.type not in _NO_STORAGE


def with_hole(function: Any, args: Any) -> Any:
    """The arguments of a reduction, with one hole in place of storage and offset.

    One for two, since a tuple of more than three is written as MARK … TUPLE, which says nothing of its length.
    """
    if function is _rebuild_from_type_v2:
        inner, cls, inner_args, state = args
        return inner, cls, with_hole(inner, inner_args), state
    if function not in _CUTTABLE:
        return args
    storage, offset, size, stride = args[:4]
    dtype = args[6] if function is _rebuild_tensor_v3 else storage.dtype
    span = (0, untyped(storage).nbytes()) if dtype in _PACKED else reach(dtype, offset, size, stride)
    return (View(storage, dtype, offset, *span), *args[2:])


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
    """What the first pass found: the holes, each once, the storages in the order of their records, and the facts.

    ``facts`` are those of ``known`` itself if they are the same.
    """

    facts: Facts

    def __init__(self, skeleton: Skeleton, known: Layout | None = None) -> None:
        self.skeleton = skeleton
        self.holes = skeleton.order
        if len(set(map(id, self.holes))) < len(self.holes):  # some are met again
            self.holes = list({id(hole): hole for hole in self.holes}.values())
        tensors: list[Any] = self.holes
        views: list[tuple[int, View]] = []
        if skeleton.has_views:
            views = [(index, hole) for index, hole in enumerate(self.holes) if isinstance(hole, View)]
            tensors = [hole for hole in self.holes if isinstance(hole, Tensor)]
        # Storages are told apart by their C++ object, as torch.save does: all empty ones have the same, null, address.
        self.storages = [*map(Tensor.untyped_storage, tensors), *(untyped(view.storage) for _, view in views)]
        ids = [storage._cdata for storage in self.storages]
        owners = list(range(len(ids)))
        if len(set(ids)) < len(ids):
            unique = dict(zip(ids, self.storages, strict=True))
            numbers = {cdata: number for number, cdata in enumerate(unique)}
            owners = [numbers[cdata] for cdata in ids]
            self.storages = list(unique.values())
        # A power of two: a growing state seldom moves it, and a reader hardly wastes memory.
        memo_base = 1 << max(8, skeleton.memo_size.bit_length())
        offsets: list[Any] = list(map(Tensor.storage_offset, tensors))
        grads = [tensor.requires_grad for tensor in tensors]
        if known is not None and not views and known.fits(tensors, memo_base, owners, offsets, grads):
            self.facts = known.facts
            return
        dtypes = [tensor.dtype for tensor in tensors]
        self.facts = Facts(
            memo_base=memo_base,
            devices=[storage.device for storage in self.storages],
            owners=owners,
            views=[(index, type(view.storage), *view[1:]) for index, view in views],
            classes=list(map(type, tensors)),
            dtypes=dtypes,
            offsets=offsets,
            sizes=[tensor.shape for tensor in tensors],
            strides=list(map(Tensor.stride, tensors)),
            grads=grads,
            negs=list(map(Tensor.is_neg, tensors)),
            conjs=list(map(Tensor.is_conj, tensors)) if any(dtype.is_complex for dtype in set(dtypes)) else [],
        )


def survey(obj: object, known: Layout | None = None) -> Survey:
    """The first pass. Trusts that tensors are plain, since a look at each would double its cost, then verifies."""
    try:
        found = Survey(Skeleton(obj, strict=False), known)
        if known is not None and found.facts is known.facts:
            return found
        devices = {device.type for device in set(found.facts.devices)}
        if _QUANTISED.isdisjoint(found.facts.dtypes) and _NO_STORAGE.isdisjoint(devices):
            return found
    except RuntimeError:
        pass  # sparse and opaque tensors have no storage, nested ones have no shape
    return Survey(Skeleton(obj, strict=True))


def reach(dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """The bytes [first, last) of its storage that a tensor references."""
    if 0 in size:
        return 0, 0
    last = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return offset * dtype.itemsize, last * dtype.itemsize


def untyped(storage: TypedStorage | UntypedStorage) -> UntypedStorage:
    return storage._untyped_storage if isinstance(storage, TypedStorage) else storage


def draw_mark() -> tuple[int, bytes]:
    """An int that no state contains but by a chance of 2**-120, and its opcode."""
    value = secrets.token_bytes(15) + b"Z"
    return int.from_bytes(value, "little"), pickle.LONG1 + bytes([len(value)]) + value
