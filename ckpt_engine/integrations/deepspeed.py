"""DeepSpeed's verbs said in ours; the only file that imports deepspeed (what it sees of us: ``deepspeed_shim``).

``attach`` replaces ``engine.checkpoint_engine`` and wraps the bound ``save_checkpoint``, ``load_checkpoint``,
``_copy_recovery_script``, ``_take_model_step`` and ``destroy``; nothing of torch is patched, and ``close`` puts
everything back. While DeepSpeed's ``save_checkpoint`` runs, its ``checkpoint_engine.save`` only plans; the copy follows
when DeepSpeed has passed its last barrier, so a rank that waits for a buffer, or fails, keeps nobody else. Facts, from
deepspeed/runtime/engine.py: ``save`` is called 0..N times a rank, positionally and by keyword; ``load`` finds names
by globbing; ``is_decoupled() = True`` would hand ``latest`` to a protocol that loses it.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_engine import listing
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Options, SaverOptions
from ckpt_engine.errors import ConfigError, RestoreError, WorldMismatch
from ckpt_engine.events import log, warn_once
from ckpt_engine.face import Face
from ckpt_engine.group import together
from ckpt_engine.handles import Handle, Staged
from ckpt_engine.integrations.deepspeed_shim import (
    Loading,
    Shim,
    Transaction,
    await_saves,
    owned_by,
    placeholders,
    refuse_unsupported,
    tag_in,
    wrapped,
)
from ckpt_engine.integrations.deepspeed_size import make_slots
from ckpt_engine.manifest import Committed, FileEntry
from ckpt_engine.metrics import Metrics
from ckpt_engine.restore import RestoreReport
from ckpt_engine.retention import Retention, one_policy
from ckpt_engine.saving import Entry
from ckpt_engine.source import Candidate, Source

try:
    import deepspeed
except ImportError as error:
    raise ConfigError("attach() needs DeepSpeed: pip install 'ckpt-engine[deepspeed]'") from error


ClientState = dict[str, Any] | None


def attach(
    engine: Any,
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    retention: Retention | None = None,
    slots: int = 2,
    when_busy: str = "wait",
    wait_s: float = 1800.0,
    on_error: str = "warn",
    staging: str = "blocking",
    verify_staging: bool = False,
    slot_bytes: int = 0,
    threads: int = 0,
    layout: str = "",
    job: str = "",
    name: str = "default",
    saver: SaverOptions | None = None,
    node_id: str = "",
) -> DeepSpeedCheckpointer:
    """Make ``engine`` (from ``deepspeed.initialize``) checkpoint asynchronously into ``root``. Collective.

    Options as for ``CheckpointEngine``; ``layout`` "" follows DeepSpeed's ``use_node_local_storage``; with ``staging``
    "overlap" the engine's own step is the guard (with gradient accumulation that of the boundary). From now on
    ``engine.save_checkpoint(root, …)`` of any caller returns when the state is copied. Raises ConfigError for an
    engine that cannot be checkpointed this way, with the reason.
    """
    refuse_unsupported(engine)
    if not layout:
        layout = "node-local" if engine.use_node_local_storage() else "shared"
    options = Options(
        job=job,
        name=name,
        node_id=node_id,
        layout=layout,
        slots=slots,
        wait_s=wait_s,
        when_busy=when_busy,
        on_error=on_error,
        staging=staging,
        verify_staging=verify_staging,
        slot_bytes=slot_bytes,
        threads=threads,
        retention=one_policy(keep_last, retention),
        saver=saver or SaverOptions(),
    )
    core = Checkpointer(root, options, rank=None, world_size=None)
    if not slot_bytes:
        make_slots(core, engine)
    return DeepSpeedCheckpointer(engine, core)


class DeepSpeedCheckpointer(Face):
    """What ``attach`` returns. Use it as a context manager; leaving it normally waits for saves in flight."""

    def __init__(self, engine: Any, core: Checkpointer) -> None:
        self.engine = engine
        self._core = core
        self._shim = Shim(engine.checkpoint_engine)
        self._originals = {
            name: getattr(engine, name)
            for name in ("save_checkpoint", "load_checkpoint", "_copy_recovery_script", "_take_model_step", "destroy")
        }
        self._before = {name: engine.__dict__[name] for name in self._originals if name in engine.__dict__}
        engine.checkpoint_engine = self._shim
        for name, wrapper in (
            ("save_checkpoint", self._save_checkpoint),
            ("load_checkpoint", self._load_checkpoint),
            ("_copy_recovery_script", self._copy_recovery_script),
            ("_take_model_step", self._take_model_step),
            ("destroy", self._destroy),
        ):
            setattr(engine, name, wrapped(self._originals[name], wrapper))

    # -- save ----------------------------------------------------------------------------------------------------

    def save_to_memory(self, step: int, *, client_state: dict[str, Any] | None = None) -> Staged:
        """Copy the engine's state into shared memory on every rank; it survives a crash from the return on.

        ``step``: optimizer steps completed. Touches no disk. Blocks until a buffer of this rank is released.
        Raises StagingError or SaverError, after DeepSpeed's own collectives: no other rank is left waiting.
        """
        return self._save(step, "", None, client_state, storage=False).staged

    def save_to_storage(
        self, step: int, *, tag: str | None = None, client_state: ClientState = None, metrics: Metrics | None = None
    ) -> Handle:
        """``save_to_memory``, then the savers make a checkpoint of it in the background; see ``Handle.result``.

        ``tag``: the directory below the root, ``global_step<step>`` by default; one that exists is saved anew.
        ``metrics``: numbers by name, e.g. ``{"eval_loss": 0.31}``, kept with the checkpoint; those of rank 0 count.
        """
        return self._save(step, "", tag, client_state, metrics, storage=True)

    def _save(self, *arguments: Any, **options: Any) -> Handle:
        with self._core.alone():
            return self._save_alone(*arguments, **options)

    def _save_alone(
        self,
        step: int,
        save_dir: str,
        tag: str | None,
        state: ClientState,
        metrics: Metrics | None = None,
        *,
        storage: bool,
        frozen: bool = False,
    ) -> Handle:
        """One save, from the first collective of DeepSpeed to the seal (and the queue)."""
        core = self._core
        parent = save_dir or core.root
        tag = str(tag) if tag is not None else f"global_step{step}"
        entry: Entry | None = None
        problem: Exception | None = None
        try:
            entry = core.enter(step, storage=storage, tag=tag, directory=parent, metrics=metrics)
        except Exception as error:  # raised below: the others are on their way into DeepSpeed's collectives
            problem = error
        if core.options.when_busy == "skip" and not self._elsewhere(parent) and core.busy_anywhere():
            if entry is None:
                raise problem or ConfigError("not entered")
            return core.skipped_handle(entry)
        saving = Transaction(
            core, os.path.join(parent, tag), storage=storage, owned=owned_by(self.engine, core.options.staging)
        )
        saving.error = problem
        self._shim.saving = saving
        try:
            self._originals["save_checkpoint"](
                parent, tag, state or {}, save_latest=False, exclude_frozen_parameters=frozen
            )
            if saving.error is not None:
                raise saving.error
        except BaseException as error:
            if entry is not None:
                core.fail(entry, error)
            raise
        finally:
            self._shim.saving = None
        if entry is None:
            raise ConfigError(f"the save of step {step!r} was not entered")
        if self.engine.global_steps != entry.attempt.step:
            done = f"the engine has done {self.engine.global_steps} optimizer steps"
            warn_once(f"step {core.root}", f"save of step {entry.attempt.step}, but {done}")
        handle = core.save(entry, saving.files)
        core.report_trouble()
        return handle

    def _take_model_step(self, *arguments: Any, **options: Any) -> Any:
        """Where DeepSpeed changes parameters and optimizer: not before their copy is made."""
        self._core.guard()
        return self._originals["_take_model_step"](*arguments, **options)

    def _save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """``engine.save_checkpoint`` of any caller. Into another directory than the root it blocks until committed."""
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        step = self.engine.global_steps
        if not save_latest:
            warn_once(f"latest {save_dir}", f"save_latest=False: {save_dir}/latest names the newest checkpoint anyway")
        handle = self._save(step, str(save_dir), tag, client_state, storage=True, frozen=exclude_frozen_parameters)
        if self._elsewhere(save_dir):
            handle.result()
        return True

    def _elsewhere(self, save_dir: str) -> bool:
        return os.path.realpath(save_dir) != self._core.root

    def _copy_recovery_script(self, save_path: str) -> None:
        if self._shim.saving is None:
            self._originals["_copy_recovery_script"](save_path)
        else:
            self._shim.saving.capture_tools(Path(deepspeed.__file__).parent / "utils")

    # -- restore -------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, **load_options: Any) -> RestoreReport:
        """Load the newest state that all ranks can agree on (or that of ``step``) into the engine. Collective.

        ``load_options`` go to DeepSpeed's ``load_checkpoint``. ``report.step`` is 0 and ``report.source`` None if there
        is nothing to restore; ``report.client_state`` is what DeepSpeed hands back: what was saved beside, and some of
        its own. Unverified, as DeepSpeed would: the checkpoints of a root that holds none of ours, and, if DeepSpeed is
        configured with ``load_universal`` and ours were saved by another number of ranks, the universal one.
        Raises NotFound, WorldMismatch, Corrupt, RestoreError.
        """
        try:
            wants = functools.partial(self._wants, everything=self._reads_all_weights(load_options))
            report = self._core.restore(lambda source: self._load(source, load_options), wants, step)
        except WorldMismatch:
            if not self.engine.load_universal_checkpoint() or step is not None:
                raise
            return self._restore_foreign(RestoreReport(0, None), "latest_universal", load_options)
        if report.source is None and step is None:
            universal = self.engine.load_universal_checkpoint()
            return self._restore_foreign(report, "latest_universal" if universal else "latest", load_options)
        return replace(report, state={}, client_state=report.state)

    def _load(self, source: Source, options: dict[str, Any]) -> dict[str, Any]:
        """Show ``source`` to DeepSpeed as a directory with one checkpoint."""
        core, tag = self._core, source.candidate.attempt.tag
        folder = str(core.link.names.restore_dir(f"{secrets.token_hex(4)}-{core.place.rank}"))
        try:
            with placeholders(source, folder, filled=self._reads_all_weights(options)):
                self._shim.loading = Loading(source, os.path.join(folder, tag))
                self.engine.load_universal_checkpoint = bool  # False: this one is not
                path, client_state = self._originals["load_checkpoint"](folder, tag, **options)
        finally:
            self._shim.loading = None
            self.engine.__dict__.pop("load_universal_checkpoint", None)
            shutil.rmtree(folder, ignore_errors=True)
        if path is None:
            raise RestoreError(f"DeepSpeed could not load {tag}: its log says why")
        return dict(client_state or {})

    def _reads_all_weights(self, options: dict[str, Any]) -> bool:
        """ZeRO-3 without optimizer states: DeepSpeed reads the shards of all ranks itself, with torch.load."""
        return bool(self.engine.zero_optimization_partition_weights()) and not options.get(
            "load_optimizer_states", True
        )

    def _restore_foreign(self, report: RestoreReport, latest: str, options: dict[str, Any]) -> RestoreReport:
        """Nothing of ours to restore: what DeepSpeed's own ``latest`` (or ``latest_universal``) names, if anything."""
        core = self._core
        found = together(core.group, lambda: self._named_by(Path(core.root, latest)), RestoreError)[0]
        if not found:
            if report.unmanaged:
                log.warning("%s holds %s, but no %s: nothing is restored", core.root, report.unmanaged, latest)
            return report
        log.warning("%s/%s has no manifest: loading it unverified, as DeepSpeed wrote it", core.root, found)
        path, client_state = self._originals["load_checkpoint"](core.root, found, **options)
        if path is None:
            raise RestoreError(f"DeepSpeed could not load {found} from {core.root}: its log says why")
        return replace(
            report, step=self.engine.global_steps, source="storage", tag=found, client_state=dict(client_state or {})
        )

    def _named_by(self, latest: Path) -> str:
        return tag_in(self._core.storage, str(latest)) if self._core.place.leader else ""

    def _load_checkpoint(self, load_dir: str, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        """``engine.load_checkpoint`` of any caller: waits for saves in flight, verifies what has a manifest."""
        core, original = self._core, self._originals["load_checkpoint"]

        def settled() -> Committed | None:
            await_saves(core)
            return self._find(str(load_dir), tag)

        told = together(core.group, settled, RestoreError)
        leaders = [told[ranks[0]] for ranks in core.place.nodes]
        if len({one and one.manifest.attempt for one in leaders}) > 1:
            raise RestoreError(
                f"the nodes hold different checkpoints as {tag or 'latest'} in {load_dir}: name another tag"
            )
        found = leaders[core.place.node]
        if found is None or self.engine.load_universal_checkpoint():
            return original(load_dir, tag, *arguments, **options)
        manifest = found.manifest
        asked = inspect.signature(original).bind(load_dir, tag, *arguments, **options)
        asked.apply_defaults()
        whole = asked.arguments["load_optimizer_states"] and not asked.arguments["load_module_only"]
        if manifest.world != core.group.world and whole and self.engine.zero_optimization():
            raise WorldMismatch(
                f"{found.commit_dir} was saved by {manifest.world} ranks, this job has {core.group.world}: convert it "
                "with DeepSpeed's ds_to_universal.py and load the universal checkpoint",
                want=manifest.world,
                got=core.group.world,
            )
        files = tuple((s.rank, e) for s in manifest.shards for e in s.files if e.origin != "tool")
        candidate = Candidate(manifest.attempt, "storage", core.group.world, files, committed=(found,))
        source = core.open_verified(candidate, self._wants)
        self._shim.loading = Loading(source, found.commit_dir)
        try:
            result = original(
                load_dir, os.path.relpath(found.commit_dir, os.path.realpath(load_dir)), *arguments, **options
            )
        finally:
            self._shim.loading = None
            source.close()
        if result[0] is not None and os.path.dirname(found.commit_dir) == core.root:
            core.resumed_from(manifest.attempt)
        return result

    def _find(self, load_dir: str, tag: Any) -> Committed | None:
        """The committed checkpoint that DeepSpeed means by these arguments, as the leader of a node sees it."""
        core = self._core
        if not core.place.leader:
            return None
        tag = self._named_by(Path(load_dir, "latest")) if tag is None else str(tag)
        folder = os.path.join(os.path.realpath(load_dir), tag)
        manifest = None
        if tag:
            node = core.place.node if core.options.layout == "node-local" else None
            manifest = listing.read_manifest(core.storage, folder, node)
        return Committed(manifest, folder) if manifest is not None else None

    def _wants(
        self, known: Sequence[tuple[int, FileEntry]], *, everything: bool = False
    ) -> tuple[list[str], list[str]]:
        """Verified here: what this rank wrote. Read here perhaps: all but the ZeRO shards of ranks elsewhere."""
        place = self._core.place
        everything = everything or bool(self.engine.zero_elastic_checkpoint())
        mine = [entry.name for rank, entry in known if rank == place.rank]
        near = [
            entry.name
            for rank, entry in known
            if everything or rank in place.node_ranks or "zero_pp_rank_" not in os.path.basename(entry.name)
        ]
        return mine, near

    # -- end -----------------------------------------------------------------------------------------------------

    def _destroy(self) -> None:
        """DeepSpeed's ``destroy`` is not a goodbye: it is called from ``__del__`` too, with an exception in flight."""
        original = self._originals["destroy"]
        self._detach()
        self._core.close(goodbye=False)
        original()

    def _detach(self) -> None:
        if self.engine.checkpoint_engine is self._shim:
            self.engine.checkpoint_engine = self._shim.inner
            for name in self._originals:
                self.engine.__dict__.pop(name, None)
            self.engine.__dict__.update(self._before)
