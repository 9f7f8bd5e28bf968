"""Hugging Face's Trainer said in our verbs; the only file that imports transformers.

``attach(trainer)`` wraps the bound ``train`` of that one Trainer, and while it runs a few methods more (``hf_run``);
nothing of transformers, torch or DeepSpeed is patched. The Trainer's own ``_save_checkpoint`` runs as ever, but into a
directory in memory (``hf_save.Desk``); its files, and what is planned in their place, become one shard of one attempt,
whose commit directory is ``<output_dir>/checkpoint-N``. So rotation is the saver's: at the desk is nothing to rotate.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from typing import Any

from ckpt_engine.checkpointer import MAX_STEP, Checkpointer
from ckpt_engine.config import Options, SaverOptions, whole
from ckpt_engine.errors import ConfigError
from ckpt_engine.handles import Published
from ckpt_engine.integrations.deepspeed_shim import wrapped
from ckpt_engine.integrations.hf_resume import get_last_checkpoint
from ckpt_engine.integrations.hf_run import BEST, Run, Stall
from ckpt_engine.retention import Retention

try:
    import transformers
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ConfigError("ckpt_engine.integrations.hf needs transformers: pip install 'ckpt-engine[hf]'") from error

__all__ = ["Stall", "TrainerCheckpointer", "attach", "get_last_checkpoint"]

OLDEST, BELOW = (4, 46), (6, 0)


def attach(
    trainer: Any,
    *,
    memory_steps: int = 0,
    retention: Retention | None = None,
    slots: int = 2,
    when_busy: str = "wait",
    wait_s: float = 1800.0,
    on_error: str = "warn",
    staging: str = "blocking",
    slot_bytes: int = 0,
    job: str = "",
    name: str = "default",
    saver: SaverOptions | None = None,
    node_id: str = "",
) -> TrainerCheckpointer:
    """Make ``trainer.train()`` checkpoint asynchronously into its ``output_dir``, until ``close``. Every rank calls it.

    ``memory_steps``: a snapshot in memory every so many steps, beside the checkpoints that ``save_strategy`` asks for;
    ``train(resume_from_checkpoint=True)`` takes the newest of both. ``retention``: None follows ``save_total_limit``.
    Other options as for ``CheckpointEngine``. Raises ConfigError for a version of transformers or a kind of training
    that is not supported, with the reason.
    """
    return TrainerCheckpointer(
        trainer,
        memory_steps=whole("memory_steps", memory_steps, 0, MAX_STEP),
        retention=retention,
        options=Options(
            job=job,
            name=name,
            node_id=node_id,
            slots=slots,
            wait_s=wait_s,
            when_busy=when_busy,
            on_error=on_error,
            staging=staging,
            slot_bytes=slot_bytes,
            saver=saver or SaverOptions(),
        ),
    )


class TrainerCheckpointer:
    """What ``attach`` returns. ``stalls``: what each save of the last ``train()`` cost."""

    def __init__(self, trainer: Any, *, memory_steps: int, retention: Retention | None, options: Options) -> None:
        _refuse(trainer)
        self.stalls: deque[Stall] = deque()
        self._trainer = trainer
        self._memory_steps = memory_steps
        self._retention = retention
        self._options = options
        self._ears = _Ears(self)
        self._train = trainer.train
        self._before = vars(trainer).get("train")
        self._run: Run | None = None
        trainer.train = wrapped(self._train, self._run_training)
        trainer.add_callback(self._ears)

    def wait(self, timeout_s: float | None = None) -> tuple[Published, ...]:
        """While ``train`` runs: block until every checkpoint on its way is committed; raises as ``Handle.result``."""
        return self._running()._core.wait(timeout_s)

    def pin(self, step: int, reason: str = "") -> None:
        """Keep the checkpoint of ``step`` from retention, while ``train`` runs. Raises as ``CheckpointEngine.pin``."""
        self._running()._core.pin(step, reason)

    def unpin(self, step: int) -> None:
        """Give it back to retention."""
        self._running()._core.unpin(step)

    def _running(self) -> Run:
        if self._run is None:
            raise ConfigError("train() does not run: use 'ckpt-engine pin' and 'unpin' on the output directory")
        return self._run

    def close(self) -> None:
        """Give the Trainer its own checkpointing back; between two ``train()``, idempotent."""
        if vars(self._trainer).pop("train", None) is not None and self._before is not None:
            self._trainer.train = self._before
        self._trainer.remove_callback(self._ears)

    def _run_training(self, resume_from_checkpoint: Any = None, trial: Any = None, *others: Any, **more: Any) -> Any:
        """``train`` of any caller: an engine of its own for each call."""
        args = self._trainer.args
        retention = self._retention
        if retention is None:
            limit = args.save_total_limit
            retention = Retention(keep_last=limit if limit and limit > 0 else None)
        if retention.keep_best is None:
            retention = replace(retention, keep_best=(BEST, "max"))
        layout = "node-local" if args.save_on_each_node else "shared"
        options = replace(self._options, retention=retention, layout=layout)
        run_dir = self._trainer._get_output_dir(trial)
        core = Checkpointer(run_dir, options, rank=None, world_size=None)
        run = self._run = Run(self._trainer, core, run_dir, trial, self._memory_steps)
        self.stalls = run.stalls
        try:
            found = run.resume.find(resume_from_checkpoint)
            with run.wrapped_methods():
                result = self._train(found, trial, *others, **more)
            run.finish()
            run.resume.leave()
        except BaseException:  # no goodbye: every snapshot stays for the next start
            core.close(goodbye=False)
            raise
        finally:
            run.end()
            self._run = None
        core.close()
        return result


class _Ears(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for us
    """Hears what happens in the Trainer's loop."""

    def __init__(self, owner: TrainerCheckpointer) -> None:
        self._owner = owner

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if (run := self._owner._run) is not None:
            run.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if (run := self._owner._run) is not None:
            run.resume.let_go()  # all ranks have stepped together, so all have read what they resumed from

    def on_evaluate(self, args: Any, state: Any, *_: Any, metrics: Any = None, **__: Any) -> None:
        if (run := self._owner._run) is not None:
            run.evaluated = (state.global_step, dict(metrics or {}))

    def on_log(self, args: Any, *_: Any, logs: Any = None, **__: Any) -> None:
        if (run := self._owner._run) is not None and "train_runtime" in (logs or {}):
            run.spare_the_last()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if (run := self._owner._run) is not None:
            run.finish()


def _refuse(trainer: Any) -> None:
    found = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    if not OLDEST <= found < BELOW:
        raise ConfigError(
            f"transformers {transformers.__version__} is not supported: use at least {'.'.join(map(str, OLDEST))}, and "
            f"less than {BELOW[0]}"
        )
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"attach() needs a transformers.Trainer, not a {type(trainer).__name__}")
    if any(isinstance(one, _Ears) for one in trainer.callback_handler.callbacks):
        raise ConfigError("this Trainer is attached already: close() the first attachment before a second attach()")
    if trainer.is_fsdp_enabled or getattr(trainer, "is_fsdp_xla_enabled", False):
        raise ConfigError(
            "FSDP inside of the Trainer is not supported: use DDP or DeepSpeed, or CheckpointEngine itself"
        )
    if trainer.args.parallel_mode.value not in ("not_parallel", "not_distributed", "distributed"):
        raise ConfigError(f"{trainer.args.parallel_mode.value} is not supported: one process, DDP or DeepSpeed are")
