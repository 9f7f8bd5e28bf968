"""Tables of what was measured, with the targets and who reached them; nothing in them is typed by hand.

    python benchmarks/report.py FILE… [--readme README.md] [--docs docs/performance.md] [--figures docs/figures]

``FILE``: what the benchmarks wrote with ``--json``. Prints the tables as Markdown. ``--readme`` and ``--docs`` put them
between the lines ``<!-- performance -->`` and ``<!-- end of performance -->`` of these files instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import Row, of_one_run, pick, read, swept

MEMORY, STORAGE = "ckpt_engine, memory", "ckpt_engine, storage"
OVERLAP = "ckpt_engine, overlap, storage"
STOCK, ATTACHED = "DeepSpeed save_checkpoint", "DeepSpeed with ckpt_engine, storage"
THREAD, SHM = "dcp.async_save, thread", "dcp.async_save, process, shm, async staging"
OWN = ("ckpt_engine", "raw: ", "fio", "DeepSpeed with ckpt_engine")
SHORT = "**falls short**"
FROM_MIB, UP_TO_TENSORS = 1024, 2000
"""Other states have no target against the raw copy: there counts what a save costs beside it (``plan.py``)."""
BEGIN, END = "<!-- performance -->", "<!-- end of performance -->"


@dataclass(frozen=True)
class Target:
    """``value`` None: not measured, and ``why``."""

    name: str
    most: float
    value: float | None
    unit: str = ""
    why: str = ""
    least: bool = False
    """The value shall be at least ``most``."""
    bare: float | None = None
    """What the machine itself takes for it in the same run: the bare copy, or fio."""

    @property
    def verdict(self) -> str:
        if self.value is None or self.value != self.value:
            return f"not measured{f': {self.why}' if self.why else ''}"
        reached = self.value >= self.most if self.least else self.value <= self.most
        return "pass" if reached else SHORT

    @property
    def line(self) -> list[str]:
        value, bare = ("-" if one is None or one != one else number(one) + self.unit for one in (self.value, self.bare))
        return [self.name, f"{'≥' if self.least else '≤'} {number(self.most)}{self.unit}", value, bare, self.verdict]


class Comparison:
    """The summaries of one part and setting, each with ours of the same batch."""

    def __init__(self, rows: list[Row], part: str) -> None:
        self.rows = pick(rows, kind="summary", part=part)
        whole = [row for row in self.rows if row.get("verdict", "ok") == "ok"]
        self.sound = [row for row in whole if not row["system"].startswith(OWN)]
        self.left_out = {row["system"]: row["reason"] for row in pick(rows, kind="not run", part=part)}

    def system(self, name: str) -> Row | None:
        return next((row for row in self.rows if row["system"] == name), None)

    def like(self, *words: str) -> list[Row]:
        """Rows of rivals that tear nothing, whose names hold all words."""
        return [row for row in self.sound if all(word in row["system"].lower() for word in words)]

    def relative(self, row: Row | None, key: str) -> float | None:
        """To ours of the same batch: batches are compared by what is in each of them."""
        if row is None or row.get(key) is None:
            return None
        own = next((one for one in self.rows if one["system"] == MEMORY and one["batch"] == row["batch"]), None)
        return None if own is None or not own["blocking_ms"] else row[key] / own["blocking_ms"]

    def ratio(self, ours: str, rival: Row | None, key: str = "blocking_ms", own: str = "") -> float | None:
        """``own``: the key of ours, where it is another one."""
        mine, other = self.relative(self.system(ours), own or key), self.relative(rival, key)
        return mine / other if mine is not None and other else None

    def against(self, ours: str, rivals: list[Row], key: str = "blocking_ms") -> float | None:
        """The ratio to the best of some rivals."""
        ratios = [ratio for row in rivals if (ratio := self.ratio(ours, row, key)) is not None]
        return max(ratios, default=None)

    def copy(self) -> str:
        """The fastest of the bare copies."""
        found = [row for row in self.rows if row["system"].startswith(OWN[1])]
        return min(found, key=lambda row: row["to_raw"])["system"] if found else ""


def targets(rows: list[Row]) -> list[Target]:
    """What was set out to be reached, for everything that was measured."""
    return [*stall_targets(rows), *own_targets(rows)]


def stall_targets(rows: list[Row]) -> list[Target]:
    systems = Comparison(rows, "systems")
    if not systems.rows:
        return []

    def rival(words: str, most: float, ours: str = STORAGE, key: str = "blocking_ms", what: str = "") -> Target:
        found = [row for row in systems.like(*words.lower().split()) if row["persistent"] or ours == MEMORY]
        label = {STORAGE: "", MEMORY: " (to memory)", OVERLAP: " (overlap)", ATTACHED: ""}[ours]
        why = next(
            (reason for name, reason in systems.left_out.items() if words.lower().split()[0] in name.lower()), ""
        )
        value = systems.against(ours, found, key)
        bare = None if ours == OVERLAP else systems.against(systems.copy(), found, key)
        return Target(f"{what or words}{label}", most, value, " ×", why or "not in this run", bare=bare)

    def named(name: str, most: float, ours: str = STORAGE, key: str = "blocking_ms", more: str = "") -> Target:
        other = systems.system(name)
        value = systems.ratio(ours, other, key)
        bare = None if ours == OVERLAP else systems.ratio(systems.copy(), other, key, "blocking_ms")
        label = {MEMORY: " (to memory)", OVERLAP: " (overlap)"}.get(ours, "")
        why = systems.left_out.get(name, "not in this run")
        return Target(f"{name}{more}{label}", most, value, " ×", why, bare=bare)

    memory, overlap = systems.system(MEMORY), systems.system(OVERLAP)
    copied = same_setting(rows, memory) or memory
    found = [
        Target("raw copy of the same bytes (to memory)", 1.15, copied and copied["to_raw"], " ×"),
        Target(
            "first save against a later one (to memory)",
            1.3,
            memory and memory["first_ms"] / memory["blocking_ms"],
            " ×",
        ),
        named("torch.save + fsync", 1 / 30),
        named(STOCK, 1 / 15, ATTACHED),
        named(THREAD, 1 / 3, more=", after a drain"),
        named(THREAD, 1 / 6, key="pressed_ms", more=", a save every 4 steps"),
        rival("dlrover memory", 1 / 3, MEMORY, what="DLRover save_to_memory"),
        rival("torch-checkpointing", 1 / 2.5),
        named(SHM, 1 / 2.5),
        rival("torch-checkpointing", 1 / 8, OVERLAP),
        named(SHM, 1 / 8, OVERLAP),
        rival("torchsnapshot", 1 / 12),
        rival("lm-resiliency", 1 / 12),
        rival("nvidia-resiliency", 1 / 12),
    ]
    lagging = [row for row in systems.sound if row.get("persistent")]
    value, bare = (systems.against(name, lagging, "lag_ms") for name in (STORAGE, "fio"))
    found.append(Target("lag until durable, against the best of all", 1 / 2.5, value, " ×", bare=bare))
    if overlap is not None:
        torn = 0.0 if overlap.get("verdict", "ok") == "ok" else 1.0
        found.append(Target("torn states with overlap", 0, torn))
    return found


def same_setting(rows: list[Row], memory: Row | None) -> Row | None:
    """The row of a sweep where ours and the bare copies share a state, and nobody else has turns between theirs."""
    if memory is None:
        return None
    facts = {key: memory[key] for key in ("mib", "tensors", "ranks", "threads")}
    return next(iter(pick(rows, kind="summary", part="tensors", system=MEMORY, **facts)), None)


def own_targets(rows: list[Row]) -> list[Target]:
    found = []
    listed = same_setting(rows, Comparison(rows, "systems").system(MEMORY))
    for row in pick(rows, bench="steps", kind="summary", way="overlap"):
        found.append(Target("overlap: call + guard, of the step", 2, row["stall_percent"], " %"))
    for row in pick(rows, kind="summary", part="beside", system=STORAGE):
        if "beside_percent" in row:
            name = f"steps while stage 2 runs, {row['threads']} thread(s)"
            found.append(Target(name, 5, row["beside_percent"], " %"))
    for part, what in (("sizes", "mib"), ("tensors", "tensors")):
        for row in pick(rows, kind="summary", part=part, system=MEMORY):
            if row is listed or row["mib"] < FROM_MIB or row["tensors"] > UP_TO_TENSORS:
                continue
            unit = "MiB" if what == "mib" else "tensors"
            found.append(Target(f"raw copy, {row[what]} {unit} (to memory)", 1.15, row["to_raw"], " ×"))
    for row in pick(rows, kind="summary", part="ranks", system=MEMORY):
        found.append(Target("raw copy, two ranks of one thread (to memory)", 1.15, row["to_raw"], " ×"))
    for row in pick(rows, bench="plan", kind="summary"):
        if row["target_ms"] is not None:
            worst = max(row["same"], row["changed"])
            found.append(Target(f"a save without its copy, {row['tensors']} tensors", row["target_ms"], worst, " ms"))
    scale = pick(rows, bench="scale", kind="scale")
    for row in scale:
        found.append(Target(f"metadata per rank and save, {row['ranks']} rank(s)", 5, row["metadata_ms"], " ms"))
    for key, bare, name in (("stage1_gbs", "raw_gbs", "stage 1"), ("stage2_gbs", "fio_gbs", "stage 2")):
        for row in scale[1:]:
            text = f"{name} with {row['ranks']} ranks, of that with {scale[0]['ranks']}"
            value, alone = row[key] / scale[0][key], row[bare] / scale[0][bare]
            found.append(Target(text, 0.9, value, " ×", least=True, bare=alone))
    return found


def told(rows: list[Row]) -> list[Row]:
    """What ``persist.py`` and ``restore.py`` have judged themselves, and what they measured beside."""
    return [row for bench in ("persist", "restore") for row in pick(rows, bench=bench, kind="summary")]


def of_what(row: Row) -> str:
    if row.get("of_fio") is not None:
        return f"{number(row['of_fio'])} of fio, {number(row.get('cpu_s_per_gb'))} CPU s per GB"
    return row.get("against") or "-"


# -- tables ---------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None or value != value:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(header), rule, *map(list, lines)])


def hardware(rows: list[Row]) -> str:
    machines = {row["run"]: row for row in pick(rows, kind="machine")}
    if not machines:
        return ""
    measured = [row["run"] for row in pick(rows, kind="summary", part="systems") if row["run"] in machines]
    one = machines[(measured or list(machines))[0]]
    return (
        f"{one['cpu']}, {one['cores']} cores, {one['memory_gib']} GiB of memory, Linux {one['kernel']}, "
        f"Python {one['python']}, torch {one['torch']}, {one['date']}."
    )


def systems_table(rows: list[Row], part: str = "systems", *, brief: bool = False) -> str:
    found = Comparison(rows, part)
    seen = {row["system"]: row for row in reversed(found.rows)}  # in several batches: of the first, which has all of it
    order = sorted(seen.values(), key=lambda row: (row["system"] == "fio", row.get("blocking_ms") or 0))
    lines = [system_line(row) for row in order]
    header = ["", "blocks, ms", "× ours", "× raw copy", "step, ms", "durable after, ms", "fsync", "every 4 steps, ms"]
    header += ["steps beside, %", "memory, MiB", "SIGKILL after the call", "loaded"]
    for name, reason in found.left_out.items():
        if name not in seen:
            lines.append([name, f"not run: {reason}", *[""] * (len(header) - 2)])
    if brief:
        keep = [
            header.index(name) for name in ("", "blocks, ms", "× ours", "durable after, ms", "fsync", "memory, MiB")
        ]
        keep += [header.index(name) for name in ("SIGKILL after the call", "loaded")]
        header, lines = [header[n] for n in keep], [[line[n] for n in keep] for line in lines]
    return markdown(header, lines)


def system_line(row: Row) -> list[str]:
    def cell(key: str) -> str:
        value = row.get(key)
        return "-" if value is None or value != value else number(value)

    on_disk = row.get("persistent", True)
    bare = row["system"].startswith(OWN[1:3])
    kept = {True: "survives", False: "**lost**"}.get(row.get("survives_kill"), "-")
    verdict = row.get("verdict", "-")
    return [
        row["system"],
        cell("blocking_ms"),
        cell("to_ours"),
        cell("to_raw"),
        f"{row['inflation_ms']:+.0f}" if row.get("inflation_ms") is not None else "-",
        cell("lag_ms") if on_disk else "-",
        ("yes" if row.get("fsynced") else "**no**") if on_disk else "-",
        cell("pressed_ms"),
        f"{row['beside_percent']:+.0f}" if row.get("beside_percent") is not None else "-",
        "-" if bare else cell("memory_mib"),
        "-" if bare else kept,
        "-" if bare else verdict if verdict in ("ok", "-") else f"**{verdict}**",
    ]


def sweep_table(rows: list[Row], part: str, key: str) -> str:
    """Blocking milliseconds: a line for each system, a column for each value of ``key``."""
    found = swept(rows, part)
    values = sorted({row[key] for row in found})
    names = list(dict.fromkeys(row["system"] for row in found))
    lines = []
    for name in names:
        cells = [
            next((number(row["blocking_ms"]) for row in pick(found, system=name, **{key: v})), "-") for v in values
        ]
        lines.append([name, *cells])
    unit = {"mib": "MiB", "tensors": "tensors"}[key]
    return markdown([f"blocks, ms, {unit}:", *map(str, values)], lines)


def full(rows: list[Row]) -> str:
    """Everything."""
    parts = [hardware(rows)]
    lines = [target.line for target in targets(rows)]
    for row in told(rows):
        if row["passes"] is not None:
            lines.append([f"{row['bench']}: {row['way']}", "", of_what(row), "", "pass" if row["passes"] else SHORT])
    if lines:
        parts += ["### Targets", markdown(["against", "target", "measured", "bare copy, fio", ""], lines)]
    for part, title in (("systems", "All systems"), ("ranks", "Two ranks, one thread each"), ("beside", "One thread")):
        if pick(rows, kind="summary", part=part):
            one = pick(rows, kind="summary", part=part)[0]
            parts += [f"### {title}: {one['mib']} MiB in {one['tensors']} tensors", systems_table(rows, part)]
    for part, key in (("sizes", "mib"), ("tensors", "tensors")):
        if pick(rows, kind="summary", part=part):
            parts += [f"### By {'size' if key == 'mib' else 'number of tensors'}", sweep_table(rows, part, key)]
    if found := pick(rows, bench="steps", kind="summary"):
        keys = ("call_ms", "guard_ms", "stall_percent", "beside_percent")
        title = f"### A save at every step of {number(found[0]['base_ms'])} ms, {found[0]['mib']} MiB"
        header = ["", "call, ms", "guard, ms", "of the step, %", "rest of the step, %"]
        parts += [title, markdown(header, [[row["way"], *(number(row[key]) for key in keys)] for row in found])]
    if found := pick(rows, bench="plan", kind="summary"):
        keys = ("first", "same", "changed", "layout", "plan", "torch")
        lines = [[str(row["tensors"]), *(number(row[key]) for key in keys)] for row in found]
        parts += ["### A save without its copy, ms", markdown(["tensors", *keys], lines)]
    if found := pick(rows, bench="scale", kind="scale"):
        keys = ("stage1_gbs", "raw_gbs", "stage2_gbs", "fio_gbs", "call_ms", "call_cpu_ms", "saver_ms")
        header = ["ranks", "stage 1, GB/s", "bare copy", "stage 2, GB/s", "fio", "small call, ms", "its CPU, ms"]
        header += ["saver's CPU per rank, ms"]
        lines = [[str(row["ranks"]), *(number(row[key]) for key in keys)] for row in found]
        parts += [f"### {found[0]['mib']} MiB in all, by ranks", markdown(header, lines)]
    for bench in ("persist", "restore"):
        if found := pick(told(rows), bench=bench):
            lines = [[row["way"], number(row["s"]), number(row["gbs"]), of_what(row)] for row in found]
            parts += [f"### {bench.capitalize()}", markdown(["", "s", "GB/s", ""], lines)]
    return "\n\n".join(parts)


def brief(rows: list[Row]) -> str:
    """For the README."""
    one = next(iter(pick(rows, kind="summary", part="systems")), None)
    if one is None:
        sys.exit("no rows of stall.py systems in these files: there is nothing to put into the README")
    verdicts = [target.verdict for target in targets(rows) if target.value is not None]
    verdicts += ["pass" if row["passes"] else SHORT for row in told(rows) if row["passes"] is not None]
    return "\n\n".join(
        [
            f"{one['mib']} MiB in {one['tensors']} tensors, one rank, median of {one['repeats']}, interleaved in one "
            f"run of `benchmarks/stall.py`. {hardware(rows)}",
            systems_table(rows, brief=True),
            f"{verdicts.count('pass')} of {len(verdicts)} targets are reached; they, and sweeps: "
            "[docs/performance.md](docs/performance.md).",
        ]
    )


FIGURES = {
    "stall.png": "Blocking time of a save, by system",
    "steps.png": "Step times of a run with saves",
    "sizes.png": "Blocking time by size of the state",
    "tensors.png": "Blocking time by number of tensors",
}


def pictures(folder: str, paper: Path) -> str:
    """Those that were drawn, two in a row, as seen from ``paper``."""
    there = [name for name in FIGURES if folder and (Path(folder) / name).exists()]
    relative = os.path.relpath(folder, paper.parent) if folder else ""
    return "\n".join(f'<img src="{relative}/{name}" alt="{FIGURES[name]}" width="49%">' for name in there)


def put(text: str, file: Path) -> None:
    """Between the marks of ``file``."""
    before, begin, rest = file.read_text().partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{file} has no lines {BEGIN} and {END}")
    file.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--readme", default="", metavar="FILE")
    parser.add_argument("--docs", default="", metavar="FILE")
    parser.add_argument("--figures", default="", metavar="DIR", help="with pictures of plots.py, to be linked")
    args = parser.parse_args()
    rows = of_one_run(read(args.files))
    for file, text in ((args.readme, brief), (args.docs, full)):
        if file:
            put(f"{text(rows)}\n\n{pictures(args.figures, Path(file))}", Path(file))
    if not args.readme and not args.docs:
        print(full(rows))


if __name__ == "__main__":
    main()
