"""Messages and mailboxes: whatever is in a queue, and whether there is one at all, nothing but latency changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import posix_ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import messages
from ckpt_engine.errors import ConfigError
from ckpt_engine.messages import DEPTH, SIZE_BYTES, Ended, Mailbox, Message, Released, Wake, decode, encode

NAME = f"/ckpt-test-messages-{os.getpid()}"


@pytest.fixture
def box() -> Iterator[Mailbox]:
    it = Mailbox(NAME)
    yield it
    it.close()
    messages.unlink(NAME)


@pytest.mark.parametrize(
    "message", [Wake("queued", 3, "a" * 16), Released(1, 5, "b" * 16), Ended("committed", "c" * 16)]
)
def test_a_message_comes_back_as_it_went(box: Mailbox, message: Message) -> None:
    assert decode(encode(message)) == message
    assert len(encode(message)) <= 64
    assert box.send(message) and box.receive(1) == message


@given(st.binary(max_size=SIZE_BYTES))
def test_garbage_is_none_and_never_an_exception(data: bytes) -> None:
    decode(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x93\xa4wake\x01\x02", b"\x91\xa4wake", b"\xc1", b"\x95\xa5ended\xa1a\xa1b\xa1c\xa1d"]
)
def test_a_message_of_wrong_types_or_arity_is_garbage(data: bytes) -> None:
    assert decode(data) is None


def test_a_message_too_large_for_a_queue_is_a_programming_error() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        encode(Wake("x" * SIZE_BYTES, 0))


def test_a_full_queue_is_not_an_error_and_nobody_waits(box: Mailbox) -> None:
    begin = time.monotonic()
    sent = [box.send(Wake("queued", number)) for number in range(100)]
    assert sent == [True] * DEPTH + [False] * (100 - DEPTH)
    assert time.monotonic() - begin < 1
    assert box.receive(0) == Wake("queued", 0)


def test_an_empty_queue_answers_none_at_its_deadline(box: Mailbox) -> None:
    begin = time.monotonic()
    assert box.receive(0) is None and box.receive(0.1) is None
    assert 0.09 < time.monotonic() - begin < 1


def test_garbage_in_a_queue_is_skipped(box: Mailbox) -> None:
    queue = posix_ipc.MessageQueue(NAME)
    queue.send(b"\xff\xfe garbage")
    queue.close()
    box.send(Wake("queued", 1))
    assert box.receive(1) is None
    assert box.receive(1) == Wake("queued", 1)


@pytest.mark.parametrize("size", [16, 4096])
def test_a_queue_made_by_others_for_smaller_or_larger_messages_does_no_harm(size: int) -> None:
    other = posix_ipc.MessageQueue(NAME, posix_ipc.O_CREX, max_messages=2, max_message_size=size)
    try:
        box = Mailbox(NAME)
        box.send(Released(1, 2, "d" * 16))
        other.send(b"x" * size)
        for _ in range(3):
            box.receive(0.05)
        box.close()
    finally:
        other.close()
        messages.unlink(NAME)


def test_without_a_queue_nothing_is_sent_and_a_wait_is_a_short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(posix_ipc, "MessageQueue", refused)
    box = Mailbox(NAME + "-none")
    assert not box.send(Wake("queued", 0))
    begin = time.monotonic()
    assert box.receive(1.0) is None
    assert time.monotonic() - begin < 0.5
    box.close()


def test_a_mailbox_closed_under_a_thread_that_waits_does_no_harm(box: Mailbox) -> None:
    import threading

    thread = threading.Thread(target=lambda: box.receive(0.3))
    thread.start()
    box.close()
    thread.join(5)
    assert not thread.is_alive() and not box.send(Wake("queued", 0))


@pytest.mark.skipif("os.geteuid() != 0")
def test_a_queue_of_another_user_is_not_used() -> None:
    queue = posix_ipc.MessageQueue(NAME, posix_ipc.O_CREX, max_messages=2, max_message_size=SIZE_BYTES)
    os.fchown(queue.mqd, 65534, 65534)
    try:
        box = Mailbox(NAME)
        assert not box.send(Wake("queued", 0))
        assert queue.current_messages == 0
    finally:
        queue.close()
        messages.unlink(NAME)


def test_removing_a_queue_that_is_gone_is_no_error() -> None:
    messages.unlink(NAME + "-never")
