"""Every benchmark runs, with tiny states, and says what it measured in rows; no number is judged here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Row = dict[str, Any]


def bench(name: str, *words: object, cwd: Path, fails: bool = False, **variables: str) -> str:
    """What a benchmark prints; it must end well, or not, as told."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | variables
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode != 0) is fails, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr if fails else done.stdout


def rows_of(file: Path) -> list[Row]:
    rows = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert rows[0]["kind"] == "machine"
    return rows


def pick(rows: list[Row], **facts: object) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in facts.items())]


def test_stall_measures_kills_and_verifies_and_the_report_and_pictures_come_from_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "stall.json"
    words = [
        "systems",
        "sizes",
        "tensors",
        "--mib",
        4,
        "--tensors",
        4,
        "--repeats",
        2,
        "--sweep-repeats",
        1,
        "--most-tensors",
        4,
        "--sizes",
        2,
        4,
        "--step-ms",
        1,
    ]
    printed = bench("stall", *words, "--only", "overlap, storage", "+ fsync", "--json", file, cwd=tmp_path)
    rows = rows_of(file)
    names = {row["system"] for row in pick(rows, kind="summary", part="systems")} - {"fio"}
    raw = {"raw: memcpy", "raw: Tensor.copy_", "raw: bare kernel"}
    assert names == raw | {"ckpt_engine, memory", "ckpt_engine, overlap, storage", "torch.save + fsync"}
    assert len(pick(rows, kind="save", part="systems")) == 2 * len(names)
    assert {row["found"] for row in pick(rows, kind="verify")} == {"ok"}
    assert {row["survives"] for row in pick(rows, kind="kill", system="ckpt_engine, memory")} == {True}
    assert pick(rows, kind="pressed", system="ckpt_engine, overlap, storage")
    assert {row["mib"] for row in pick(rows, kind="summary", part="sizes")} == {2}, "the other is in systems"
    rounds = [row["tensors"] for row in pick(rows, kind="save", part="tensors", system="ckpt_engine, memory")]
    assert rounds == [1, 4, 4], "as many as of systems for what has the target, and none of those that warm up"
    for name in names:
        assert name in printed
    assert list(tmp_path.iterdir()) == [file]

    readme, docs = tmp_path / "README.md", tmp_path / "performance.md"
    for paper in (readme, docs):
        paper.write_text("before\n<!-- performance -->\nold\n<!-- end of performance -->\nafter\n")
    bench("report", file, "--readme", readme, "--docs", docs, cwd=tmp_path)
    for paper in (readme, docs):
        text = paper.read_text()
        assert text.startswith("before\n<!-- performance -->\n") and text.endswith(
            "<!-- end of performance -->\nafter\n"
        )
        assert "old" not in text and "torch.save + fsync" in text and rows[0]["cpu"] in text
    assert "| blocks, ms, MiB: | 2 | 4 |" in docs.read_text()
    (own,) = pick(rows, kind="summary", part="tensors", tensors=4, system="ckpt_engine, memory")
    copied = next(line for line in docs.read_text().splitlines() if line.startswith("| raw copy of the same bytes"))
    assert float(copied.split("|")[3].rstrip(" ×")) == pytest.approx(own["to_raw"], rel=0.01)
    if importlib.util.find_spec("matplotlib"):
        drawn = bench("plots", file, "--plot", tmp_path / "pictures", cwd=tmp_path)
        pictures = {Path(line).stem for line in drawn.splitlines()}
        assert pictures == {"stall", "steps", "sizes", "tensors"}
        bench("report", file, "--readme", readme, "--figures", tmp_path / "pictures", cwd=tmp_path)
        assert '<img src="pictures/stall.png"' in readme.read_text()


def test_two_ranks_scale_and_the_layouts_that_are_hard(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    words = ["--mib", 4, "--ranks", 1, 2, "--tensors", 8, "--repeats", 2, "--many-tensors", 300]
    bench("scale", *words, "--json", file, cwd=tmp_path)
    rows = rows_of(file)
    assert [row["ranks"] for row in pick(rows, kind="scale")] == [1, 2]
    assert {row["layout"]: row["verdict"] for row in pick(rows, kind="summary", part="layouts")} == {
        "300 tensors": "ok",
        "200 files per rank": "ok",
    }


def test_steps_and_plan(tmp_path: Path) -> None:
    bench("steps", "--mib", 4, "--tensors", 12, "--batch", 4, "--repeats", 2, "--json", tmp_path / "a", cwd=tmp_path)
    ways = [row["way"] for row in pick(rows_of(tmp_path / "a"), kind="summary")]
    assert ways == ["no save", "blocking", "overlap"]
    bench("plan", "--tensors", 10, 100, "--repeats", 2, "--profile", "--json", tmp_path / "b", cwd=tmp_path)
    assert [row["tensors"] for row in pick(rows_of(tmp_path / "b"), kind="summary")] == [10, 100]


def test_a_state_that_does_not_fit_is_refused_with_numbers_before_anything_starts(tmp_path: Path) -> None:
    told = bench("stall", "systems", "--mib", 100_000_000, cwd=tmp_path, fails=True)
    assert "100000000 MiB of state need" in told and "MiB may be used: give a smaller --mib" in told
    assert "needs" in bench("steps", "--mib", 100_000_000, cwd=tmp_path, fails=True)


LIARS = """
from systems import System

class Base(System):
    def load(self, step):
        return self.kept

class Torn(Base):
    "Copies the first half at once, and the rest when it is asked for."
    def save(self, step):
        self.kept = {name: tensor.clone() if n % 2 else tensor for n, (name, tensor) in enumerate(self.state.items())}

class Late(Base):
    "Copies nothing."
    def save(self, step):
        self.kept = self.state

class Noise(Base):
    def save(self, step):
        self.kept = {name: tensor + 0.5 for name, tensor in self.state.items()}

class Partial(Base):
    def save(self, step):
        self.kept = {name: tensor.clone() for name, tensor in list(self.state.items())[1:]}

class Honest(Base):
    def save(self, step):
        self.kept = {name: tensor.clone() for name, tensor in self.state.items()}

class Broken(Base):
    def save(self, step):
        raise ValueError("no such luck")
"""


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("Torn", "torn"), ("Late", "older"), ("Noise", "wrong"), ("Partial", "wrong"), ("Honest", "ok")],
)
def test_the_worker_finds_states_that_are_not_what_was_saved(tmp_path: Path, kind: str, verdict: str) -> None:
    (tmp_path / "liars.py").write_text(LIARS)
    commands = [{"do": "make"}, {"do": "start"}, {"do": "save", "step": 1}, {"do": "verify", "step": 1}]
    assert told(tmp_path, kind, commands)[-1]["found"] == verdict


def test_a_system_that_raises_says_why_and_the_worker_goes_on(tmp_path: Path) -> None:
    (tmp_path / "liars.py").write_text(LIARS)
    answers = told(tmp_path, "Broken", [{"do": "make"}, {"do": "start"}, {"do": "save", "step": 1}, {"do": "close"}])
    assert [answer["ok"] for answer in answers] == [True, True, False, True]
    assert answers[2]["error"] == "ValueError: no such luck"


def told(tmp_path: Path, kind: str, commands: list[Row]) -> list[Row]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "worker.py"), f"liars:{kind}", "--work", str(tmp_path), "--mib", "1"],
        input="".join(json.dumps(command) + "\n" for command in commands),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def fakes(folder: Path, *, has_fio: bool) -> dict[str, str]:
    """A PATH with a fio that says it took a second, or with none: machines differ."""
    folder.mkdir()
    if has_fio:
        (folder / "fio").write_text(FIO)
        (folder / "fio").chmod(0o755)
    return {"PATH": str(folder)}


FIO = """#!/bin/sh
echo 'a warning {"jobs": [{"job_runtime": 1000, "write": {"runtime": 999}, "read": {"runtime": 998}}]}'
"""


@pytest.mark.parametrize("has_fio", [True, False])
def test_persist_measures_the_disk_the_writer_and_a_real_saver(tmp_path: Path, has_fio: bool) -> None:
    words = ["--mib", 8, "--files", 1, 3, "--repeats", 1, "--json", "rows"]
    text = bench("persist", *words, cwd=tmp_path, **fakes(tmp_path / "bin", has_fio=has_fio))
    rows = [row for row in rows_of(tmp_path / "rows") if row["kind"] == "summary"]
    ours = {"writer, 1 file", "saver, 1 file", "saver, 3 files"}
    disk = {f"fio, 8 MiB, {depth} in flight" for depth in (1, 2, 4)} if has_fio else set()
    assert {row["way"] for row in rows} == ours | disk
    assert all(row["s"] > 0 if row["way"] in ours else row["s"] == 1 for row in rows)
    assert [row["of_fio"] is not None for row in rows] == [has_fio] * len(rows)
    assert ("fio is not installed" in text) is not has_fio
    assert "of best fio" in text and not any("persist-" in name for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize("has_fio", [True, False])
def test_restore_measures_memory_and_storage_cold_and_warm(tmp_path: Path, has_fio: bool) -> None:
    words = ["--mib", 8, "--tensors", 4, "--repeats", 1, "--json", "rows"]
    text = bench("restore", *words, cwd=tmp_path, **fakes(tmp_path / "bin", has_fio=has_fio))
    ways = {row["way"] for row in rows_of(tmp_path / "rows") if row["kind"] == "summary"}
    assert ("fio, 8 MiB, 4 in flight" in ways) is has_fio
    assert {"restore, memory", "restore, storage, cold", "restore, storage, warm", "torch.load, warm"} <= ways
    assert "of torch.load" in text


def test_what_does_not_fit_at_once_goes_in_batches_and_ours_is_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    conduct, crew = importlib.import_module("conduct"), importlib.import_module("crew")
    monkeypatch.setattr(conduct, "usable_mib", lambda: 13_000)
    ours = [spec for spec in conduct.specs_of("ours") if spec.target in conduct.BASE]
    rivals = [
        crew.Spec(names=(name,), variants=("",), target=f"systems:{name}", memory=memory)
        for name, memory in (("small", 2.0), ("large", 5.0), ("late", 2.0))
    ]
    setting, plan = crew.Setting(mib=1000, tensors=1), conduct.Plan()
    job = conduct.Job(part="systems", specs=[*ours, *rivals], setting=setting, plan=plan)
    batches = [[name for spec in batch for name in spec.names] for batch in job.batches()]
    assert [batch[-1] for batch in batches] == ["late", "large"], "the first gap is filled"
    assert len(batches[0]) == 5 + 2 and batches[1] == [*conduct.AGAIN, "large"]
    monkeypatch.setattr(conduct, "usable_mib", lambda: 10_000)
    with pytest.raises(SystemExit, match="give a smaller --mib"):
        job.batches()


TRACE = """\
7 pwrite64(5</w/.tmp-1>, ""..., 4096, 0) = 4096
8 pwrite64(5</w/.tmp-1>, ""..., 8192, 4096 <unfinished ...>
7 write(6</elsewhere/x>, ""..., 100) = 100
8 <... pwrite64 resumed>)              = 8192
7 fsync(5</w/.tmp-1>)                    = 0
7 write(9</w/data>, ""..., 500) = 500
7 write(9</w/data>, ""..., 500) = -1 ENOSPC (No space left on device)
7 write(8</w/marker>, ""..., 3) = 3
7 fsync(8</w/marker>)                    = 0
7 fsync(4</w>)                    = 0
"""


def test_only_what_was_written_to_files_that_were_synced_afterwards_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    conduct = importlib.import_module("conduct")
    assert conduct.synced(TRACE.splitlines(), "/w/") == (2, 4096 + 8192 + 3)
    assert conduct.synced([*TRACE.splitlines(), "7 sync() = 0"], "/w/") == (3, 4096 + 8192 + 3 + 500)
