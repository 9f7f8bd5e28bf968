"""Lightning's Trainer with one line of ours: what it saves, removes and finds again, and the example, killed."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.test_examples import finals, run
from harness import Lab, kill, until
from torch import nn

from ckpt_engine import listing
from ckpt_engine.errors import ConfigError, Corrupt, NotFound
from ckpt_engine.integrations import lightning as ours
from ckpt_engine.storage.posix import PosixStorage

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders, loggers and directories


class Stage:
    """Trainers of one package, a model each, and what happens at which step."""

    def __init__(self, lab: Lab, package: str = "lightning.pytorch") -> None:
        self.lab = lab
        self.dirpath = str(lab.dir / "ckpt")
        lab.root = f"{self.dirpath}/ckpt_engine"
        self.wait: Callable[[], Any] = tuple
        self.pl = pl = importlib.import_module(package)

        class Model(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Linear(4, 2)
                self.score: Callable[[int], float] = lambda step: -float(step)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                x = torch.full((3, 4), float(self.global_step % 5))
                self.log("score", self.score(self.global_step + 1))
                return self.net(x).square().sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=0.1)

        class At(pl.Callback):
            """``acts[step]`` runs after this many steps, ``after`` behind the saves of that step."""

            def __init__(self, acts: dict[int, Callable[[], None]]) -> None:
                self.acts = acts
                self.state: Any = 0

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                self.acts.get(trainer.global_step, lambda: None)()

            def state_dict(self) -> dict[str, Any]:
                return {"state": self.state}

        self.model, self.at = Model, At

    def trainer(self, steps: int, at: Any = None, io: Any = None, logger: Any = False, **keep: Any) -> Any:
        every = keep.pop("every_n_train_steps", 2)
        callbacks = [self.pl.callbacks.ModelCheckpoint(self.dirpath, every_n_train_steps=every, **keep)]
        return self.pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=callbacks + ([at] if at else []),
            plugins=[io] if io else None,
            logger=logger,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def fit(self, trainer: Any, path: Any = None, score: Callable[[int], float] | None = None, **options: Any) -> Any:
        """The model afterwards. ``options`` go to attach, which ``stock=True`` leaves out."""
        model = self.model()
        model.score = score or model.score
        if not options.pop("stock", False):
            self.wait = ours.attach(trainer, **options).wait
        trainer.fit(model, [0] * 100, ckpt_path=path)
        return model

    def files(self) -> list[str]:
        """Checkpoints that can be read, by name."""
        return sorted(name for name in os.listdir(self.dirpath) if os.path.isfile(f"{self.dirpath}/{name}"))

    def pause(self) -> int:
        """The saver stands still from here on."""
        pid = until(lambda: self.lab.saver(), 20, "the saver")
        os.kill(pid, signal.SIGSTOP)
        return int(pid)

    def step_in(self, name: str) -> int:
        return int(torch.load(f"{self.dirpath}/{name}", weights_only=False)["global_step"])


@pytest.fixture(params=["lightning.pytorch"])
def stage(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Stage]:
    for name in ("lightning", "pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield Stage(lab, request.param)


def values(model: nn.Module) -> list[Any]:
    return [tensor.tolist() for tensor in model.state_dict().values()]


def tags(root: str) -> list[str]:
    """Of the committed checkpoints, oldest first."""
    return [one.manifest.attempt.tag for one in listing.list_committed(PosixStorage(), root).committed][::-1]


@pytest.mark.parametrize("stage", ["lightning.pytorch", "pytorch_lightning"], indirect=True)
def test_what_is_saved_is_what_lightning_saves_and_it_reads_it_without_us(stage: Stage) -> None:
    trainer = stage.trainer(6, save_top_k=2, monitor="step", mode="max", save_last=True)
    model = stage.fit(trainer)
    assert stage.files() == ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt", "last.ckpt"]
    assert tags(stage.lab.root) == ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt", "last.ckpt"]
    found = torch.load(f"{stage.dirpath}/last.ckpt", weights_only=True)
    assert found["global_step"] == 6 and found["optimizer_states"] and found["loops"] and found["callbacks"]
    for name in ("save_checkpoint", "remove_checkpoint", "teardown"):
        assert name not in vars(trainer.strategy), "Lightning has its own methods back"
    assert values(stage.model.load_from_checkpoint(f"{stage.dirpath}/last.ckpt")) == values(model)
    assert os.path.isfile(trainer.checkpoint_callback.best_model_path), "the end of fit has waited for the commits"
    calm = stage.fit(stage.trainer(10), stock=True)
    assert values(stage.fit(stage.trainer(10), f"{stage.dirpath}/last.ckpt", stock=True)) == values(calm)
    assert values(stage.fit(stage.trainer(10), f"{stage.dirpath}/epoch=0-step=4.ckpt")) == values(calm)


def test_the_newest_of_all_is_resumed_from_and_an_exception_leaves_the_snapshot(stage: Stage) -> None:
    def fail() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        stage.fit(stage.trainer(9, stage.at({5: fail}), save_top_k=-1), memory_steps=1)
    steps: list[int] = []
    trainer = stage.trainer(9, save_top_k=-1)
    begin = stage.at({5: lambda: steps.append(trainer.global_step)})
    trainer.callbacks.insert(0, begin)
    model = stage.fit(trainer, "last", memory_steps=1)
    assert steps == [5] and values(model) == values(stage.fit(stage.trainer(9), stock=True))
    assert tags(stage.lab.root) == [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6, 8)], (
        "the snapshot went at a commit"
    )


def test_with_nothing_to_resume_it_starts_anew_and_what_lightning_alone_saved_is_taken(stage: Stage) -> None:
    calm = stage.fit(stage.trainer(8), stock=True)
    shutil.rmtree(stage.dirpath)
    assert values(stage.fit(stage.trainer(8, save_top_k=0), "last")) == values(calm)
    stage.fit(stage.trainer(4, save_last=True), stock=True)
    assert not os.path.islink(f"{stage.dirpath}/last.ckpt")
    pids: list[int] = []
    at = stage.at({5: lambda: pids.append(stage.pause()), 7: lambda: seen.append(stage.step_in("last.ckpt"))})
    seen: list[int] = []
    trainer = stage.trainer(8, at, save_last=True)
    release = stage.at({7: lambda: os.kill(pids[0], signal.SIGCONT)})
    trainer.callbacks.append(release)
    assert values(stage.fit(trainer, "last")) == values(calm)
    assert seen == [4], "what Lightning had saved stands until ours is committed"
    assert os.path.islink(f"{stage.dirpath}/last.ckpt") and stage.step_in("last.ckpt") == 8


def test_with_a_limit_of_one_the_last_complete_checkpoint_stays_until_the_next_is_committed(stage: Stage) -> None:
    held: list[list[str]] = []
    pids: list[int] = []

    def look() -> None:
        held.append([name for name in stage.files() if stage.step_in(name)])
        os.kill(pids[0], signal.SIGCONT)

    acts = {3: lambda: (until(lambda: stage.files(), 20), pids.append(stage.pause())), 7: look}
    stage.fit(stage.trainer(8, stage.at(acts), save_top_k=1), slots=3)
    assert held == [["epoch=0-step=2.ckpt"]], "it does not wait, and removes nothing, not even what is in flight"
    assert stage.files() == ["epoch=0-step=8.ckpt"] and tags(stage.lab.root) == ["epoch=0-step=8.ckpt"]


@pytest.mark.parametrize(("limit", "best"), [(1, 2), (1, 10), (2, 6), (3, 10)])
def test_the_best_are_kept_whenever_they_were(stage: Stage, limit: int, best: int) -> None:
    def score(step: int) -> float:
        return abs(step - best) + step / 100

    keep = {"save_top_k": limit, "monitor": "score", "mode": "min"}
    trainer = stage.trainer(10, **keep)
    stage.fit(trainer, score=score)
    mine = stage.files()
    assert os.path.basename(trainer.checkpoint_callback.best_model_path) == f"epoch=0-step={best}.ckpt"
    shutil.rmtree(stage.dirpath)
    stage.fit(stage.trainer(10, **keep), score=score, stock=True)
    assert mine == stage.files() and len(mine) == limit


def test_names_that_come_again_are_those_of_lightning(stage: Stage) -> None:
    keep = {"save_top_k": 1, "monitor": "score", "mode": "min", "filename": "latest", "save_last": True}
    stage.fit(stage.trainer(9, **keep), slots=3)
    mine = {name: stage.step_in(name) for name in stage.files()}
    assert sorted(tags(stage.lab.root)) == sorted(mine)
    shutil.rmtree(stage.dirpath)
    stage.fit(stage.trainer(9, **keep), stock=True)
    assert mine == {name: stage.step_in(name) for name in stage.files()}


def test_a_link_to_the_last_one_names_a_complete_checkpoint_at_every_instant(stage: Stage) -> None:
    pids: list[int] = []
    seen: list[int] = []

    def look() -> None:
        seen.append(stage.step_in("last.ckpt"))
        os.kill(pids[0], signal.SIGCONT)

    acts = {2: lambda: stage.wait(), 3: lambda: pids.append(stage.pause()), 5: look}
    stage.fit(stage.trainer(6, stage.at(acts), save_top_k=1, save_last="link"), slots=3)
    assert seen == [2] and stage.step_in("last.ckpt") == 6
    assert os.readlink(f"{stage.dirpath}/last.ckpt") == "epoch=0-step=6.ckpt"
    assert stage.files() == ["epoch=0-step=6.ckpt", "last.ckpt"]


def test_what_cannot_be_saved_is_named_and_the_training_goes_on(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    at = stage.at({})
    at.acts = {1: lambda: setattr(at, "state", {"lock": lambda: 0}), 3: lambda: setattr(at, "state", 1)}
    stage.fit(stage.trainer(4, at, save_top_k=-1))
    assert re.search(r"step 2 is not saved, the training goes on: .*lock", caplog.text)
    assert stage.files() == ["epoch=0-step=4.ckpt"]


def test_a_logger_is_told_of_a_checkpoint_when_it_can_read_it(stage: Stage) -> None:
    told: list[int] = []

    class Uploader(stage.pl.loggers.CSVLogger):  # type: ignore[name-defined, misc]
        def after_save_checkpoint(self, callback: Any) -> None:
            told.append(stage.step_in(os.path.basename(callback.best_model_path)))

    logger = Uploader(str(stage.lab.dir))
    pids: list[int] = []
    at = stage.at({1: lambda: pids.append(stage.pause()), 3: lambda: os.kill(pids[0], signal.SIGCONT)})
    stage.fit(stage.trainer(4, at, logger=logger, save_top_k=-1), memory_steps=1)
    assert told == [4, 4]


def test_elsewhere_it_is_lightnings_own_and_so_is_a_plugin_of_the_user(stage: Stage) -> None:
    io = importlib.import_module(f"{stage.pl.__name__}.plugins.io").TorchCheckpointIO

    class Stamping(io):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint({**checkpoint, "stamp": 7}, path, storage_options)

    trainer = stage.trainer(4, io=Stamping())
    other = f"{stage.lab.dir}/export.ckpt"
    at = stage.at({3: lambda: (trainer.save_checkpoint(other), there.append(os.path.isfile(other)))})
    there: list[bool] = []
    trainer.callbacks.append(at)
    stage.fit(trainer)
    assert there == [True] and torch.load(other, weights_only=False)["global_step"] == 3
    assert torch.load(f"{stage.dirpath}/epoch=0-step=4.ckpt", weights_only=False)["stamp"] == 7


def test_damage_and_halves_are_refused_by_name(stage: Stage) -> None:
    stage.fit(stage.trainer(4, save_top_k=-1))
    for tag in ("epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"):
        for attempt in Path(stage.lab.root, tag).glob(".attempt-*"):
            shutil.rmtree(attempt)
    with open(f"{stage.dirpath}/epoch=0-step=2.ckpt", "r+b") as file:
        file.seek(300)
        file.write(b"\xff" * 8)
    with pytest.raises(Corrupt, match=r"step=2"):
        stage.fit(stage.trainer(8), f"{stage.dirpath}/epoch=0-step=2.ckpt")
    os.unlink(f"{stage.lab.root}/epoch=0-step=4.ckpt/MANIFEST.json")
    Path(stage.lab.root, "epoch=0-step=4.ckpt", ".attempt-g1-0123456789abcdef-q9").mkdir()
    with pytest.raises(NotFound, match=r"not complete.*ckpt_path='last'"):
        stage.fit(stage.trainer(8), f"{stage.dirpath}/epoch=0-step=4.ckpt")


def test_several_directories_and_names_with_slashes_are_served_or_left_to_lightning(stage: Stage) -> None:
    other = f"{stage.lab.dir}/other"
    trainer = stage.trainer(12, save_top_k=1, every_n_train_steps=8, monitor="score", filename="a/{step}")
    keep = stage.pl.callbacks.ModelCheckpoint
    recurring = {"filename": "{phase:.0f}", "save_top_k": 1, "monitor": "step", "mode": "max", "save_last": "link"}
    trainer.callbacks.append(keep(other, every_n_train_steps=2, **recurring))
    trainer.callbacks.insert(0, stage.pl.callbacks.OnExceptionCheckpoint(f"{stage.lab.dir}/never"))
    log = stage.at({n: lambda n=n: trainer.lightning_module.log("phase", float(n // 4 % 2)) for n in range(12)})
    trainer.callbacks.insert(0, log)
    stage.fit(trainer)
    assert stage.step_in("a/step=8.ckpt") == 8 and tags(stage.lab.root) == ["a%2Fstep=8.ckpt"]
    mine = {name: torch.load(f"{other}/{name}", weights_only=False)["global_step"] for name in os.listdir(other)}
    assert len(mine) == 2 and set(mine.values()) == {12}, "removed at once, as it was saved at once"


def test_what_lightning_wrote_after_ours_is_the_newest(stage: Stage) -> None:
    calm = stage.fit(stage.trainer(12), stock=True)
    shutil.rmtree(stage.dirpath)
    stage.fit(stage.trainer(4, save_last=True))
    stage.fit(stage.trainer(8, save_last=True), "last", stock=True)
    assert not os.path.islink(f"{stage.dirpath}/last.ckpt")
    started: list[int] = []
    for steps, begin in ((10, 8), (12, 10)):
        trainer = stage.trainer(steps, save_last=True)
        begun = stage.at({begin: lambda n=begin: started.append(n)})
        trainer.callbacks.insert(0, begun)
        model = stage.fit(trainer, "last")
    assert values(model) == values(calm) and started == [8, 10] and stage.step_in("last.ckpt") == 12


def test_what_lightning_wrote_before_ours_is_not_the_newest_though_nothing_was_committed_yet(stage: Stage) -> None:
    def fail() -> None:
        raise ArithmeticError

    stage.fit(stage.trainer(4, save_last=True), stock=True)
    with pytest.raises(ArithmeticError):
        stage.fit(stage.trainer(9, stage.at({7: fail}), save_top_k=0, save_last=False), "last", memory_steps=1)
    assert not os.path.islink(f"{stage.dirpath}/last.ckpt")
    started: list[int] = []
    trainer = stage.trainer(9, save_top_k=0, save_last=False)
    trainer.callbacks.insert(0, stage.at({step: lambda n=step: started.append(n) for step in range(9)}))
    assert values(stage.fit(trainer, "last")) == values(stage.fit(stage.trainer(9), stock=True))
    assert started[0] == 7


def test_what_somebody_renamed_or_has_beside_stays(stage: Stage) -> None:
    stage.fit(stage.trainer(4, save_top_k=-1))
    os.rename(f"{stage.dirpath}/epoch=0-step=4.ckpt", f"{stage.dirpath}/best.ckpt")
    shutil.copy(f"{stage.dirpath}/best.ckpt", f"{stage.dirpath}/epoch=0-step=3.ckpt")
    os.makedirs(f"{stage.lab.root}/epoch=0-step=3.ckpt/.attempt-g1-0123456789abcdef-q9")
    shutil.copytree(stage.dirpath, f"{stage.lab.dir}/copy", symlinks=True)
    stage.fit(stage.trainer(8, save_top_k=1, save_last="link"), "last")
    kept = ["best.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"]
    assert stage.files() == kept and stage.step_in("best.ckpt") == 4
    trainer = stage.trainer(8, save_top_k=0, save_last="link", every_n_train_steps=50)
    trainer.fit_loop.max_epochs = 1
    stage.fit(trainer, f"{stage.dirpath}/best.ckpt")
    assert stage.step_in("last.ckpt") == 8, "a link to itself is none"


def test_weights_alone_are_lightnings_and_nobody_resumes_from_them(stage: Stage) -> None:
    trainer = stage.trainer(6, save_last=True, every_n_train_steps=4)
    weights = {"filename": "weights-{step}", "save_weights_only": True, "save_top_k": 1}
    trainer.callbacks.append(stage.pl.callbacks.ModelCheckpoint(stage.dirpath, every_n_train_steps=2, **weights))
    stage.fit(trainer)
    assert [name for name in stage.files() if "weights" in name] == ["weights-step=6.ckpt"]
    assert values(stage.fit(stage.trainer(8), "last")) == values(stage.fit(stage.trainer(8), stock=True))


def test_through_a_symbolic_link_and_pinned_and_removed_by_hand(stage: Stage) -> None:
    os.makedirs(f"{stage.lab.dir}/deep/down")
    os.symlink(f"{stage.lab.dir}/deep/down", f"{stage.lab.dir}/way")
    stage.dirpath = f"{stage.lab.dir}/way/ckpt"
    stage.lab.root = f"{stage.lab.dir}/deep/down/ckpt/ckpt_engine"
    trainer = stage.trainer(8, save_top_k=1)
    trainer.checkpoint_callback.dirpath = stage.dirpath
    ckpt: list[Any] = []
    trainer.callbacks.append(stage.at({5: lambda: ckpt[0].pin(4, "mine")}))
    ckpt.append(ours.attach(trainer))
    trainer.fit(stage.model(), [0] * 100)
    assert stage.files() == ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"], "the pinned one is still found"
    os.unlink(f"{stage.dirpath}/epoch=0-step=8.ckpt")
    stage.fit(stage.trainer(10, save_top_k=1), "last")
    assert tags(stage.lab.root) == ["epoch=0-step=4.ckpt", "epoch=0-step=10.ckpt"], "nobody could reach it any more"


def test_skipped_saves_leave_no_links_and_steps_are_counted_in_windows(stage: Stage) -> None:
    pids: list[int] = []
    acts = {3: lambda: pids.append(stage.pause()), 9: lambda: os.kill(pids[0], signal.SIGCONT)}
    trainer = stage.trainer(12, stage.at(acts), save_top_k=-1, filename="{step}")
    trainer.accumulate_grad_batches = 2
    stage.fit(trainer, slots=1, when_busy="skip", memory_steps=5)
    links = [name for name in os.listdir(stage.dirpath) if os.path.islink(f"{stage.dirpath}/{name}")]
    assert sorted(links) == stage.files() and "step=2.ckpt" in links and len(links) < 6


def test_what_cannot_be_attached_is_refused_with_the_reason(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not a dict"):
        ours.attach({})
    trainer = stage.trainer(2)
    ckpt = ours.attach(trainer)
    with pytest.raises(ConfigError, match="attached already"):
        ours.attach(trainer)
    with pytest.raises(ConfigError, match=r"fit\(\) does not run"):
        ckpt.pin(2)
    ckpt.close()
    assert ckpt.wait() == () and "resume_start" not in vars(trainer._checkpoint_connector)
    spawn = stage.pl.Trainer(accelerator="cpu", strategy="ddp_spawn", devices=2, logger=False)
    with pytest.raises(ConfigError, match="strategy='ddp'"):
        ours.attach(spawn)
    plugins = importlib.import_module(f"{stage.pl.__name__}.plugins.io")
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        ours.attach(stage.trainer(2, io=plugins.AsyncCheckpointIO()))
    nowhere = stage.pl.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"attach\(trainer, dirpath\)"):
        stage.fit(nowhere)
    for other in ("2.4.9", "3.0.0"):
        monkeypatch.setattr(stage.pl, "__version__", other)
        with pytest.raises(ConfigError, match=rf"{other} is not supported"):
            ours.attach(trainer)


def test_a_second_fit_and_a_fast_run_of_the_same_trainer(stage: Stage) -> None:
    trainer = stage.trainer(2)
    ckpt = ours.attach(trainer)
    trainer.fit(stage.model(), [0] * 100)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(stage.model(), [0] * 100, ckpt_path="last")
    assert stage.files() == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"], "what it resumed from stays, as ever"
    assert trainer.global_step == 4
    ckpt.close()
    where = f"{stage.lab.dir}/fast"
    fast = stage.pl.Trainer(accelerator="cpu", fast_dev_run=True, default_root_dir=where, enable_progress_bar=False)
    stage.fit(fast)
    assert fast.global_step == 1 and not os.path.exists(where)


# -- the example -----------------------------------------------------------------------------------------------------

FIXED = ("--steps", "27", "--save-steps", "8", "--memory-steps", "3")


@pytest.mark.parametrize(("zero", "ranks"), [("none", 1), ("none", 2), ("2", 2), ("3", 2)])
def test_the_example_killed_at_a_step_goes_on_with_the_same_numbers(zero: str, ranks: int, lab: Lab) -> None:
    def go(folder: str, *more: str) -> tuple[int, str]:
        where = ("--dirpath", str(Path(lab.dir, folder)), "--zero", zero)
        return run("lightning_deepspeed.py", *where, *FIXED, *more, ranks=ranks)

    calm = go("calm", "--plain")[1]
    assert len(finals(calm)) == ranks, calm[-2000:]
    code, output = go("killed", "--kill-at", "19")
    assert code != 0 and not finals(output), "it was not killed"
    again = go("killed")[1]
    assert "start: step 18" in again and "resumed at step 18 from memory" in again, again[-2000:]
    assert finals(again) == finals(calm)
    folder = Path(lab.dir, "killed")
    root = str(folder if zero != "none" else folder / "ckpt_engine")
    assert sorted(tags(root)) == ["epoch=1-step=24.ckpt", "last.ckpt"], "the older and the snapshot have gone"
    stock, theirs = (go(folder, "--plain", "--steps", "30")[1] for folder in ("killed", "calm"))
    assert finals(stock) == finals(theirs), "Lightning resumes from it without us"
    assert len(finals(stock)) == ranks and "start: step 0" not in stock


def test_last_overwritten_and_everybody_killed_it_is_complete_and_stock_lightning_starts_from_it(lab: Lab) -> None:
    from faults.hooks import faults

    lab.root = f"{lab.dir}/killed/ckpt_engine"
    where = ("--dirpath", str(lab.dir / "killed"), "--zero", "none", *FIXED)
    code, output = run("lightning_deepspeed.py", *where, "--kill-at", "22", env=faults("publish:started:4:stop"))
    assert code == -9, output[-2000:]
    for pid in lab.savers():
        kill(pid)
    stock = run("lightning_deepspeed.py", *where, "--plain")[1]
    assert re.search("start: step 8\n", stock), stock[-2000:]
    assert finals(stock) == finals(run("lightning_deepspeed.py", "--dirpath", f"{lab.dir}/calm", *where[2:])[1])
    lab.clear()
