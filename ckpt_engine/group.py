"""The ranks' meeting room: who is who, and agreement, over one gloo group of our own.

Only attach, restore and ``when_busy="skip"`` (and node-local roots, once a save) meet here; a save adds no other
collective to the training loop (invariant 11). Whatever may fail on one rank alone goes through ``together``: a rank
that raises between two meetings would leave its peers in the second.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ckpt_engine.config import launched_world
from ckpt_engine.errors import CkptError, ConfigError
from ckpt_engine.names import this_node

CHUNK_BYTES = 64 << 20

T = TypeVar("T")


class Group(Protocol):
    """Agreement among all ranks; every call is collective and returns the same on all of them."""

    rank: int
    world: int

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""

    def send_bytes(self, source: int, buffer: Any, nbytes: int) -> None:
        """``nbytes`` of rank ``source``'s writable buffer arrive in everyone's buffer (None: received, dropped)."""

    def close(self) -> None: ...


class Alone:
    """One rank that needs nobody."""

    rank = 0
    world = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def send_bytes(self, source: int, buffer: Any, nbytes: int) -> None:
        return

    def close(self) -> None:
        return


class Gloo:
    """A gloo group over all ranks of an initialised torch.distributed, made collectively."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._dist = dist
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def gather(self, value: T) -> list[T]:
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
        most = max(int(size) for size in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.world)]
        self._dist.all_gather(parts, padded, group=self._group)
        return [
            pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
        ]  # from our own ranks, through our own group

    def send_bytes(self, source: int, buffer: Any, nbytes: int) -> None:
        import torch

        for start in range(0, nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, nbytes - start)
            if buffer is None:
                piece = torch.empty(size, dtype=torch.uint8)
            else:
                piece = torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=size)
            self._dist.broadcast(piece, src=source, group=self._group)

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)


def together(group: Group, act: Callable[[], T], kind: type[CkptError] = ConfigError) -> list[T]:
    """What ``act`` returned on every rank. Collective.

    If it raises anywhere all ranks raise: its own error there, ``kind`` with the rank and the reason elsewhere.
    """
    error: Exception | None = None
    value: Any = None
    try:
        value = act()
    except Exception as caught:  # raised below, once the others know
        error = caught
    told = group.gather((value, "" if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
    if problems:
        raise kind("; ".join(problems))
    return [value for value, _ in told]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands: node index, local rank, and the global ranks of each node in order."""

    rank: int
    world: int
    node: int
    local_rank: int
    nodes: tuple[tuple[int, ...], ...]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        return self.nodes[self.node]

    @property
    def leader(self) -> bool:
        """True on one rank per node."""
        return self.local_rank == 0

    def reads_root(self, layout: str) -> bool:
        """True on the rank whose view of the root counts: one for a shared root, one for each node-local one."""
        return self.leader if layout == "node-local" else self.rank == 0


def meet(rank: int | None, world_size: int | None, timeout_s: float) -> Group:
    """The group of this job. Raises ConfigError if it cannot be known: there is no default rank."""
    import torch.distributed as dist

    ready = dist.is_available() and dist.is_initialized()
    if rank is None and world_size is None:
        if ready:
            return Gloo(timeout_s)
        if launched_world() > 1:
            raise ConfigError(
                f"this process was launched as one of {launched_world()}, but torch.distributed is not initialised: "
                "call init_process_group first, or give rank=0, world_size=1 if it really works alone"
            )
        return Alone()
    if rank is None or world_size is None:
        raise ConfigError("give both rank= and world_size=, or neither")
    for key, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} must be a whole number, not {value!r}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not in 0..world_size-1={world_size - 1}")
    if world_size == 1:
        return Alone()
    if not ready:
        raise ConfigError(
            "several ranks must agree on what to restore: initialise torch.distributed (gloo is enough) before the "
            "engine and leave rank= and world_size= out"
        )
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"rank={rank} of world_size={world_size} contradicts torch.distributed, which says {dist.get_rank()} of "
            f"{dist.get_world_size()}: leave rank= and world_size= out"
        )
    return Gloo(timeout_s)


def places(nodes_of_ranks: Sequence[str], rank: int) -> Place:
    """Who lives where, from every rank's node id in rank order (``this_node`` or what the user gave)."""
    order = list(dict.fromkeys(nodes_of_ranks))
    by_node = tuple(tuple(r for r, node in enumerate(nodes_of_ranks) if node == name) for name in order)
    node = order.index(nodes_of_ranks[rank])
    return Place(rank, len(nodes_of_ranks), node, by_node[node].index(rank), by_node)


def my_node(node_id: str) -> str:
    return node_id or this_node()
