"""The face for plain PyTorch: a single process, DDP, or any sharded state dict, with torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine import image
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Options, SaverOptions
from ckpt_engine.disk_names import check_file_name
from ckpt_engine.errors import ConfigError
from ckpt_engine.events import warn_once
from ckpt_engine.face import Face
from ckpt_engine.handles import Handle, Staged
from ckpt_engine.manifest import FileEntry
from ckpt_engine.metrics import Metrics
from ckpt_engine.restore import RestoreReport
from ckpt_engine.retention import Retention, one_policy
from ckpt_engine.source import Source
from ckpt_engine.staging import Planned, space

State = Mapping[str, Any]
"""{relative file name: picklable object with tensors}, e.g. {"model.pt": net.state_dict()}."""


class CheckpointEngine(Face):
    """Checkpoints of whatever each rank hands over; made by all ranks together.

    root: the checkpoint directory. keep_last: how many committed checkpoints stay (None: all), or retention: by which
    rules (see ``Retention``). slots: staging buffers
    per rank, each as large as the rank's state; 2 keep a complete snapshot in memory at every instant. when_busy:
    "wait" for a buffer, at most wait_s seconds, or "skip" the save on all ranks. on_error: "warn" or "raise" at the
    next save if an earlier one did not become a checkpoint. staging: "blocking", or "overlap": what the guarded
    optimizers own is copied during forward and backward (see ``guard``), or "auto": "overlap" where that is worth it.
    verify_staging: read late tensors twice, to find who changes them. slot_bytes: reserve slots of this size at once
    (see ``prepare``). threads: of one copy; 0 is this rank's share of the processors. layout: "shared" root or
    "node-local" ones. name, job, node_id: parts of the names in shared memory, for containers that see one root under
    several paths; two live jobs never share a root, whatever their names. rank, world_size: only without
    torch.distributed.

    Raises ConfigError for what cannot be right, SaverError if no saver can run.
    """

    def __init__(
        self,
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
        layout: str = "shared",
        job: str = "",
        name: str = "default",
        saver: SaverOptions | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        node_id: str = "",
    ) -> None:
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
        self._core = Checkpointer(root, options, rank=rank, world_size=world_size)

    def save_to_memory(self, step: int, state: State, *, tag: str = "") -> Staged:
        """Copy ``state`` into shared memory; from the return on it survives the death of this process.

        Blocks until one of this rank's buffers is released, then for one memory copy. ``step``: optimizer steps
        completed. Every rank calls it, one without anything to save with ``{}``. With ``staging="overlap"`` it is safe
        when ``wait_staged`` returns, at the latest when the guarded step begins. Raises StagingError, SaverError.
        """
        with self._core.alone():
            return self._save(step, state, tag, storage=False).staged

    def save_to_storage(self, step: int, state: State, *, tag: str = "", metrics: Metrics | None = None) -> Handle:
        """``save_to_memory``, then the saver makes a checkpoint of it in the background; see ``Handle.result``.

        ``metrics``: numbers by name, e.g. ``{"eval_loss": 0.31}``, kept with the checkpoint; those of rank 0 count.
        """
        with self._core.alone():
            return self._save(step, state, tag, metrics, storage=True)

    def _save(self, step: int, state: State, tag: str, metrics: Metrics | None = None, *, storage: bool) -> Handle:
        core = self._core
        entry = core.enter(step, storage=storage, tag=tag, metrics=metrics)
        if core.options.when_busy == "skip" and core.busy_anywhere():
            return core.skipped_handle(entry)
        try:
            files = self._plan(state)
        except BaseException as error:
            core.fail(entry, error)
            raise
        handle = core.save(entry, files)
        core.report_trouble(handle)
        return handle

    def guard(self, what: Optimizer | Iterable[Tensor]) -> None:
        """From now on what an optimizer owns may be copied after a save has returned: its next step waits for it.

        ``what`` may be tensors too: whoever changes them calls ``wait_staged`` before. Raises ConfigError.
        """
        self._core.guards.add(what)

    def prepare(self, state: State) -> None:
        """Reserve the slots for states like this one and touch their memory in the background. Raises ShmFull."""
        with self._core.alone():
            files = self._plan(state)
            self._core.prepare(space(files))

    def _plan(self, state: State) -> dict[str, Planned]:
        if not isinstance(state, Mapping):
            raise ConfigError(f"state must be {{file name: object}}, not a {type(state).__name__}")
        for file_name in state:
            try:
                check_file_name(file_name)
                above = next((up for up in state if file_name.startswith(f"{up}/")), None)
                if above is not None:
                    raise ValueError(f"{above!r} is a file of it, too")
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(f"{file_name!r} cannot be a file of a checkpoint: {error}") from error
        if len(state) > 1 and not any("." in os.path.basename(name) for name in state):
            names = f"{list(state)[:3]}…"
            warn_once(
                "file names", f"each key of a state becomes a file: {names} For one file give {{'model.pt': state}}"
            )
        owned = self._core.guards.owned()
        return {file_name: self._core.plan(file_name, value, owned) for file_name, value in state.items()}

    def restore(
        self,
        step: int | None = None,
        *,
        files: Iterable[str] = (),
        map_location: Any = None,
        weights_only: bool = False,
    ) -> RestoreReport:
        """The newest state that all ranks can agree on (or that of ``step``), verified, private, on every rank.

        Collective. ``report.state`` holds what this rank saved, and ``files`` of any rank beside. ``report.step`` is 0
        and ``report.source`` None if there is nothing. Raises NotFound, WorldMismatch, Corrupt, RestoreError.
        """
        if isinstance(files, str):
            raise ConfigError(f"files must be a list of file names: [{files!r}]")
        rank, extra = self._core.place.rank, list(files)

        def wants(known: Sequence[tuple[int, FileEntry]]) -> tuple[list[str], list[str]]:
            return [entry.name for writer, entry in known if writer == rank] + extra, []

        def load(source: Source) -> dict[str, Any]:
            names, _ = wants(source.candidate.files)
            return {name: _load(source, name, map_location, weights_only) for name in dict.fromkeys(names)}

        with self._core.alone():
            return self._core.restore(load, wants, step)


def _load(source: Source, name: str, map_location: Any, weights_only: bool) -> object:
    return image.load(source.fetch(name), name, map_location=map_location, weights_only=weights_only)
