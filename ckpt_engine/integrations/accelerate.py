"""``save_state`` and ``load_state`` of one Accelerator said in our verbs; the only file that imports accelerate.

``attach(accelerator)`` wraps these two bound methods; nothing of accelerate, torch or DeepSpeed is patched. The
Accelerator's own ``save_state`` runs as ever, but into a directory in memory (``hf_save.Desk``); its files, and the
optimizers and DeepSpeed shards that are planned in place of theirs, become one shard of one attempt, whose commit
directory is what the caller named. ``load_state`` reads verified files in memory (``hf_resume.Shown``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Options, SaverOptions
from ckpt_engine.errors import CkptError, ConfigError, NotFound, RestoreError, StagingError
from ckpt_engine.events import log, warn_once
from ckpt_engine.face import Face
from ckpt_engine.group import together
from ckpt_engine.handles import Handle, Staged
from ckpt_engine.integrations.deepspeed_shim import Shim, Transaction, refuse_unsupported, wrapped
from ckpt_engine.integrations.hf_resume import Shown, standing
from ckpt_engine.integrations.hf_save import Desk, replaced
from ckpt_engine.metrics import Metrics
from ckpt_engine.restore import RestoreReport
from ckpt_engine.retention import Retention, one_policy

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ConfigError("ckpt_engine.integrations.accelerate needs accelerate: pip install 'ckpt-engine[hf]'") from error

__all__ = ["AcceleratorCheckpointer", "attach"]

_OF_ALL_RANKS = re.compile(r"scaler\.pt|(sampler|dl_state_dict)(_\d+)?\.bin")
"""Files that every rank writes under one name: those of rank 0 count."""


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


class AcceleratorCheckpointer(Face):
    """What ``attach`` returns. Use it as a context manager; leaving it normally waits for saves in flight."""

    def __init__(self, accelerator: Any, core: Checkpointer) -> None:
        self._accelerator = accelerator
        self._core = core
        self._desk = Desk(core)
        self._step = 0
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
        core = self._core
        with core.alone():
            entry = core.enter(step, storage=storage, tag=tag, metrics=metrics)
            if core.options.when_busy == "skip" and core.busy_anywhere():
                return core.skipped_handle(entry)
            try:
                folder = self._desk.lay(tag, self._written_bytes())
                transaction = Transaction(core, str(folder), storage=storage)
                with self._redirected(transaction, folder, storage=storage):
                    self._own["save_state"](str(folder), **options)
                if transaction.error is not None:
                    raise transaction.error
                files = {**self._mine(tag), **transaction.files}
                handle = core.save(entry, files)
            except BaseException as error:
                core.fail(entry, error)
                raise
            finally:
                self._desk.clear()
            self._step = step
        core.report_trouble(handle)
        return handle

    @contextmanager
    def _redirected(self, transaction: Transaction, folder: Path, *, storage: bool) -> Iterator[None]:
        """What is heavy is planned where it lies, in place of the Accelerator's files of the same names."""
        accelerator = self._accelerator
        project = accelerator.project_configuration
        engines = accelerator._models if accelerator.distributed_type == DistributedType.DEEPSPEED else []
        with ExitStack() as stack:
            stack.enter_context(replaced(project, automatic_checkpoint_naming=False))
            if not storage:  # its number is for the next checkpoint
                stack.enter_context(replaced(project, iteration=project.iteration))
            for engine in engines:
                shim = Shim(engine.checkpoint_engine)
                shim.saving = transaction
                stack.enter_context(replaced(engine, checkpoint_engine=shim))
            if self._writes():
                for number, one in enumerate(accelerator._custom_objects):
                    transaction.capture(one.state_dict(), str(folder / f"custom_checkpoint_{number}.pkl"))
            stack.enter_context(replaced(accelerator, _custom_objects=[]))
            if not engines:
                for number, one in enumerate(accelerator._optimizers if self._writes() else ()):
                    name = f"optimizer_{number}.bin" if number else "optimizer.bin"
                    transaction.capture(one.state_dict(), str(folder / name))
                stack.enter_context(replaced(accelerator, _optimizers=[]))
            yield

    def _writes(self) -> bool:
        """Whether this rank writes what is one for all ranks."""
        each = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if each else self._accelerator.is_main_process)

    def _mine(self, tag: str) -> dict[str, Any]:
        files = self._desk.files(tag)
        return {name: file for name, file in files.items() if self._writes() or not _OF_ALL_RANKS.fullmatch(name)}

    def _written_bytes(self) -> int:
        if self._accelerator.distributed_type == DistributedType.DEEPSPEED or not self._writes():
            return 0
        return sum(p.numel() * p.element_size() for model in self._accelerator._models for p in model.parameters())

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
        options |= dict(zip(("load_kwargs",), arguments, strict=False))
        if input_dir is None:
            if self.restore(**options).source is None:
                raise NotFound(f"there is no checkpoint in {core.root}")
            return None
        path = os.path.realpath(os.fspath(input_dir))

        def look() -> tuple[int | None, bool]:
            try:
                core.wait()
            except CkptError as error:
                if core.options.on_error == "raise":
                    raise
                log.warning("before loading: %s", error)
            if core.place.rank != 0:
                return None, False
            one, traces = standing(core, path, verify=False)
            return (None if one is None else one.manifest.attempt.step), traces

        step, traces = together(core.group, look, RestoreError)[0]
        if os.path.dirname(path) == core.root and step is not None:
            report = self.restore(step, **options)
            if report.tag != os.path.basename(path):
                raise RestoreError(f"{path} is not the newest checkpoint of step {step}: that is {report.tag}")
            return None
        if traces:
            raise NotFound(f"{path} is not complete: it has no manifest. restore() takes the newest that is")
        if os.path.isdir(path):
            log.warning("%s has no manifest: loading it unverified", path)
        return self._own["load_state"](input_dir, *arguments, **options)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the saves in flight, say goodbye, and give the Accelerator its own methods back. Idempotent."""
        self._let_go()
        self._core.close(timeout_s=timeout_s)

    def _let_go(self) -> None:
        for name in self._own:
            vars(self._accelerator).pop(name, None)
        self._desk.clear()

    def _end_training(self, *arguments: Any, **options: Any) -> Any:
        own = self._own["end_training"]
        self.close()
        return own(*arguments, **options)

    def __enter__(self) -> AcceleratorCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        self._core.close(goodbye=kind is None)
