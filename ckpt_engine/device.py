"""Copies from devices into slots: slots pinned once, a stream of its own for each device, the largest tensors first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ckpt_engine import _C
from ckpt_engine.events import warn_once
from ckpt_engine.slots import Slot

Copy = tuple[int, int, Any]
"""Number of a record, its offset in the slot, its bytes as a 1-D uint8 tensor on a device."""

_PINNED_SHARE = 0.5
"""Of the memory of the machine; what is pinned cannot be reclaimed, and a machine without memory to reclaim stalls."""


class Runtime(Protocol):
    """What is asked of a kind of device; ``Cuda``, and a fake one in tests."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin host memory; "" or what the driver says against it."""

    def unregister(self, address: int) -> None: ...
    def begin(self, device: Any) -> Any:
        """A lane for copies from ``device``, behind what its current stream has to do until now."""

    def copy(self, target: Any, source: Any, lane: Any) -> None:
        """Start a copy in ``lane``; ``target`` may be pageable."""

    def mark(self, lane: Any) -> Any:
        """An event: it is over when all that was started in ``lane`` is. ``synchronize()`` waits for it."""

    def hold(self, device: Any, event: Any) -> None:
        """Let what is put into the current stream of ``device`` from now on wait for ``event``."""


class Cuda:
    """``torch.cuda``, as we use it."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def register(self, address: int, nbytes: int) -> str:
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(address, nbytes, 1)  # portable: for all devices
        if int(code) == 0:
            return ""
        with contextlib.suppress(RuntimeError):  # the runtime keeps the error for the next kernel: let it be this one
            torch.zeros(1, device="cuda").add_(1)
        return f"cudaHostRegister: {runtime.cudaGetErrorString(code)}"

    def unregister(self, address: int) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def begin(self, device: Any) -> Any:
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        lane = self._streams[device]
        lane.wait_stream(torch.cuda.current_stream(device))
        return lane

    def copy(self, target: Any, source: Any, lane: Any) -> None:
        import torch

        with torch.cuda.stream(lane):  # and its device: a thread without one would make a context on the first
            target.copy_(source, non_blocking=True)

    def mark(self, lane: Any) -> Any:
        return lane.record_event()

    def hold(self, device: Any, event: Any) -> None:
        import torch

        torch.cuda.current_stream(device).wait_event(event)


class Other:
    """A device that we know nothing of: each copy is over when it returns."""

    def register(self, address: int, nbytes: int) -> str:
        return "not a CUDA device"

    def unregister(self, address: int) -> None:
        return

    def begin(self, device: Any) -> Any:
        return None

    def copy(self, target: Any, source: Any, lane: Any) -> None:
        target.copy_(source)

    def mark(self, lane: Any) -> Any:
        return None

    def hold(self, device: Any, event: Any) -> None:
        return


class Lanes:
    """The devices of one rank, and which of its slots are pinned for them."""

    def __init__(self, runtime: Runtime | None = None, *, local_ranks: int = 1, most_bytes: int | None = None) -> None:
        self._given = runtime
        self._known: dict[str, Runtime] = {}
        self._pinned: dict[int, int] = {}  # address → bytes
        self._most = int(_PINNED_SHARE * _memory_bytes() / local_ranks) if most_bytes is None else most_bytes

    def runtime(self, device: Any) -> Runtime:
        kinds: dict[str, type[Runtime]] = {"cuda": Cuda}
        if device.type not in self._known:
            self._known[device.type] = self._given or kinds.get(device.type, Other)()
        return self._known[device.type]

    def ticket(self, slot: Slot, copies: Sequence[Copy]) -> Ticket:
        """Copies to be made into ``slot``, of what the sources hold after all that was asked of them until now."""
        return Ticket(self, slot, copies)

    def pin(self, slot: Slot, runtime: Runtime) -> None:
        """Pin ``slot`` for as long as it is mapped; one that cannot be is filled more slowly, and it is said once."""
        address, nbytes = _C.address_of(slot.memory), len(slot.memory)
        if slot.before_unmap is not None:
            return
        if sum(self._pinned.values()) + nbytes > self._most:
            trouble = f"{nbytes} bytes more would be over {self._most}, the share of the memory that a rank may pin"
        else:
            trouble = runtime.register(address, nbytes)
        self._pinned[address] = 0 if trouble else nbytes
        if trouble:
            warn_once(
                "pinned",
                f"slot {slot.name} is not pinned ({trouble}): copies from the device go through pageable memory, at a "
                "third of the speed or less. Raise the limit of locked memory (ulimit -l), or use fewer slots",
            )

        def unpin() -> None:
            if self._pinned.pop(address, 0):
                runtime.unregister(address)

        slot.before_unmap = unpin


class Ticket:
    """Copies from devices into one slot. ``issue`` may be called in another thread than the others."""

    def __init__(self, lanes: Lanes, slot: Slot, copies: Sequence[Copy]) -> None:
        self._lanes = lanes
        self._slot = slot
        self._copies = sorted(copies, key=lambda copy: -copy[2].numel())
        self._lane = {device: lanes.runtime(device).begin(device) for device in {copy[2].device for copy in copies}}
        self._ends: dict[Any, Any] = {}

    def issue(self) -> None:
        """Start all copies."""
        if not self._copies:
            return
        import torch

        for device in self._lane:
            self._lanes.pin(self._slot, self._lanes.runtime(device))
        memory = torch.frombuffer(self._slot.memory, dtype=torch.uint8)
        for _, offset, source in self._copies:
            target = memory[offset : offset + source.numel()]
            self._lanes.runtime(source.device).copy(target, source, self._lane[source.device])
        self._ends = {device: self._lanes.runtime(device).mark(lane) for device, lane in self._lane.items()}

    def hold(self) -> None:
        """Whatever changes the sources from now on comes behind the copies, on the device too. REQUIRES: issued."""
        for device, end in self._ends.items():
            self._lanes.runtime(device).hold(device, end)

    def synchronize(self) -> None:
        """Wait until all that was started is over."""
        for end in self._ends.values():
            if end is not None:
                end.synchronize()

    def wait(self) -> Iterator[tuple[int, int, int]]:
        """Wait until all is copied; then (record, offset in the slot, bytes) of each. REQUIRES: issued."""
        self.synchronize()
        for record, offset, source in self._copies:
            yield record, offset, source.numel()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
