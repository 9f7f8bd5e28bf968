"""The ranks of this node as a saver sees them: what their control pages say, and whether they live."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine import locks
from ckpt_engine.control import Page, RankPage
from ckpt_engine.errors import ConfigError
from ckpt_engine.events import warn_once
from ckpt_engine.manifest import Attempt
from ckpt_engine.names import Names
from ckpt_engine.waits import Deadline


@dataclass(slots=True)
class Peer:
    """One local rank as this loop sees it."""

    page: RankPage
    alive: bool
    dead_since: Deadline | None = None
    saved: bool = False

    @property
    def died(self) -> bool:
        """Gone without a goodbye (invariant 14)."""
        return not self.alive and not self.page.goodbye

    @property
    def left_a_legacy(self) -> bool:
        """Gone, and what is held here may be of the dead: a goodbye speaks only for what its own life ``saved``."""
        return not self.alive and not (self.page.goodbye and self.saved)

    def failed(self, *, sealed: bool) -> bool:
        """Its part of the attempt it entered last will not come. ``sealed``: it is here (it died before it said so)."""
        return self.page.outcome == "failed" or (self.page.outcome == "filling" and self.died and not sealed)

    def without(self, attempt: Attempt, *, ready: bool = False) -> str:
        """How it left ``attempt``, of which the saver got nothing; "" if its part may still come.

        ``ready``: its part is sealed and not queued. If it died then, a breakpoint save may follow; if it went on, or
        lives again, nobody will ever queue it.
        """
        page, order = self.page, attempt.order
        refused = page.entered == order and page.outcome == "failed" and page.run == attempt.run
        went_on = page.generation > order[0] or (page.run == attempt.run and page.entered > order)
        if not ((self.died and not ready) or went_on or refused):
            return ""
        return f"failed ({page.reason})" if refused else "went on" if went_on else "died"


class Peers(dict[int, Peer]):
    """Local rank → peer, for every rank that ever registered here. Main loop only, but for ``live_runs``."""

    def __init__(self, names: Names, linger_s: float) -> None:
        super().__init__()
        self._names = names
        self._linger_s = linger_s
        self._pages: dict[int, Page] = {}
        self.live_runs: frozenset[str] = frozenset()

    @property
    def any_alive(self) -> bool:
        return any(peer.alive for peer in self.values())

    def look(self) -> None:
        """See who is there now."""
        known = self._names.rank_locks()
        for local_rank, path in known.items():
            before = self._read(local_rank)
            alive = locks.holder(path) is not None
            page = self._read(local_rank)  # again: it may have said goodbye just before it let go of its lock
            peer = self.setdefault(local_rank, Peer(page, alive))
            peer.page, peer.alive = page, alive or page.incarnation != before.incarnation  # or has a new life
        for gone in self.keys() - known.keys():
            del self[gone]
        saved = any(peer.page.entered > (0, 0) for peer in self.values())
        for peer in self.values():
            peer.saved = saved
            peer.dead_since = None if not peer.died else peer.dead_since or Deadline(self._linger_s)
        self.live_runs = frozenset(peer.page.run for peer in self.values() if not peer.died)

    def _read(self, local_rank: int) -> RankPage:
        page = self._pages.get(local_rank)
        if page is None or page.unlinked():
            self._pages.pop(local_rank, None)
            try:
                page = Page.find(self._names.rank_control(local_rank))
            except ConfigError as error:
                warn_once(f"page {local_rank}", str(error))
                page = None
            if page is None:
                return RankPage()
            self._pages[local_rank] = page
        return page.read(RankPage) or RankPage()
