"""What a saver tells: its control page, which counts, and the messages that wake others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpt_engine.control import Outcome, Page, SaverPage
from ckpt_engine.events import log
from ckpt_engine.manifest import Attempt
from ckpt_engine.messages import Mailbox, Message, Wake
from ckpt_engine.names import Names
from ckpt_engine.saver.outcomes import with_committed

RING = 64


class Board:
    """The page and the queues of one saver. Any thread may ``say``, ``tell`` and ``wake``; the rest is the main loop's.

    ``said`` is what stands on the page, replaced as a whole. ``tidying`` is asked whenever something is said.
    """

    def __init__(self, names: Names, *, tidying: Callable[[], bool]) -> None:
        self.said = SaverPage()
        self._names = names
        self._tidying = tidying
        self._page: Page | None = None
        self._boxes: dict[str, Mailbox] = {}
        self._mutex = threading.Lock()  # guards what stands on the page, and the table of queues

    def take_over(self) -> SaverPage:
        """Own the page; what the saver before said there. REQUIRES: the saver lock is held."""
        self._page = Page.own(self._names.saver_control)
        return self._page.read(SaverPage) or SaverPage()

    def say(self, outcome: Outcome | None = None, *, committed: Sequence[Attempt] = (), **changes: object) -> None:
        """Change the page; ``outcome`` goes to the end of the ring, new ones of ``committed`` by order."""
        with self._mutex:
            if committed:
                changes["outcomes"] = with_committed(self.said.outcomes, committed)[-RING:]
            if outcome is not None:
                ring = [old for old in self.said.outcomes if (old.order, old.run) != (outcome.order, outcome.run)]
                changes["outcomes"] = (*ring, outcome)[-RING:]
            changes["tidying"] = self._tidying()
            self.said = replace(self.said, **changes)  # type: ignore[arg-type]  # replace checks the names
            while not Page.fits(self.said):
                self.said = replace(self.said, outcomes=self.said.outcomes[1:])
            if self._page is not None:
                self._page.write(self.said)

    def stay(self) -> None:
        """If somebody unlinked the page, put it up again."""
        if self._page is not None and self._page.unlinked():
            log.warning("%s was unlinked by someone (logind's RemoveIPC?): made anew", self._names.run_dir)
            self._page.close()
            self._page = Page.own(self._names.saver_control)
            self.say()

    def asked_to_leave(self) -> bool:
        return self._page is not None and self._page.asked_to_leave(self.said.epoch)

    def tell(self, local_rank: int, message: Message) -> None:
        """Wake a rank; its queue is made by whoever comes first."""
        self.box(self._names.notify_queue(local_rank)).send(message)

    def wake(self) -> None:
        """Make the next turn of the main loop come now."""
        self.box(self._names.events_queue).send(Wake("saver", -1))

    def box(self, name: str) -> Mailbox:
        with self._mutex:
            if name not in self._boxes:
                self._boxes[name] = Mailbox(name)
            return self._boxes[name]
