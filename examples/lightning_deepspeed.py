"""Lightning with DeepSpeed (or DDP, or alone) and ckpt_engine; kill it at any step and start it again.

    torchrun --nproc-per-node 2 examples/lightning_deepspeed.py --dirpath out --zero 2 --kill-at 33
    torchrun --nproc-per-node 2 examples/lightning_deepspeed.py --dirpath out --zero 2

``attach`` makes ``fit`` checkpoint asynchronously; ``--plain`` leaves it out. The loader says where it is, as Lightning
asks of one that is to go on in the middle of an epoch, so the resumed run ends with bit-identical losses.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu" if not os.path.exists("/dev/nvidia0") else "cuda")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from ckpt_engine.integrations import lightning as ckpt_lightning


def say(text: str) -> None:
    """A line and its end in one write: launchers mix the lines of ranks otherwise."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class CpuDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy on a machine without a GPU, which Lightning refuses. For tests and for this example.

    How a checkpoint is saved, loaded and removed is not changed.
    """

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed wants a number

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute or more
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Batches:
    """Batches of one rank, made of their number; stateful, so that a resumed epoch goes on where it was."""

    def __init__(self, width: int, rank: int) -> None:
        self._width = width
        self._rank = rank
        self._next = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._next %= len(self)
        while self._next < len(self):
            self._next += 1
            draw = torch.Generator().manual_seed(1000 * self._rank + self._next)
            x = torch.randn(8, self._width, generator=draw)
            yield x, x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return 20

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Model(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        self.last = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.last = loss.item()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watch(Callback):
    """Kills this process at a step, and times what ``fit`` waits for."""

    def __init__(self, kill_at: int) -> None:
        self._kill_at = kill_at
        self.stalls: list[float] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        own = trainer.save_checkpoint

        def save_checkpoint(*arguments: Any, **options: Any) -> None:
            begin = time.perf_counter()
            own(*arguments, **options)
            self.stalls.append(time.perf_counter() - begin)

        trainer.save_checkpoint = save_checkpoint

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            say(f"start: step {trainer.global_step}")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="lightning-checkpoints")
    parser.add_argument("--zero", default="2", choices=("none", "0", "1", "2", "3"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--memory-steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--kill-at", type=int, default=-1, help="SIGKILL after this many steps")
    parser.add_argument("--plain", action="store_true", help="Lightning's own checkpointing")
    return parser.parse_args()


def strategy(zero: str, world: int) -> Any:
    if zero == "none":
        return "ddp" if world > 1 else "auto"
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": int(zero), "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
    }
    return (DeepSpeedStrategy if torch.cuda.is_available() else CpuDeepSpeedStrategy)(config=config)


def main() -> None:
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    pl.seed_everything(0)
    keep = ModelCheckpoint(args.dirpath, save_top_k=1, save_last=True, every_n_train_steps=args.save_steps)
    watch = Watch(args.kill_at)
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=world,
        strategy=strategy(args.zero, world),
        max_steps=args.steps,
        callbacks=[keep, watch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(args.width)
    if not args.plain:
        ckpt_lightning.attach(trainer, memory_steps=args.memory_steps)
    trainer.fit(model, Batches(args.width, int(os.environ.get("RANK", "0"))), ckpt_path="last")
    say(f"rank {trainer.global_rank}: final loss {model.last.hex()}")
    if trainer.is_global_zero and watch.stalls:
        middle = sorted(watch.stalls)[len(watch.stalls) // 2]
        say(f"save_checkpoint blocked for {1e3 * middle:.1f} ms (median of {len(watch.stalls)})")


if __name__ == "__main__":
    main()
