"""What FSDP2 ranks saved, exported and read again: equal to what torch itself gathers of the same state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Lab
from torch import Tensor, nn

from ckpt_engine import CheckpointEngine, cli, export
from ckpt_engine.errors import ConfigError, Corrupt, NotFound

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[str, dict[str, Any]]]:
    """(root, what torch gathers): of four ranks, with optimizers and random states."""
    world = Lab()
    gathered = str(world.dir / "gathered.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    path = os.pathsep.join((str(HERE.parent), str(HERE.parents[1])))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*command, str(HERE / "fsdp_ranks.py"), world.root, gathered], env=env, check=True, timeout=240)
    yield world.root, torch.load(gathered, weights_only=False)
    assert not world.close()


@pytest.fixture
def small(lab: Lab) -> str:
    """The root of one rank with a model of its own, and things that are no tensors."""
    with CheckpointEngine(lab.root) as ckpt:
        net = nn.Linear(3, 2)
        ckpt.save_to_storage(1, {"model.pt": net.state_dict(), "extra/scheduler.pt": {"last": 3, "rates": [0.1]}})
        net.weight.data += 1
        tied = {"a": net.weight.data, "b": net.weight.data, "row": net.weight.data[1]}
        ckpt.save_to_storage(2, {"model.pt": tied, "value.pt": 7}).result(timeout_s=60)
    return lab.root


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Equal values, types of tensors included. Raises AssertionError that says where not."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}/{number}")
    elif isinstance(wanted, Tensor):
        assert type(found) is Tensor and found.dtype == wanted.dtype and torch.equal(found, wanted), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_sharded_states_come_out_whole(form: str, saved: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    root, gathered = saved
    out = tmp_path / "below" / "out.pt"
    assert cli.main(["export", root, str(out), "--format", form]) == 0
    found = export.load(out)
    assert found.pop("step") == 5
    for rank in range(4):
        assert found.pop(f"rng_state_{rank}").tolist() == [rank] * 8, "random states of ranks are not one"
    same(found, gathered)


def test_safetensors_hold_one_part(saved: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    root, gathered = saved
    export.to_safetensors(root, tmp_path / "model.safetensors", part="hybrid")
    same(export.load(tmp_path / "model.safetensors"), dict(gathered["hybrid"]))
    with pytest.raises(ConfigError, match=r"no 'model' in this checkpoint: it holds \['hybrid', 'hybrid-optimizer'"):
        export.to_safetensors(root, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match=r"hybrid-optimizer\.\S+ is a \w+: safetensors hold nothing but tensors"):
        export.to_safetensors(root, tmp_path / "more.safetensors", part="hybrid-optimizer")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"], "what failed leaves nothing"


def test_the_newest_or_a_tag_with_views_ties_and_bare_values(small: str, tmp_path: Path) -> None:
    export.to_torch(small, tmp_path / "newest.pt")
    newest = export.load(tmp_path / "newest.pt")
    assert newest["step"] == 2 and newest["value"] == 7
    assert torch.equal(newest["model"]["a"], newest["model"]["b"])
    export.to_dcp(small, tmp_path / "old", tag="global_step1")
    old = export.load(tmp_path / "old")
    assert old["extra/scheduler"] == {"last": 3, "rates": [0.1]}
    same(newest["model"]["a"], old["model"]["weight"] + 1)
    export.to_safetensors(small, tmp_path / "tied.safetensors")
    same(export.load(tmp_path / "tied.safetensors"), newest["model"])


def test_what_cannot_be_exported_is_named(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        export.to_torch(tmp_path / "nowhere", tmp_path / "out.pt")
    with pytest.raises(NotFound, match="no committed checkpoint global_step9"):
        export.to_dcp(small, tmp_path / "out", tag="global_step9")
    (tmp_path / "there").write_text("mine")
    for to in (export.to_dcp, export.to_torch, export.to_safetensors):
        with pytest.raises(ConfigError, match="exists: export into a new"):
            to(small, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(NotFound, match="neither a file nor a directory of"):
        export.load(tmp_path / "nowhere")
    with open(Path(small) / "global_step2" / "model.pt", "r+b") as file:
        file.seek(300)
        file.write(b"?")
    with pytest.raises(Corrupt, match=r"model\.pt: want CRC-32"):
        export.to_dcp(small, tmp_path / "out")
    assert cli.main(["export", small, str(tmp_path / "out")]) == 2
    assert "want CRC-32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_deepspeed_has_its_own_tools(lab: Lab, tmp_path: Path) -> None:
    with CheckpointEngine(lab.root) as ckpt:
        ckpt.save_to_storage(1, {"mp_rank_00_model_states.pt": {"module": {}}}).result(timeout_s=60)
    with pytest.raises(ConfigError, match=r"zero_to_fp32\.py"):
        export.to_torch(lab.root, tmp_path / "out.pt")


def test_files_that_would_be_one_part_keep_their_names(lab: Lab, tmp_path: Path) -> None:
    with CheckpointEngine(lab.root) as ckpt:
        ckpt.save_to_storage(1, {"model.pt": {"a": 1}, "model-0.pt": {"a": 2}, "rng-0.pt": {"a": 3}}).result(
            timeout_s=60
        )
    export.to_torch(lab.root, tmp_path / "out.pt")
    assert export.load(tmp_path / "out.pt") == {
        "step": 1,
        "model.pt": {"a": 1},
        "model-0.pt": {"a": 2},
        "rng": {"a": 3},
    }


def test_names_lose_their_rank_and_nothing_else() -> None:
    for name, rank, short in (
        ("model-0.pt", 0, "model"),
        ("model_00012.pt", 12, "model"),
        ("rank3/model.pt", 3, "model"),
        ("layer1-rank_1.pt", 1, "layer1"),
        ("model.pt", 0, "model"),
        ("model10.pt", 0, "model10"),
        ("0.pt", 0, "0"),
        ("a/b.c.pt", 5, "a/b.c"),
    ):
        assert export._unranked(name, rank) == short, name
