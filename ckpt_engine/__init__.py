"""ckpt_engine: checkpoints that do not stop the training.

The map of the house (imports go down only)::

    5  cli                 integrations/deepspeed         |  saver/__main__
    4  plain               checkpointer  handles          |  saver/{server,endings}
    3      restore  buffers  staging  link  group         |  saver/{persist,committer}
    2   image     slots    messages  budget   commit  runs  sweep  storage/{base,posix}
    1   names     config   errors  events  waits  locks  states  control  manifest  retention
    0   _C  (csrc)

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

_HOMES = {
    "attach": "ckpt_engine.integrations.deepspeed",
    "CheckpointEngine": "ckpt_engine.plain",
    "Handle": "ckpt_engine.handles",
    "Published": "ckpt_engine.handles",
    "RestoreReport": "ckpt_engine.restore",
    "SaverOptions": "ckpt_engine.config",
    "Staged": "ckpt_engine.handles",
}

__all__ = ["CheckpointEngine", "Handle", "Published", "RestoreReport", "SaverOptions", "Staged", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt_engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
