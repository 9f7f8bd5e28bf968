"""``make judge``: the PyPI package ckpt-chaos kills ``examples/train_ddp.py`` and its saver at file events, and judges.

It knows nothing of us: it records what a job creates, renames and removes below its output directory, kills a fresh
copy at such an event (``before``: nothing of it is there; ``torn``: half of the file is; ``unsynced``: all that was
written and not synced is gone), starts the job again, and compares what comes out with a run that nobody killed.

* *trainer*: the ranks are armed and the saver is not. A killed trainer finds its snapshots in shared memory.
* *saver*: the saver is armed and the trainer is not; the saver writes with ``open`` and ``os.fsync`` (``portable``).
  With the saver the node goes: the trainer is killed and the memory cleared (``job``), so the disk is all there is.
* *no fsync*: the same without ``os.fsync``. The judge must complain here, or it would complain of nothing.

Fails if the judge does, if a mode had no crash that took place, or if it lets *no fsync* pass.

What it cannot see: native writes and O_DIRECT (hence ``portable``); hard links, by which plain names are made; data
of the device, and the order of names in a directory (a killed process loses neither; ``tests/test_crash.py`` has the
modelled disk). Its column ``drift`` compares names of files, and ours have random parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "judge"
JUDGE = "ckpt-chaos==0.1.8"
FAILS = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
TOO_LATE = 99
"""How ``job`` ends when something took too long: nobody's fault but the machine's, and no verdict."""
JOB = f"{sys.executable} tests/judge/job.py {{out}}"


@dataclass(frozen=True)
class Case:
    who: str
    modes: str
    command: str
    resume: str
    points: int
    passes: bool = True


CASES = (
    Case("trainer", "before", f"{sys.executable} examples/train_ddp.py --steps 100 --root {{out}}", "", 12),
    Case("saver", "before,torn", JOB, JOB, 24),
    Case("saver", "unsynced", JOB, JOB, 12),
    Case("saver, no fsync", "unsynced", f"{JOB} --no-fsync", JOB, 6, passes=False),
)


def installed() -> Path:
    """The judge in an environment of its own, so that nothing of it is ours and nothing of ours is its."""
    program = BUILD / "venv" / "bin" / "ckpt-chaos"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", BUILD / "venv"], check=True)
        pip = [BUILD / "venv" / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", JUDGE]
        subprocess.run(pip, check=True)
    return program


def run(program: Path, case: Case, points: int, jobs: int) -> tuple[int, Path]:
    work = BUILD / case.who.replace(", ", "-").replace(" ", "-") / case.modes.replace(",", "-")
    shutil.rmtree(work, ignore_errors=True)
    command = [
        str(program), "run", "--work", str(work), "--modes", case.modes, "--max-points", str(points),
        "--jobs", str(jobs), "--timeout", "600", "--step-regex", r"start: step (\d+) from",
        "--checkpoint-glob", "{out}/global_step*", "--fail-on", FAILS,
        "--result-cmd", f"{sys.executable} tests/judge/fingerprint.py {{out}}",
        *(["--resume-cmd", case.resume] if case.resume else []), "--", *case.command.split(),
    ]  # fmt: skip
    with (BUILD / f"{work.parent.name}-{work.name}.log").open("wb") as log:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log).returncode, work


def report(case: Case, code: int, work: Path) -> bool:
    """One row a mode; True if all is as it should be."""
    from_json = [json.loads(path.read_text()) for path in sorted(work.glob("pt_*/result.json"))]
    verdicts = dict(_verdicts(work))
    late = [one["label"] for one in from_json if one["outcome"]["raised"] in ("Timeout", f"ExitCode{TOO_LATE}")]
    control = [verdict for label, verdict in verdicts.items() if label.startswith("no crash")]
    good = (code == 0) == case.passes and control == ["PASS"] and not late
    for mode in case.modes.split(","):
        points = [one for one in from_json if one.get("point", [0, ""])[1] == mode]
        fired = [one for one in points if one["crashed"]]
        found = Counter(verdicts[one["label"]] for one in fired)
        good &= bool(fired) and (case.passes or found["HARD_FAIL"] > 0)
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items())) or "nothing"
        events = len((work / "reference" / "events.log.rank0").read_text().splitlines())
        print(f"| {case.who} | {mode} | {events} | {len(points)} | {len(fired)} | {said} |", flush=True)
    if not good:
        print(f"  exit code {code}, control {control}, too late {late}; see {work} and the log beside it", flush=True)
    return good


def _verdicts(work: Path) -> list[tuple[str, str]]:
    """(label, verdict) as the judge itself says it."""
    code = (
        "import sys, json; from pathlib import Path; from ckpt_chaos.runner import rejudge;"
        "print(json.dumps([(row.label, row.verdict) for row in rejudge(Path(sys.argv[1]))]))"
    )
    python = BUILD / "venv" / "bin" / "python"
    done = subprocess.run([python, "-c", code, work], capture_output=True, text=True, check=True)
    found: list[tuple[str, str]] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=0, help="at most so many crashes a case (default: see CASES)")
    parser.add_argument("--jobs", type=int, default=2, help="crashes at a time")
    parser.add_argument("--only", default="", help="only the cases in whose name this occurs")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    program, begin, good = installed(), time.monotonic(), True
    print(f"{JUDGE} on examples/train_ddp.py, two storage saves in 100 steps\n")
    print("| armed | mode | file events | crashes tried | took place | verdicts of these |\n|---|---|---|---|---|---|")
    for case in [case for case in CASES if options.only in f"{case.who} {case.modes}"]:
        points = min(case.points, options.points or case.points)
        good &= report(case, *run(program, case, points, options.jobs))
    print(f"\n{'as it should be' if good else 'NOT as it should be'}, {time.monotonic() - begin:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
