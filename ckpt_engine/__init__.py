"""ckpt_engine: checkpoints that do not stop the training.

The map of the house (imports go down only)::

    5  cli  export                                                |  saver/__main__
       integrations/{deepspeed,deepspeed_shim,deepspeed_size}     |
       integrations/{hf,hf_run,hf_save,hf_resume}                 |
       integrations/{accelerate,accelerate_state}                 |
       integrations/{lightning,lightning_run}                     |
       integrations/{lightning_later,lightning_shelf}             |
    4  plain  face  checkpointer  saving  handles                 |  saver/{server,endings}
    3  restore  source  agreement  group  buffers  overlap        |  saver/{persist,committer,ledger}
       staging  device  link                                      |  saver/{board,outcomes,peers,stalls}
    2  image  pt_pickle  pt_layout  pt_zip  slots  header  messages  budget
       commit  settle  sweep  listing  pins  runs  reading  storage/{base,posix}
    1  names  disk_names  config  errors  events  waits  locks  shm  states  control  record  metrics  manifest
       retention
    0  _C  (csrc)

The trainer's stair is on the left, the saver's on the right of the bar; they meet on the floors below.
Importing this package loads neither torch nor deepspeed; the names below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckpt_engine.config import SaverOptions as SaverOptions
    from ckpt_engine.handles import Handle as Handle
    from ckpt_engine.handles import Published as Published
    from ckpt_engine.handles import Staged as Staged
    from ckpt_engine.integrations.deepspeed import attach as attach
    from ckpt_engine.plain import CheckpointEngine as CheckpointEngine
    from ckpt_engine.restore import RestoreReport as RestoreReport
    from ckpt_engine.retention import Retention as Retention

_HOMES = {
    "attach": "ckpt_engine.integrations.deepspeed",
    "CheckpointEngine": "ckpt_engine.plain",
    "Handle": "ckpt_engine.handles",
    "Published": "ckpt_engine.handles",
    "RestoreReport": "ckpt_engine.restore",
    "Retention": "ckpt_engine.retention",
    "SaverOptions": "ckpt_engine.config",
    "Staged": "ckpt_engine.handles",
}

__all__ = ["CheckpointEngine", "Handle", "Published", "RestoreReport", "Retention", "SaverOptions", "Staged", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt_engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
