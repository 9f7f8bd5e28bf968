"""Does throughput fall with the number of ranks? One node, 1 to 8 ranks, the total state held constant.

    python benchmarks/scale.py [--mib 2048] [--ranks 1 2 4 8] [--tensors 512] [--repeats 5] [--json FILE]

Per number of ranks, in turns with a bare copy of the same layout: stage 1 (bytes over the blocking time of the slowest
rank) and stage 2 (bytes over the time from there until all is committed and durable), fio beside it. Then what a save
costs beside its bytes, with small states: the processor time of the call and that of the saver, per rank and save
(events, headers, receipts, manifest), and how long the call blocks the slowest rank, which waits for a core where there
are fewer of them than ranks. Last, two layouts that are hard for metadata: a model of ``--many-tensors`` tensors, and
200 files per rank; each is saved and read back.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from pathlib import Path

from conduct import RAW, Job, Plan, most, narrow, specs_of
from crew import Crew, NotRun, Setting, Spec, marked, settle
from rows import Row, Rows, common_options, median, pick, scratch, table, verdict

STORAGE = "ckpt_engine, storage"
MOST_METADATA_MS = 5.0
"""Per rank and save."""


def chosen(target: str, *words: str) -> Spec:
    """A system of ``ours``, with those of its rows that have one of the words in their names."""
    specs = [spec for spec in specs_of("ours") + specs_of("ours", listed="LAYOUTS") if spec.target == f"ours:{target}"]
    return narrow(specs, lambda name: any(word in name for word in words))[0]


def job_of(args: argparse.Namespace, ranks: int) -> Job:
    setting = Setting(mib=args.mib, tensors=args.tensors, ranks=ranks, threads=1, multiplications=1)
    specs = [chosen("Blocking", "storage"), chosen("RawCopy", "kernel", "memcpy")]
    return Job(part="scale", specs=specs, setting=setting, plan=Plan(repeats=args.repeats, fio=True))


def throughput(rows: Rows, args: argparse.Namespace, ranks: int, work: Path) -> Row:
    job_of(args, ranks).run(rows, work)
    facts = {"part": "scale", "mib": args.mib, "ranks": ranks}
    saves = pick(rows.rows, kind="save", system=STORAGE, **facts)
    raw = [row for row in pick(rows.rows, kind="summary", **facts) if row["system"].startswith(RAW)]
    fio = [row["lag_ms"] for row in pick(rows.rows, kind="fio", **facts)]
    return {
        "stage1_gbs": gbs(args.mib, median([row["blocking_ms"] for row in saves])),
        "raw_gbs": gbs(args.mib, min((row["blocking_ms"] for row in raw), default=float("nan"))),
        "stage2_gbs": gbs(args.mib, median([row["lag_ms"] - row["blocking_ms"] for row in saves])),
        "fio_gbs": gbs(args.mib, median(fio)),
    }


def gbs(mib: float, ms: float) -> float:
    return mib * 2**20 / ms / 1e6


def metadata(args: argparse.Namespace, ranks: int, work: Path) -> Row:
    """Medians, of saves that are nearly all metadata."""
    setting = Setting(mib=ranks, tensors=ranks * 64, ranks=ranks, threads=1, multiplications=1)
    calls, lags, own, processor = [], [], [], []
    with Crew(chosen("Blocking", "storage"), setting, work / f"metadata{ranks}") as crew:
        for command in ("make", "start"):
            crew.ask(command)
        for number in range(args.repeats + 2):
            settle()
            before = savers_ms(crew)
            found = crew.ask("save", step=crew.next_step(), variant=STORAGE)
            if number > 1:
                calls.append(most(found, "call_ms"))
                lags.append(most(found, "lag_ms"))
                own.append(sum(one["call_cpu_ms"] for one in found) / ranks)
                processor.append((savers_ms(crew) - before) / ranks)
    found = {"call_ms": median(calls), "tiny_lag_ms": median(lags)}
    found |= {"call_cpu_ms": median(own), "saver_ms": median(processor)}
    return {**found, "metadata_ms": found["call_cpu_ms"] + found["saver_ms"]}


def savers_ms(crew: Crew) -> float:
    """Processor time so far of what belongs to a crew and is no rank of it."""
    ranks = {process.pid for process in crew.processes}
    total = 0.0
    for pid in marked(crew.mark):
        if pid not in ranks:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    total += int((task / "schedstat").read_text().split()[0]) / 1e6
    return total


def hard_layouts(rows: Rows, args: argparse.Namespace, work: Path) -> None:
    """Saved to storage, loaded and compared; two ranks, so that 200 files are 400."""
    for name, target, tensors in (
        (f"{args.many_tensors} tensors", "Blocking", args.many_tensors),
        ("200 files per rank", "ManyFiles", 800),
    ):
        setting = Setting(mib=min(256, args.mib), tensors=tensors, ranks=2, threads=1, multiplications=1)
        spec = chosen(target, "storage")
        facts = {"part": "layouts", "layout": name, **dataclasses.asdict(setting)}
        with Crew(spec, setting, work / target) as crew:
            try:
                for command in ("make", "start"):
                    crew.ask(command)
                crew.ask("save", step=crew.next_step(), variant=spec.variants[0])
                saves = [crew.ask("save", step=crew.next_step()) for _ in range(3)]
                verdicts = [one["found"] for one in crew.ask("verify", step=crew.step)]
            except NotRun as error:
                rows.add(kind="not run", **facts, reason=str(error))
                continue
        rows.add(
            kind="summary",
            **facts,
            blocking_ms=median([most(found, "blocking_ms") for found in saves]),
            lag_ms=median([most(found, "lag_ms") for found in saves]),
            verdict="ok" if set(verdicts) == {"ok"} else ", ".join(verdicts),
        )


def told(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f} {unit}"


def show(rows: list[Row]) -> str:
    lines = [
        (
            str(row["ranks"]),
            *(told(row[key], "GB/s") for key in ("stage1_gbs", "raw_gbs", "stage2_gbs", "fio_gbs")),
            *(told(row[key], "ms") for key in ("call_ms", "tiny_lag_ms", "call_cpu_ms", "saver_ms")),
            verdict(bool(row["passes"])),
        )
        for row in pick(rows, kind="scale")
    ]
    header = ("ranks", "stage 1", "bare copy", "stage 2", "fio", "call", "tiny lag", "call CPU", "saver CPU", "≤ 5 ms")
    text = table(header, lines)
    for row in pick(rows, part="layouts", kind="summary"):
        text += f"\n{row['layout']}: blocks {row['blocking_ms']:.1f} ms, durable after {row['lag_ms']:.0f} ms"
        text += f", loaded: {row['verdict']}"
    for row in pick(rows, part="layouts", kind="not run"):
        text += f"\n{row['layout']}: not run: {row['reason']}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser)
    parser.set_defaults(repeats=5)
    parser.add_argument("--mib", type=int, default=2048, help="state of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tensors", type=int, default=512, help="of all ranks together")
    parser.add_argument("--many-tensors", type=int, default=20000)
    args = parser.parse_args()
    for ranks in args.ranks:
        job_of(args, ranks).batches()  # that they fit is known before anything runs
    rows = Rows(args.json, bench="scale")
    with scratch(args, "scale") as work:
        for ranks in args.ranks:
            found = {**throughput(rows, args, ranks, Path(work)), **metadata(args, ranks, Path(work))}
            passes = found["metadata_ms"] <= MOST_METADATA_MS
            rows.add(
                kind="scale", mib=args.mib, ranks=ranks, cores=len(os.sched_getaffinity(0)), passes=passes, **found
            )
        hard_layouts(rows, args, Path(work))
    print(f"\n{args.mib} MiB in all, median of {args.repeats}")
    print(show(rows.rows))


if __name__ == "__main__":
    main()
