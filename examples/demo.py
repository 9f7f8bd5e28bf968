"""The demo: a 2-rank DeepSpeed training checkpoints, loses a rank to SIGKILL, and resumes from memory.

    make demo        (or: python examples/demo.py)

It runs examples/train_deepspeed.py twice, once undisturbed and once under torchrun's restarts with one rank killed at
a random moment, and compares them bit for bit; then plain DeepSpeed loads the result in processes that cannot import
ckpt_engine; at last it times our saves against DeepSpeed's own, side by side. Every claim it prints it has checked.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = 120
WORLD = 2


def environment() -> dict[str, str]:
    cache = Path(tempfile.gettempdir()) / f"torch-extensions-{os.getuid()}"
    ours = {"TORCH_EXTENSIONS_DIR": str(cache), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # torchrun's shared store keeps the gloo addresses of killed ranks, and a restarted one may connect to them.
    ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return ours | os.environ


def launch(script: str, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--standalone"]
    command += ["--max-restarts", str(restarts), script, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    )


class Run:
    """One training under torchrun; lines are echoed as they come and kept."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.lines: list[str] = []
        self.saves = 0
        self.saved = self.trained = 0
        self.pids: dict[int, int] = {}
        self._process = process
        self._log: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            line = line.rstrip()
            self._log.append(line)
            with self._changed:
                if match := re.match(r"rank (\d+): pid (\d+)", line):
                    self.pids[int(match[1])] = int(match[2])
                if match := re.match(r"step (\d+): ", line):
                    self.saves += 1
                    self.saved = int(match[1])
                if match := re.match(r"trained (\d+)", line):
                    self.trained = int(match[1])
                if line.startswith(("rank ", "start: ", "step ", "final ")):
                    self.lines.append(line)
                    print(f"  {self.name:>11} | {line.removeprefix('final | ')}", flush=True)
                self._changed.notify_all()

    def wait_for_saves(self, saves: int, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.saves >= saves or self._process.poll() is not None, timeout_s):
                self.fail(f"not even {saves} saves within {timeout_s} s")

    def finish(self, timeout_s: float) -> None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.fail(f"not finished within {timeout_s} s")
        self._reader.join(10)
        if code:
            self.fail(f"ended with code {code}")

    def fail(self, why: str) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        print("\n".join(self._log[-120:]), file=sys.stderr)
        sys.exit(f"demo failed: {self.name}: {why}")

    def last(self, pattern: str) -> str:
        found = [match[1] for line in self.lines if (match := re.search(pattern, line))]
        if not found:
            self.fail(f"never printed {pattern!r}")
        return found[-1]


def check(claim: bool, text: str) -> None:
    print(f"  {'ok' if claim else 'FAILED':>11} | {text}", flush=True)
    if not claim:
        sys.exit(1)


def demo(work: Path, zero: int) -> None:
    train = str(HERE / "train_deepspeed.py")
    options = ["--steps", str(STEPS), "--zero", str(zero), "--memory-every", "10", "--storage-every", "30"]
    options.append("--every-step")

    print(f"1. An undisturbed run: {STEPS} steps, ZeRO {zero}, {WORLD} ranks", flush=True)
    calm = Run("undisturbed", launch(train, "--root", str(work / "calm"), *options))
    calm.finish(240)

    print("2. The same run; one rank is killed at a random moment", flush=True)
    killed = Run("killed", launch(train, "--root", str(work / "killed"), *options, restarts=1))
    killed.wait_for_saves(random.randint(2, 7), 120)
    threading.Event().wait(random.uniform(0.0, 0.1))  # anywhere between two saves, or inside one
    victim, saved, pid = random.randrange(WORLD), killed.saved, killed.pids
    os.kill(pid[victim], signal.SIGKILL)
    reached = killed.trained
    print(f"  {'SIGKILL':>11} | rank {victim} (pid {pid[victim]}) at step {reached}, last save {saved}", flush=True)
    killed.finish(300)

    print("3. What is left", flush=True)
    restored, source = int(killed.last(r"start: step (\d+) from")), killed.last(r"start: step \d+ from (\w+)")
    check(saved > 0, f"rank {victim} was killed at step {reached}, after at least one save (step {saved})")
    check(restored > 0 and source == "memory", f"the restart resumed at step {restored} from {source}")
    check(reached - restored <= 10, f"steps repeated: {max(0, reached - restored)} (a save every 10)")
    for what in ("final losses", "final parameters"):
        mine, theirs = killed.last(f"{what} (.*)"), calm.last(f"{what} (.*)")
        check(mine == theirs, f"{what} {mine}: equal in both runs")

    print("4. Plain DeepSpeed loads the result where importing ckpt_engine fails", flush=True)
    plain = Run(
        "plain", launch(str(HERE / "demo.py"), "--worker", "plain", "--root", str(work / "killed"), "--zero", str(zero))
    )
    plain.finish(120)
    check(plain.last("final parameters (.*)") == calm.last("final parameters (.*)"), "the same parameters")

    print("5. Blocking time per save, side by side in one run (interleaved, median of 7)", flush=True)
    table = Run(
        "compare",
        launch(str(HERE / "demo.py"), "--worker", "compare", "--root", str(work / "table"), "--zero", str(zero)),
    )
    table.finish(180)
    table.last(r"final \| (save_to_memory .*)")


def worker(args: argparse.Namespace) -> None:
    """Runs under torchrun: ``plain`` loads without us, ``compare`` times both ways to save."""
    if args.worker == "plain":
        sys.modules["ckpt_engine"] = None  # type: ignore[assignment]  # from here on importing it raises ImportError
        import types

        stub = types.ModuleType("ckpt_engine")  # the example imports it at its top; nothing of it is used
        example = _example(stub)
        args.dtype, args.width, args.layers = "fp32", 128, 4
        engine = example.build(args)
        path, _ = engine.load_checkpoint(args.root)
        final = example.digest(engine)
        if engine.global_rank == 0:
            print(f"final path {path}", flush=True)
            print(f"final parameters {final}", flush=True)
    else:
        import ckpt_engine

        example = _example(ckpt_engine)
        args.dtype, args.width, args.layers = "fp32", 512, 6
        engine = example.build(args)
        text = example.load_text()
        ours, theirs, memory = [], [], []
        with ckpt_engine.attach(engine, args.root, keep_last=2) as ckpt:
            for step in range(1, 9):
                example.train_one(engine, text, step)
                memory.append(_timed(lambda step=step: ckpt.save_to_memory(step)))
                ours.append(_timed(lambda step=step: ckpt.save_to_storage(step)))
                ckpt.wait()
                stock = os.path.join(args.root, "stock")
                theirs.append(_timed(lambda stock=stock: type(engine).save_checkpoint(engine, stock, "same")))
        if engine.global_rank == 0:
            state = sum(p.numel() for p in engine.module.parameters()) * 16 / 2**20
            base = statistics.median(theirs[1:])
            print(f"final | {state:.0f} MiB of state per save     blocked    of DeepSpeed's", flush=True)
            for name, times in (
                ("engine.save_checkpoint (stock)", theirs),
                ("save_to_storage", ours),
                ("save_to_memory", memory),
            ):
                median = statistics.median(times[1:])
                print(f"final | {name:<31} {1e3 * median:7.1f} ms   {100 * median / base:5.1f} %", flush=True)
    engine.destroy()
    import torch

    torch.distributed.destroy_process_group()


def _example(package: object) -> object:
    """examples/train_deepspeed.py as a module, with ``package`` as its ckpt_engine."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_deepspeed", HERE / "train_deepspeed.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("ckpt_engine")
    sys.modules["ckpt_engine"] = package  # type: ignore[assignment]
    spec.loader.exec_module(module)
    sys.modules["ckpt_engine"] = before  # type: ignore[assignment]
    return module


def _timed(act: object) -> float:
    import torch

    torch.distributed.barrier()
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3))
    parser.add_argument("--seed", type=int, default=None, help="repeat a run: chooses rank and moment of the kill")
    parser.add_argument("--worker", choices=("plain", "compare"), help=argparse.SUPPRESS)
    parser.add_argument("--root", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    random.seed(seed)
    begin = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="ckpt-demo-"))
    print(f"demo in {work}, seed {seed}", flush=True)
    try:
        demo(work, args.zero)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"done in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
