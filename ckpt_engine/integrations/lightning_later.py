"""What Lightning does because of a newer checkpoint, and what has to wait until that is committed."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.errors import CkptError
from ckpt_engine.events import log
from ckpt_engine.handles import Handle


@dataclass(frozen=True, slots=True)
class _Act:
    act: Callable[[], None]
    after: int | None
    removes: str


class Later:
    """What is to happen after a commit. On rank 0; the others have nothing to do."""

    def __init__(self, notes: str, failed: Callable[[str], None]) -> None:
        """``notes``: a file that says what is still to be removed, for whoever starts after a crash.

        ``failed``: called with the path of a save that did not become a checkpoint.
        """
        self._notes = notes
        self._failed = failed
        self._count = 0
        self._flying: list[tuple[int, Handle, str]] = []
        self._committed = -1
        self._acts: list[_Act] = []
        self._going: dict[threading.Thread, str] = {}  # what each is removing

    def saved(self, handle: Handle | None, path: str) -> None:
        """One more save, into ``path``: which is not to be removed any more. None: it has failed already."""
        self._look()
        self._count += 1
        if handle is not None:
            self._flying.append((self._count - 1, handle, path))
        self.forget(path)

    def forget(self, path: str) -> None:
        """Not to be removed any more: it is being saved anew."""
        if self.removes(path) or path in self._going.values():
            self._acts = [one for one in self._acts if one.removes != path]
            self._going = {thread: "" if where == path else where for thread, where in self._going.items()}
            self._note()

    def add(self, act: Callable[[], None], *, removes: str = "", one_more: bool = False) -> None:
        """``act`` runs when the saves so far, or ``one_more``, have ended, and the last or a later one is committed."""
        self._acts.append(_Act(act, self._count + one_more, removes))
        if removes:
            self._note()

    def noted(self) -> list[str]:
        """What a run that ended early was still to remove."""
        try:
            with open(self._notes, encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read().split("\n")
            return [os.path.normpath(os.path.join(os.path.dirname(self._notes), line)) for line in lines if line]
        except FileNotFoundError:
            return []

    def _note(self) -> None:
        base = os.path.dirname(self._notes)  # a copy of the directory speaks of itself
        wanted = {*(one.removes for one in self._acts), *self._going.values()} - {""}
        pending = [os.path.relpath(path, base) for path in sorted(wanted)]
        with contextlib.suppress(OSError):  # without it a crash leaves what was to go
            if pending:
                with open(f"{self._notes}.new", "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write("\n".join(pending))
                os.replace(f"{self._notes}.new", self._notes)
            else:
                os.unlink(self._notes)

    def add_for_all(self, act: Callable[[], None]) -> None:
        """``act`` runs when no save is in flight."""
        self._acts.append(_Act(act, None, ""))

    def aside(self, act: Callable[[], object], *, removes: str = "") -> None:
        """``act`` in a thread: removing takes its time, and is noted until it has ended."""
        thread = threading.Thread(target=_try, args=(act,), name="remove a checkpoint")
        thread.start()
        self._going[thread] = removes

    def _gone(self) -> None:
        done = {thread: path for thread, path in self._going.items() if not thread.is_alive()}
        for thread in done:
            del self._going[thread]
        if any(done.values()):
            self._note()

    def removes(self, path: str) -> bool:
        return any(one.removes == path for one in self._acts)

    def flying(self) -> list[Handle]:
        return [handle for _, handle, _ in self._flying]

    def run(self) -> None:
        """Everything whose time has come; trouble is logged."""
        self._gone()
        if not self._acts:
            return
        self._look()
        oldest = min((number for number, _, _ in self._flying), default=self._count)
        for one in list(self._acts):
            ready = one.after <= min(oldest, self._committed + 1) if one.after is not None else not self._flying
            if ready:
                self._acts.remove(one)
                _try(one.act)
                if one.removes:
                    self._note()

    def _look(self) -> None:
        for one in [one for one in self._flying if one[1].done()]:
            number, handle, path = one
            self._flying.remove(one)
            told = handle.reported
            try:
                handle.result()
                self._committed = max(self._committed, number)
            except CkptError:
                handle.reported = told  # the next save tells of it
                if path not in (flying for _, _, flying in self._flying):
                    _try(lambda path=path: self._failed(path))  # type: ignore[misc]

    def end(self) -> None:
        """What cannot happen any more is named."""
        for thread in self._going:
            thread.join()
        self._gone()
        for one in self._acts:
            if one.removes:
                log.warning("%s stays for now: no checkpoint was committed after it", one.removes)
        self._acts.clear()


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except (CkptError, OSError) as error:
        log.warning("%s", error)


def link(target: str, path: str) -> None:
    """A relative symbolic link in place of whatever is there, in one step."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    target = os.path.relpath(target, os.path.realpath(folder))
    if os.path.islink(path) and os.readlink(path) == target:
        return
    temporary = os.path.join(folder, f".link-{secrets.token_hex(4)}")
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
