"""Hugging Face's Trainer with one line of ours, in one process: what it saves, resumes from, keeps and pushes."""

from __future__ import annotations

import os
import re
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
from harness import Lab, until
from hf_team import Job, calm, committed, files_of, run, same, state_of
from safetensors.torch import load_file

# -- one process -----------------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_from_memory_and_ends_bit_equal_to_one_of_the_trainer_alone(lab: Lab) -> None:
    Job(lab, memory=3, at=[[7, "kill"]]).start().killed()
    job = Job(lab, memory=3, resume=True).start()
    assert same(job.done(), calm(lab))
    assert "resuming at step 6 from memory" in job.log()
    assert {"checkpoint-4", "checkpoint-8", "checkpoint-12"} <= set(committed(lab.root))


def test_files_on_disk_are_those_of_the_trainer_and_all_belong_to_the_commit(lab: Lab) -> None:
    run(lab, stock=True, steps=4, output_dir=f"{lab.dir}/calm")
    run(lab, steps=4)
    ours, theirs = Path(lab.root, "checkpoint-4"), Path(lab.dir, "calm", "checkpoint-4")
    names = {path.name for path in theirs.iterdir()}
    assert files_of(lab.root, "checkpoint-4") == names and "model.safetensors" in names
    for name in ("model.safetensors", "config.json", "rng_state.pth"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    stock = run(lab, stock=True, steps=6, resume=str(ours))
    assert same(stock, run(lab, stock=True, steps=6, resume=str(theirs), output_dir=f"{lab.dir}/calm"))


def test_the_trainer_has_its_own_methods_back_and_the_last_save_is_committed_at_the_end_of_train(lab: Lab) -> None:
    told = run(lab, args={"save_total_limit": 1})
    assert told["own"] == ["train"] and told["left"] == [] and told["limit"] == 1
    assert committed(lab.root) == {"checkpoint-12": 12}
    assert [path.name for path in Path(lab.root).glob("checkpoint-*")] == ["checkpoint-12"]


def test_what_is_pinned_stays_and_rotation_goes_by_order(lab: Lab) -> None:
    run(lab, args={"save_total_limit": 1}, at=[[5, "pin"]])
    assert list(committed(lab.root)) == ["checkpoint-4", "checkpoint-12"]


def test_an_exception_in_the_loop_leaves_the_snapshot_for_the_next_start(lab: Lab) -> None:
    assert Job(lab, memory=1, at=[[6, "raise"]]).start().failed()[0]["error"] == "ArithmeticError"
    job = Job(lab, memory=1, resume=True).start()
    assert same(job.done(), calm(lab)) and "resuming at step 6 from memory" in job.log()


def test_a_crash_right_after_a_save_with_a_limit_of_one_leaves_a_complete_checkpoint(lab: Lab) -> None:
    job = Job(lab, args={"save_total_limit": 1}, at=[[5, "pause"], [8, "pause"]]).start()
    assert job.pause() == 5
    until(lambda: committed(lab.root) == {"checkpoint-4": 4}, 20, "the first commit")
    saver = lab.saver()
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    job.go()
    assert job.pause() == 8, "the loop does not wait for the saver"
    assert committed(lab.root) == {"checkpoint-4": 4}, "rotation waits for the commit"
    job.kill()
    os.kill(saver, signal.SIGKILL)
    again = Job(lab, args={"save_total_limit": 1}, resume=True).start()
    assert same(again.done(), calm(lab)) and "resuming at step 8 from memory" in again.log()
    assert committed(lab.root) == {"checkpoint-12": 12}


def test_resume_says_what_it_skipped_and_so_does_get_last_checkpoint(lab: Lab) -> None:
    from ckpt_engine.integrations.hf_resume import get_last_checkpoint

    assert get_last_checkpoint(lab.root) is None
    run(lab, steps=8)
    os.unlink(Path(lab.root, "checkpoint-8", "MANIFEST.json"))
    Path(lab.root, "checkpoint-8", ".attempt-g1-0123456789abcdef-q9").mkdir()
    assert get_last_checkpoint(lab.root) == f"{lab.root}/checkpoint-4"
    job = Job(lab, resume=f"{lab.root}/checkpoint-8", steps=6).start()
    assert job.done()["step"] == 6
    assert "checkpoint-8 is not complete" in job.log() and "skipped checkpoint-8" in job.log()
    assert "resuming at step 4 from" in job.log()


def test_checkpoints_of_the_trainer_alone_are_resumed_and_nothing_to_resume_is_an_error(lab: Lab) -> None:
    assert Job(lab, resume=True).start().failed()[0]["error"] == "ValueError"
    Job(lab, stock=True, at=[[9, "kill"]]).start().killed()
    job = Job(lab, resume=True).start()
    assert same(job.done(), calm(lab)) and "resuming from it unverified" in job.log()
    assert list(committed(lab.root)) == ["checkpoint-12"], "those of the Trainer stay as they are"
    assert Path(lab.root, "checkpoint-4", "model.safetensors").exists()


def test_a_second_run_in_the_same_directory_saves_anew_and_its_checkpoints_are_the_newest(lab: Lab) -> None:
    run(lab)
    second = run(lab, steps=8, args={"seed": 5, "save_total_limit": 2})
    assert list(committed(lab.root)) == ["checkpoint-4", "checkpoint-8"], "by order of the saves, not by number"
    job = Job(lab, resume=True, steps=8).start()
    assert job.done()["digest"] == second["digest"] and "resuming at step 8" in job.log()


def test_a_checkpoint_deleted_in_flight_is_cancelled_and_reported_and_the_next_save_works(lab: Lab) -> None:
    import shutil

    job = Job(lab, at=[[3, "pause"], [5, "pause"]], memory=2).start()
    assert job.pause() == 3
    saver = lab.saver()
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    job.go()
    assert job.pause() == 5
    shutil.rmtree(Path(lab.root, "checkpoint-4"))
    os.kill(saver, signal.SIGCONT)
    job.go()
    job.done()
    assert "the save of step 4 did not become a checkpoint" in job.log()
    assert list(committed(lab.root)) == ["checkpoint-8", "checkpoint-12"]


def test_a_callback_whose_state_cannot_be_written_is_named_and_the_training_goes_on(lab: Lab) -> None:
    job = Job(lab, scene="secret").start()
    assert job.done()["step"] == 12
    assert "stateful_callbacks['Secret']['attributes']['key'] (object) cannot be written as JSON" in job.log()
    assert list(committed(lab.root)) == ["checkpoint-8", "checkpoint-12"]


def test_the_end_of_training_waits_for_the_last_save_and_says_how_far_it_is(lab: Lab) -> None:
    job = Job(lab, at=[[11, "pause"]]).start()
    assert job.pause() == 11
    until(lambda: list(committed(lab.root)) == ["checkpoint-4", "checkpoint-8"], 20, "the commits before")
    saver = lab.saver()
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    job.go()
    until(lambda: "waiting for" in job.log(), 60, "the first word on progress")
    os.kill(saver, signal.SIGCONT)
    job.done()
    assert re.search(r"waiting for \S+/checkpoint-12: \d+ of \d+ MiB written", job.log())
    assert list(committed(lab.root)) == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]


def test_without_room_in_shared_memory_the_weights_pass_through_a_disk(lab: Lab) -> None:
    job = Job(lab, scene="small").start()
    assert job.done()["step"] == 12 and "pass through" in job.log()
    assert "model.safetensors" in files_of(lab.root, "checkpoint-12")


@pytest.mark.filterwarnings("ignore")  # of importing old versions
def test_what_cannot_be_attached_to_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from ckpt_engine.errors import ConfigError
    from ckpt_engine.integrations import hf

    with pytest.raises(ConfigError, match=r"not a dict"):
        hf.attach({})
    for other in ("4.45.2", "6.0.0", "6.1.0.dev0"):
        monkeypatch.setattr(transformers, "__version__", other)
        with pytest.raises(ConfigError, match=rf"{other} is not supported: use at least 4.46, and less than 6"):
            hf.attach({})


# -- the best --------------------------------------------------------------------------------------------------------

BEST = {"metric_for_best_model": "score", "greater_is_better": False, "eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (1, 2, ["checkpoint-2", "checkpoint-12"]),
        (2, 6, ["checkpoint-6", "checkpoint-10", "checkpoint-12"]),
        (3, 12, ["checkpoint-8", "checkpoint-10", "checkpoint-12"]),
    ],
)
def test_the_best_is_kept_and_loaded_whenever_it_was(lab: Lab, limit: int, best: int, kept: list[str]) -> None:
    scores = {str(step): abs(step - best) + 1.0 for step in range(13)}
    args = {**BEST, "save_steps": 2, "save_total_limit": limit, "load_best_model_at_end": True}
    told = run(lab, args=args, scores=scores)
    assert told["best"] == f"{lab.root}/checkpoint-{best}" and list(committed(lab.root)) == kept
    assert state_of(lab.root, f"checkpoint-{best}")["best_model_checkpoint"] == told["best"]
    weights = load_file(Path(told["best"], "model.safetensors"))
    assert told["sums"] == {name: float(weights[name].sum()) for name in told["sums"]}, "these weights are the model's"


def test_save_strategy_best_saves_the_best_only_and_epoch_saves_at_epochs(lab: Lab) -> None:
    scores = {str(step): float(score) for step, score in enumerate([9, 9, 8, 9, 7, 9, 9, 9, 9])}
    if version("transformers").startswith("4.46"):
        pytest.skip("transformers 4.46 has no save_strategy='best'")
    args = {**BEST, "save_strategy": "best", "load_best_model_at_end": True}
    told = run(lab, steps=8, args=args, scores=scores)
    assert list(committed(lab.root)) == ["checkpoint-2", "checkpoint-4"]
    alone = calm(lab, steps=8, args=args, scores=scores)
    assert same(told, alone)
    assert told["best"] == (alone["best"] and f"{lab.root}/checkpoint-4"), "transformers 4 does not note it"
    other = f"{lab.dir}/epochs"
    run(lab, output_dir=other, steps=-1, args={"save_strategy": "epoch", "num_train_epochs": 2})
    assert list(committed(other)) == ["checkpoint-20", "checkpoint-40"]


# -- what is pushed --------------------------------------------------------------------------------------------------


def test_what_is_pushed_was_committed_before_and_verifies(lab: Lab) -> None:
    hub = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_always_push": True}
    job = Job(lab, scene="hub", args={**hub, "save_total_limit": 1}).start()
    pushed = job.done()["pushed"]
    assert [push[1] for push in pushed if push[1]] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
    assert all(whole for _, path, _, whole, _ in pushed if path)
    assert all(leases for *_, leases in pushed), "rotation stays away while it is read"
    assert not list(Path(lab.root).glob(".reading-*"))
    assert [push[2] for push in pushed if not push[1]] == [f"Training in progress, step {n}" for n in (4, 8, 12)]


def test_only_weights_are_saved_where_that_is_asked_for_and_snapshots_are_whole_all_the_same(lab: Lab) -> None:
    Job(lab, memory=5, args={"save_only_model": True}, at=[[6, "kill"]]).start().killed()
    job = Job(lab, memory=5, args={"save_only_model": True}, resume=True).start()
    assert same(job.done(), calm(lab)) and "resuming at step 5 from memory" in job.log()
    assert "optimizer.pt" not in files_of(lab.root, "checkpoint-8")
