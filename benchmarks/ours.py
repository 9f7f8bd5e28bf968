"""ckpt_engine as a system of the benchmarks, and the bare copies that nothing can be faster than."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from systems import Handled, State, System, TorchSave

from ckpt_engine import _C, CheckpointEngine, Handle
from ckpt_engine.budget import copy_threads


class Blocking(Handled):
    """A save blocks for one copy into shared memory; to storage, the saver writes that copy while training goes on."""

    memory = 3.3  # the state, two slots and their head-room
    staging = "blocking"
    slots = 2
    variants = ("ckpt_engine, memory", "ckpt_engine, storage")

    def start(self, state: State) -> None:
        super().start(state)
        self.engine = CheckpointEngine(
            self.work / "root", keep_last=2, slots=self.slots, on_error="raise", staging=self.staging
        )
        self.guard_state()
        if not self.resuming:
            self.engine.prepare(self.files())

    def face(self) -> CheckpointEngine:
        return self.engine

    def files(self) -> dict[str, State]:
        return {f"rank{self.rank}.pt": self.state}

    def guard_state(self) -> None:
        """Blocking saves need no guard."""

    def to_memory(self, step: int) -> None:
        self.engine.save_to_memory(step, self.files())

    def to_storage(self, step: int) -> Handle:
        return self.engine.save_to_storage(step, self.files())

    def load(self, step: int) -> State:
        loaded: State = self.engine.restore(step).state[f"rank{self.rank}.pt"]
        return loaded

    def close(self) -> None:
        self.engine.close()


class ManyFiles(Blocking):
    """The state in 200 files; ``FILES`` is what a pipeline of many layers makes of a rank."""

    FILES = 200
    variants = ("ckpt_engine, 200 files, memory", "ckpt_engine, 200 files, storage")

    def files(self) -> dict[str, State]:
        names = list(self.state)
        return {
            f"rank{self.rank}/part{number:03}.pt": {name: self.state[name] for name in names[number :: self.FILES]}
            for number in range(self.FILES)
        }

    def load(self, step: int) -> State:
        found: State = {}
        for part in self.engine.restore(step).state.values():
            found |= part
        return found


class Gate(torch.optim.Optimizer):
    """An optimizer that changes nothing: its step waits for the guard, and the worker updates the state."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors, {})

    def step(self, closure: Any = None) -> None:
        pass


class Overlap(Blocking):
    """The call returns before the copy, and the step of the guarded optimizer waits for it."""

    staging = "overlap"
    variants = ("ckpt_engine, overlap, memory", "ckpt_engine, overlap, storage")

    def guard_state(self) -> None:
        self.gate = Gate(list(self.state.values()))
        self.engine.guard(self.gate)

    def guard(self) -> None:
        self.gate.step()


class RawCopy(System):
    """The bytes of the state, tensor by tensor, into shared memory that was touched before; nothing else at all."""

    persistent = False
    memory = 2.1
    variants = ("raw: memcpy", "raw: Tensor.copy_", "raw: bare kernel")

    def start(self, state: State) -> None:
        super().start(state)
        self.threads = copy_threads(0, self.world)
        self.pool = ThreadPoolExecutor(self.threads)
        sizes = [tensor.nbytes for tensor in state.values()]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 64) * 64)
        self.target = mmap.mmap(-1, max(1, starts[-1]))
        base = _C.address_of(self.target)
        rows = [(t.data_ptr(), at, t.nbytes) for t, at in zip(state.values(), starts, strict=False)]
        self.table = array("Q", [value for row in rows for value in row])
        self.moves = parts([(base + at, source, nbytes) for source, at, nbytes in rows], self.threads)
        whole = torch.frombuffer(self.target, dtype=torch.uint8)
        self.views = [
            (whole[at : at + t.nbytes].view(t.dtype).view(t.shape), t.detach())
            for t, at in zip(state.values(), starts, strict=False)
        ]
        _C.copy(self.target, self.table, threads=self.threads, crc=False)

    def save(self, step: int) -> None:
        if self.variant == "raw: memcpy":
            list(self.pool.map(move_all, self.moves))
        elif self.variant == "raw: bare kernel":
            _C.copy(self.target, self.table, threads=self.threads, crc=False)
        else:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            for into, tensor in self.views:
                into.copy_(tensor)
            torch.set_num_threads(before)

    def load(self, step: int) -> State:
        if self.resuming:
            raise RuntimeError("a copy in memory of this process's own")
        return {name: into.clone() for name, (into, _) in zip(self.state, self.views, strict=True)}

    def close(self) -> None:
        self.pool.shutdown()


class Together(System):
    """Ours, the bare copies and ``torch.save`` of one state in one process, where several states would not fit."""

    memory = 3.4  # the state, one slot, and what the bare copies copy into
    variants = (Blocking.variants[0], *RawCopy.variants, "torch.save + fsync")

    def start(self, state: State) -> None:
        super().start(state)
        self.systems: dict[str, System] = {}
        for kind in (Blocking, RawCopy, TorchSave):
            system = kind(self.work, rank=self.rank, world=self.world, resuming=self.resuming)
            if isinstance(system, Blocking):
                system.slots = 1
            system.start(state)
            self.systems |= dict.fromkeys(kind.variants, system)

    @property
    def fsynced(self) -> bool:  # type: ignore[override]
        return self.persistent

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return "fsync" in self.variant

    @property
    def chosen(self) -> System:
        system = self.systems[self.variant]
        system.variant = self.variant
        return system

    def save(self, step: int) -> None:
        self.chosen.save(step)

    def load(self, step: int) -> State:
        return self.chosen.load(step)

    def close(self) -> None:
        for system in set(self.systems.values()):
            system.close()


Move = tuple[int, int, int]
"""To, from, how many bytes."""


def parts(moves: list[Move], threads: int) -> list[list[Move]]:
    """The moves in ``threads`` lists of equally many bytes; one that lies across a border is cut."""
    total = sum(nbytes for _, _, nbytes in moves)
    share = max(1, -(-total // threads))
    found: list[list[Move]] = [[]]
    room = share
    for to, source, nbytes in moves:
        while nbytes:
            if not room:
                found.append([])
                room = share
            now = min(nbytes, room)
            found[-1].append((to, source, now))
            to, source, nbytes, room = to + now, source + now, nbytes - now, room - now
    return found


def move_all(moves: list[Move]) -> None:
    """ctypes gives the GIL away while ``memmove`` runs."""
    for to, source, nbytes in moves:
        ctypes.memmove(to, source, nbytes)


SYSTEMS = [("ckpt_engine", "Blocking"), ("ckpt_engine, overlap", "Overlap"), ("raw", "RawCopy")]
LAYOUTS = [("ckpt_engine, 200 files", "ManyFiles")]
LARGE = [("together", "Together")]
