"""Trouble with DeepSpeed: one rank fails, the world is another, bytes are damaged, the loop raises. Nobody hangs."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from deepspeed_team import Member, Team, committed
from harness import Lab, until

from ckpt_engine.errors import ConfigError, UnsupportedLeaf


def until_gone(lab: Lab) -> None:
    """After a goodbye: a snapshot that the saver has not dropped yet would be found by whoever starts at once."""
    until(lambda: not lab.left(), 20, "segments")


def errors(answers: list[dict[str, Any]]) -> list[str]:
    return [answer.get("error", "") for answer in answers]


# -- one rank fails ---------------------------------------------------------------------------------------------------


def scene_lock_in_client_state(rank: Member, bad: int) -> dict[str, Any]:
    """Save with something that cannot be pickled, on rank ``bad`` only."""
    client = {"deep": [1, {"lock": threading.Lock()}]} if rank.me.rank == bad else {"deep": []}
    try:
        return rank.save(2, storage=True, client=client)
    except UnsupportedLeaf as error:
        return {"refused": error.path}


@pytest.mark.parametrize(("stage", "bad"), [(1, 0), (3, 1)])
def test_a_leaf_that_cannot_be_pickled_fails_that_rank_by_its_path_and_the_attempt_for_all(
    lab: Lab, stage: int, bad: int
) -> None:
    team = Team(lab).start(stage=stage)
    team.ok("train", first=0, last=2)
    answers = team.run(scene_lock_in_client_state, bad=bad)
    assert "['deep'][1]['lock']" in answers[bad]["refused"]
    assert answers[1 - bad]["step"] == 2
    team.tell(1 - bad, "result", step=2)
    failed = team.hear(1 - bad)
    assert failed["error"] == "AttemptFailed" and failed["rank"] == bad
    team.commit(3)
    assert committed(lab.root) == {"global_step3": 3}
    team.leave()


def scene_out_of_memory(rank: Member) -> dict[str, Any]:
    """Rank 1 has no memory left to plan its second file."""
    plan, planned = rank.ckpt._core.plan, []

    def fails(name: str, state: Any, *owned: Any) -> Any:
        planned.append(name)
        if rank.me.rank == 1 and len(planned) == 2:
            raise MemoryError("no memory for a plan")
        return plan(name, state, *owned)

    rank.ckpt._core.plan = fails
    try:
        return rank.save(2, storage=True)
    except MemoryError:
        return {"refused": planned[1:]}
    finally:
        rank.ckpt._core.plan = plan


def test_an_error_that_is_none_of_ours_on_one_rank_leaves_nobody_in_a_barrier(lab: Lab) -> None:
    team = Team(lab).start(stage=3)
    team.ok("train", first=0, last=2)
    answers = team.run(scene_out_of_memory)
    assert answers[0]["step"] == 2 and len(answers[1]["refused"]) == 1
    team.tell(0, "result", step=2)
    assert team.hear(0)["error"] == "AttemptFailed"
    team.commit(3)
    assert committed(lab.root) == {"global_step3": 3}
    team.leave()


def scene_save_inside_a_save(rank: Member) -> dict[str, Any]:
    """What a signal handler may do, at a certain place: while DeepSpeed's own save runs."""
    told: list[str] = []

    class Again:
        def __reduce__(self) -> Any:
            try:
                rank.ckpt.save_to_memory(9)
            except ConfigError as error:
                told.append(str(error))
            return (int, ())

    return rank.save(2, storage=True, client={"again": Again()}) | {"told": told}


def test_a_save_inside_a_save_is_refused_and_harms_nothing(lab: Lab) -> None:
    team = Team(lab).start()
    team.ok("train", first=0, last=2)
    answers = team.run(scene_save_inside_a_save)
    assert [answer["step"] for answer in answers] == [2, 2]
    assert "under way" in answers[0]["told"][0]
    team.ok("result", step=2)
    team.commit(3)
    assert committed(lab.root) == {"global_step2": 2, "global_step3": 3}
    team.leave()


def test_a_step_that_is_no_number_on_one_rank_fails_there_and_the_others_go_on(lab: Lab) -> None:
    team = Team(lab).start(stage=1, options={"when_busy": "skip"})
    team.ok("train", first=0, last=2)
    answers = team.each("save", [{"step": 2, "storage": True}, {"step": -2, "storage": True}])
    assert errors(answers) == ["", "ConfigError"]
    team.tell(0, "result", step=2)
    assert team.hear(0)["error"] == "AttemptFailed"
    team.commit(2)
    assert committed(lab.root) == {"global_step2": 2}
    team.leave()


def test_a_rank_that_waits_in_vain_for_a_buffer_fails_alone_and_the_next_save_commits(lab: Lab) -> None:
    team = Team(lab)
    team.ok("build", stage=1)
    team.each("attach", [{"slots": 1}, {"slots": 1, "wait_s": 0.5}])
    team.ok("train", first=0, last=2)
    saver = lab.saver()
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    team.ok("save", step=2, storage=True)
    for rank in range(2):
        team.tell(rank, "save", step=3, storage=True)
    assert team.hear(1)["error"] == "BufferBusy"
    os.kill(saver, signal.SIGCONT)
    assert team.hear(0)["step"] == 3
    team.ok("result", step=2)
    team.tell(0, "result", step=3)
    assert team.hear(0)["error"] == "AttemptFailed"
    team.commit(4)
    assert committed(lab.root) == {"global_step2": 2, "global_step4": 4}
    team.leave()


def test_a_busy_buffer_skips_the_save_on_all_ranks_and_only_into_the_root(lab: Lab) -> None:
    team = Team(lab).start(stage=1, options={"slots": 1, "when_busy": "skip"})
    team.ok("train", first=0, last=2)
    saver = lab.saver()
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    team.ok("save", step=2, storage=True)
    assert [answer["skipped"] for answer in team.ok("save", step=3)] == [True, True]
    assert [answer["skipped"] for answer in team.ok("save", step=4, storage=True)] == [True, True]
    os.kill(saver, signal.SIGCONT)
    team.ok("result", step=2)
    assert set(errors(team.all("result", step=4))) == {"CkptError"}
    assert team.ok("store", root=f"{lab.dir}/elsewhere", tag="never skipped") == [{"returned": True}] * 2
    assert committed(f"{lab.dir}/elsewhere") == {"never skipped": 2}
    assert [answer["skipped"] for answer in team.ok("save", step=5)] == [False, False]
    team.leave()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_save_that_cannot_become_a_checkpoint_is_told_of_once_and_the_next_one_works(lab: Lab, on_error: str) -> None:
    team = Team(lab).start(stage=1, options={"on_error": on_error})
    team.ok("train", first=0, last=2)
    Path(lab.root, "in the way").write_text("a file, where a directory is wanted")
    told = {"StorageError"} if on_error == "raise" else {""}
    assert set(errors(team.all("save", step=2, storage=True, tag="in the way"))) == told
    assert "did not become a checkpoint" in team.ranks[0].log.read_text()
    assert set(errors(team.all("save", step=3))) == {""}, "told once"
    team.commit(4)
    assert committed(lab.root) == {"global_step4": 4}
    team.leave()


# -- another world, damaged bytes -------------------------------------------------------------------------------------


def scene_to_universal(rank: Member, folder: str) -> None:
    converter = "deepspeed.checkpoint.ds_to_universal"
    sys.argv = [converter, "--input_folder", folder, "--output_folder", f"{folder}_universal"]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    sys.modules.pop(converter, None)
    runpy.run_module(converter, run_name="__main__")


def test_another_number_of_ranks_is_refused_until_the_universal_checkpoint_is_there(lab: Lab) -> None:
    team = Team(lab).start(stage=1)
    at_3 = team.ok("train", first=0, last=3)
    team.commit(3)
    team.leave()
    until_gone(lab)

    alone = Team(lab, world=1).start(stage=1)
    for verb in ("restore", "load"):
        refused = alone.all(verb)[0]
        assert (refused["error"], refused["want"], refused["got"]) == ("WorldMismatch", 2, 1)
        assert "ds_to_universal" in refused["text"]
    alone.run(scene_to_universal, folder=f"{lab.root}/global_step3")
    assert alone.all("restore")[0]["error"] == "WorldMismatch", "DeepSpeed was not told to load a universal checkpoint"

    universal = {"stage": 1, "checkpoint": {"load_universal": True}}
    alone.close()
    until_gone(lab)
    alone.start(**universal)
    report = alone.ok("restore")[0]
    assert (report["step"], report["tag"], report["steps"]) == (3, "global_step3_universal", 3)
    assert alone.ok("digest")[0]["digest"] == at_3[0]["digest"]
    at_5 = alone.ok("train", first=3, last=5)
    alone.commit(5)
    at_6 = alone.ok("train", first=5, last=6)
    alone.leave()
    until_gone(lab)

    alone = Team(lab, world=1).start(**universal)
    assert [(r["step"], r["tag"]) for r in alone.ok("restore")] == [(5, "global_step5")], (
        "ours is newer: no step is lost"
    )
    assert alone.ok("digest")[0]["digest"] == at_5[0]["digest"] and alone.ok("train", first=5, last=6) == at_6
    assert alone.ok("load")[0]["steps"] == 3, "load_checkpoint does what the configuration says"
    alone.leave()


def test_without_zero_deepspeed_may_load_into_another_number_of_ranks(lab: Lab) -> None:
    team = Team(lab).start(stage=0)
    at_3 = team.ok("train", first=0, last=3)
    team.commit(3)
    team.leave()
    alone = Team(lab, world=1).start(stage=0)
    assert alone.ok("load")[0]["steps"] == 3 and alone.ok("digest")[0]["digest"] == at_3[0]["digest"]
    alone.leave()


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_damage_is_found_by_all_ranks_and_restore_goes_back_to_the_one_before(lab: Lab) -> None:
    team = Team(lab).start(stage=1)
    team.ok("train", first=0, last=2)
    team.commit(2)
    at_2 = team.ok("digest")
    team.ok("train", first=2, last=4)
    team.commit(4)
    team.leave()
    flip(next(Path(lab.root, "global_step4").glob("zero_pp_rank_1_*")))
    team = Team(lab).start(stage=1)
    before = team.ok("digest")
    assert set(errors(team.all("load"))) == {"Corrupt"}
    assert set(errors(team.all("restore", step=4))) == {"Corrupt"}
    assert team.ok("digest") == before, "nothing was loaded"
    for report in team.ok("restore"):
        assert (report["step"], report["skipped"]) == (2, 1)
    assert team.ok("digest") == at_2
    flip(next(path for path in Path(lab.root, "global_step2").iterdir() if "MANIFEST" in path.name.upper()))
    assert errors(team.all("load", tag="global_step2")) == ["Corrupt", "RestoreError"], "rank 0 reads manifests"
    team.leave()


# -- how a run ends ---------------------------------------------------------------------------------------------------


def scene_leave(rank: Member, how: str) -> None:
    """Leave a run with a snapshot of step 3 in memory."""
    with contextlib.suppress(ArithmeticError), rank.ckpt if how == "exception" else contextlib.nullcontext():
        rank.ckpt.save_to_memory(3)
        rank.train(3, 6, fail_at=4)
    if how == "destroy":
        rank.engine.destroy()
        rank.ckpt.close()


@pytest.mark.parametrize("how", ["exception", "destroy", "exit"])
def test_only_close_is_a_goodbye_snapshots_survive(lab: Lab, how: str) -> None:
    team = Team(lab).start(stage=2)
    at_3 = team.ok("train", first=0, last=3)
    team.run(scene_leave, how=how)
    team.end()
    team = Team(lab).start(stage=2)
    assert [(r["step"], r["source"]) for r in team.ok("restore")] == [(3, "memory")] * 2
    assert [a["digest"] for a in team.ok("digest")] == [a["digest"] for a in at_3]
    team.leave()


def scene_close(rank: Member) -> dict[str, Any]:
    """What the engine has of its own before attach, meanwhile and after close."""
    import ckpt_engine

    names = ("save_checkpoint", "load_checkpoint", "_copy_recovery_script", "destroy", "load_universal_checkpoint")
    engine = rank.engine

    def own() -> list[str]:
        return [name for name in names if name in engine.__dict__]

    before = engine.checkpoint_engine
    rank.attach()
    meanwhile = own()
    rank.ckpt.save_to_storage(1).result(30.0)
    rank.ckpt.restore()
    try:
        ckpt_engine.attach(engine, rank.me.root, name="second")
        twice = ""
    except ConfigError as error:
        twice = str(error)
    rank.ckpt.close()
    rank.ckpt.close()
    engine.save_checkpoint(os.path.join(rank.me.dir, "stock"))
    return {"same": engine.checkpoint_engine is before, "own": own(), "meanwhile": meanwhile, "twice": twice}


def test_close_gives_deepspeed_its_own_methods_back_and_attach_twice_is_refused(lab: Lab) -> None:
    team = Team(lab)
    team.ok("build", stage=1)
    team.ok("train", first=0, last=1)
    for answer in team.run(scene_close):
        assert answer["same"] and answer["own"] == [] and len(answer["meanwhile"]) == 4
        assert "close() the first attachment" in answer["twice"]
    assert Path(lab.dir, "stock", "latest").read_text() == "global_step1"
    assert not list(Path(lab.dir, "stock").rglob("*MANIFEST*"))
    team.end()


def scene_unsupported(rank: Member) -> dict[str, Any]:
    """Engines that attach refuses; fakes, since the real ones need NVMe or a GPU."""
    from ckpt_engine.integrations.deepspeed import attach

    inner = rank.engine.checkpoint_engine
    fakes = {
        "inference": types.SimpleNamespace(checkpoint_engine=None),
        "NVMe": types.SimpleNamespace(checkpoint_engine=inner, optimizer=types.SimpleNamespace(swap_optimizer=True)),
        "ZenFlow": types.SimpleNamespace(checkpoint_engine=inner, optimizer=None, zenflow=True),
        "SuperOffload": types.SimpleNamespace(checkpoint_engine=inner, optimizer=None, super_offload=lambda: True),
    }
    told = {}
    for name, fake in fakes.items():
        try:
            attach(fake, rank.me.root)
        except ConfigError as error:
            told[name] = str(error)
    return {"silent": [name for name in fakes if name not in told.get(name, "")]}


def test_engines_that_cannot_be_captured_are_refused_with_the_reason(lab: Lab) -> None:
    team = Team(lab)
    team.ok("build")
    assert team.run(scene_unsupported) == [{"silent": []}] * 2
    assert not Path(lab.root).exists()
    team.end()


# -- restored state is private ----------------------------------------------------------------------------------------


def scene_again_and_again(rank: Member) -> dict[str, Any]:
    """Restore and train several times: each time the same, and memory does not grow with it."""
    losses, shared = [], []
    for _ in range(6):
        source = rank.restore()["source"]
        losses.append(rank.train(3, 6)["losses"])
        with open("/proc/self/smaps_rollup") as file:
            kib = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith(("Pss_Anon", "Pss_Shmem"))}
        shared.append(sum(kib.values()))
    return {"same": all(one == losses[0] for one in losses), "grown_kib": shared[-1] - shared[1], "source": source}


@pytest.mark.parametrize(("stage", "source"), [(0, "memory"), (1, "storage"), (3, "memory")])
def test_training_after_a_restore_changes_neither_snapshots_nor_files(lab: Lab, stage: int, source: str) -> None:
    """torch's optimizers keep the tensors they are given; those live in a memory file of this process alone."""
    team = Team(lab).start(stage=stage)
    team.ok("train", first=0, last=3)
    team.commit(3)
    team.kill() if source == "memory" else team.leave()
    team = Team(lab).start(stage=stage)
    for answer in team.run(scene_again_and_again):
        assert answer["same"] and answer["source"] == source and answer["grown_kib"] < 4096
    assert committed(lab.root) == {"global_step3": 3}
    team.leave()
