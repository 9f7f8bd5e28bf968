"""Hugging Face's Trainer on two ranks, with DDP and DeepSpeed ZeRO, and the examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from harness import Lab
from hf_team import Job, calm, committed, files_of, run, same

REPOSITORY = Path(__file__).resolve().parents[2]
SHARDS = {
    0: {"mp_rank_00_model_states.pt"},
    1: {"mp_rank_00_model_states.pt", *(f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1))},
    3: {f"zero_pp_rank_{n}_mp_rank_00_{kind}_states.pt" for n in (0, 1) for kind in ("model", "optim")},
}


needs_5 = pytest.mark.skipif(version("transformers").startswith("4."), reason="transformers 4 cannot: 'cpu:0'")
DDP = pytest.param({}, marks=needs_5)


@pytest.mark.parametrize("how", [DDP, {"zero": 0}, {"zero": 2}, {"zero": 3}], ids=["ddp", "zero0", "zero2", "zero3"])
def test_two_killed_ranks_resume_from_memory_and_end_bit_equal(lab: Lab, how: dict[str, Any]) -> None:
    first = Job(lab, world=2, memory=3, at=[[7, "kill"]], args={"save_total_limit": 2}, **how).start()
    first.killed()
    job = Job(lab, world=2, memory=3, resume=True, args={"save_total_limit": 2}, **how).start()
    assert same(job.done(), calm(lab, world=2, **how))
    assert "resuming at step 6 from memory" in job.log()
    assert list(committed(lab.root)) == ["checkpoint-8", "checkpoint-12"]
    names = files_of(lab.root, "checkpoint-12")
    assert {"trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= names
    if "zero" in how:
        shards = SHARDS[min(how["zero"], 1) if how["zero"] < 3 else 3]
        assert {f"global_step12/{name}" for name in shards} | {"latest"} <= names
        assert how["zero"] == 0 or os.access(Path(lab.root, "checkpoint-12", "zero_to_fp32.py"), os.X_OK)


@pytest.mark.parametrize("how", [DDP, {"zero": 1}], ids=["ddp", "zero1"])
def test_two_ranks_resume_from_storage_and_so_does_the_trainer_alone(lab: Lab, how: dict[str, Any]) -> None:
    run(lab, world=2, steps=8, **how, args={"lr_scheduler_type": "constant"})
    truth = calm(lab, world=2, **how, args={"lr_scheduler_type": "constant"})
    for stock in (False, True):
        options = {"args": {"lr_scheduler_type": "constant", "save_strategy": "no"}}
        told = run(lab, world=2, resume=f"{lab.root}/checkpoint-8", stock=stock, **how, **options)
        assert same(told, truth), f"stock: {stock}"


def test_two_saves_of_zero_3_at_one_step_are_one(lab: Lab) -> None:
    job = Job(lab, world=2, zero=3, gather=False, steps=4).start()
    assert job.done()["stalls"] == [[4, True]]
    names = files_of(lab.root, "checkpoint-4")
    assert {f"global_step4/{name}" for name in SHARDS[3]} <= names and "model.safetensors" not in names
    assert "twice" not in job.log()


def test_save_on_each_node_and_save_overlapped_with_the_next_step(lab: Lab) -> None:
    how = {"args": {"save_on_each_node": True}, "options": {"staging": "overlap", "slots": 3}, "nodes": True}
    Job(lab, world=2, zero=2, memory=3, at=[[7, "kill"]], **how).start().killed()
    job = Job(lab, world=2, zero=2, memory=3, resume=True, **how).start()
    assert same(job.done(), calm(lab, world=2, zero=2)) and "resuming at step 6 from memory" in job.log()
    assert len(list(Path(lab.root, "checkpoint-12").glob("MANIFEST-node000[01].json"))) == 2


@needs_5
def test_what_the_other_node_saved_comes_over_the_network(lab: Lab) -> None:
    Job(lab, world=2, memory=3, at=[[7, "kill"]], nodes=True).start().killed()
    job = Job(lab, world=2, memory=3, resume=True, nodes=True).start()
    assert same(job.done(), calm(lab, world=2)) and "resuming at step 6 from memory" in job.log()


def test_the_best_of_zero_is_loaded_at_the_end(lab: Lab) -> None:
    scores = {str(step): abs(step - 4) + 1.0 for step in range(13)}
    best = {"metric_for_best_model": "score", "greater_is_better": False, "load_best_model_at_end": True}
    args = {**best, "eval_strategy": "steps", "eval_steps": 4, "save_total_limit": 1}
    told = run(lab, world=2, zero=2, args=args, scores=scores)
    assert list(committed(lab.root)) == ["checkpoint-4", "checkpoint-12"]
    assert told["digest"] == calm(lab, world=2, zero=2, args=args, scores=scores)["digest"]


def test_another_number_of_ranks_is_told_the_way_out_and_it_leads_out(lab: Lab) -> None:
    run(lab, world=2, steps=4)
    failed = Job(lab, resume=True, steps=6).start().failed()[0]
    assert failed["error"] == "WorldMismatch" and "resume_from_checkpoint=" in failed["text"]
    job = Job(lab, resume=f"{lab.root}/checkpoint-4", steps=6).start()
    assert job.done()["step"] == 6 and "was saved by 2 ranks" in job.log()


def test_another_number_of_ranks_with_deepspeed_is_told_of_the_universal_checkpoint(lab: Lab) -> None:
    run(lab, world=2, zero=1, steps=4)
    failed = Job(lab, zero=1, resume=True, steps=6).start().failed()[0]
    assert failed["error"] == "WorldMismatch" and "ds_to_universal" in failed["text"]
    folder = f"{lab.root}/checkpoint-4"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{folder}/global_step4"]
    command += ["--output_folder", f"{folder}/global_step4_universal", "--num_extract_workers", "1"]
    command += ["--inject_missing_state"]
    done = subprocess.run([*command, "--num_merge_workers", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    job = Job(lab, zero=1, resume=folder, steps=6, deepspeed={"checkpoint": {"load_universal": True}}).start()
    assert job.done()["step"] == 6


# -- the examples ----------------------------------------------------------------------------------------------------


def example(*arguments: str) -> tuple[int, str]:
    """(exit code, output) on two ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command += [str(REPOSITORY / "examples" / "hf_trainer_deepspeed.py"), "--zero", "2", "--steps", "16", *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    return done.returncode, done.stdout


def test_the_example_killed_between_two_saves_continues_with_the_same_numbers(lab: Lab) -> None:
    def losses(text: str) -> dict[str, str]:
        return dict(re.findall(r"^step (\d+): loss (\S+)", text, re.M))

    code, first = example("--output-dir", lab.root, "--kill-at", "13")
    assert code != 0, "it was not killed"
    code, again = example("--output-dir", lab.root, "--resume")
    assert code == 0 and "resuming at step 10 from memory" in again, again[-3000:]
    before, after = losses(first), losses(again)
    assert list(after) == [str(step) for step in range(11, 17)] and list(before)[-1] == "13"
    assert [before[step] for step in ("11", "12", "13")] == [after[step] for step in ("11", "12", "13")]
    assert "final step 16" in again
    assert json.loads(Path(lab.root, "checkpoint-16", "trainer_state.json").read_text())["global_step"] == 16
