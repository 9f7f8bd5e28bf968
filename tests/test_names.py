"""Names in shared memory: every one is built and parsed in one room, and no two engines meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_engine.names import Names, names_for, parse_rank_control, parse_segment, this_node


def test_job_root_name_node_and_user_each_make_other_names(tmp_path: Path) -> None:
    root = str(tmp_path)
    found = {
        names_for(root=root).hash,
        names_for(root=root, job="a").hash,
        names_for(root=root, name="a").hash,
        names_for(root=root, node_id="a").hash,
        names_for(root=root + "/x").hash,
        names_for(root=root, uid=12345).hash,
        names_for(root=root, job="a", name="b").hash,
        names_for(root=root, job="ab", name="").hash,
    }
    assert len(found) == 8


def test_a_restart_by_another_path_to_the_same_root_finds_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    plain = names_for(root=str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "drawn at each start")
    assert (
        names_for(root=str(tmp_path / "link")) == plain == names_for(root="root/") == names_for(root="./link/../root")
    )


def test_a_root_whose_name_is_no_text_has_names(tmp_path: Path) -> None:
    assert names_for(root=os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff\xfe")).hash


def test_every_name_that_is_built_is_parsed_and_nothing_else_is() -> None:
    names = Names("0123456789abcdef")
    segment = names.segment(3, 1, 12)
    assert parse_segment(str(segment)[1:]) == segment
    assert parse_rank_control(names.rank_control(7)[1:]) == 7
    for other in (names.saver_control[1:], names.events_queue[1:], names.notify_queue(1)[1:], str(segment), "x"):
        assert parse_segment(other) is None and parse_rank_control(other) is None
    for other in (
        "ckpt-0123456789abcdeg-r0-s0-e1",
        "ckpt-0123456789abcdef-r0-s0-e1x",
        "ckpt-0123456789abcdef-r-1-s0-e1",
    ):
        assert parse_segment(other) is None


def test_names_are_short_enough_for_queues_and_all_carry_the_hash() -> None:
    names = Names("0123456789abcdef")
    for name in (names.events_queue, names.notify_queue(999_999), names.saver_control, str(names.segment(0, 0, 1))):
        assert name.startswith("/ckpt-0123456789abcdef-") and len(name) < 255 and name.count("/") == 1


def test_ranks_are_known_by_lock_file_or_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_engine import names as room

    monkeypatch.setattr(room, "SHM", tmp_path)
    names = Names("0123456789abcdef")
    assert names.rank_locks() == {}
    names.run_dir.mkdir()
    for file in ("rank-0.lock", "rank-10.lock", "rank-x.lock", "spawn.lock"):
        (names.run_dir / file).touch()
    (tmp_path / names.rank_control(3)[1:]).touch()
    (tmp_path / str(names.segment(1, 0, 1))[1:]).touch()
    assert names.rank_locks() == {rank: names.rank_lock(rank) for rank in (0, 3, 10)}
    assert names.segments() == [names.segment(1, 0, 1)]


def test_this_node_is_the_boot_and_the_ipc_namespace() -> None:
    boot, _, ipc = this_node().partition("/")
    assert len(boot) == 36 and ipc.startswith("ipc:[")
