"""Links planted in a root by somebody who may write there: nothing is made, changed or removed outside of it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.hostile import FILES, Root, disk, restored, served
from disk_model import attempt_of, claim_of, write_node

from ckpt_engine import commit
from ckpt_engine.config import SaverOptions
from ckpt_engine.errors import CkptError, StorageError
from ckpt_engine.header import Header
from ckpt_engine.retention import Retention
from ckpt_engine.saver.ledger import Ledger
from ckpt_engine.storage.base import make_dirs, remove_tree, write_durably


def plant(path: Path, target: Path) -> None:
    """A link in the place of whatever is at ``path``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    path.symlink_to(target)


PLACES = {
    "the tag directory of the next save": "tag5",
    "the attempt directory of the next save": f"tag5/.attempt-{attempt_of(5, 'tag5').id}",
    "a subdirectory of the next attempt": f"tag5/.attempt-{attempt_of(5, 'tag5').id}/sub",
    "a subdirectory of the next checkpoint": "tag5/sub",
    "the tag directory of a committed checkpoint": "tag1",
    "a subdirectory of a committed checkpoint": "tag1/sub",
    "the attempt directory of an abandoned attempt": f"tag4/.attempt-{attempt_of(4, 'tag4').id}",
    "the attempt directory of a committed attempt": f"tag2/.attempt-{attempt_of(2, 'tag2').id}",
    "an attempt directory of nobody": "tag2/.attempt-g0-0123456789abcdef-q1",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_link_to_a_directory_outside_is_never_followed_by_a_writer(root: Root, place: str) -> None:
    path = root.path / PLACES[place]
    path.parent.mkdir(parents=True, exist_ok=True)
    plant(path, root.outside)
    served(root.path)
    assert root.untouched_outside()
    assert restored(root.path)[0] in (30, 50)


def test_a_save_into_a_planted_tag_directory_fails_and_the_next_one_works(root: Root) -> None:
    (root.path / "tag5").symlink_to(root.outside)
    with pytest.raises(StorageError, match="tag5"):
        commit.make_tag_dir(disk, str(root.path), "tag5")
    with pytest.raises(CkptError):
        write_node(disk, str(root.path), attempt_of(5, "tag5"), FILES, world=1)
    assert root.untouched_outside()
    root.save(6)
    assert restored(root.path)[0] == 60


def test_plain_names_are_not_made_through_a_planted_subdirectory_and_the_checkpoint_serves(root: Root) -> None:
    (root.path / "tag5").mkdir()
    (root.path / "tag5" / "sub").symlink_to(root.outside / "sub")
    outcome = root.save(5)
    assert isinstance(outcome, commit.Published) and isinstance(outcome.trouble, StorageError)
    assert root.untouched_outside()
    assert restored(root.path)[0] == 50


def test_a_planted_link_under_a_plain_name_does_not_count_as_the_file(root: Root) -> None:
    """Else the first name would go, and with it the only bytes."""
    (root.path / "tag5").mkdir()
    folder = f".attempt-{attempt_of(5, 'tag5').id}"
    (root.path / "tag5" / "a.pt").symlink_to(f"{folder}/a.pt")
    root.save(5)
    served(root.path, 6)
    assert not (root.path / "tag5" / "a.pt").is_symlink()
    assert restored(root.path, 50)[0] == 50


def test_a_linked_checkpoint_can_be_read_and_is_never_removed(root: Root) -> None:
    moved = root.outside / "tag1"
    shutil.move(root.path / "tag1", moved)
    (root.path / "tag1").symlink_to(moved)
    before = sorted(str(path) for path in moved.rglob("*"))
    served(root.path)
    assert restored(root.path, 10)[0] == 10
    assert sorted(str(path) for path in moved.rglob("*")) == before


def test_retention_of_one_that_cannot_go_does_not_keep_the_others(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    moved = root.outside / "tag1"
    shutil.move(root.path / "tag1", moved)
    (root.path / "tag1").symlink_to(moved)
    attempt = attempt_of(3, "tag3")
    header = Header(attempt, claim_of(1), 0, 0, 1, 0, 1, (0,), "shared", str(root.path), f"{root.path}/tag3",
                    Retention(keep_last=1), None, True, ())  # fmt: skip
    (root.path / ".reading-0123456789abcdef").unlink()
    Ledger(disk, SaverOptions(), lambda: ()).retain(header, (), lambda other: False)
    assert (moved / "MANIFEST.json").exists() and not (root.path / "tag2").exists()
    assert "retention leaves" in caplog.text


def test_the_verbs_refuse_a_link_on_the_way(root: Root) -> None:
    way = root.path / "way"
    way.symlink_to(root.outside)
    acts: list[Callable[[], object]] = [
        lambda: write_durably(disk, f"{way}/x", b"x"),
        lambda: make_dirs(disk, f"{way}/x/y"),
        lambda: disk.make_dir(str(way)),
        lambda: disk.unlink(f"{way}/precious"),
        lambda: disk.remove_dir(f"{way}/sub"),
        lambda: disk.rename(f"{way}/precious", f"{root.path}/taken"),
        lambda: disk.rename(f"{root.path}/latest", f"{way}/precious"),
        lambda: disk.link(f"{root.path}/latest", f"{way}/latest"),
    ]
    for act in acts:
        with pytest.raises(StorageError) as caught:
            act()
        assert caught.value.errno in (errno.ELOOP, errno.EEXIST)
    remove_tree(disk, str(way))
    assert not os.path.lexists(way) and root.untouched_outside()
