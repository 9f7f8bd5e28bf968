"""What a save of Hugging Face's Trainer costs the training loop: the Trainer alone and with us, interleaved in one run.

    torchrun --nproc-per-node 2 benchmarks/hf_stall.py --zero 2
    python benchmarks/hf_stall.py --zero none

Counted is everything between entering and leaving the save on rank 0, the model's weights and (ZeRO-3) their gathering
included; medians. "alone" writes into the page cache and syncs nothing; ours is durable when it is committed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import hf_trainer_deepspeed as example
import torch
from transformers import TrainerCallback

from ckpt_engine.integrations import hf


class Both(TrainerCallback):
    """After each step: a save by the Trainer alone, into another directory; ours follow by ``save_steps``."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.alone: list[float] = []
        self.weights: list[float] = []
        self.trainer = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            return
        ours, trainer = args.output_dir, self.trainer
        args.output_dir = self.folder
        weights = []
        save_model = type(trainer).save_model

        def timed(*arguments, **options) -> None:
            begin = time.perf_counter()
            save_model(trainer, *arguments, **options)
            weights.append(time.perf_counter() - begin)

        trainer.save_model = timed
        begin = time.perf_counter()
        type(trainer)._save_checkpoint(trainer, trainer.model_wrapped, None)  # the class's own: not what we wrapped
        self.alone.append(time.perf_counter() - begin)
        self.weights.append(weights[0])
        del trainer.save_model
        args.output_dir = ours
        shutil.rmtree(Path(self.folder, f"checkpoint-{state.global_step}"), ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", default="2", choices=("none", "0", "1", "2", "3"))
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    work = os.path.join(tempfile.gettempdir(), f"ckpt-hf-stall-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}")
    sys.argv = [sys.argv[0], "--output-dir", f"{work}/ours", "--zero", given.zero, "--steps", str(2 * given.saves)]
    sys.argv += ["--save-steps", "2", "--width", str(given.width), "--layers", str(given.layers)]
    trainer = example.build(example.arguments())
    both = Both(f"{work}/alone")
    both.trainer = trainer
    trainer.add_callback(both)
    attached = hf.attach(trainer, memory_steps=1)
    trainer.train()
    rows = {
        "the Trainer alone": (both.alone, both.weights),
        "with us, to storage": _of(attached.stalls, storage=True),
        "with us, to memory": _of(attached.stalls, storage=False),
    }
    if rank == 0:
        size = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
        example.say(f"ZeRO {given.zero}, {trainer.args.world_size} ranks, {size / 1e6:.1f} M parameters, medians:")
        for name, (total, weights) in rows.items():
            ms, share = 1e3 * statistics.median(total), statistics.median(weights) / statistics.median(total)
            example.say(f"  {name:20} {ms:8.1f} ms a save, {100 * share:3.0f} % of it the weights ({len(total)} saves)")
        shutil.rmtree(work, ignore_errors=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _of(saves: Iterable[hf.Stall], *, storage: bool) -> tuple[list[float], list[float]]:
    """Totals and weights, the first save, which makes the slots, left out."""
    found = [stall for stall in list(saves)[2:] if stall.storage == storage]
    return [stall.total_s - stall.wait_s for stall in found], [stall.weights_s for stall in found]


if __name__ == "__main__":
    main()
