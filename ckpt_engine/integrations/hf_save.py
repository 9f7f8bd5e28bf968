"""One save of a Trainer: its files are written into memory, and staged from there.

While a save runs the Trainer writes into a directory of /dev/shm, ``Desk``; what is heavy (the optimizer, DeepSpeed's
shards) does not even go there but is planned where it lies. So a snapshot holds every file of a checkpoint, and a
checkpoint directory of the root never holds half of one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_engine import budget
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import ConfigError, UnsupportedLeaf
from ckpt_engine.events import warn_once
from ckpt_engine.handles import Handle
from ckpt_engine.integrations.deepspeed_shim import Shim, Transaction, owned_by, wrapped
from ckpt_engine.integrations.hf_resume import TRAINER_STATE
from ckpt_engine.metrics import Metrics
from ckpt_engine.saving import Entry
from ckpt_engine.staging import Blob, Planned

_WEIGHTS = "pytorch_model.bin"
_DEPTH = 32


class Desk:
    """Where the Trainer of one rank writes while a save runs: ``<folder>/checkpoint-N``, in shared memory.

    After a crash: the next one made under the same name clears it away.
    """

    def __init__(self, core: Checkpointer) -> None:
        self._usual = core.link.names.run_dir / f"save-{core.place.local_rank}"
        self.folder = self._usual
        shutil.rmtree(self._usual, ignore_errors=True)

    def lay(self, tag: str, need_bytes: int) -> Path:
        """The empty directory for ``tag``. Without room for ``need_bytes`` in shared memory it lies on a disk."""
        room = budget.room()
        if need_bytes <= room.free_bytes:
            self.folder = self._usual
        else:
            self.folder = Path(tempfile.mkdtemp(prefix="ckpt-save-"))
            warn_once(
                f"desk {self._usual}",
                f"{need_bytes} bytes that the Trainer writes itself do not fit into shared memory ({room.limit} leaves "
                f"{room.free_bytes}): they pass through {self.folder.parent}, which blocks for longer",
            )
        path = self.folder / tag
        path.mkdir(mode=0o700, parents=True)
        return path

    def files(self, tag: str) -> dict[str, Planned]:
        """Every file that was written below ``tag``, planned."""
        found = {}
        for folder, _, names in os.walk(self.folder / tag):
            for name in names:
                path = Path(folder, name)
                found[path.relative_to(self.folder / tag).as_posix()] = Planned(Blob(_mapped(path)))
        return found

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _mapped(path: Path) -> bytes | mmap.mmap:
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) if path.stat().st_size else b""


class Work:
    """One save while the Trainer writes: where its files go, what is planned instead, and what it must not do."""

    def __init__(self, trainer: Any, core: Checkpointer, desk: Desk, *, run_dir: str, tag: str, storage: bool) -> None:
        self._trainer = trainer
        self._real = os.path.join(run_dir, tag)
        self._storage = storage
        self._best = trainer.state.best_model_checkpoint
        self._engine = trainer.deepspeed if trainer.is_deepspeed_enabled else None
        self.weights_s = 0.0
        self.push = False
        self._plain = self._engine is None
        self.folder = desk.lay(tag, weights_bytes(trainer.model) if storage and trainer.args.should_save else 0)
        owned = core.guards.owned() if self._plain else owned_by(self._engine, core.options.staging)
        self.transaction = Transaction(core, str(self.folder), storage=storage, owned=owned)

    @contextlib.contextmanager
    def redirected(self) -> Iterator[None]:
        trainer, state = self._trainer, self._trainer.state
        save_to_json = state.save_to_json

        def save_state(path: str) -> None:
            self._name_best()
            try:
                save_to_json(path)
            except (TypeError, ValueError, RecursionError) as error:
                self.transaction.error = self.transaction.error or unfit_for_json(state, error)

        with contextlib.ExitStack() as stack:
            methods: dict[str, Any] = {
                "_get_output_dir": lambda trial=None: str(self.folder.parent),
                "_push_from_checkpoint": self._note_push,
                "save_model": self._weights(trainer.save_model),
            }
            if self._plain and not _overrides(trainer, "_save_optimizer_and_scheduler"):
                methods["_save_optimizer_and_scheduler"] = self._plan_optimizer
            if self._engine is not None:
                shim = Shim(self._engine.checkpoint_engine)
                shim.saving = self.transaction
                save = _once_a_tag(self._engine.save_checkpoint)
                stack.enter_context(replaced(self._engine, checkpoint_engine=shim, save_checkpoint=save))
            if not self._storage:
                stack.enter_context(replaced(trainer.args, save_only_model=False))
            stack.enter_context(replaced(trainer, **methods))
            stack.enter_context(replaced(state, save_to_json=save_state))
            yield
        self._name_best()

    def _weights(self, save_model: Callable[..., None]) -> Callable[..., None]:
        """``save_model``: timed. For a snapshot in memory DeepSpeed's files are enough, or what torch would write."""
        trainer = self._trainer

        def save(*arguments: Any, **options: Any) -> None:
            begin = time.perf_counter()
            if self._storage or (self._plain and not _usual_weights(trainer)):
                save_model(*arguments, **options)
            elif self._plain and trainer.args.should_save:
                self.transaction.capture(trainer.model.state_dict(), str(self.folder / _WEIGHTS))
            self.weights_s += time.perf_counter() - begin

        return wrapped(save_model, save)

    def _plan_optimizer(self, output_dir: str) -> None:
        """What the Trainer writes without DeepSpeed, under the same names."""
        trainer = self._trainer
        if trainer.args.should_save:
            self.transaction.capture(trainer.optimizer.state_dict(), os.path.join(output_dir, "optimizer.pt"))
            self.transaction.capture(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _note_push(self, folder: str) -> None:
        self.push = self._storage and bool(self._trainer.is_world_process_zero())

    def _name_best(self) -> None:
        """The Trainer finds its best checkpoint at the desk; it is going to lie in the output directory."""
        state = self._trainer.state
        if state.best_model_checkpoint == str(self.folder):
            state.best_model_checkpoint = self._real if self._storage else self._best


def _once_a_tag(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """ZeRO-3 without gathered weights saves twice at one step, into one directory: the second time nothing is new."""
    saved = False

    def save(*arguments: Any, **options: Any) -> Any:
        nonlocal saved
        if saved:
            return True
        saved = True
        return save_checkpoint(*arguments, **options)

    return wrapped(save_checkpoint, save)


def save_through(
    core: Checkpointer,
    desk: Desk,
    step: int,
    tag: str,
    write: Callable[[Transaction, Path], None],
    *,
    storage: bool,
    metrics: Metrics | None = None,
    need_bytes: int = 0,
    mine: Callable[[str], bool] = lambda name: True,
) -> Handle:
    """One save of a framework. ``write(transaction, folder)`` writes files into ``folder``, or captures them.

    ``write`` may be collective: every rank comes to it, also one whose save is refused. ``need_bytes``: about what it
    writes into ``folder``. ``mine``: which of these files are part of the checkpoint. Raises StagingError, SaverError,
    UnsupportedLeaf, ConfigError.
    """
    entry: Entry | None = None
    problem: Exception | None = None
    with core.alone():
        try:
            entry = core.enter(step, storage=storage, tag=tag, metrics=metrics)
        except Exception as error:  # raised below: the others are on their way into the framework's collectives
            problem = error
        if core.options.when_busy == "skip" and core.busy_anywhere():
            if entry is None:
                raise problem or ConfigError("not entered")
            return core.skipped_handle(entry)
        try:
            folder = desk.lay(tag, need_bytes)
            transaction = Transaction(core, str(folder), storage=storage)
            transaction.error = problem
            write(transaction, folder)
            if entry is None or transaction.error is not None:
                raise transaction.error or ConfigError(f"the save of step {step!r} was not entered")
            written = {name: file for name, file in desk.files(tag).items() if mine(name)}
            handle = core.save(entry, {**written, **transaction.files})
        except BaseException as error:
            if entry is not None:
                core.fail(entry, error)
            raise
        finally:
            desk.clear()
    core.report_trouble(handle)
    return handle


def weights_bytes(model: Any) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters())


def _overrides(trainer: Any, *names: str) -> bool:
    """True if somebody changed these methods of the Trainer: then theirs are called, and write to the desk."""
    stock = next(kind for kind in type(trainer).__mro__ if kind.__module__.split(".")[0] == "transformers")
    return any(getattr(type(trainer), name) is not getattr(stock, name) or name in vars(trainer) for name in names)


def _usual_weights(trainer: Any) -> bool:
    """True if the Trainer reads ``pytorch_model.bin`` as well as what its ``save_model`` writes."""
    adapters = hasattr(trainer.model, "peft_config") or getattr(trainer.model, "_hf_peft_config_loaded", False)
    return not adapters and not _overrides(trainer, "_save", "_load_from_checkpoint")


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of one instance, its class and every other instance untouched, for as long as this lasts."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                vars(owner).pop(name, None)


def unfit_for_json(state: object, error: Exception) -> UnsupportedLeaf:
    """What of a TrainerState keeps it from being written, by name."""
    path, value = "", state
    for _ in range(_DEPTH):  # what holds itself has no end
        bad = next(((step, child) for step, child in _children(value) if not _fits(child)), None)
        if bad is None:
            break
        path, value = path + bad[0], bad[1]
    where = f"{TRAINER_STATE}: {path or '(root)'}"
    return UnsupportedLeaf(
        f"{where} ({type(value).__name__}) cannot be written as JSON: {error}. What a callback returns from state(), "
        "and what is logged, must be numbers, texts, lists and dicts",
        path=where,
    )


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif hasattr(value, "__dataclass_fields__"):
        yield from ((name, getattr(value, name)) for name in value.__dataclass_fields__)


def _fits(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
