"""What the benchmarks can drive: the protocol of a system, and the systems that need nothing but torch.

Imports the standard library and torch alone, so it runs in the environment of any rival. ``benchmarks/ours.py`` and
``benchmarks/deepspeed_systems.py`` hold those that need ckpt_engine or DeepSpeed, ``benchmarks/peers/`` the rivals.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch

State = dict[str, torch.Tensor]
"""What is trained and saved: names and CPU tensors of float32, which every step changes in place."""


class System:
    """One way to make checkpoints, in one process per rank, driven by ``worker.py``.

    A step of the training is: forward and backward, ``guard()``, an update in place of every tensor. A save
    is ``save(step)`` between two steps. What both take is what blocks the training. Nothing is saved while the save
    before may still be under way, except in the back-to-back measurement (if it is ``overlapping``).

    Everything a system writes goes below ``self.work``, which all its ranks share. A constructor only stores; whatever
    is slow or may fail belongs to ``start``. A system raises whatever its library raises: the row says "not run".
    """

    fsynced: bool = False
    """True if the library itself syncs its data before it calls a save complete; may depend on ``variant``."""
    persistent: bool = True
    """False if a save ends in memory."""
    needs_group: ClassVar[bool] = False
    """True if it needs ``torch.distributed`` (gloo; made by the worker before ``start``) even for a single rank."""
    overlapping: ClassVar[bool] = False
    """True if ``save`` may be called while the save before is under way: it waits for that, or queues."""
    loads_in_place: ClassVar[bool] = False
    """True if ``load`` sets the state itself back; rather give tensors of their own."""
    memory: ClassVar[float] = 2.0
    """Memory it needs at once, as a multiple of the state, the state itself included; an estimate, from above."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Ways to save that share one process and its memory; each is a row. ``self.variant`` is the one asked for."""

    def __init__(self, work: Path, *, rank: int = 0, world: int = 1, resuming: bool = False) -> None:
        """``resuming``: the process that saved was killed; this one only starts and loads."""
        self.work, self.rank, self.world, self.resuming = work, rank, world, resuming
        self.variant = self.variants[0] if self.variants else ""
        self.state: State = {}

    def make_state(self, mib: int, tensors: int) -> State:
        """About ``mib`` MiB in ``tensors`` tensors; numbers come later. Override if a framework owns it."""
        return {f"layer.{number}.weight": torch.empty(size) for number, size in enumerate(split(mib, tensors))}

    def start(self, state: State) -> None:
        """Everything that is done once, before the training: processes, pools, buffers."""
        self.state = state

    def save(self, step: int) -> None:
        """The call in the training loop; returns when the training may go on."""
        raise NotImplementedError

    def guard(self) -> None:
        """What the library needs before the optimizer may change the state; called in every step, save or no save."""

    def done(self) -> bool:
        """True if the last save is as durable as the library makes it; never blocks. After ``wait`` always true."""
        return True

    def wait(self) -> None:
        """Block until the last save is as durable as the library makes it; raise if it failed."""

    def load(self, step: int) -> State:
        """What ``save(step)`` saved, in tensors of its own; all names of the state of this rank."""
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """Remove what ``save(step)`` wrote (rank 0, nothing is under way). Nothing to do if the library rotates."""
        remove(self.path(step))

    def close(self) -> None:
        """Stop processes and threads."""

    def path(self, step: int) -> Path:
        """Where a save goes, for systems that are told so."""
        return self.work / f"step-{step}"

    def copies(self) -> State:
        """Tensors to load into."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}


class Handled(System):
    """One of ours: it saves to memory or, by its variant, to storage, and such a save has a handle."""

    overlapping = True

    def __init__(self, work: Path, **place: Any) -> None:
        super().__init__(work, **place)
        self.handle: Any = None

    @property
    def fsynced(self) -> bool:  # type: ignore[override]
        return self.persistent

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return "storage" in self.variant

    def to_memory(self, step: int) -> None:
        raise NotImplementedError

    def to_storage(self, step: int) -> Any:
        """Returns the handle."""
        raise NotImplementedError

    def save(self, step: int) -> None:
        self.handle = None
        if self.persistent:
            self.handle = self.to_storage(step)
        else:
            self.to_memory(step)

    def done(self) -> bool:
        return self.handle is None or bool(self.handle.done())

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.result()

    def face(self) -> Any:
        """The engine, or what ``attach`` returned."""
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """``keep_last`` does it, after the save; others, whose turn it is then, do not pay for that."""
        core = self.face()._core
        core.outbox.await_tidy(core.link, 60.0)


def split(mib: float, tensors: int) -> list[int]:
    """``tensors`` unequal sizes in float32 elements, the largest twenty times the least, ``mib`` MiB in all."""
    shares = [1 + 19 * number / max(1, tensors - 1) for number in range(tensors)]
    scale = mib * 2**18 / sum(shares)
    return [max(1, int(share * scale)) for share in shares]


def remove(path: Path) -> None:
    """A file or a tree, if it is there."""
    import shutil

    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TorchSave(System):
    """``torch.save`` of the state: as most scripts do it, and so that it is durable when it returns."""

    memory = 1.2
    variants = ("torch.save", "torch.save + fsync")

    @property
    def fsynced(self) -> bool:  # type: ignore[override]
        return "fsync" in self.variant

    @property
    def file(self) -> str:
        return f"rank{self.rank}.pt"

    def save(self, step: int) -> None:
        folder = self.path(step)
        folder.mkdir(exist_ok=True)
        if self.variant == "torch.save":
            torch.save(self.state, folder / self.file)
            return
        with open(folder / f"{self.file}.tmp", "wb") as stream:
            torch.save(self.state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(folder / f"{self.file}.tmp", folder / self.file)
        sync(folder)
        sync(self.work)

    def load(self, step: int) -> State:
        loaded: State = torch.load(self.path(step) / self.file, weights_only=True)
        return loaded


class DcpSync(System):
    """``torch.distributed.checkpoint.save``."""

    fsynced = True
    memory = 1.5

    def named(self) -> State:
        """DCP takes equal names of two ranks for replicas."""
        return {f"rank{self.rank}.{name}": tensor for name, tensor in self.state.items()}

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.named(), checkpoint_id=self.path(step), no_dist=self.world == 1)

    def load(self, step: int) -> State:
        import torch.distributed.checkpoint as dcp

        into = {f"rank{self.rank}.{name}": tensor for name, tensor in self.copies().items()}
        dcp.load(into, checkpoint_id=self.path(step), no_dist=self.world == 1)
        return {name.partition(".")[2]: tensor for name, tensor in into.items()}


class DcpAsync(DcpSync):
    """``torch.distributed.checkpoint.async_save`` as it is by default: a thread, and a stager that clones."""

    needs_group = True
    overlapping = True
    memory = 2.3
    kind = "THREAD"

    def __init__(self, work: Path, **place: Any) -> None:
        super().__init__(work, **place)
        self.staged: Future[Any] | None = None
        self.upload: Future[Any] | None = None
        self.options: dict[str, Any] = {}

    def start(self, state: State) -> None:
        super().start(state)
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.options = {"async_checkpointer_type": AsyncCheckpointerType[self.kind]}
        if self.world > 1:  # a group of its own, apart from that of the training
            self.options["process_group"] = torch.distributed.new_group(backend="gloo")

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        if self.upload is not None:  # one at a time, which is what the tutorial asks its users to do
            self.upload.result()
        answer = dcp.async_save(self.named(), checkpoint_id=self.path(step), **self.options)
        self.staged = getattr(answer, "staging_completion", None)
        self.upload = getattr(answer, "upload_completion", answer)

    def guard(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def done(self) -> bool:
        return self.upload is None or self.upload.done()

    def wait(self) -> None:
        if self.upload is not None:
            self.upload.result()


class DcpProcess(DcpAsync):
    """``async_save`` with a process of its own: what was cloned goes to it through a pipe and shared memory."""

    memory = 4.4  # a clone more than the thread, and that of the save before goes late
    kind = "PROCESS"


class DcpProcessShm(DcpProcess):
    """The process, and a stager whose thread copies into shared memory that both keep; the optimizer waits for it."""

    memory = 2.5

    def start(self, state: State) -> None:
        super().start(state)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.options["async_stager"] = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # both need CUDA
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )

    def close(self) -> None:
        self.options["async_stager"].close()


SYSTEMS = [
    ("torch.save", "TorchSave"),
    ("dcp.save", "DcpSync"),
    ("dcp.async_save, thread", "DcpAsync"),
    ("dcp.async_save, process", "DcpProcess"),
    ("dcp.async_save, process, shm, async staging", "DcpProcessShm"),
]
"""The rows, and the classes that make them: every module with systems has such a list."""
