"""The examples do what they say: run to the end, killed at any step and started again, the same numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from faults.hooks import faults

from ckpt_engine import cli

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"


def run(script: str, *arguments: str, ranks: int = 1, env: dict[str, str] | None = None) -> tuple[int, str]:
    """(exit code, output) of an example, alone or under torchrun."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join((str(TESTS), str(REPOSITORY)))
    full = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
    command += [str(REPOSITORY / "examples" / script), *arguments]
    done = subprocess.run(command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    return done.returncode, done.stdout


def finals(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d+: final loss \S+", output))


def test_a_single_process_killed_inside_a_save_continues_from_memory_with_the_same_numbers(lab: Any) -> None:
    calm = run("train_ddp.py", "--root", f"{lab.root}-calm", "--steps", "60")[1]
    code, _ = run("train_ddp.py", "--root", lab.root, "--steps", "60", env=faults("fill:complete:3:kill"))
    assert code == -9, "it was not killed"
    again = run("train_ddp.py", "--root", lab.root, "--steps", "60")[1]
    assert "start: step 20 from memory" in again
    assert finals(again) == finals(calm) and len(finals(calm)) == 1


def test_two_ddp_ranks_killed_after_a_checkpoint_continue_with_the_same_numbers(lab: Any) -> None:
    calm = run("train_ddp.py", "--root", f"{lab.root}-calm", "--steps", "70", ranks=2)[1]
    code, _ = run("train_ddp.py", "--root", lab.root, "--steps", "70", ranks=2, env=faults("seal:complete:6:kill"))
    assert code != 0, "it was not killed"
    again = run("train_ddp.py", "--root", lab.root, "--steps", "70", ranks=2)[1]
    assert re.search(r"start: step (50|60) from memory", again), again[-2000:]
    assert finals(again) == finals(calm) and len(finals(calm)) == 2


def test_fsdp_ranks_killed_in_a_save_continue_and_another_number_of_them_starts_from_an_export(lab: Any) -> None:
    calm = run("train_fsdp.py", "--root", f"{lab.root}-calm", "--steps", "70", ranks=2)[1]
    code, _ = run("train_fsdp.py", "--root", lab.root, "--steps", "70", ranks=2, env=faults("seal:complete:6:kill"))
    assert code != 0, "it was not killed"
    again = run("train_fsdp.py", "--root", lab.root, "--steps", "70", ranks=2)[1]
    assert re.search(r"start: step (50|60) from memory", again), again[-2000:]
    assert finals(again) == finals(calm) and len(finals(calm)) == 2
    code, refused = run("train_fsdp.py", "--root", lab.root, "--steps", "70", ranks=3)
    assert code != 0 and "ckpt-engine export" in refused
    exported = f"{lab.root}-exported"
    assert cli.main(["export", lab.root, exported]) == 0
    three = run("train_fsdp.py", "--root", f"{lab.root}-three", "--steps", "70", "--dcp", exported, ranks=3)[1]
    assert re.search(rf"start: step (50|60) from {exported}", three), three[-2000:]
    losses = [float.fromhex(line.split()[-1]) for line in finals(three) + finals(calm)]
    assert len(losses) == 5 and max(losses) - min(losses) < 1e-4 * max(losses)


def test_deploy_files_start_the_saver_as_it_wants_to_be_started() -> None:
    from ckpt_engine.saver.__main__ import parser

    unit = (REPOSITORY / "examples/deploy/ckpt-saver@.service").read_text()
    line = re.search(r"ExecStart=\S+ckpt-engine saver (.*)", unit)
    assert line is not None
    assert parser().parse_args(line[1].replace("/%I", "/data").split()).stay
    pod = (REPOSITORY / "examples/deploy/kubernetes-sidecar.yaml").read_text()
    command = re.search(r'command: \["ckpt-engine", "saver", (.*)\]', pod)
    assert command is not None
    assert parser().parse_args([word.strip(' "') for word in command[1].split(",")]).root == "/checkpoints"
