"""A root is what lies in it: damage is told, foreign things are left alone, every byte is checked before it counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from disk_model import ROOT_ID, attempt_of, claim_of, publish, recover, write_node

from ckpt_engine import commit, listing, runs
from ckpt_engine.errors import Corrupt, NotFound, StorageError
from ckpt_engine.storage import PosixStorage

disk = PosixStorage()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    runs.adopt_root_id(disk, str(tmp_path), ROOT_ID)
    runs.claim_run(disk, str(tmp_path), claim_of(1))
    for seq in (1, 2, 3):
        write_node(disk, str(tmp_path), attempt_of(seq, f"tag{seq}"), {0: ("x.pt", "sub/y.pt"), 1: ("tool.py",)})
        publish(disk, str(tmp_path), attempt_of(seq, f"tag{seq}"))
    return tmp_path


def tags(root: Path) -> list[str]:
    return [one.manifest.attempt.tag for one in listing.list_committed(disk, str(root)).committed]


def test_the_newest_comes_first_whatever_clocks_and_names_say(root: Path) -> None:
    for seq in (1, 2, 3):
        os.utime(root / f"tag{seq}", (2_000_000_000 - seq, 2_000_000_000 - seq))
    assert tags(root) == ["tag3", "tag2", "tag1"]


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "pipe", "directory", "huge", "link loop"])
def test_a_damaged_manifest_is_told_and_hides_nothing_else(
    root: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "tag3" / "MANIFEST.json"
    data = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(listing, "MAX_RECORD_BYTES", 10_000)
    make = {
        "empty": lambda: path.touch(),
        "cut": lambda: path.write_bytes(data[: len(data) // 2]),
        "bit": lambda: path.write_bytes(data.replace(b'"step":30', b'"step":31')),
        "pipe": lambda: os.mkfifo(path),
        "directory": lambda: path.mkdir(),
        "huge": lambda: path.write_bytes(data * 100),
        "link loop": lambda: path.symlink_to(path),
    }
    make[damage]()
    found = listing.list_committed(disk, str(root))
    assert [one.manifest.attempt.tag for one in found.committed] == ["tag2", "tag1"]
    assert len(found.damaged) == 1 and str(path) in str(found.damaged[0])


def test_a_missing_root_holds_nothing(tmp_path: Path) -> None:
    assert listing.list_committed(disk, str(tmp_path / "no")) == listing.Listing((), ())
    assert (
        listing.unmanaged(disk, str(tmp_path / "no")) == ()
        and listing.highest_generation(disk, str(tmp_path / "no")) == 0
    )


def test_plain_checkpoints_of_others_are_seen_and_our_unfinished_ones_are_not_taken_for_them(root: Path) -> None:
    (root / "global_step7").mkdir()
    (root / "global_step7" / "mp_rank_00_model_states.pt").touch()
    (root / "empty").mkdir()
    (root / "file").touch()
    write_node(disk, str(root), attempt_of(4, "unfinished"), {0: ("x.pt",)}, nodes=2)
    assert listing.unmanaged(disk, str(root)) == ("global_step7",)
    recover(disk, str(root))
    assert (root / "global_step7" / "mp_rank_00_model_states.pt").exists()


def test_a_copied_renamed_or_linked_checkpoint_loads_and_its_own_directory_comes_first(root: Path) -> None:
    shutil.copytree(root / "tag2", root / "aaa")
    (root / "last").symlink_to("tag3")
    (root / "loop").symlink_to("loop")
    (root / "self").symlink_to(".")
    found = listing.list_committed(disk, str(root)).committed
    assert [os.path.basename(one.commit_dir) for one in found] == ["tag3", "last", "tag2", "aaa", "tag1"]
    assert all(listing.verify(disk, one) == () for one in found)
    shutil.move(root / "tag1", root.parent / "elsewhere-tag1")


@pytest.mark.parametrize("name", ["x.pt", "sub/y.pt"])
def test_a_flipped_byte_a_cut_and_a_missing_file_are_found_before_they_count(root: Path, name: str) -> None:
    newest = listing.list_committed(disk, str(root)).committed[0]
    entry = next(entry for entry in newest.manifest.files() if entry.name == name)
    path = root / "tag3" / name
    data = path.read_bytes()
    for spoiled in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"x", None):
        path.unlink()
        if spoiled is not None:
            path.write_bytes(spoiled)
        with pytest.raises(Corrupt) as caught:
            listing.read_verified(disk, newest, entry, bytearray(entry.nbytes))
        assert caught.value.path == str(path)
        [wrong] = listing.verify(disk, newest)
        assert wrong.path == str(path)
        path.write_bytes(data)
    assert listing.verify(disk, newest) == ()


def test_a_file_is_read_below_its_attempt_first_then_under_its_plain_name(root: Path) -> None:
    newest = listing.list_committed(disk, str(root)).committed[0]
    entry = next(newest.manifest.files())
    buffer = bytearray(entry.nbytes + 4)
    assert listing.read_verified(disk, newest, entry, buffer, offset=4) == str(root / "tag3" / "x.pt")
    assert buffer[4:] == (root / "tag3" / "x.pt").read_bytes()
    copy = commit.attempt_path(str(root), newest.manifest.attempt, "x.pt")
    shutil.move(root / "tag3" / "x.pt", copy)
    assert listing.open_path(disk, newest, entry) == copy
    Path(copy).write_bytes(b"damaged")
    (root / "tag3" / "x.pt").write_bytes(buffer[4:])
    assert listing.read_verified(disk, newest, entry, buffer) == str(root / "tag3" / "x.pt")


def test_a_checkpoint_removed_while_it_is_read_is_not_found_instead_of_corrupt(root: Path) -> None:
    newest = listing.list_committed(disk, str(root)).committed[0]
    shutil.rmtree(root / "tag3")
    for entry in newest.manifest.files():
        with pytest.raises(NotFound):
            listing.read_verified(disk, newest, entry, bytearray(entry.nbytes))
    with pytest.raises(NotFound):
        listing.verify(disk, newest)


def test_the_highest_generation_counts_every_trace_even_a_damaged_one(root: Path) -> None:
    assert listing.highest_generation(disk, str(root)) == 1
    for generation, trace in [(3, ".run-3"), (4, ".offer-4-node0")]:
        (root / trace).touch()
        assert listing.highest_generation(disk, str(root)) == generation
    (root / "tag1" / f".attempt-g7-{'0' * 16}-q1").mkdir()
    assert listing.highest_generation(disk, str(root)) == 7
    write_node(disk, str(root), attempt_of(1, "ahead", 9), {0: (), 1: ()})
    publish(disk, str(root), attempt_of(1, "ahead", 9))
    shutil.rmtree(commit.attempt_path(str(root), attempt_of(1, "ahead", 9)))
    assert listing.highest_generation(disk, str(root)) == 9


def test_an_unreadable_root_is_an_error_and_not_an_empty_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(116, "stale")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StorageError):
        listing.list_committed(disk, str(root))
