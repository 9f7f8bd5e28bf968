"""What ``ckpt_engine.image`` lays out loads as what torch.save of the same object gives, in every way of reading."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import enum
import gc
import io
import math
import mmap
import pathlib
import random
import shutil
import struct
import subprocess
import types
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from fuzzing import examples
from hypothesis import HealthCheck, given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config as serialization_config

from ckpt_engine import _C, image, pt_layout, pt_zip
from ckpt_engine.errors import RestoreError, UnsupportedLeaf

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# torch warns of dtypes, tensors and storages it no longer or not yet recommends; all of them must be saved.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "ComplexHalf",
        "TypedStorage is deprecated",
        "torch.quantize_per",
        "Sparse",
        "The PyTorch API of nested",
    )
]
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)} - QUANTISED, key=str)


def from_file(path: pathlib.Path, **how: Any) -> Any:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return image.load(memory, path.name, **how)


def to_bytes(obj: object, cache: image.PlanCache | None = None, *, base: int = 0) -> bytes:
    """The file of ``obj``, made as the trainer makes it: plan, one copy into a slot full of garbage, finish."""
    planned = image.plan(obj, "m.pt", cache)
    slot = bytearray(b"\xa5" * (base + planned.nbytes + 7))
    crcs = _C.copy(slot, planned.rows(base))
    crc = planned.finish(slot, base, crcs)
    planned.release()
    assert slot[:base] == b"\xa5" * base
    assert slot[base + planned.nbytes :] == b"\xa5" * 7
    file = bytes(slot[base : base + planned.nbytes])
    assert crc == zlib.crc32(file)
    return file


def torch_bytes(obj: object) -> bytes:
    out = io.BytesIO()
    torch.save(obj, out)
    return out.getvalue()


def read(file: bytes, **options: object) -> object:
    return torch.load(io.BytesIO(file), **{"weights_only": False, **options})


def elements(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in order of their indices, whatever the dtype."""
    if tensor.numel() == 0:
        return b""
    size = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    strides = (*(s * size for s in tensor.stride()), 1)
    return storage.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).numpy().tobytes()


class Comparison:
    """Equality as torch.save's users see it: all of an object, and which parts of it are the same or share memory."""

    def __init__(self) -> None:
        self.pairs: dict[int, object] = {}
        self.keep: list[object] = []
        self.shares: list[tuple[torch.Tensor, torch.Tensor]] = []

    def equal(self, a: object, b: object, at: str = "") -> None:
        assert type(a) is type(b), at
        if isinstance(a, int | float | str | bytes | type | types.FunctionType | type(None) | enum.Enum):
            assert repr(a) == repr(b), at  # nan equals nan, 0.0 does not equal -0.0
            return
        if id(a) in self.pairs:
            assert self.pairs[id(a)] is b, f"{at} is no longer the same object"
            return
        self.pairs[id(a)] = b
        self.keep += (a, b)
        if isinstance(a, torch.Tensor):
            self.tensors(a, b, at)
            if a.is_nested:  # the sizes of nested tensors carry identities that are new in each process
                return
        elif isinstance(a, dict):
            assert list(map(repr, a)) == list(map(repr, b)), at
            for (k, v), w in zip(a.items(), b.values(), strict=True):
                self.equal(v, w, f"{at}[{k!r}]")
        elif isinstance(a, list | tuple):
            assert len(a) == len(b), at
            for i, (v, w) in enumerate(zip(a, b, strict=True)):
                self.equal(v, w, f"{at}[{i}]")
        elif isinstance(a, torch.UntypedStorage):
            assert a.tolist() == b.tolist(), at
        elif hasattr(a, "__slots__"):
            for name in a.__slots__:
                self.equal(getattr(a, name), getattr(b, name), f"{at}.{name}")
        elif not hasattr(a, "__dict__"):
            assert repr(a) == repr(b), at
        if hasattr(a, "__dict__"):
            self.equal(dict(a.__dict__), dict(b.__dict__), f"{at}.")

    def tensors(self, a: torch.Tensor, b: torch.Tensor, at: str) -> None:
        for fact in ("dtype", "requires_grad", "layout", "device", "is_leaf", "is_quantized", "is_nested"):
            assert getattr(a, fact) == getattr(b, fact), (at, fact)
        if a.is_nested or isinstance(a, torch.nn.UninitializedParameter):
            return
        assert a.shape == b.shape, at
        if a.layout is not torch.strided or type(a) not in (torch.Tensor, torch.nn.Parameter):
            return
        assert (a.stride(), a.is_conj(), a.is_neg()) == (b.stride(), b.is_conj(), b.is_neg()), at
        if a.is_meta or a.dtype in (torch.quint4x2, torch.quint2x4):
            return
        assert elements(a) == elements(b), at
        if a.numel():
            self.shares.append((a, b))

    def sharing(self) -> None:
        """Tensors that share a storage share it still, at the same distance."""
        first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for a, b in self.shares:
            a0, b0 = first.setdefault(a.untyped_storage()._cdata, (a, b))
            assert b.untyped_storage()._cdata == b0.untyped_storage()._cdata
            assert a.data_ptr() - a0.data_ptr() == b.data_ptr() - b0.data_ptr()
        assert len({b.untyped_storage()._cdata for _, b in first.values()}) == len(first)


def assert_equal(a: object, b: object) -> None:
    comparison = Comparison()
    comparison.equal(a, b)
    comparison.sharing()


def assert_like_torch(obj: object) -> object:
    """The promise of the room; returns what was loaded."""
    file = to_bytes(obj)
    ours = read(file)
    assert_equal(read(torch_bytes(obj)), ours)
    assert zipfile.ZipFile(io.BytesIO(file)).testzip() is None
    return ours


def random_bytes(n: int) -> torch.Tensor:
    return torch.tensor(list(random.Random(n).randbytes(n)), dtype=torch.uint8)


def savable(dtype: torch.dtype) -> bool:
    try:
        torch_bytes(torch.empty(0, dtype=torch.uint8).view(dtype))
    except KeyError:
        return False
    return True


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "matrix": lambda t: t.view(4, 6),
    "transposed": lambda t: t.view(4, 6).t(),
    "every second": lambda t: t[::2],
    "in the middle": lambda t: t[7:12],
    "column": lambda t: t.view(4, 6)[:, 3],
    "expanded": lambda t: t[5:6].expand(3, 8),
    "no dimension": lambda t: t[9],
    "empty": lambda t: t[24:24],
    "empty matrix": lambda t: t[:0].view(0, 3),
    "channels last": lambda t: t.view(1, 2, 3, 4).permute(0, 2, 3, 1),
    "overlapping windows": lambda t: t.unfold(0, 5, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if savable(d)], ids=str)
def test_every_dtype_in_every_layout_is_bit_exact(dtype: torch.dtype, layout: str) -> None:
    raw = random_bytes(24 * dtype.itemsize)
    base = (raw & 1 if dtype is torch.bool else raw).view(dtype)
    view = LAYOUTS[layout](base)
    assert_like_torch({"view": view})
    assert_like_torch([view, {"again": view, "base": base, "other": base[2:4]}])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not savable(d)], ids=str)
def test_a_dtype_torch_cannot_save_is_refused_by_path(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedLeaf, match="no way to save") as refusal:
        to_bytes({"fine": torch.ones(2), "state": [1, random_bytes(8).view(dtype)]})
    assert refusal.value.path == "m.pt: ['state'][1]"


def test_nan_payloads_and_negative_zero_survive() -> None:
    words = torch.tensor([0x7FC00001, 0x7F800123, -1, -(2**31), 0], dtype=torch.int32)
    assert elements(read(to_bytes(words.view(torch.float32)))) == elements(words)


# --- what is beside the data -------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass with data of its own and attributes."""


class Pair(torch.Tensor):
    """A wrapper subclass, as quantised and distributed tensors are: no storage, inner tensors in attributes."""

    def __new__(cls, low: torch.Tensor, scale: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=scale.dtype)

    def __init__(self, low: torch.Tensor, scale: torch.Tensor) -> None:
        self.low, self.scale = low, scale

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Pair(args[0].low, args[0].scale)
        raise NotImplementedError(func)


def with_attributes(tensor: torch.Tensor, **attributes: object) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def typed(tensor: torch.Tensor) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)


def special_tensors() -> dict[str, object]:
    base = torch.randn(40)
    leaf = torch.randn(6, requires_grad=True)
    complexes = torch.randn(6, dtype=torch.complex64)
    shared = ["a list", base]
    eye = torch.eye(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates quantised tensors, and says of others that they are beta
        return {
            "leaf": leaf,
            "non-leaf": (leaf * 2)[1:4],
            "parameters": [torch.nn.Parameter(base[3:9]), torch.nn.Parameter(base[3:9], requires_grad=False)],
            "tied parameters": [tied := torch.nn.Parameter(torch.ones(3)), {"again": tied}],
            "parameter with state": with_attributes(torch.nn.Parameter(base[8:16]), ds_id="1_2", shared=shared),
            "tensor with state": with_attributes(base[4:8].clone(), ds_id=7, shared=shared, owner=base[::2]),
            "view with state": [with_attributes(base[5:9], ds_id=8), shared, base],
            "buffer": torch.nn.Buffer(torch.ones(2), persistent=False) if hasattr(torch.nn, "Buffer") else None,
            "subclass": with_attributes(base[30:33].as_subclass(Tagged), note={"k": base[31:35]}),
            "float8 with state": with_attributes(random_bytes(8).view(torch.float8_e5m2)[2:5], note=1),
            "conjugate": [complexes.conj(), complexes, complexes.conj()[2:4]],
            "negative": [complexes.conj().imag, complexes.real],
            "sparse": [eye.to_sparse(), eye.to_sparse().coalesce()],
            "compressed": [eye.to_sparse_csr(), eye.to_sparse_csc(), eye.to_sparse_bsr((2, 2))],
            "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
            "jagged": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),
            "meta": torch.empty_strided((2, 3), (1, 2), device="meta", dtype=torch.float16),
            "meta parameter": torch.nn.Parameter(torch.empty(3, device="meta")),
            "lazy parameter": torch.nn.UninitializedParameter(),
            "wrapper": Pair(random_bytes(6).view(torch.int8)[1:4], torch.tensor(0.5)),
            "module": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
            "quantised": [q := torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.quint8), q[2:5]],
            "per channel": torch.quantize_per_channel(
                torch.randn(4, 2), torch.rand(2), torch.zeros(2, dtype=torch.int64), 1, torch.qint8
            )[1:3],
            "four bits": torch.quantize_per_channel(
                torch.randn(4, 2), torch.rand(4), torch.zeros(4), 0, torch.quint4x2
            ),
        }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", special_tensors())
def test_a_tensor_that_is_more_than_its_data_is_as_torch_saves_it(name: str) -> None:
    obj = special_tensors()[name]
    ours = assert_like_torch({"x": obj})["x"]
    if name in ("sparse", "compressed"):
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(obj, ours, strict=True))
    if name in ("nested", "jagged"):
        assert all(torch.equal(a, b) for a, b in zip(obj.unbind(), ours.unbind(), strict=True))
    if name in ("quantised", "per channel", "four bits"):
        pairs = zip(obj, ours, strict=True) if isinstance(obj, list) else [(obj, ours)]
        assert all(torch.equal(a.dequantize(), b.dequantize()) for a, b in pairs)
    if name == "subclass":
        assert elements(obj) == elements(ours)


def test_a_distributed_tensor_keeps_its_shard_and_placement() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        local = torch.arange(12.0).view(4, 3)
        sharded = DTensor.from_local(local[:2], init_device_mesh("cpu", (1,)), [Shard(0)])
        loaded = read(to_bytes({"w": sharded}))["w"]
        assert loaded.placements == (Shard(0),)
        assert torch.equal(loaded.to_local(), local[:2])
    finally:
        torch.distributed.destroy_process_group()


def test_storages_saved_themselves_keep_all_of_themselves() -> None:
    base = torch.arange(20.0)
    ours = read(to_bytes({"view": base[4:6], "storage": typed(base)}))
    assert len(ours["storage"]._untyped_storage) == 80
    assert ours["view"].data_ptr() - ours["storage"]._untyped_storage.data_ptr() == 16
    raw = random_bytes(33)
    ours = read(to_bytes([raw.untyped_storage(), raw[3:5], raw.untyped_storage()]))
    assert list(ours[0]._untyped_storage) == raw.tolist()
    assert ours[1].data_ptr() == ours[2]._untyped_storage.data_ptr() + 3


# --- sharing and sizes -------------------------------------------------------------------------------------------


def test_tied_and_overlapping_tensors_cost_one_copy_and_stay_tied() -> None:
    w = torch.randn(100, 100)
    state = {"emb": w, "head": w, "half": w[:50], "t": w.t(), "row": w[40], "optim": {0: {"master": w.detach()}}}
    file = to_bytes(state)
    assert len(file) < 4 * 10_000 + 4096
    ours = read(file)
    assert ours["emb"] is ours["head"]
    ours["half"][40, 7] = 1e9
    for value in (ours["head"][40, 7], ours["t"][7, 40], ours["row"][7], ours["optim"][0]["master"][40, 7]):
        assert value == 1e9
    assert_equal(read(torch_bytes(state)), read(file))


def test_separate_views_of_one_flat_buffer_store_only_what_they_reference() -> None:
    flat = torch.zeros(10_000_000)
    expert = {f"e{i}": flat[i * 1000 : (i + 1) * 1000] for i in range(8)}
    assert len(to_bytes(expert)) < 100 * 1024
    assert len(to_bytes(flat[9_999_990:])) < 2048
    assert len(to_bytes(with_attributes(flat[5000:5010], ds_id="x"))) < 2048
    assert len(to_bytes(torch.nn.Parameter(flat[5000:5010]))) < 2048


def test_an_expanded_zero_stores_four_bytes() -> None:
    planned = image.plan(torch.zeros(1).expand(1_000_000))
    assert planned.rows(0)[2::3].tolist() == [4]
    assert read(to_bytes(torch.zeros(1).expand(1_000_000))).shape == (1_000_000,)


def test_empty_tensors_are_not_confused_by_their_null_addresses() -> None:
    placeholders = {f"p{i}": torch.empty(0, dtype=dtype) for i, dtype in enumerate([torch.float16, torch.int64] * 3)}
    ours = assert_like_torch(placeholders)
    assert ours["p0"].untyped_storage()._cdata != ours["p2"].untyped_storage()._cdata


def test_the_span_of_a_storage_suits_every_dtype_in_it() -> None:
    raw = random_bytes(256)
    assert_like_torch([raw[37:39], raw.view(torch.float8_e5m2)[33:40], raw[36:64].view(torch.uint32), raw[35:]])


# --- by value ----------------------------------------------------------------------------------------------------


def test_everything_but_tensor_bytes_is_captured_when_plan_returns() -> None:
    array = bytearray(b"old")
    state = {
        "step": 1,
        "nested": [{"deep": [1, 2]}],
        "bytes": array,
        "w": torch.ones(3),
        "space": types.SimpleNamespace(x=1),
    }
    planned = image.plan(state)
    state["step"], state["new"], state["space"].x = 2, "key", 2
    state["nested"][0]["deep"].append(3)
    array[:] = b"new"
    state["w"] = torch.zeros(9)
    slot = bytearray(planned.nbytes)
    planned.finish(slot, 0, _C.copy(slot, planned.rows(0)))
    ours = read(bytes(slot))
    assert (ours["step"], ours["nested"], ours["bytes"], ours["space"].x) == (1, [{"deep": [1, 2]}], b"old", 1)
    assert "new" not in ours
    assert ours["w"].tolist() == [1, 1, 1]


def test_an_image_keeps_its_tensors_alive_until_it_is_released() -> None:
    state = {"w": torch.full((1000,), 7.0)}
    planned = image.plan(state)
    rows = planned.rows(0)
    state["w"].set_(torch.zeros(4).untyped_storage(), 0, (4,), (1,))
    del state
    slot = bytearray(planned.nbytes)
    planned.finish(slot, 0, _C.copy(slot, rows))
    assert read(bytes(slot))["w"].tolist() == [7.0] * 1000
    planned.release()
    planned.release()


@dataclasses.dataclass
class Fragment:
    numel: int
    tensor: torch.Tensor


class Stage(enum.IntEnum):
    weights = 3


class Slotted:
    __slots__ = ("a", "b")


def test_other_objects_are_pickled_as_torch_save_pickles_them() -> None:
    numpy = pytest.importorskip("numpy")
    metadata = collections.OrderedDict(a=torch.ones(2))
    metadata._metadata = {"version": 1}
    slotted = Slotted()
    slotted.a, slotted.b = 1, torch.ones(1)
    cycle: list[object] = [torch.ones(2)]
    cycle.append(cycle)
    generator = random.Random(3)
    state = {
        "scalars": [True, None, 2**70, -(2**31), 1.5, math.nan, -0.0, 1j, "\udcff\x00é", b"\x00\xff", bytearray(b"x")],
        "keys": {1: "int", (1, "a"): "tuple", 2.5: "float", None: "none", math.inf: "inf", "": "empty"},
        "containers": [(), [], {}, {1, 2}, frozenset({3}), collections.defaultdict(list, a=[1]), range(3)],
        "objects": [Fragment(3, torch.ones(2)), Stage.weights, types.SimpleNamespace(a=1), slotted, metadata],
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.get_rng_state(), torch.strided],
        "numpy": [numpy.arange(4.0), numpy.float32(2), numpy.array(["a", None], dtype=object)],
        "dates": [datetime.date(2020, 1, 2), numpy.datetime64("2020-01-02")],
        "rng": [generator.getstate(), numpy.random.default_rng(3).bit_generator.state],
    }
    ours = assert_like_torch(state)
    random_ours = random.Random()
    random_ours.setstate(ours["rng"][0])
    assert random_ours.random() == generator.random()
    assert ours["objects"][4]._metadata == {"version": 1}
    loaded = read(to_bytes(cycle))
    assert loaded[1] is loaded


def test_references_within_a_large_pickle_are_kept() -> None:
    """The memo of the pickle grows with the state; what stands for the tensors must never get into its way."""
    for n in (100, 255, 256, 257, 1000, 70_000):
        words = [f"w{i}" for i in range(n)]
        tensors = [torch.full((1,), float(i)) for i in range(20)]
        ours = read(to_bytes([words[: n // 2], tensors[:9], words, tensors, list(words)]))
        assert ours[2] == words
        assert ours[0] == words[: n // 2]
        assert all(a is b for a, b in zip(ours[2], ours[4], strict=True))
        assert all(a is b for a, b in zip(ours[1], ours[3][:9], strict=True))
        assert [t.item() for t in ours[3]] == list(range(20))


def test_reducers_registered_with_copyreg_are_used_as_torch_save_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"parameter": torch.nn.Parameter(torch.ones(2)), "tagged": torch.zeros(2).as_subclass(Tagged)}
    monkeypatch.setitem(copyreg.dispatch_table, torch.nn.Parameter, lambda p: (Holder, (p.detach(),)))
    monkeypatch.setitem(copyreg.dispatch_table, Tagged, lambda t: (Holder, ("tag",)))
    ours = assert_like_torch(state)
    assert isinstance(ours["parameter"], Holder)
    assert ours["tagged"].value == "tag"


def test_odd_names_change_nothing_but_themselves() -> None:
    keys = ["", "\x00", "a/../../b", "é", "\ud800", "'\"]", "x" * 100_000, "archive/data/0", "\x8a\x10Q" * 50]
    state = {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}
    ours = assert_like_torch(state)
    assert [value[0].item() for value in ours.values()] == list(range(len(keys)))
    assert image.plan(state, "\udcff\x00/../é").nbytes == image.plan(state, "m.pt").nbytes


# --- refusals ----------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


def test_what_torch_save_refuses_is_refused_with_its_path() -> None:
    x = torch.randn(4)
    cases: list[tuple[object, str]] = [
        ({"a": [0, 1, 2, lambda: 0]}, "['a'][3]"),
        ({"optimizer": {"state": ({3: Holder(int), 4: Holder(open)}, lambda: 0)}}, "['optimizer']['state'][1]"),
        ([Holder({"f": lambda: 0})], "[0].value['f']"),
        ({"t": [with_attributes(torch.ones(2), hook=lambda: 0)]}, "['t'][0].hook"),
        ({"a": torch.ones(3), "b": [{"w": x}, x.view(torch.int32)]}, "['b'][0]['w']"),
        ({"m": [torch.randn(3, 3).to_mkldnn()]}, "['m'][0]"),
        ({"m": torch.UntypedStorage(4, device="meta")}, "['m']"),
        ({"z": [torch._efficientzerotensor(3)]}, "['z'][0]"),
        (lambda: 0, "(root)"),
    ]
    for obj, path in cases:
        with pytest.raises(Exception):  # noqa: B017
            torch_bytes(obj)
        with pytest.raises(UnsupportedLeaf) as refusal:
            to_bytes(obj)
        assert refusal.value.path == f"m.pt: {path}"
        assert path in str(refusal.value)


def test_a_tensor_whose_storage_was_freed_is_refused_instead_of_read() -> None:
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeaf, match="smaller") as refusal:
        to_bytes({"ok": torch.ones(2), "freed": freed})
    assert refusal.value.path == "m.pt: ['freed']"


def test_a_refusal_leaves_the_cache_of_earlier_plans_intact() -> None:
    cache, state = image.PlanCache(), {"w": torch.ones(3), "f": 1}
    before = to_bytes(state, cache)
    with pytest.raises(UnsupportedLeaf):
        to_bytes({**state, "f": lambda: 0}, cache)
    assert to_bytes(state, cache) == before


# --- every way to read it ----------------------------------------------------------------------------------------


@pytest.fixture
def plain_file(tmp_path: pathlib.Path) -> Iterator[tuple[dict[str, object], pathlib.Path]]:
    base = torch.randn(64)
    state = {
        "w": base[8:40].view(4, 8),
        "t": base[8:40].view(8, 4).t(),
        "half": torch.randn(3, 5).bfloat16(),
        "empty": torch.empty(0, 3),
        "p": torch.nn.Parameter(torch.randn(5)),
        "od": collections.OrderedDict(step=torch.tensor(3.0), lr=0.1),
        "n": [1, "x", None, 2.5],
    }
    path = tmp_path / "m.pt"
    path.write_bytes(to_bytes(state))
    yield state, path


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("calculate", [False, True])
def test_torch_load_reads_it_in_every_mode(
    plain_file: tuple[dict[str, object], pathlib.Path], weights_only: bool, mapped: bool, calculate: bool
) -> None:
    state, path = plain_file
    with serialization_config.patch("load.calculate_storage_offsets", calculate):
        assert_equal(read(torch_bytes(state)), torch.load(path, weights_only=weights_only, mmap=mapped))


def test_under_fake_tensors_the_offsets_of_the_file_are_right(
    plain_file: tuple[dict[str, object], pathlib.Path],
) -> None:
    state, path = plain_file
    with FakeTensorMode(), serialization_config.patch("load.calculate_storage_offsets", True):
        fake = torch.load(path)
    data = path.read_bytes()
    for name in ("w", "half", "p"):
        assert fake[name].shape == state[name].shape
        start = (
            fake[name].untyped_storage()._checkpoint_offset + fake[name].storage_offset() * fake[name].element_size()
        )
        assert start % 64 == 0
        assert data[start : start + state[name].nbytes] == elements(state[name])


def test_on_the_meta_device_it_loads_without_data(plain_file: tuple[dict[str, object], pathlib.Path]) -> None:
    state, path = plain_file
    loaded = from_file(path, map_location="meta", weights_only=True)
    assert loaded["w"].is_meta
    assert loaded["t"].stride() == state["t"].stride()


@pytest.mark.skipif(not shutil.which("unzip"), reason="needs Info-ZIP's unzip")
def test_unzip_finds_no_error_in_it(plain_file: tuple[dict[str, object], pathlib.Path]) -> None:
    done = subprocess.run(["unzip", "-t", str(plain_file[1])], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No errors detected" in done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_load_gives_the_state_and_names_what_it_cannot_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(to_bytes({"w": torch.ones(3), "f": Fragment(1, torch.zeros(1))}))
    loaded = from_file(path)
    assert loaded["w"].tolist() == [1, 1, 1]
    with pytest.raises(RestoreError, match=r"m\.pt cannot be loaded .*weights_only=False"):
        from_file(path, weights_only=True)
    path.write_bytes(b"PK\x03\x04 no zip at all")
    with pytest.raises(RestoreError, match=r"m\.pt"):
        from_file(path)


def test_what_is_loaded_lives_in_the_memory_it_was_read_into_and_keeps_it() -> None:
    data = to_bytes({"w": torch.arange(300.0)})
    memory = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = data
    start = _C.address_of(memory)
    loaded: Any = image.load(memory, "m.pt")
    assert start <= loaded["w"].data_ptr() < start + len(data)
    del memory
    gc.collect()
    assert loaded["w"].tolist() == list(range(300))


@pytest.mark.parametrize("reason", ["an older torch", "WEIGHTS_ONLY", "NO_WEIGHTS_ONLY"])
def test_where_torch_has_orders_or_lacks_the_parts_it_loads_by_itself(
    reason: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(to_bytes({"w": torch.ones(3), "f": Fragment(1, torch.zeros(1))}))
    monkeypatch.setattr(image, "_CAN_LOAD_IN_PLACE", reason != "an older torch")
    monkeypatch.setenv(f"TORCH_FORCE_{reason}_LOAD", "1")
    if reason == "WEIGHTS_ONLY":
        with pytest.raises(RestoreError, match="cannot be loaded"):
            from_file(path)
    else:
        loaded: Any = from_file(path)
        assert loaded["w"].tolist() == [1, 1, 1]


# --- the zip itself ----------------------------------------------------------------------------------------------


def test_records_come_first_aligned_and_the_pickle_last_without_a_format_version() -> None:
    file = to_bytes([torch.ones(3), torch.ones(5), {"step": 1}], base=4096)
    entries = zipfile.ZipFile(io.BytesIO(file)).infolist()
    names = [entry.filename for entry in entries]
    assert names == ["archive/data/0", "archive/data/1", "archive/byteorder", "archive/version", "archive/data.pkl"]
    assert [entry.header_offset for entry in entries] == sorted(entry.header_offset for entry in entries)
    reader = torch._C.PyTorchFileReader(io.BytesIO(file))
    assert all(reader.get_record_offset(name.removeprefix("archive/")) % 64 == 0 for name in names)
    for entry in entries:  # the CRC stands in the local header, too
        assert int.from_bytes(file[entry.header_offset + 14 : entry.header_offset + 18], "little") == entry.CRC


def test_equal_states_give_equal_bytes_and_a_longer_pickle_moves_no_tensor() -> None:
    tensors = [torch.ones(3), torch.ones(5)]
    short, long = image.plan([tensors, 1]), image.plan([tensors, 10**30, "more"])
    assert short.rows(8192) == long.rows(8192)
    assert to_bytes([tensors, 1]) == to_bytes([tensors, 1], base=64)


@pytest.mark.parametrize("obj", [None, 3, {}, {"only": "words"}, torch.empty(0)])
def test_a_file_may_hold_no_tensor_bytes_at_all(obj: object) -> None:
    assert_like_torch(obj)


def test_finish_refuses_a_slot_or_crcs_that_do_not_fit() -> None:
    planned = image.plan(torch.ones(3))
    slot = bytearray(planned.nbytes + 10)
    crcs = _C.copy(slot, planned.rows(10))
    for bad in ((slot, 11, crcs), (slot, -1, crcs), (slot, 10, crcs + crcs), (slot, 10, b"")):
        with pytest.raises(ValueError):
            planned.finish(*bad)
    planned.finish(slot, 10, crcs)
    assert read(bytes(slot[10:])).tolist() == [1, 1, 1]


def test_records_and_offsets_beyond_4_gib_use_zip64(tmp_path: pathlib.Path) -> None:
    """A sparse file over a sparse tensor: neither takes memory or disk."""
    n = (4 << 30) + 100
    big = torch.from_file(str(tmp_path / "source"), shared=True, size=n, dtype=torch.uint8)
    state = {"big": big, "after": torch.arange(5.0), "n": n}
    planned = image.plan(state)
    rows = planned.rows(0)
    zeros = bytes(1 << 20)
    whole, rest = divmod(n, len(zeros))
    crcs = [zlib.crc32(zeros)] * whole + [zlib.crc32(bytes(rest))]
    lengths = [len(zeros)] * whole + [rest]
    big_crc = _C.crc32_combine(memoryview(_words("I", crcs)), memoryview(_words("Q", lengths)))
    path = tmp_path / "big.pt"
    with path.open("w+b") as file:
        file.truncate(planned.nbytes)
        with mmap.mmap(file.fileno(), planned.nbytes) as slot:
            small_crc = _C.copy(slot, rows[3:])
            planned.finish(slot, 0, big_crc.to_bytes(4, "little") + small_crc)
    with zipfile.ZipFile(path) as archive:
        sizes = {entry.filename: (entry.file_size, entry.CRC, entry.header_offset) for entry in archive.infolist()}
        assert sizes["archive/data/0"] == (n, big_crc, 0)
        assert sizes["archive/data/1"][2] > n
        assert archive.read("archive/data/1") == elements(state["after"])
    with path.open("rb") as file:  # readers of streams have nothing but the local header
        version, *fields = struct.unpack("<4xH8xIIIHH", file.read(30))
        assert (version, fields[:3]) == (45, [big_crc, 0xFFFFFFFF, 0xFFFFFFFF])
        assert struct.unpack("<HHQQ", file.read(fields[3] + 20)[fields[3] :]) == (1, 16, n, n)
    loaded = from_file(path)
    assert loaded["after"].tolist() == [0, 1, 2, 3, 4]
    assert (len(loaded["big"]), loaded["big"][-1].item(), loaded["n"]) == (n, 0, n)
    if shutil.which("unzip"):
        listing = subprocess.run(["unzip", "-v", str(path)], capture_output=True, text=True, timeout=30, check=False)
        assert listing.returncode == 0
        assert str(n) in listing.stdout


def test_more_than_65535_records_use_zip64() -> None:
    n = 70_000
    archive = pt_zip.Archive(pt_zip.Records([1] * n), [("version", b"3\n")])
    slot = bytearray(archive.nbytes)
    crc = archive.finish(slot, 0, zlib.crc32(b"\x00").to_bytes(4, "little") * n)
    assert crc == zlib.crc32(slot)
    file = zipfile.ZipFile(io.BytesIO(slot))
    assert len(file.infolist()) == n + 1
    assert file.read("archive/data/69999") == b"\x00"
    reader = torch._C.PyTorchFileReader(io.BytesIO(slot))
    assert reader.get_record("version") == b"3\n"
    assert reader.get_record_offset("data/69999") % 64 == 0


def _words(code: str, values: list[int]) -> bytes:
    return b"".join(value.to_bytes(4 if code == "I" else 8, "little") for value in values)


def test_tensors_elsewhere_are_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pt_layout, "_HOST", "elsewhere")
    base = torch.arange(100.0)
    planned = image.plan({"v": base[10:20], "e": torch.empty(0)})
    rows = planned.rows(512)
    assert rows[2::3].tolist() == [0, 0]
    slot = bytearray(512 + planned.nbytes)
    crcs = bytearray(_C.copy(slot, rows))
    for number, tensor, offset in planned.device_records():
        assert (tensor.dtype, tensor.dim(), tensor.is_contiguous()) == (torch.uint8, 1, True)
        data = bytes(tensor.tolist())
        slot[512 + offset : 512 + offset + len(data)] = data
        crcs[4 * number : 4 * number + 4] = zlib.crc32(data).to_bytes(4, "little")
    planned.finish(slot, 512, crcs)
    assert read(bytes(slot[512:]))["v"].tolist() == list(range(10, 20))


# --- the cache ---------------------------------------------------------------------------------------------------


def test_a_repeat_pickles_no_tensor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = image.PlanCache()

    def state(step: int) -> dict[str, object]:
        return {"step": step, f"new {step}": step, "w": [torch.full((4,), float(step)) for _ in range(10)]}

    to_bytes(state(1), cache)
    monkeypatch.setattr(pt_layout, "_Filler", None)
    for step in (2, 3):
        assert read(to_bytes(state(step), cache))["w"][9].tolist() == [float(step)] * 4


BASE = torch.arange(64, dtype=torch.float32)
CHANGES: dict[str, Callable[[], object]] = {
    "as it was": lambda: [torch.ones(4), BASE[0:8], BASE[8:16], {"k": 1}],
    "values": lambda: [torch.zeros(4), BASE[0:8], BASE[8:16], {"k": 1}],
    "another leaf": lambda: [torch.ones(4), BASE[0:8], BASE[8:16], {"k": "v" * 500}],
    "dtype": lambda: [torch.ones(4, dtype=torch.int32), BASE[0:8], BASE[8:16], {"k": 1}],
    "shape": lambda: [torch.ones(2, 2), BASE[0:8], BASE[8:16], {"k": 1}],
    "stride": lambda: [torch.ones(1).expand(4), BASE[0:8], BASE[8:16], {"k": 1}],
    "offset": lambda: [torch.ones(4), BASE[1:9], BASE[8:16], {"k": 1}],
    "requires_grad": lambda: [torch.ones(4, requires_grad=True), BASE[0:8], BASE[8:16], {"k": 1}],
    "sharing": lambda: [torch.ones(4), BASE[0:8], BASE[8:16].clone(), {"k": 1}],
    "same object": lambda: [same := torch.ones(4), BASE[0:8], BASE[8:16], {"k": same}],
    "order": lambda: [torch.ones(4), BASE[8:16], BASE[0:8], {"k": 1}],
    "one less": lambda: [torch.ones(4), BASE[0:8], {"k": 1}],
    "one more": lambda: [torch.ones(4), BASE[0:8], BASE[8:16], {"k": torch.ones(4)}],
    "class": lambda: [torch.nn.Parameter(torch.ones(4), requires_grad=False), BASE[0:8], BASE[8:16], {"k": 1}],
    "subclass": lambda: [torch.ones(4).as_subclass(Tagged), BASE[0:8], BASE[8:16], {"k": 1}],
    "attribute": lambda: [with_attributes(torch.ones(4), ds_id=1), BASE[0:8], BASE[8:16], {"k": 1}],
    "negative": lambda: [torch._neg_view(torch.ones(4)), BASE[0:8], BASE[8:16], {"k": 1}],
    "complex": lambda: [torch.ones(4, dtype=torch.complex64), BASE[0:8], BASE[8:16], {"k": 1}],
    "conjugate": lambda: [torch.ones(4, dtype=torch.complex64).conj(), BASE[0:8], BASE[8:16], {"k": 1}],
    "sparse": lambda: [torch.ones(4).to_sparse(), BASE[0:8], BASE[8:16], {"k": 1}],
    "meta": lambda: [torch.ones(4, device="meta"), BASE[0:8], BASE[8:16], {"k": 1}],
    "storage": lambda: [torch.ones(4), BASE[0:8].untyped_storage(), BASE[8:16].clone(), {"k": 1}],
    "more storage": lambda: [torch.ones(4), BASE.clone()[0:8], BASE[8:16].clone(), {"k": 1}],
    "longer memo": lambda: [torch.ones(4), BASE[0:8], BASE[8:16], {"k": [str(i) for i in range(1000)]}],
    "attribute first": lambda: [with_attributes(torch.ones(4), ds_id=1), torch.zeros(4)],
    "attribute last": lambda: [torch.zeros(4), with_attributes(torch.ones(4), ds_id=1)],
    "untyped storage": lambda: [random_bytes(4).untyped_storage()],
    "typed storage": lambda: [typed(random_bytes(4))],
    "class of a container": lambda: (torch.ones(4), BASE[0:8], BASE[8:16], collections.OrderedDict(k=1)),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_every_change_of_the_layout_is_noticed_by_the_cache() -> None:
    """From every state to every other: the bytes are those of a plan without cache."""
    fresh = {name: to_bytes(make()) for name, make in CHANGES.items()}
    for before in CHANGES:
        for after in CHANGES:
            cache = image.PlanCache()
            to_bytes(CHANGES[before](), cache)
            assert to_bytes(CHANGES[after](), cache) == fresh[after], (before, after)


def test_the_cache_refuses_what_changed_for_the_worse() -> None:
    cache, pair = image.PlanCache(), [torch.ones(4), torch.ones(4, dtype=torch.int32)]
    to_bytes(pair, cache)
    buffer = bytearray(16)
    two = [torch.frombuffer(buffer, dtype=torch.float32), torch.frombuffer(buffer, dtype=torch.int32)]
    with pytest.raises(UnsupportedLeaf, match="another dtype"):
        to_bytes(two, cache)
    pair[0].untyped_storage().resize_(8)
    with pytest.raises(UnsupportedLeaf, match="smaller"):
        to_bytes(pair, cache)


def test_the_cache_holds_no_tensor() -> None:
    import weakref

    cache = image.PlanCache()
    state = [torch.ones(100), torch.nn.Parameter(torch.ones(3)), torch.ones(4).untyped_storage()]
    alive = [weakref.ref(state[0]), weakref.ref(state[0].untyped_storage()), weakref.ref(state[1])]
    to_bytes(state, cache)
    del state
    assert [ref() for ref in alive] == [None] * 3


# Random trees over a pool of storages: every leaf may share with every other.


@st.composite
def pools(draw: st.DrawFn) -> list[torch.Tensor]:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.uint16]
    return [
        random_bytes(48 * d.itemsize).view(d) for d in draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=4))
    ]


@st.composite
def leaves(draw: st.DrawFn, pool: list[torch.Tensor]) -> object:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(
            st.one_of(st.none(), st.integers(), st.text(max_size=5), st.floats(allow_nan=False), st.binary(max_size=4))
        )
    base = draw(st.sampled_from(pool))
    if kind == 1:
        return base
    view = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](base[draw(st.sampled_from([0, 8, 24])) :][:24])
    if kind == 2 and view.is_floating_point():
        return torch.nn.Parameter(view, requires_grad=draw(st.booleans()))
    if kind == 3:
        return with_attributes(view.detach(), ds_id=draw(st.integers(0, 3)))
    if kind == 4:
        return view.clone()
    if kind == 5 and view.is_complex():
        return view.conj()
    return view


def trees(pool: list[torch.Tensor]) -> st.SearchStrategy[object]:
    keys = st.one_of(st.text(max_size=3), st.integers(0, 5))
    return st.recursive(
        leaves(pool),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4), st.tuples(inner, inner)
        ),
        max_leaves=12,
    )


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_sequence_of_random_states_is_as_torch_saves_it_with_and_without_cache(data: st.DataObject) -> None:
    pool = data.draw(pools())
    cache = image.PlanCache()
    states = data.draw(st.lists(trees(pool), min_size=1, max_size=3))
    for state in [*states, *states]:
        file = to_bytes(state, cache)
        assert file == to_bytes(state)
        assert_equal(read(torch_bytes(state)), read(file))
