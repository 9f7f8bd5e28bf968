"""nvidia-resiliency-ext: a process that lives as long as the training writes DCP's format, with fsync.

Driven as its example ``async_writer.py`` has it: ``AsyncCallsQueue`` with the persistent worker,
``FileSystemWriterAsync`` with two files per rank, a plan that is cached from the second save on, and the finalizing
(which writes the metadata) in the process that trains. It is made for tensors on a GPU, and two things differ for it to
run without one. The function that brings the tensors to the host gets ``non_blocking=False``, its own parameter, for
otherwise it synchronizes CUDA and the worker dies. And each rank asks for itself whether a save is written
(``no_dist``), since the asking by all of them is a collective on CUDA tensors; finalizing still meets all ranks.

It does not copy CPU tensors: it moves them into shared memory, once, and its worker reads them while training changes
them. There is nothing in it to wait for before the optimizer but the end of the whole save. So there are two rows: as
it is, which is torn, and with a clone of the state before each save, which is what its users must do.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from systems import DcpSync, State

FILES = 2
"""Per rank; what the example has by default."""


class NvidiaResiliencyExt(DcpSync):
    fsynced = True
    needs_group = True
    overlapping = True  # it queues
    memory = 4.0  # four processes that import torch are a part of it
    variants = ("nvidia-resiliency-ext", "nvidia-resiliency-ext + clone")

    def __init__(self, work: Path, **place: Any) -> None:
        super().__init__(work, **place)
        self.queue: Any = None

    def start(self, state: State) -> None:
        super().start(state)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import init_checkpoint_metadata_cache

        init_checkpoint_metadata_cache()
        self.queue = AsyncCallsQueue(persistent=True)

    def save(self, step: int) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )
        from torch.distributed.checkpoint import DefaultSavePlanner

        state = self.named()
        if "clone" in self.variant:
            state = {name: tensor.clone() for name, tensor in state.items()}
        writer = FileSystemWriterAsync(self.path(step), thread_count=FILES)
        plan = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True)
        write, _, arguments = writer.get_save_function_and_args()
        preload = partial(writer.preload_tensors, writer.write_buckets, False)
        finalize = partial(save_state_dict_async_finalize, *plan)
        self.queue.schedule_async_request(AsyncRequest(write, arguments, [finalize], preload_fn=preload))

    def guard(self) -> None:
        """Waiting for the whole save would be the only one."""

    def done(self) -> bool:
        self.queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return bool(self.queue.get_num_unfinalized_calls() == 0)

    def wait(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def close(self) -> None:
        self.wait()  # or closing does it, on CUDA
        self.queue.close()


SYSTEMS = [("nvidia-resiliency-ext", "NvidiaResiliencyExt")]
