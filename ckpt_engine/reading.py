"""Hold a reading lease: retention leaves a checkpoint alone while somebody reads it."""

from __future__ import annotations

import secrets
import threading

from ckpt_engine import runs
from ckpt_engine.errors import CkptError
from ckpt_engine.events import log
from ckpt_engine.manifest import Lease
from ckpt_engine.storage.base import Storage

BEAT_S = 10.0
"""A lease that is not renewed for ``runs.LEASE_STALE_S`` is stale."""


class Reading:
    """A lease on ``tag`` in ``root``, renewed by a thread of its own until ``close``.

    Best effort: where the root cannot be written there is no lease. After a crash: the lease goes stale by itself.
    """

    def __init__(self, storage: Storage, root: str, tag: str) -> None:
        self._storage = storage
        self._root = root
        self._lease = Lease(secrets.token_hex(8), tag, 0)
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if self._write():
            self._thread = threading.Thread(target=self._renew, name="reading lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Give the lease up; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._done.set()
        thread.join()
        try:
            runs.drop_lease(self._storage, self._root, self._lease.token)
        except CkptError as error:
            log.info("the reading lease of %s stays until it is stale: %s", self._lease.tag, error)

    def _renew(self) -> None:
        while not self._done.wait(BEAT_S):
            self._lease = Lease(self._lease.token, self._lease.tag, self._lease.beat + 1)
            self._write()

    def _write(self) -> bool:
        try:
            runs.write_lease(self._storage, self._root, self._lease)
        except CkptError as error:
            log.info("reading %s without a lease: %s", self._lease.tag, error)
            return False
        return True
