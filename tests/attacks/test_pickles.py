"""What is unpickled, and what never is: only verified bytes, only by the rank that asked, and not with weights_only."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from harness import Lab


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def saves_a_bomb(me: Any, path: str, storage: bool) -> None:
    with me.engine() as engine:
        state = {"model.pt": {"w": me.coded(1), "bomb": Bomb(path)}}
        if storage:
            engine.save_to_storage(1, state).result(30)
        else:
            engine.save_to_memory(1, state)
        me.say("saved")
        me.hear("end")


def restores(me: Any, weights_only: bool) -> None:
    from ckpt_engine.errors import CkptError

    with me.engine() as engine:
        try:
            report = engine.restore(weights_only=weights_only)
            me.say("restored", step=report.step, keys=sorted(report.state.get("model.pt", ())))
        except CkptError as error:
            me.say("refused", type=type(error).__name__, text=str(error))


@pytest.mark.parametrize("storage", [False, True])
def test_weights_only_runs_nothing_that_a_checkpoint_says(lab: Lab, storage: bool) -> None:
    marker = lab.dir / "exploded"
    rank = lab.rank(saves_a_bomb, str(marker), storage)
    rank.expect("saved", 40)
    rank.kill()
    rank = lab.rank(restores, True)
    said = rank.expect("refused", 40)
    assert said["type"] == "RestoreError" and "weights_only=False" in said["text"]
    rank.end()
    assert not marker.exists()
    lab.clear()


def saves(me: Any) -> None:
    with me.engine() as engine:
        for step in (1, 2):
            engine.save_to_storage(step, {"model.pt": {"w": me.coded(step, 1000)}}).result(30)
    me.say("saved")


def test_a_file_that_was_changed_on_disk_is_never_unpickled(lab: Lab) -> None:
    """A whole, valid .pt with a pickle that acts, of the very size of what was saved, in its place."""
    import pickle

    rank = lab.rank(saves)
    rank.expect("saved", 40)
    rank.end()
    marker = lab.dir / "exploded"
    path = Path(lab.root, "global_step2", "model.pt")
    size = path.stat().st_size
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(str(marker))))
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        archive.comment = b" " * (size - 600)
    os.truncate(path, size)
    rank = lab.rank(restores, False)
    assert rank.expect("restored", 40)["step"] == 1
    rank.end()
    assert not marker.exists()
