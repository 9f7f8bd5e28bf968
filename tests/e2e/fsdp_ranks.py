"""Four ranks that save sharded states, and rank 0 beside what torch itself gathers of them. Run under torchrun.

``uneven`` is sharded over all four, in sizes that four does not divide; ``hybrid`` is replicated over two and sharded
over two.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_engine import CheckpointEngine


def main() -> None:
    root, gathered = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    meshes = {
        "uneven": init_device_mesh("cpu", (4,)),
        "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    }
    state: dict[str, object] = {f"rng_state_{rank}.pth": torch.full((8,), rank)}
    whole: dict[str, object] = {}
    for name, mesh in meshes.items():
        net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(
            torch.bfloat16 if name == "hybrid" else torch.float32
        )
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(4, 5).to(next(net.parameters()).dtype)).sum().backward()
        optimizer.step()
        model, moments = get_state_dict(net, optimizer)
        state |= {f"{name}-{rank}.pt": model, f"{name}-optimizer-{rank}.pt": moments}
        full = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        whole |= {name: full[0], f"{name}-optimizer": full[1]}
    if rank == 0:
        torch.save(whole, gathered)
    with CheckpointEngine(root) as ckpt:
        ckpt.save_to_storage(5, state).result(timeout_s=120)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
