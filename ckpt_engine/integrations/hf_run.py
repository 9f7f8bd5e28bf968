"""One call of a Trainer's ``train``: what is saved, what waits for a commit, and how it ends."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import CkptError, CommitTimeout, RestoreError, UnsupportedLeaf
from ckpt_engine.events import log
from ckpt_engine.group import together
from ckpt_engine.handles import Handle, patience
from ckpt_engine.integrations.deepspeed_shim import refuse_unsupported, wrapped
from ckpt_engine.integrations.hf_resume import PREFIX, Resume, standing
from ckpt_engine.integrations.hf_save import Desk, Work, replaced
from ckpt_engine.metrics import MAX_METRICS, MAX_NAME_BYTES
from ckpt_engine.reading import Reading

BEST = "best_so_far"
"""The metric of checkpoints that the Trainer took for its best when it saved them; the newest of them is kept."""
MOST_STALLS = 10_000
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Stall:
    """What one save cost the training loop, in seconds: ``weights_s`` and ``wait_s`` are parts of ``total_s``.

    ``weights_s``: the Trainer serializing the model's weights (with ZeRO-3 gathering them, too). ``wait_s``: until a
    buffer was released. ``storage``: False for a snapshot in memory.
    """

    step: int
    storage: bool
    total_s: float
    weights_s: float
    wait_s: float


class Run:
    """One call of ``train``."""

    def __init__(self, trainer: Any, core: Checkpointer, run_dir: str, trial: Any, memory_steps: int) -> None:
        self.stalls: deque[Stall] = deque(maxlen=MOST_STALLS)
        self.resume = Resume(trainer, core, run_dir)
        self._trainer = trainer
        self._core = core
        self._run_dir = run_dir
        self._trial = trial
        self._memory_steps = memory_steps
        self._desk = Desk(core)
        self._flying: list[Handle] = []
        self._pushes: list[tuple[Handle, Any, Reading]] = []
        self._pushed: list[Reading] = []
        self._last = -1
        self.evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self._during = contextlib.ExitStack()
        names = ("_save_checkpoint", "_maybe_log_save_evaluate", "_load_best_model", "_push_from_checkpoint")
        self._own: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in names}

    @contextlib.contextmanager
    def wrapped_methods(self) -> Iterator[None]:
        """For as long as ``train`` runs."""
        own = self._own
        with self._during:
            self._during.enter_context(
                replaced(
                    self._trainer,
                    _save_checkpoint=wrapped(own["_save_checkpoint"], self._save_checkpoint),
                    _maybe_log_save_evaluate=wrapped(own["_maybe_log_save_evaluate"], self._after_step),
                    _load_best_model=wrapped(own["_load_best_model"], self._load_best_model),
                )
            )
            yield

    def begin(self) -> None:
        """The optimizer, and DeepSpeed's engine, are there; nothing was trained yet."""
        core, trainer = self._core, self._trainer
        overlap = core.options.staging != "blocking"
        if trainer.is_deepspeed_enabled:
            engine = trainer.deepspeed
            refuse_unsupported(engine)
            if overlap:
                step = engine._take_model_step

                def guarded(*arguments: Any, **options: Any) -> Any:
                    core.guard()
                    return step(*arguments, **options)

                self._during.enter_context(replaced(engine, _take_model_step=wrapped(step, guarded)))
        elif overlap:
            core.guards.add(getattr(trainer.optimizer, "optimizer", trainer.optimizer))

    # -- save ----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        call = inspect.signature(self._own["_save_checkpoint"]).bind(*arguments, **options)
        metrics = self._metrics(call.arguments.get("metrics"))
        self._save(lambda: self._own["_save_checkpoint"](*arguments, **options), storage=True, metrics=metrics)

    def _metrics(self, judged: dict[str, Any] | None) -> dict[str, float]:
        """What was evaluated at this step, and BEST if the Trainer takes this for its best. ``judged``: until 4.46."""
        args, state = self._trainer.args, self._trainer.state
        step, found = self.evaluated
        numbers = {key: value for key, value in found.items() if isinstance(value, (int, float)) and _short(key)}
        metrics = dict(list(numbers.items())[: MAX_METRICS - 1]) if step == state.global_step else {}
        best = state.best_model_checkpoint == os.path.join(self._run_dir, f"{PREFIX}{state.global_step}")
        best = best or getattr(state, "best_global_step", None) == state.global_step
        value = (judged or {}).get(f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}")
        if value is not None:
            first = state.best_metric is None or state.best_model_checkpoint is None
            best = first or (value > state.best_metric if args.greater_is_better else value < state.best_metric)
        return {**metrics, BEST: 1.0} if best else metrics

    def _after_step(self, *arguments: Any, **options: Any) -> Any:
        """After a step was logged, evaluated and perhaps saved: a snapshot in memory, and what waits for a commit."""
        result = self._own["_maybe_log_save_evaluate"](*arguments, **options)
        state = self._trainer.state
        due = self._memory_steps and state.global_step % self._memory_steps == 0
        if due and state.global_step not in (self._last, self.resume.step, state.max_steps):
            own = self._own["_save_checkpoint"]
            self._save(lambda: own(self._trainer.model_wrapped, self._trial), storage=False)
        self._push_what_is_committed()
        return result

    def _save(self, write: Callable[[], None], *, storage: bool, metrics: Mapping[str, float] | None = None) -> None:
        """One save, from its entry to its seal. ``write``: the Trainer's own, collective."""
        core, state = self._core, self._trainer.state
        begin, step = time.perf_counter(), state.global_step
        self._last = step
        with core.alone():
            entry = core.enter(step, storage=storage, tag=f"{PREFIX}{step}", metrics=metrics)
            if core.options.when_busy == "skip" and core.busy_anywhere():
                core.skipped_handle(entry)
                return
            tag = entry.attempt.tag
            try:
                work = Work(self._trainer, core, self._desk, run_dir=self._run_dir, tag=tag, storage=storage)
                with work.redirected():
                    write()
                if work.transaction.error is not None:
                    raise work.transaction.error
                handle = core.save(entry, {**self._desk.files(tag), **work.transaction.files})
            except UnsupportedLeaf as error:
                core.fail(entry, error)
                if core.options.on_error == "raise":
                    raise
                log.error("step %d is not saved, the training goes on: %s", step, error)
                return
            except BaseException as error:
                core.fail(entry, error)
                raise
            finally:
                self._desk.clear()
        core.report_trouble(handle)
        total_s = time.perf_counter() - begin
        self.stalls.append(Stall(step, storage, total_s, work.weights_s, handle.staged.wait_s))
        if storage:
            self._flying = [*(one for one in self._flying if not one.done()), handle]
        if work.push:
            self._pushes.append((handle, copy.copy(state), Reading(core.storage, core.root, tag)))

    # -- what waits for a commit ---------------------------------------------------------------------------------

    def _push_what_is_committed(self, *, all_of_them: bool = False) -> None:
        """The Trainer's pushes to the hub, each after the commit of its checkpoint, which stays until it is read."""
        trainer = self._trainer
        under_way = getattr(trainer, "push_in_progress", None)
        if under_way is None or under_way.is_done():
            self._give_back(self._pushed)
        while self._pushes and (all_of_them or self._pushes[0][0].done()):
            handle, state, lease = self._pushes.pop(0)
            self._pushed.append(lease)
            try:
                published = handle.result()
            except CkptError as error:
                log.warning("step %d is not pushed: %s", handle.step, error)
                continue
            with replaced(trainer, state=state):
                self._own["_push_from_checkpoint"](published.path)

    def _give_back(self, leases: list[Reading]) -> None:
        while leases:
            leases.pop().close()

    def _load_best_model(self) -> None:
        """After the commit of the best checkpoint, and verified."""
        self._core.settle()
        self._await_commits()
        best, core = self._trainer.state.best_model_checkpoint, self._core

        def look() -> bool:
            return core.place.rank != 0 or standing(core, os.path.realpath(best), verify=True)[0] is not None

        if not all(together(core.group, look, RestoreError)):
            log.error("the best model stays where it is, and the last one is kept: %s is no complete checkpoint", best)
            return
        self._own["_load_best_model"]()

    def spare_the_last(self) -> None:
        """With ``save_total_limit=1`` the Trainer would now remove all but the best, in flight or not."""
        self._during.enter_context(replaced(self._trainer.args, save_total_limit=None))

    def finish(self) -> None:
        """Every save has an outcome and every push has begun."""
        self._core.settle()
        self._await_commits()
        self._push_what_is_committed(all_of_them=True)

    def _await_commits(self) -> None:
        await_commits(self._core, self._flying)
        self._flying.clear()

    def end(self) -> None:
        """Whatever happened."""
        self.resume.let_go()
        self._desk.clear()
        self._give_back([*self._pushed, *(lease for _, _, lease in self._pushes)])


def await_commits(core: Checkpointer, flying: Iterable[Handle]) -> None:
    """Wait, and say how far they are; a failure is told as the next save would (``on_error``)."""
    deadline = patience(core.options, None)
    for handle in flying:
        while not handle.done():
            try:
                handle.result(min(_PROGRESS_S, deadline.remaining()))
            except CkptError as error:
                if handle.done():
                    handle.reported = False  # told below
                elif deadline.expired() or not isinstance(error, CommitTimeout):
                    raise
                else:
                    log.warning("waiting for %s: %s written (%s)", handle.path, _progress(core, handle), error)
    core.report_trouble()


def _progress(core: Checkpointer, handle: Handle) -> str:
    for slot in core.buffers.mine():
        found = slot.snapshot()
        if found is not None and found[1].attempt == handle.staged.attempt:
            return f"{slot.progress() >> 20} of {sum(file.nbytes for file in found[1].files) >> 20} MiB"
    return "all"


def _short(name: str) -> bool:
    return name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
