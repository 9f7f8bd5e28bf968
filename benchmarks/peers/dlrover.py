"""DLRover Flash Checkpoint: the process that trains copies into POSIX shared memory, the node's agent writes.

Driven through ``DdpCheckpointer``, sharded over the ranks, with all options as they are by default; for a save to
memory ``StorageType.MEMORY``, to storage ``StorageType.DISK``. Under its launcher the saver is a thread of the agent,
the parent of the processes that train, which outlives them; that is what lets it restore from memory, and what its
users are told to use. So the adaptor starts that saver in a process of its own, apart from the one that trains, before
it (as the launcher does), and tells the latter that it runs under the launcher (``ROLE_NAME``). The agent's other work
(rendezvous, heartbeats to a master) is left out, which can only make it faster. When the process that trains was
killed, its successor finds the agent and loads from it, as after a restart by the launcher.

``save_checkpoint`` blocks for the copy: there is nothing to wait for before the optimizer. It skips a save, without a
word, while the agent still writes the one before; so a save waits for that one first, as ``wait_latest_checkpoint``
would, but without its polling every 3 s, and one that is skipped all the same is an error. Nothing of it tells that a
save reached the storage but the tracker file, which is asked. It syncs that and another mark, but not the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from systems import State, System

AGENT = """
import os, sys, time
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
AsyncCheckpointSaver.start_async_saving_ckpt()
AsyncCheckpointSaver.register_signal_handler()
note = os.path.join(sys.argv[1], "agent")
with open(note + ".tmp", "w") as stream:
    stream.write(str(os.getpid()))
os.rename(note + ".tmp", note + ".pid")
while os.path.exists(note + ".pid"):
    time.sleep(1)
"""
"""What the launcher's agent does for checkpoints."""

JANITOR = 'while [ -d "$1" ]; do sleep 1; done; rm -rf /dev/shm/"$2"_* /tmp/ckpt_sock/"$2"'
"""Its shared memory and sockets are named by the job and outlive a killed agent."""

START_S = 120
WRITE_S = 600
"""What DLRover itself allows for a commit."""


class DlRover(System):
    memory = 3.0
    overlapping = True
    variants = ("DLRover, memory", "DLRover, storage")

    def __init__(self, work: Path, **place: Any) -> None:
        super().__init__(work, **place)
        self.job = "ckptbench" + hashlib.sha256(str(self.work).encode()).hexdigest()[:12]
        self.writing = 0

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return "storage" in self.variant

    def start(self, state: State) -> None:
        super().start(state)
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        os.environ.update(
            ROLE_NAME="dlrover-trainer",
            TORCHELASTIC_RUN_ID=self.job,
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(self.world),
            LOCAL_WORLD_SIZE=str(self.world),
            GROUP_RANK="0",
            GROUP_WORLD_SIZE="1",
        )
        if self.rank == 0 and not self.resuming:
            self.start_agent()
        wait_for(self.agent.exists, START_S, "its agent did not start; see agent.log")
        self.checkpointer: Any = DdpCheckpointer(
            str(self.work), local_shard_num=self.world, global_shard_num=self.world
        )

    @property
    def agent(self) -> Path:
        return self.work / "agent.pid"

    def start_agent(self) -> None:
        """Both processes are orphans, so that they live on when this one and its descendants are killed."""
        with open(self.work / "agent.log", "a") as log:
            detach([sys.executable, "-c", AGENT, str(self.work)], log=log)
        with open(os.devnull, "a") as nowhere:
            detach(["sh", "-c", JANITOR, "sh", str(self.work), self.job], log=nowhere, environment={})

    def save(self, step: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self.wait()
        kind = StorageType.DISK if self.persistent else StorageType.MEMORY
        self.checkpointer.save_checkpoint(step, self.state, storage_type=kind)
        if self.checkpointer._engine._cached_step != step:
            raise RuntimeError(f"DLRover skipped the save of step {step}: its saver was busy")
        self.writing = step if self.persistent else 0

    def done(self) -> bool:
        if self.writing:
            with contextlib.suppress(FileNotFoundError):
                if (self.work / "dlrover_latest.txt").read_text().strip() == str(self.writing):
                    self.writing = 0
        return not self.writing

    def wait(self) -> None:
        wait_for(self.done, WRITE_S, f"step {self.writing} did not reach the storage; see agent.log")

    def load(self, step: int) -> State:
        path = self.work / str(step) / f"rank_{self.rank}.pt"
        if self.persistent and not self.resuming:
            import torch

            loaded = torch.load(path, map_location="cpu")
        else:
            loaded = self.checkpointer.load_checkpoint(str(path))
        return {name: loaded[name].clone() for name in self.state}

    def forget(self, step: int) -> None:
        shutil.rmtree(self.work / str(step), ignore_errors=True)

    def close(self) -> None:
        if self.rank == 0 and self.agent.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.agent.read_text()), signal.SIGINT)


def wait_for(done: Any, most_s: float, failure: str) -> None:
    end = time.monotonic() + most_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{failure} ({most_s:.0f} s)")
        time.sleep(0.002)


def detach(words: list[str], *, log: Any, environment: dict[str, str] | None = None) -> None:
    """Start a process that is no descendant of this one."""
    between = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", between, *words], stdout=log, stderr=log, env=environment, check=True)


SYSTEMS = [("DLRover", "DlRover")]
