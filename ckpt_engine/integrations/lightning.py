"""Lightning's Trainer said in our verbs, of ``lightning`` and ``pytorch_lightning`` alike: it imports neither.

``attach(trainer)`` wraps two bound methods of that Trainer's checkpoint connector, and while ``fit`` runs a few of its
strategy, its ModelCheckpoints and its loggers (``lightning_run``); nothing of Lightning, torch or DeepSpeed is
patched. When to save, under which name, and which checkpoint is to go stays Lightning's decision.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpt_engine.checkpointer import MAX_STEP
from ckpt_engine.config import Options, SaverOptions, whole
from ckpt_engine.errors import ConfigError
from ckpt_engine.handles import Published
from ckpt_engine.integrations.deepspeed_shim import wrapped
from ckpt_engine.integrations.lightning_run import Newest, Run, is_a

__all__ = ["TrainerCheckpointer", "attach"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OLDEST, BELOW = (2, 5), (3, 0)
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "DeepSpeedStrategy")


def attach(
    trainer: Any,
    dirpath: str | os.PathLike[str] = "",
    *,
    memory_steps: int = 0,
    slots: int = 2,
    when_busy: str = "wait",
    wait_s: float = 1800.0,
    on_error: str = "warn",
    slot_bytes: int = 0,
    job: str = "",
    name: str = "default",
    saver: SaverOptions | None = None,
    node_id: str = "",
) -> TrainerCheckpointer:
    """Make ``trainer.fit()`` checkpoint asynchronously, until ``close``. Every rank calls it, before ``fit``.

    ``dirpath``: the directory whose checkpoints are ours; by default that of the first ModelCheckpoint.
    ``memory_steps``: a snapshot in memory every so many optimizer steps; ``fit(ckpt_path="last")`` takes the newest of
    snapshots and checkpoints. Other options as for ``CheckpointEngine``. Raises ConfigError for a version of Lightning
    or a strategy that is not supported, with the reason.
    """
    lightning = _refuse(trainer)
    options = Options(
        job=job,
        name=name,
        node_id=node_id,
        slots=slots,
        wait_s=wait_s,
        when_busy=when_busy,
        on_error=on_error,
        slot_bytes=slot_bytes,
        saver=saver or SaverOptions(),
    )
    every = whole("memory_steps", memory_steps, 0, MAX_STEP)
    return TrainerCheckpointer(trainer, os.fspath(dirpath), every, options, lightning.Callback)


class TrainerCheckpointer:
    """What ``attach`` returns."""

    def __init__(self, trainer: Any, dirpath: str, memory_steps: int, options: Options, callback: type) -> None:
        self._trainer = trainer
        self._dirpath = dirpath
        self._memory_steps = memory_steps
        self._options = options
        self._run: Run | None = None
        self._ears = type("CkptEngine", (_Ears, callback), {})(self)
        trainer.callbacks.append(self._ears)
        connector = trainer._checkpoint_connector
        self._own = {name: getattr(connector, name) for name in ("_parse_ckpt_path", "resume_start")}
        connector._parse_ckpt_path = wrapped(self._own["_parse_ckpt_path"], self._parse_ckpt_path)
        connector.resume_start = wrapped(self._own["resume_start"], self._resume_start)

    def wait(self, timeout_s: float | None = None) -> tuple[Published, ...]:
        """Block until every storage save has ended, while ``fit`` runs; raises the first failure nobody was told of."""
        return () if self._run is None else self._run.core.wait(timeout_s)

    def pin(self, step: int, reason: str = "") -> None:
        """Keep the checkpoint of ``step`` from removal, while ``fit`` runs. Raises as ``CheckpointEngine.pin``."""
        self._running().core.pin(step, reason)

    def unpin(self, step: int) -> None:
        """Let Lightning remove it again. Raises as ``CheckpointEngine.unpin``."""
        self._running().core.unpin(step)

    def _running(self) -> Run:
        if self._run is None:
            raise ConfigError("fit() does not run: use 'ckpt-engine pin' and 'unpin' on the directory")
        return self._run

    def close(self) -> None:
        """Give the Trainer its own checkpointing back; not while ``fit`` runs; idempotent."""
        if self._run is not None:
            raise ConfigError("fit() runs: close() after it")
        for name in self._own:
            vars(self._trainer._checkpoint_connector).pop(name, None)
        if self._ears in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._ears)

    def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *arguments: Any, **options: Any) -> Any:
        """``fit(ckpt_path="last")`` is the newest of all: which that is shows when the ranks can talk."""
        found = self._own["_parse_ckpt_path"](state_fn, ckpt_path, *arguments, **options)
        by_default = ckpt_path is None and any(is_a(one, "OnExceptionCheckpoint") for one in self._trainer.callbacks)
        return Newest(found or "") if state_fn.value == "fit" and (ckpt_path == "last" or by_default) else found

    def _resume_start(self, checkpoint_path: Any = None, *arguments: Any, **options: Any) -> None:
        """Where each ``fit`` comes by once, with a checkpoint or without, after the setup of all callbacks."""
        own, trainer = self._own["resume_start"], self._trainer
        fits = trainer.state.fn is not None and trainer.state.fn.value == "fit"
        if fits and self._run is None and not trainer.fast_dev_run:
            folder = self._dirpath or _first_dirpath(trainer)
            if not folder:
                raise ConfigError("no ModelCheckpoint says where checkpoints go: attach(trainer, dirpath)")
            self._run = Run(trainer, folder, self._options, self._memory_steps, self._over)
        if self._run is not None:
            self._run.load(checkpoint_path, lambda path: own(path, *arguments, **options))
        else:
            own(checkpoint_path, *arguments, **options)

    def _over(self) -> None:
        self._run = None


class _Ears:
    """Hears what happens in the Trainer's loop."""

    def __init__(self, owner: TrainerCheckpointer) -> None:
        self._owner = owner

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if (run := self._owner._run) is not None:
            run.after_batch()

    def on_exception(self, *_: Any, **__: Any) -> None:
        if (run := self._owner._run) is not None:
            run.failed = True


def _first_dirpath(trainer: Any) -> str:
    keepers = [one for one in trainer.checkpoint_callbacks if is_a(one, "ModelCheckpoint")]
    return next((str(one.dirpath) for one in keepers if one.dirpath), "")


def _refuse(trainer: Any) -> Any:
    """The package that ``trainer`` comes from."""
    modules = [sys.modules[package] for package in PACKAGES if package in sys.modules]
    lightning = next((one for one in modules if isinstance(trainer, one.Trainer)), None)
    if lightning is None:
        raise ConfigError(f"attach() needs a Trainer of {' or '.join(PACKAGES)}, not a {type(trainer).__name__}")
    version = tuple(int(part) for part in lightning.__version__.split(".")[:2])
    if not OLDEST <= version < BELOW:
        raise ConfigError(f"Lightning {lightning.__version__} is not supported: use at least 2.5, and less than 3")
    if any(isinstance(one, _Ears) for one in trainer.callbacks):
        raise ConfigError("this Trainer is attached already: close() the first attachment before a second attach()")
    strategy = trainer.strategy
    if not any(is_a(strategy, kind) for kind in _STRATEGIES):
        raise ConfigError(f"{type(strategy).__name__} is not supported: one process, DDP and DeepSpeed are")
    launcher = type(strategy.launcher).__name__
    if "MultiProcessing" in launcher or "XLA" in launcher:
        raise ConfigError(f"{launcher} makes ranks out of this process: use strategy='ddp', or torchrun")
    if not is_a(strategy, "DeepSpeedStrategy") and is_a(strategy.checkpoint_io, "AsyncCheckpointIO"):
        raise ConfigError("AsyncCheckpointIO writes in a thread what is asynchronous already: leave it out")
    return lightning
