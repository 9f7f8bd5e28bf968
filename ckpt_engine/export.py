"""A committed checkpoint → a directory of torch.distributed.checkpoint (DCP), safetensors, one file of plain torch.

Works without ranks and process groups, on any machine that sees the root; every byte is verified before it is used.
Sharded tensors (``DTensor``: FSDP2, tensor parallel) are put together from the shards of all ranks, so that what comes
out fits any number of ranks. ``load`` reads all three forms.

The top level of what is exported is named after the files of the checkpoint, without rank and suffix:
``model-0.pt`` and ``model-1.pt`` become ``model``. Files of several ranks that hold no shards of anything
(``rng-0.pt``, ``rng-1.pt``) stay apart, as ``rng-0`` and ``rng-1``. ``step`` is added.

Sources: ``torch/distributed/checkpoint/planner.py``, ``default_planner.py``, ``format_utils.py``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner, state_dict_loader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_engine import listing
from ckpt_engine.errors import ConfigError, NotFound
from ckpt_engine.manifest import Committed, FileEntry
from ckpt_engine.reading import Reading
from ckpt_engine.storage.posix import PosixStorage

Path = str | os.PathLike[str]


@dataclass
class Sharded:
    """A tensor in pieces, by their offsets; the same piece of several ranks counts once."""

    size: torch.Size
    dtype: torch.dtype
    pieces: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def whole(self) -> Tensor:
        """All pieces in one tensor of their own memory."""
        whole = torch.empty(self.size, dtype=self.dtype)
        for offsets, piece in self.pieces.items():
            whole[tuple(slice(at, at + n) for at, n in zip(offsets, piece.shape, strict=True))] = piece
        return whole

    @property
    def missing(self) -> int:
        """Elements that no piece holds; pieces do not overlap."""
        return self.size.numel() - sum(piece.numel() for piece in self.pieces.values())


@dataclass
class Flat:
    """A nested state: ``leaves`` by dotted key, and the ``paths`` that lead back."""

    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Any] = field(default_factory=dict)

    def nested(self, leaf: Callable[[Any], Any]) -> dict[str, Any]:
        return dict(unflatten_state_dict({key: leaf(value) for key, value in self.leaves.items()}, self.paths))


def to_dcp(root: Path, out: Path, *, tag: str = "") -> None:
    """Write the newest checkpoint of ``root`` (or ``tag``) as a directory that ``torch.distributed.checkpoint.load``
    reads with any number of ranks. Shard after shard: the state need not fit into memory.

    Raises NotFound, Corrupt, ConfigError (what cannot be exported, or ``out`` is not empty).
    """
    if "no_dist" not in inspect.signature(save).parameters:
        raise ConfigError(f"torch {torch.__version__} writes DCP in a process group only: export with a newer torch")
    folder = os.fspath(out)
    if os.path.isfile(folder) or (os.path.isdir(folder) and os.listdir(folder)):
        raise ConfigError(f"{folder} exists: export into a new directory")
    with _state(root, tag) as flat, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        writer = FileSystemWriter(folder, thread_count=len(os.sched_getaffinity(0)))
        save({}, storage_writer=writer, planner=_Planner(flat), no_dist=True)


def to_torch(root: Path, out: Path, *, tag: str = "") -> None:
    """Write it as one file of ``torch.save``; the whole state passes through memory. Raises as ``to_dcp`` does."""
    with _state(root, tag) as flat, _new_file(out) as name:
        torch.save(flat.nested(_whole), name)


def to_safetensors(root: Path, out: Path, *, part: str = "model", tag: str = "") -> None:
    """Write the tensors of one ``part`` under their dotted keys. Tied weights are written under each of their names.

    Raises as ``to_dcp`` does, and ConfigError where the part holds something that is no tensor.
    """
    torch_of = _safetensors()
    with _state(root, tag) as flat, _new_file(out) as name:
        found = {key: value for key, value in flat.leaves.items() if str(flat.paths[key][0]) == part}
        if not found:
            parts = sorted({str(path[0]) for path in flat.paths.values()} - {"step"})
            raise ConfigError(f"there is no {part!r} in this checkpoint: it holds {parts}")
        for key, value in found.items():
            if not isinstance(value, Tensor | Sharded):
                raise ConfigError(f"{key} is a {type(value).__name__}: safetensors hold nothing but tensors")
        tensors = {key.partition(".")[2] or key: _whole(value).contiguous().clone() for key, value in found.items()}
        torch_of.save_file(tensors, name, metadata={"format": "pt"})


def load(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """The nested state in a DCP directory, a ``.safetensors`` file, or a file of ``torch.save``: whole, on the CPU.

    For ``set_model_state_dict(net, …, options=StateDictOptions(full_state_dict=True))`` and its like. A rank of a
    sharded model loads a DCP directory better by itself, with ``torch.distributed.checkpoint.load``. Raises NotFound.
    """
    name = os.fspath(path)
    if os.path.isfile(os.path.join(name, ".metadata")):
        reader = FileSystemReader(name)
        into: dict[str, Any] = {}
        planned = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # as dcp_to_torch_save does
        state_dict_loader._load_state_dict(into, storage_reader=reader, planner=planned, no_dist=True)
        return into
    if not os.path.isfile(name):
        raise NotFound(f"{name} is neither a file nor a directory of torch.distributed.checkpoint")
    if name.endswith(".safetensors"):
        return dict(_safetensors().load_file(name))
    found = torch.load(name, map_location="cpu", weights_only=weights_only, mmap=True)
    return dict(found)


# -- what is exported ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _state(root: Path, tag: str) -> Iterator[Flat]:
    """The state of all ranks; it lies in the files, which stay while the block runs."""
    storage, where = PosixStorage(), os.path.realpath(root)
    committed = _find(storage, where, tag)
    lease = Reading(storage, where, committed.manifest.attempt.tag)
    try:
        for damage in listing.verify(storage, committed):
            raise damage
        yield _merge(storage, committed)
    finally:
        lease.close()


def _find(storage: PosixStorage, root: str, tag: str) -> Committed:
    if not os.path.isdir(root):
        raise NotFound(f"there is no directory {root}")
    found = listing.list_committed(storage, root).committed
    chosen = next((one for one in found if tag in ("", one.manifest.attempt.tag)), None)
    if chosen is None:
        raise NotFound(f"no committed checkpoint {tag} in {root}".replace("  ", " "))
    manifest = chosen.manifest
    if manifest.node is not None and manifest.nodes > 1:
        raise ConfigError(f"{chosen.commit_dir} holds the files of node {manifest.node} of {manifest.nodes} only")
    names = [entry.name for entry in manifest.files()]
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        raise ConfigError(
            f"{chosen.commit_dir} was saved by DeepSpeed, whose own tools convert it: zero_to_fp32.py in that "
            "directory (safetensors and torch), or python -m deepspeed.checkpoint.ds_to_universal"
        )
    return chosen


def _merge(storage: PosixStorage, committed: Committed) -> Flat:
    manifest = committed.manifest
    flat = Flat({"step": manifest.attempt.step}, {"step": ("step",)})
    files = [
        (shard.rank, entry, _unranked(entry.name, shard.rank)) for shard in manifest.shards for entry in shard.files
    ]
    seen = Counter((rank, short) for rank, _, short in files)
    parts: dict[str, dict[int, FileEntry]] = {}
    for rank, entry, short in files:
        parts.setdefault(short if seen[rank, short] == 1 else entry.name, {})[rank] = entry
    for part, entries in parts.items():
        states = {rank: _read(storage, committed, entry) for rank, entry in entries.items()}
        together = len(states) == 1 or any(
            isinstance(leaf, Sharded) for state in states.values() for leaf in state.leaves.values()
        )
        for rank, state in states.items():
            _add(flat, part if together else os.path.splitext(entries[rank].name)[0], state)
    lacking = [key for key, value in flat.leaves.items() if isinstance(value, Sharded) and value.missing]
    if lacking:
        raise ConfigError(f"{committed.commit_dir}: no rank has saved all of {lacking[0]} ({len(lacking)} tensors)")
    return flat


def _unranked(name: str, rank: int) -> str:
    """``model-0.pt`` of rank 0 → ``model``: without the last number that is the rank, and without the suffix."""
    stem = os.path.splitext(name)[0]
    found = re.fullmatch(rf"(.*?)[-_./]?(?:rank[-_]?)?(?<!\d)0*{rank}(\D*)", stem)
    short = found[1] + found[2] if found else stem
    return short.strip("-_./") or stem


def _read(storage: PosixStorage, committed: Committed, entry: FileEntry) -> Flat:
    path = listing.open_path(storage, committed, entry)
    if path is None:
        raise NotFound(f"{entry.name} of {committed.commit_dir} was removed while it was exported")
    meshes = logging.getLogger("torch.distributed.device_mesh")  # says of each tensor that there is no process group
    before = meshes.level
    meshes.setLevel(logging.ERROR)
    try:
        state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    finally:
        meshes.setLevel(before)
    if not isinstance(state, Mapping):
        return Flat({"": state}, {"": ()})
    leaves, paths = flatten_state_dict(dict(state))
    return Flat({key: _leaf(key, value) for key, value in leaves.items()}, dict(paths))


def _leaf(key: str, value: Any) -> Any:
    if not hasattr(value, "__create_chunk_list__"):
        return value
    try:
        chunks = value.__create_chunk_list__()
    except RuntimeError as error:
        raise ConfigError(f"{key} cannot be exported: {error}") from error
    local = value.to_local().detach()
    if not chunks or local.numel() == 0:
        return Sharded(value.size(), value.dtype)
    return Sharded(value.size(), value.dtype, {tuple(chunks[0].offsets): local})


def _add(flat: Flat, part: str, state: Flat) -> None:
    for key, value in state.leaves.items():
        name, path = (f"{part}.{key}" if key else part), (part, *state.paths[key])
        known = flat.leaves.get(name)
        if isinstance(known, Sharded) and isinstance(value, Sharded):
            if known.size != value.size or known.dtype != value.dtype:
                raise ConfigError(f"{name} is {tuple(known.size)} on one rank and {tuple(value.size)} on another")
            known.pieces.update(value.pieces)
        else:  # what is not sharded is the same on all ranks: the lowest one counts
            flat.leaves.setdefault(name, value)
            flat.paths.setdefault(name, path)


# -- how it is written ---------------------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """One process writes the pieces of all ranks."""

    def __init__(self, flat: Flat) -> None:
        super().__init__()
        self._flat = flat

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.mappings, self.is_coordinator = self._flat.leaves, self._flat.paths, is_coordinator

    def create_local_plan(self) -> planner.SavePlan:
        items = [item for key, value in self._flat.leaves.items() for item in _items(key, value)]
        self.plan = planner.SavePlan(items, planner_data=self._flat.paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._flat.leaves[index.fqn]
        return value.pieces[tuple(index.offset or ())] if isinstance(value, Sharded) else value


def _items(key: str, value: Any) -> Iterator[planner.WriteItem]:
    if not isinstance(value, Tensor | Sharded):
        yield planner.WriteItem(index=MetadataIndex(key), type=planner.WriteItemType.BYTE_IO)
        return
    size = value.size if isinstance(value, Sharded) else value.size()
    pieces = value.pieces if isinstance(value, Sharded) else {(0,) * len(size): value}
    for offsets, piece in pieces.items():
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=piece.size())
        data = planner.TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(piece), size=size)
        index = MetadataIndex(key, torch.Size(offsets))
        yield planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Sharded) else value


@contextlib.contextmanager
def _new_file(out: Path) -> Iterator[str]:
    """A name to write under; when the block has ended well the file is durable and ``out``."""
    name = os.fspath(out)
    if os.path.exists(name):
        raise ConfigError(f"{name} exists: export into a new file")
    os.makedirs(os.path.dirname(os.path.abspath(name)), exist_ok=True)
    temporary = f"{name}.tmp-{os.getpid()}"
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError("safetensors are not installed: pip install 'ckpt-engine[export]'") from error
    return safetensors.torch
