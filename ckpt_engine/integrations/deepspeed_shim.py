"""What DeepSpeed sees while it saves and loads: a checkpoint engine that captures files, and one that serves them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from ckpt_engine import image
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.disk_names import SCRIPTS
from ckpt_engine.errors import CkptError, ConfigError, RestoreError
from ckpt_engine.events import log, warn_once
from ckpt_engine.overlap import Everything, storages, tensors_of
from ckpt_engine.source import Source
from ckpt_engine.staging import Blob, Planned
from ckpt_engine.storage.base import Storage


class Transaction:
    """What one rank captures while DeepSpeed's save runs: its files, or the error that kept it from it."""

    def __init__(self, core: Checkpointer, folder: str, *, storage: bool, owned: Container[int] = ()) -> None:
        self.files: dict[str, Planned] = {}
        self.storage = storage
        self.error: Exception | None = None
        self._core = core
        self._folder = os.path.realpath(folder)
        self._owned = owned

    def capture(self, state: Any, path: str) -> None:
        """Plan one file. Never raises: this rank goes on to DeepSpeed's last barrier, and raises ``error`` then."""
        if self.error is not None:
            return
        try:
            name = name_below(self._folder, path)
            if name.startswith("..") or name in self.files:
                raise ConfigError(f"DeepSpeed saves {path}: twice, or outside of {self._folder}")
            whole = bool(self._owned) and name.endswith("optim_states.pt")  # nothing but what the optimizer owns
            self.files[name] = self._core.plan(name, state, Everything() if whole else self._owned)
        except Exception as error:  # MemoryError, too
            self.error = error

    def capture_tools(self, scripts: Path) -> None:
        """DeepSpeed's recovery scripts become files of this shard; a memory save needs none. Never raises."""
        for tool in SCRIPTS if self.storage else ():
            try:
                self.files[tool] = Planned(Blob((scripts / tool).read_bytes()), origin="tool")
            except OSError as error:  # zero_to_torch.py is newer than DeepSpeed 0.15
                log.debug("without %s: %s", tool, error)


class Loading:
    """Serves the files of one source under the paths that DeepSpeed asks for."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source = source
        self._folder = os.path.realpath(folder)
        self._names = set(source.candidate.names())

    def serves(self, path: str) -> bool:
        return name_below(self._folder, path) in self._names

    def load(self, path: str, map_location: Any) -> Any:
        name = name_below(self._folder, path)
        return image.load(self._source.fetch(name), name, map_location=map_location)


class Shim:
    """DeepSpeed's checkpoint engine from attach to close. Outside of our saves and loads it is the one it replaced.

    ``create`` and ``commit`` get a CheckpointCommitInfo, or a tag before DeepSpeed 0.17: neither is looked at.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.saving: Transaction | None = None
        self.loading: Loading | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # whatever this version of DeepSpeed has beside

    def create(self, info: Any) -> None:
        if self.saving is None:
            self.inner.create(info)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self.saving is None:
            self.inner.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        if self.saving is None:
            self.inner.save(state_dict, path)  # save_16bit_model and the like: synchronous, as ever
        else:
            self.saving.capture(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        if self.loading is not None and self.loading.serves(path):
            return self.loading.load(path, map_location)
        return self.inner.load(path, map_location=map_location)

    def commit(self, info: Any) -> Any:
        return True if self.saving is not None else self.inner.commit(info)

    def is_decoupled(self) -> bool:
        return False  # the decoupled protocol hands ``latest`` to DeepSpeed, which loses it

    def preserves_storage_sharing(self) -> bool:
        return False  # an image cuts every storage to what is referenced: DeepSpeed need not clone first


def tag_in(storage: Storage, latest: str) -> str:
    """What the file ``latest`` names, "" if it is not there; a hint, that others may write.

    Raises StorageError for what is no small file, RestoreError for what leads out of its directory.
    """
    tag = os.fsdecode(storage.read_small(latest, 4096) or b"").strip()
    if os.path.isabs(tag) or ".." in tag.split("/") or "\0" in tag:
        raise RestoreError(f"{latest} names {tag!r:.200}, which is not in its directory")
    return tag


def name_below(folder: str, path: str) -> str:
    """``path`` relative to ``folder``, a real path; the file itself may be a link."""
    parent, base = os.path.split(path)
    return os.path.normpath(os.path.join(os.path.relpath(os.path.realpath(parent), folder), base))


def await_saves(core: Checkpointer) -> None:
    """Before a framework loads: every save in flight has ended; a failure is told as ``on_error`` says."""
    try:
        core.wait()
    except CkptError as error:
        if core.options.on_error == "raise":
            raise
        log.warning("before loading: %s", error)


@contextlib.contextmanager
def placeholders(source: Source, folder: str, *, filled: bool) -> Iterator[None]:
    """Make ``folder`` look like the checkpoint of ``source``: a ``latest``, and files to find by globbing.

    They are empty, since ``Loading`` serves their bytes; ``filled`` ones can be read by anybody in this process.
    """
    descriptors: list[int] = []
    tag = source.candidate.attempt.tag
    try:
        for name in dict.fromkeys(source.candidate.names()):
            path = Path(folder, tag, name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if filled:
                descriptors.append(os.memfd_create("ckpt-restore", os.MFD_CLOEXEC))
                with open(descriptors[-1], "wb", closefd=False) as file:
                    file.write(memoryview(source.fetch(name))[: source.candidate.named(name)[1].nbytes])
                path.symlink_to(f"/proc/self/fd/{descriptors[-1]}")
            else:
                path.touch()
        Path(folder, "latest").write_text(tag)
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def owned_by(engine: Any, staging: str) -> frozenset[int]:
    """Storages that change in the engine's step and nowhere else; empty: all is copied at once.

    Not of frozen parameters: they may be an average that the training loop moves.
    """
    if staging == "blocking" or engine.optimizer is None:
        return frozenset()
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if any("Muon" in kind.__name__ for kind in type(base).__mro__):
        warn_once("muon", f"{type(base).__name__} moves its momentum in backward: saves block")
        return frozenset()
    return storages([*(p for p in engine.module.parameters() if p.requires_grad), *tensors_of(base)])


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """``wrapper`` with the name and signature of ``original``: frameworks inspect it."""

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        return wrapper(*arguments, **options)

    return call


def refuse_unsupported(engine: Any) -> None:
    """Raise ConfigError, with the reason, for engines whose state cannot be captured inside ``save_checkpoint``."""
    if not hasattr(engine, "checkpoint_engine"):
        raise ConfigError(f"attach() needs the engine that deepspeed.initialize returns, not a {type(engine).__name__}")
    if engine.checkpoint_engine is None:
        raise ConfigError("this engine has no checkpoint_engine (ZeRO-3 inference): there is nothing to checkpoint")
    if isinstance(engine.checkpoint_engine, Shim):
        raise ConfigError("this engine is attached already: close() the first attachment before a second attach()")
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise ConfigError(
            "optimizer offload to NVMe: DeepSpeed copies those files itself, outside of its checkpoint engine"
        )
    if getattr(engine, "zenflow", False):
        raise ConfigError("ZenFlow updates the optimizer asynchronously: its state cannot be captured at a step")
    if callable(getattr(engine, "super_offload", None)) and engine.super_offload():
        raise ConfigError("SuperOffload steps asynchronously: its state cannot be captured at a step")
