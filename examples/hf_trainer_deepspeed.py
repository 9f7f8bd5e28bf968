"""Hugging Face's Trainer with DeepSpeed and ckpt_engine; kill it at any step and start it again.

    torchrun --nproc-per-node 2 examples/hf_trainer_deepspeed.py --output-dir out --zero 2 --kill-at 33
    torchrun --nproc-per-node 2 examples/hf_trainer_deepspeed.py --output-dir out --zero 2 --resume

Two lines make the Trainer asynchronous: the import, and ``hf.attach(trainer)``. The model is made from a configuration,
the text is Python's own reference manual: nothing is downloaded. ``--zero none`` trains with DDP, or alone; ``--plain``
leaves the two lines out. The resumed run ends with bit-identical losses and parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu" if not os.path.exists("/dev/nvidia0") else "cuda")

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckpt_engine.integrations import hf

CONTEXT = 32


class Text(torch.utils.data.Dataset):
    """Pieces of the manual, byte by byte."""

    def __init__(self, first: int, count: int) -> None:
        from pydoc_data import topics

        self.text = "\n".join(topics.topics.values()).encode()
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = (self.first + index) * CONTEXT
        tokens = torch.tensor(list(self.text[start : start + CONTEXT]))
        return {"input_ids": tokens, "labels": tokens}


class Story(TrainerCallback):
    """Prints each loss, to the last bit, and dies when it is told to."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in (logs or {}) and args.process_index == 0:
            say(f"step {state.global_step}: loss {float(logs['loss']).hex()}")


def say(text: str) -> None:
    """A line and its end in one write: launchers mix the lines of ranks otherwise."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def deepspeed_config(stage: int, gather: bool) -> dict[str, object]:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 100,
        "stage3_gather_16bit_weights_on_model_save": gather,
    }
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="hf-checkpoints")
    parser.add_argument("--zero", default="2", choices=("none", "0", "1", "2", "3"))
    parser.add_argument("--no-gather", action="store_true", help="ZeRO-3: no consolidated weights beside the shards")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--memory-steps", type=int, default=5)
    parser.add_argument("--save-total-limit", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--staging", default="blocking", choices=("blocking", "overlap", "auto"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-at", type=int, default=-1, help="SIGKILL after this many steps")
    parser.add_argument("--plain", action="store_true", help="the Trainer's own checkpointing")
    return parser.parse_args()


def build(args: argparse.Namespace) -> Trainer:
    config = None
    if args.zero != "none":
        import deepspeed

        if os.environ["DS_ACCELERATOR"] == "cpu":  # else DeepSpeed compiles an all-reduce first, for a minute or more
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = deepspeed_config(int(args.zero), not args.no_gather)
    cpu = not torch.cuda.is_available()
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    training = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=1,
        save_strategy="steps",
        save_steps=args.save_steps,
        save_total_limit=args.save_total_limit,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and launched else None,
        report_to=[],
        disable_tqdm=True,
        deepspeed=config,
    )
    transformers.set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=args.width, n_layer=args.layers, n_head=4)
    )
    callbacks = [Story(args.kill_at)]
    return Trainer(model=model, args=training, train_dataset=Text(0, 400), callbacks=callbacks)


def digest(trainer: Trainer) -> str:
    """SHA-256 of all parameters."""
    sha = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    args = arguments()
    trainer = build(args)
    attached = None if args.plain else hf.attach(trainer, memory_steps=args.memory_steps, staging=args.staging)
    begin = time.perf_counter()
    result = trainer.train(resume_from_checkpoint=args.resume or None)
    seconds = time.perf_counter() - begin
    final = digest(trainer)
    if trainer.args.process_index == 0:
        for stall in attached.stalls if attached else ():
            share = 100 * stall.weights_s / stall.total_s
            where = "storage" if stall.storage else "memory"
            say(f"saved step {stall.step} to {where}: {1e3 * stall.total_s:.1f} ms, {share:.0f} % of it the weights")
        say(f"final step {result.global_step} after {seconds:.1f} s")
        say(f"final parameters {final}")
        say(f"last checkpoint {hf.get_last_checkpoint(args.output_dir)}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
