"""Measure systems against each other in one run: interleaved rounds in changing order, one process tree at a time.

The crews of all systems are started, then take turns; a turn begins when the save before is durable and everything
dirty is written back (``sync``). What does not fit into memory at once goes in batches, each with ours and the bare
copies, so that every ratio is of things measured in turns. Afterwards: saves back to back, steps while a save is under
way, what is loaded again, and what a SIGKILL leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from crew import HERE, Crew, NotRun, Setting, Spec, free_mib, settle, watched
from disk import fio
from rows import Rows, median, pick

OURS, RAW = "ckpt_engine, memory", "raw: "
BASE = ("ours:Blocking", "ours:RawCopy")
"""In every batch, ..."""
AGAIN = (OURS, "raw: bare kernel")
"""... but in later ones only these rows, and only their saves."""
PEERS = HERE.parent / ".venv-peers"
TRACED = "fsync,fdatasync,syncfs,sync,write,pwrite64,writev,pwritev,pwritev2"
STRACE = ["strace", "--seccomp-bpf", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={TRACED}"]
"""Calls that are not traced do not stop: without that, all that is killed would need three times as long."""
SYNCED = 0.9
"""Durable is a save of which at least this share of the state was written to files that were synced afterwards."""
KEPT_MIB, KEPT_TENSORS = 128, 64
"""What the crews that are killed hold at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How many rounds, and what is measured beside them.

    warm: rounds of ours and the bare copies before those that count. others: rounds of what is neither; 0: as
    many as of these. pressed, busy: rounds of these.
    every, saves: of a pressed round. steps: without a save, before each save. prepared_s: how
    long the first save comes after the start at least.
    """

    repeats: int = 7
    warm: int = 0
    others: int = 0
    pressed: int = 0
    busy: int = 0
    weighed: bool = False
    verified: bool = False
    killed: bool = False
    fio: bool = False
    every: int = 4
    saves: int = 3
    steps: int = 1
    prepared_s: float = 0.0


def specs_of(module: str, python: str = sys.executable, *, listed: str = "SYSTEMS") -> list[Spec]:
    """The systems that a module lists."""
    loaded = importlib.import_module(module)
    found = []
    for name, kind in getattr(loaded, listed):
        system = getattr(loaded, kind)
        names = system.variants or (name,)
        found.append(Spec(names=names, variants=system.variants or ("",), target=f"{module}:{kind}",
                          memory=system.memory, python=python))  # fmt: skip
    return found


def narrow(specs: Sequence[Spec], keep: Callable[[str], bool]) -> list[Spec]:
    """Only the rows that ``keep`` is true of; a system without any is left out."""
    found = []
    for spec in specs:
        pairs = [pair for pair in zip(spec.names, spec.variants, strict=True) if keep(pair[0])]
        if pairs:
            names, variants = zip(*pairs, strict=True)
            found.append(dataclasses.replace(spec, names=names, variants=variants))
    return found


def everything(rows: Rows, part: str, *, deepspeed: bool = True, peers: bool = False) -> list[Spec]:
    """All systems that can be tried here; for a rival without its environment there is a row that says so."""
    found = specs_of("ours") + specs_of("systems")
    if deepspeed:
        found += specs_of("deepspeed_systems")
    for file in sorted((HERE / "peers").glob("*.py")) if peers else ():
        if file.stem == "__init__":
            continue
        python = PEERS / file.stem / "bin" / "python"
        specs = specs_of(f"peers.{file.stem}", str(python))
        if (PEERS / file.stem / "ready").exists():
            found += specs
            continue
        log = PEERS / f"{file.stem}.log"
        why = log.read_text().strip().splitlines()[-1:] if log.exists() else []
        for name in [name for spec in specs for name in spec.names]:
            reason = f"could not be installed: {why[0][:200]}" if why else "no environment: make bench-peers"
            rows.add(kind="not run", part=part, system=name, reason=reason)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Systems to be compared under one setting; ``part`` is in all rows."""

    part: str
    specs: Sequence[Spec]
    setting: Setting
    plan: Plan

    def batches(self) -> list[list[Spec]]:
        """Systems that fit into memory together, ours and the bare copies in each. Exits where there is no way."""
        base = [spec for spec in self.specs if spec.target in BASE]
        others = [spec for spec in self.specs if spec.target not in BASE]
        free, needed = usable_mib(), self.need_mib(base)
        most = needed + max((self.need_mib([spec]) for spec in others), default=0)
        if most > free:
            sys.exit(
                f"{self.part}: {self.setting.mib} MiB of state need {most} MiB of memory, {needed} of them for ours and"
                f" the bare copies; {free} MiB may be used: give a smaller --mib"
            )
        found = [list(base)]
        for spec in others:
            fitting = next((batch for batch in found if self.need_mib([*batch, spec]) <= free), None)
            if fitting is None:
                found.append(fitting := narrow(base, AGAIN.__contains__))
            fitting.append(spec)
        return [batch for batch in found if batch]

    def need_mib(self, specs: Sequence[Spec]) -> int:
        return sum(spec.need_mib(self.setting) for spec in specs)

    def run(self, rows: Rows, work: Path) -> None:
        """Adds rows of the kinds save, fio, pressed, busy, verify, kill, trace, not run; one summary per system."""
        for number, batch in enumerate(self.batches()):
            facts = {"part": self.part, "batch": number, **dataclasses.asdict(self.setting)}
            name = f"{self.part}-{self.setting.mib}-{self.setting.tensors}-{number}"
            Batch(rows, batch, self.setting, work / name, self.plan, facts).run()


@functools.cache
def traces() -> bool:
    """True if strace is there, knows what it is asked for, and may trace."""
    try:
        return subprocess.run([*STRACE, "true"], check=False, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def usable_mib() -> int:
    """A tenth of what is free stays so."""
    return int(0.9 * free_mib())


class Batch:
    """Systems that take turns."""

    def __init__(
        self, rows: Rows, specs: Sequence[Spec], setting: Setting, work: Path, plan: Plan, facts: dict[str, Any]
    ) -> None:
        self.rows, self.specs, self.setting, self.work, self.plan, self.facts = rows, specs, setting, work, plan, facts
        self.crews: list[Crew] = []
        self.out: set[str] = set()
        self.bare: dict[str, float] = {}
        self.held: dict[str, float] = {}
        self.again = set(AGAIN if facts["batch"] else ())
        self.first: dict[str, float] = {}
        self.started: dict[str, float] = {}

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            crews = [Crew(spec, self.setting, self.work / f"crew{n}") for n, spec in enumerate(self.specs)]
            for crew in crews:  # all import what they need at once
                stack.enter_context(crew)
            with ThreadPoolExecutor(2) as pool:  # nothing is timed yet
                for crew, begun in [(crew, pool.submit(self.begin, crew)) for crew in crews]:
                    with self.may_fail(crew):
                        begun.result()
                        self.crews.append(crew)
            for crew in list(self.crews):
                with self.may_fail(crew):
                    self.warm_up(crew)
            for repeat in range(-self.plan.warm, self.plan.repeats):
                self.in_turns(repeat, self.save, partial(self.takes_part, repeat))
                if self.plan.fio and repeat >= 0 and not self.again:
                    self.fio(repeat)
            for repeat in range(self.plan.pressed):
                self.in_turns(repeat, self.pressed, self.goes_on)
            for repeat in range(self.plan.busy):
                self.in_turns(repeat, self.busy, self.goes_on)
            if self.plan.verified:
                self.in_turns(0, self.verify, self.to_verify)
        if self.plan.killed:
            self.kill_and_trace()
        self.sum_up()
        shutil.rmtree(self.work, ignore_errors=True)

    # -- turns ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def may_fail(self, crew: Crew) -> Iterator[None]:
        """A system that fails is out, with its reason, and the others go on."""
        try:
            yield
        except NotRun as error:
            for name in crew.spec.names:
                self.out.add(name)
                self.rows.add(kind="not run", **self.facts, system=name, reason=str(error))
            if crew in self.crews:
                self.crews.remove(crew)

    def in_turns(
        self, repeat: int, what: Callable[[Crew, str, str, int], None], which: Callable[[str], bool] = lambda name: True
    ) -> None:
        turns = [
            (crew, name, variant)
            for crew in self.crews
            for name, variant in zip(crew.spec.names, crew.spec.variants, strict=True)
            if which(name)
        ]
        random.Random(f"{what.__name__} {repeat}").shuffle(turns)  # nobody always comes behind the same one
        for crew, name, variant in turns:
            if crew in self.crews:
                with self.may_fail(crew):
                    settle()
                    what(crew, name, variant, repeat)

    def takes_part(self, repeat: int, name: str) -> bool:
        return 0 <= repeat < (self.plan.others or self.plan.repeats) or name.startswith((RAW, "ckpt_engine"))

    def goes_on(self, name: str) -> bool:
        """True of a system that was still at work when its call had returned, and was not in an earlier batch."""
        saves = pick(self.rows.rows, kind="save", **self.facts, system=name)
        return name not in self.again and any(row["lag_ms"] > row["call_ms"] for row in saves)

    def to_verify(self, name: str) -> bool:
        """True unless ``busy`` has done it, or an earlier batch, or it is a bare copy."""
        return name not in self.again and not name.startswith(RAW) and not (self.plan.busy and self.goes_on(name))

    def begin(self, crew: Crew) -> None:
        crew.ask("make")
        if self.plan.weighed:
            self.bare[crew.spec.target] = crew.memory_mib()
        crew.ask("start")
        self.started[crew.spec.target] = time.monotonic()

    def warm_up(self, crew: Crew) -> None:
        """The first save of each row is told apart."""
        crew.ask("plain", n=1)
        time.sleep(max(0.0, self.started[crew.spec.target] + self.plan.prepared_s - time.monotonic()))
        for name, variant in zip(crew.spec.names, crew.spec.variants, strict=True):
            step = crew.next_step()
            self.first[name] = most(crew.ask("save", step=step, variant=variant), "blocking_ms")
            crew.ask("forget", step=step)

    def save(self, crew: Crew, name: str, variant: str, repeat: int) -> None:
        plain = crew.ask("plain", n=self.plan.steps)
        step = crew.next_step()
        weighed = self.plan.weighed and repeat == 0
        at_rest = crew.memory_mib() - self.bare[crew.spec.target] if weighed else 0.0
        with watched() if weighed else contextlib.nullcontext([0.0]) as more:
            found = crew.ask("save", step=step, variant=variant)
        if weighed:
            self.held[name] = max(0.0, at_rest + max(more))  # less than nothing: what ``make`` had needed went late
        crew.ask("forget", step=step)
        if repeat < 0:
            return
        times = {key: most(found, key) for key in ("call_ms", "guard_ms", "blocking_ms", "step_ms", "lag_ms")}
        self.rows.add(
            kind="save", **self.facts, system=name, repeat=repeat, **times,
            plain_ms=[max(steps) for steps in zip(*(one["steps_ms"] for one in plain), strict=True)],
            fsynced=found[0]["fsynced"], persistent=found[0]["persistent"],
        )  # fmt: skip

    def fio(self, repeat: int) -> None:
        settle()
        try:
            seconds = fio(self.work, self.setting.mib << 20)
        except NotRun as error:
            if repeat == 0:
                self.rows.add(kind="not run", **self.facts, system="fio", reason=str(error))
            return
        self.rows.add(kind="fio", **self.facts, system="fio", repeat=repeat, lag_ms=1e3 * seconds)

    def pressed(self, crew: Crew, name: str, variant: str, repeat: int) -> None:
        """Saves every few steps, as fast as the system takes them."""
        step = crew.next_step()
        crew.step += self.plan.saves
        found = crew.ask("pressed", step=step, saves=self.plan.saves, every=self.plan.every, variant=variant)
        for number in range(self.plan.saves):
            crew.ask("forget", step=step + number)
        self.rows.add(
            kind="pressed", **self.facts, system=name, repeat=repeat, every=self.plan.every,
            blocking_ms=[max(of) for of in zip(*(one["blocking_ms"] for one in found), strict=True)],
            run_ms=found[0]["run_ms"],
        )  # fmt: skip

    def busy(self, crew: Crew, name: str, variant: str, repeat: int) -> None:
        """Steps while a save is under way, against steps without."""
        plain = crew.ask("plain", n=5)[0]["steps_ms"]
        step = crew.next_step()
        found = crew.ask("busy", step=step, most=200, variant=variant)[0]
        self.rows.add(
            kind="busy", **self.facts, system=name, repeat=repeat, plain_ms=plain, steps_ms=found["steps_ms"],
            persistent=found["persistent"],
        )  # fmt: skip
        if self.plan.verified and repeat == 0:
            self.look_at(crew, name, step)
        else:
            crew.ask("forget", step=step)

    def verify(self, crew: Crew, name: str, variant: str, repeat: int) -> None:
        """A save whose state goes on being trained on while it is under way, loaded again."""
        step = crew.next_step()
        crew.ask("busy", step=step, most=20, variant=variant)
        self.look_at(crew, name, step)

    def look_at(self, crew: Crew, name: str, step: int) -> None:
        for rank, found in enumerate(crew.ask("verify", step=step)):
            self.rows.add(kind="verify", **self.facts, system=name, rank=rank, found=found["found"], why=found["why"])
        crew.ask("forget", step=step)

    # -- a SIGKILL -----------------------------------------------------------------------------------------------

    def kill_and_trace(self) -> None:
        """Two at a time: nothing is timed any more, and the last, which start slowest, begin. What is in several
        batches dies in the first one."""
        doomed = [
            partial(self.doom, spec, name, variant)
            for spec in reversed(self.specs)
            for name, variant in zip(spec.names, spec.variants, strict=True)
            if name not in self.out | self.again and not name.startswith(RAW)
        ]
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(one) for one in doomed]:
                done.result()

    def doom(self, spec: Spec, name: str, variant: str) -> None:
        """Right after a save has returned everything is killed; then a new process looks for that save.

        What the save before it synced was seen by strace, whatever the system says of itself.
        """
        mib, tensors = min(KEPT_MIB, self.setting.mib), min(KEPT_TENSORS, self.setting.tensors)
        setting = dataclasses.replace(self.setting, mib=mib, tensors=tensors, threads=1, multiplications=1)
        work = self.work / f"killed-{spec.target}-{variant}".replace(" ", "_")
        log = self.work / f"{work.name}.strace"
        under = [*STRACE, "-o", str(log)] if traces() else []
        with Crew(spec, setting, work, under=under) as crew:
            try:
                for command in ("make", "start"):
                    crew.ask(command)
                crew.ask("plain", n=2)
                crew.ask("save", step=1, variant=variant)
                if under:
                    before = len(log.read_text().splitlines())
                    if crew.ask("save", step=2)[0]["persistent"]:
                        self.traced(name, log.read_text().splitlines()[before:], work, setting)
                kept = crew.ask("kept", step=3)
            except NotRun as error:
                self.rows.add(kind="not run", **self.facts, system=name, reason=f"before the kill: {error}")
                return
            crew.kill()
            with Crew(spec, setting, work, resumes=crew) as after:
                try:
                    for command in ("make", "start"):
                        after.ask(command)
                    answers = after.ask("verify", step=3, updates=kept[0]["updates"], variant=variant)
                    found = next((one for one in answers if one["found"] != "ok"), answers[0])
                    verdict, why = found["found"], found["why"]
                except NotRun as error:
                    verdict, why = "lost", str(error)
        self.rows.add(kind="kill", **self.facts, system=name, found=verdict, why=why, survives=verdict == "ok")

    def traced(self, name: str, calls: list[str], work: Path, setting: Setting) -> None:
        syncs, nbytes = synced(calls, f"{work}/")
        safe = nbytes >= SYNCED * setting.mib * 2**20
        self.rows.add(kind="trace", **self.facts, system=name, syncs=syncs, synced_bytes=nbytes, safe=safe)

    # -- the sum -------------------------------------------------------------------------------------------------

    def sum_up(self) -> None:
        """One row per system that ran, with its ratios to ours and to the fastest bare copy of this batch."""
        rows = pick(self.rows.rows, **self.facts)
        times = {
            name: median([row["blocking_ms"] for row in pick(rows, kind="save", system=name)])
            for spec in self.specs
            for name in spec.names
            if name not in self.out
        }
        raw = min((ms for name, ms in times.items() if name.startswith(RAW)), default=float("nan"))
        ours = times.get(OURS, float("nan"))
        for spec in self.specs:
            for name in spec.names:
                if name in times:
                    self.rows.add(
                        kind="summary", **self.facts, system=name, repeats=self.plan.repeats,
                        to_ours=times[name] / ours, to_raw=times[name] / raw,
                        first_ms=self.first[name], memory_mib=self.held.get(name),
                        **summary(rows, name),
                    )  # fmt: skip
        if found := pick(rows, kind="fio"):
            self.rows.add(
                kind="summary",
                **self.facts,
                system="fio",
                lag_ms=median([row["lag_ms"] for row in found]),
                fsynced=True,
            )


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Medians of the rows of one system."""
    saves = pick(rows, kind="save", system=name)
    keys = ("call_ms", "guard_ms", "blocking_ms", "step_ms", "lag_ms")
    found: dict[str, Any] = {key: median([row[key] for row in saves]) for key in keys}
    found["most_ms"] = max(row["blocking_ms"] for row in saves)
    found["plain_ms"] = median([ms for row in saves for ms in row["plain_ms"]])
    found["inflation_ms"] = found["step_ms"] - found["plain_ms"]
    found |= {key: saves[-1][key] for key in ("fsynced", "persistent")}
    if pressed := pick(rows, kind="pressed", system=name):
        found["pressed_ms"] = median([ms for row in pressed for ms in row["blocking_ms"][1:]])
    busy = pick(rows, kind="busy", system=name)
    if steps := [ms for row in busy for ms in row["steps_ms"]]:
        found["beside_percent"] = 100 * (median(steps) / median([ms for row in busy for ms in row["plain_ms"]]) - 1)
        found["beside_steps"] = len(steps)
    if verdicts := [row["found"] for row in pick(rows, kind="verify", system=name)]:
        found["verdict"] = next((verdict for verdict in verdicts if verdict != "ok"), "ok")
    if kills := pick(rows, kind="kill", system=name):
        found["survives_kill"] = all(row["survives"] for row in kills)
    if traced := pick(rows, kind="trace", system=name):
        found["syncs"], found["fsynced"] = traced[-1]["syncs"], traced[-1]["safe"]
    return found


def most(answers: list[dict[str, Any]], key: str) -> float:
    """Of all ranks: the slowest one counts."""
    return max(answer[key] for answer in answers)


def synced(lines: list[str], below: str) -> tuple[int, int]:
    """What strace saw: syncs of files below a path, and the bytes written to files that were synced afterwards.

    A library that syncs its marker and not its data has syncs, and hardly a byte.
    """
    begun: dict[str, str] = {}
    written: dict[str, int] = {}
    syncs = nbytes = 0
    for line in lines:
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[pid] = call.removesuffix("<unfinished ...>")
            continue
        if call.startswith("<... "):
            call = begun.pop(pid, "") + call.partition(" resumed>")[2]
        name, _, rest = call.partition("(")
        result = rest.rpartition("= ")[2].split(" ")[0]
        path = re.search(r"<([^>]*)>", rest)
        if name in ("sync", "syncfs"):
            syncs, nbytes = syncs + 1, nbytes + sum(written.values())
            written.clear()
        elif path is not None and path[1].startswith(below) and result.isdecimal():
            if "write" in name:
                written[path[1]] = written.get(path[1], 0) + int(result)
            else:
                syncs, nbytes = syncs + 1, nbytes + written.pop(path[1], 0)
    return syncs, nbytes
