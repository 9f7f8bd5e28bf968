"""Whoever dies, at whatever instant: savers at once, readers, deleters, and kills on a real disk.

Power cuts at every step of a saver are in ``tests/crash``.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_model import (
    Dying,
    Killed,
    ModelDisk,
    Script,
    Watched,
    attempt_of,
    authors,
    claim_of,
    paths,
    publish,
    recover,
    retain,
    take_turns,
    write_node,
)

from ckpt_engine import commit, disk_names, listing, runs
from ckpt_engine.errors import Cancelled, NotFound
from ckpt_engine.manifest import Attempt
from ckpt_engine.storage import PosixStorage

FILES = {0: ("mp_rank_00_model_states.pt", "sub/dir/a.pt"), 1: ("zero_1_optim_states.pt", "zero_to_fp32.py")}
FEWER = {0: ("mp_rank_00_model_states.pt", "other.pt"), 1: ()}

Said = list[Attempt]
"""Attempts whose publisher was told that they are committed."""


def save(storage: Any, root: str, attempt: Attempt, said: Said, files: dict[int, tuple[str, ...]] = FILES) -> None:
    write_node(storage, root, attempt, files)
    outcome = publish(storage, root, attempt)
    assert isinstance(outcome, commit.Published) and outcome.trouble is None
    said.append(attempt)


def first_save(storage: Any, root: str, said: Said) -> None:
    save(storage, root, attempt_of(2, "global_step20"), said)


def re_save(storage: Any, root: str, said: Said) -> None:
    save(storage, root, attempt_of(2, "global_step10"), said, FEWER)
    save(storage, root, attempt_of(3, "global_step10"), said)


def retention(storage: Any, root: str, said: Said) -> None:
    for seq in (2, 3):
        save(storage, root, attempt_of(seq, f"global_step{seq}0"), said)
        retain(storage, root, 1)


def roll_back(storage: Any, root: str, said: Said) -> None:
    first, second = attempt_of(1, "global_step10"), attempt_of(2, "global_step20")
    save(storage, root, second, said)
    runs.claim_run(storage, root, claim_of(2, first, "1" * 16))
    save(storage, root, attempt_of(0, "global_step20", 2, "1" * 16), said, FEWER)


def node_local(storage: Any, root: str, said: Said) -> None:
    for seq, tag in [(2, "global_step20"), (3, "global_step20"), (4, "global_step40")]:
        attempt = attempt_of(seq, tag)
        write_node(storage, root, attempt, {0: FILES[0]}, node=0, nodes=2, layout="node-local")
        outcome = publish(storage, root, attempt, nodes=2, node=0)
        assert isinstance(outcome, commit.Published) and outcome.trouble is None
        said.append(attempt)
        retain(storage, root, 1, confirmed=attempt.order)


SCENARIOS: list[Callable[[Any, str, Said], None]] = [first_save, re_save, retention, roll_back, node_local]


def prepare(storage: Any, root: str) -> Said:
    said: Said = []
    runs.adopt_root_id(storage, root, "ab" * 8)
    runs.claim_run(storage, root, claim_of(1))
    save(storage, root, attempt_of(1, "global_step10"), said)
    return said


def check(storage: Any, root: str, said: Said) -> None:
    """Before and after recovery: what counts is whole, and nothing that was promised is lost."""
    found = listing.list_committed(storage, root)
    assert found.damaged == ()
    for one in found.committed:
        assert listing.verify(storage, one) == ()
        assert len(authors(storage, one.commit_dir)) <= 1, "stock tools find a mixture"
    newest = max(attempt.order for attempt in said)
    assert found.committed and found.committed[0].order >= newest
    latest = storage.read_small(f"{root}/latest", 4096)
    assert latest is not None and latest.decode() in [one.manifest.attempt.tag for one in found.committed]


def check_recovered(storage: Any, root: str, said: Said) -> None:
    recover(storage, root)
    check(storage, root, said)
    committed = listing.list_committed(storage, root).committed
    assert (storage.read_small(f"{root}/latest", 4096) or b"").decode() == committed[0].manifest.attempt.tag
    for one in committed:
        assert authors(storage, one.commit_dir) <= {one.manifest.attempt.id}
        for entry in one.manifest.files():
            plain = os.path.join(root if entry.origin == "tool" else one.commit_dir, entry.name)
            assert storage.size(plain) is not None, "a plain name is missing after recovery"
    kept = {one.manifest.attempt.id for one in committed}
    for path in paths(storage, root):
        parts = os.path.relpath(path, root).split("/")
        if any(name.order > committed[0].order for name in filter(None, map(disk_names.parse_attempt_dir, parts))):
            continue  # an attempt after the newest committed one: the next commit makes it a leftover
        assert not any(disk_names.is_temp(part) or disk_names.parse_tombstone(part) for part in parts), path
        for name in filter(None, map(disk_names.parse_attempt_dir, parts)):
            assert name.id in kept, path
    counting = Dying(storage, -1)
    recover(counting, root)
    assert [change for change in counting.changes if change[0] not in ("unlink", "sync_dir", "remove_dir")] == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_kill_at_every_fifth_change_on_a_real_disk_keeps_what_was_committed(
    scenario: Callable[[Any, str, Said], None], tmp_path: Path
) -> None:
    for at in itertools.count(step=5):
        root = str(tmp_path / str(at))
        disk = PosixStorage()
        said = prepare(disk, root)
        try:
            scenario(Dying(disk, at), root, said)
        except Killed:
            check(disk, root, said)
            check_recovered(disk, root, said)
        else:
            break


def savers(count: int, tag: str, said: Said) -> list[Callable[[Any], None]]:
    """Nodes with a rank each; all publish as soon as they can, and retain."""
    attempt = attempt_of(2, tag)

    def node(index: int) -> Callable[[Any], None]:
        def job(storage: Any) -> None:
            write_node(storage, "/root", attempt, {index: FILES.get(index, ())}, world=count, node=index, nodes=count)
            while True:
                try:
                    outcome = publish(storage, "/root", attempt, world=count, nodes=count)
                except Cancelled:
                    pytest.fail("cancelled though nobody removed the directory")
                if isinstance(outcome, commit.Published):
                    break
                assert isinstance(outcome, commit.Waiting)
            assert outcome.trouble is None
            said.append(attempt)
            retain(storage, "/root", 2)

        return job

    return [node(index) for index in range(count)]


@pytest.mark.parametrize(("count", "tag"), [(2, "global_step20"), (3, "global_step10")], ids=["first save", "re-save"])
def test_savers_that_publish_at_once_lose_nothing_whenever_they_die(count: int, tag: str) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        disk = ModelDisk()
        said = prepare(disk, "/root")
        take_turns(disk, savers(count, tag, said), draw, kill_at=draw.randrange(60, 130 * count))
        for choose in (lambda states: states - 1, draw.randrange):
            left = disk.crash(choose)
            check(left, "/root", said)
            check_recovered(left, "/root", said)


def publishers(tag: str) -> tuple[ModelDisk, Said, Callable[[Any], None]]:
    """A disk on which ``tag`` only waits for its manifest, and a saver that publishes it."""
    disk = ModelDisk()
    said = prepare(disk, "/root")
    attempt = attempt_of(2, tag)
    write_node(disk, "/root", attempt, {0: ("x.pt", "mp_rank_00_model_states.pt"), 1: ()})
    disk.sync_dir("/root")

    def publisher(storage: Any) -> None:
        assert isinstance(publish(storage, "/root", attempt), commit.Published)

    return disk, said, publisher


def test_a_publisher_that_overtakes_another_syncs_its_links_before_it_drops_the_first_names() -> None:
    alone: list[str] = []
    disk, _, publisher = publishers("global_step20")
    publisher(Watched(disk, lambda verb, args: alone.append(verb)))
    link = alone.index("link")
    manifest = alone.index("write_new")
    for at in range(link - manifest + 4):
        disk, said, publisher = publishers("global_step20")

        def overtaking(storage: Any, publisher: Callable[[Any], None] = publisher) -> None:
            publisher(storage)
            for _ in range(150):  # it stays on stage until the power is cut
                storage.free_bytes("/")

        # Both decide to publish; the second comes between the links of the first and their sync.
        order = Script((1, manifest), (0, link), (1, at), (0, 2), (1, 150))
        take_turns(disk, [publisher, overtaking], order, kill_at=manifest + link + at + 2 + 140)
        for seed in range(6):
            check(disk.crash(random.Random(seed).randrange), "/root", said)


def test_a_publisher_that_was_overtaken_while_it_clears_old_names_removes_the_last_name_of_no_file() -> None:
    for at in range(8, 50):  # after 8 operations a saver has its tombstone and is about to write its manifest
        disk, said, publisher = publishers("global_step10")
        take_turns(disk, [publisher] * 3, Script((0, 8), (2, 8), (1, at), (2, 500), (0, 500)))
        check(disk, "/root", said)
        check_recovered(disk, "/root", said)


def test_savers_that_publish_at_once_end_with_every_file_under_its_plain_name() -> None:
    for seed, (count, tag) in itertools.product(range(25), [(2, "global_step20"), (3, "global_step10")]):
        disk = ModelDisk()
        said = prepare(disk, "/root")
        take_turns(disk, savers(count, tag, said), random.Random(seed))
        check(disk, "/root", said)
        newest = listing.list_committed(disk, "/root").committed[0]
        assert newest.manifest.attempt == attempt_of(2, tag)
        for entry in newest.manifest.files():
            plain = f"/root/{entry.name}" if entry.origin == "tool" else f"/root/{tag}/{entry.name}"
            assert disk.size(plain) is not None
        assert disk.size("/root/global_step10/other.pt") is None


def test_a_reader_during_a_re_save_gets_the_old_bytes_the_new_bytes_or_not_found() -> None:
    for seed in range(40):
        disk = ModelDisk()
        said = prepare(disk, "/root")
        seen: list[str] = []

        def read(storage: Any, seen: list[str] = seen) -> None:
            for _ in range(6):
                one = listing.list_committed(storage, "/root").committed[-1]
                try:
                    for entry in one.manifest.files():
                        if entry.origin != "tool":
                            buffer = bytearray(entry.nbytes)
                            listing.read_verified(storage, one, entry, buffer)
                            assert buffer.startswith(one.manifest.attempt.id.encode())
                    seen.append(one.manifest.attempt.id)
                except NotFound:
                    seen.append("again")

        def write(storage: Any, said: Said = said) -> None:
            re_save(storage, "/root", said)

        take_turns(disk, [read, write], random.Random(seed))
        assert len(seen) == 6


def test_deleters_at_once_never_remove_the_last_checkpoint() -> None:
    for seed in range(60):
        disk = ModelDisk()
        said = prepare(disk, "/root")
        for seq in (2, 3, 4):
            save(disk, "/root", attempt_of(seq, f"global_step{seq}0"), said)
        draw = random.Random(seed)
        jobs = [lambda storage, keep=keep: retain(storage, "/root", keep) for keep in (1, 2, 1)]
        take_turns(disk, jobs, draw, kill_at=draw.choice([-1, draw.randrange(120)]))
        left = disk.crash(draw.randrange)
        check(left, "/root", said)
        check_recovered(left, "/root", said)
