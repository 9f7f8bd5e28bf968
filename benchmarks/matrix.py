"""Every ZeRO stage and precision: what ckpt_engine saved comes back bit for bit, with it, without it, and by the tools.

    python benchmarks/matrix.py [--stages 0,1,2,3] [--dtypes fp32,bf16,fp16] [--keep DIRECTORY]

For each combination two ranks (CPU, gloo) train 5 steps, save, and train 5 more: the truth. Then, each in processes of
their own: *resume* restores and trains 5 steps; *stock* does so with DeepSpeed alone, where ``import ckpt_engine``
fails; *fp32* is DeepSpeed's zero_to_fp32.py, whose weights are compared with those of the engine; *universal* is its
ds_to_universal.py, whose result a single rank loads. Losses and parameters are compared bit for bit. "-": DeepSpeed
has no such tool for that combination. Exit code 1 if anything differs.

Processes are forked from one that has imported DeepSpeed, which makes them new in a second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SAVED, TRAINED = 5, 10
WITHIN_S = 120.0
PRELOAD = [  # all that a rank imports, but for ckpt_engine
    "deepspeed",
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
]


# -- in a rank --------------------------------------------------------------------------------------------------------


def build(stage: int, dtype: str, **more: Any) -> Any:
    import deepspeed
    from torch import manual_seed, nn

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its all-reduce would have to be compiled
    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 20},
        **more,
    }
    manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        net = nn.Sequential(
            nn.Linear(32, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 7)
        )
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def train(engine: Any, first: int, last: int) -> list[str]:
    """Train steps ``first`` to ``last`` on data that depend on step and rank only; the losses, exactly."""
    import torch

    losses = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        x, y = torch.randn(4, 32, generator=draw), torch.randint(0, 7, (4,), generator=draw)
        dtype = next(engine.module.parameters()).dtype
        loss = torch.nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    return losses


def parameters(engine: Any) -> dict[str, Any]:
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found[name] = parameter.detach().clone()
    return found


def digest(tensors: dict[str, Any]) -> str:
    """SHA-256 of all of them, by name."""
    import torch

    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def truth(root: str, stage: int, dtype: str) -> dict[str, Any]:
    """Train, save, train on."""
    import ckpt_engine

    engine = build(stage, dtype)
    train(engine, 0, SAVED)
    with ckpt_engine.attach(engine, root) as ckpt:
        handle = ckpt.save_to_storage(SAVED)
        saved = digest(parameters(engine))
        losses = train(engine, SAVED, TRAINED)
        handle.result(WITHIN_S)
    return {"saved": saved, "losses": losses, "trained": digest(parameters(engine))}


def resume(root: str, stage: int, dtype: str) -> dict[str, Any]:
    import ckpt_engine

    engine = build(stage, dtype)
    with ckpt_engine.attach(engine, root) as ckpt:
        report = ckpt.restore()
        if (report.step, report.source) != (SAVED, "storage"):
            raise RuntimeError(f"restored {report}")
        return _went_on(engine)


def stock(root: str, stage: int, dtype: str) -> dict[str, Any]:
    without_us()
    engine = build(stage, dtype)
    path, _ = engine.load_checkpoint(root)
    if path is None:
        raise RuntimeError("DeepSpeed found nothing to load")
    return _went_on(engine)


def _went_on(engine: Any) -> dict[str, Any]:
    saved = digest(parameters(engine))
    return {"saved": saved, "losses": train(engine, SAVED, TRAINED), "trained": digest(parameters(engine))}


def fp32(root: str, stage: int, dtype: str) -> dict[str, Any]:
    """DeepSpeed's own script, as it lies beside the checkpoints; its ``main`` would ask for huggingface_hub."""
    import torch

    without_us()
    script = runpy.run_path(f"{root}/zero_to_fp32.py")
    script["convert_zero_checkpoint_to_fp32_state_dict"](root, f"{root}/fp32", max_shard_size=None)
    weights = torch.load(f"{root}/fp32/pytorch_model.bin")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return {"saved": digest({name: weight.to(wanted) for name, weight in weights.items()})}


def universal(root: str, stage: int, dtype: str) -> dict[str, Any]:
    """DeepSpeed's own converter; then one rank loads what two have saved."""
    without_us()
    tag = f"{root}/global_step{SAVED}"
    converter = "deepspeed.checkpoint.ds_to_universal"
    sys.argv = [converter, "--input_folder", tag, "--output_folder", f"{tag}_universal"]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    sys.modules.pop(converter, None)
    runpy.run_module(converter, run_name="__main__")
    engine = build(stage, dtype, checkpoint={"load_universal": True})
    engine.load_checkpoint(root)
    if engine.global_steps != SAVED:
        raise RuntimeError(f"the universal checkpoint holds step {engine.global_steps}")
    return {"saved": digest(parameters(engine))}


def without_us() -> None:
    """From now on ``import ckpt_engine`` fails."""
    if "ckpt_engine" in sys.modules:
        raise RuntimeError("ckpt_engine is imported already")
    sys.modules["ckpt_engine"] = None  # type: ignore[assignment]


# -- in the parent ----------------------------------------------------------------------------------------------------


def run_ranks(
    phase: Callable[..., dict[str, Any]], world: int, root: str, log: Path, *how: Any
) -> list[dict[str, Any]]:
    """``phase(root, …)`` in ``world`` new processes; what each answers. Raises RuntimeError with the end of the log."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = _free_port()
    pairs = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=_rank, args=(pairs[rank][1], phase, rank, world, port, log, root, *how))
        for rank in range(world)
    ]
    for process, (_, theirs) in zip(ranks, pairs, strict=True):
        process.start()
        theirs.close()
    deadline = time.monotonic() + WITHIN_S
    try:
        answers = []
        for process, (ours, _) in zip(ranks, pairs, strict=True):
            answer: Any = "no answer"
            if ours.poll(max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(EOFError):
                    answer = ours.recv()
            if not isinstance(answer, dict):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:]) if log.exists() else ""
                raise RuntimeError(f"{phase.__name__}: {answer}\n{tail}")
            process.join(max(0.0, deadline - time.monotonic()))
            answers.append(answer)
        return answers
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(
    told: Connection, phase: Callable[..., dict[str, Any]], rank: int, world: int, port: int, log: Path, *how: Any
) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        told.send(phase(*how))
    except BaseException as error:
        traceback.print_exc()
        told.send(f"rank {rank}: {type(error).__name__}: {error}")
    finally:
        import torch.distributed as dist

        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def try_combination(stage: int, dtype: str, folder: Path) -> dict[str, str]:
    """What came of each phase: "ok", "-" or what is wrong."""
    root = str(folder / "checkpoints")
    how = (stage, dtype)
    told: dict[str, str] = {}
    try:
        want = run_ranks(truth, 2, root, folder / "truth.log", *how)
    except RuntimeError as error:
        return {"truth": str(error)}
    tools = stage > 0
    for phase, world, applies in ((resume, 2, True), (stock, 2, True), (fp32, 1, tools), (universal, 1, tools)):
        if not applies:
            told[phase.__name__] = "-"
            continue
        try:
            got = run_ranks(phase, world, root, folder / f"{phase.__name__}.log", *how)
        except RuntimeError as error:
            told[phase.__name__] = str(error)
            continue
        unlike = [
            f"rank {rank}: {key} is {value}, not {want[rank][key]}"
            for rank, answer in enumerate(got)
            for key, value in answer.items()
            if value != want[rank][key]
        ]
        told[phase.__name__] = "; ".join(unlike) or "ok"
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--keep", type=Path, help="leave checkpoints and logs here")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    combinations = [(int(stage), dtype) for stage in args.stages.split(",") for dtype in args.dtypes.split(",")]
    place = args.keep or Path(tempfile.mkdtemp(prefix="ckpt-matrix-"))
    failed = 0
    try:
        for stage, dtype in combinations:
            begin = time.monotonic()
            folder = place / f"zero{stage}-{dtype}"
            folder.mkdir(parents=True)
            told = try_combination(stage, dtype, folder)
            bad = {phase: text for phase, text in told.items() if text not in ("ok", "-")}
            line = "  ".join(f"{phase}: {'FAILED' if phase in bad else text}" for phase, text in told.items())
            print(f"ZeRO-{stage} {dtype}  {line}  ({time.monotonic() - begin:.1f} s)", flush=True)
            for phase, text in bad.items():
                print(f"    {phase}: {text}", flush=True)
            failed += bool(bad)
    finally:
        if args.keep is None:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{len(combinations) - failed} of {len(combinations)} combinations are bit-equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
