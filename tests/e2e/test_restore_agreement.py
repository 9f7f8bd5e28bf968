"""All ranks take the same attempt from the same source, whatever each of them has, or it says why not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Lab, kill, until
from team import Team, committed, faults, hits, kill_saver, slots, until_committed, whole

from ckpt_engine.slots import DATA_OFFSET

LINGER = {"saver": {"linger_s": 60.0}}


def test_a_rank_that_is_one_step_behind_takes_all_to_the_common_step(lab: Lab) -> None:
    team = Team(lab, "aaaa", **LINGER).open()
    team.commit(18)
    team.save(19)
    team.some([0, 1, 2], "save", step=20, storage=True)
    team.kill()
    team = Team(lab, "aaaa", **LINGER).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (19, "memory")
    assert found["skipped"] == [[20, "memory", "nothing of ranks [3]"]]
    team.commit(21)
    assert 20 not in [step for step, _ in committed(lab.root)] and whole(lab.root)
    team.leave()


@pytest.mark.parametrize("after", ["bbaa", "abab", "cdcd"])
def test_ranks_that_moved_to_other_nodes_find_their_files_in_memory_or_on_disk(lab: Lab, after: str) -> None:
    team = Team(lab, "aabb", **LINGER).open()
    team.save(1)
    team.save(2, count=300_000)
    team.kill()
    until_committed(lab.root, 2)
    team = Team(lab, after, **LINGER).open()
    found = team.restore(files=["sub/model.pt", "rank3.pt"])
    assert (found["step"], found["source"]) == (2, "storage" if "c" in after else "memory")
    assert not [name for name in os.listdir("/dev/shm") if "restore-" in name]
    team.commit(3)
    team.leave()
    lab.clear()


def test_a_byte_flipped_in_memory_is_found_and_the_next_older_is_used(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.save(2)
    team.save(3)
    newest = max(slots(lab.names(node_id="b")), key=lambda pair: pair[1])[0]
    newest.memory[DATA_OFFSET + 100] ^= 1
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "memory")
    assert found["skipped"][0][:2] == [3, "memory"] and "rank1.pt" in found["skipped"][0][2]
    team.commit(4)
    assert team.restore()["step"] == 4
    team.leave()


def test_a_byte_flipped_in_memory_does_not_matter_where_storage_has_the_same_attempt(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.save(2)
    team.commit(3)
    newest = max(slots(lab.names(node_id="b")), key=lambda pair: pair[1])[0]
    newest.memory[DATA_OFFSET + 100] ^= 1
    found = team.restore()
    assert (found["step"], found["source"]) == (3, "storage") and found["skipped"][0][1] == "memory"
    team.leave()


def test_moved_ranks_get_past_a_damaged_snapshot_to_the_one_before(lab: Lab) -> None:
    faults(lab, {"who": "saver", "verb": "write_new", "direct": True, "hold": True})
    team = Team(lab, "ab", **LINGER).open()
    team.save(2)
    team.save(3)
    newest = max(slots(lab.names(node_id="b")), key=lambda pair: pair[1])[0]
    newest.memory[DATA_OFFSET + 100] ^= 1
    team.kill()
    team = Team(lab, "ba", **LINGER).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (2, "memory")
    faults(lab)
    team.leave()
    lab.clear()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(at: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, at(path.stat().st_size))


SHARD = "global_step3/rank1.pt"
DAMAGE: dict[str, tuple[str, Callable[[Path], None], int]] = {
    "empty file": (SHARD, _cut(lambda size: 0), 2),
    "one byte": (SHARD, _cut(lambda size: 1), 2),
    "half": (SHARD, _cut(lambda size: size // 2), 2),
    "last byte missing": (SHARD, _cut(lambda size: size - 1), 2),
    "flipped bit": (SHARD, _flip, 2),
    "missing shard": (SHARD, Path.unlink, 2),
    "shard of another step": (SHARD, lambda path: _copy(path.parents[1] / "global_step2/rank1.pt", path), 2),
    "missing manifest": ("global_step3/MANIFEST.json", Path.unlink, 2),
    "flipped manifest": ("global_step3/MANIFEST.json", _flip, 2),
    "cut manifest": ("global_step3/MANIFEST.json", _cut(lambda size: size // 2), 2),
    "empty latest": ("latest", _cut(lambda size: 0), 3),
    "latest names nothing": ("latest", lambda path: _write(path, "global_step9"), 3),
    "no latest": ("latest", Path.unlink, 3),
    "a leftover of step 4": ("global_step4", lambda path: (path / "x").mkdir(parents=True), 3),
}


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def test_damage_of_any_kind_on_disk_leads_to_the_next_older_and_is_reported(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    for step in (1, 2, 3):
        team.commit(step)
    team.leave()
    shutil.copytree(lab.root, f"{lab.dir}/intact")
    team = Team(lab, "ab").open()
    for kind, (name, damage, expected) in DAMAGE.items():
        damage(Path(lab.root, name))
        found = team.restore()
        assert (found["step"], found["source"]) == (expected, "storage"), kind
        assert bool(found["skipped"]) == (expected == 2 and kind != "missing manifest"), (kind, found)
        for one in Path(lab.root).glob("[!.]*"):  # what starts with a dot the saver may put back at any moment
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        shutil.copytree(f"{lab.dir}/intact", lab.root, dirs_exist_ok=True)
    assert team.restore()["step"] == 3
    team.leave()


def test_a_root_with_damaged_checkpoints_only_is_corrupt_and_never_a_fresh_start(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.leave()
    team = Team(lab, "ab").open()
    for name, damage in (
        (f"{lab.root}/global_step1/rank0.pt", _flip),
        (f"{lab.root}/global_step1/MANIFEST.json", _flip),
    ):
        damage(Path(name))
        for answer in team.all("restore"):
            assert answer["error"] == "Corrupt" and "scratch" in answer["text"], answer
    assert all(answer["error"] in ("Corrupt", "NotFound") for answer in team.all("restore", step=1))
    team.leave()


def test_a_step_that_is_nowhere_is_not_found_and_the_steps_there_are_named(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    assert team.all("restore", step=15)[1]["error"] == "NotFound"
    team.commit(10)
    team.commit(20)
    os.unlink(f"{lab.root}/latest")
    for answer in team.all("restore", step=15):
        assert answer["error"] == "NotFound" and "[10, 20]" in answer["text"]
    assert team.restore(step=10)["step"] == 10
    team.leave()


def test_a_file_that_nobody_saved_is_an_error_on_all_ranks(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.save(1)
    for _ in range(2):
        team.tell([0], "restore", files=["typo.pt"])
        team.tell([1], "restore")
        answers = [team.hear(rank) for rank in (0, 1)]
        assert all(answer["error"] == "NotFound" and "typo.pt" in answer["text"] for answer in answers), answers
        team.commit(2)
    assert team.restore()["step"] == 2
    team.leave()


def test_another_world_size_is_refused_with_the_way_out(lab: Lab) -> None:
    team = Team(lab, "aab").open()
    team.commit(1)
    team.leave()
    for nodes in ("ab", "aabb"):
        team = Team(lab, nodes).open()
        for answer in team.all("restore"):
            assert (answer["error"], answer["want"], answer["got"]) == ("WorldMismatch", 3, len(nodes)), answer
            assert "universal" in answer["text"]
        team.leave()


def test_foreign_files_and_stock_checkpoints_are_listed_and_left_alone(lab: Lab) -> None:
    stock = Path(lab.root, "global_step500")
    stock.mkdir(parents=True)
    (stock / "mp_rank_00_model_states.pt").write_bytes(b"stock")
    Path(lab.root, "notes.txt").write_text("mine")
    Path(lab.root, "empty").mkdir()
    os.symlink("nowhere", Path(lab.root, "dangling"))
    os.mkfifo(Path(lab.root, "pipe"))
    team = Team(lab, "ab", keep_last=1).open()
    found = team.restore()
    assert (found["step"], found["source"], found["unmanaged"]) == (0, None, ["global_step500"])
    team.commit(1)
    team.commit(2)
    until(lambda: [step for step, _ in committed(lab.root)] == [2], 10)
    assert team.restore()["unmanaged"] == ["global_step500"]
    team.leave()
    assert (stock / "mp_rank_00_model_states.pt").read_bytes() == b"stock"
    assert {"notes.txt", "empty", "dangling", "pipe"} <= set(os.listdir(lab.root))


def test_a_node_that_sees_new_files_late_waits_for_them(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.commit(2)
    team.leave()
    team = Team(lab, "ab").open()
    hidden = [{"who": "rank", "node": "b", "verb": verb, "path": "global_step2", "errno": 2} for verb in ("read_into",)]
    faults(lab, *hidden)
    team.tell([0, 1], "restore")
    until(lambda: len(hits(lab)) >= 3, 10)
    faults(lab)
    answers = [team.hear(rank) for rank in (0, 1)]
    assert [answer["step"] for answer in answers] == [2, 2] and not answers[0]["skipped"], answers
    team.leave()


def test_a_passing_read_error_does_not_cost_a_step_and_a_lasting_one_does_on_all_ranks(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.commit(2)
    team.leave()
    team = Team(lab, "ab").open()
    broken = {"who": "rank", "node": "b", "verb": "read_into", "path": "global_step2", "errno": 5}
    faults(lab, broken)
    team.tell([0, 1], "restore")
    until(lambda: len(hits(lab)) >= 3, 10)
    faults(lab)
    assert [team.hear(rank)["step"] for rank in (0, 1)] == [2, 2]
    faults(lab, broken)
    found = team.restore()
    assert found["step"] == 1 and "errno 5" in found["skipped"][0][2]
    team.leave()


def test_a_checkpoint_copied_from_another_root_can_be_restored(lab: Lab) -> None:
    team = Team(lab, "ab", roots={"a": f"{lab.root}/one", "b": f"{lab.root}/one"}).open()
    team.commit(7)
    team.leave()
    other = f"{lab.root}/two"
    shutil.copytree(f"{lab.root}/one/global_step7", f"{other}/global_step7")
    team = Team(lab, "ab", keep_last=1, roots={"a": other, "b": other}).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (7, "storage")
    team.commit(1)
    team.commit(2)
    assert team.restore()["step"] == 2 and team.restore(step=7)["step"] == 7
    team.leave()


def test_when_a_node_is_lost_with_its_memory_storage_serves_and_the_report_says_so(lab: Lab) -> None:
    team = Team(lab, "ab", **LINGER).open()
    team.commit(1)
    team.save(2)
    for process in team.ranks:  # node b vanishes as a whole: saver first
        process.kill() if process is team.ranks[1] else None
    kill_saver(lab, "b")
    for name in lab.names(node_id="b").segments():
        os.unlink(f"/dev/shm{name}")
    team.ranks[0].kill()
    pid = lab.saver(lab.names(node_id="a"))
    team = Team(lab, "ac", **LINGER).open()
    found = team.restore()
    assert (found["step"], found["source"]) == (1, "storage")
    assert found["skipped"] == [[2, "memory", "nothing of ranks [1]"]]
    team.leave()
    kill(pid or 0)
    lab.clear()


def test_restore_leaves_no_lease_and_no_file_behind_and_renews_its_lease_while_it_reads(lab: Lab) -> None:
    team = Team(lab, "ab").open()
    team.commit(1)
    team.leave()
    team = Team(lab, "ab").open()
    faults(lab, {"who": "rank", "verb": "read_into", "hold": True})
    team.ok("call", code="import ckpt_engine.reading as r; r.BEAT_S = 0.05")
    team.tell([0, 1], "restore")
    lease = until(lambda: next((n for n in os.listdir(lab.root) if n.startswith(".reading-")), None), 10)
    first = Path(lab.root, lease).read_text()
    assert "global_step1" in first
    until(lambda: Path(lab.root, lease).read_text() != first, 10)
    faults(lab)
    assert [team.hear(rank)["step"] for rank in (0, 1)] == [1, 1]
    assert not [name for name in os.listdir(lab.root) if name.startswith((".reading-", ".tmp-"))]
    team.leave()


def test_restore_agrees_within_the_time_of_a_few_exchanges(lab: Lab) -> None:
    team = Team(lab, "aabb").open()
    team.save(1)
    begin = time.monotonic()
    team.restore()
    assert time.monotonic() - begin < 5
    team.leave()
