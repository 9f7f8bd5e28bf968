"""The example under torchrun and under DeepSpeed's own launcher: what one leaves, the other continues."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from harness import Lab

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_deepspeed.py"

PRELUDE = """
import os, runpy, deepspeed
# Its shared-memory all-reduce has to be compiled, and may leave 132 MB behind.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path({example!r}, run_name="__main__")
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(lab: Lab, launcher: list[str], steps: int) -> str:
    script = lab.dir / "train.py"
    script.write_text(PRELUDE.format(example=str(EXAMPLE)))
    options = ["--root", lab.root, "--steps", str(steps), "--memory-every", "3", "--storage-every", "5", "--zero", "2"]
    options += ["--width", "32", "--layers", "2", "--dtype", "bf16"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), *options],
        env={
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_torchrun_and_the_deepspeed_launcher_continue_each_other(lab: Lab) -> None:
    lab.names()
    first = launch(lab, ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 7)
    assert "start: step 0 from None" in first and "step 5: " in first
    second = launch(lab, ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port()], 9)
    assert re.search(r"start: step 5 from storage, [1-9]\d* bytes verified", second)
    assert "final parameters" in second
    assert Path(lab.root, "latest").read_text() == "global_step5"
