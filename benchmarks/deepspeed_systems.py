"""DeepSpeed's own ``save_checkpoint``, and ckpt_engine attached to an engine of the same kind."""

from __future__ import annotations

import os
from typing import Any

import torch
from systems import Handled, State, System, split


class Net(torch.nn.Module):
    """Parameters of given sizes; ``forward`` gives each of them a gradient."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.empty(size).normal_() for size in sizes)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale * torch.stack([layer.mean() for layer in self.layers]).sum()


class Stock(System):
    """``engine.save_checkpoint``: torch.save, which nobody syncs."""

    needs_group = True
    memory = 2.6  # gradients of the first step, and what loading takes

    def make_state(self, mib: int, tensors: int) -> State:
        """Parameters and both moments of AdamW, ``mib`` MiB together; the engine owns them."""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its all-reduce would have to be compiled
        deepspeed.init_distributed("gloo")
        net = Net(split(mib / 3, max(1, tensors // 3)))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        }
        self.net_engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        self.net_engine.backward(self.net_engine(torch.ones(())))
        self.net_engine.step()
        for parameter in net.parameters():
            parameter.grad = None
        return named(self.net_engine.module.state_dict(), self.net_engine.optimizer.state_dict())

    def save(self, step: int) -> None:
        self.net_engine.save_checkpoint(str(self.work), tag=f"step-{step}")

    def load(self, step: int) -> State:
        found = torch.load(self.path(step) / "mp_rank_00_model_states.pt", weights_only=False)
        return named(found["module"], found["optimizer"])


class Attached(Handled, Stock):
    """``ckpt_engine.attach`` to such an engine."""

    loads_in_place = True
    memory = 4.0
    variants = ("DeepSpeed with ckpt_engine, memory", "DeepSpeed with ckpt_engine, storage")

    def start(self, state: State) -> None:
        import ckpt_engine

        super().start(state)
        self.ckpt = ckpt_engine.attach(self.net_engine, self.work / "root", keep_last=2, on_error="raise")

    def face(self) -> Any:
        return self.ckpt

    def to_memory(self, step: int) -> None:
        self.ckpt.save_to_memory(step)

    def to_storage(self, step: int) -> Any:
        return self.ckpt.save_to_storage(step)

    def load(self, step: int) -> State:
        """Into the engine, whose optimizer has new tensors then: what is trained on goes in their place."""
        self.ckpt.restore(step)
        for number, moments in enumerate(self.net_engine.optimizer.state.values()):
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = self.state[f"{name}.{number}"].copy_(moments[name])
        return self.state

    def close(self) -> None:
        self.ckpt.close()


def named(module: dict[str, Any], optimizer: dict[str, Any]) -> State:
    """The large tensors of a model and its AdamW."""
    found = {f"module.{name}": tensor.detach() for name, tensor in module.items()}
    for number, state in optimizer["state"].items():
        found |= {f"{moment}.{number}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
    return found


SYSTEMS = [("DeepSpeed save_checkpoint", "Stock"), ("DeepSpeed with ckpt_engine", "Attached")]
