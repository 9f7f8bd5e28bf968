"""What every face of the engine says alike: wait, pin, unpin, close."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.handles import Published

if TYPE_CHECKING:
    from typing_extensions import Self


class Face:
    """Base of ``CheckpointEngine`` and of what ``attach`` returns."""

    _core: Checkpointer

    def wait_staged(self) -> None:
        """Block until the last save is a snapshot; if it failed this says so as the next save would (``on_error``)."""
        self._core.settle()
        self._core.report_trouble()

    def wait(self, timeout_s: float | None = None) -> tuple[Published, ...]:
        """Block until every storage save has ended; raises the first failure nobody was told of."""
        return self._core.wait(timeout_s)

    def pin(self, step: int, reason: str = "") -> None:
        """Keep the newest checkpoint of ``step`` from retention until ``unpin``; pinned once this has returned.

        It may be committed, or a storage save of this rank on its way. The pin lies in the checkpoint's directory, so a
        later save under the same tag is pinned, too. Any rank may call it; on node-local roots one of each node does.
        Raises NotFound if there is none of that step, ConfigError for a reason of more than 500 characters,
        StorageError.
        """
        self._core.pin(step, reason)

    def unpin(self, step: int) -> None:
        """Give every checkpoint of ``step`` back to retention, which the next commit runs. Raises as ``pin`` does."""
        self._core.unpin(step)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the saves in flight and say goodbye; memory-only snapshots are dropped. Idempotent.

        What the engine was attached to gets its own methods back first.
        """
        self._detach()
        self._core.close(timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._detach()
        self._core.close(goodbye=kind is None)

    def _detach(self) -> None:
        """Give a framework its own methods back. Idempotent."""
