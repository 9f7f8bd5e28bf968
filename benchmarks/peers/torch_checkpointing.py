"""torch-checkpointing: a thread that copies the state into shared memory, and a process per rank that writes.

Driven through ``CheckpointManager`` as its tutorial has it: ``prewarm_staging`` before the training, ``save``, and
``with manager.lock()`` around the optimizer's step (``guard``), which waits for the copy alone. Everything is as it is
by default, down to the temporary directory that is renamed, except what fails here: ``use_direct_io`` (it writes
buffers of any length through O_DIRECT, which ext4 refuses with EINVAL; on a file system without O_DIRECT it falls back
by itself) and 30 s for the process to come up, which a busy machine exceeds. What needs CUDA is off without it. Nothing
is synced.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from systems import State, System


class TorchCheckpointing(System):
    memory = 2.5
    overlapping = True  # a save waits until the buffers of the one before are written

    def __init__(self, work: Path, **place: Any) -> None:
        super().__init__(work, **place)
        self.item = f"rank{self.rank}"  # items of different ranks are different files
        self.written: Future[Any] | None = None

    def start(self, state: State) -> None:
        super().start(state)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=120)
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        if not self.resuming:
            self.manager.prewarm_staging({self.item: state})

    def save(self, step: int) -> None:
        self.written = self.manager.save(str(self.path(step)), {self.item: self.state})

    def guard(self) -> None:
        with self.manager.lock():
            pass

    def done(self) -> bool:
        return self.written is None or self.written.done()

    def wait(self) -> None:
        if self.written is not None:
            self.written.result()

    def load(self, step: int) -> State:
        loaded: State = self.manager.load(str(self.path(step)), into={self.item: self.copies()})[self.item]
        return loaded

    def close(self) -> None:
        self.manager.close()


SYSTEMS = [("torch-checkpointing", "TorchCheckpointing")]
