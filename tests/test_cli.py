"""The console script: what it lists, verifies and collects, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import kill, until

from ckpt_engine import cli


def saves(me: Any, steps: int, die: bool = False) -> None:
    import torch

    from ckpt_engine import CheckpointEngine, SaverOptions

    with CheckpointEngine(me.root, saver=SaverOptions(linger_s=600.0)) as ckpt:
        for step in range(1, steps + 1):
            ckpt.save_to_storage(step, {"model.pt": torch.full((1000,), float(step))}).result(30)
        if die:
            me.say("held")
            me.hear("never")


def test_list_shows_committed_checkpoints_newest_first_and_plain_ones_as_unmanaged(
    lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.rank(saves, 2).end(60)
    stock = Path(lab.root, "stock")
    stock.mkdir()
    (stock / "mp_rank_00_model_states.pt").write_bytes(b"not ours")
    assert cli.main(["list", lab.root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["global_step2", "global_step1", "stock"]
    assert "unmanaged" in lines[-1] and "1 ranks" in lines[0]


def measured(me: Any) -> None:
    import torch

    with me.engine() as ckpt:
        told = ckpt.save_to_storage(1, {"a.pt": torch.ones(1)}, metrics={"eval_loss": 0.25, "acc": 1}).result(30)
        me.say("published", **told.metrics)


def test_list_shows_metrics_and_pins_and_a_pin_is_set_and_taken_by_tag(
    lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = lab.rank(measured)
    assert rank.expect("published") == {"event": "published", "eval_loss": 0.25, "acc": 1.0}
    rank.end(60)

    def told(*arguments: str) -> str:
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    assert told("list", lab.root).endswith("  acc=1  eval_loss=0.25\n")
    assert told("pin", lab.root, "global_step1", "--reason", "the paper's\x1b") == ""
    assert told("list", lab.root).endswith('  acc=1  eval_loss=0.25  pinned "the paper\'s\\x1b"\n')
    assert told("unpin", lab.root, "global_step1") == ""
    assert told("unpin", lab.root, "global_step1") == "global_step1 was not pinned\n"
    assert "pinned" not in told("list", lab.root)
    for verb in ("pin", "unpin"):
        assert cli.main([verb, lab.root, "nothing"]) == 2
        assert "has no checkpoint 'nothing'" in capsys.readouterr().err


def test_an_empty_root_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"


def test_verify_names_the_file_with_a_flipped_byte(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.rank(saves, 2).end(60)
    assert cli.main(["verify", lab.root]) == 0
    victim = Path(lab.root, "global_step1", "model.pt")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["verify", lab.root]) == 1
    told = capsys.readouterr().out
    assert "global_step2  intact" in told and "global_step1  damaged" in told and str(victim) in told
    assert cli.main(["verify", lab.root, "--tag", "global_step2"]) == 0
    assert cli.main(["verify", lab.root, "--tag", "nowhere"]) == 1


def test_gc_names_the_snapshots_of_a_dead_job_and_deletes_only_on_request(
    lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = lab.rank(saves, 1, True)
    rank.expect("held", 60)
    hash_ = lab.names().hash
    assert cli.main(["gc", "--root", lab.root, "--delete"]) == 0
    assert f"live  /dev/shm/ckpt-{hash_}" in capsys.readouterr().out, "a live job was not recognised"
    rank.kill()
    until(lambda: cli.main(["gc", "--root", lab.root]) == 0 and "waits (saver" in capsys.readouterr().out, 10)
    for pid in lab.savers():
        kill(pid)
    until(lambda: lab.saver() is None, 5)  # its locks go with the last of its threads
    assert cli.main(["gc", "--root", lab.root]) == 0
    told = capsys.readouterr().out
    assert f"dead  /dev/shm/ckpt-{hash_}" in told and "global_step1" in told
    assert lab.left(), "gc without --delete removed something"
    assert cli.main(["gc", "--root", lab.root, "--delete"]) == 0
    assert f"removed  /dev/shm/ckpt-{hash_}" in capsys.readouterr().out
    assert not lab.left()


def test_an_error_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "/proc/self/mem/nowhere"]) == 2
    assert "ckpt-engine: there is no directory /proc/" in (told := capsys.readouterr().err) and told.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        cli.main(["nonsense"])
    assert ended.value.code == 2


def loaded_after(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_importing_the_package_loads_neither_torch_nor_deepspeed() -> None:
    assert not {"torch", "deepspeed", "numpy"} & loaded_after("import ckpt_engine")
    assert "torch" in loaded_after("import ckpt_engine; ckpt_engine.CheckpointEngine")


def test_the_saver_verb_is_answered_without_torch_or_pickle() -> None:
    code = "from ckpt_engine import cli\ntry: cli.main(['saver', 'run', '--help'])\nexcept SystemExit: pass"
    assert not {"torch", "pickle", "_pickle", "numpy"} & loaded_after(code)


def test_every_public_name_exists_and_an_unknown_one_says_so() -> None:
    import ckpt_engine

    assert len(ckpt_engine.__all__) <= 10
    for name in ckpt_engine.__all__:
        assert getattr(ckpt_engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ckpt_engine.nonsense  # noqa: B018
