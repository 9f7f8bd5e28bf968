"""A pin is a file whose presence counts; retention and whoever pins never miss each other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_model import ROOT_ID, Watched, attempt_of, claim_of, publish, recover, refuse, retain, write_node, write_shard

from ckpt_engine import disk_names, listing, pins, runs, sweep
from ckpt_engine.errors import ConfigError, NotFound, StorageError
from ckpt_engine.manifest import Committed
from ckpt_engine.storage import PosixStorage

disk = PosixStorage()


@pytest.fixture
def root(tmp_path: Path) -> str:
    root = str(tmp_path / "root")
    runs.adopt_root_id(disk, root, ROOT_ID)
    runs.claim_run(disk, root, claim_of(1))
    for seq in (1, 2, 3):
        save(root, seq, f"tag{seq}")
    return root


def save(root: str, seq: int, tag: str) -> None:
    write_node(disk, root, attempt_of(seq, tag), {0: ("x.pt", "sub/y.pt"), 1: ("z.pt",)})
    publish(disk, root, attempt_of(seq, tag))


def tags(root: str) -> list[str]:
    found = listing.list_committed(disk, root)
    assert not found.damaged and not any(listing.verify(disk, one) for one in found.committed)
    return [one.manifest.attempt.tag for one in found.committed]


def the(root: str, tag: str) -> Committed:
    return next(one for one in listing.list_committed(disk, root).committed if one.manifest.attempt.tag == tag)


def test_a_pinned_one_survives_retention_and_a_re_save_of_its_tag_until_it_is_unpinned(root: str) -> None:
    pins.pin(disk, pins.by_tag(disk, root, "tag1"), "the paper's")
    assert the(root, "tag1").pinned and not the(root, "tag2").pinned
    retain(disk, root, 1)
    assert tags(root) == ["tag3", "tag1"]
    save(root, 4, "tag1")
    save(root, 5, "tag5")
    retain(disk, root, 1)
    recover(disk, root)
    assert tags(root) == ["tag5", "tag1"] and the(root, "tag1").order == (1, 4)
    assert pins.reason_of(disk, f"{root}/tag1") == "the paper's"
    assert pins.unpin(disk, f"{root}/tag1") and not pins.unpin(disk, f"{root}/tag1")
    retain(disk, root, 1)
    assert tags(root) == ["tag5"] and not os.path.exists(f"{root}/tag1")


@pytest.mark.parametrize("what", ["empty", "garbage", "another record", "large", "link", "directory"])
def test_whatever_lies_there_pins_and_says_nothing(root: str, what: str) -> None:
    path = Path(root, "tag1", disk_names.PIN)
    if what == "link":
        path.symlink_to("/nowhere")
    elif what == "directory":
        path.mkdir()
    elif what == "another record":
        path.write_bytes(Path(root, "tag1", "MANIFEST.json").read_bytes())
    else:
        path.write_bytes({"empty": b"", "garbage": b"\xff" * 100, "large": b"1" * (1 << 20)}[what])
    assert pins.reason_of(disk, f"{root}/tag1") == ""
    retain(disk, root, 1)
    assert tags(root) == ["tag3", "tag1"] and listing.foreign(disk, the(root, "tag1")) == ()


@pytest.mark.parametrize("reason", ["x" * 501, 3, None])
def test_a_reason_that_is_no_short_text_is_refused(root: str, reason: Any) -> None:
    with pytest.raises(ConfigError, match="cannot pin"):
        pins.pin(disk, pins.by_tag(disk, root, "tag1"), reason)
    assert not the(root, "tag1").pinned


def test_only_a_checkpoint_of_ours_is_pinned_committed_or_on_its_way(root: str) -> None:
    os.makedirs(f"{root}/plain")
    Path(root, "plain", "model.pt").touch()
    for tag in ("plain", "nothing", "tag1/sub", "../root/tag1", ".", "latest"):
        with pytest.raises(NotFound, match="ckpt-engine list"):
            pins.by_tag(disk, root, tag)
    write_shard(disk, root, attempt_of(4, "tag4"), 0, ("x.pt",))
    pins.pin(disk, pins.by_tag(disk, root, "tag4"), "")
    save(root, 4, "tag4")
    save(root, 5, "tag5")
    retain(disk, root, 1)
    assert tags(root) == ["tag5", "tag4"]


def test_a_step_is_its_newest_attempt_committed_or_on_its_way(root: str) -> None:
    def found(*in_flight: tuple[Any, str], root_id: str = ROOT_ID, step: int = 20) -> list[tuple[str, bool]]:
        targets = pins.of_step(disk, root, root_id, step, in_flight)
        return [(os.path.basename(one.folder), one.committed) for one in targets]

    assert found() == [("tag2", True)]
    assert found((attempt_of(2, "way", generation=2), "/r/way")) == [("tag2", True), ("way", False)]
    with pytest.raises(NotFound, match=r"no checkpoint of step 9 .*there are \[10, 20, 30\]"):
        found(step=9)
    with pytest.raises(NotFound):
        found(root_id="cd" * 8)


def removal_with(at: Callable[[str, str], bool], act: Callable[[], object], victim: Committed) -> sweep.Removal:
    """``act`` happens in another process right before the operation that ``at`` picks."""
    left = [act]

    def before(verb: str, args: tuple[Any, ...]) -> None:
        if left and at(verb, os.path.basename(str(args[0]))):
            left.pop()()

    return sweep.remove_checkpoint(Watched(disk, before), victim)


STEPS = ["list the tag", "read the manifest", "rename it", "list again", "remove files"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_pin_set_while_retention_removes_that_one_holds_or_is_refused(
    root: str, step: str, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, listed = [], []

    def at(verb: str, name: str) -> bool:
        listed.extend([name] if verb == "list_dir" else [])
        return {
            "list the tag": verb == "list_dir",
            "read the manifest": verb == "read_small",
            "rename it": verb == "rename",
            "list again": verb == "list_dir" and len(listed) == 2,
            "remove files": verb == "unlink",
        }[step]

    def pin() -> None:
        try:
            pins.pin(disk, target, "")
            said.append("pinned")
        except NotFound:
            said.append("refused")

    if not links:

        def refuses(source: str, target: str) -> None:
            raise refuse("link", target, errno.EPERM)

        monkeypatch.setattr(disk, "link", refuses)
    target = pins.by_tag(disk, root, "tag1")
    removal_with(at, pin, the(root, "tag1"))
    recover(disk, root)
    assert said == ["pinned" if step in STEPS[:3] else "refused"]
    if said == ["pinned"]:
        assert the(root, "tag1").pinned and tags(root) == ["tag3", "tag2", "tag1"]
        assert not [name for name in os.listdir(f"{root}/tag1") if name.startswith(".removed")]
    else:
        assert "tag1" not in tags(root) and not os.path.exists(f"{root}/tag1")


def test_one_that_was_pinned_while_its_remover_was_killed_comes_back_whole(root: str) -> None:
    pins.pin(disk, pins.by_tag(disk, root, "tag1"), "")
    one = the(root, "tag1")
    os.rename(f"{root}/tag1/MANIFEST.json", f"{root}/tag1/{disk_names.tombstone(one.manifest.attempt.id)}")
    recover(disk, root)
    assert tags(root) == ["tag3", "tag2", "tag1"] and the(root, "tag1").pinned
    assert not [name for name in os.listdir(f"{root}/tag1") if name.startswith(".removed")]


def test_a_pin_brings_the_newest_of_its_tag_back_and_no_older_one(root: str) -> None:
    pins.pin(disk, pins.by_tag(disk, root, "tag1"), "")
    older = the(root, "tag1").manifest
    save(root, 4, "tag1")
    newer = the(root, "tag1").manifest
    for manifest in (older, newer):
        Path(root, "tag1", disk_names.tombstone(manifest.attempt.id)).write_bytes(manifest.to_bytes())
    os.unlink(f"{root}/tag1/MANIFEST.json")
    recover(disk, root)
    assert tags(root) == ["tag1", "tag3", "tag2"] and the(root, "tag1").manifest == newer


def test_a_pin_seen_too_late_is_not_taken_for_a_whole_checkpoint(root: str) -> None:
    """Another saver has begun to remove the files."""
    listed = []

    def at(verb: str, name: str) -> bool:
        listed.extend([name] if verb == "list_dir" else [])
        return verb == "list_dir" and len(listed) == 2

    def both() -> None:
        os.unlink(f"{root}/tag1/x.pt")
        Path(root, "tag1", disk_names.PIN).touch()

    removal_with(at, both, the(root, "tag1"))
    assert tags(root) == ["tag3", "tag2"]
    assert os.listdir(f"{root}/tag1") == [disk_names.PIN]


def test_a_pin_in_a_directory_that_is_gone_or_cannot_be_written_says_so(root: str) -> None:
    with pytest.raises(NotFound, match="removed"):
        pins.pin(disk, pins.Target((1, 9), f"{root}/gone", False), "")
    with pytest.raises(StorageError) as caught:
        os.mkdir(f"{root}/tag1/{disk_names.PIN}")
        pins.pin(disk, pins.by_tag(disk, root, "tag1"), "")
    assert caught.value.errno in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
