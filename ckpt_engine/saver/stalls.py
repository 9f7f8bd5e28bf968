"""Calls to the file system that do not return: named, told of, and no other slot waits for them."""

from __future__ import annotations

from ckpt_engine.manifest import Failure
from ckpt_engine.saver.persist import Job, Writer
from ckpt_engine.storage.posix import calls_under_way
from ckpt_engine.waits import SLICE_S, Deadline


class Stalls:
    """What the main loop, which makes no such call itself, sees of those of the other threads."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._watched: tuple[Job, int, Deadline] | None = None

    @staticmethod
    def longest() -> str:
        """The call that has waited longest, if that is more than a moment; else ""."""
        waiting = [(call.since.elapsed(), call) for call in calls_under_way().values()]
        seconds, call = max(waiting, default=(0.0, None))
        if call is None or seconds < SLICE_S:
            return ""
        return f"{call.op} {call.path[-500:]} has not returned for {seconds:.0f} s"

    def failure(self, writer: Writer) -> tuple[Job, Failure] | None:
        """What to say of the slot in hand when no byte of it was written for ``stall_s``."""
        job = writer.current
        if job is None:
            self._watched = None
            return None
        now = job.slot.progress()
        if self._watched is None or self._watched[0] is not job or self._watched[1] != now:
            self._watched = (job, now, Deadline(self._stall_s))
        if not self._watched[2].expired():
            return None
        folder = job.header.commit_dir
        calls = [call for call in calls_under_way().values() if call.path.startswith(f"{folder}/")]
        op, path, _ = max(calls, key=lambda call: call.since.elapsed(), default=("write", folder, None))
        reason = f"stalled: no byte written for {self._stall_s:g} s at {now} bytes: {op} {path}"
        return job, Failure(rank=job.header.rank, reason=reason[:500], path=path, op=op)
