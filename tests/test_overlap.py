"""Staging while the training goes on: what is guarded waits, the rest is copied at once, no tear becomes a snapshot."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import CheckpointEngine, SaverOptions, events, overlap, staging
from ckpt_engine.errors import ConfigError, StagingError
from ckpt_engine.events import Event
from ckpt_engine.states import State

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, foreach=False, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=False),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
}


class Gate:
    """Keeps the copying thread before its first byte until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, event: Event) -> None:
        if (event.name, event.phase) == ("copy", "started"):
            self.reached.set()
            self._open.wait(20)

    def open(self) -> None:
        self._open.set()

    def open_after(self, seconds: float) -> None:
        threading.Timer(seconds, self._open.set).start()


@contextlib.contextmanager
def gated() -> Iterator[Gate]:
    gate = Gate()
    remove = events.add_hook(gate)
    try:
        yield gate
    finally:
        gate.open()
        remove()


@contextlib.contextmanager
def engine_in(folder: Path, **options: Any) -> Iterator[CheckpointEngine]:
    saver = SaverOptions(linger_s=0.0)
    with CheckpointEngine(folder / "root", node_id=str(folder), saver=saver, staging="overlap", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointEngine]:
    with engine_in(tmp_path_factory.mktemp("shared")) as engine:
        yield engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    with engine_in(tmp_path) as it:
        yield it


class Training:
    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["adamw-fused"], width: int = 32
    ) -> None:
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
        self.data = torch.randn(16, width)
        self.optimizer = make(self.net.parameters())
        self.step()

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.net(self.data) ** 3).mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.backward()
        self.optimizer.step(self.backward)  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        return {"model.pt": self.net.state_dict(), "optim.pt": self.optimizer.state_dict()}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for one in value.values():
            yield from leaves(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def same(a: Any, b: Any) -> bool:
    if len(list(leaves(a))) != len(list(leaves(b))):
        return False
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def slots_in(engine: CheckpointEngine, state: State) -> int:
    return sum(slot.word().state is state for slot in engine._core.buffers.mine())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_every_optimizer_waits_for_the_copy(shared: CheckpointEngine, name: str) -> None:
    training = Training(OPTIMIZERS[name])
    shared.guard(training.optimizer)
    want = copy.deepcopy(training.state())
    with gated() as gate:
        staged = shared.save_to_memory(1, training.state())
        assert staged.late_bytes > 0 and gate.reached.wait(10)
        gate.open_after(0.05)  # a step that did not wait would be over long before
        training.optimizer.step(training.backward)  # type: ignore[arg-type]
    report = shared.restore()
    assert report.source == "memory" and same(report.state, {**want, "model.pt": report.state["model.pt"]})
    learnt = {key: value for key, value in want["model.pt"].items() if key in dict(training.net.named_parameters())}
    assert same({key: report.state["model.pt"][key] for key in learnt}, learnt)
    assert not same(training.state(), want), "the step changed nothing: this test could not fail"


def test_what_no_optimizer_owns_is_copied_before_the_return(engine: CheckpointEngine) -> None:
    training, average = Training(), torch.ones(100)
    engine.guard(training.optimizer)
    want = copy.deepcopy({**training.state(), "ema.pt": {"a": average}})
    with gated():
        engine.save_to_memory(1, {**training.state(), "ema.pt": {"a": average}})
        training.backward()  # moves the running mean of the batch norm
        average.zero_()
        assert not same(training.net.state_dict(), want["model.pt"])
    assert same(engine.restore().state, want)


def test_a_step_waits_for_the_bytes_and_not_for_the_seal(engine: CheckpointEngine) -> None:
    training, sealing = Training(), threading.Event()

    def hold(event: Event) -> None:
        if (event.name, event.phase) == ("seal", "started"):
            sealing.wait(20)

    engine.guard(training.optimizer)
    remove = events.add_hook(hold)
    try:
        engine.save_to_memory(1, training.state())
        training.step()
        assert slots_in(engine, State.READY) == 0 and slots_in(engine, State.FILLING) == 1
    finally:
        sealing.set()
        remove()
    engine.wait_staged()
    assert slots_in(engine, State.READY) == 1


def test_a_write_that_torch_counts_gives_the_snapshot_up_and_names_the_tensor(
    engine: CheckpointEngine, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    engine.guard(training.optimizer)
    engine.save_to_memory(1, training.state())
    with gated():
        handle = engine.save_to_storage(2, training.state())
        with torch.no_grad():
            training.net[0].weight.mul_(2)
    with pytest.raises(StagingError, match=r"model.pt: \['0.weight'\] was written to"):
        handle.result(10)
    with gated():
        engine.save_to_memory(3, training.state())
        training.optimizer.state[training.net[0].bias]["exp_avg"].zero_()
    with caplog.at_level(logging.WARNING, "ckpt_engine"):
        engine.wait_staged()
    assert "optim.pt: ['state'][1]['exp_avg'] was written to" in caplog.text
    assert slots_in(engine, State.FILLING) == 0
    assert engine.restore().step == 1
    assert engine.save_to_memory(4, training.state()).step == 4
    assert engine.restore().step == 4


def test_on_error_raise_tells_of_it_at_the_next_save_and_not_in_the_loop(tmp_path: Path) -> None:
    training = Training()
    with engine_in(tmp_path, on_error="raise") as engine:
        engine.guard(training.optimizer)
        with gated():
            engine.save_to_memory(1, training.state())
            with torch.no_grad():
                training.net[0].weight.mul_(2)
        training.step()
        with pytest.raises(StagingError, match="weight"):
            engine.save_to_memory(2, training.state())
        assert engine.restore().step == 2


def test_verify_staging_finds_a_write_that_torch_does_not_count(tmp_path: Path) -> None:
    training = Training()
    with engine_in(tmp_path, verify_staging=True) as engine:
        engine.guard(training.optimizer)
        engine.save_to_storage(1, training.state()).result(20)
        with gated():
            handle = engine.save_to_storage(2, training.state())
            training.net[0].weight.data.mul_(2)
        with pytest.raises(StagingError, match=r"model\.pt: tensor record 0 was written to"):
            handle.result(10)


def test_a_storage_that_is_freed_under_the_copy_is_noticed_after_it(engine: CheckpointEngine) -> None:
    held = torch.ones(10)
    engine.guard([held])
    handle = engine.save_to_storage(1, {"a.pt": {"held": held}})
    engine.wait_staged()
    handle.result(20)
    with gated():
        handle = engine.save_to_storage(2, {"a.pt": {"held": held}})
        kept = held.untyped_storage().clone()  # the old bytes stay readable in this test
        held.untyped_storage().resize_(1 << 22)
    assert kept.nbytes() == 40
    with pytest.raises(StagingError, match="resized"):
        handle.result(10)


@pytest.mark.parametrize("end", ["next save", "wait", "result", "restore", "close"])
def test_whatever_needs_the_finished_copy_waits_for_it(tmp_path: Path, end: str) -> None:
    training = Training()
    with engine_in(tmp_path) as engine:
        engine.guard(training.optimizer)
        want = copy.deepcopy(training.state())
        with gated() as gate:
            handle = engine.save_to_storage(1, training.state())
            assert gate.reached.wait(10)
            gate.open_after(0.05)
            if end == "next save":
                engine.save_to_memory(2, training.state())
            elif end == "restore":
                assert engine.restore().step == 1
            elif end == "wait":
                assert [published.step for published in engine.wait(20)] == [1]
            elif end == "result":
                assert handle.result(20).step == 1
            else:
                engine.close()
        if end != "close":
            assert same(engine.restore(1).state, want)
    with engine_in(tmp_path) as engine:  # from storage, or what is in memory still
        assert same(engine.restore(1).state, want)


def test_an_exception_in_the_loop_still_makes_the_snapshot(tmp_path: Path) -> None:
    training = Training()
    kept = {"node_id": str(tmp_path), "staging": "overlap", "saver": SaverOptions(linger_s=30.0)}
    with gated() as gate, pytest.raises(KeyError), CheckpointEngine(tmp_path / "root", **kept) as engine:
        engine.guard(training.optimizer)
        engine.save_to_memory(7, training.state())
        gate.open_after(0.05)
        raise KeyError("in the training loop")
    with engine_in(tmp_path) as engine:
        report = engine.restore()
        assert (report.step, report.source) == (7, "memory") and same(report.state, training.state())


def test_a_forked_child_steps_without_waiting_for_the_copy_of_its_parent(engine: CheckpointEngine) -> None:
    training = Training()
    engine.guard(training.optimizer)
    with gated() as gate:
        engine.save_to_memory(1, training.state())
        assert gate.reached.wait(10)
        child = os.fork()
        if not child:
            signal.alarm(10)
            training.optimizer.step()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert slots_in(engine, State.FILLING) == 1
    assert engine.restore().step == 1


def test_a_signal_that_raises_in_the_guard_keeps_the_step_from_changing_anything(engine: CheckpointEngine) -> None:
    training = Training()
    engine.guard(training.optimizer)
    want = copy.deepcopy(training.optimizer.state_dict())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with gated():
            engine.save_to_memory(1, training.state())
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                training.optimizer.step()
            assert same(training.optimizer.state_dict(), want)
    finally:
        signal.signal(signal.SIGALRM, before)
    training.optimizer.step()
    report = engine.restore()
    assert report.step == 1 and same(report.state["optim.pt"], want)


def test_where_no_thread_can_be_had_the_save_blocks(engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    engine.guard(training.optimizer)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        engine.save_to_memory(1, training.state())
    assert slots_in(engine, State.READY) == 1


def test_one_thread_copies_for_all_saves_and_ends_with_its_engine(tmp_path: Path) -> None:
    training, seen = Training(), set()

    def note(event: Event) -> None:
        if event.name == "copy":
            seen.add(threading.current_thread())

    with engine_in(tmp_path) as engine:
        engine.guard(training.optimizer)
        remove = events.add_hook(note)
        try:
            for step in range(1, 4):
                engine.save_to_memory(step, training.state())
                training.optimizer.step()
        finally:
            remove()
    (thread,) = seen
    thread.join(10)
    assert not thread.is_alive()


def test_auto_copies_a_small_state_at_once_and_a_large_one_late(tmp_path: Path) -> None:
    held = {"small": torch.ones(1000), "large": torch.ones(5 << 20)}
    node = {"node_id": str(tmp_path), "saver": SaverOptions(linger_s=0.0)}
    with CheckpointEngine(tmp_path / "root", staging="auto", **node) as engine:
        engine.guard(held.values())
        assert engine.save_to_memory(1, {"a.pt": {"w": held["small"]}}).late_bytes == 0
        assert slots_in(engine, State.READY) == 1
        assert engine.save_to_memory(2, {"a.pt": {"w": held["large"]}}).late_bytes == 20 << 20


def test_nothing_guarded_and_an_optimizer_in_backward_are_copied_at_once_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with engine_in(tmp_path) as engine, caplog.at_level(logging.WARNING, "ckpt_engine"):
        assert engine.save_to_memory(1, training.state()).late_bytes == 0
        assert engine.save_to_memory(2, training.state()).late_bytes == 0
        assert caplog.text.count("nothing is guarded") == 1
        engine.guard(training.optimizer)
        assert engine.save_to_memory(3, training.state()).late_bytes > 0
        training.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        assert engine.save_to_memory(4, training.state()).late_bytes == 0
        assert engine.save_to_memory(5, training.state()).late_bytes == 0
        assert caplog.text.count("update it in backward") == 1


def test_a_guard_takes_optimizers_and_tensors_and_leaves_no_hook(tmp_path: Path) -> None:
    training = Training()
    with engine_in(tmp_path) as engine:
        for wrong in (3, "model", [1], training.net):
            with pytest.raises(ConfigError, match="guard"):
                engine.guard(wrong)  # type: ignore[arg-type]
        engine.guard(training.optimizer)
        engine.guard(training.optimizer)
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert not training.optimizer._optimizer_step_pre_hooks


def test_long_tensors_are_cut_into_pieces_and_small_ones_share_one(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.staging.PIECE", 10_000)
    held = [torch.randn(size) for size in (1, 0, 2500, 100, 20_001, 7, 2500)]
    engine.guard(held)
    published = engine.save_to_storage(1, {"a.pt": {"held": held}}).result(20)
    assert same(torch.load(f"{published.path}/a.pt"), {"held": held})
    assert same(engine.restore().state["a.pt"], {"held": held})


@pytest.mark.parametrize("sizes", [[], [0, 0], [1], [3 * 4096 + 1], [5, 4096 * 9, 0, 7, 4096 * 4, 4096 * 4 + 1, 1]])
def test_pieces_are_all_bytes_once_in_order_and_none_is_too_large(sizes: list[int]) -> None:
    most, met = 4 * 4096, [0] * len(sizes)
    last = 0
    for first, end, start, nbytes in staging._pieces(sizes, most):
        assert first in (last, last - 1) and first < end
        last = end
        if nbytes:
            assert end == first + 1 and start == met[first] and nbytes <= most
            met[first] += nbytes
        else:
            assert sum(sizes[first:end]) <= most and not any(met[first:end])
            met[first:end] = sizes[first:end]
    assert met == sizes and last == len(sizes)


def test_tensors_of_inference_mode_are_saved_late_with_the_others(engine: CheckpointEngine) -> None:
    with torch.inference_mode():
        frozen = torch.arange(5000.0)
    moving = torch.ones(5000)
    engine.guard([frozen, moving])
    published = engine.save_to_storage(1, {"a.pt": {"frozen": frozen, "moving": moving}}).result(20)
    assert same(torch.load(f"{published.path}/a.pt"), {"frozen": frozen, "moving": moving})
    with gated():
        handle = engine.save_to_storage(2, {"a.pt": {"frozen": frozen, "moving": moving}})
        moving.mul_(2)
    with pytest.raises(StagingError, match=r"\['moving'\] was written to"):
        handle.result(20)


def test_what_has_no_storage_does_not_hide_the_storages_behind_it() -> None:
    plain, sparse = [torch.ones(2), torch.ones(3)], torch.eye(3).to_sparse()
    assert overlap.storages([plain[0], sparse, plain[1], sparse]) == overlap.storages(plain)
    assert len(overlap.storages(plain)) == 2


def test_prepare_makes_the_slots_before_the_first_save(engine: CheckpointEngine) -> None:
    state = {"a.pt": {"w": torch.ones(1 << 18)}}
    engine.prepare(state)
    slots = engine._core.buffers.mine()
    assert len(slots) == 2 and all(slot.capacity >= 1 << 20 for slot in slots)
    engine.save_to_memory(1, state)
    assert {slot.name for slot in engine._core.buffers.mine()} == {slot.name for slot in slots}


def test_slots_of_a_wrong_size_grow_and_it_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_in(tmp_path, slot_bytes=1 << 16) as engine, caplog.at_level(logging.WARNING, "ckpt_engine"):
        assert [slot.capacity >> 16 for slot in engine._core.buffers.mine()] == [1, 1]
        for step in (1, 2, 3):
            engine.save_to_memory(step, {"a.pt": {"w": torch.full((1 << 18,), step)}})
        assert caplog.text.count("the state outgrew its buffer") == 1
        assert bool((engine.restore().state["a.pt"]["w"] == 3).all())
