"""Plain PyTorch with ckpt_engine: DDP, rank 0 holds the model, every rank its own random state.

    torchrun --nproc-per-node 2 examples/train_ddp.py --root checkpoints        (or python, for a single process)

Started again after a crash it continues from the newest snapshot or checkpoint, with the same random numbers.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine import CheckpointEngine


def say(text: str) -> None:
    """A line and its end in one write: launchers run ranks unbuffered (-u), and print would mix the lines of two."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 1))
    if dist.is_initialized():
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(1000 + rank)  # batches and dropout differ between ranks

    def state() -> dict[str, object]:
        mine: dict[str, object] = {f"rng-{rank}.pt": torch.get_rng_state()}
        if rank == 0:
            mine |= {"model.pt": net.state_dict(), "optimizer.pt": optimizer.state_dict()}
        return mine

    with CheckpointEngine(args.root, keep_last=3) as ckpt:
        report = ckpt.restore(files=["model.pt", "optimizer.pt"])
        if report.source is not None:
            net.load_state_dict(report.state["model.pt"])
            optimizer.load_state_dict(report.state["optimizer.pt"])
            torch.set_rng_state(report.state[f"rng-{rank}.pt"])
        if rank == 0:
            say(f"start: step {report.step} from {report.source}")
        loss = None
        for step in range(report.step + 1, args.steps + 1):
            x = torch.randn(64, 32)
            loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True).sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                ckpt.save_to_storage(step, state())
            elif step % 10 == 0:
                ckpt.save_to_memory(step, state())
        told = "none: nothing was left to train" if loss is None else loss.item().hex()
        say(f"rank {rank}: final loss {told}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
