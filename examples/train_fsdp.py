"""FSDP2 (fully_shard) with ckpt_engine: every rank saves its own shards, and nothing is gathered.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --root checkpoints

Started again after a crash, with as many ranks, it continues from the newest snapshot or checkpoint. For another number
of ranks: ``ckpt-engine export checkpoints exported``, then start with a new ``--root`` and ``--dcp exported``.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_engine import CheckpointEngine


def say(text: str) -> None:
    """A line and its end in one write: launchers run ranks unbuffered (-u), and print would mix the lines of two."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dcp", default="", help="start from this directory of torch.distributed.checkpoint")
    args = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    rank, device = dist.get_rank(), "cuda" if on_cuda else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(3)))
    net.to(device)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def state() -> dict[str, object]:
        model, moments = get_state_dict(net, optimizer)  # of DTensors: no rank sees more than its shards
        return {f"model-{rank}.pt": model, f"optimizer-{rank}.pt": moments}

    with CheckpointEngine(args.root, keep_last=3) as ckpt:
        report = ckpt.restore()
        done = report.step
        if report.source is not None:
            model, moments = report.state[f"model-{rank}.pt"], report.state[f"optimizer-{rank}.pt"]
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
        elif args.dcp:
            model, moments = get_state_dict(net, optimizer)
            into = {"model": model, "optimizer": moments, "step": 0}
            dcp.load(into, checkpoint_id=args.dcp)
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
            done = into["step"]
        if rank == 0:
            say(f"start: step {done} from {report.source or args.dcp or None}")
        loss = None
        for step in range(done + 1, args.steps + 1):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).to(device)
            loss = nn.functional.mse_loss(net(x), x.sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                ckpt.save_to_storage(step, state())
            elif step % 10 == 0:
                ckpt.save_to_memory(step, state())
        told = "none: nothing was left to train" if loss is None else loss.item().hex()
        say(f"rank {rank}: final loss {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
