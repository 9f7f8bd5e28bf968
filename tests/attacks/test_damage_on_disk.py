"""Whatever happens to whatever file of a root: it is found before use and named, an older checkpoint serves, and the
next saver does its work. No damage of one thing spreads to another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.hostile import TOKEN, Root, envelope, restored, served
from disk_model import attempt_of, claim_of

from ckpt_engine import commit, listing, runs, settle, sweep
from ckpt_engine.config import SaverOptions
from ckpt_engine.errors import ConfigError, Corrupt, StaleRun, StorageError
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, Manifest
from ckpt_engine.retention import Retention
from ckpt_engine.saver.ledger import Ledger
from ckpt_engine.storage import PosixStorage

disk = PosixStorage()


def ledger() -> Ledger:
    return Ledger(disk, SaverOptions(), lambda: ())


def header_of(root: Root, attempt: Attempt, tag: str) -> Header:
    folder = str(root.path / tag)
    policy = Retention()
    return Header(attempt, claim_of(1), 0, 0, 1, 0, 1, (0,), "shared", str(root.path), folder, policy, None, True, ())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def sparse(path: Path) -> None:
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 30)


def link_outside(path: Path) -> None:
    path.symlink_to(next(folder for folder in path.parents if (folder / "outside").is_dir()) / "outside" / "precious")


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.unlink()
        make(path)

    return act


HARM: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "zeroed": zero,
    "truncated": truncate,
    "emptied": lambda path: os.truncate(path, 0),
    "grown": grow,
    "1 GiB of nothing": sparse,
    "removed": lambda path: path.unlink(),
    "a directory": replaced(lambda path: path.mkdir()),
    "a pipe": replaced(os.mkfifo),
    "/dev/zero": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link loop": replaced(lambda path: path.symlink_to(path)),
    "a dangling link": replaced(lambda path: path.symlink_to("nowhere")),
    "a link to a precious file": replaced(link_outside),
}
USED = ("data file", "data file in a subdirectory", "manifest")
KINDS = (*USED, "shard record", "receipt", "latest", "root id", "run claim", "offer", "lease", "tombstone")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", HARM)
def test_damage_is_named_before_use_an_older_checkpoint_serves_and_the_next_save_works(
    root: Root, harm: str, kind: str
) -> None:
    path = root.one_of_each()[kind]
    HARM[harm](path)
    absent = harm in ("removed", "a dangling link")
    if kind == "root id" and not absent:
        with pytest.raises((Corrupt, StorageError)) as caught:
            restored(root.path)
        assert str(path) in str(caught.value)
    else:
        step, skipped = restored(root.path)
        assert step == (20 if kind in USED else 30)
        if kind in USED and not (kind == "manifest" and absent):
            assert any(path.name in reason for reason in skipped), skipped
    served(root.path)
    assert root.untouched_outside()
    assert listing.read_manifest(disk, str(root.path / "tag5")) is not None, "the new save did not become a checkpoint"
    assert kind == "root id" or restored(root.path)[0] == 50


@pytest.mark.parametrize("harm", ["flipped", "a directory", "a pipe", "/dev/zero", "a link loop", "removed"])
def test_latest_is_written_anew_whatever_lay_there(root: Root, harm: str) -> None:
    HARM[harm](root.path / "latest")
    served(root.path)
    if harm == "a directory":  # nothing of ours: it is told and stays
        assert isinstance(settle.roll_forward(disk, str(root.path), "tag5")[0], StorageError)
    else:
        assert not (root.path / "latest").is_symlink() and (root.path / "latest").read_text() == "tag5"


def test_files_of_two_ranks_swapped_under_their_names_are_both_told(root: Root) -> None:
    one, other = root.path / "tag3" / "a.pt", root.path / "tag3" / "sub" / "b.pt"
    swapped = one.read_bytes(), other.read_bytes()
    one.write_bytes(swapped[1])
    other.write_bytes(swapped[0])
    (committed, *_) = listing.list_committed(disk, str(root.path)).committed
    assert {os.path.basename(damage.path) for damage in listing.verify(disk, committed)} == {"a.pt", "b.pt"}
    assert restored(root.path)[0] == 20


def test_a_file_of_an_older_checkpoint_in_place_of_the_newer_is_told(root: Root) -> None:
    shutil.copy(root.path / "tag2" / "a.pt", root.path / "tag3" / "a.pt")
    step, skipped = restored(root.path)
    assert step == 20 and "a.pt" in skipped[0]


def test_manifests_swapped_between_tags_serve_nothing_wrong(root: Root) -> None:
    three, two = root.manifest(3).read_bytes(), root.manifest(2).read_bytes()
    root.manifest(3).write_bytes(two)
    root.manifest(2).write_bytes(three)
    step, skipped = restored(root.path)
    assert step == 10 and len(skipped) == 2
    served(root.path)
    assert restored(root.path)[0] == 50 and root.untouched_outside()


def test_a_shard_record_or_receipt_of_another_attempt_does_not_count(root: Root) -> None:
    attempt, other = attempt_of(4, "tag4"), attempt_of(6, "tag6")
    folder = root.path / "tag4" / f".attempt-{attempt.id}"
    moved = root.path / "tag6" / f".attempt-{other.id}"
    shutil.copytree(folder, moved)
    assert commit.read_shard_records(disk, str(root.path), other, [0]) == ()
    (found,) = commit.read_receipts(disk, str(root.path), other, [0]).values()
    assert "another attempt" in found.reason  # type: ignore[union-attr]
    records = [record.attempt for _, record in ledger().unpublished([header_of(root, other, "tag6")])]
    assert records == [attempt], "a restarted saver counts what was moved"


def test_a_tombstone_under_another_attempts_name_removes_nothing(root: Root) -> None:
    (grave,) = (root.path / "tag2").glob(".removed-*")
    current = root.manifest(3).read_bytes()
    planted = root.path / "tag3" / f".removed-{attempt_of(0, 'tag3').id}.json"
    planted.write_bytes(current)
    root.manifest(3).unlink()  # nothing is committed here: a tombstone would clear its files
    sweep.sweep(disk, str(root.path), node=0, live=(), sweep_after_s=1e9, age_of=lambda path: 1.0)
    assert (root.path / "tag3" / "a.pt").exists() and planted.exists()
    assert not grave.exists()


def test_a_damaged_manifest_does_not_keep_its_tag_from_being_saved_anew(root: Root) -> None:
    flip(root.manifest(3))
    header = header_of(root, attempt_of(5, "tag3"), "tag3")
    assert not ledger().is_published(header)
    assert list(ledger().unpublished([header])), "shard records elsewhere were not found"


@pytest.mark.parametrize("harm", ["flipped", "a directory", "a pipe", "a link loop"])
def test_a_damaged_run_claim_is_a_stale_run_for_its_owner_and_no_crash(root: Root, harm: str) -> None:
    HARM[harm](root.path / ".run-1")
    with pytest.raises((StaleRun, StorageError)) as caught:
        runs.claim_run(disk, str(root.path), claim_of(1))
    assert ".run-1" in str(caught.value)


@pytest.mark.parametrize("harm", ["flipped", "emptied", "a directory", "a pipe", "1 GiB of nothing", "/dev/zero"])
def test_a_damaged_lease_protects_until_it_is_stale_and_no_longer(root: Root, harm: str) -> None:
    HARM[harm](root.path / f".reading-{TOKEN}")
    watch = runs.LeaseWatch()
    assert "" in watch.tags(disk, str(root.path), 0.0)
    assert watch.tags(disk, str(root.path), runs.LEASE_STALE_S + 1) == frozenset()


def test_numbers_no_run_can_follow_are_refused_at_the_start_with_the_name_to_remove(root: Root) -> None:
    from ckpt_engine.agreement import agree_on_run
    from ckpt_engine.group import Alone, Place

    for number in (2**63 - 1, 10**19 - 1):
        path = root.path / f".run-{number}"
        path.touch()
        with pytest.raises(ConfigError, match=rf"remove \.run-{number}"):
            agree_on_run(disk, Alone(), Place(0, 1, 0, 0, ((0,),)), str(root.path), "shared", (), None)
        path.unlink()


def test_what_mkfs_left_in_a_root_is_no_damage(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.path / "lost+found").mkdir(mode=0)
    plain = PosixStorage.list_dir

    def refusing(self: PosixStorage, path: str) -> tuple[listing.Entry, ...]:  # type: ignore[name-defined]
        assert not path.endswith("lost+found")
        return plain(self, path)

    monkeypatch.setattr(PosixStorage, "list_dir", refusing)
    assert listing.list_committed(disk, str(root.path)).damaged == ()
    assert listing.highest_generation(disk, str(root.path)) == 1


def test_each_flipped_field_of_a_manifest_with_a_right_checksum_is_refused_or_read_as_it_says(root: Root) -> None:
    """A forger can say anything that is consistent; what no saver would say is Corrupt, and nothing else is raised."""
    body = listing.read_manifest(disk, str(root.path / "tag3")).to_dict()  # type: ignore[union-attr]
    wrong = (None, -1, 2**63, 2**64, True, 1.5, "", "..", "x\0y", "\udcff", [], {}, [[]], {"a": 1}, "x" * 5000)
    refused = 0
    for field in body:
        for value in wrong:
            data = envelope({**body, field: value})
            try:
                assert isinstance(Manifest.from_bytes(data, "p"), Manifest)
            except Corrupt:
                refused += 1
    for part in ("attempt", "shards"):
        inner = body[part] if part == "attempt" else body[part][0]
        for field in inner:
            for value in wrong:
                changed = {**inner, field: value}
                data = envelope({**body, part: changed if part == "attempt" else [changed]})
                try:
                    assert isinstance(Manifest.from_bytes(data, "p"), Manifest)
                except Corrupt:
                    refused += 1
    assert refused > 180


def test_a_manifest_that_names_bytes_of_others_serves_nothing(root: Root) -> None:
    """Well-formed lies: sizes of 2^63-1 and of what no memory holds, a file that is a link to a device."""
    body = listing.read_manifest(disk, str(root.path / "tag3")).to_dict()  # type: ignore[union-attr]
    for nbytes in (2**63 - 1, 1 << 50, 1 << 40):
        body["shards"][0]["files"][0]["nbytes"] = nbytes
        root.manifest(3).write_bytes(envelope(body))
        assert restored(root.path)[0] == 20
    (root.path / "tag3" / "a.pt").unlink()
    (root.path / "tag3" / "a.pt").symlink_to("/dev/zero")
    body["shards"][0]["files"][0]["nbytes"] = 4096
    root.manifest(3).write_bytes(envelope(body))
    assert restored(root.path)[0] == 20
