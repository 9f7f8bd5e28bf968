"""How long a save blocks the training: ours against everybody else's, in one run, interleaved, medians.

    python benchmarks/stall.py [systems|ranks|beside|sizes|tensors …] [--mib 1024] [--tensors 64] [--repeats 7]
                               [--peers] [--json FILE] [--plot DIR] [--dir DIR]

Each system runs in processes of its own (``worker.py``), all of them the same training, and they take turns
(``conduct.py``). JSON lines as it goes, then a table for each part:

systems  everything there is, with one rank: blocking (call and guard), inflation (a step with a save, minus the median
         step without), lag (until durable), with a save every 4 steps, loaded and compared, killed, memory
ranks    two ranks of one thread each, ``--mib`` in all, to memory
beside   how much longer steps take while stage 2 writes, of a training with one thread, which leaves a core free
sizes    from 64 MiB to ``--mib``, or those of ``--sizes``
tensors  from 1 tensor to ``--most-tensors``

``--peers`` adds the rivals of ``benchmarks/peers`` to "systems"; ``make bench-peers`` installs them first. How much
memory that needs is computed before, and refused with numbers where it is not there.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from conduct import OURS, RAW, Job, Plan, everything, narrow, specs_of, usable_mib
from crew import Setting, Spec
from rows import Row, Rows, common_options, pick, scratch, table

OVERLAPPED = "ckpt_engine, overlap, memory"
"""In every sweep, in a process of its own; ours, the bare copies and ``torch.save`` share one, and its state, there."""
STEP_MS, STEP_MS_PER_MIB, SHORT_MS_PER_MIB = 40.0, 0.25, 0.15
"""Forward and backward of a step take about that long, so that a copy may hide behind them; in sweeps, where no rival
needs more, the short time."""


@functools.cache
def multiplication_ms(threads: int) -> float:
    """How long one of the multiplications that a step is made of takes here."""
    torch.set_num_threads(threads)
    matrix = torch.randn(512, 512)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def setting(args: argparse.Namespace, ms_per_mib: float = STEP_MS_PER_MIB, **other: int) -> Setting:
    """As the options say, but for what is given. ``ms_per_mib``: of a step, where the option is not there."""
    facts = {"mib": args.mib, "tensors": args.tensors, "threads": args.threads, **other}
    step_ms = args.step_ms or max(STEP_MS, ms_per_mib * facts["mib"])
    return Setting(**facts, multiplications=max(1, round(step_ms / multiplication_ms(facts["threads"]))))


def systems(rows: Rows, args: argparse.Namespace) -> list[Job]:
    specs = only(args, everything(rows, "systems", peers=args.peers))
    plan = Plan(
        repeats=args.repeats, pressed=1, busy=1, weighed=True, verified=True, killed=True, fio=True, prepared_s=5,
    )  # fmt: skip
    return [Job(part="systems", specs=specs, setting=setting(args), plan=plan)]


def ranks(rows: Rows, args: argparse.Namespace) -> list[Job]:
    plan = Plan(repeats=min(5, args.repeats), warm=1, verified=True)
    specs = narrow(specs_of("ours"), lambda name: "storage" not in name)
    one = setting(args, SHORT_MS_PER_MIB, ranks=2, threads=1)
    return [Job(part="ranks", specs=only(args, specs), setting=one, plan=plan)]


def beside(rows: Rows, args: argparse.Namespace) -> list[Job]:
    """The figure for as many threads as there are cores comes with "systems". Several steps fit into stage 2."""
    plan = Plan(repeats=1, busy=min(5, args.repeats))
    specs = narrow(specs_of("ours"), lambda name: "storage" in name)
    return [Job(part="beside", specs=only(args, specs), setting=setting(args, 0, threads=1), plan=plan)]


def sizes(rows: Rows, args: argparse.Namespace) -> list[Job]:
    ladder = args.sizes or [*(mib for mib in (64, 256) if mib < args.mib), args.mib]
    rivals = ("torch.save + fsync", "dcp.async_save, thread")
    with_systems = not args.parts or "systems" in args.parts  # these measure ``--mib``, see ``rows.swept``
    sizes_ = [mib for mib in ladder if mib != args.mib or not with_systems]
    return [sweep("sizes", setting(args, SHORT_MS_PER_MIB, mib=mib), args, *rivals) for mib in sizes_]


def tensors(rows: Rows, args: argparse.Namespace) -> list[Job]:
    """``--tensors`` is among them, in as many rounds as there are of "systems": the target against the raw copy."""
    ladder = dict.fromkeys(number for number in (1, 10, args.tensors, 2000, 20000) if number <= args.most_tensors)
    jobs = {number: sweep("tensors", setting(args, SHORT_MS_PER_MIB, tensors=number), args) for number in ladder}
    if own := jobs.get(args.tensors):
        jobs[args.tensors] = replace(own, plan=replace(own.plan, repeats=args.repeats))
    return list(jobs.values())


def sweep(part: str, one: Setting, args: argparse.Namespace, *rivals: str) -> Job:
    """Ours, the bare copies and ``rivals``: how long they block, and no steps without a save to compare with. Where
    several states do not fit, only what shares one is there."""
    rows = {OVERLAPPED, *rivals}
    together = narrow(specs_of("ours", listed="LARGE"), lambda name: name.startswith((OURS, RAW)) or name in rows)
    rows -= {name for spec in together for name in spec.names}
    others = narrow(specs_of("ours") + specs_of("systems"), rows.__contains__)
    plan = Plan(repeats=args.sweep_repeats, warm=1, others=3, steps=0)
    job = Job(part=part, specs=only(args, together + others), setting=one, plan=plan)
    return job if job.need_mib(job.specs) <= usable_mib() else replace(job, specs=only(args, together))


PARTS = {"systems": systems, "ranks": ranks, "beside": beside, "sizes": sizes, "tensors": tensors}


def only(args: argparse.Namespace, specs: Sequence[Spec]) -> list[Spec]:
    """``--only``: the rows whose names hold one of its words, and what everything is compared with."""
    words = [word.lower() for word in args.only]
    base = (OURS, RAW)
    return narrow(specs, lambda name: not words or name.startswith(base) or any(word in name.lower() for word in words))


def show(rows: Sequence[Row], part: str) -> str:
    """The tables of a part, one for each setting."""
    found = []
    summaries = pick(list(rows), kind="summary", part=part)
    settings = dict.fromkeys((row["mib"], row["tensors"], row["ranks"], row["threads"]) for row in summaries)
    for mib, number, ranks_, threads in settings:
        lines = []
        for row in pick(summaries, mib=mib, tensors=number, ranks=ranks_, threads=threads):
            if row["batch"] and row["system"] in {other["system"] for other in pick(summaries, mib=mib, batch=0)}:
                continue  # ours and the bare copies are in every batch
            lines.append(line_of(row))
        head = f"{part}: {mib} MiB in {number} tensors, {ranks_} rank(s), {threads} thread(s)"
        found.append(f"{head}\n{table(HEADER, lines)}")
    left_out = {
        f"{row['system']}: not run: {row['reason']}": None for row in pick(list(rows), kind="not run", part=part)
    }
    return "\n\n".join([*found, "\n".join(left_out)]).rstrip()


HEADER = (
    "system",
    "blocking",
    "ours ×",
    "raw ×",
    "inflation",
    "lag",
    "fsync",
    "every 4",
    "beside",
    "loaded",
    "SIGKILL",
    "memory",
)


def line_of(row: Row) -> tuple[str, ...]:
    def number(key: str, form: str = "{:.1f} ms") -> str:
        value = row.get(key)
        return "-" if value is None or value != value else form.format(value)

    kept = {True: "survives", False: "lost", None: "-"}[row.get("survives_kill")]
    durable = "-" if row.get("persistent", True) is False else ("yes" if row.get("fsynced") else "no")
    return (
        row["system"],
        number("blocking_ms"),
        number("to_ours", "{:.2f}"),
        number("to_raw", "{:.2f}"),
        number("inflation_ms", "{:+.1f} ms"),
        number("lag_ms") if durable != "-" else "-",
        durable,
        number("pressed_ms"),
        number("beside_percent", "{:+.1f} %"),
        row.get("verdict", "-"),
        kept,
        number("memory_mib", "{:.0f} MiB"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="all by default")
    common_options(parser)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, of all ranks together")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--most-tensors", type=int, default=2000, help="where the sweep of tensors ends")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], metavar="MIB", help="of the sweep of sizes")
    parser.add_argument("--sweep-repeats", type=int, default=5, help="rounds of sizes and tensors")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch, in every system")
    parser.add_argument("--step-ms", type=float, default=0, help="forward and backward (by the size of the state)")
    parser.add_argument("--peers", action="store_true", help="with the rivals that have environments in .venv-peers")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="ours, the bare copies, and rows with such a word"
    )
    parser.add_argument("--plot", default="", metavar="DIR", help="write PNGs there (needs matplotlib)")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part of this: {sorted(unknown)}")
    rows = Rows(args.json, bench="stall")
    jobs = [job for name in args.parts or PARTS for job in PARTS[name](rows, args)]
    for job in jobs:
        job.batches()  # that they fit is known before anything runs
    with scratch(args, "stall") as work:
        for job in jobs:
            job.run(rows, Path(work))
    for name in args.parts or PARTS:
        print(f"\n{show(rows.rows, name)}")
    if args.plot:
        import plots

        plots.draw(rows.rows, Path(args.plot))


if __name__ == "__main__":
    main()
