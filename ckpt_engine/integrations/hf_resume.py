"""What a Trainer resumes from, as a directory that it can read: the newest snapshot or checkpoint, or a named one.

The directory holds links to verified files in memory, which the Trainer, DeepSpeed and safetensors read as any others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_engine import listing, runs
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import NotFound, RestoreError, WorldMismatch
from ckpt_engine.events import log
from ckpt_engine.group import Place, together
from ckpt_engine.integrations.deepspeed_shim import await_saves
from ckpt_engine.manifest import Attempt, Committed, FileEntry
from ckpt_engine.reading import Reading
from ckpt_engine.restore import RestoreReport
from ckpt_engine.source import Source
from ckpt_engine.storage.posix import PosixStorage

PREFIX = "checkpoint-"
TRAINER_STATE = "trainer_state.json"


class Resume:
    """How one ``train`` begins. ``step``: where; -1 from scratch."""

    def __init__(self, trainer: Any, core: Checkpointer, run_dir: str) -> None:
        self.step = -1
        self._trainer = trainer
        self._core = core
        self._run_dir = run_dir
        self._shown: Shown | None = None

    def find(self, asked: Any) -> str | None:
        """The directory that the Trainer is to resume from. Collective. Raises RestoreError; ValueError: none there."""
        if asked is None or asked is False:
            return None
        return self._newest() if asked is True else self._named(os.fspath(asked))

    def _newest(self) -> str:
        core = self._core
        try:
            report = self._restore(None)
        except WorldMismatch as error:
            raise self._way_out(error) from error
        unmanaged = report.unmanaged
        if core.place.rank == 0:
            tell_skipped(report)
            for tag in incomplete(core, above=report.step):
                log.warning("skipped %s: it is not complete, and will not be", tag)
            for tag in unmanaged if report.source is not None else ():
                if (number_in(tag) or 0) > report.step:
                    log.warning("skipped %s: it has no manifest. Name its path to resume from it, unverified", tag)
        if report.source is not None:
            return self._show(report)
        found = together(core.group, lambda: foreign_checkpoint(core.root, unmanaged), RestoreError)[0]
        if found is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self._run_dir})")
        log.warning("%s has no manifest: resuming from it unverified, as the Trainer wrote it", found)
        return found

    def _named(self, path: str) -> str:
        core, step = self._core, number_in(os.path.basename(os.path.realpath(path)))
        folder = os.path.realpath(path)
        inside = os.path.dirname(folder) == core.root and step is not None

        def look(verify: bool) -> tuple[Any, bool]:
            if core.place.rank != 0:
                return None, False
            one, traces = standing(core, folder, verify=verify)
            return one and one.manifest.attempt, traces

        attempt, traces = together(core.group, lambda: look(not inside), RestoreError)[0]
        if inside and traces and not self._universal():
            try:
                return self._show(self._restore(step))
            except NotFound as error:
                log.warning("%s is not complete (%s): resuming from the newest that is", path, error)
                return self._newest()
            except WorldMismatch as error:
                if self._trainer.is_deepspeed_enabled:
                    raise self._way_out(error) from error
                if attempt is None:
                    raise NotFound(f"{path} is not complete: it has no manifest") from error
                log.warning(
                    "%s was saved by %d ranks: each of %d draws new random numbers", path, error.want, error.got
                )
                together(core.group, lambda: look(True), RestoreError)
        elif traces and attempt is None:
            raise NotFound(f"{path} is not complete: it has no manifest")
        if attempt is None:
            log.warning("%s has no manifest: resuming from it unverified", path)
        elif inside:
            core.resumed_from(attempt)
        return path

    def _restore(self, step: int | None) -> RestoreReport:
        zero = self._ds_config().get("zero_optimization", {})
        self.let_go()
        self._shown = Shown(self._core, every_shard=bool(zero.get("elastic_checkpoint")))
        report = self._core.restore(self._shown.load, self._shown.wants, step)
        if report.source is not None and number_in(report.tag) is None:
            raise RestoreError(
                f"{report.tag} in {self._core.root} was not saved by a Trainer: use an output_dir of its own"
            )
        return report

    def _show(self, report: RestoreReport) -> str:
        if self._core.place.rank == 0:
            where = "memory" if report.source == "memory" else os.path.join(self._run_dir, report.tag)
            log.warning("resuming at step %d from %s", report.step, where)
        self.step = report.step
        return self._shown.path(report.tag) if self._shown is not None else ""

    def let_go(self) -> None:
        """Of what was resumed from."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None

    def leave(self) -> None:
        """Nobody is left reading, though not one step may have been trained. Collective."""
        if self._shown is not None:
            self._core.group.gather(())

    def _ds_config(self) -> dict[str, Any]:
        plugin = getattr(self._trainer.accelerator.state, "deepspeed_plugin", None)
        return dict(plugin.deepspeed_config) if self._trainer.is_deepspeed_enabled and plugin is not None else {}

    def _universal(self) -> bool:
        return bool(self._ds_config().get("checkpoint", {}).get("load_universal"))

    def _way_out(self, error: WorldMismatch) -> WorldMismatch:
        way = f"pass its path, as resume_from_checkpoint='{self._run_dir}/checkpoint-N'"
        if self._trainer.is_deepspeed_enabled:
            way = (
                "convert it: DeepSpeed's ds_to_universal.py --inject_missing_state makes "
                "checkpoint-N/global_stepN_universal of checkpoint-N/global_stepN; then pass the path of checkpoint-N "
                'as resume_from_checkpoint, with {"checkpoint": {"load_universal": true}} in the DeepSpeed config'
            )
        text = f"it was saved by {error.want} ranks, this job has {error.got}. Start as many as then, or {way}"
        return WorldMismatch(f"{self._run_dir}: {text}", want=error.want, got=error.got)


class Shown:
    """A checkpoint as the Trainer likes to find it: links to verified files in memory, one directory per node.

    Collective. A file is in the memory of one process of the node, whose descriptor the others open, too.
    """

    def __init__(self, core: Checkpointer, *, every_shard: bool) -> None:
        self._core = core
        self._every_shard = every_shard
        self._folder = core.link.names.run_dir / "resume"
        self._open: list[int] = []
        if core.place.leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, tag: str) -> str:
        """Raises RestoreError if the memory of the other processes of this node cannot be seen from here."""
        for link in (self._folder / tag).rglob("*"):
            if not link.exists():
                raise RestoreError(
                    f"{os.readlink(link)}, a file of {tag} in the memory of another rank of this node, cannot be seen: "
                    "ranks of one node need one PID namespace"
                )
        return str(self._folder / tag)

    def wants(self, known: Sequence[tuple[int, FileEntry]]) -> tuple[list[str], list[str]]:
        return wanted(known, self._core.place, every_shard=self._every_shard), []

    def load(self, source: Source) -> dict[str, Any]:
        for name in dict.fromkeys(self.wants(source.candidate.files)[0]):
            path = self._folder / source.candidate.attempt.tag / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open.append(os.memfd_create("ckpt-resume", os.MFD_CLOEXEC))
            nbytes = source.candidate.named(name, self._core.place.rank)[1].nbytes
            with open(self._open[-1], "wb", closefd=False) as file:
                file.write(memoryview(source.fetch(name))[:nbytes])
            path.symlink_to(f"/proc/{os.getpid()}/fd/{self._open[-1]}")
        return {}

    def close(self) -> None:
        """Idempotent. REQUIRES: every rank of the node has read what it wants, or will not."""
        while self._open:
            os.close(self._open.pop())
        if self._core.place.leader:
            shutil.rmtree(self._folder, ignore_errors=True)


def wanted(known: Sequence[tuple[int, FileEntry]], place: Place, *, every_shard: bool) -> list[str]:
    """What a rank brings to its node: its own files; the leader also those of ranks elsewhere that all ranks read.

    Not read by others: random number states, and ZeRO shards unless ``every_shard``.
    """
    here = {entry.name for rank, entry in known if rank in place.node_ranks}

    def shared(name: str) -> bool:
        base = os.path.basename(name)
        return name not in here and not base.startswith("rng_state_") and (every_shard or "zero_pp_rank_" not in base)

    mine = [entry.name for rank, entry in known if rank == place.rank]
    return mine + [entry.name for _, entry in known if place.leader and shared(entry.name)]


def get_last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint below ``output_dir``, by the order of the saves; None if there is none.

    Only what has a manifest is complete. Where nothing of ours was ever saved it is the ``checkpoint-N`` with the
    highest N that holds a ``trainer_state.json``, as the Trainer left it. What lies in memory after a crash it does
    not see: ``train(resume_from_checkpoint=True)`` does. Raises StorageError if the directory cannot be read.
    """
    root, storage = os.path.realpath(os.fspath(output_dir)), PosixStorage()
    if not os.path.isdir(root):
        return None
    claims = runs.read_runs(storage, root)
    found = listing.list_committed(storage, root)
    for damage in found.damaged:
        log.warning("skipped, it cannot be read: %s", damage)
    ours = [one for one in found.committed if os.path.basename(one.commit_dir).startswith(PREFIX)]
    newest = next((one for one in ours if runs.on_the_line(one.manifest.attempt, claims)), None)
    if newest is not None:
        return os.path.join(os.fspath(output_dir), os.path.basename(newest.commit_dir))
    return foreign_checkpoint(root, listing.unmanaged(storage, root))


def foreign_checkpoint(root: str, unmanaged: Sequence[str]) -> str | None:
    """The newest of the checkpoints that the Trainer wrote without us, by its number."""
    numbers = {int(tag.removeprefix(PREFIX)): tag for tag in unmanaged if number_in(tag) is not None}
    whole = [n for n, tag in numbers.items() if os.path.isfile(os.path.join(root, tag, TRAINER_STATE))]
    return os.path.join(root, numbers[max(whole)]) if whole else None


def number_in(tag: str) -> int | None:
    """N of ``checkpoint-N``."""
    text = tag.removeprefix(PREFIX)
    return int(text) if tag.startswith(PREFIX) and text.isdecimal() else None


def standing(core: Checkpointer, folder: str, *, verify: bool) -> tuple[Committed | None, bool]:
    """(the committed checkpoint in ``folder``, is there any trace of us). Raises Corrupt, if it is asked to verify."""
    if not os.path.isdir(folder):
        return None, False
    found, broken = listing.in_tag(core.storage, folder)
    for damage in broken:
        raise damage
    for one in found if verify else ():
        for damage in listing.verify(core.storage, one):
            raise damage
    foreign = listing.unmanaged(core.storage, os.path.dirname(folder))
    return (found[0] if found else None), os.path.basename(folder) not in foreign


@contextlib.contextmanager
def verified(core: Checkpointer, folder: str, way: str) -> Iterator[None]:
    """Around a framework's own load of the checkpoint in ``folder``, a real path: it is complete, intact, and stays.

    Collective. Saves in flight end first. What no trace of us is in is loaded unverified, with a warning. Raises
    NotFound, with the ``way`` out, for one without a manifest; Corrupt, RestoreError.
    """

    def look() -> tuple[Attempt | None, bool]:
        await_saves(core)
        found, traces = standing(core, folder, verify=True) if core.place.rank == 0 else (None, False)
        return (None if found is None else found.manifest.attempt), traces

    inside = os.path.dirname(folder) == core.root
    lease = Reading(core.storage, *os.path.split(folder)) if inside and core.place.rank == 0 else None
    try:
        attempt, traces = together(core.group, look, RestoreError)[0]
        if traces and attempt is None:
            raise NotFound(f"{folder} is not complete: it has no manifest. {way}")
        if attempt is None:
            log.warning("%s has no manifest: loading it unverified", folder)
        elif inside:
            core.resumed_from(attempt)
        yield
        core.group.gather(())  # all have read it
    finally:
        if lease is not None:
            lease.close()


def tell_skipped(report: RestoreReport) -> None:
    """Log what was newer and could not be taken."""
    for one in report.skipped:
        log.warning("skipped %s of step %d in %s: %s", one.attempt or "one", one.step, one.source, one.reason)


def incomplete(core: Checkpointer, *, above: int) -> list[str]:
    """Checkpoints of steps after ``above`` that were begun, and have no manifest."""
    foreign, begun = listing.unmanaged(core.storage, core.root), []
    for folder in listing.tag_dirs(core.storage, core.root):
        tag = os.path.basename(folder)
        number = number_in(tag)
        if number is not None and number > above and tag not in foreign:
            found, broken = listing.in_tag(core.storage, folder)
            begun += [] if found or broken else [tag]
    return sorted(begun)
