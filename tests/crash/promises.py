"""What a single function promises "after a crash", on its own: no later step of a save comes to its rescue."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from disk_model import Killed, Watched, attempt_of, content, refuse, write_shard

from ckpt_engine import commit, disk_names, listing, pins, runs, settle, sweep
from ckpt_engine.storage.base import create_exclusive, make_dirs, write_durably, write_range

from .checks import Broken, require
from .choices import selections
from .explore import ALL, Tally
from .fault_disk import FaultDisk, Step
from .savers import ROOT
from .scenarios import BEFORE, OTHERS, prepared

TAG = f"{ROOT}/tag"
ATTEMPT = attempt_of(1, "tag")
Act = Callable[[FaultDisk], object]
Look = Callable[[FaultDisk], object]


def rooted(*folders: str) -> Callable[[], FaultDisk]:
    """A durable root with an old file, and below it directories that nobody has synced."""

    def begin() -> FaultDisk:
        disk = FaultDisk()
        disk.make_dir(ROOT)
        disk.write_new(f"{ROOT}/x", b"the old")
        disk = disk.settled()
        for folder in folders:
            disk.make_dir(f"{ROOT}/{folder}")
        return disk

    return begin


def external() -> FaultDisk:
    disk = rooted("tag", "tag/sub", "tag/sub/dir")()
    disk.foreign_write(f"{TAG}/sub/dir/a.pt", content(ATTEMPT, "a"))
    return disk


def unsettled() -> FaultDisk:
    """A publisher of a first save is about to sync its links, or died: only its manifest is durable."""
    world = prepared()

    def stop(step: Step) -> None:
        if step.kind == "fsyncdir" and world.disk.find(f"{ROOT}/global_step20/zero_1_optim_states.pt") is not None:
            raise Killed

    world.disk.before = stop
    try:
        world.saver().save(attempt_of(2, "global_step20"), {**OTHERS, 1: ("zero_1_optim_states.pt",)})
    except Killed:
        world.disk.before = lambda step: None
    return world.disk


def has(*paths: str) -> Look:
    return lambda disk: all(disk.find(path) is not None for path in paths)


def holds(path: str, *allowed: bytes | None) -> Look:
    return lambda disk: disk.read_small(path, 1 << 20) in allowed


def all_of(*looks: Look) -> Look:
    return lambda disk: all(look(disk) for look in looks)


def without_links(disk: FaultDisk) -> Any:
    def no_links(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "link":
            raise refuse("link", args[1], errno.EPERM)

    return Watched(disk, no_links)


PLAIN = tuple(f"{ROOT}/global_step20/{name}" for name in ("sub/dir/a.pt", "sub/b.pt", "zero_1_optim_states.pt"))
NEW = b"the new one"
SHARD = ("a.pt", "sub/dir/b.pt")
SHARDS = all_of(*(holds(commit.attempt_path(ROOT, ATTEMPT, name), content(ATTEMPT, name)) for name in SHARD))
RECORD = commit.attempt_path(ROOT, ATTEMPT, disk_names.shard_record(0))
PIN = f"{ROOT}/{BEFORE.tag}/{disk_names.PIN}"
PROMISES: dict[str, tuple[Callable[[], FaultDisk], Act, Look, Look]] = {
    "write_durably_leaves_the_old_or_the_new": (
        rooted(), lambda d: write_durably(d, f"{ROOT}/x", NEW),
        holds(f"{ROOT}/x", b"the old", NEW), holds(f"{ROOT}/x", NEW),
    ),
    "write_range_leaves_the_old_or_the_new": (
        rooted(), lambda d: (write_range(d, f"{ROOT}/x", b"?" + NEW, offset=1, nbytes=len(NEW)), d.sync_dir(ROOT)),
        holds(f"{ROOT}/x", b"the old", NEW), holds(f"{ROOT}/x", NEW),
    ),
    "create_exclusive_leaves_nothing_or_all": (
        rooted(), lambda d: create_exclusive(d, f"{ROOT}/y", NEW),
        holds(f"{ROOT}/y", None, NEW), holds(f"{ROOT}/y", NEW),
    ),
    "create_exclusive_without_links_is_durable": (
        rooted(), lambda d: create_exclusive(without_links(d), f"{ROOT}/y", NEW),
        lambda d: True, holds(f"{ROOT}/y", NEW),
    ),
    "make_dirs_makes_all_of_them_durable": (
        rooted(), lambda d: make_dirs(d, f"{ROOT}/a/b"), lambda d: True, has(f"{ROOT}/a/b"),
    ),
    "make_tag_dir_makes_the_directories_above_it_durable": (
        rooted(), lambda d: commit.make_tag_dir(d, f"{ROOT}/a", "tag"), lambda d: True, has(f"{ROOT}/a"),
    ),
    "make_attempt_dir_makes_all_durable_in_a_tag_that_is_not": (
        rooted("tag"), lambda d: commit.make_attempt_dir(d, ROOT, ATTEMPT, ["sub/dir/a.pt"]),
        lambda d: True, has(commit.attempt_path(ROOT, ATTEMPT, "sub/dir")),
    ),
    "seal_external_makes_bytes_and_every_name_on_the_way_durable": (
        external, lambda d: commit.seal_external(d, ROOT, ATTEMPT, "sub/dir/a.pt"),
        lambda d: True, holds(f"{TAG}/sub/dir/a.pt", content(ATTEMPT, "a")),
    ),
    "a_shard_record_names_only_what_is_durable": (
        rooted("tag"), lambda d: write_shard(d, ROOT, ATTEMPT, 0, SHARD, world=1),
        lambda d: d.find(RECORD) is None or SHARDS(d), lambda d: d.find(RECORD) is not None and SHARDS(d),
    ),
    "claim_run_leaves_nothing_or_the_claim": (
        rooted(), lambda d: runs.claim_run(d, ROOT, runs.RunClaim(1, "0" * 16, None, 1, 0)),
        lambda d: len(runs.read_runs(d, ROOT)) == (d.find(f"{ROOT}/.run-1") is not None),
        has(f"{ROOT}/.run-1"),
    ),
    "pin_leaves_nothing_or_the_pin_and_is_durable": (
        lambda: prepared().disk, lambda d: pins.pin(d, pins.by_tag(d, ROOT, BEFORE.tag), "why"),
        lambda d: pins.reason_of(d, f"{ROOT}/{BEFORE.tag}") == ("why" if d.find(PIN) is not None else ""),
        lambda d: pins.reason_of(d, f"{ROOT}/{BEFORE.tag}") == "why",
    ),
    "unpin_is_durable": (
        lambda: pinned(), lambda d: pins.unpin(d, f"{ROOT}/{BEFORE.tag}"),
        lambda d: True, lambda d: d.find(PIN) is None,
    ),
    "what_was_pinned_as_it_went_is_back_and_durable": (
        lambda: prepared().disk, lambda d: pinned_as_it_goes(d),
        lambda d: True, lambda d: [one.pinned for one in listing.list_committed(d, ROOT).committed] == [True],
    ),
    "roll_forward_makes_links_of_another_saver_durable": (
        unsettled, lambda d: settle.roll_forward(d, ROOT, "global_step20"), lambda d: True, has(*PLAIN),
    ),
    "update_latest_makes_the_latest_of_another_saver_durable": (
        lambda: latest_unsynced(), lambda d: settle.update_latest(d, ROOT, BEFORE.root_id),
        holds(f"{ROOT}/latest", None, b"global_step10"), holds(f"{ROOT}/latest", b"global_step10"),
    ),
}  # fmt: skip


def latest_unsynced() -> FaultDisk:
    disk = prepared().disk
    disk.unlink(f"{ROOT}/latest")
    disk = disk.settled()
    disk.write_new(f"{ROOT}/latest", b"global_step10")
    return disk


def pinned() -> FaultDisk:
    disk = prepared().disk
    pins.pin(disk, pins.by_tag(disk, ROOT, BEFORE.tag), "why")
    return disk.settled()


def pinned_as_it_goes(disk: FaultDisk) -> None:
    """The manifest has just become a tombstone."""
    left = [pins.by_tag(disk, ROOT, BEFORE.tag)._replace(committed=False)]

    def pin(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "read_small" and disk_names.tombstone(BEFORE.id) in args[0] and left:
            pins.pin(disk, left.pop(), "")

    sweep.remove_checkpoint(Watched(disk, pin), listing.list_committed(disk, ROOT).committed[0])


def keep_promise(name: str) -> Tally:
    """Cuts the power ahead of every step and at the end, in every way. Raises Broken."""
    begin, act, always, then = PROMISES[name]
    tally = Tally(name)
    disk = begin()

    def cut(look: Look, what: object) -> None:
        disk.before = lambda step: None
        choices = disk.choices()
        for picked in selections(choices, disk.pending, ALL):
            tally.cases += 1
            tally.disks += 1
            left, _ = disk.cut(choices, picked)
            require(look(left), name, what)

    broken: list[Broken] = []

    def before(step: Step) -> None:
        tally.steps += 1
        try:
            cut(always, step)
        except Broken as error:
            broken.append(error)
            raise Killed from error
        disk.before = before

    disk.before = before
    try:
        act(disk)
    except Killed:
        raise broken[0] from broken[0]
    cut(then, "after it has returned")
    return tally
