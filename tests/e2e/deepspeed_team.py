"""Two DeepSpeed ranks that do what a test tells them, in words: build, attach, train, save, restore, …

``Team(lab)`` is a pair of new processes on CPU and gloo, forked from one that has imported DeepSpeed already: half a
second, not fifteen. ``team.ok("train", first=0, last=5)`` lets both train and returns what each answers, in rank
order; an error of theirs is an answer too: ``{"error": "Corrupt", "text": …}``. What they train depends on step and
rank only, so that equal losses, to the last bit, mean equal state.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness import Lab, Process

from ckpt_engine import listing
from ckpt_engine.storage.posix import PosixStorage

os.environ.setdefault("DS_ACCELERATOR", "cpu")

PRELOAD = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.layer",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "torch._dynamo",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._subclasses.schema_check_mode",
    "torch.utils.cpp_extension",
)
_ports = itertools.count(30000)


class Team:
    """One life of a job. ``stock``: ``import ckpt_engine`` fails there. ``alone``: each rank is on its own node."""

    def __init__(self, lab: Lab, world: int = 2, *, stock: bool = False, alone: bool = False) -> None:
        self.lab = lab
        lab._groups += 1
        group = str(lab.dir / f"group-{lab._groups}")
        self.ranks: list[Process] = []
        for rank in range(world):
            # DeepSpeed wants these; who meets whom is settled by the group's file.
            local_rank = 0 if alone else rank
            numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "MASTER_PORT": next(_ports)}
            here = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}
            process = lab.rank(member, stock, rank=rank, world=world, group=group, env=here, preload=PRELOAD)
            self.ranks.append(process)

    def all(self, verb: str, within_s: float = 60.0, **how: Any) -> list[dict[str, Any]]:
        for rank in range(len(self.ranks)):
            self.tell(rank, verb, **how)
        return [self.hear(rank, within_s) for rank in range(len(self.ranks))]

    def each(self, verb: str, hows: Sequence[dict[str, Any]], within_s: float = 60.0) -> list[dict[str, Any]]:
        """As ``all``, with what differs from rank to rank."""
        for rank, how in enumerate(hows):
            self.tell(rank, verb, **how)
        return [self.hear(rank, within_s) for rank in range(len(self.ranks))]

    def tell(self, rank: int, verb: str, **how: Any) -> None:
        self.ranks[rank].tell("do", verb=verb, how=how)

    def hear(self, rank: int, within_s: float = 60.0) -> dict[str, Any]:
        answer = self.ranks[rank].expect("done", within_s)
        del answer["event"]
        return answer

    def ok(self, verb: str, **how: Any) -> list[dict[str, Any]]:
        """``all``; no rank may answer with an error."""
        answers = self.all(verb, **how)
        bad = [(rank, answer["error"], answer["text"]) for rank, answer in enumerate(answers) if "error" in answer]
        assert not bad, bad
        return answers

    def one(self, verb: str, **how: Any) -> dict[str, Any]:
        """``ok``, where all ranks must answer alike."""
        first, *others = self.ok(verb, **how)
        assert all(other == first for other in others), [first, *others]
        return first

    def start(self, *, name: str = "mlp", options: dict[str, Any] | None = None, **how: Any) -> Team:
        """Build an engine and attach to it."""
        self.ok("build", name=name, **how)
        self.ok("attach", **(options or {}))
        return self

    def run(self, scene: Callable[..., Any], **how: Any) -> list[dict[str, Any]]:
        """``ok`` of a function of the test's own: every rank calls ``scene(member, …)``."""
        return self.ok("run", module=inspect.getfile(scene), scene=scene.__name__, how=how)

    def commit(self, step: int, **how: Any) -> list[dict[str, Any]]:
        """A storage save, and its commit."""
        answers = self.ok("save", step=step, storage=True, **how)
        self.ok("result", step=step)
        return answers

    def kill(self) -> None:
        """SIGKILL all ranks at one time."""
        for process in self.ranks:
            os.kill(process.pid, 9)
        for process in self.ranks:
            process.kill()

    def leave(self) -> None:
        """Everybody closes and goes."""
        self.close()
        self.end()

    def close(self) -> None:
        """Say goodbye, after one more snapshot: that of a mere reader keeps for a while what the dead have left."""
        self.ok("save", step=10_000)
        self.ok("close")

    def end(self) -> None:
        for rank in range(len(self.ranks)):
            self.ranks[rank].tell("do", verb="end", how={})
        for process in self.ranks:
            process.end()


def committed(root: str) -> dict[str, int]:
    """Tag → step of every committed checkpoint; all of them verify."""
    storage = PosixStorage()
    found = listing.list_committed(storage, root)
    assert not found.damaged and not any(listing.verify(storage, one) for one in found.committed)
    return {os.path.basename(one.commit_dir): one.manifest.attempt.step for one in found.committed}


# -- the rank's side -------------------------------------------------------------------------------------------------


def member(me: Any, stock: bool) -> None:
    """Rank program: does what it is told, until "end"."""
    import sys

    import deepspeed

    # Its shared-memory all-reduce has to be compiled, and leaves 132 MB behind when killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # The CPU can do fp16; DeepSpeed asks whether it has instructions for it.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    if stock:
        for name in [name for name in sys.modules if name.split(".")[0] == "ckpt_engine"]:
            del sys.modules[name]
        sys.modules["ckpt_engine"] = None  # type: ignore[assignment]
    me.meet(timeout_s=60)
    deepspeed.init_distributed()
    rank = Member(me)
    while True:
        told = me.hear("do", within_s=300)
        if told["verb"] == "end":
            return
        try:
            me.say("done", **(getattr(rank, told["verb"])(**told["how"]) or {}))
        except Exception as error:
            traceback.print_exc()
            facts = {key: value for key, value in vars(error).items() if isinstance(value, (str, int, list, tuple))}
            me.say("done", **facts, error=type(error).__name__, text=str(error))


class Member:
    """One rank: an engine, what ``attach`` made of it, and the handles of its saves."""

    def __init__(self, me: Any) -> None:
        self.me = me
        self.engine: Any = None
        self.ckpt: Any = None
        self.handles: dict[int, Any] = {}
        self.name = ""
        self.loaded: dict[str, Any] = {}

    def run(self, module: str, scene: str, how: dict[str, Any]) -> Any:
        spec = importlib.util.spec_from_file_location("scenes", module)
        if spec is None or spec.loader is None:
            raise ImportError(module)
        scenes = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(scenes)
        return getattr(scenes, scene)(self, **how)

    # -- engine ------------------------------------------------------------------------------------------------------

    def build(
        self,
        name: str = "mlp",
        stage: int = 0,
        dtype: str = "fp32",
        zero: dict[str, Any] | None = None,
        scale_power: int = 8,
        **more: Any,
    ) -> None:
        """A new engine; the one before goes without a goodbye."""
        import deepspeed
        import torch

        if self.engine is not None:
            self.engine.destroy()
        self.engine = self.ckpt = None
        self.name = name
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10**9,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **(zero or {})},
            "bf16": {"enabled": dtype == "bf16"},
            "fp16": {"enabled": dtype == "fp16", "initial_scale_power": scale_power, "hysteresis": 1},
            **more,
        }
        if name == "pipe":
            config |= {"gradient_accumulation_steps": 2}
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            net = NETS[name]()
        groups: Any = [parameter for parameter in net.parameters() if parameter.requires_grad]
        if name == "moe":
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

            groups = split_params_into_different_moe_groups_for_optimizer({"params": groups, "name": "all"})
        self.engine = deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]

    def train(self, first: int, last: int, fail_at: int = -1) -> dict[str, Any]:
        """Losses of these steps, exactly, and a digest of the parameters after them."""
        losses = []
        for step in range(first, last):
            if step == fail_at:
                raise ArithmeticError("the loop fails on purpose")
            losses.append(float(self._step(step)).hex())
        return {"losses": losses, "digest": self.digest()["digest"]}

    def _step(self, step: int) -> float:
        import torch

        def batches() -> Iterator[Any]:
            for part in itertools.count():
                draw = torch.Generator().manual_seed(10_000 * step + 100 * part + self.me.rank * (self.name != "pipe"))
                x, y = torch.randn(4, 32, generator=draw), torch.randint(0, 7, (4,), generator=draw)
                yield x.to(next(self.engine.module.parameters()).dtype), y

        if self.name == "pipe":
            return float(self.engine.train_batch(data_iter=batches()))
        x, y = next(batches())
        loss = torch.nn.functional.cross_entropy(self.engine(x).float(), y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def digest(self) -> dict[str, Any]:
        """SHA-256 of the parameters this rank has (ZeRO-3: of all)."""
        import deepspeed
        import torch

        sha = hashlib.sha256()
        for name, parameter in sorted(self.engine.module.named_parameters()):
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.engine.zero_optimization_stage() == 3):
                sha.update(name.encode() + parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {"digest": sha.hexdigest(), "steps": self.engine.global_steps}

    # -- ckpt_engine -------------------------------------------------------------------------------------------------

    def attach(self, saver: dict[str, float] | None = None, root: str = "", **options: Any) -> None:
        from nursery import SAVER

        import ckpt_engine

        known = ckpt_engine.SaverOptions(**{**SAVER, "linger_s": 30.0, **(saver or {})})
        if "retention" in options:
            options["retention"] = ckpt_engine.Retention(**options["retention"])
        self.ckpt = ckpt_engine.attach(self.engine, root or self.me.root, saver=known, **options)

    def save(self, step: int, storage: bool = False, client: Any = None, **how: Any) -> dict[str, Any]:
        if storage:
            handle = self.handles[step] = self.ckpt.save_to_storage(step, client_state=client, **how)
            staged = handle.staged
        else:
            staged = self.ckpt.save_to_memory(step, client_state=client, **how)
        return {"step": staged.step, "nbytes": staged.nbytes, "skipped": staged.skipped}

    def result(self, step: int, timeout_s: float = 30.0) -> dict[str, Any]:
        return {"path": self.handles[step].result(timeout_s).path}

    def restore(self, step: int | None = None, **how: Any) -> dict[str, Any]:
        report = self.ckpt.restore(step, **how)
        return {
            "step": report.step,
            "source": report.source,
            "tag": report.tag,
            "unmanaged": report.unmanaged,
            "skipped": len(report.skipped),
            "verified": report.verified_bytes > 0,
            "client": sorted(report.client_state),
            "steps": self.engine.global_steps,
        }

    def wait(self) -> dict[str, Any]:
        return {"steps": [published.step for published in self.ckpt.wait(30.0)]}

    def close(self) -> None:
        self.ckpt.close()

    def load(self, root: str = "", tag: str | None = None, **how: Any) -> dict[str, Any]:
        """``engine.load_checkpoint`` of a caller."""
        path, client = self.engine.load_checkpoint(root or self.me.root, tag, **how)
        return {"path": path, "client": sorted(client or {}), "steps": self.engine.global_steps}

    def store(self, root: str = "", tag: str | None = None, client: Any = None, **how: Any) -> dict[str, Any]:
        """``engine.save_checkpoint`` of a caller."""
        done = self.engine.save_checkpoint(root or self.me.root, tag, client_state=client or {}, **how)
        return {"returned": done}

    def same_as_stock(self, ours: str, theirs: str) -> dict[str, Any]:
        """What differs between two directories of .pt files, in names, sizes or content; for one rank to ask."""
        import torch

        def names(folder: str) -> dict[str, int]:
            return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pt")}

        here, there = names(ours), names(theirs)
        unlike = sorted(here.keys() ^ there.keys())
        for name in here.keys() & there.keys():
            if here[name] > 1.1 * there[name] + 16_384:
                unlike.append(f"{name}: {here[name]} bytes, not {there[name]}")
            pair = [torch.load(os.path.join(folder, name), weights_only=False) for folder in (ours, theirs)]
            unlike += [f"{name}{path}" for path in differences(*pair)]
        return {"unlike": unlike, "files": sorted(here)}


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Paths at which two loaded states are not the same, to the last bit."""
    import torch

    if {type(a), type(b)} == {torch.Size, tuple}:
        a, b = tuple(a), tuple(b)  # the copy DeepSpeed makes of MoE states turns the one into the other
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        facts = [(t.shape, t.dtype, t.stride(), t.requires_grad, t.detach().clone().view(-1).tolist()) for t in (a, b)]
        if facts[0] != facts[1]:
            yield path
    elif isinstance(a, dict):
        if list(a) != list(b):
            yield f"{path}: keys {list(a)} and {list(b)}"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} elements"
        for index, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{path}[{index}]")
    elif hasattr(a, "__dict__") and not isinstance(a, type):
        yield from differences(vars(a), vars(b), f"{path}.__dict__")
    elif a != b and not (a != a and b != b):
        yield f"{path}: {a!r} and {b!r}"


# -- models ----------------------------------------------------------------------------------------------------------


def _mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(32, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 7))


def _frozen() -> Any:
    net = _mlp()
    for parameter in net[0].parameters():
        parameter.requires_grad = False
    return net


def _pipe() -> Any:
    from deepspeed.pipe import PipelineModule
    from torch.nn.functional import cross_entropy

    return PipelineModule(
        layers=list(_mlp()),
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda out, y: cross_entropy(out.float(), y),
    )


def _moe() -> Any:
    from deepspeed.moe.layer import MoE
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 7)
            self.moe = MoE(48, nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48)), num_experts=4, ep_size=2)

        def forward(self, x: Any) -> Any:
            return self.last(self.moe(self.first(x))[0])

    return Experts()


NETS = {"mlp": _mlp, "frozen": _frozen, "pipe": _pipe, "moe": _moe}
