"""DeepSpeed's verbs said in ours; the only file that imports deepspeed.

``attach`` replaces ``engine.checkpoint_engine`` and wraps the bound ``save_checkpoint``, ``load_checkpoint``,
``_copy_recovery_script`` and ``destroy``; nothing of torch is patched, and ``close`` puts everything back. While
DeepSpeed's ``save_checkpoint`` runs, its ``checkpoint_engine.save`` only plans; the copy follows when DeepSpeed has
passed its last barrier, so a rank that waits for a buffer, or fails, keeps nobody else. Facts about the seams, from
deepspeed/runtime/engine.py: ``save`` is called 0..N times a rank, positionally and by keyword; ``load`` finds names
by globbing; ``is_decoupled() = True`` would hand ``latest`` to a protocol that loses it.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt_engine import image, listing
from ckpt_engine.checkpointer import Checkpointer, Entry
from ckpt_engine.config import Options, SaverOptions
from ckpt_engine.errors import CkptError, ConfigError, WorldMismatch
from ckpt_engine.events import log, warn_once
from ckpt_engine.handles import Handle, Published, Staged
from ckpt_engine.manifest import Committed, FileEntry
from ckpt_engine.plain import read_with
from ckpt_engine.restore import RestoreReport
from ckpt_engine.retention import Retention
from ckpt_engine.source import Candidate, Source
from ckpt_engine.staging import Blob, Planned

try:
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as _Base
except ImportError as error:
    raise ConfigError("attach() needs DeepSpeed: pip install 'ckpt-engine[deepspeed]'") from error

_TOOLS = ("zero_to_fp32.py", "zero_to_torch.py")


def attach(
    engine: Any,
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    slots: int = 2,
    when_busy: str = "wait",
    wait_s: float = 1800.0,
    on_error: str = "warn",
    layout: str = "",
    job: str = "",
    name: str = "default",
    saver: SaverOptions | None = None,
    node_id: str = "",
) -> DeepSpeedCheckpointer:
    """Make ``engine`` (from ``deepspeed.initialize``) checkpoint asynchronously into ``root``. Collective.

    Options as for ``CheckpointEngine``; ``layout`` "" follows DeepSpeed's ``use_node_local_storage``. From now on
    ``engine.save_checkpoint(root, …)`` of any caller returns when the state is copied. Raises ConfigError for an
    engine that cannot be checkpointed this way, with the reason.
    """
    _refuse_unsupported(engine)
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
        retention=Retention(keep_last=keep_last),
        saver=saver or SaverOptions(),
    )
    return DeepSpeedCheckpointer(engine, Checkpointer(root, options, rank=None, world_size=None))


class Transaction:
    """What one rank captures while DeepSpeed's save runs: its files, or the error that kept it from it."""

    def __init__(self, core: Checkpointer, folder: str, *, storage: bool) -> None:
        self.files: dict[str, Planned] = {}
        self.storage = storage
        self.error: CkptError | None = None
        self._core = core
        self._folder = os.path.realpath(folder)

    def capture(self, state: Any, path: str) -> None:
        """Plan one file; never raises CkptError: this rank goes on to DeepSpeed's last barrier."""
        if self.error is not None:
            return
        try:
            name = os.path.relpath(os.path.realpath(path), self._folder)
            if name.startswith("..") or name in self.files:
                raise ConfigError(f"DeepSpeed saves {path}: twice, or outside of {self._folder}")
            self.files[name] = self._core.plan(name, state)
        except CkptError as error:
            self.error = error

    def capture_tools(self) -> None:
        """DeepSpeed's recovery scripts become files of this shard; a memory save needs none."""
        scripts = Path(deepspeed.__file__).parent / "utils"
        for tool in _TOOLS if self.storage else ():
            if (scripts / tool).is_file():
                self.files[tool] = Planned(Blob((scripts / tool).read_bytes()), origin="tool")


class Shim(_Base):  # type: ignore[misc]  # deepspeed is untyped
    """What DeepSpeed sees as its checkpoint engine. Outside of our saves and restores it is the one it replaced."""

    def __init__(self, inner: Any) -> None:
        self.name = "ckpt_engine"
        self.inner = inner
        self.saving: Transaction | None = None
        self.loading: Loading | None = None

    def create(self, info: Any) -> None:
        if self.saving is None:
            self.inner.create(info)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self.saving is None:
            self.inner.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        if self.saving is None:
            self.inner.save(state_dict, path)  # save_16bit_model and the like: synchronous, as ever
        else:
            self.saving.capture(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        if self.loading is not None and self.loading.serves(path):
            return self.loading.load(path, map_location)
        return self.inner.load(path, map_location=map_location)

    def commit(self, info: Any) -> Any:
        return True if self.saving is not None else self.inner.commit(info)

    def is_data_parallel_writer(self, dp_rank: int) -> Any:
        return self.inner.is_data_parallel_writer(dp_rank)

    def preserves_storage_sharing(self) -> bool:
        return False  # an image cuts every storage to what is referenced: DeepSpeed need not clone first


class Loading:
    """Serves the files of one source under the paths that DeepSpeed asks for."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source = source
        self._folder = os.path.realpath(folder)
        self._names = set(source.candidate.names())

    def _name(self, path: str) -> str:
        return os.path.relpath(os.path.realpath(path), self._folder)

    def serves(self, path: str) -> bool:
        return self._name(path) in self._names

    def load(self, path: str, map_location: Any) -> Any:
        return read_with(self._source, self._name(path), lambda copy: image.load(copy, map_location=map_location))


class DeepSpeedCheckpointer:
    """What ``attach`` returns. Use it as a context manager; leaving it normally waits for saves in flight."""

    def __init__(self, engine: Any, core: Checkpointer) -> None:
        self.engine = engine
        self._core = core
        self._shim = Shim(engine.checkpoint_engine)
        self._originals = {
            name: getattr(engine, name)
            for name in ("save_checkpoint", "load_checkpoint", "_copy_recovery_script", "destroy")
        }
        self._before = {name: engine.__dict__[name] for name in self._originals if name in engine.__dict__}
        engine.checkpoint_engine = self._shim
        for name, wrapper in (
            ("save_checkpoint", self._save_checkpoint),
            ("load_checkpoint", self._load_checkpoint),
            ("_copy_recovery_script", self._copy_recovery_script),
            ("destroy", self._destroy),
        ):
            setattr(engine, name, _wrapped(self._originals[name], wrapper))

    # -- save ----------------------------------------------------------------------------------------------------

    def save_to_memory(self, step: int, *, client_state: dict[str, Any] | None = None) -> Staged:
        """Copy the engine's state into shared memory on every rank; it survives a crash from the return on.

        ``step``: optimizer steps completed. Touches no disk. Blocks until a buffer of this rank is released.
        Raises StagingError or SaverError, after DeepSpeed's own collectives: no other rank is left waiting.
        """
        return self._save(step, "", None, client_state, storage=False).staged

    def save_to_storage(
        self, step: int, *, tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> Handle:
        """``save_to_memory``, then the savers make a checkpoint of it in the background; see ``Handle.result``.

        ``tag``: the directory below the root, ``global_step<step>`` by default; one that exists is saved anew.
        """
        return self._save(step, "", tag, client_state, storage=True)

    def _save(
        self,
        step: int,
        save_dir: str,
        tag: str | None,
        client_state: dict[str, Any] | None,
        *,
        storage: bool,
        frozen: bool = False,
    ) -> Handle:
        """One save, from the first collective of DeepSpeed to the seal (and the queue)."""
        core = self._core
        parent = save_dir or core.root
        tag = str(tag) if tag is not None else f"global_step{step}"
        entry: Entry | None = None
        problem: CkptError | None = None
        try:
            entry = core.enter(step, storage=storage, tag=tag, directory=parent)
        except CkptError as error:
            problem = error  # the others are on their way into the collectives below: so must we
        else:
            if core.options.when_busy == "skip" and core.busy_anywhere():
                return core.skipped_handle(entry)
        saving = Transaction(core, os.path.join(parent, tag), storage=storage)
        saving.error = problem
        self._shim.saving = saving
        try:
            self._originals["save_checkpoint"](
                parent, tag, client_state or {}, save_latest=False, exclude_frozen_parameters=frozen
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
        if self.engine.global_steps != entry.attempt.step and not save_dir:
            warn_once(
                f"step {core.root}",
                f"save of step {entry.attempt.step}, but the engine has done {self.engine.global_steps} optimizer steps",
            )
        staged = core.stage(entry, saving.files)
        handle = core.queue(entry, staged) if storage else core.in_memory(staged)
        core.report_trouble()
        return handle

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
        handle = self._save(step, str(save_dir), tag, client_state, storage=True, frozen=exclude_frozen_parameters)
        if os.path.realpath(save_dir) != self._core.root and not handle.staged.skipped:
            handle.result()
        return True

    def _copy_recovery_script(self, save_path: str) -> None:
        if self._shim.saving is None:
            self._originals["_copy_recovery_script"](save_path)
        else:
            self._shim.saving.capture_tools()

    # -- restore -------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, **load_options: Any) -> RestoreReport:
        """Load the newest state that all ranks can agree on (or that of ``step``) into the engine. Collective.

        ``load_options`` go to DeepSpeed's ``load_checkpoint``. ``report.step`` is 0 and ``report.source`` None if there
        is nothing to restore; ``report.client_state`` is what was saved beside. A root with plain DeepSpeed
        checkpoints only is loaded as DeepSpeed would. Raises NotFound, WorldMismatch, Corrupt, RestoreError.
        """
        core = self._core

        def load(source: Source) -> dict[str, Any]:
            folder = str(core.link.names.restore_dir(f"{secrets.token_hex(4)}-{core.place.rank}"))
            try:
                _placeholders(source, os.path.join(folder, source.candidate.attempt.tag))
                return self._load_from(source, folder, source.candidate.attempt.tag, load_options)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        report = core.restore(load, self._wants, step)
        if report.source is None and step is None:
            return self._restore_plain(report, load_options)
        return replace(report, state={}, client_state=report.state)

    def _load_from(self, source: Source, folder: str, tag: str, options: dict[str, Any]) -> dict[str, Any]:
        self._shim.loading = Loading(source, os.path.join(folder, tag))
        try:
            path, client_state = self._originals["load_checkpoint"](folder, tag, **options)
        finally:
            self._shim.loading = None
        if path is None:
            raise CkptError(f"DeepSpeed could not load {source.candidate.attempt.tag}: its log says why")
        return dict(client_state or {})

    def _restore_plain(self, report: RestoreReport, options: dict[str, Any]) -> RestoreReport:
        """Nothing of ours in the root: what DeepSpeed's own ``latest`` names, if it is there."""
        core, mine = self._core, ""
        latest = Path(core.root, "latest")
        if core.place.rank == 0 and latest.is_file():
            mine = latest.read_text().strip()
        tag = core.group.gather(mine)[0]
        if tag not in report.unmanaged:
            return report
        log.warning("%s/%s has no manifest: loading it unverified, as DeepSpeed wrote it", core.root, tag)
        path, client_state = self._originals["load_checkpoint"](core.root, tag, **options)
        if path is None:
            raise CkptError(f"DeepSpeed could not load {tag} from {core.root}: its log says why")
        return replace(
            report, step=self.engine.global_steps, source="storage", tag=tag, client_state=dict(client_state or {})
        )

    def _load_checkpoint(self, load_dir: str, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        """``engine.load_checkpoint`` of any caller: waits for saves in flight, verifies what has a manifest."""
        original = self._originals["load_checkpoint"]
        try:
            self._core.wait()
        except CkptError as error:
            log.warning("before loading: %s", error)
        self._core.group.gather(())
        if self.engine.load_universal_checkpoint():
            return original(load_dir, tag, *arguments, **options)
        found = self._find(str(load_dir), tag)
        if found is None:
            return original(load_dir, tag, *arguments, **options)
        module_only = options.get("load_module_only", False) or len(arguments) > 3
        manifest = found.manifest
        if manifest.world != self._core.group.world and not module_only:
            raise WorldMismatch(
                f"{found.commit_dir} was saved by {manifest.world} ranks, this job has {self._core.group.world}: convert it "
                "with DeepSpeed's ds_to_universal.py and load the universal checkpoint",
                want=manifest.world,
                got=self._core.group.world,
            )
        files = tuple((s.rank, e) for s in manifest.shards for e in s.files if e.origin != "tool")
        candidate = Candidate(manifest.attempt, "storage", manifest.world, files, committed=(found,))
        source = self._core.open_verified(candidate, self._wants)
        self._shim.loading = Loading(source, found.commit_dir)
        try:
            result = original(load_dir, os.path.basename(found.commit_dir), *arguments, **options)
        finally:
            self._shim.loading = None
            source.close()
        if os.path.dirname(found.commit_dir) == self._core.root:
            self._core.resumed_from(manifest.attempt)
        return result

    def _find(self, load_dir: str, tag: Any) -> Committed | None:
        """The committed checkpoint that DeepSpeed means by these arguments; the same on all ranks."""
        core, mine = self._core, None
        if core.place.leader:
            if tag is None:
                latest = Path(load_dir, "latest")
                tag = latest.read_text().strip() if latest.is_file() else None
            if tag is not None:
                folder = os.path.join(os.path.realpath(load_dir), str(tag))
                node = core.place.node if core.options.layout == "node-local" else None
                manifest = listing.read_manifest(core.storage, folder, node)
                mine = Committed(manifest, folder) if manifest is not None else None
        told = core.group.gather(mine)
        found: Committed | None = told[core.place.node_ranks[0]]
        return found

    def _wants(self, known: Sequence[tuple[int, FileEntry]]) -> tuple[list[str], list[str]]:
        """Verified here: what this rank wrote. Read here perhaps: all but the ZeRO shards of ranks elsewhere."""
        place = self._core.place
        mine = [entry.name for rank, entry in known if rank == place.rank]
        near = [
            entry.name
            for rank, entry in known
            if rank in place.node_ranks or "zero_pp_rank_" not in os.path.basename(entry.name)
        ]
        return mine, near

    # -- end -----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> tuple[Published, ...]:
        """Block until every storage save has ended; raises the first failure nobody was told of."""
        return self._core.wait(timeout_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the saves in flight, say goodbye, and give DeepSpeed its own checkpointing back. Idempotent."""
        self._detach()
        self._core.close(timeout_s=timeout_s)

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

    def __enter__(self) -> DeepSpeedCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        self._core.close(goodbye=kind is None)


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """``wrapper`` with the name and signature of ``original``: frameworks inspect it."""

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        return wrapper(*arguments, **options)

    return call


def _placeholders(source: Source, folder: str) -> None:
    """Empty files under the names DeepSpeed globs for; their bytes come from ``Loading``."""
    for name in source.candidate.names():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path, "wb"):
            pass


def _refuse_unsupported(engine: Any) -> None:
    """Raise ConfigError, with the reason, for engines whose state cannot be captured inside ``save_checkpoint``."""
    if getattr(engine, "checkpoint_engine", None) is None:
        raise ConfigError("this engine has no checkpoint_engine (ZeRO-3 inference): there is nothing to checkpoint")
    if isinstance(engine.checkpoint_engine, Shim):
        raise ConfigError("this engine is attached already: close() the first attachment before a second attach()")
    if engine.zero_nvme_offload_optimizer():
        raise ConfigError(
            "optimizer offload to NVMe: DeepSpeed copies those files itself, outside of its checkpoint engine"
        )
    if getattr(engine, "zenflow", False):
        raise ConfigError("ZenFlow updates the optimizer asynchronously: its state cannot be captured at a step")
    if callable(getattr(engine, "super_offload", None)) and engine.super_offload():
        raise ConfigError("SuperOffload steps asynchronously: its state cannot be captured at a step")
