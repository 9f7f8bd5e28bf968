"""One ``fit`` of a Lightning Trainer: what is saved, what waits for a commit, what is loaded, and how it ends.

What lies where is the matter of ``lightning_shelf``. What Lightning removes, links or uploads because a newer
checkpoint was saved, waits until that is committed (``lightning_later``).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Options
from ckpt_engine.errors import CkptError, ConfigError, Corrupt, RestoreError, UnsupportedLeaf, WorldMismatch
from ckpt_engine.events import log, warn_once
from ckpt_engine.group import together
from ckpt_engine.handles import Handle
from ckpt_engine.integrations.deepspeed_shim import Shim, Transaction, await_saves, refuse_unsupported, wrapped
from ckpt_engine.integrations.hf_resume import Shown, tell_skipped, verified
from ckpt_engine.integrations.hf_run import await_commits
from ckpt_engine.integrations.hf_save import Desk, replaced, save_through, weights_bytes
from ckpt_engine.integrations.lightning_later import Later
from ckpt_engine.integrations.lightning_shelf import FOLDER, Shelf, place
from ckpt_engine.storage.posix import PosixStorage

_NOTES = "to-remove.txt"


class Newest(str):
    """``ckpt_path="last"`` on its way; its text is what Lightning would have taken itself, "" if nothing."""


def is_a(thing: object, kind: str) -> bool:
    """By name: ``lightning`` and ``pytorch_lightning`` each have classes of their own."""
    return any(one.__name__ == kind for one in type(thing).__mro__)


class Run:
    """One ``fit``, from the moment at which it looks for a checkpoint to the teardown of its strategy."""

    def __init__(
        self, trainer: Any, folder: str, options: Options, memory_steps: int, over: Callable[[], None]
    ) -> None:
        if "://" in folder:
            raise ConfigError(f"{folder} is not a directory of this machine's file systems: set a local dirpath")
        self.failed = False
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._deepspeed = is_a(self._strategy, "DeepSpeedStrategy")
        self._stock_io = not self._deepspeed and type(self._strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
        self._folder = os.path.realpath(folder)
        if self._deepspeed and trainer.strategy.model is not trainer.lightning_module:
            refuse_unsupported(self._strategy.model)
        names = ("save_checkpoint", "remove_checkpoint", "teardown")
        self._own: dict[str, Callable[..., Any]] = {name: getattr(self._strategy, name) for name in names}
        self._shelf = Shelf(
            PosixStorage(), self._folder, deepspeed=self._deepspeed, own_remove=self._own["remove_checkpoint"]
        )
        self.core = Checkpointer(self._shelf.root, options, rank=None, world_size=None)
        self._memory_steps = memory_steps
        self._desk = Desk(self.core)
        self._window = -1
        self._later = Later(os.path.join(self.core.root, _NOTES), self._failed)
        self._saved: set[str] = set()
        self._last = -1
        self._begun = False
        self._over = over
        self._during = contextlib.ExitStack()
        methods = {name: wrapped(self._own[name], getattr(self, f"_{name}")) for name in names}
        self._during.enter_context(replaced(self._strategy, **methods))
        self._keepers = [one for one in trainer.checkpoint_callbacks if is_a(one, "ModelCheckpoint")]
        for one in self._keepers:
            mine: dict[str, Any] = {"_link_checkpoint": self._link_checkpoint}
            if "://" not in str(one.dirpath):
                mine["file_exists"] = self._file_exists
            self._during.enter_context(replaced(one, **mine))
        for logger in trainer.loggers:
            own = logger.after_save_checkpoint
            self._during.enter_context(replaced(logger, after_save_checkpoint=self._told_later(own)))

    # -- save ----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """``strategy.save_checkpoint`` of any caller, which every rank calls; rank 0 says where."""
        if "://" in str(filepath):
            self._own["save_checkpoint"](checkpoint, filepath, storage_options)
            return
        path = place(filepath)
        if self.core.place.rank == 0:
            self._shelf.make_way(path)
        path = str(self._strategy.broadcast(path))
        tag = self._shelf.tag(path)
        why = f"not a name in {self._folder}" if not tag else ""
        why = "it takes storage_options" if storage_options is not None else why
        why = why or ("" if "optimizer_states" in checkpoint else "nobody can resume from weights alone")
        if why:
            warn_once(f"elsewhere {self._folder} {why}", f"save_checkpoint({path}) blocks as ever: {why}")
            self._later.forget(path)
            self._own["save_checkpoint"](checkpoint, path, storage_options)
            if self.core.place.rank == 0:
                self._later.add(lambda: self._shelf.note(self.core.claim.generation, path), one_more=True)
            return
        handle = self._save(checkpoint, tag, os.path.basename(path), storage=True)
        self._later.saved(handle, path)
        if handle is not None and not handle.staged.skipped:
            self._saved.add(path)
            if self.core.place.rank == 0:
                self._shelf.show(path, self._later)

    def _failed(self, path: str) -> None:
        self._saved.discard(path)
        if self.core.place.rank == 0:
            self._shelf.failed(path)

    def after_batch(self) -> None:
        """A snapshot in memory, where one is due, and what waits for a commit."""
        if self._memory_steps:
            step = self._trainer.global_step
            if self._window < 0:
                self._window = max(step - 1, 0) // self._memory_steps  # of the step before
            due = step // self._memory_steps > self._window
            self._window = step // self._memory_steps
            if due and step != self._last:
                checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(False)
                self._save(checkpoint, self._shelf.snapshot(step), "snapshot.ckpt", storage=False)
        self._later.run()

    def _save(self, checkpoint: dict[str, Any], tag: str, file: str, *, storage: bool) -> Handle | None:
        """None: it cannot be saved, of which the log tells, and the training goes on."""
        strategy, core = self._strategy, self.core
        self._last = step = int(self._trainer.global_step)

        def write(transaction: Transaction, folder: Path) -> None:
            own = self._own["save_checkpoint"]
            if self._deepspeed:
                shim = Shim(strategy.model.checkpoint_engine)
                shim.saving = transaction
                with replaced(strategy.model, checkpoint_engine=shim), replaced(strategy, broadcast=_as_it_is):
                    own(checkpoint, str(folder))
            elif core.place.rank == 0 and self._stock_io:
                transaction.capture(checkpoint, str(folder / file))
            elif core.place.rank == 0:
                own(checkpoint, str(folder / file))

        need = 0 if self._deepspeed or self._stock_io else 3 * weights_bytes(self._trainer.lightning_module)
        try:
            return save_through(core, self._desk, step, tag, write, storage=storage, need_bytes=need)
        except UnsupportedLeaf as error:
            if core.options.on_error == "raise":
                raise
            log.error("step %d is not saved, the training goes on: %s", step, error)
        return None

    # -- what Lightning does because of a save -------------------------------------------------------------------

    def _file_exists(self, filepath: Any, trainer: Any) -> bool:
        """``ModelCheckpoint.file_exists``: what is on its way is there, what is to be removed is not."""
        path = place(filepath)
        there = (path in self._saved or os.path.exists(path)) and not self._later.removes(path)
        return bool(self._strategy.broadcast(there))

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """``save_last="link"``: the link before it stays until what the new one names is committed."""
        target, path = place(filepath), place(linkpath)
        if self.core.place.rank == 0:
            self._later.add(lambda: self._shelf.show_as(target, path))
            self._later.run()  # at once, if nothing is in flight
        self._saved.add(path)

    def _told_later(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        def after_save_checkpoint(callback: Any) -> None:
            self._later.add_for_all(lambda: own(callback))

        return after_save_checkpoint

    def _remove_checkpoint(self, filepath: Any) -> None:
        path = place(filepath)
        self._saved.discard(path)
        if "://" in str(filepath) or not self._shelf.tag(path):
            self._own["remove_checkpoint"](filepath)
        elif self.core.place.rank == 0:
            self._later.add(lambda: self._shelf.remove(path, self._later), removes=path)

    def _remove_unless_known(self, path: str) -> None:
        if not any(path in _known_to(one) for one in self._keepers):
            self._shelf.remove(path, self._later)

    # -- load ----------------------------------------------------------------------------------------------------

    def load(self, asked: Any, own: Callable[[Any], None]) -> None:
        """What ``fit`` begins from: ``asked``, the newest of all, or nothing. Collective. ``own`` loads a path."""
        try:
            self._load(asked, own)
            if self.core.place.rank == 0:
                with contextlib.suppress(OSError, CkptError):
                    self._shelf.note(self.core.claim.generation, *([str(asked)] if isinstance(asked, Newest) else []))
        except Corrupt:
            if self._deepspeed:
                log.error(
                    "if Lightning has saved into one of these directories without ckpt_engine, delete MANIFEST.json "
                    "and .attempt-* there: then it is loaded as it is, unverified"
                )
            raise

    def _load(self, asked: Any, own: Callable[[Any], None]) -> None:
        if not self._begun:  # a Tuner loads in between
            self._begun = True
            together(self.core.group, self._clean_up_later, RestoreError)
        if isinstance(asked, Newest):
            self._load_newest(asked, own)
        elif asked:
            folder = os.path.realpath(asked)
            if not self._deepspeed:
                folder = os.path.dirname(folder)
                if os.path.basename(os.path.dirname(folder)) != FOLDER:
                    await_saves(self.core)
                    log.warning("%s has no manifest: loading it unverified", asked)
                    own(asked)
                    return
            with verified(self.core, folder, "pass ckpt_path='last' to start from the newest that is"):
                own(asked)
        else:
            own(asked)

    def _clean_up_later(self) -> None:
        """After the next commit go what a run before could not remove any more, and what is stale."""
        if self.core.place.rank == 0:
            for path in self._later.noted():
                act = functools.partial(self._remove_unless_known, path)
                self._later.add(act, removes=path, one_more=True)
            self._later.add(self._sweep, one_more=True)

    def _sweep(self) -> None:
        for tag in self._shelf.stale():
            if self._shelf.path(tag) not in self._saved:
                self._later.aside(functools.partial(self._shelf.sweep, tag))

    def _load_newest(self, stock: Newest, own: Callable[[Any], None]) -> None:
        core, connector = self.core, self._trainer._checkpoint_connector
        shown = Shown(core, every_shard=False)
        try:
            report = core.restore(shown.load, shown.wants)
            found = report.attempt.generation if report.attempt is not None else -1
            older = together(
                core.group, lambda: core.place.rank != 0 or self._shelf.is_older(stock, found), RestoreError
            )[0]
            if report.source is None or not older:
                if stock:
                    log.warning("%s was written without ckpt_engine: resuming from it, unverified", stock)
                own(str(stock) or None)
                return
            where = self._shelf.path(report.tag)
            path = Path(shown.path(report.tag))
            files = [path / os.path.basename(where), path / "snapshot.ckpt", *sorted(path.iterdir())]
            own(str(path if self._deepspeed else next(file for file in files if file.exists())))
            core.group.gather(())  # all ranks of the node have read what lies in the memory of one
        except WorldMismatch as error:
            way = "make a universal checkpoint of it" if self._deepspeed else "name its path as ckpt_path"
            text = (
                f"{self._folder}: it was saved by {error.want} ranks, this job has {error.got}. Start as many, or {way}"
            )
            raise WorldMismatch(text, want=error.want, got=error.got) from error
        finally:
            shown.close()
        connector._ckpt_path = where
        self._last = report.step
        if core.place.rank == 0:
            tell_skipped(report)
            log.warning("resumed at step %d from %s", report.step, "memory" if report.source == "memory" else where)

    # -- the end -------------------------------------------------------------------------------------------------

    def _teardown(self) -> None:
        """After the last save of a ``fit``, whether it ended well or not."""
        try:
            self._finish()
        finally:
            self._own["teardown"]()

    def _finish(self) -> None:
        clean = False
        try:
            if not self.failed:
                self.core.settle()
                await_commits(self.core, self._later.flying())
            self._later.run()
            self._later.end()
            clean = not self.failed
        finally:
            self._during.close()
            self._desk.clear()
            self._over()
            self.core.close(goodbye=clean)


def _known_to(keeper: Any) -> list[str]:
    """What a ModelCheckpoint keeps, as far as it knows."""
    found = [*getattr(keeper, "best_k_models", ()), keeper.best_model_path, keeper.last_model_path]
    return [place(path) for path in found if path]


def _as_it_is(obj: Any, src: int = 0) -> Any:
    return obj
