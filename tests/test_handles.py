"""How the end of a save is told: once, as what it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine import errors
from ckpt_engine.config import SaverOptions
from ckpt_engine.control import Outcome, SaverPage
from ckpt_engine.errors import CkptError, CommitTimeout, StorageFull
from ckpt_engine.handles import Handle, Outbox, Staged, error_of
from ckpt_engine.manifest import Attempt
from ckpt_engine.waits import Deadline

ATTEMPT = Attempt(1, "a" * 16, 3, 30, "global_step30", "root")


class Line:
    """A link whose saver says what the test says."""

    options = SimpleNamespace(saver=SaverOptions(commit_s=0.0))

    def __init__(self) -> None:
        self.said: list[Outcome] = []

    def outcomes(self) -> SaverPage:
        return SaverPage(outcomes=tuple(self.said))

    def wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        while not (done := condition()) and not deadline.expired():
            pass
        return done


class Disk:
    path = "/root/global_step30"

    def __init__(self) -> None:
        self.there = False

    def holds(self, attempt: Attempt) -> bool:
        return self.there

    def missing(self, attempt: Attempt) -> tuple[int, ...]:
        return (1, 2)


def made() -> tuple[Any, Line, Disk]:
    line, disk = Line(), Disk()
    return Handle(line, Staged(30, ATTEMPT), disk), line, disk  # type: ignore[arg-type]


def outcome(status: str = "failed", **facts: Any) -> Outcome:
    return Outcome(ATTEMPT.order, facts.pop("run", ATTEMPT.run), status, **facts)


def test_a_committed_outcome_or_a_manifest_ends_it() -> None:
    handle, line, disk = made()
    assert not handle.done()
    disk.there = True
    assert not handle.done()  # done never looks at the disk
    assert handle.result(0).path == disk.path and handle.done()
    handle, line, disk = made()
    line.said.append(outcome("committed"))
    assert handle.done() and handle.result(0).step == 30


def test_an_outcome_of_another_run_with_the_same_numbers_is_not_ours() -> None:
    handle, line, _ = made()
    line.said.append(outcome(run="b" * 16))
    assert not handle.done()


def test_a_deadline_is_no_end_and_names_who_is_missing() -> None:
    handle, line, _ = made()
    for _ in range(2):
        with pytest.raises(CommitTimeout) as told:
            handle.result(0)
        assert told.value.missing_ranks == (1, 2)
    assert handle.trouble() is None
    line.said.append(outcome("committed"))
    assert handle.result(0).step == 30


def test_a_timeout_that_another_node_told_of_names_the_missing_ranks_too() -> None:
    handle, line, _ = made()
    line.said.append(outcome(kind="CommitTimeout"))
    with pytest.raises(CommitTimeout) as told:
        handle.result(0)
    assert told.value.missing_ranks == (1, 2)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (outcome("cancelled"), errors.Cancelled),
        (outcome(kind="StorageFull", errno=28, path="/x", need_bytes=9, free_bytes=3), errors.StorageFull),
        (outcome(kind="StorageError", errno=5, path="/x"), errors.StorageError),
        (outcome(kind="CommitTimeout", missing=(4,)), errors.CommitTimeout),
        (outcome(kind="StaleRun", path="other"), errors.StaleRun),
        (outcome(rank=2, reason="boom"), errors.AttemptFailed),
        (outcome(kind="Nonsense", rank=2), errors.AttemptFailed),
    ],
)
def test_every_outcome_is_the_exception_it_stands_for(said: Outcome, kind: type[CkptError]) -> None:
    error = error_of(said, ATTEMPT)
    assert type(error) is kind and "step 30" in str(error)
    if isinstance(error, StorageFull):
        assert (error.errno, error.path, error.need_bytes, error.free_bytes) == (28, "/x", 9, 3)


def test_an_outbox_tells_each_failure_once(caplog: pytest.LogCaptureFixture) -> None:
    handle, line, _ = made()
    box = Outbox()
    box.add(handle)
    box.report("raise")
    line.said.append(outcome(reason="boom"))
    with caplog.at_level(logging.WARNING, "ckpt_engine"), pytest.raises(errors.AttemptFailed, match="boom"):
        box.report("raise")
    assert "step 30" in caplog.text
    box.report("raise")
    assert box.wait(Deadline(0)) == ()


def test_wait_does_not_repeat_what_result_has_raised() -> None:
    handle, line, _ = made()
    box = Outbox()
    box.add(handle)
    line.said.append(outcome(reason="boom"))
    with pytest.raises(errors.AttemptFailed):
        handle.result(0)
    assert box.wait(Deadline(0)) == ()


def test_wait_raises_the_first_failure_and_returns_what_was_published() -> None:
    (bad, line, _), (good, _, disk) = made(), made()
    disk.there = True
    box = Outbox()
    box.add(bad)
    box.add(good)
    line.said.append(outcome(reason="boom"))
    with pytest.raises(errors.AttemptFailed, match="boom"):
        box.wait(Deadline(0))
    box.add(good)
    assert [one.step for one in box.wait(Deadline(0))] == [30]
