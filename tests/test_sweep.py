"""What is removed was ours, was superseded, and was in nobody's hands; what is not known stays."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_model import (
    ROOT_ID,
    RUN,
    Watched,
    attempt_of,
    claim_of,
    paths,
    publish,
    recover,
    refuse,
    retain,
    take_turns,
    write_node,
    write_shard,
)

from ckpt_engine import commit, disk_names, listing, runs, sweep
from ckpt_engine.errors import StorageError
from ckpt_engine.manifest import Attempt, Committed, Failure, Lease, Offer, Receipt
from ckpt_engine.storage import Entry, PosixStorage

disk = PosixStorage()
SAVED = {0: ("x.pt", "sub/y.pt"), 1: ("z.pt",)}


@pytest.fixture
def root(tmp_path: Path) -> str:
    root = str(tmp_path / "root")
    runs.adopt_root_id(disk, root, ROOT_ID)
    runs.claim_run(disk, root, claim_of(1))
    for seq in (1, 2):
        save(root, attempt_of(seq, f"tag{seq}"))
    return root


def save(root: str, attempt: Attempt, files: dict[int, tuple[str, ...]] = SAVED) -> None:
    write_node(disk, root, attempt, files)
    assert isinstance(publish(disk, root, attempt), commit.Published)


def tidy(root: str, *, node: int = 0, live: Iterable[str] = (), age_s: float = 0.0) -> set[str]:
    gone = sweep.sweep(disk, root, node=node, live=list(live), sweep_after_s=10.0, age_of=lambda path: age_s)
    return {os.path.relpath(path, root) for path in gone}


def newest(root: str) -> Committed:
    return listing.list_committed(disk, root).committed[0]


def folder_of(attempt: Attempt, node: int | None = None) -> str:
    return os.path.relpath(commit.attempt_path("/", attempt, node=node), "/")


def test_removal_takes_the_manifest_first_then_the_files_and_keeps_foreign_ones(root: str) -> None:
    Path(root, "tag2", "notes.txt").touch()
    order: list[tuple[str, str]] = []
    watched = Watched(disk, lambda verb, args: order.append((verb, os.path.basename(args[0]))))
    assert sweep.remove_checkpoint(watched, newest(root)) == sweep.Removal(True, ("notes.txt",))
    changes = [one for one in order if one[0] in ("rename", "unlink", "sync_dir")]
    assert changes[:2] == [("rename", "MANIFEST.json"), ("sync_dir", "tag2")]
    assert [entry.name for entry in disk.list_dir(f"{root}/tag2")] == ["notes.txt"]
    assert sweep.remove_checkpoint(disk, newest(root)) == sweep.Removal(True)
    assert not os.path.exists(f"{root}/tag1")


def test_removal_is_idempotent_and_tolerates_open_files_and_busy_ones(root: str) -> None:
    busy = {"left": 3}

    def sometimes(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "unlink" and args[0].endswith("y.pt") and busy["left"]:
            busy["left"] -= 1
            raise refuse("unlink", args[0], errno.EBUSY)

    victim = newest(root)
    with open(f"{root}/tag2/x.pt", "rb"):
        for _ in range(3):
            removed = sweep.remove_checkpoint(Watched(disk, sometimes), victim)
            assert not removed.done and newest(root).manifest.attempt.tag == "tag1"
        assert sweep.remove_checkpoint(Watched(disk, sometimes), victim).done
    assert sweep.remove_checkpoint(disk, victim).done and not os.path.exists(f"{root}/tag2")


def test_a_removal_that_was_interrupted_is_followed_up_by_the_sweep(root: str) -> None:
    victim = newest(root)

    def die(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "unlink":
            raise refuse("unlink", args[0], errno.EIO)

    assert not sweep.remove_checkpoint(Watched(disk, die), victim).done
    assert listing.unmanaged(disk, root) == () and newest(root).manifest.attempt.tag == "tag1"
    assert f"tag2/{disk_names.tombstone(victim.manifest.attempt.id)}" in tidy(root)
    assert not os.path.exists(f"{root}/tag2")


def test_a_tag_that_is_being_saved_again_is_not_removed(root: str) -> None:
    victim = newest(root)
    write_shard(disk, root, attempt_of(3, "tag2"), 0, ("x.pt",))
    assert not sweep.remove_checkpoint(disk, victim).done
    assert newest(root) == victim and listing.verify(disk, victim) == ()


def test_a_tag_that_was_saved_again_since_it_was_listed_is_not_removed(root: str) -> None:
    stale = newest(root)
    save(root, attempt_of(3, "tag2"))
    assert not sweep.remove_checkpoint(disk, stale).done
    assert newest(root).order == (1, 3) and listing.verify(disk, newest(root)) == ()


def test_a_checkpoint_saved_again_while_it_is_removed_loses_no_file(root: str) -> None:
    for seed in range(10):
        fresh = f"{root}{seed}"
        runs.adopt_root_id(disk, fresh, ROOT_ID)
        runs.claim_run(disk, fresh, claim_of(1))
        for seq in (1, 2):
            save(fresh, attempt_of(seq, f"tag{seq}"))
        again = attempt_of(3, "tag1")
        write_node(disk, fresh, again, SAVED)  # its receipts are there; the deleter has an old listing
        victim = listing.list_committed(disk, fresh).committed[1]

        def old_view(path: str, again: Attempt = again) -> tuple[Entry, ...]:
            return tuple(entry for entry in disk.list_dir(path) if again.id not in entry.name)

        def remove(turns: Any, victim: Committed = victim, old_view: Any = old_view) -> None:
            turns.list_dir = old_view
            sweep.remove_checkpoint(turns, victim)

        take_turns(disk, [remove, lambda turns, r=fresh, a=again: publish(turns, r, a)], random.Random(seed))
        recover(disk, fresh)
        for one in listing.list_committed(disk, fresh).committed:
            assert listing.verify(disk, one) == ()
        assert newest(fresh).order == (1, 3)


def test_a_removal_stops_at_a_new_manifest_and_leaves_the_new_names(root: str) -> None:
    again, victim = attempt_of(3, "tag2"), newest(root)

    def meanwhile(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "size" and args[0].endswith("MANIFEST.json") and not os.path.exists(args[0]):
            save(root, again)

    assert not sweep.remove_checkpoint(Watched(disk, meanwhile), victim).done
    assert newest(root).manifest.attempt == again
    assert all(os.path.exists(f"{root}/tag2/{name}") for name in ("x.pt", "sub/y.pt", "z.pt"))


def test_external_files_go_with_their_checkpoint_and_tools_never(root: str) -> None:
    commit.make_tag_dir(disk, root, "tag3")
    Path(root, "tag3", "config.json").touch()
    save(root, attempt_of(3, "tag3"), {0: ("ext:config.json", "tool.py"), 1: ()})
    assert sweep.remove_checkpoint(disk, newest(root)).done
    assert not os.path.exists(f"{root}/tag3") and os.path.exists(f"{root}/tool.py")


def test_the_records_of_a_committed_attempt_go_and_its_files_stay(root: str) -> None:
    assert tidy(root) == {folder_of(attempt_of(1, "tag1")), folder_of(attempt_of(2, "tag2"))}
    assert all(listing.verify(disk, one) == () for one in listing.list_committed(disk, root).committed)
    assert tidy(root) == set()


def test_the_sweep_finishes_a_publish_that_died_after_its_manifest(root: str) -> None:
    attempt = attempt_of(3, "tag3")
    write_node(disk, root, attempt, SAVED)

    def die(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "link":
            raise refuse("link", args[1], errno.EIO)

    assert isinstance(publish(Watched(disk, die), root, attempt), commit.Published)
    assert os.listdir(f"{root}/tag3") != [] and not os.path.exists(f"{root}/tag3/x.pt")
    tidy(root)
    assert all(os.path.exists(f"{root}/tag3/{name}") for name in ("x.pt", "sub/y.pt", "z.pt"))
    assert Path(root, "latest").read_text() == "tag3"


def test_an_attempt_directory_that_a_manifest_still_reads_from_stays_for_ever(root: str) -> None:
    save(root, attempt_of(3, "tag2"))
    save(root, attempt_of(4, "tag4"))
    tidy(root, age_s=99.0)
    assert os.path.exists(commit.attempt_path(root, attempt_of(3, "tag2"), "x.pt"))
    assert all(listing.verify(disk, one) == () for one in listing.list_committed(disk, root).committed)


def test_an_unfinished_attempt_goes_only_when_a_later_one_is_committed_it_is_old_and_no_slot_holds_it(
    root: str,
) -> None:
    tidy(root)
    dead, coming = attempt_of(3, "dead"), attempt_of(9, "coming")
    write_shard(disk, root, dead, 0, ("x.pt",))
    write_shard(disk, root, coming, 0, ("x.pt",))
    assert tidy(root, age_s=99.0) == set()
    save(root, attempt_of(5, "tag5"))
    committed = {folder_of(attempt_of(5, "tag5"))}
    assert tidy(root, live=[dead.id], age_s=99.0) == committed
    assert tidy(root, age_s=9.0) == set()
    assert tidy(root, age_s=10.0) == {folder_of(dead)}
    assert not os.path.exists(f"{root}/dead") and os.path.exists(commit.attempt_path(root, coming, "x.pt"))


def test_a_checkpoint_of_another_root_supersedes_no_leftovers(root: str) -> None:
    offer = f"{root}/{disk_names.offer(1, 0)}"
    Path(offer).touch()
    write_shard(disk, root, attempt_of(3, "tag3"), 0, ("x.pt",))
    save(root, replace(attempt_of(1, "copied", generation=9, run="f" * 16), root_id="f" * 16))
    tidy(root, age_s=100.0)
    assert os.path.exists(offer) and os.path.exists(f"{root}/{folder_of(attempt_of(3, 'tag3'))}")


def test_node_local_leftovers_of_this_node_go_at_once_unless_it_made_a_receipt(root: str) -> None:
    tidy(root)
    for seq, node in [(3, 0), (4, 1), (5, 0)]:
        write_shard(disk, root, attempt_of(seq, "t"), node, ("x.pt",), node=node, nodes=2, layout="node-local")
    receipt = Receipt(attempt_of(5, "t"), 0, 2, 2, "node-local", (), Failure(0, "no"))
    commit.write_receipt(disk, root, receipt)
    save(root, attempt_of(6, "tag6"))
    assert tidy(root) == {folder_of(attempt_of(6, "tag6")), folder_of(attempt_of(3, "t"), 0)}
    assert tidy(root, age_s=10.0) == {folder_of(attempt_of(4, "t"), 1), folder_of(attempt_of(5, "t"), 0)}


def test_old_temps_leases_and_offers_go_and_young_ones_stay(root: str) -> None:
    tidy(root)
    names = [disk_names.temp(), f"tag1/{disk_names.temp()}", disk_names.lease("0" * 16), disk_names.offer(1, 1)]
    for name in names[:2]:
        Path(root, name).touch()
    runs.write_lease(disk, root, Lease("0" * 16, "tag1", 1))
    for node in (0, 1):
        runs.write_offer(disk, root, Offer(1, RUN, node, ()))
    assert tidy(root) == set() and tidy(root, age_s=99.0) == set(names[:3])
    runs.claim_run(disk, root, claim_of(2, attempt_of(2, "tag2"), "1" * 16))
    save(root, attempt_of(0, "new", 2, "1" * 16))
    assert tidy(root) >= {disk_names.offer(1, 0)} and tidy(root, age_s=99.0) == {disk_names.offer(1, 1)}


def test_names_that_are_not_ours_and_tags_with_a_damaged_manifest_are_never_touched(root: str) -> None:
    foreign = [".attempt-1", ".tmp-x", ".reading-me", "a/MANIFEST.json.bak", ".runs", "a/.shard", ".removed", "latest~"]
    for name in foreign:
        Path(root, name).parent.mkdir(exist_ok=True)
        Path(root, name).touch()
    Path(root, "tag1", "MANIFEST.json").write_bytes(b"{")
    save(root, attempt_of(3, "tag3"))
    before = set(paths(disk, f"{root}/tag1"))
    assert tidy(root, age_s=99.0) == {folder_of(attempt_of(2, "tag2")), folder_of(attempt_of(3, "tag3"))}
    assert all(Path(root, name).exists() for name in foreign) and set(paths(disk, f"{root}/tag1")) == before


def test_trouble_in_one_directory_does_not_keep_the_sweep_from_the_others(root: str) -> None:
    def fail(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "unlink" and "/tag1/" in args[0]:
            raise refuse("unlink", args[0], errno.EACCES)

    gone = sweep.sweep(Watched(disk, fail), root, node=0, live=(), sweep_after_s=0, age_of=lambda path: 1.0)
    assert [os.path.relpath(path, root) for path in gone] == [folder_of(attempt_of(2, "tag2"))]


def test_many_retentions_in_a_row_keep_one_checkpoint_and_no_leftover(root: str) -> None:
    for seq in range(3, 16):
        save(root, attempt_of(seq, f"tag{seq}"))
        retain(disk, root, 1)
        tidy(root)
    assert sorted(os.listdir(root)) == [".ckpt-root", ".run-1", "latest", "tag15"]
    assert sorted(os.listdir(f"{root}/tag15")) == ["MANIFEST.json", "sub", "x.pt", "z.pt"]


def test_an_unreadable_root_is_not_swept(root: str) -> None:
    def fail(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "list_dir":
            raise refuse("list", args[0], errno.ESTALE)

    with pytest.raises(StorageError):
        sweep.sweep(Watched(disk, fail), root, node=0, live=(), sweep_after_s=0, age_of=lambda path: 1.0)
