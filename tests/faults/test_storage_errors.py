"""Storage errors as the field sees them, on real file systems: full, read-only, refusing, stuck, late, gone.

Training goes on; the handle, the next save, ``wait``, ``close`` and the exit code tell; the next save works; nothing
older is harmed. Most of it runs behind FUSE (``fuse_passthrough``), which refuses what its rules say.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from faults.fuse_disk import TIRED, Disk, refused, settled, until_savers_left, why_no_fuse
from harness import Lab, leader_died, until
from team import Team, committed, slots, until_committed, whole

from ckpt_engine.states import State

FILE, MANIFEST = "^PK", '"kind":"manifest"'  # what such a file holds
BEFORE = {
    "making the tag's directory": {"op": "mkdir", "path": r"global_step\d+$"},
    "making the attempt's directory": {"op": "mkdir", "path": r"\.attempt-[^/]*$"},
    "writing a file": {"op": "write", "data": FILE},
    "syncing a file": {"op": "fsync", "data": FILE},
    "renaming a file": {"op": "rename", "path": r"/rank1\.pt$"},
    "renaming a shard record": {"op": "rename", "path": r"/\.shard-"},
    "syncing the attempt's directory": {"op": "fsyncdir", "path": r"\.attempt-[^/]*$"},
    "renaming the receipt": {"op": "rename", "path": r"/\.receipt-"},
    "syncing the manifest": {"op": "fsync", "data": MANIFEST},
    "renaming the manifest": {"op": "rename", "path": r"/MANIFEST"},
}
"""Where a save can be refused before it is committed."""
NODES = dict.fromkeys(BEFORE, "aa") | {"renaming the receipt": "ab"}
"""A node alone makes no receipt."""
AFTER = {
    "linking a plain name": {"op": "link", "path": r"/global_step\d+/rank"},
    "writing latest": {"op": "write", "data": "^global_step"},
    "renaming latest": {"op": "rename", "path": "/latest$"},
    "removing a first name": {"op": "unlink", "path": r"\.attempt-[^/]*/rank"},
}
"""Where it can be refused after that."""


@pytest.fixture
def disk(lab: Lab) -> Iterator[Disk]:
    """A disk that obeys, and the root of this test on it."""
    if missing := why_no_fuse():
        pytest.skip(missing)
    it = Disk(lab)
    lab.root = it.root
    try:
        yield it
        it.obey()
        until_savers_left(lab)
    finally:
        it.close()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_refused_writes_fail_that_save_with_their_number_and_the_next_one_works(
    lab: Lab, disk: Disk, number: int
) -> None:
    team = Team(lab, "aa", saver=TIRED).open()
    team.commit(1)
    step = 1
    for where in ("writing a file", "syncing a file", "renaming the manifest"):
        disk.obey(BEFORE[where] | {"errno": number})
        team.ok("save", step=(step := step + 1), storage=True)
        refused(team.all("result", step=step), number)
        team.save(step := step + 1)
        disk.obey()
        team.commit(step := step + 1)
    assert [found for found, _ in committed(lab.root)] == [10, 7, 4, 1] and whole(lab.root)
    team.leave()


@pytest.mark.parametrize("where", BEFORE)
def test_what_is_refused_once_is_tried_again_and_what_is_refused_always_fails_that_save_alone(
    lab: Lab, disk: Disk, where: str
) -> None:
    team = Team(lab, NODES[where], saver={"retry_s": 0.6}).open()
    team.commit(1)
    once = errno.EINTR if "the tag's" in where else errno.EIO  # a rank does not wait for a disk to be well again
    disk.obey(BEFORE[where] | {"errno": once, "count": 1})
    team.commit(2)
    assert len(disk.hits()) == 1
    disk.obey(BEFORE[where] | {"errno": errno.EIO})
    team.ok("save", step=3, storage=True)
    refused(team.all("wait"), errno.EIO)
    disk.obey()
    team.commit(4)
    assert [step for step, _ in committed(lab.root)] == [4, 2, 1] and whole(lab.root)
    team.leave()


@pytest.mark.parametrize("where", AFTER)
def test_what_is_refused_after_the_manifest_is_tried_again_told_of_and_mended_by_the_next_save(
    lab: Lab, disk: Disk, where: str
) -> None:
    team = Team(lab, "aa", saver={"retry_s": 0.6}).open()
    team.commit(1)
    until(lambda: settled(lab.root, "global_step1"), 10)
    disk.obey(AFTER[where] | {"errno": errno.EIO, "count": 2})
    team.commit(2)
    until(lambda: settled(lab.root, "global_step2"), 10, lab.saver_log())
    disk.obey(AFTER[where] | {"errno": errno.EIO})
    team.ok("save", step=3, storage=True)
    until(lambda: all(answer["done"] for answer in team.all("done", step=3)), 10)  # known without a look at the disk
    told = ["step 3 is committed, but its plain names or latest are not done" in p.log.read_text() for p in team.ranks]
    only_leftovers = "first name" in where  # they keep nobody from going on
    assert told == [not only_leftovers] * 2 and settled(lab.root, "global_step3") == only_leftovers
    team.commit(4)
    disk.obey()
    team.commit(5)
    until(lambda: settled(lab.root, "global_step5"), 10)
    plain = [f"{lab.root}/global_step{step}/{name}.pt" for step in (3, 4) for name in ("rank0", "rank1", "sub/model")]
    until(lambda: all(map(os.path.exists, plain)), 10)
    assert [step for step, _ in committed(lab.root)] == [5, 4, 3, 2, 1] and whole(lab.root)
    team.leave()


def trains(me: Any, first: int) -> None:
    """A training loop that handles no error of ours."""
    with me.engine(saver=TIRED) as engine:
        for step in (first, first + 1):
            engine.save_to_storage(step, {"w.pt": {"w": me.coded(step)}})
            me.say("saved", step=step)
            me.hear("go")


def test_a_failed_save_is_the_exit_code_of_a_job_that_ends_with_it_and_not_of_one_that_goes_on(
    lab: Lab, disk: Disk
) -> None:
    bad = lab.rank(trains, 1)
    bad.expect("saved")
    until_committed(lab.root, 1)
    disk.obey({"op": "write", "data": FILE, "errno": errno.ENOSPC})
    bad.tell("go")
    bad.expect("saved")  # in the middle of trouble, training goes on
    bad.tell("go")
    raised = bad.expect("raised")
    assert raised["type"] == "StorageFull" and "step 2" in raised["text"], raised
    assert bad.join() == 1
    disk.obey()
    until_committed(lab.root, 2)  # the saver tries again what its job could not wait for


# -- what a file system cannot do ------------------------------------------------------------------------------------

CANNOT = {
    "O_DIRECT (EINVAL)": [{"op": "write", "direct": True, "errno": errno.EINVAL}],
    "O_DIRECT (EOPNOTSUPP)": [{"op": "write", "direct": True, "errno": errno.EOPNOTSUPP}],
    "write all at once": [{"op": "write", "short": 1001}],
    "write without interruption": [{"op": ["write", "fsync"], "errno": errno.EINTR, "count": 9}],
    "hard links": [{"op": "link", "errno": errno.EPERM}],
    "sync directories": [{"op": "fsyncdir", "errno": errno.EINVAL}],
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_a_file_system_cannot_do_is_done_without(lab: Lab, disk: Disk, what: str) -> None:
    disk.obey(*CANNOT[what])
    team = Team(lab, "aa", keep_last=1).open()
    for step, tag in ((1, "other"), (2, "last"), (3, "last")):
        team.commit(step, tag=tag, count=20_000)
    assert disk.hits()
    until(lambda: settled(lab.root, "last") and not os.path.exists(f"{lab.root}/other"), 10)
    assert committed(lab.root) == [(3, "last")] and whole(lab.root)
    team.leave()


# -- calls that do not return ----------------------------------------------------------------------------------------


def stuck(disk: Disk, rule: dict[str, Any]) -> None:
    """From now on such a call waits until the rules change."""
    disk.forget()
    disk.obey(rule | {"hold": True})


def test_a_write_that_never_returns_fails_its_save_names_its_file_and_holds_no_other_slot(lab: Lab, disk: Disk) -> None:
    team = Team(lab, "aa", slots=3, saver={"stall_s": 0.5}).open()
    team.commit(1)
    stuck(disk, BEFORE["writing a file"] | {"count": 1})
    team.ok("save", step=2, storage=True)
    until(disk.hits, 10)
    file = disk.hits()[0]["path"]
    for answer in team.all("wait"):
        assert answer["error"] == "AttemptFailed" and "stalled" in answer["text"] and file in answer["text"], answer
    until(lambda: leased(lab) == [2], 10, lab.saver_log())
    team.commit(3)
    disk.obey()
    until(lambda: not leased(lab), 10)
    team.commit(4)
    assert [step for step, _ in committed(lab.root)] == [4, 3, 1] and whole(lab.root)
    team.leave()


def leased(lab: Lab) -> list[int]:
    """Steps of the slots that the saver holds."""
    found = slots(lab.names(node_id="a"))
    return [step for slot, step in found if slot.word().state in (State.QUEUED, State.PERSISTING)]


def stuck_in(lab: Lab) -> str:
    page = lab.saver_page(lab.names(node_id="a"))
    return page.stuck if page is not None else ""


@pytest.mark.parametrize("where", ["writing a file", "syncing the manifest"])
def test_a_saver_killed_in_a_call_that_never_returns_is_replaced_when_the_disk_is_back(
    lab: Lab, disk: Disk, where: str
) -> None:
    team = Team(lab, "aa", saver={"commit_s": 60.0}).open()
    team.commit(1)
    stuck(disk, BEFORE[where])
    team.ok("save", step=2, storage=True)
    until(disk.hits, 10)
    saver = lab.saver(lab.names(node_id="a"))
    until(lambda: stuck_in(lab), 10)
    os.kill(saver, signal.SIGKILL)
    until(lambda: leader_died(saver), 10)  # as far as it can be: a thread in such a call cannot die
    team.save(3)
    for answer in team.all("wait", timeout_s=0.5):
        held = [hit["path"] for hit in disk.hits()]  # several files are written at once
        assert answer["error"] == "CommitTimeout" and any(path in answer["text"] for path in held), answer
    assert lab.saver(lab.names(node_id="a")) == saver  # its lock is held until that thread returns
    disk.obey()
    team.ok("result", step=2)
    team.commit(4)
    assert [step for step, _ in committed(lab.root)] == [4, 2, 1] and whole(lab.root)
    team.leave()


def test_a_file_system_that_breaks_down_and_comes_back_costs_the_saves_in_between(lab: Lab, disk: Disk) -> None:
    team = Team(lab, "aa", saver=TIRED).open()
    team.commit(1)
    stuck(disk, BEFORE["writing a file"])
    team.ok("save", step=2, storage=True)
    until(disk.hits, 10)
    disk.break_down()
    for answer in team.all("result", step=2):
        assert answer["error"] == "StorageError" and answer["errno"] in (errno.ENOTCONN, errno.ECONNABORTED), answer
    team.save(3)
    team.ok("save", step=4, storage=True)
    refused(team.all("result", step=4), errno.ENOTCONN)
    disk.obey()
    disk.mount_again()
    team.commit(5)
    assert [step for step, _ in committed(lab.root)] == [5, 1] and whole(lab.root)
    team.leave()


# -- names that come late, or go -------------------------------------------------------------------------------------


def test_a_node_that_sees_the_names_of_the_other_late_commits_and_restores_with_it(lab: Lab, disk: Disk) -> None:
    def late(team: Team) -> None:
        disk.obey({"late_s": 1.5, "pids": [team.ranks[1].pid], "command": '"node_id": "b"'})

    team = Team(lab, "ab").open()
    team.commit(1)
    late(team)
    team.commit(2)
    team.commit(3, tag="last")
    team.leave()
    until(lambda: not lab.savers() and not lab.left(), 15)
    team = Team(lab, "ab")
    late(team)
    team.open()
    found = team.restore()
    assert (found["step"], found["source"], found["skipped"]) == (3, "storage", [])
    team.leave()


GOING = ["writing a file", "renaming the receipt", "renaming the manifest", "linking a plain name", "renaming latest"]


@pytest.mark.parametrize("where", GOING)
def test_a_checkpoint_that_another_removes_while_it_is_saved_stays_removed_and_the_next_one_works(
    lab: Lab, disk: Disk, where: str
) -> None:
    """A framework's rotation on another client, which asks nobody."""
    team = Team(lab, NODES.get(where, "aa"), saver=TIRED).open()
    team.commit(1)
    until(lambda: settled(lab.root, "global_step1"), 10)
    stuck(disk, {**BEFORE, **AFTER}[where])
    team.ok("save", step=2, storage=True)
    until(disk.hits, 10)
    shutil.rmtree(disk.files / "checkpoints" / "global_step2")
    disk.obey()
    if where in BEFORE:
        for answer in team.all("result", step=2):
            assert answer["error"] == "Cancelled", answer
    team.save(3)
    team.commit(4)
    until(lambda: settled(lab.root, "global_step4"), 10)
    assert [step for step, _ in committed(lab.root)] == [4, 1] and whole(lab.root)
    assert not os.path.exists(f"{lab.root}/global_step2")
    team.leave()


def test_older_checkpoints_that_another_removes_are_not_missed(lab: Lab, disk: Disk) -> None:
    team = Team(lab, "aa", keep_last=2).open()
    for step in (1, 2, 3):
        team.commit(step)
    until(lambda: settled(lab.root, "global_step3") and not os.path.exists(f"{lab.root}/global_step1"), 10)
    shutil.rmtree(disk.files / "checkpoints" / "global_step3")  # the newest, even
    team.commit(4)
    until(lambda: settled(lab.root, "global_step4"), 10)
    assert [step for step, _ in committed(lab.root)] == [4, 2] and whole(lab.root)
    team.leave()
