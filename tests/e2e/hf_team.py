"""Ranks that train a tiny GPT-2 with Hugging Face's Trainer: ``Job(lab, zero=2, steps=12).start()``.

One job is one start of all its ranks; ``how`` says everything about it (see ``life``). What they train depends on the
step only, so that equal losses and parameters, to the last bit, mean equal state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import traceback
import types
from pathlib import Path
from typing import Any

from harness import Lab, Process

from ckpt_engine import listing
from ckpt_engine.storage.posix import PosixStorage

os.environ.setdefault("DS_ACCELERATOR", "cpu")

PRELOAD = (
    "accelerate.accelerator",
    "ckpt_engine.integrations.hf",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._subclasses.schema_check_mode",
    "torch.utils.cpp_extension",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
)
"""Trainer and Accelerate import DeepSpeed wherever it is installed."""


class Job:
    """All ranks of one start. They do not begin before ``start``."""

    def __init__(self, lab: Lab, *, world: int = 1, **how: Any) -> None:
        self.lab, self.world, self.how = lab, world, how
        self.ranks: list[Process] = []

    def start(self) -> Job:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.world):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TOKENIZERS_PARALLELISM": "false"}
            if self.world > 1 or self.how.get("zero") is not None:
                local_rank = 0 if self.how.get("nodes") else rank
                env |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world)}
            how = {"output_dir": self.lab.root, **self.how}
            process = self.lab.rank(life, how, rank=rank, world=self.world, env=env, preload=PRELOAD)
            self.ranks.append(process)
        return self

    def pause(self) -> int:
        """The step at which all ranks wait for ``go``."""
        steps = {process.expect("pause", 90)["step"] for process in self.ranks}
        assert len(steps) == 1
        return steps.pop()

    def go(self) -> None:
        for process in self.ranks:
            process.tell("go")

    def done(self) -> dict[str, Any]:
        """What rank 0 tells, once all ranks have ended well."""
        told = [process.expect("done", 90) for process in self.ranks]
        assert not any("error" in one for one in told), [(one.get("error"), one.get("text")) for one in told]
        for process in self.ranks:
            process.end()
        return told[0]

    def failed(self) -> list[dict[str, Any]]:
        """The errors of all ranks, which have ended by them."""
        told = [process.expect("done", 90) for process in self.ranks]
        for process in self.ranks:
            process.end()
        return told

    def killed(self) -> None:
        """All ranks have died by SIGKILL."""
        assert [process.join(90) for process in self.ranks] == [-9] * self.world, self.log()

    def kill(self) -> None:
        for process in self.ranks:
            os.kill(process.pid, 9)
        for process in self.ranks:
            process.kill()

    def log(self, rank: int = 0) -> str:
        return self.ranks[rank].log.read_text(errors="replace")


def run(lab: Lab, **how: Any) -> dict[str, Any]:
    """A job from its start to its good end."""
    return Job(lab, **how).start().done()


_alive: list[Any] = []
"""What a rank has trained lives until it ends: in a forked process the destructor of DDP's reducer may not return."""
_calm: dict[str, dict[str, Any]] = {}


def calm(lab: Lab, **how: Any) -> dict[str, Any]:
    """The same run by the Trainer alone, undisturbed; once for each ``how``."""
    key = json.dumps(how, sort_keys=True)
    if key not in _calm:
        _calm[key] = run(lab, stock=True, output_dir=f"{lab.dir}/calm", **how)
    return _calm[key]


def committed(root: str) -> dict[str, int]:
    """Tag → step of every committed checkpoint, the oldest first; all of them verify."""
    storage = PosixStorage()
    found = listing.list_committed(storage, root)
    assert not found.damaged and not any(listing.verify(storage, one) for one in found.committed)
    return {os.path.basename(one.commit_dir): one.manifest.attempt.step for one in reversed(found.committed)}


def files_of(root: str, tag: str) -> set[str]:
    """Names in the manifest of ``tag``."""
    manifest = listing.read_manifest(PosixStorage(), os.path.join(root, tag))
    assert manifest is not None
    return {entry.name for entry in manifest.files()}


# -- the rank's side -------------------------------------------------------------------------------------------------


def life(me: Any, how: dict[str, Any]) -> None:
    """Rank program: build, attach, train; tell how it ended.

    how: ``zero`` (None: no DeepSpeed), ``steps``, ``memory``: memory_steps, ``resume``, ``options`` of attach, ``args``
    of TrainingArguments, ``scores``: the metric by step, ``at``: [[step, "kill" | "raise" | "pause" | "pin"], …], when
    so many steps are done, ``nodes``: each rank is on its own, ``scene``: a word for something special, ``stock``:
    without us.
    """
    logging.basicConfig(level=logging.WARNING)
    try:
        me.say("done", **_train(me, how))
    except Exception as error:
        traceback.print_exc()
        me.say("done", error=type(error).__name__, text=str(error))


def _train(me: Any, how: dict[str, Any]) -> dict[str, Any]:
    from nursery import SAVER

    trainer = _trainer(me, how)
    attached = None
    if not how.get("stock"):
        from ckpt_engine import SaverOptions
        from ckpt_engine.integrations import hf
        from ckpt_engine.retention import Retention

        options = dict(how.get("options", {}))
        if how.get("nodes"):
            options["node_id"] = f"node-{me.rank}"
        if "retention" in options:
            options["retention"] = Retention(**options["retention"])
        saver = SaverOptions(**{**SAVER, "linger_s": 30.0, **options.pop("saver", {})})
        attached = me.attached = hf.attach(trainer, memory_steps=how.get("memory", 0), saver=saver, **options)
    result = trainer.train(resume_from_checkpoint=how.get("resume"))
    told = {
        "step": result.global_step,
        "losses": {entry["step"]: float(entry["loss"]).hex() for entry in trainer.state.log_history if "loss" in entry},
        "digest": _digest(trainer),
        "sums": {} if how.get("zero") == 3 else {n: p.sum().item() for n, p in trainer.model.named_parameters()},
        "best": trainer.state.best_model_checkpoint,
        "stalls": [(stall.step, stall.storage) for stall in attached.stalls] if attached else [],
        "limit": trainer.args.save_total_limit,
        "own": sorted(
            name for name in vars(trainer) if name.startswith("_save") or name in ("train", "_get_output_dir")
        ),
        "pushed": trainer.hub.pushed if hasattr(trainer, "hub") else [],
    }
    if attached is not None:
        attached.close()
        told["left"] = sorted(name for name in ("train", "_save_checkpoint") if name in vars(trainer))
    _alive.append(trainer)
    return told


def _trainer(me: Any, how: dict[str, Any]) -> Any:
    import torch
    import transformers

    zero = how.get("zero")
    config = None
    if zero is not None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": zero,
                "stage3_param_persistence_threshold": 100,
                "stage3_gather_16bit_weights_on_model_save": how.get("gather", True),
            },
            **how.get("deepspeed", {}),
        }
    settings = {
        "output_dir": how["output_dir"],
        "max_steps": how.get("steps", 12),
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "deepspeed": config,
        **how.get("args", {}),
    }
    if "RANK" in os.environ and zero is None:
        settings["ddp_backend"] = "gloo"
    args = transformers.TrainingArguments(**settings)
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    draw = torch.Generator().manual_seed(7)
    rows = [torch.randint(0, 64, (16,), generator=draw) for _ in range(40)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    kind = _kinds(me, how)
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=data[:4], callbacks=_callbacks(me, how))
    if how.get("scene") == "hub":
        trainer.hub = Hub(trainer)
    if how.get("scene") == "small":
        from ckpt_engine import budget
        from ckpt_engine.integrations import hf_save

        hf_save.budget = types.SimpleNamespace(room=lambda: budget.Room(4096, "/dev/shm"))
    return trainer


def _kinds(me: Any, how: dict[str, Any]) -> Any:
    import transformers

    scores: dict[str, float] = how.get("scores", {})

    class Scored(transformers.Trainer):
        """Its evaluation is what the test says; it tells of each save the way its caller sees it."""

        def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
            metrics = {"eval_score": scores[str(self.state.global_step)]}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

        def push_to_hub(self, *arguments: Any, **options: Any) -> None:
            raise AssertionError("not in these tests")

        def init_hf_repo(self, *arguments: Any, **options: Any) -> None:
            self.hub_model_id, self.push_in_progress = "me/model", None

    return Scored if scores or how.get("scene") == "hub" else transformers.Trainer


def _callbacks(me: Any, how: dict[str, Any]) -> list[Any]:
    import transformers
    from transformers.trainer_callback import ExportableState

    class Events(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for step, act in how.get("at", []):
                if step != state.global_step:
                    continue
                if act == "kill":
                    os.kill(os.getpid(), 9)
                elif act == "raise":
                    raise ArithmeticError("the loop fails on purpose")
                elif act == "pin":
                    me.attached.pin(4, "a test")
                elif act == "pause":
                    me.say("pause", step=step)
                    me.hear("go", within_s=90)

    class Secret(transformers.TrainerCallback, ExportableState):
        """Its state cannot be written, from a step on."""

        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"key": object() if self.steps < 6 else self.steps}}

    return [Events(), *([Secret()] if how.get("scene") == "secret" else [])]


class Hub:
    """Takes the place of the hub's API; writes down what each upload finds when it is called."""

    def __init__(self, trainer: Any) -> None:
        import huggingface_hub
        import transformers.trainer

        self.pushed: list[list[Any]] = []
        if hasattr(transformers.trainer, "hf_api"):
            transformers.trainer.hf_api = lambda: self
        else:
            transformers.trainer.upload_folder = self.upload_folder
        self.trainer = trainer
        self._job = huggingface_hub

    def upload_folder(self, *, folder_path: str, commit_message: str, path_in_repo: str = "", **_: Any) -> Any:
        from concurrent.futures import Future

        storage, whole = PosixStorage(), None
        if path_in_repo:
            found, broken = listing.in_tag(storage, folder_path)
            whole = bool(found) and not broken and not any(listing.verify(storage, one) for one in found)
        leases = [name for name in os.listdir(self.trainer.args.output_dir) if name.startswith(".reading-")]
        self.pushed.append([os.path.basename(folder_path), path_in_repo, commit_message, whole, len(leases)])
        done: Future[str] = Future()
        done.set_result(commit_message)
        return done


def _digest(trainer: Any) -> str:
    import torch

    sha = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                data = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        else:
            data = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        sha.update(name.encode() + data)
    return sha.hexdigest()


def state_of(root: str, tag: str) -> dict[str, Any]:
    """The trainer_state.json of a checkpoint."""
    found: dict[str, Any] = json.loads(Path(root, tag, "trainer_state.json").read_text())
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal losses of all steps and equal parameters, to the last bit."""
    return (one["step"], one["losses"], one["digest"]) == (other["step"], other["losses"], other["digest"])
