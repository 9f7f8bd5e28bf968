"""lm-resiliency (GEMINI): two buffers in the process that trains, peers that hold copies, and files on demand.

Driven through ``InMemoryCheckpointManager``: ``save_tensors``, its fastest call, which takes references to the tensors,
then ``flush_to_disk`` for a save to storage: a thread of the process that trains writes, syncs and renames one file. Of
its ways to storage this is the fairest: the interval it has for that writes the save *before* the last one, and its
other calls block until the file is written. CPU tensors are copied inside the call, so the guard (``maybe_wait``)
finds nothing to wait for. ``flush_to_disk`` copies them once more, in the thread that trains. Pinned memory needs
CUDA. With several ranks each save is exchanged with the peer rank in the background, over the group of the training.
It writes what it holds when it gets SIGTERM; SIGKILL leaves it no time, so a save to memory is gone then, unless a peer
on another node lives on, which one node cannot show.
"""

from __future__ import annotations

import shutil
from typing import Any

from systems import State, System


class LmResiliency(System):
    overlapping = True  # a flush waits for the one before
    memory = 5.2  # the state, two buffers of its own and two for its peer, and the copy that is written
    variants = ("lm-resiliency, memory", "lm-resiliency, storage")

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return "storage" in self.variant

    @property
    def fsynced(self) -> bool:  # type: ignore[override]
        return self.persistent

    def start(self, state: State) -> None:
        super().start(state)
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        self.manager: Any = InMemoryCheckpointManager(
            InMemoryCkptConfig(disk_folder=str(self.work), disk_flush_interval=0, run_id="benchmark", pin_memory=False)
        )
        self.disk = self.manager._disk  # what it writes with; it has no public way to ask whether it is done

    def save(self, step: int) -> None:
        self.manager.save_tensors(list(self.state.values()), step)
        if self.persistent:
            self.manager.maybe_wait()  # what it still copies it leaves out, without a word
            self.manager.flush_to_disk(step)

    def guard(self) -> None:
        self.manager.maybe_wait()

    def done(self) -> bool:
        writing = self.disk._write_thread
        return writing is None or not writing.is_alive()

    def wait(self) -> None:
        self.manager.maybe_wait()
        self.disk.wait()

    def load(self, step: int) -> State:
        if self.persistent:
            _, tensors = self.disk.load(step)
        else:
            found = self.manager.load_tensors(mode="latest", step=step)
            if found is None:
                raise FileNotFoundError(f"it holds no save of step {step}")
            tensors = found[0]
        return dict(zip(self.state, tensors, strict=True))

    def forget(self, step: int) -> None:
        for folder in self.work.glob(f"runs/*/*/step-{step}"):
            shutil.rmtree(folder)

    def close(self) -> None:
        self.manager.close()


SYSTEMS = [("lm-resiliency", "LmResiliency")]
