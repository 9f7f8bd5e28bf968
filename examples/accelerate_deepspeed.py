"""Accelerate with DeepSpeed (or DDP, or alone) and ckpt_engine; kill it at any step and start it again.

    torchrun --nproc-per-node 2 examples/accelerate_deepspeed.py --project-dir out --zero 2 --kill-at 33
    torchrun --nproc-per-node 2 examples/accelerate_deepspeed.py --project-dir out --zero 2

``accelerate launch`` starts it as well. ``attach`` makes ``save_state`` asynchronous; ``--plain`` leaves it out. A
custom object says where the run is, and the order of the data follows from the epoch, so the resumed run ends with
bit-identical losses.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu" if not os.path.exists("/dev/nvidia0") else "cuda")

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, ProjectConfiguration, set_seed
from torch import nn

from ckpt_engine.integrations import accelerate as ckpt_accelerate

EPOCH = 20
"""Steps of an epoch."""


class Progress:
    """A custom object: where the run is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def say(text: str) -> None:
    """A line and its end in one write: launchers mix the lines of ranks otherwise."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project-dir", default="accelerate-checkpoints")
    parser.add_argument("--zero", default="2", choices=("none", "0", "1", "2", "3"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--memory-steps", type=int, default=5)
    parser.add_argument("--total-limit", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--kill-at", type=int, default=-1, help="SIGKILL after this many steps")
    parser.add_argument("--plain", action="store_true", help="the Accelerator's own checkpointing")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer, object, object]:
    plugin = None
    if args.zero != "none":
        import deepspeed

        if os.environ["DS_ACCELERATOR"] == "cpu":  # else DeepSpeed compiles an all-reduce first, for a minute or more
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": int(args.zero), "stage3_param_persistence_threshold": 100},
            "zero_allow_untested_optimizer": True,
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=args.total_limit)
    cpu = not torch.cuda.is_available()
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=cpu, deepspeed_plugin=plugin, project_config=project, dataloader_config=order)
    set_seed(0)
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.Tanh()) for _ in range(4)]
    net = nn.Sequential(*layers, nn.Linear(args.width, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    x = torch.randn(EPOCH * 8 * int(os.environ.get("WORLD_SIZE", "1")), args.width)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    return accelerator, *accelerator.prepare(net, optimizer, loader, scheduler)


def main() -> None:
    args = arguments()
    accelerator, net, optimizer, loader, scheduler = build(args)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    ckpt = None
    if not args.plain:
        ckpt = ckpt_accelerate.attach(accelerator)
        report = ckpt.restore()
        if accelerator.is_main_process:
            say(f"start: step {report.step} from {report.source}")
    loss, stalls = torch.tensor(0.0), []
    while progress.step < args.steps:
        epoch, begun = divmod(progress.step, EPOCH)
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, begun) if begun else loader:
            if progress.step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.mse_loss(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            begin = time.perf_counter()
            if progress.step % args.save_steps == 0:
                accelerator.save_state()
                stalls.append(time.perf_counter() - begin)
            elif ckpt is not None and progress.step % args.memory_steps == 0:
                ckpt.save_to_memory(progress.step)
            if progress.step == args.steps:
                break
    say(f"rank {accelerator.process_index}: final loss {loss.item().hex()}")
    if accelerator.is_main_process and stalls:
        say(f"save_state blocked for {1e3 * sorted(stalls)[len(stalls) // 2]:.1f} ms (median of {len(stalls)})")
    accelerator.end_training()


if __name__ == "__main__":
    main()
