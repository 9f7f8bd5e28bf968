"""One loop: queues, liveness, slots. It decides from headers and control pages only and never does file I/O.

Each turn: take the messages, list the segments, probe the ranks, tend every slot, pass on what failed, think about
death, and leave when nobody is left to serve. A message only makes the next turn come sooner.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from ckpt_engine import locks, messages, shm
from ckpt_engine.config import SaverOptions
from ckpt_engine.control import PROTOCOL, Outcome
from ckpt_engine.events import log, span, warn_once
from ckpt_engine.header import Header
from ckpt_engine.locks import make_run_dir
from ckpt_engine.manifest import Attempt, Failure
from ckpt_engine.messages import Ended, Mailbox
from ckpt_engine.names import Names, SegmentName
from ckpt_engine.saver import endings
from ckpt_engine.saver.board import Board
from ckpt_engine.saver.committer import Committer
from ckpt_engine.saver.outcomes import outcome_from
from ckpt_engine.saver.peers import Peer, Peers
from ckpt_engine.saver.persist import Job, Writer
from ckpt_engine.saver.stalls import Stalls
from ckpt_engine.slots import BREAKPOINT, RETIRED, Slot, open_all
from ckpt_engine.states import Order, State, Word, tended
from ckpt_engine.storage.posix import PosixStorage
from ckpt_engine.waits import SLICE_S, Deadline

FILES_AT_ONCE = 4
"""Files of one slot that are written at the same time: with many small ones each waits for a sync of its own."""


class Server:
    """The saver of one engine on one node."""

    def __init__(self, names: Names, *, root: str, options: SaverOptions, stay: bool = False) -> None:
        self.names = names
        self.root = root
        self.options = options
        self.stay = stay
        self.slots: dict[SegmentName, Slot] = {}
        self.peers = Peers(names, options.linger_s)
        self.storage = PosixStorage()
        self.board = Board(names, tidying=lambda: self.committer.tidying)
        self._handed: dict[SegmentName, Word] = {}
        self._reported: set[tuple[str, Order, int]] = set()
        self._held: dict[SegmentName, tuple[Word, Header]] = {}  # every snapshot here, when we last looked
        self.headers: tuple[Header, ...] = ()  # of them, replaced as a whole: all threads read it
        self._stalls = Stalls(options.stall_s)
        self._term: Deadline | None = None
        self.committer = Committer(
            self.storage,
            options,
            ended=self._on_outcome,
            live_run=lambda run: run in self.peers.live_runs,
            held=lambda: self.headers,
            look_at_us=self.board.wake,
        )
        self.writer = Writer(self.storage, self.committer, self.board.tell, options.retry_s, at_once=FILES_AT_ONCE)
        self.ending = endings.Endings(self)

    # -- life ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until nobody needs us. 0 = left in order, 3 = another saver holds the lock."""
        make_run_dir(self.names.run_dir)
        lock = locks.lock_file(self.names.saver_lock)
        if not lock.try_lock():
            log.info("another saver (pid %s) serves %s", locks.holder(lock.path), self.root)
            return 3
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainers; they tell us by dying
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with span("start", root=self.root, job=self.names.run_dir.name) as facts:
            facts["epoch"] = self._start()
        try:
            self._loop(self.board.box(self.names.events_queue))
            if self._term is not None:
                self.ending.tell_unsaved(self.board.said.outcomes)
        finally:
            self.board.say(ready=False, leaving=True)
            self.writer.stop()
            self.committer.stop()
            self.writer.join(self.options.term_s)
            self.committer.join(self.options.term_s)
        log.info("leaving %s", self.root)
        return 0

    def _start(self) -> int:
        """Take over what is there and be ready; returns our epoch. REQUIRES: the saver lock is held."""
        before = self.board.take_over()
        epoch = before.epoch + 1
        self.board.say(pid=os.getpid(), version=PROTOCOL, epoch=epoch, ready=False, outcomes=before.outcomes)
        self._look()
        held = self.headers
        say, root = self.board.say, self.root
        self.committer.ask(lambda: self.committer.recover(held, root, lambda found: say(committed=found)))
        self.writer.start()
        self.committer.start()
        self.board.say(ready=True)
        return epoch

    def _loop(self, box: Mailbox) -> None:
        while True:
            box.receive(SLICE_S)
            for _ in range(4 * messages.DEPTH):
                if box.receive(0) is None:
                    break
            self.turn()
            if self._may_leave():
                return

    def turn(self) -> None:
        """One look at everything."""
        self._stay_registered()
        self._look()
        hurry = self._term is not None or not self.peers.any_alive  # there is no training that a limit could spare
        self.storage.limit_writes(0 if hurry else int(self.options.write_bytes_per_s))
        for slot in sorted(self.slots.values(), key=lambda s: s.view().order or (0, 0)):
            self._tend(slot)
        self._pass_on_failures()
        self._watch_calls()
        self.ending.think(terminating=self._term is not None)

    def _may_leave(self) -> bool:
        idle = self.writer.idle() and self.committer.idle()
        if self.board.asked_to_leave() and self.writer.current is None:
            return True  # another version takes over; it finds everything in the headers
        if self._term is not None:
            quiet = idle and self.ending.settled and not self.peers.any_alive
            return quiet or self._term.expired()
        return not self.stay and idle and self.ending.may_retire() and self._retire()

    def _retire(self) -> bool:
        """Unlink all that may go, under ``spawn.lock``; False if a rank came back."""
        spawn = locks.lock_file(self.names.spawn_lock)
        if not spawn.lock(Deadline(1.0)):
            return False
        try:
            self._look()
            if self.peers.any_alive:
                return False
            with span("retire", slots=len(self.slots)):
                left = self.ending.unlink_slots()
                self.board.say(ready=False, leaving=True)
                self.ending.unlink_names(left)
        except OSError as error:
            log.warning("retiring: %s", error)
        finally:
            spawn.unlock()
        return True

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        if self._term is None:
            self._term = Deadline(self.options.term_s)

    # -- looking -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        open_all(self.names.segments(), self.slots)
        self.peers.look()
        self._held = {slot.name: found for slot in self.slots.values() if (found := self.snapshot(slot))}
        self.headers = tuple(header for _, header in self._held.values())

    def snapshot(self, slot: Slot) -> tuple[Word, Header] | None:
        """What a slot holds for our root; one that names another root is damaged, and nothing is written there."""
        found = slot.snapshot()
        if found is not None and found[1].root != self.root:
            warn_once(str(slot.name), f"{slot.name} names the root {found[1].root}, not {self.root}: it does not count")
            return None
        return found

    # -- tending -------------------------------------------------------------------------------------------------

    def _tend(self, slot: Slot) -> None:
        word = slot.word()
        peer = self.peers.get(slot.name.local_rank)
        if word.state is State.FREE and slot.flags() & RETIRED:
            self.slots.pop(slot.name).close()  # first, so that the memory is free when the name is gone
            shm.unlink(str(slot.name))
            return
        dead = None if peer is None or peer.alive else peer.page.incarnation
        state = tended(word, handed=self._handed.get(slot.name), dead=dead)
        if state is not None:
            slot.change("saver", word, state)
        elif word.state is State.QUEUED and self._handed.get(slot.name) != word and self.snapshot(slot) is None:
            self._give_up(slot, word, peer)
        self._submit(slot)

    def _give_up(self, slot: Slot, word: Word, peer: Peer | None) -> None:
        """A queued slot whose header is damaged: it becomes free, and its rank's control page says what is lost."""
        if not slot.change("saver", word, State.PERSISTING):
            return  # it was only changing
        slot.change("saver", slot.word(), State.FREE)
        log.warning("%s was damaged in shared memory before it was written", slot.name)
        header = Header.parse(peer.page.label) if peer is not None else None
        if header is not None and header.root == self.root and word.is_of(header.attempt.order):
            reason = f"the snapshot of rank {header.rank} was damaged in shared memory before it was written"
            self.committer.failed(header, Failure(rank=header.rank, reason=reason))

    def _submit(self, slot: Slot) -> None:
        """Hand a QUEUED slot to the writer, once."""
        word = slot.word()
        if word.state is not State.QUEUED or self._handed.get(slot.name) == word:
            return
        found = self.snapshot(slot)
        if found is not None and found[0] == word:
            self._handed[slot.name] = found[0]
            self.writer.submit(Job(slot, *found))

    def queue_breakpoint(self, attempt: Attempt) -> None:
        """READY or FAILED → QUEUED for every local part of ``attempt``, on behalf of ranks that died."""
        for slot in self.slots.values():
            found = self.snapshot(slot)
            if found is None or found[1].attempt != attempt:
                continue
            self.committer.reopen(found[1])
            if found[0].state in (State.READY, State.FAILED):
                slot.set_flags(BREAKPOINT)
                self._handed.pop(slot.name, None)
                slot.change("saver", found[0], State.QUEUED)
                self._submit(slot)

    def _pass_on_failures(self) -> None:
        """Ranks that failed, skipped or died tell so through their control pages; the committer writes it down."""
        for local_rank, peer in self.peers.items():
            page = peer.page
            key = (page.run, page.entered, local_rank)
            sealed = any(
                (h.attempt.run, h.attempt.order, h.rank) == (page.run, page.entered, page.rank) for h in self.headers
            )
            if not page.label or not peer.failed(sealed=sealed) or key in self._reported:
                continue
            self._reported.add(key)
            header = Header.parse(page.label)
            if header is not None and header.root == self.root and header.storage:
                reason = page.reason or f"rank {page.rank} died before its part was complete"
                self.committer.failed(header, Failure(rank=page.rank, reason=reason[:500], errno=page.errno))
        unqueued = {(header.attempt, header.rank) for word, header in self._held.values() if word.state is State.READY}
        for header, missing in self.committer.waiting():
            held = {h.rank for h in self.headers if h.attempt == header.attempt}
            for rank in missing:
                gone, ready = self.peers.get(header.node_ranks.index(rank)), (header.attempt, rank) in unqueued
                how = gone.without(header.attempt, ready=ready) if gone is not None else ""
                if rank in held and not (ready and how):
                    self.committer.keep_waiting(header.attempt)
                elif how:
                    reason = f"rank {rank} {how} without its part of {header.attempt.tag}"[:500]
                    self.committer.failed(header, Failure(rank=rank, reason=reason))

    def _watch_calls(self) -> None:
        """A write that does not move for ``stall_s`` is a failed attempt; its slot stays leased until it returns."""
        longest, said = self._stalls.longest(), self.board.said
        if (longest, self.committer.tidying) != (said.stuck, said.tidying):
            self.board.say(stuck=longest)
        found = self._stalls.failure(self.writer)
        if found is not None:
            job, failure = found
            self.writer = self.writer.successor()
            job.slot.put_error(failure)
            self._on_outcome(job.header, outcome_from(failure, job.header))
            self.committer.failed(job.header, failure)

    def _on_outcome(self, header: Header, outcome: Outcome) -> None:
        self.board.say(outcome)
        for local_rank in range(len(header.node_ranks)):
            self.board.tell(local_rank, Ended(outcome.status, header.attempt.digest))

    def _stay_registered(self) -> None:
        """If somebody emptied /dev/shm under us (logind's RemoveIPC, an administrator), be there again."""
        make_run_dir(self.names.run_dir)
        if not locks.lock_file(self.names.saver_lock).keep():
            log.critical("%s was removed, and another saver took our place: two must not write", self.names.saver_lock)
            os._exit(3)  # at once; to be killed does no harm
        self.board.stay()
