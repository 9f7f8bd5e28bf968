"""How large a rank's shard will be, before there is a state to lay out: slots are ready when the first save comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import StagingError
from ckpt_engine.events import log

_MOMENTS = {"sgd": 1, "adagrad": 1, "lion": 1, "rmsprop": 1, "muon": 1}
"""Tensors of the size of a parameter that an optimizer keeps for it; most (Adam and its kin) keep two."""
_MASTERS = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
"""Where DeepSpeed's optimizers keep this rank's float32 parameters: ZeRO-3; bf16; ZeRO-1 and -2."""


_LEAST_BYTES, _PER_TENSOR_BYTES = 64 << 10, 1 << 10  # everything that is no tensor; names, sizes and places of each


def make_slots(core: Checkpointer, engine: Any) -> None:
    """Reserve this rank's slots, and touch them in the background; if they do not fit, the first save says so."""
    try:
        core.prepare(shard_bytes(engine))
    except StagingError as error:
        log.warning("slots are not made yet: %s", error)


def shard_bytes(engine: Any) -> int:
    """About what ``engine`` saves on this rank. Too little means a larger slot at the first save, which says so."""
    outer = engine.optimizer
    writes_model = bool(getattr(engine, "save_non_zero_checkpoint", True))
    named = [*engine.module.parameters(), *engine.module.buffers()]
    total = _LEAST_BYTES + _PER_TENSOR_BYTES * len(named) + (_bytes_of(named) if writes_model else 0)
    if outer is None or not (writes_model or getattr(engine, "save_zero_checkpoint", False)):
        return total
    base = getattr(outer, "optimizer", outer)
    kind = type(base).__name__.lower()
    moments = next((number for name, number in _MOMENTS.items() if name in kind), 2)
    if moments == 1 and "sgd" in kind and not any(group.get("momentum") for group in base.param_groups):
        moments = 0
    masters = next((found for name in _MASTERS if (found := getattr(outer, name, None))), None)
    if masters is None:
        masters = [parameter for group in base.param_groups for parameter in group["params"]]
    return total + _bytes_of(masters) * (moments + (outer is not base))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
