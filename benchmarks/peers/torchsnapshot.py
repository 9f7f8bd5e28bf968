"""torchsnapshot: ``Snapshot.async_take``, which copies the state before it returns, and a thread that writes.

Driven as its documentation has it: the state in a ``StateDict``, one ``async_take`` per save, ``PendingSnapshot.wait``.
All options are its defaults (16 writes at once, a memory budget of six tenths of what is free). ``async_take`` returns
when nothing refers to the training's tensors any more, so there is nothing to wait for before the optimizer. The
metadata that makes a snapshot valid is written last, by the process that trains; nothing is synced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from systems import State, System


class TorchSnapshot(System):
    memory = 3.2
    overlapping = True

    def __init__(self, work: Path, **place: Any) -> None:
        super().__init__(work, **place)
        self.pending: Any = None

    def start(self, state: State) -> None:
        super().start(state)
        import torchsnapshot  # noqa: F401

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        if self.pending is not None:  # one at a time: it does not order the commits of two
            self.pending.wait()
        self.pending = Snapshot.async_take(str(self.path(step)), {"state": StateDict(**self.state)})

    def done(self) -> bool:
        return self.pending is None or bool(self.pending.done())

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def load(self, step: int) -> State:
        from torchsnapshot import Snapshot, StateDict

        into = StateDict(**self.copies())
        Snapshot(str(self.path(step))).restore({"state": into})
        return {name: into[name] for name in self.state}


SYSTEMS = [("torchsnapshot", "TorchSnapshot")]
