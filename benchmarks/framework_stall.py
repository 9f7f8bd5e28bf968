"""What a save of Accelerate, Lightning or FSDP2 costs the training loop: the framework alone and with us, in one run.

    torchrun --nproc-per-node 2 benchmarks/framework_stall.py accelerate --zero 2
    torchrun --nproc-per-node 2 benchmarks/framework_stall.py lightning --zero 3
    torchrun --nproc-per-node 2 benchmarks/framework_stall.py fsdp

Counted on rank 0 is everything between entering and leaving the save, the framework's own files and collectives
included; medians, interleaved, one step of training before each; saves in flight have ended before the next begins.
"alone" writes into the page cache and syncs nothing; ours is durable when it is committed. (Hugging Face's Trainer:
``hf_stall.py``.)
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist

Save = Callable[[int], object]


class Table:
    """How long each kind of save took, by name; the first round, which makes slots and directories, is left out."""

    def __init__(self, work: str, saves: int) -> None:
        self.work = work
        self.rounds = saves + 1
        self._took: dict[str, list[float]] = {}

    def round(self, step: int, kinds: dict[str, Save], between: Callable[[], object]) -> None:
        for name, save in kinds.items():
            between()
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            save(step)
            self._took.setdefault(name, []).append(time.perf_counter() - begin)

    def show(self, title: str) -> None:
        print(title)
        for name, seconds in self._took.items():
            print(f"  {name:34} {1e3 * statistics.median(seconds[1:]):8.1f} ms a save ({len(seconds) - 1} saves)")


def of_accelerate(given: argparse.Namespace, table: Table) -> str:
    example = importlib.import_module("accelerate_deepspeed")
    given.project_dir, given.total_limit = table.work, 1
    accelerator, net, optimizer, loader, _ = example.build(given)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    root = os.path.join(table.work, "ours")

    def train() -> None:
        x, y = next(iter(loader))
        accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()

    with example.ckpt_accelerate.attach(accelerator, root, keep_last=1) as ckpt:
        kinds: dict[str, Save] = {
            "save_state alone": lambda step: accelerator.save_state(f"{table.work}/alone"),
            "save_state with us": lambda step: accelerator.save_state(f"{root}/step_{step}"),
            "save_to_memory": ckpt.save_to_memory,
        }
        for step in range(1, table.rounds + 1):
            table.round(step, kinds, lambda: (train(), ckpt.wait()))
    return f"Accelerate, {size(net)}"


def of_lightning(given: argparse.Namespace, table: Table) -> str:
    example = importlib.import_module("lightning_deepspeed")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    root = os.path.join(table.work, "ours")

    class Rounds(example.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            step = trainer.global_step
            kinds: dict[str, Save] = {
                "save_checkpoint alone": lambda step: trainer.save_checkpoint(f"{table.work}/alone.ckpt"),
                "save_checkpoint with us": lambda step: trainer.save_checkpoint(f"{root}/{step}.ckpt"),
            }
            table.round(step, kinds, ckpt.wait)
            trainer.strategy.remove_checkpoint(f"{root}/{step - 1}.ckpt")

    trainer = example.pl.Trainer(
        accelerator="cpu" if not torch.cuda.is_available() else "auto",
        devices=world,
        strategy=example.strategy(given.zero, world),
        max_steps=table.rounds,
        callbacks=[Rounds()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ckpt = example.ckpt_lightning.attach(trainer, root)
    model = example.Model(given.width)
    what = f"Lightning, {size(model)}"
    trainer.fit(model, example.Batches(given.width, int(os.environ.get("RANK", "0"))))
    return what


def of_fsdp(given: argparse.Namespace, table: Table) -> str:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import ckpt_engine

    dcp = importlib.import_module("torch.distributed.checkpoint")
    on_cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    mesh = init_device_mesh("cuda" if on_cuda else "cpu", (dist.get_world_size(),))
    net = torch.nn.Sequential(*(torch.nn.Linear(given.width, given.width) for _ in range(4))).to(mesh.device_type)
    what = f"FSDP2, {size(net)}"
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    rank, last = dist.get_rank(), [None]

    def train() -> None:
        net(torch.randn(8, given.width, device=mesh.device_type)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, object]:
        model, moments = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": moments}

    def async_save(step: int) -> None:
        last[0] = dcp.async_save(state(), checkpoint_id=f"{table.work}/async")

    with ckpt_engine.CheckpointEngine(f"{table.work}/ours", keep_last=1) as ckpt:

        def ours(step: int) -> dict[str, object]:
            return {f"{name}-{rank}.pt": part for name, part in state().items()}

        def between() -> None:
            if last[0] is not None:
                last[0] = last[0].result() and None
            train()
            ckpt.wait()

        kinds: dict[str, Save] = {
            "dcp.save": lambda step: dcp.save(state(), checkpoint_id=f"{table.work}/sync"),
            "dcp.async_save": async_save,
            "save_to_storage": lambda step: ckpt.save_to_storage(step, ours(step)),
            "save_to_memory": lambda step: ckpt.save_to_memory(step, ours(step)),
        }
        for step in range(1, table.rounds + 1):
            table.round(step, kinds, between)
    return what


def size(net: torch.nn.Module) -> str:
    return f"{sum(getattr(p, 'ds_numel', p.numel()) for p in net.parameters()) / 1e6:.1f} M parameters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    frameworks = {"accelerate": of_accelerate, "lightning": of_lightning, "fsdp": of_fsdp}
    parser.add_argument("framework", choices=frameworks)
    parser.add_argument("--zero", default="none", choices=("none", "0", "1", "2", "3"))
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--width", type=int, default=1792, help="of four square layers; 12.8 M parameters")
    given = parser.parse_args()
    run = os.environ.get("TORCHELASTIC_RUN_ID", os.getpid())
    table = Table(os.path.join(tempfile.gettempdir(), f"ckpt-stall-{run}"), given.saves)
    what = frameworks[given.framework](given, table)
    if int(os.environ.get("RANK", "0")) == 0:
        how = "" if given.framework == "fsdp" else f", ZeRO {given.zero}"
        table.show(f"{what}{how}, {os.environ.get('WORLD_SIZE', '1')} ranks, medians:")
        shutil.rmtree(table.work, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
