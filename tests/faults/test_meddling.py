"""A stranger of the same uid sits at the real queues: whatever he does to messages, only latency changes (invariant 2).

The meddler blocks in ``mq_receive`` while saver and ranks poll, so the kernel gives nearly every message to him first.
With one slot a rank waits for the release of its buffer, and every handle for the outcome: the two things that
messages tell, and that everybody also sees by looking once a second.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from faults.programs import all_do, do, leave, obeys, ready
from harness import Lab, Process, kill, until
from nursery import coded

LATE_S = 6.0
"""The saver looks once a second, and so does the rank; the rest is for a busy machine."""


def meddles(me: Any, how: str, names: list[str], life_s: float = 60.0) -> None:
    """Do ``how`` to every message that comes through the queues ``names``, until told to end; says how many it had."""
    done, had = threading.Event(), []

    def sit_at(name: str) -> None:
        queue = posix_ipc.MessageQueue(name, posix_ipc.O_CREAT, mode=0o600, max_messages=8, max_message_size=512)
        while not done.is_set():
            with contextlib.suppress(posix_ipc.BusyError):
                had.append(_treat(how, queue, len(had), done))

    threads = [threading.Thread(target=sit_at, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    me.say("sits")
    select.select([me._commands], [], [], life_s)
    done.set()
    for thread in threads:
        thread.join()
    me.say("had", messages=sum(had))


def _treat(how: str, queue: Any, number: int, done: Any) -> int:
    """One go at a queue; the number of messages it took or made. Raises BusyError: none came, or it is full."""
    if how == "garbage":
        done.wait(0.02)
        for data in (b"", b"\xc1", bytes(512), b"\x95\xa5ended\xa1a\xa1b\xa1c\xa1d"):
            queue.send(data, timeout=0)
        return 4
    if how == "stale":  # as it was in a former life, and the queue is always full
        done.wait(0.01)
        queue.send(b"\x94\xa8released\x00\x05\xb0aaaaaaaaaaaaaaaa", timeout=0)
        return 1
    data, _ = queue.receive(timeout=0.05)
    if how == "twice":
        queue.send(data, timeout=0)
        queue.send(data, timeout=0)
    elif how == "every third":
        if number % 3:
            queue.send(data, timeout=0)
    elif how == "late":
        done.wait(0.3)
        queue.send(data, timeout=0)
    elif how == "other order":
        held = [data]
        with contextlib.suppress(posix_ipc.BusyError):
            while len(held) < 4:
                held.append(queue.receive(timeout=0.05)[0])
        for one in reversed(held):
            queue.send(one, timeout=0)
    if how != "all":
        done.wait(0.02)  # else it would take what it has just put back
    return 1


def queues(lab: Lab) -> list[str]:
    names = lab.names()
    return [names.events_queue, names.notify_queue(0), names.notify_queue(1)]


@contextlib.contextmanager
def meddling(lab: Lab, how: str) -> Iterator[Process]:
    process = lab.rank(meddles, how, queues(lab))
    process.expect("sits")
    yield process
    process.tell("end")
    assert process.expect("had")["messages"] > 0, "he had no message at all"
    process.end()


def saves(lab: Lab, ranks: list[Process], steps: range) -> None:
    """Storage saves that wait for the buffer of the one before; each is a checkpoint with the right bytes, soon."""
    import torch

    for step in steps:
        begin = time.monotonic()
        assert [said["error"] for said in all_do(ranks, "storage", step=step)] == [""] * len(ranks)
        assert time.monotonic() - begin < LATE_S
    ends = all_do(ranks, "result", step=steps[-1])
    assert all(end["error"] == "" and end["seconds"] < LATE_S for end in ends), ends
    for step in steps:
        assert [end["error"] for end in all_do(ranks, "result", step=step)] == [""] * len(ranks)
        for number in range(len(ranks)):
            found = torch.load(Path(lab.root, f"global_step{step}", f"rank{number}.pt"), weights_only=True)["w"]
            assert torch.equal(found, coded(step, number, len(found)))


@pytest.mark.parametrize("how", ["every third", "all", "twice", "late", "other order", "stale", "garbage"])
def test_whatever_a_stranger_does_to_messages_only_latency_changes(lab: Lab, how: str) -> None:
    ranks = ready(lab.ranks(obeys, {"slots": 1}, world=2))
    with meddling(lab, how):
        saves(lab, ranks, range(1, 4))
    if how == "garbage":
        assert lab.saver_log().count("garbage in message queue") == 1, lab.saver_log()
        for rank in ranks:
            assert rank.log.read_text().count("garbage in message queue") == 1
            assert do(rank, "counters")["messages.garbage"] > 1
    leave(ranks)


@pytest.mark.parametrize("stranger", [None, (1, 16), (2, 8192)], ids=["unlinked", "tiny", "oversized"])
def test_a_queue_that_is_unlinked_and_made_anew_by_a_stranger_only_costs_time(
    lab: Lab, stranger: tuple[int, int] | None
) -> None:
    """Whoever opened it before goes on with the old one, whoever comes later gets the stranger's, full as it is."""
    ranks = ready(lab.ranks(obeys, {"slots": 1}, world=2))
    saves(lab, ranks, range(1, 2))
    theirs = []
    for name in queues(lab):
        posix_ipc.unlink_message_queue(name)
        if stranger:
            count, size = stranger
            theirs.append(
                posix_ipc.MessageQueue(name, posix_ipc.O_CREX, mode=0o600, max_messages=count, max_message_size=size)
            )
            theirs[-1].send(b"x" * size)
    saves(lab, ranks, range(2, 4))
    saver = lab.saver()
    assert saver
    kill(saver)  # the next one opens what bears the name now
    saves(lab, ranks, range(4, 6))
    for queue in theirs:
        queue.close()
    leave(ranks)
    until(lambda: not lab.left(), 10, lab.saver_log())
