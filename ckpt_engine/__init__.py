"""ckpt_engine: checkpoints that do not stop the training.

The map of the house (imports go down only)::

    5  cli                 integrations/deepspeed         |  saver/__main__
    4                      checkpointer                   |  saver/server
    3      restore  staging  link  group                  |  saver/persist
    2   image     slots    messages      commit  retention  storage/{base,posix}
    1   names     config   errors  events  manifest  locks
    0   _C  (csrc)

Importing this package loads neither torch nor deepspeed; the names below are loaded when first used.
"""

from __future__ import annotations

__version__ = "0.1.0"
