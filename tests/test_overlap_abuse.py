"""Saves that overlap the training, used as nobody should: interrupted, watched by threads, written to under way."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_overlap import Training, engine_in, gated, slots_in

from ckpt_engine import CheckpointEngine, SaverOptions, events
from ckpt_engine.errors import ConfigError, StagingError
from ckpt_engine.events import Event
from ckpt_engine.handles import Handle, Outbox
from ckpt_engine.integrations.deepspeed_shim import owned_by
from ckpt_engine.overlap import Late
from ckpt_engine.states import State


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    with engine_in(tmp_path) as it:
        yield it


def tagged() -> Any:
    tensor: Any = torch.ones(8)
    tensor.tag = "a tensor that is more than its data"
    return tensor


@pytest.mark.parametrize("what", ["an attribute", "the file itself", "gone from its container"])
def test_a_write_that_torch_counts_is_found_whatever_the_tensor_is_and_wherever_it_lies(
    engine: CheckpointEngine, what: str
) -> None:
    held = tagged() if what == "an attribute" else torch.ones(8)
    engine.guard([held])
    state: Any = held if what == "the file itself" else {"held": held}
    with gated():
        handle = engine.save_to_storage(1, {"a.pt": state})
        held.mul_(7)
        if what == "gone from its container":
            del state["held"]
    with pytest.raises(StagingError, match=r"a\.pt: .* was written to"):
        handle.result(10)


def test_what_is_more_than_its_data_and_not_guarded_may_change_at_once(engine: CheckpointEngine) -> None:
    held, average = torch.ones(8), tagged()
    engine.guard([held])
    with gated():
        handle = engine.save_to_storage(1, {"a.pt": {"held": held, "average": average}})
        average.mul_(7)
    handle.result(20)
    assert bool((engine.restore(1).state["a.pt"]["average"] == 1).all())


def test_a_hook_of_somebody_else_that_changes_parameters_before_the_step_waits_too(engine: CheckpointEngine) -> None:
    training = Training()
    weight = training.net[0].weight
    want = weight.detach().clone()

    def shrink(*_: object) -> None:
        weight.data.mul_(0.5)  # not counted by torch

    training.optimizer.register_step_pre_hook(shrink)
    engine.guard(training.optimizer)
    with gated() as gate:
        engine.save_to_memory(1, training.state())
        gate.open_after(0.05)
        training.optimizer.step()
    assert torch.equal(engine.restore().state["model.pt"]["0.weight"], want)


def test_an_optimizer_that_was_replaced_is_let_go_and_one_without_hooks_is_refused(engine: CheckpointEngine) -> None:
    training = Training()
    engine.guard(training.optimizer)
    gone = weakref.ref(training.optimizer)
    training.optimizer = torch.optim.SGD(training.net.parameters())
    gc.collect()
    assert gone() is None

    class Wrapper(torch.optim.SGD):
        def __init__(self) -> None:
            self.param_groups = []

    with pytest.raises(ConfigError, match="no hooks"):
        engine.guard(Wrapper())


def test_threads_that_wait_keep_no_step_from_waiting_and_disturb_no_save(engine: CheckpointEngine) -> None:
    training = Training()
    engine.guard(training.optimizer)
    trouble: list[Exception] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            try:
                engine.wait_staged()
            except Exception as error:
                trouble.append(error)
                return

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for watcher in watchers:
            watcher.start()
        for step in range(200):
            engine.save_to_memory(step, training.state())
            assert engine._core.late is not None, f"the step after save {step} would not wait"
            training.optimizer.step()
    finally:
        sys.setswitchinterval(before)
        over.set()
        for watcher in watchers:
            watcher.join()
    assert not trouble


def test_a_step_waits_for_a_save_that_a_signal_handler_makes_while_it_waits(engine: CheckpointEngine) -> None:
    training, gates = Training(), [threading.Event(), threading.Event()]
    engine.guard(training.optimizer)
    copies = iter(gates)

    def hold(event: Event) -> None:
        if (event.name, event.phase) == ("copy", "started"):
            next(copies).wait(20)

    def save(*_: object) -> None:
        gates[0].set()
        engine.save_to_memory(2, training.state())
        threading.Timer(0.05, gates[1].set).start()

    want = training.net[0].weight.detach().clone()
    remove, before = events.add_hook(hold), signal.signal(signal.SIGALRM, save)
    try:
        engine.save_to_memory(1, training.state())
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        training.optimizer.step()
        assert gates[1].is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
        for gate in gates:
            gate.set()
        remove()
    report = engine.restore()
    assert report.step == 2 and torch.equal(report.state["model.pt"]["0.weight"], want)


@pytest.mark.parametrize("where", ["after the copy", "after the seal", "in a copy without a thread"])
def test_a_save_that_is_interrupted_has_ended_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    training = Training()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def add_and_interrupt(handle: Handle) -> None:
        Outbox.add(engine._core.outbox, handle)
        interrupt()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = CheckpointEngine(
        tmp_path / "root",
        node_id=str(tmp_path),
        saver=SaverOptions(linger_s=0.0),
        staging="blocking" if where == "after the seal" else "overlap",
    )
    engine.guard(training.optimizer)
    with monkeypatch.context() as patch:
        if where == "in a copy without a thread":
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr("ckpt_engine.saving.Saving.copy", lambda *_: interrupt())
        else:
            patch.setattr(engine._core.outbox, "add", add_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.save_to_storage(1, training.state())
    assert slots_in(engine, State.FILLING) == 0
    with pytest.raises(StagingError, match="KeyboardInterrupt"):
        engine.close()


def test_who_is_interrupted_in_close_lets_go_of_its_slots_when_the_copy_is_over(tmp_path: Path) -> None:
    training = Training()
    engine = CheckpointEngine(tmp_path / "root", node_id=str(tmp_path), staging="overlap")
    engine.guard(training.optimizer)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with gated() as gate:
            engine.save_to_memory(3, training.state())
            assert gate.reached.wait(10)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                engine.close(timeout_s=10)
            assert engine._core.link._own.held, "another life could fill the slot that is being filled"
            copying = next(one for one in threading.enumerate() if one.name == "ckpt-engine-copy")
    finally:
        signal.signal(signal.SIGALRM, before)
    copying.join(10)
    assert not engine._core.link._own.held
    with engine_in(tmp_path) as other:
        assert other.restore().step == 3


IN_START = """
import os, signal, sys, threading, torch
from ckpt_engine import CheckpointEngine, SaverOptions
folder, act = sys.argv[1:]
saver = SaverOptions(linger_s=0.0)
engine, other = (
    CheckpointEngine(f"{folder}/{name}", node_id=folder, staging="overlap", saver=saver) for name in ("one", "two")
)
held = torch.ones(8)
engine.guard([held]), other.guard([held])

def handle(*_):
    if act == "close":
        engine.close()
    elif act == "save":
        other.save_to_storage(2, {"a.pt": held})
        other.close()
    elif os.fork() == 0:
        os._exit(0)
    else:
        os.wait()

def start(thread):
    threading.Thread.start = real
    real(thread)
    signal.raise_signal(signal.SIGUSR1)

signal.signal(signal.SIGUSR1, handle)
real, threading.Thread.start = threading.Thread.start, start
handle_of_save = engine.save_to_storage(1, {"a.pt": held})
assert threading.Thread.start is real
engine.close()
other.close()
print(handle_of_save.result(60).step)
"""


@pytest.mark.parametrize("act", ["close", "save", "fork"])
def test_a_signal_handler_may_do_anything_while_the_thread_of_a_save_begins(tmp_path: Path, act: str) -> None:
    words = [sys.executable, "-c", IN_START, str(tmp_path), act]
    done = subprocess.run(words, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == "1"


def test_a_save_whose_thread_was_kept_from_beginning_ends_when_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with engine_in(tmp_path) as engine:
        engine.guard(training.optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(Late, "start", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.save_to_storage(1, training.state())
        assert [one.step for one in engine.wait(60)] == [1]


def test_the_interpreter_ends_although_the_thread_of_a_save_was_lost_in_its_start(tmp_path: Path) -> None:
    program = """
import sys, threading, torch
from ckpt_engine import CheckpointEngine, SaverOptions
real = threading.Thread.start
def start(thread):
    threading.Thread.start = real
    real(thread)
    raise KeyboardInterrupt
engine = CheckpointEngine(sys.argv[1] + "/root", node_id=sys.argv[1], staging="overlap")
held = torch.ones(8)
engine.guard([held])
threading.Thread.start = start
try:
    engine.save_to_memory(1, {"a.pt": held})
except KeyboardInterrupt:
    held += 0
engine.wait_staged()
engine.save_to_memory(2, {"a.pt": held})
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    with engine_in(tmp_path) as engine:
        assert engine.restore().step == 2


def test_a_save_in_a_daemon_thread_is_a_snapshot_although_the_interpreter_ends(tmp_path: Path) -> None:
    program = """
import sys, threading, time, torch
from ckpt_engine import CheckpointEngine, events
engine, held = CheckpointEngine(sys.argv[1] + "/root", node_id=sys.argv[1], staging="overlap"), torch.ones(8)
engine.guard([held])
events.add_hook(lambda event: time.sleep(0.3) if (event.name, event.phase) == ("copy", "started") else None)
saving = threading.Thread(target=lambda: engine.save_to_memory(4, {"a.pt": held}), daemon=True)
saving.start()
saving.join()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    with engine_in(tmp_path) as engine:
        assert engine.restore().step == 4


def test_deepspeed_frozen_parameters_are_copied_at_once() -> None:
    net, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    module = torch.nn.ModuleList([net, teacher])
    owned = owned_by(SimpleNamespace(module=module, optimizer=torch.optim.Adam(net.parameters())), "overlap")
    assert net.weight.untyped_storage()._cdata in owned
    assert teacher.weight.untyped_storage()._cdata not in owned
