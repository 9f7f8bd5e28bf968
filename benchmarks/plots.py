"""Pictures of what ``stall.py`` measured. Needs matplotlib (the extra "bench").

python benchmarks/plots.py FILE… --plot DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import Row, of_one_run, pick, read, swept

OURS, RIVAL, BARE = "#1b6ca8", "#9a9a9a", "#d98b2b"


def colour(system: str) -> str:
    if "ckpt_engine" in system:
        return OURS
    return BARE if system.startswith("raw: ") else RIVAL


def stall(rows: list[Row], axes: Any) -> bool:
    """Bars: blocking per save, the fastest on top; the axis is logarithmic."""
    found = {row["system"]: row for row in reversed(pick(rows, kind="summary", part="systems")) if "blocking_ms" in row}
    if not found:
        return False
    order = sorted(found.values(), key=lambda row: -row["blocking_ms"])
    names = [row["system"] for row in order]
    axes.barh(names, [row["blocking_ms"] for row in order], color=[colour(name) for name in names])
    for place, row in enumerate(order):
        text = f" {row['blocking_ms']:.0f} ms" + (", torn" if row.get("verdict") == "torn" else "")
        axes.text(row["blocking_ms"], place, text, va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(right=6 * order[0]["blocking_ms"])
    axes.set_xlabel("a save blocks the training for (ms, logarithmic)")
    axes.set_title(f"{order[0]['mib']} MiB in {order[0]['tensors']} tensors, one rank")
    return True


def timeline(rows: list[Row], axes: Any) -> bool:
    """Lines: the time of each step of a run with a save every few steps."""
    found = {row["system"]: row for row in reversed(pick(rows, kind="pressed", part="systems"))}
    if not found:
        return False
    for name, row in found.items():
        ours = "ckpt_engine" in name
        axes.plot(row["run_ms"], label=name, linewidth=2 if ours else 1, linestyle="-" if ours else "--")
    axes.set_yscale("log")
    axes.set_xlabel(f"step (a save with every {next(iter(found.values()))['every']}th)")
    axes.set_ylabel("step time (ms, logarithmic)")
    axes.legend(fontsize=7)
    axes.set_title("a run that saves to disk without waiting in between")
    return True


def sweep(part: str, key: str, label: str) -> Callable[[list[Row], Any], bool]:
    def draw_it(rows: list[Row], axes: Any) -> bool:
        found = [row for row in swept(rows, part) if "blocking_ms" in row]
        if not found:
            return False
        for name in dict.fromkeys(row["system"] for row in found):
            points = sorted((row[key], row["blocking_ms"]) for row in pick(found, system=name))
            style = "-" if "ckpt_engine" in name else ":" if name.startswith("raw: ") else "--"
            axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("a save blocks for (ms, logarithmic)")
        axes.legend(fontsize=7)
        return True

    return draw_it


PICTURES: dict[str, Callable[[list[Row], Any], bool]] = {
    "stall.png": stall,
    "steps.png": timeline,
    "sizes.png": sweep("sizes", "mib", "state (MiB)"),
    "tensors.png": sweep("tensors", "tensors", "number of tensors"),
}


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Write a picture for each part there are rows of. Exits with a hint where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'ckpt-engine[bench]'")
    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        if picture(rows, axes):
            figure.savefig(folder / name, dpi=110)
            written.append(folder / name)
        pyplot.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="what stall.py wrote with --json")
    parser.add_argument("--plot", required=True, metavar="DIR")
    args = parser.parse_args()
    for file in draw(of_one_run(read(args.files)), Path(args.plot)):
        print(file)


if __name__ == "__main__":
    main()
