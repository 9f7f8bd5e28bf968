"""What one save and one load of an Accelerator are: its own, through files in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import NotFound, StagingError
from ckpt_engine.events import log, warn_once
from ckpt_engine.face import Face
from ckpt_engine.group import together
from ckpt_engine.handles import Handle, Staged
from ckpt_engine.integrations.deepspeed_shim import Shim, Transaction, wrapped
from ckpt_engine.integrations.hf_resume import Shown, verified
from ckpt_engine.integrations.hf_save import Desk, replaced, save_through, weights_bytes
from ckpt_engine.metrics import Metrics
from ckpt_engine.restore import RestoreReport

_OF_ALL_RANKS = re.compile(r"scaler\.pt|(sampler|dl_state_dict)(_\d+)?\.bin")
"""Files that every rank writes under one name: those of rank 0 count."""


class AcceleratorCheckpointer(Face):
    """What ``attach`` returns. Use it as a context manager; leaving it normally waits for saves in flight."""

    def __init__(self, accelerator: Any, core: Checkpointer) -> None:
        self._accelerator = accelerator
        self._core = core
        self._desk = Desk(core)
        self._step = 0
        self._deepspeed = accelerator.distributed_type.value == "DEEPSPEED"
        self._own = {name: getattr(accelerator, name) for name in ("save_state", "load_state", "end_training")}
        accelerator.save_state = wrapped(self._own["save_state"], self._save_state)
        accelerator.load_state = wrapped(self._own["load_state"], self._load_state)
        accelerator.end_training = wrapped(self._own["end_training"], self._end_training)

    # -- save ----------------------------------------------------------------------------------------------------

    def save_to_memory(self, step: int, **options: Any) -> Staged:
        """The state that ``save_state`` would save, in shared memory only, where it survives a crash of all ranks.

        ``step``: optimizer steps completed. ``options`` go to ``save_state``. Raises StagingError, SaverError.
        """
        return self._save(step, f"step_{step}", None, options, storage=False).staged

    def save_to_storage(self, step: int, *, tag: str = "", metrics: Metrics | None = None, **options: Any) -> Handle:
        """``save_state`` into ``<root>/<tag>``, ``step_<step>`` by default; see ``Handle.result``."""
        return self._save(step, tag or f"step_{step}", metrics, options, storage=True)

    def _save_state(self, output_dir: Any = None, *arguments: Any, **options: Any) -> Any:
        """``accelerator.save_state`` of any caller; elsewhere than in the root it is the Accelerator's own."""
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            tag = f"checkpoint_{project.iteration}"
            path = os.path.join(self._core.root, tag)
            if any(together(self._core.group, lambda: os.path.exists(path), StagingError)):
                raise ValueError(
                    f"Checkpoint directory {path} exists already: set project_configuration.iteration to a free number"
                )
        else:
            if output_dir is None:
                return self._own["save_state"](output_dir, *arguments, **options)
            path = os.path.realpath(os.fspath(output_dir))
            tag = os.path.basename(path)
            if os.path.dirname(path) != self._core.root:
                warn_once(
                    f"elsewhere {self._core.root}",
                    f"save_state({path}): not in {self._core.root}, so it blocks as ever",
                )
                return self._own["save_state"](output_dir, *arguments, **options)
        options |= dict(zip(("safe_serialization",), arguments, strict=False))
        self._save(self._step_of(tag), tag, None, options, storage=True)
        return path

    def _step_of(self, tag: str) -> int:
        """Who calls ``save_state`` names a directory, not a step: the last number in it, or one more than before."""
        numbers = re.findall(r"\d+", tag)
        return int(numbers[-1]) if numbers else self._step + 1

    def _save(self, step: int, tag: str, metrics: Metrics | None, options: dict[str, Any], *, storage: bool) -> Handle:
        def write(transaction: Transaction, folder: Path) -> None:
            with self._redirected(transaction, storage=storage):
                self._own["save_state"](str(folder), **options)
            if transaction.error is None:
                self._capture(transaction, folder)

        handle = save_through(
            self._core,
            self._desk,
            step,
            tag,
            write,
            storage=storage,
            metrics=metrics,
            need_bytes=self._written_bytes(),
            mine=lambda name: self._writes() or not _OF_ALL_RANKS.fullmatch(name),
        )
        if not handle.staged.skipped:
            self._step = step
        return handle

    @contextmanager
    def _redirected(self, transaction: Transaction, *, storage: bool) -> Iterator[None]:
        """DeepSpeed's shards, optimizers and custom objects are planned where they lie, not written."""
        accelerator = self._accelerator
        project = accelerator.project_configuration
        with ExitStack() as stack:
            stack.enter_context(replaced(project, automatic_checkpoint_naming=False))
            if not storage:  # its number is for the next checkpoint
                stack.enter_context(replaced(project, iteration=project.iteration))
            for engine in accelerator._models if self._deepspeed else ():
                shim = Shim(engine.checkpoint_engine)
                shim.saving = transaction
                stack.enter_context(replaced(engine, checkpoint_engine=shim))
            stack.enter_context(replaced(accelerator, _custom_objects=[]))
            if not self._deepspeed:
                stack.enter_context(replaced(accelerator, _optimizers=[]))
            yield

    def _capture(self, transaction: Transaction, folder: Path) -> None:
        """What was not written, under the Accelerator's names; after the last collective, since it may fail."""
        if not self._writes():
            return
        for number, one in enumerate(() if self._deepspeed else self._accelerator._optimizers):
            transaction.capture(
                one.state_dict(), str(folder / (f"optimizer_{number}.bin" if number else "optimizer.bin"))
            )
        for number, one in enumerate(self._accelerator._custom_objects):
            transaction.capture(one.state_dict(), str(folder / f"custom_checkpoint_{number}.pkl"))

    def _writes(self) -> bool:
        """Whether this rank writes what is one for all ranks."""
        each = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if each else self._accelerator.is_main_process)

    def _written_bytes(self) -> int:
        if self._deepspeed or not self._writes():
            return 0
        return sum(map(weights_bytes, self._accelerator._models))

    # -- restore -------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, **options: Any) -> RestoreReport:
        """Load the newest state that all ranks can agree on (or that of ``step``), from memory or storage. Collective.

        ``report.step`` is 0 and ``report.source`` None if there is nothing. ``options`` go to ``load_state``. With
        ``automatic_checkpoint_naming`` the next save gets the next free number. Raises NotFound, WorldMismatch,
        Corrupt, RestoreError.
        """
        core = self._core
        with core.alone():
            shown = Shown(core, every_shard=False)
            try:
                report = core.restore(shown.load, shown.wants, step)
                if report.source is not None:
                    project = self._accelerator.project_configuration
                    with replaced(project, automatic_checkpoint_naming=False):
                        self._own["load_state"](shown.path(report.tag), **options)
                core.group.gather(())  # all ranks of the node have read what lies in the memory of one
            finally:
                shown.close()
        self._go_on_after(report)
        return report

    def _go_on_after(self, report: RestoreReport) -> None:
        self._step = report.step
        if self._core.place.rank == 0 and report.source is not None:
            log.warning("resumed at step %d from %s (%s)", report.step, report.source, report.tag)
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            there = os.listdir(self._core.root) if os.path.isdir(self._core.root) else []
            used = [int(found[1]) for name in there if (found := re.fullmatch(r"checkpoint_(\d+)", name))]
            project.iteration = max(self._core.group.gather(max(used, default=-1))) + 1

    def _load_state(self, input_dir: Any = None, *arguments: Any, **options: Any) -> Any:
        """``accelerator.load_state`` of any caller: waits for saves in flight, verifies what has a manifest."""
        core = self._core
        if input_dir is None and not self._accelerator.project_configuration.automatic_checkpoint_naming:
            return self._own["load_state"](input_dir, *arguments, **options)
        if input_dir is None:
            options |= dict(zip(("load_kwargs",), arguments, strict=False))
            if self.restore(**options).source is None:
                raise NotFound(f"there is no checkpoint in {core.root}")
            return None
        path = os.path.realpath(os.fspath(input_dir))
        with verified(core, path, "restore() takes the newest that is"):
            return self._own["load_state"](input_dir, *arguments, **options)

    # -- the end -------------------------------------------------------------------------------------------------

    def _detach(self) -> None:
        for name in self._own:
            vars(self._accelerator).pop(name, None)
        self._desk.clear()

    def _end_training(self, *arguments: Any, **options: Any) -> Any:
        own = self._own["end_training"]
        self.close()
        return own(*arguments, **options)
