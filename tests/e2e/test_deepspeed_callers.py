"""Callers of DeepSpeed's own verbs, scripts and frameworks alike, get from an attached engine what they are used to."""

from __future__ import annotations

import argparse
import inspect
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from deepspeed_team import Member, Team, committed
from harness import Lab, until


def latest(root: str) -> str:
    return Path(root, "latest").read_text()


def test_save_checkpoint_into_the_root_does_not_wait_for_the_disk_and_elsewhere_it_does(lab: Lab) -> None:
    team = Team(lab).start(stage=1)
    team.ok("train", first=0, last=2)
    saver = lab.saver()
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    assert team.ok("store") == [{"returned": True}] * 2
    assert committed(lab.root) == {}
    os.kill(saver, signal.SIGCONT)
    assert team.one("wait") == {"steps": [2]}
    assert committed(lab.root) == {"global_step2": 2} and latest(lab.root) == "global_step2"
    elsewhere = f"{lab.dir}/elsewhere/run"
    assert team.ok("store", root=elsewhere, tag="mine") == [{"returned": True}] * 2
    assert committed(elsewhere) == {"mine": 2} and latest(elsewhere) == "mine"
    assert latest(lab.root) == "global_step2"
    at_4 = team.ok("train", first=2, last=4)
    assert [answer["steps"] for answer in team.ok("load", root=elsewhere)] == [2, 2]
    assert team.ok("train", first=2, last=4) == at_4
    team.leave()


def test_a_tag_that_is_saved_again_and_again_holds_the_last_state(lab: Lab) -> None:
    team = Team(lab).start(stage=2, dtype="bf16", options={"keep_last": 2})
    for step in range(3):
        team.ok("train", first=step, last=step + 1)
        team.ok("store", tag="pytorch_model")
    at_5 = team.ok("train", first=3, last=5)
    assert [answer["steps"] for answer in team.ok("load", tag="pytorch_model")] == [3, 3]
    assert team.ok("train", first=3, last=5) == at_5
    assert committed(lab.root) == {"pytorch_model": 3}
    team.leave()


def policies(me: Member) -> dict[str, Any]:
    """Rank 0 knows the metric; both train on."""
    for step, loss in enumerate((0.5, 0.1, 0.4, 0.3, 0.2), 1):
        me.train(step - 1, step)
        metrics = {"eval_loss": loss} if me.me.rank == 0 else None
        handle = me.ckpt.save_to_storage(step, metrics=metrics)
        if step == 3:
            me.ckpt.pin(3, "on its way")
        handle.result(30)
    best = me.ckpt.restore(2)
    return {"metrics": best.metrics, "step": best.step}


def test_the_best_and_the_pinned_one_stay(lab: Lab) -> None:
    policy = {"keep_last": 1, "keep_best": ["eval_loss", "min"]}
    team = Team(lab).start(stage=1, options={"retention": policy})
    assert team.run(policies) == [{"metrics": {"eval_loss": 0.1}, "step": 2}] * 2
    until(lambda: set(committed(lab.root)) == {f"global_step{step}" for step in (2, 3, 5)}, 10)
    team.leave()


def client_state() -> dict[str, Any]:
    import numpy
    import torch

    draws = random.Random(7)
    return {
        "args": argparse.Namespace(lr=0.1, words=("a", "b")),
        "matrix": numpy.arange(12, dtype=numpy.float32).reshape(3, 4).T,
        "scalar": numpy.float64(0.1),
        "random": draws.getstate(),
        "numpy_random": numpy.random.RandomState(5).get_state(),
        "torch_random": torch.Generator().manual_seed(3).get_state(),
        "set": {1, 2, 3},
        "dtype": torch.bfloat16,
        "history": [1.5, 2.5],
    }


def scene_client_state(rank: Member) -> dict[str, Any]:
    """Save, change everything handed over, and see what comes back: by restore() and by load_checkpoint()."""
    import numpy
    import torch

    given = client_state()
    handle = rank.ckpt.save_to_storage(2, client_state=given)
    given["history"].append(9.9)
    given["matrix"][:] = -1
    given["args"].lr = 7
    given["torch_random"].zero_()
    handle.result(30.0)
    unlike = []
    for how, found in (
        ("restore", rank.ckpt.restore().client_state),
        ("load", rank.engine.load_checkpoint(rank.me.root)[1]),
    ):
        for key, want in client_state().items():
            got = found[key]
            if isinstance(want, (numpy.ndarray, numpy.generic)):
                same = type(got) is type(want) and got.dtype == want.dtype and numpy.array_equal(got, want)
            elif isinstance(want, torch.Tensor):
                same = torch.equal(got, want)
            elif key == "numpy_random":
                same = str(got) == str(want)
            else:
                same = got == want
            unlike += [] if same else [f"{how}: {key} is {got!r}"]
    return {"unlike": unlike}


def test_client_state_comes_back_as_it_was_when_it_was_saved(lab: Lab) -> None:
    team = Team(lab).start(stage=1)
    team.ok("train", first=0, last=2)
    assert [answer["unlike"] for answer in team.run(scene_client_state)] == [[], []]
    team.leave()


def test_excluded_frozen_parameters_are_excluded_as_deepspeed_does(lab: Lab) -> None:
    how = {"name": "frozen", "stage": 2}
    team = Team(lab)
    team.ok("build", **how)
    team.ok("train", first=0, last=2)
    team.ok("store", root=f"{lab.dir}/stock", exclude_frozen_parameters=True)
    team.ok("attach")
    team.ok("store", exclude_frozen_parameters=True)
    team.ok("wait")
    team.tell(0, "same_as_stock", ours=f"{lab.root}/global_step2", theirs=f"{lab.dir}/stock/global_step2")
    assert team.hear(0)["unlike"] == []
    at_4 = team.ok("train", first=2, last=4)
    assert {answer["error"] for answer in team.all("load")} == {"RuntimeError"}, "a key is missing, as with DeepSpeed"
    assert [answer["steps"] for answer in team.ok("load", load_module_strict=False)] == [2, 2]
    assert team.ok("train", first=2, last=4) == at_4
    team.leave()


WEIGHTS_ONLY = ({"load_optimizer_states": False}, {"load_module_only": True}, {"load_lr_scheduler_states": False})


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_not_to_be_loaded_is_not_and_the_rest_is_as_with_deepspeed(lab: Lab, stage: int) -> None:
    team = Team(lab).start(stage=stage)
    team.ok("train", first=0, last=3)
    team.commit(3)
    team.kill()
    stock = Team(lab, stock=True)
    truth = []
    for options in WEIGHTS_ONLY:
        stock.ok("build", stage=stage)
        stock.ok("load", **options)
        truth.append(stock.ok("train", first=3, last=5))
    stock.end()
    assert len({str(one) for one in truth}) > 1, "the options make a difference"
    team, sources = Team(lab), []
    for options, want in zip(WEIGHTS_ONLY, truth, strict=True):
        for verb in ("restore", "load"):
            team.ok("build", stage=stage)
            team.ok("attach")
            answers = team.ok(verb, **options)
            sources += [answer.get("source") for answer in answers]
            assert team.ok("train", first=3, last=5) == want, (verb, options)
    assert sources[:2] == ["memory", "memory"]
    team.leave()


def scene_16bit_model(rank: Member, folder: str) -> dict[str, Any]:
    """A consolidated save between two of ours; the file as rank 0 finds it when the call returns."""
    import torch

    first = rank.ckpt.save_to_storage(2)
    done = rank.engine.save_16bit_model(folder, "model.bin")
    again = rank.ckpt.save_to_storage(2, tag="again")
    unlike: list[str] = []
    if rank.me.rank == 0:
        loaded = torch.load(os.path.join(folder, "model.bin"))
        rank.loaded = loaded
    for name, parameter in rank.engine.module.named_parameters():
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], enabled=rank.engine.zero_optimization_stage() == 3):
            if rank.me.rank == 0 and not torch.equal(rank.loaded[name], parameter.detach()):
                unlike.append(name)
    first.result(30.0)
    again.result(30.0)
    return {"done": done, "unlike": unlike}


@pytest.mark.parametrize("stage", [1, 3])
def test_save_16bit_model_is_complete_when_it_returns(lab: Lab, stage: int) -> None:
    team = Team(lab).start(stage=stage, dtype="bf16", zero={"stage3_gather_16bit_weights_on_model_save": True})
    team.ok("train", first=0, last=2)
    answers = team.run(scene_16bit_model, folder=f"{lab.dir}/weights")
    assert answers == [{"done": True, "unlike": []}] * 2
    assert not Path(lab.dir, "weights", "latest").exists()
    assert committed(lab.root) == {"global_step2": 2, "again": 2}
    team.leave()


def scene_habits(rank: Member, folder: str) -> dict[str, Any]:
    """Inspection of signatures, relative directories, positional arguments, save_latest=False."""
    engine = rank.engine
    save, load = inspect.signature(engine.save_checkpoint), inspect.signature(engine.load_checkpoint)
    os.chdir(folder)
    engine.save_checkpoint("checkpoints", None, {"a": 1}, False)  # the root, as seen from here
    engine.save_checkpoint(os.path.join("there", "below"), 17, save_latest=False)
    path, client = engine.load_checkpoint("checkpoints", None, True, True, True, False)
    return {
        "save": list(save.parameters),
        "load": list(load.parameters)[:3],
        "names": [engine.save_checkpoint.__name__, engine.load_checkpoint.__doc__ is not None],
        "client": client["a"],
        "path": os.path.realpath(path),
    }


def test_signatures_relative_directories_and_positional_arguments(lab: Lab) -> None:
    team = Team(lab).start(stage=1)
    team.ok("train", first=0, last=2)
    for answer in team.run(scene_habits, folder=str(lab.dir)):
        assert answer["save"] == ["save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"]
        assert answer["load"] == ["load_dir", "tag", "load_module_strict"]
        assert answer["names"] == ["save_checkpoint", True] and answer["client"] == 1
        assert answer["path"].startswith(os.path.realpath(f"{lab.root}/global_step2"))
    assert committed(lab.root) == {"global_step2": 2} and committed(f"{lab.dir}/there/below") == {"17": 2}
    assert all(Path(lab.root, tool).stat().st_mode & 0o100 for tool in ("zero_to_fp32.py", "zero_to_torch.py"))
    team.leave()


def scene_two_engines(rank: Member, first: bool) -> dict[str, Any]:
    """An actor and a critic, each attached to a root of its own."""
    found, engines = {}, {}
    for name, stage in (("actor", 1), ("critic", 3)):
        rank.engine = rank.ckpt = None
        rank.build(stage=stage)
        rank.attach(root=os.path.join(rank.me.dir, name))
        engines[name] = rank.engine, rank.ckpt
    for name, (rank.engine, rank.ckpt) in engines.items():
        if first:
            rank.train(0, 2 if name == "actor" else 3)
            rank.ckpt.save_to_storage(rank.engine.global_steps)
        else:
            found[name] = rank.restore()["step"]
        found[name + " digest"] = rank.digest()["digest"]
    for _, ckpt in engines.values():
        ckpt.close()
    return found


def test_two_engines_of_one_process_do_not_meet(lab: Lab) -> None:
    team = Team(lab)
    before = team.run(scene_two_engines, first=True)
    team.end()
    team = Team(lab)
    after = team.run(scene_two_engines, first=False)
    team.end()
    assert after == [{"actor": 2, "critic": 3, **digests} for digests in before]


def test_checkpoints_of_deepspeed_are_restored_kept_and_continued_and_ours_by_deepspeed(lab: Lab) -> None:
    how = {"stage": 1, "dtype": "bf16"}
    stock = Team(lab, stock=True)
    stock.ok("build", **how)
    stock.ok("train", first=0, last=2)
    stock.ok("store")
    stock.ok("train", first=2, last=3)
    stock.ok("store")
    at_5 = stock.ok("train", first=3, last=5)
    stock.end()

    team = Team(lab).start(**how, options={"keep_last": 1})
    for report in team.ok("restore"):
        assert (report["step"], report["source"], report["tag"], report["steps"]) == (3, "storage", "global_step3", 3)
        assert report["unmanaged"] == ["global_step2", "global_step3"] and not report["verified"]
    assert "no manifest: loading it unverified" in team.ranks[0].log.read_text()
    assert team.ok("train", first=3, last=5) == at_5
    for step in (5, 6, 7):
        team.commit(step)
        team.ok("train", first=step, last=step + 1)
    team.leave()
    assert committed(lab.root) == {"global_step7": 7}
    assert {path.name for path in Path(lab.root).glob("global_step*")} == {
        "global_step2",
        "global_step3",
        "global_step7",
    }
    assert len(list(Path(lab.root, "global_step2").iterdir())) == 3

    team = Team(lab).start(**how)
    assert [report["step"] for report in team.ok("restore")] == [7, 7]
    team.leave()
    stock = Team(lab, stock=True)
    stock.ok("build", **how)
    assert [answer["steps"] for answer in stock.ok("load")] == [7, 7]
    assert stock.ok("load", tag="global_step2")[0]["steps"] == 2
    stock.end()
