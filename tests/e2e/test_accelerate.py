"""One Accelerator whose ``save_state`` is ours: what it finds again, what stays as it was, and the example, killed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from e2e.test_examples import REPOSITORY, finals, run
from harness import Lab
from torch import nn

from ckpt_engine import export, listing
from ckpt_engine.errors import ConfigError, Corrupt, NotFound, UnsupportedLeaf, WorldMismatch
from ckpt_engine.integrations import accelerate as ours
from ckpt_engine.storage.posix import PosixStorage


class Counter:
    """A custom object; ``value`` may be anything."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def forget() -> None:
    """What accelerate keeps for a process, as if it were a new one."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Job:
    """A model, its optimizer, and an Accelerator."""

    def __init__(self, project: ProjectConfiguration | None = None) -> None:
        forget()
        self.accelerator = Accelerator(cpu=True, project_config=project)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        self.net, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self) -> None:
        self.accelerator.backward(self.net(torch.randn(3, 4)).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.counter.value += 1

    def facts(self) -> tuple[Any, ...]:
        moments = [m for state in self.optimizer.state_dict()["state"].values() for m in state.values()]
        tensors = [*self.net.state_dict().values(), *moments]
        return ([tensor.tolist() for tensor in tensors], self.counter.value, torch.get_rng_state().tolist())


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    yield Job
    forget()


def tags(root: str) -> list[str]:
    """Of the committed checkpoints, newest first."""
    return [one.manifest.attempt.tag for one in listing.list_committed(PosixStorage(), root).committed]


def test_a_directory_of_any_name_is_saved_anew_and_found_again_by_us_and_by_accelerate(
    lab: Lab, job: Callable[..., Job]
) -> None:
    first = job()
    with ours.attach(first.accelerator, lab.root) as ckpt:
        for _ in range(2):
            first.train()
            assert first.accelerator.save_state(f"{lab.root}/last") == os.path.realpath(f"{lab.root}/last")
        saved = first.facts()
        first.train()
        first.accelerator.load_state(f"{lab.root}/last")
        assert first.facts() == saved, "the newest save under this name"
        assert ckpt.wait() == ()
    assert "save_state" not in vars(first.accelerator), "close gives the methods back"
    assert tags(lab.root) == ["last"]
    stock = job()
    stock.accelerator.load_state(f"{lab.root}/last")
    assert stock.facts() == saved, "Accelerate reads our checkpoint without us"
    again = job()
    with ours.attach(again.accelerator, lab.root) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.source, report.tag) == (2, "storage", "last") and again.facts() == saved


def test_the_files_are_those_of_accelerate(lab: Lab, job: Callable[..., Job]) -> None:
    it = job()
    it.train()
    it.accelerator.save_state(f"{lab.dir}/stock")
    with ours.attach(it.accelerator, lab.root):
        it.accelerator.save_state(f"{lab.root}/mine")
    mine = {name for name in os.listdir(f"{lab.root}/mine") if not name.startswith((".", "MANIFEST"))}
    assert mine == set(os.listdir(f"{lab.dir}/stock"))


def test_named_automatically_the_oldest_go_after_the_commit_and_numbers_go_on(
    lab: Lab, job: Callable[..., Job]
) -> None:
    project = ProjectConfiguration(lab.root, automatic_checkpoint_naming=True, total_limit=1)
    it, root = job(project), f"{lab.root}/checkpoints"
    with ours.attach(it.accelerator) as ckpt:
        assert ckpt.restore().source is None
        for _ in range(3):
            it.train()
            it.accelerator.save_state()
            ckpt.save_to_memory(it.counter.value)
        ckpt.wait()
        saved = it.facts()
        it.train()
        it.accelerator.load_state()
        assert it.facts() == saved, "the snapshot is newer than the checkpoint"
    assert tags(root) == ["checkpoint_2"]
    again = job(ProjectConfiguration(lab.root, automatic_checkpoint_naming=True, total_limit=1))
    with ours.attach(again.accelerator) as ckpt:
        with pytest.raises(ValueError, match="exists already"):
            again.accelerator.project_configuration.iteration = 2
            again.accelerator.save_state()
        assert ckpt.restore().tag in ("checkpoint_2", "step_3"), "a snapshot may outlive the goodbye for a moment"
        again.accelerator.save_state()
        again.accelerator.end_training()
    assert tags(root) == ["checkpoint_3"], "end_training waits for the commit"


def test_elsewhere_it_is_accelerates_own(lab: Lab, job: Callable[..., Job]) -> None:
    it = job()
    with ours.attach(it.accelerator, lab.root):
        it.accelerator.save_state(f"{lab.dir}/export")
        saved = it.facts()
        assert os.path.exists(f"{lab.dir}/export/model.safetensors"), "it blocks"
        it.train()
        it.accelerator.load_state(f"{lab.dir}/export")
        assert it.facts()[:2] == saved[:2]
        with pytest.raises(ValueError):
            it.accelerator.load_state()
    assert tags(lab.root) == []


def test_what_cannot_be_saved_is_named_and_the_next_save_works(lab: Lab, job: Callable[..., Job]) -> None:
    it = job()
    with ours.attach(it.accelerator, lab.root) as ckpt:
        it.counter.value = {"threads": [open]}
        it.counter.value["lock"] = (lambda: 0,)
        with pytest.raises(UnsupportedLeaf, match=r"custom_checkpoint_0\.pkl.*lock"):
            ckpt.save_to_storage(1)
        it.counter.value = 7
        published = ckpt.save_to_storage(2, metrics={"loss": 0.5}).result(timeout_s=60)
    assert published.path == f"{os.path.realpath(lab.root)}/step_2" and tags(lab.root) == ["step_2"]


def test_damage_and_halves_are_refused(lab: Lab, job: Callable[..., Job]) -> None:
    it = job()
    with ours.attach(it.accelerator, lab.root) as ckpt:
        ckpt.save_to_storage(1).result(timeout_s=60)
        handle = ckpt.save_to_storage(2)
        handle.result(timeout_s=60)
        os.unlink(f"{lab.root}/step_2/MANIFEST.json")
        with pytest.raises(NotFound, match=r"step_2 is not complete"):
            it.accelerator.load_state(f"{lab.root}/step_2")
    copy = shutil.copytree(lab.root, f"{lab.dir}/copy", ignore=shutil.ignore_patterns(".attempt-*"))
    with open(f"{copy}/step_1/optimizer.bin", "r+b") as file:
        file.truncate(100)
    with ours.attach(it.accelerator, copy), pytest.raises(Corrupt, match=r"optimizer\.bin"):
        it.accelerator.load_state(f"{copy}/step_1")


def test_what_cannot_be_attached_is_refused_with_the_reason(lab: Lab, job: Callable[..., Job]) -> None:
    it = job()
    with pytest.raises(ConfigError, match=r"not a Linear"):
        ours.attach(nn.Linear(1, 1), lab.root)
    with pytest.raises(ConfigError, match="name the directory"):
        ours.attach(it.accelerator)
    with ours.attach(it.accelerator, lab.root), pytest.raises(ConfigError, match="attached already"):
        ours.attach(it.accelerator, lab.root)
    named = job(ProjectConfiguration(lab.root, automatic_checkpoint_naming=True))
    with pytest.raises(ConfigError, match="the root is"):
        ours.attach(named.accelerator, f"{lab.root}/other")


@pytest.mark.parametrize(("zero", "ranks"), [("none", 1), ("none", 2), ("2", 2), ("3", 2)])
def test_the_example_killed_at_a_step_goes_on_with_the_same_numbers(zero: str, ranks: int, lab: Lab) -> None:
    def go(folder: str, *more: str) -> tuple[int, str]:
        fixed = ("--zero", zero, "--steps", "27", "--save-steps", "10", "--memory-steps", "5")
        return run("accelerate_deepspeed.py", "--project-dir", str(Path(lab.dir, folder)), *fixed, *more, ranks=ranks)

    calm = go("calm")[1]
    code, output = go("killed", "--kill-at", "18")
    assert code != 0 and not finals(output), "it was not killed"
    again = go("killed")[1]
    assert re.search("start: step 15 from memory", again), again[-2000:]
    assert finals(again) == finals(calm) and len(finals(calm)) == ranks
    assert tags(f"{lab.dir}/killed/checkpoints")[0] == "checkpoint_1"
    if (zero, ranks) == ("none", 2):
        alone_with_the_checkpoint_of_two(f"{lab.dir}/killed")


def alone_with_the_checkpoint_of_two(project: str) -> None:
    spec = importlib.util.spec_from_file_location("accelerate_example", REPOSITORY / "examples/accelerate_deepspeed.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    forget()
    options = argparse.Namespace(project_dir=project, zero="none", total_limit=2, width=64)
    accelerator, net, *_ = example.build(options)
    accelerator.register_for_checkpointing(example.Progress())
    folder = f"{project}/checkpoints/checkpoint_1"
    with ours.attach(accelerator) as ckpt:
        with pytest.raises(WorldMismatch):
            ckpt.restore()
        accelerator.load_state(folder)
    for name, tensor in export.load(f"{folder}/model.safetensors").items():
        assert torch.equal(net.state_dict()[name], tensor), name
    forget()
