"""The trainer's end: find or start the saver, wake it, wait for a release, notice its death.

Foreign errors of processes, locks and queues become ours here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckpt_engine import locks
from ckpt_engine.config import Options, saver_environment
from ckpt_engine.control import PROTOCOL, Page, RankPage, SaverPage
from ckpt_engine.errors import ConfigError, SaverDied, SaverError, SaverUnavailable, VersionMismatch
from ckpt_engine.events import log, span
from ckpt_engine.locks import make_run_dir
from ckpt_engine.messages import LOOK_S, Mailbox, Wake
from ckpt_engine.names import Names
from ckpt_engine.waits import Deadline, pause

_CANNOT_RUN = frozenset({1, 2})
"""Exit codes of a saver that will not run next time either: Python's own and ours (``saver/__main__``)."""


class _Child(subprocess.Popen[bytes]):
    """A saver outlives its starter on purpose: leaving it behind is no leak worth a ResourceWarning."""

    def __del__(self) -> None:
        pass


class Link:
    """One rank's connection to the saver of its node. Several threads may wait on it at once."""

    def __init__(self, names: Names, *, root: str, options: Options, local_rank: int) -> None:
        self.names = names
        self.local_rank = local_rank
        self._root = root
        self.options = options
        self._own = locks.lock_file(names.rank_lock(local_rank))
        self._locked = False  # by this link: the lock file is one for all links of this process
        self._mutex = threading.RLock()  # guards the fields below; nobody waits for a message while holding it
        self._ear = threading.Lock()  # held by the thread that listens
        self._child: _Child | None = None
        self._page: Page | None = None
        self._saver_page: Page | None = None
        self._record = RankPage()
        self._events: Mailbox | None = None
        self._notify: Mailbox | None = None

    def register(self, *, rank: int, local_world: int) -> None:
        """Be alive on this node: own lock, control page and queues; a saver is started if there is none.

        Raises ConfigError if another live process is this rank, or if the run directory is not ours; SaverError. Then
        nothing is held.
        """
        deadline = Deadline(self.options.saver.start_s)
        if self._own.held:
            raise ConfigError(
                f"this process has an engine for local rank {self.local_rank} on {self._root} already: "
                "close it first, or give the second one another root"
            )
        try:
            self._register(deadline, rank, local_world)
        except BaseException:
            self.close(goodbye=False)
            raise

    def _register(self, deadline: Deadline, rank: int, local_world: int) -> None:
        while True:
            make_run_dir(self.names.run_dir)
            with contextlib.suppress(FileNotFoundError):  # a retiring saver removed the directory: once more
                if self._register_locked(deadline):
                    break
            if deadline.expired():
                raise SaverUnavailable(f"{self.names.spawn_lock} stayed locked for {deadline.elapsed():.0f} s")
        self._page = Page.own(self.names.rank_control(self.local_rank))
        before = self._page.read(RankPage) or RankPage()
        self._record = RankPage(
            pid=os.getpid(), rank=rank, incarnation=(before.incarnation + 1) & 0xFFFFFF, local_world=local_world
        )
        self._page.write(self._record)
        self._events = Mailbox(self.names.events_queue)
        self._notify = Mailbox(self.names.notify_queue(self.local_rank))
        self.ensure_saver()
        self.wake("joined")

    def _register_locked(self, deadline: Deadline) -> bool:
        spawn = locks.lock_file(self.names.spawn_lock)
        if not spawn.lock(deadline):
            return False
        try:
            if not self._own.try_lock():
                pid = self._own.holder()
                raise ConfigError(
                    f"another live job (pid {pid}) is local rank {self.local_rank} on {self._root}: end it, or give "
                    "this one another root"
                )
            self._locked = True
            self._spawn_if_free(deadline)
        finally:
            spawn.unlock()
        return True

    @property
    def record(self) -> RankPage:
        return self._record

    def say(self, **changes: object) -> None:
        """Change this rank's control page. Raises SaverUnavailable if this rank was replaced by another process."""
        with self._mutex:
            self._record = replace(self._record, **changes)  # type: ignore[arg-type]  # replace checks the names
            if self._page is not None:
                self._stay_registered()
                self._page.write(self._record)

    def _stay_registered(self) -> None:
        """If somebody emptied /dev/shm under us (logind's RemoveIPC, an administrator), be there again."""
        make_run_dir(self.names.run_dir)
        if not self._own.keep():
            raise SaverUnavailable(f"{self._own.path} was removed, and another process took this rank's place")
        if self._page is not None and self._page.unlinked():
            log.warning("%s was unlinked by someone (logind's RemoveIPC?): made anew", self.names.run_dir)
            self._page.close()
            self._page = Page.own(self.names.rank_control(self.local_rank))

    def ensure_saver(self) -> SaverPage:
        """The record of a live saver of our version, started if need be.

        Raises SaverUnavailable or VersionMismatch after ``start_s``; nothing in shared memory is lost by that.
        """
        deadline = Deadline(self.options.saver.start_s)
        last = "no saver"
        while True:
            record = self.saver()
            todo = what_next(record)
            if record is not None and todo == "use":
                return record
            if record is not None and todo == "ask to leave":
                last = f"the running saver (pid {record.pid}) is {record.version}, this is {PROTOCOL}"
                self._ask_to_leave(record)
            elif todo == "start":
                self._spawn_under_lock(deadline)
            self._notice_failed_start()
            if deadline.expired():
                if record is not None and record.version not in ("", PROTOCOL):
                    raise VersionMismatch(last, want=PROTOCOL, got=record.version)
                raise SaverUnavailable(
                    f"no saver was ready within {self.options.saver.start_s:g} s ({last}); see {self.names.saver_log}"
                )
            pause(deadline.slice(0.01))

    def look_after_saver(self) -> None:
        """Start another saver if none lives. No error where that fails: what is staged is safe, the next save looks."""
        try:
            if locks.holder(self.names.saver_lock) is None:
                self.ensure_saver()
                self.wake("joined")
        except (SaverError, ConfigError) as error:
            log.warning("nobody looks after the snapshots in memory: %s", error)

    def saver(self) -> SaverPage | None:
        """What the live saver says about itself; None if no process holds its lock."""
        child, pid = self._child, locks.holder(self.names.saver_lock)
        if child is not None:
            child.poll()  # a dead one does not stay a zombie
        if pid is None:
            return None
        record = self.outcomes()
        if record is None or (pid and record.pid != pid):
            return SaverPage(pid=pid)  # it holds the lock and has not written its page yet
        return record

    def outcomes(self) -> SaverPage | None:
        """The last words of the saver, dead or alive."""
        with self._mutex:
            if self._saver_page is None or self._saver_page.unlinked():
                if self._saver_page is not None:
                    self._saver_page.close()
                self._saver_page = Page.find(self.names.saver_control)
            return self._saver_page.read(SaverPage) if self._saver_page is not None else None

    def wake(self, reason: str, digest: str = "") -> None:
        box = self._events
        if box is not None:
            box.send(Wake(reason, self.local_rank, digest))

    def listen(self, timeout_s: float) -> None:
        """Wait for a message to this rank, at most ``timeout_s`` (≤ 1 s); what it says does not matter.

        A message is for one receiver: of several threads one listens, the others look every 50 ms.
        """
        box = self._notify
        if box is None or not self._ear.acquire(blocking=False):
            pause(min(timeout_s, LOOK_S))
            return
        try:
            box.receive(timeout_s)
        finally:
            self._ear.release()

    def wait(
        self, condition: Callable[[], bool], deadline: Deadline, every_s: Callable[[], float] = lambda: 1.0
    ) -> bool:
        """Wait until ``condition``; looks after each message and each slice, and keeps a saver alive meanwhile.

        Raises SaverDied if the saver is dead and no other can be started.
        """
        while not condition():
            if deadline.expired():
                return False
            self.listen(deadline.slice(every_s()))
            if self.saver() is None and not condition():
                try:
                    self.ensure_saver()
                except SaverUnavailable as error:
                    raise SaverDied(f"the saver died and cannot be restarted: {error}") from error
                self.wake("joined")
        return True

    def close(self, *, goodbye: bool) -> None:
        """Let go of lock and queues. Without ``goodbye`` it looks like a death: snapshots stay (invariant 14)."""
        with self._mutex:
            if self._page is not None:
                self._page.write(replace(self._record, goodbye=goodbye))
            for page in (self._page, self._saver_page):
                if page is not None:
                    page.close()
            self._page = self._saver_page = None
        if self._locked and self._own.held:
            self._own.unlock()
        self._locked = False
        self.wake("goodbye")
        for box in (self._events, self._notify):
            if box is not None:
                box.close()
        self._events = self._notify = None

    def _ask_to_leave(self, record: SaverPage) -> None:
        with self._mutex:
            if self._saver_page is not None:
                self._saver_page.ask_to_leave(record.epoch)
        self.wake("leave")

    def _spawn_under_lock(self, deadline: Deadline) -> None:
        spawn = locks.lock_file(self.names.spawn_lock)
        make_run_dir(self.names.run_dir)
        with contextlib.suppress(FileNotFoundError):  # removed again just now; the caller looks again
            if spawn.lock(deadline):
                try:
                    self._spawn_if_free(deadline)
                finally:
                    spawn.unlock()

    def _spawn_if_free(self, deadline: Deadline) -> None:
        """Returns when the saver has its lock, so that no other rank starts one too. REQUIRES: spawn.lock is held."""
        with self._mutex:
            running = self._child is not None and self._child.poll() is None
        if running or locks.holder(self.names.saver_lock) is not None:
            return
        options = self.options
        arguments = {"job": options.job, "name": options.name, "node_id": options.node_id}
        command = [sys.executable, "-m", "ckpt_engine.saver", "run", "--root", self._root]
        command += ["--identity", json.dumps(arguments), "--options", json.dumps(options.saver.to_dict())]
        package_parent = str(Path(__file__).resolve().parent.parent)
        with span("spawn", root=self._root):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                log = os.open(self.names.saver_log, flags, 0o600)
                try:
                    self._child = _Child(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd="/",
                        env=saver_environment(package_parent),
                        start_new_session=True,
                    )
                finally:
                    os.close(log)
            except OSError as error:
                raise SaverUnavailable(f"cannot start a saver with {sys.executable}: {error}") from error
            while locks.holder(self.names.saver_lock) is None and self._child.poll() is None and not deadline.expired():
                pause(0.01)

    def _notice_failed_start(self) -> None:
        """Reap our saver. Raises SaverUnavailable if it could not start; one that was killed is only replaced."""
        with self._mutex:
            child = self._child
            if child is None or (code := child.poll()) is None:
                return
            self._child = None
        if code not in _CANNOT_RUN:
            return
        tail = ""
        with contextlib.suppress(OSError):
            tail = " ".join(self.names.saver_log.read_text(errors="replace").strip().splitlines()[-1:])
        raise SaverUnavailable(f"the saver ended at once with code {code}: {tail} (log: {self.names.saver_log})")


def what_next(record: SaverPage | None) -> str:
    """What a rank does about the saver that has the lock (None: nobody has): use, ask to leave, start or wait."""
    if record is None:
        return "start"
    if not record.ready or record.leaving:
        return "wait"
    return "use" if record.version == PROTOCOL else "ask to leave"
