"""Nothing counts before its manifest; the manifest says what the receipts say; publishing twice is publishing once."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_model import (
    ROOT_ID,
    Dying,
    ModelDisk,
    Watched,
    attempt_of,
    authors,
    claim_of,
    content,
    paths,
    publish,
    recover,
    refuse,
    write_node,
    write_shard,
)

from ckpt_engine import commit, disk_names, listing, runs, settle
from ckpt_engine.errors import Cancelled, PersistError, StorageError
from ckpt_engine.handles import Destination
from ckpt_engine.manifest import Failure, FileEntry, Receipt, ShardRecord
from ckpt_engine.storage import PosixStorage

A, B = attempt_of(1, "one"), attempt_of(2, "two")


@pytest.fixture(params=["model", "real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    disk: Any = ModelDisk() if request.param == "model" else PosixStorage()
    root = "/root" if request.param == "model" else str(tmp_path / "root")
    runs.adopt_root_id(disk, root, ROOT_ID)
    runs.claim_run(disk, root, claim_of(1))
    return disk, root


def plain(disk: Any, folder: str) -> dict[str, bytes]:
    found = {os.path.relpath(path, folder): disk.read_small(path, 1 << 20) for path in paths(disk, folder)}
    return {name: data for name, data in found.items() if not name.startswith((".", "MANIFEST"))}


def test_a_checkpoint_waits_for_every_rank_and_then_lies_under_plain_names(place: tuple[Any, str]) -> None:
    disk, root = place
    assert publish(disk, f"{root}", A, nodes=2) == commit.Waiting((0, 1), (0, 1))
    write_node(disk, root, A, {0: ("model_states.pt", "a/b/x.pt", "tool.py")}, node=0, nodes=2)
    assert publish(disk, root, A, nodes=2) == commit.Waiting((1,), (1,))
    assert listing.list_committed(disk, root).committed == () and plain(disk, f"{root}/one") == {}
    write_node(disk, root, A, {1: ()}, node=1, nodes=2)
    done = publish(disk, root, A, nodes=2)
    assert isinstance(done, commit.Published) and done.trouble is None
    assert publish(disk, root, A, nodes=2) == done
    assert plain(disk, f"{root}/one") == {name: content(A, name) for name in ("model_states.pt", "a/b/x.pt")}
    assert disk.read_small(f"{root}/tool.py", 99) == content(A, "tool.py")
    assert disk.read_small(f"{root}/latest", 99) == b"one"


def test_the_order_of_a_save_is_files_record_receipt_manifest_names_latest(place: tuple[Any, str]) -> None:
    disk, root = place
    watched = Dying(disk, -1)
    write_node(watched, root, A, {0: ("m_model_states.pt", "x.pt"), 1: ()})
    publish(watched, root, A)
    last_names = [os.path.basename(args[-1]) for verb, args in watched.changes if verb in ("rename", "link")]
    assert last_names == [
        "m_model_states.pt", "x.pt", ".shard-00000.json", ".shard-00001.json", ".receipt-node0000.json",
        "MANIFEST.json", "x.pt", "m_model_states.pt", "latest",
    ]  # fmt: skip
    for index, (verb, args) in enumerate(watched.changes):
        if verb == "rename":
            assert watched.changes[index - 1][0] == "write_new"
            later = watched.changes[index + 1 :]
            synced = later.index(("sync_dir", (os.path.dirname(args[1]),)))
            if args[1].endswith(".pt"):  # all files of a rank together, before its record
                assert synced < next(i for i, (verb, to) in enumerate(later) if verb == "rename" and ".shard-" in to[1])
            else:
                assert synced == 0


def test_a_failed_rank_fails_the_attempt_for_everyone_and_leaves_the_older_checkpoint(place: tuple[Any, str]) -> None:
    disk, root = place
    write_node(disk, root, A, {0: ("x.pt",), 1: ()})
    publish(disk, root, A)
    failure = Failure(1, "disk full", "write", "/x", errno.ENOSPC, 10, 5)
    write_node(disk, root, B, {0: ("x.pt",)}, node=0, nodes=2)
    commit.write_receipt(disk, root, Receipt(B, 1, 2, 2, "shared", (), failure))
    assert publish(disk, root, B, nodes=2) == commit.Failed(failure)
    [one] = listing.list_committed(disk, root).committed
    assert one.manifest.attempt == A and listing.verify(disk, one) == ()


def test_what_is_there_of_a_part_can_be_dropped_until_its_record_is(place: tuple[Any, str]) -> None:
    disk, root = place
    names = ("a.pt", "sub/b.pt", "c.pt")
    write_shard(disk, root, A, 0, names, world=1)
    folder = commit.attempt_path(root, A)
    there = sorted(paths(disk, folder))
    commit.drop_unfinished(disk, root, A, 0, names)  # an earlier saver made it durable
    assert sorted(paths(disk, folder)) == there and len(there) == 4
    disk.unlink(f"{folder}/{disk_names.shard_record(0)}")
    disk.unlink(f"{folder}/c.pt")  # it never came to that one
    commit.drop_unfinished(disk, root, A, 0, names)
    commit.drop_unfinished(disk, root, B, 0, names)  # nor to its directory
    assert not list(paths(disk, folder))


def test_a_complete_receipt_is_never_replaced_by_a_failed_one_but_a_retry_replaces_a_failure(
    place: tuple[Any, str],
) -> None:
    disk, root = place
    write_node(disk, root, A, {0: ("x.pt",), 1: ()})
    failed = Receipt(A, 0, 1, 2, "shared", (), Failure(0, "late"))
    assert commit.write_receipt(disk, root, failed).failed is None
    assert isinstance(publish(disk, root, A), commit.Published)
    commit.make_tag_dir(disk, root, "two")
    commit.make_attempt_dir(disk, root, B)
    commit.write_receipt(disk, root, replace(failed, attempt=B))
    assert isinstance(publish(disk, root, B), commit.Failed)
    write_node(disk, root, B, {0: (), 1: ()})
    assert isinstance(publish(disk, root, B), commit.Published)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"attempt": attempt_of(9, "one")}, "another attempt"),
        ({"world": 3}, "contradict|not 2"),
        ({"node": 0, "rank": 1, "node_ranks": (1,)}, "another attempt or node"),
        ({"files": (FileEntry("x.pt", 1, 1),)}, "twice"),
        ({"resumed_from": attempt_of(0, "zero")}, "one attempt"),
    ],
)
def test_receipts_that_do_not_belong_together_fail_with_the_reason(other: dict[str, Any], reason: str) -> None:
    disk = ModelDisk()
    write_node(disk, "/root", A, {0: ("x.pt",)}, node=0, nodes=2)
    facts = {"attempt": A, "rank": 1, "world": 2, "node": 1, "nodes": 2, "node_ranks": (1,), "files": ()}
    path = commit.attempt_path("/root", A, ".receipt-node0001.json")
    disk.write_new(path, Receipt.of([ShardRecord(**{**facts, **other})]).to_bytes())
    outcome = publish(disk, "/root", A, nodes=2)
    assert isinstance(outcome, commit.Failed)
    assert re.search(reason, outcome.failure.reason)
    assert listing.list_committed(disk, "/root").committed == ()


def test_a_damaged_receipt_fails_and_a_damaged_shard_record_is_not_there() -> None:
    disk = ModelDisk()
    write_node(disk, "/root", A, {0: (), 1: ()})
    for name in (".receipt-node0000.json", ".shard-00001.json"):
        path = commit.attempt_path("/root", A, name)
        disk.unlink(path)
        disk.write_new(path, b"{}")
    assert isinstance(publish(disk, "/root", A), commit.Failed)
    assert [record.rank for record in commit.read_shard_records(disk, "/root", A, [0, 1, 2])] == [0]


def test_an_abandoned_attempt_and_one_behind_a_newer_one_are_refused(place: tuple[Any, str]) -> None:
    disk, root = place
    late = attempt_of(3, "late")
    write_node(disk, root, late, {0: ("x.pt",), 1: ()})
    runs.claim_run(disk, root, claim_of(2, A, "1" * 16))
    assert publish(disk, root, late) == commit.NotOnLine()
    newer = attempt_of(0, "late", 2, "1" * 16)
    write_node(disk, root, newer, {0: ("x.pt",), 1: ()})
    assert isinstance(publish(disk, root, newer), commit.Published)
    assert commit.try_publish(disk, root, late, nodes=1, world=2, runs=()) == commit.NotOnLine(newer)
    assert plain(disk, f"{root}/late") == {"x.pt": content(newer, "x.pt")}


def test_a_directory_removed_under_the_saver_is_cancelled_and_never_made_again(place: tuple[Any, str]) -> None:
    disk, root = place

    def gone(action: Any) -> None:
        write_node(disk, root, A, {0: ("x.pt",), 1: ()})
        for path in [*paths(disk, f"{root}/one")]:
            disk.unlink(path)
        disk.remove_dir(commit.attempt_path(root, A))
        disk.remove_dir(f"{root}/one")
        with pytest.raises(Cancelled, match="one"):
            action()
        assert disk.list_dir(f"{root}/one") == ()

    record = ShardRecord(A, 0, 1, 0, 1, (0,), ())
    gone(lambda: commit.make_attempt_dir(disk, root, A))
    gone(lambda: commit.write_shard_record(disk, root, record))
    gone(lambda: commit.write_receipt(disk, root, Receipt.of([record])))
    gone(lambda: commit.seal_external(disk, root, A, "x"))
    gone(lambda: commit._write_manifest(disk, root, commit.Manifest.of([Receipt.of([record])]), None))
    commit.make_tag_dir(disk, root, "one")  # the directory alone is not enough: the files are gone
    with pytest.raises(Cancelled):
        commit._write_manifest(disk, root, commit.Manifest.of([Receipt.of([record])]), None)
    assert disk.list_dir(f"{root}/one") == ()


def test_a_re_save_keeps_external_files_and_clears_every_other_old_name(place: tuple[Any, str]) -> None:
    disk, root = place
    commit.make_tag_dir(disk, root, "best")
    for name in ("config.json", "rng.pt"):
        disk.write_new(f"{root}/best/{name}", b"framework")
    first, second = attempt_of(1, "best"), attempt_of(2, "best")
    write_node(disk, root, first, {0: ("x.pt", "old/y.pt", "ext:config.json"), 1: ("was_ours.json",)})
    publish(disk, root, first)
    disk.unlink(f"{root}/best/was_ours.json")
    disk.write_new(f"{root}/best/was_ours.json", b"the framework's now")
    write_node(disk, root, second, {0: ("x.pt", "new/z.pt", "ext:config.json"), 1: ("ext:was_ours.json",)})
    done = publish(disk, root, second)
    assert isinstance(done, commit.Published) and done.trouble is None
    assert plain(disk, f"{root}/best") == {
        "x.pt": content(second, "x.pt"),
        "new/z.pt": content(second, "new/z.pt"),
        "config.json": b"framework",
        "rng.pt": b"framework",
        "was_ours.json": b"the framework's now",
    }
    assert "old" not in [entry.name for entry in disk.list_dir(f"{root}/best")]
    [one] = listing.list_committed(disk, root).committed
    assert listing.verify(disk, one) == ()


def test_a_re_save_that_died_before_its_manifest_is_finished_by_the_next_try(place: tuple[Any, str]) -> None:
    disk, root = place
    first, second = attempt_of(1, "best"), attempt_of(2, "best")
    write_node(disk, root, first, {0: ("x.pt", "old.pt"), 1: ()})
    publish(disk, root, first)
    write_node(disk, root, second, {0: ("x.pt",), 1: ()})

    def die(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "rename" and args[1].endswith("MANIFEST.json"):
            raise refuse("rename", args[1], errno.EIO)

    with pytest.raises(StorageError):
        publish(Watched(disk, die), root, second)
    assert settle.roll_forward(disk, root, "best") == ()
    recover(disk, root)
    [one] = listing.list_committed(disk, root).committed
    assert one.manifest.attempt == first and listing.verify(disk, one) == ()
    assert set(plain(disk, f"{root}/best")) == {"x.pt", "old.pt"}
    assert isinstance(publish(disk, root, second), commit.Published)
    assert plain(disk, f"{root}/best") == {"x.pt": content(second, "x.pt")}


def test_a_roll_forward_between_tombstone_and_manifest_leaves_the_tombstone_for_the_re_save() -> None:
    disk = ModelDisk()
    for seq in (1, 2):  # from the second on, the current manifest reads from its attempt's directory
        write_node(disk, "/root", attempt_of(seq, "best"), {0: ("x.pt", "old.pt"), 1: ()})
        publish(disk, "/root", attempt_of(seq, "best"))
    third = attempt_of(3, "best")
    write_node(disk, "/root", third, {0: ("x.pt",), 1: ()})

    def meanwhile(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "rename" and args[1].endswith("MANIFEST.json"):
            assert settle.roll_forward(disk, "/root", "best") == ()
            assert disk.size(commit.attempt_path("/root", attempt_of(2, "best"), "x.pt")) is not None

    assert isinstance(publish(Watched(disk, meanwhile), "/root", third), commit.Published)
    assert plain(disk, "/root/best") == {"x.pt": content(third, "x.pt")}
    assert disk.list_dir(commit.attempt_path("/root", attempt_of(2, "best"))) == (), "old bytes still take room"


def test_a_save_over_a_plain_checkpoint_of_somebody_else_replaces_equal_names_and_leaves_the_others() -> None:
    disk = ModelDisk()
    commit.make_tag_dir(disk, "/root", "one")
    for name in ("x.pt", "theirs.pt"):
        disk.write_new(f"/root/one/{name}", b"stock")
    write_node(disk, "/root", A, {0: ("x.pt",), 1: ()})
    publish(disk, "/root", A)
    assert plain(disk, "/root/one") == {"x.pt": content(A, "x.pt"), "theirs.pt": b"stock"}


def test_the_directories_above_an_attempt_are_durable_before_its_first_file() -> None:
    disk = ModelDisk()
    disk.make_dir("/root")
    disk.sync_dir("/")
    disk.make_dir("/root/one")  # by a rank, which has no time to sync
    commit.make_attempt_dir(disk, "/root", A, ["a/b/x.pt"])
    assert disk.crash(lambda states: 0).now == disk.now


def test_latest_follows_a_checkpoint_that_is_committed_while_it_is_written() -> None:
    disk = ModelDisk()
    for attempt in (A, B):
        write_node(disk, "/root", attempt, {0: ("x.pt",), 1: ()})

    def meanwhile(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "rename" and args[1].endswith("latest") and disk.size("/root/two/MANIFEST.json") is None:
            publish(disk, "/root", B)

    publish(Watched(disk, meanwhile), "/root", A)
    assert disk.read_small("/root/latest", 99) == b"two"


def test_trouble_after_the_manifest_is_told_and_mended_and_the_checkpoint_counts(place: tuple[Any, str]) -> None:
    disk, root = place
    disk.make_dir(f"{root}/latest")  # nothing can be written there
    write_node(disk, root, A, {0: ("x.pt",), 1: ()})
    done = publish(disk, root, A)
    assert isinstance(done, commit.Published) and done.trouble is not None and done.trouble.errno == errno.EISDIR
    assert listing.list_committed(disk, root).committed[0].manifest.attempt == A
    assert len(settle.roll_forward(disk, root, "one")) == 1
    disk.remove_dir(f"{root}/latest")
    assert settle.roll_forward(disk, root, "one") == ()
    assert disk.read_small(f"{root}/latest", 99) == b"one"


@pytest.mark.parametrize("kind", ["dangling link", "loop", "link to a directory", "too long"])
def test_latest_is_replaced_whatever_lies_there_and_never_believed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "with space ü"
    root.mkdir()
    monkeypatch.chdir(tmp_path)
    targets = {"dangling link": "gone", "loop": "latest", "link to a directory": "one"}
    if kind in targets:
        (root / "latest").symlink_to(targets[kind])
    else:
        (root / "latest").write_text("one and then something more")
    disk = PosixStorage()
    write_node(disk, root.name, A, {0: ("x.pt",), 1: ()})
    assert publish(disk, root.name, A) == commit.Published(
        listing.list_committed(disk, str(root)).committed[0].manifest
    )
    assert not (root / "latest").is_symlink() and (root / "latest").read_text() == "one"


def test_latest_never_names_another_roots_checkpoint_and_never_goes_back(place: tuple[Any, str]) -> None:
    disk, root = place
    for attempt in (B, A, replace(attempt_of(9, "foreign"), root_id="cd" * 8)):
        write_node(disk, root, attempt, {0: ("x.pt",), 1: ()})
        assert isinstance(publish(disk, root, attempt), commit.Published)
    settle.update_latest(disk, root, ROOT_ID)
    assert disk.read_small(f"{root}/latest", 99) == b"two"


def test_without_hard_links_everything_still_gets_its_plain_name_and_survives_every_kill() -> None:
    def no_links(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "link":
            raise refuse("link", args[1], errno.EPERM)

    for at in range(200):
        disk = ModelDisk()
        linkless = Watched(disk, no_links)
        for attempt in (attempt_of(1, "best"), attempt_of(2, "best")):
            dying = Dying(linkless, at if attempt.seq == 2 else -1)
            try:
                write_node(dying, "/root", attempt, {0: ("x.pt", "y.pt"), 1: ()})
                assert isinstance(publish(dying, "/root", attempt), commit.Published)
            except BaseException as error:
                assert type(error).__name__ == "Killed"
        recover(linkless, "/root")
        [one] = listing.list_committed(disk, "/root").committed
        assert listing.verify(disk, one) == () and authors(disk, "/root/best") == {one.manifest.attempt.id}
        if dying.left:
            break
    assert one.manifest.attempt.seq == 2 and at > 30


def test_node_local_nodes_commit_on_their_own(tmp_path: Path) -> None:
    disk = PosixStorage()
    for node in (0, 1):
        root = str(tmp_path / str(node))
        names = {node: ("model_states.pt", f"rank{node}.pt")}
        write_node(disk, root, A, names, node=node, nodes=2, layout="node-local")
        assert isinstance(publish(disk, root, A, nodes=2, node=node), commit.Published)
        [one] = listing.list_committed(disk, root).committed
        assert (one.manifest.node, [shard.rank for shard in one.manifest.shards]) == (node, [node])
        assert (
            os.listdir(f"{root}/one") == [f"MANIFEST-node000{node}.json"] or Path(root, "one/model_states.pt").exists()
        )
        assert Path(root, "latest").read_text() == "one"


def test_node_local_in_one_directory_by_mistake_keeps_every_nodes_bytes(tmp_path: Path) -> None:
    disk, root = PosixStorage(), str(tmp_path)
    for seq in (1, 2):  # a first save, then a re-save of the tag
        attempt = attempt_of(seq, "one")
        for node in (0, 1):
            for rank in (2 * node, 2 * node + 1):
                write_shard(
                    disk, root, attempt, rank, ("model_states.pt",) if rank % 2 == 0 else (f"{rank}.pt",),
                    world=4, node=node, nodes=2, layout="node-local", node_ranks=(2 * node, 2 * node + 1),
                )  # fmt: skip
            if node == 1:  # the same name, other bytes
                path = commit.attempt_path(root, attempt, "model_states.pt", node=1)
                Path(path).write_bytes(b"other")
                entry = FileEntry("model_states.pt", *disk.crc_of_file(path))
                record = ShardRecord(attempt, 2, 4, 1, 2, (2, 3), (entry,), "node-local")
                commit.write_shard_record(disk, root, record)
            records = commit.read_shard_records(disk, root, attempt, (2 * node, 2 * node + 1), node=node)
            commit.write_receipt(disk, root, Receipt.of(records))
            assert isinstance(publish(disk, root, attempt, world=4, nodes=2, node=node), commit.Published)
        found = listing.list_committed(disk, root).committed
        assert [one.manifest.attempt for one in found] == [attempt, attempt]
        assert [listing.verify(disk, one) for one in found] == [(), ()]
        recover(disk, root)
        assert [listing.verify(disk, one) for one in found] == [(), ()]


def test_eio_while_publishing_is_raised_as_it_is_and_trying_again_works(place: tuple[Any, str]) -> None:
    disk, root = place
    write_node(disk, root, A, {0: ("x.pt",), 1: ()})
    failed: list[str] = []

    def once(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "sync_dir" and not failed:
            failed.append(verb)
            raise refuse("fsync", args[0], errno.EIO)

    flaky = Watched(disk, once)
    with pytest.raises(StorageError) as caught:
        publish(flaky, root, A)
    assert caught.value.errno == errno.EIO
    assert isinstance(publish(flaky, root, A), commit.Published)


def test_whoever_finds_a_manifest_finishes_names_and_latest_before_it_says_published() -> None:
    """Its publisher was killed right after it: retention, which comes next, may remove what ``latest`` still names."""
    disk = ModelDisk()
    runs.adopt_root_id(disk, "/root", ROOT_ID)
    runs.claim_run(disk, "/root", claim_of(1))
    for attempt in (A, B):
        write_node(disk, "/root", attempt, {0: ("model_states.pt",), 1: ()})
    assert isinstance(publish(disk, "/root", A), commit.Published)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(commit, "finish", killed)
        publish(disk, "/root", B)
    assert disk.read_small("/root/latest", 99) == b"one"
    where = Destination(disk, "/root/two", (0, 1))
    assert listing.read_manifest(disk, "/root/two") is not None and not where.holds(B), "no handle says so before names"
    done = publish(disk, "/root", B)
    assert where.holds(B) and not where.holds(A)
    assert isinstance(done, commit.Published) and done.trouble is None
    assert disk.read_small("/root/latest", 99) == b"two"
    assert plain(disk, "/root/two") == {"model_states.pt": content(B, "model_states.pt")}


def test_a_framework_file_whose_fsync_failed_is_not_synced_again() -> None:
    def lose(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "sync_file":
            raise refuse("fsync", args[0], errno.EIO)

    disk = ModelDisk()
    disk.make_dir("/r")
    commit.make_tag_dir(disk, "/r", A.tag)
    disk.write_new(f"/r/{A.tag}/x", b"1")
    with pytest.raises(PersistError, match="may be lost") as caught:
        commit.seal_external(Watched(disk, lose), "/r", A, "x")
    assert not isinstance(caught.value, StorageError)  # that is what the writer tries again
