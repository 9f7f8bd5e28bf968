"""``save_state`` and ``load_state`` of one Accelerator said in our verbs; the only file that imports accelerate.

``attach(accelerator)`` wraps these two bound methods; nothing of accelerate, torch or DeepSpeed is patched. The
Accelerator's own ``save_state`` runs as ever, but into a directory in memory (``hf_save.Desk``); its files, and the
optimizers and DeepSpeed shards that are planned in place of theirs, become one shard of one attempt, whose commit
directory is what the caller named. ``load_state`` reads verified files in memory (``hf_resume.Shown``).
"""

from __future__ import annotations

import os
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Options, SaverOptions
from ckpt_engine.errors import ConfigError
from ckpt_engine.integrations.accelerate_state import AcceleratorCheckpointer
from ckpt_engine.integrations.deepspeed_shim import refuse_unsupported
from ckpt_engine.retention import Retention, one_policy

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ConfigError("ckpt_engine.integrations.accelerate needs accelerate: pip install 'ckpt-engine[hf]'") from error

__all__ = ["AcceleratorCheckpointer", "attach"]


def attach(
    accelerator: Any,
    root: str | os.PathLike[str] = "",
    *,
    keep_last: int | None = None,
    retention: Retention | None = None,
    slots: int = 2,
    when_busy: str = "wait",
    wait_s: float = 1800.0,
    on_error: str = "warn",
    slot_bytes: int = 0,
    job: str = "",
    name: str = "default",
    saver: SaverOptions | None = None,
    node_id: str = "",
) -> AcceleratorCheckpointer:
    """Make ``accelerator.save_state`` asynchronous, after ``prepare``. Collective.

    ``root``: the directory whose entries are checkpoints; with ``automatic_checkpoint_naming`` it is
    ``<project_dir>/checkpoints``, and ``total_limit`` of the ProjectConfiguration is the default of ``keep_last``.
    Other options as for ``CheckpointEngine``. Raises ConfigError for what is not supported, with the reason.
    """
    if int(accelerate.__version__.partition(".")[0]) != 1:
        raise ConfigError(f"accelerate {accelerate.__version__} is not supported: use 1.x")
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(f"attach() needs an accelerate.Accelerator, not a {type(accelerator).__name__}")
    kinds = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED")
    if accelerator.distributed_type not in [getattr(DistributedType, kind) for kind in kinds]:
        raise ConfigError(
            f"{accelerator.distributed_type} of Accelerate is not supported: one process, DDP and DeepSpeed are; "
            "for FSDP use CheckpointEngine itself (docs/fsdp.md)"
        )
    if "save_state" in vars(accelerator):
        raise ConfigError("this Accelerator is attached already: close() the first attachment before a second attach()")
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        usual = os.path.join(accelerator.project_dir, "checkpoints")
        if root and os.path.realpath(root) != os.path.realpath(usual):
            raise ConfigError(f"with automatic_checkpoint_naming the root is {usual}, not {root}")
        root = usual
    elif not root:
        raise ConfigError("name the directory of the checkpoints: attach(accelerator, root)")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        for engine in accelerator._models:
            refuse_unsupported(engine)
    if keep_last is None and retention is None and project.automatic_checkpoint_naming:
        keep_last = project.total_limit
    options = Options(
        job=job,
        name=name,
        node_id=node_id,
        layout="node-local" if project.save_on_each_node else "shared",
        slots=slots,
        wait_s=wait_s,
        when_busy=when_busy,
        on_error=on_error,
        slot_bytes=slot_bytes,
        retention=one_policy(keep_last, retention),
        saver=saver or SaverOptions(),
    )
    return AcceleratorCheckpointer(accelerator, Checkpointer(root, options, rank=None, world_size=None))
