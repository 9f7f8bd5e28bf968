"""Train a small GPT with DeepSpeed and ckpt_engine; kill it at any time and start it again.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_deepspeed.py --root checkpoints --zero 1

Every 10 steps a snapshot goes to memory, every 50 to storage. The text is Python's own reference manual, which is on
any machine with Python. The same command, started again after a crash, continues where the newest snapshot or
checkpoint of all ranks stands, and ends with bit-identical parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu" if not os.path.exists("/dev/nvidia0") else "cuda")

import deepspeed
import torch
from torch import nn
from torch.nn import functional

import ckpt_engine

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte; ``forward`` returns the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def load_text() -> torch.Tensor:
    from pydoc_data import topics

    return torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()


def batch_of(text: torch.Tensor, step: int, rank: int, size: int = 4) -> torch.Tensor:
    """The batch depends on step and rank only, so a resumed run sees what an uninterrupted one sees."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(0, len(text) - CONTEXT, (size,), generator=generator)
    return torch.stack([text[start : start + CONTEXT] for start in starts.tolist()])


def build(args: argparse.Namespace) -> deepspeed.DeepSpeedEngine:
    if os.environ["DS_ACCELERATOR"] == "cpu":  # else DeepSpeed compiles an all-reduce first, for a minute or more
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": args.zero},
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.zero == 3):
        net = GPT(args.width, args.layers)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    return engine


def train_one(engine: deepspeed.DeepSpeedEngine, text: torch.Tensor, step: int) -> float:
    loss = engine(batch_of(text, step, engine.global_rank).to(engine.device))
    engine.backward(loss)
    engine.step()
    return loss.item()


def digest(engine: deepspeed.DeepSpeedEngine) -> str:
    """SHA-256 of all parameters."""
    sha = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def say(text: str) -> None:
    """A line and its end in one write: launchers run ranks unbuffered (-u), and print would mix the lines of two."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory-every", type=int, default=10)
    parser.add_argument("--storage-every", type=int, default=50)
    parser.add_argument("--every-step", action="store_true", help="print a line after every step, not only saves")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    args = parser.parse_args()
    engine = build(args)
    text = load_text()
    lead = engine.global_rank == 0
    say(f"rank {engine.global_rank}: pid {os.getpid()}")

    with ckpt_engine.attach(engine, args.root, keep_last=3) as ckpt:
        report = ckpt.restore()
        if lead:
            say(f"start: step {report.step} from {report.source}, {report.verified_bytes} bytes verified")
        handles: list[ckpt_engine.Handle] = []
        loss = float("nan")
        for step in range(report.step, args.steps):
            loss = train_one(engine, text, step)
            done = step + 1
            if lead and args.every_step:
                say(f"trained {done}")
            begin = time.perf_counter()
            if done % args.storage_every == 0:
                handles.append(ckpt.save_to_storage(done))
                where = "storage"
            elif done % args.memory_every == 0:
                ckpt.save_to_memory(done)
                where = "memory"
            else:
                continue
            blocked_ms = 1e3 * (time.perf_counter() - begin)
            if lead:
                open_saves = [handle.step for handle in handles if not handle.done()]
                state = f"persisting {open_saves}" if open_saves else "all committed"
                say(f"step {done}: loss {loss:.4f}, saved to {where}, blocked {blocked_ms:.1f} ms, {state}")
        losses = [None] * engine.world_size
        torch.distributed.all_gather_object(losses, loss.hex())
        final = digest(engine)
        if lead:
            say(f"final losses {' '.join(map(str, losses))}")
            say(f"final parameters {final}")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
