"""One ``fit`` of a Lightning Trainer: what is saved, what waits for a commit, what is loaded, and how it ends.

On disk ``<dirpath>/<name>.ckpt`` is what Lightning would have made: with DeepSpeed a directory, which is the commit
directory; else a file, to be precise a link to the one in ``<dirpath>/ckpt_engine/<name>.ckpt``, which is there as soon
as the checkpoint is committed, and always a complete one. What Lightning removes, links or uploads because a newer
checkpoint was saved, waits until that is committed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine import listing, sweep
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Options
from ckpt_engine.errors import ConfigError, UnsupportedLeaf, WorldMismatch
from ckpt_engine.events import log, warn_once
from ckpt_engine.handles import Handle
from ckpt_engine.integrations.deepspeed_shim import Shim, Transaction, refuse_unsupported, wrapped
from ckpt_engine.integrations.hf_resume import Shown, verified
from ckpt_engine.integrations.hf_run import await_commits
from ckpt_engine.integrations.hf_save import Desk, replaced, save_through, weights_bytes
from ckpt_engine.integrations.lightning_later import Later, link

FOLDER = "ckpt_engine"
_NOTES = "to-remove.txt"
_SNAPSHOT = "snapshot-step="


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
        root = self._folder if self._deepspeed else os.path.join(self._folder, FOLDER)
        self.core = Checkpointer(root, options, rank=None, world_size=None)
        self._memory_steps = memory_steps
        self._desk = Desk(self.core)
        self._later = Later(os.path.join(self.core.root, _NOTES))
        self._saved: set[str] = set()
        self._last = -1
        self._over = over
        self._during = contextlib.ExitStack()
        names = ("save_checkpoint", "remove_checkpoint", "teardown")
        self._own: dict[str, Callable[..., Any]] = {name: getattr(self._strategy, name) for name in names}
        methods = {name: wrapped(self._own[name], getattr(self, f"_{name}")) for name in names}
        self._during.enter_context(replaced(self._strategy, **methods))
        self._keepers = [one for one in trainer.checkpoint_callbacks if is_a(one, "ModelCheckpoint")]
        for one in self._keepers:
            mine = {"file_exists": self._file_exists, "_link_checkpoint": self._link_checkpoint}
            self._during.enter_context(replaced(one, **mine))
        for logger in trainer.loggers:
            own = logger.after_save_checkpoint
            self._during.enter_context(replaced(logger, after_save_checkpoint=self._told_later(own)))

    # -- save ----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """``strategy.save_checkpoint`` of any caller, which every rank calls; rank 0 says where."""
        path = str(self._strategy.broadcast(os.path.abspath(filepath)))
        tag = self._tag(path)
        if not tag or storage_options is not None:
            where = f"not in {self._folder}" if not tag else "with storage_options"
            warn_once(f"elsewhere {self._folder}", f"save_checkpoint({path}): {where}, so it blocks as ever")
            self._own["save_checkpoint"](checkpoint, path, storage_options)
            return
        handle = self._save(checkpoint, tag, os.path.basename(path), storage=True)
        self._later.saved(handle, path)
        self._saved.add(path)
        if handle is not None and not self._deepspeed and self.core.place.rank == 0:
            self._show(path, os.path.join(handle.path, os.path.basename(path)))

    def after_batch(self) -> None:
        """A snapshot in memory, where one is due, and what waits for a commit."""
        step = self._trainer.global_step
        if self._memory_steps and step % self._memory_steps == 0 and step != self._last:
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(False)
            self._save(checkpoint, f"{_SNAPSHOT}{step}", "snapshot.ckpt", storage=False)
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

    def _tag(self, path: str) -> str:
        """The directory in the root for ``path``, "" if it is not ours."""
        parent, name = os.path.split(path)
        return name if os.path.realpath(parent) == self._folder else ""

    # -- what Lightning does because of a save -------------------------------------------------------------------

    def _show(self, path: str, target: str) -> None:
        """``path`` becomes a link to ``target``: at once, unless it would hide a file that is not ours until then."""
        target = os.path.relpath(target, os.path.dirname(path))
        if os.path.lexists(path) and not os.path.islink(path):
            self._later.add(lambda: link(target, path))
        else:
            link(target, path)

    def _file_exists(self, filepath: Any, trainer: Any) -> bool:
        """``ModelCheckpoint.file_exists``: what is on its way is there, what is to be removed is not."""
        path = os.path.abspath(filepath)
        there = (path in self._saved or os.path.exists(path)) and not self._later.removes(path)
        return bool(self._strategy.broadcast(there))

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """``save_last="link"``: the link before it stays until what the new one names is committed."""
        path, target = os.path.abspath(linkpath), os.path.relpath(filepath, os.path.dirname(linkpath))
        self._saved.add(path)
        if self.core.place.rank == 0:
            self._later.add(lambda: link(target, path))

    def _told_later(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        def after_save_checkpoint(callback: Any) -> None:
            self._later.add_for_all(lambda: own(callback))

        return after_save_checkpoint

    def _remove_checkpoint(self, filepath: Any) -> None:
        path = os.path.abspath(filepath)
        self._saved.discard(path)
        if self.core.place.rank == 0:
            self._later.add(lambda: self._remove(path), removes=path)

    def _remove(self, path: str, *, unless_known: bool = False) -> None:
        if unless_known and any(path in _known_to(one) for one in self._keepers):
            return
        tag = self._tag(path)
        folder = os.path.join(self.core.root, tag)
        found, damaged = listing.in_tag(self.core.storage, folder) if tag and os.path.isdir(folder) else ([], [])
        if os.path.islink(path):
            os.unlink(path)
        elif not found and not damaged:
            self._own["remove_checkpoint"](path)
        for one in found:
            self._later.aside(functools.partial(sweep.remove_checkpoint, self.core.storage, one))

    # -- load ----------------------------------------------------------------------------------------------------

    def load(self, asked: Any, own: Callable[[Any], None]) -> None:
        """What ``fit`` begins from: ``asked``, the newest of all, or nothing. Collective. ``own`` loads a path."""
        for path in self._later.noted() if self.core.place.rank == 0 else ():
            self._later.add(functools.partial(self._remove, path, unless_known=True), removes=path)
        if isinstance(asked, Newest):
            self._load_newest(asked, own)
        elif asked:
            path = os.path.realpath(asked)
            folder = path if self._deepspeed or self._tag(os.path.abspath(asked)) == "" else os.path.dirname(path)
            with verified(self.core, folder, "pass ckpt_path='last' to start from the newest that is"):
                own(asked)
        else:
            own(asked)

    def _load_newest(self, stock: Newest, own: Callable[[Any], None]) -> None:
        core, connector = self.core, self._trainer._checkpoint_connector
        shown = Shown(core, every_shard=False)
        try:
            report = core.restore(shown.load, shown.wants)
            if report.source is None:
                if stock:
                    log.warning("%s has no manifest: resuming from it unverified, as Lightning wrote it", stock)
                own(str(stock) or None)
                return
            path = Path(shown.path(report.tag))
            own(str(path if self._deepspeed else next(path.iterdir())))
            core.group.gather(())  # all ranks of the node have read what lies in the memory of one
        except WorldMismatch as error:
            way = "make a universal checkpoint of it" if self._deepspeed else "name its path as ckpt_path"
            text = (
                f"{self._folder}: it was saved by {error.want} ranks, this job has {error.got}. Start as many, or {way}"
            )
            raise WorldMismatch(text, want=error.want, got=error.got) from error
        finally:
            shown.close()
        where = os.path.join(self._folder, report.tag)
        connector._ckpt_path = where
        self._last = report.step
        if core.place.rank == 0:
            log.warning("resumed at step %d from %s", report.step, "memory" if report.source == "memory" else where)
            self._later.add(self._remove_snapshots())

    def _remove_snapshots(self) -> Callable[[], None]:
        """Those that savers made checkpoints of when their ranks had died, and nobody needs after the next commit."""
        found = [one for one in os.listdir(self.core.root) if one.startswith(_SNAPSHOT)]

        def remove() -> None:
            for tag in found:
                self._remove(os.path.join(self._folder, tag))

        return remove

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
    return [os.path.abspath(path) for path in found if path]


def _as_it_is(obj: Any, src: int = 0) -> Any:
    return obj
