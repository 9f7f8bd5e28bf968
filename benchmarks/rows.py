"""Rows of numbers, one JSON line each, on the standard output and in a file; and the machine they were measured on."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """Collects rows. A row is printed, and appended to ``file``, as soon as it is known."""

    def __init__(self, file: str = "", **always: Any) -> None:
        """``always``: what every row says."""
        self.rows: list[Row] = []
        self._always = {**always, "run": uuid.uuid4().hex[:8]}
        self._file = Path(file) if file else None
        if self._file is not None:
            self._file.write_text("")
        self.add(kind="machine", **machine())

    def add(self, **row: Any) -> Row:
        row = {**self._always, **{key: short(value) for key, value in row.items()}}
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(line + "\n")
        return row

    def of(self, kind: str, **facts: Any) -> list[Row]:
        return pick(self.rows, kind=kind, **facts)


def pick(rows: list[Row], **facts: Any) -> list[Row]:
    """Those of which all ``facts`` are true."""
    return [row for row in rows if all(row.get(key) == value for key, value in facts.items())]


def swept(rows: list[Row], part: str) -> list[Row]:
    """The summaries of a sweep, and those of the same systems in "systems", whose setting is one of its points."""
    found = pick(rows, kind="summary", part=part)
    names = {row["system"] for row in found}
    settings = {(row["mib"], row["tensors"]) for row in found}
    once = {
        row["system"]: row for row in reversed(pick(rows, kind="summary", part="systems")) if row["system"] in names
    }
    return found + [row for row in once.values() if (row["mib"], row["tensors"]) not in settings]


def read(files: Sequence[str]) -> list[Row]:
    """The rows of some ``--json`` files."""
    return [json.loads(line) for file in files for line in Path(file).read_text().splitlines() if line.strip()]


def of_one_run(rows: list[Row]) -> list[Row]:
    """For each part of each benchmark the rows of one run, as only they may be compared: of that which has most."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        sums[row["bench"], row.get("part", ""), row["run"]] += row["kind"] == "summary"
    chosen: dict[tuple[str, str], str] = {}
    for (bench, part, run), number in sums.items():  # in the order of the files: of equals the last
        if number >= sums[bench, part, chosen.get((bench, part), run)]:
            chosen[bench, part] = run
    return [row for row in rows if row["kind"] == "machine" or chosen[row["bench"], row.get("part", "")] == row["run"]]


def short(value: Any) -> Any:
    """Four digits behind the point are enough for milliseconds; JSON has no NaN."""
    if isinstance(value, list):
        return [short(one) for one in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def median(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def verdict(passes: bool | None) -> str:
    """Of a target; None: there is none."""
    return {None: "-", True: "pass", False: "falls short"}[passes]


def machine() -> Row:
    """What the numbers were measured on."""
    import torch

    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def filesystem(path: Path) -> str:
    """Type of the file system that holds ``path``, by /proc/mounts."""
    best = ("", "unknown")
    real = os.path.realpath(path)
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind = line.split()[:3]
        if (real == where or real.startswith(where.rstrip("/") + "/")) and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def common_options(parser: argparse.ArgumentParser) -> None:
    """``--json``, ``--dir`` and ``--repeats``, the same for every benchmark."""
    parser.add_argument("--json", default="", metavar="FILE", help="keep all rows, one JSON line each")
    parser.add_argument("--dir", default="", help="where to write (a temporary directory in this one by default)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; medians are taken")


def scratch(args: argparse.Namespace, name: str) -> tempfile.TemporaryDirectory[str]:
    """A directory of this run's own below ``--dir``, else below the current one: on a disk, as checkpoints are.

    From here on SIGTERM ends the program as Ctrl-C does, so that it leaves neither processes nor files behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    where = args.dir or os.getcwd()
    if filesystem(Path(where)) in ("tmpfs", "ramfs"):
        print(f"{where} is memory, not a disk: give another --dir", file=sys.stderr)
    return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=where, ignore_cleanup_errors=True)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right."""
    rows = [list(header), *map(list, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not number else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
