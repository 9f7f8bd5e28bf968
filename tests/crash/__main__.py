"""``python -m tests.crash``: every power cut, the table of mutants, and the system calls of real saves."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import real, syscalls, table
from .checks import Broken
from .memory import remembered
from .mutants import fsyncs, swaps

PROCESSES = 2


def main() -> int:
    begun = time.monotonic()
    pool = multiprocessing.get_context("fork").Pool(PROCESSES, _quiet, maxtasksperchild=8)
    with tempfile.TemporaryDirectory() as scratch, pool:
        tests = [name for name, _ in table.tests(table.FULL)]
        results = [pool.apply_async(_run, (name,)) for name in [*_traced(scratch), *sorted(tests, key=_long)]]
        mutants = [pool.apply_async(_mutate, (number,)) for number in range(len(fsyncs() + swaps()))]
        changed = [pool.apply_async(_change, (scratch, number)) for number in range(_changed(scratch))]
        broken = _told(results) + _table(mutants + changed)
    print(f"\n{broken or 'nothing'} broken, {time.monotonic() - begun:.0f} s")
    return 1 if broken else 0


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def _long(name: str) -> bool:
    return "promise" in name


def _traced(scratch: str) -> list[str]:
    missing = syscalls.missing()
    if missing:
        print(f"no real calls are looked at: {missing}")
        return []
    return [f"traced verbs:{scratch}", f"traced saves:{scratch}"]


def _changed(scratch: str) -> int:
    return 0 if syscalls.missing() else len(real.mutants(Path(scratch)))


def _run(name: str) -> tuple[str, bool, str, int, int]:
    """(name, holds, what to print, cases, steps)."""
    test: Callable[[], Any]
    kind, _, scratch = name.partition(":")
    if kind.startswith("traced"):
        place = Path(scratch) / kind.replace(" ", "-")
        place.mkdir()
        test = lambda: real.keep_verbs(place) if "verbs" in kind else real.keep_saves(place, table.FAST)  # noqa: E731
    else:
        test = dict(table.tests(table.FULL))[name]
    begun = time.process_time()
    try:
        with remembered():
            tally = test()
    except Broken as broken:
        return kind, False, f"BROKEN {kind}: {broken}", 0, 0
    line = f"{kind:66} {tally.steps:5} steps {tally.cases:8} cases {tally.disks:7} disks"
    bounded = f", {tally.bounded} steps beyond the bound" if tally.bounded else ""
    return kind, True, f"{line} {time.process_time() - begun:5.0f} s{bounded}", tally.cases, tally.steps


def _told(results: list[Any]) -> int:
    broken = cases = steps = 0
    for result in results:
        _, holds, line, more, some = result.get()
        print(line, flush=True)
        broken, cases, steps = broken + (not holds), cases + more, steps + some
    print(f"{steps} steps, {cases} cases; every combination of at most {table.FULL} at a step, see choices.selections")
    return broken


def _mutate(number: int) -> tuple[str, str | None]:
    mutant = (fsyncs() + swaps())[number]
    red = table.first_red(mutant)
    return str(mutant), red and red[0]


def _change(scratch: str, number: int) -> tuple[str, str | None]:
    name, test = real.mutants(Path(scratch))[number]
    try:
        test()
    except Broken:
        return name, "test_what_the_kernel_was_asked_for_keeps_the_promise_of_every_verb"
    return name, None


def _table(results: list[Any]) -> int:
    print("\nmutant → the test it turns red")
    survived = 0
    for result in results:
        mutant, red = result.get()
        print(f"{mutant:100} → {red or 'NONE: IT SURVIVES'}", flush=True)
        survived += red is None
    return survived


if __name__ == "__main__":
    sys.exit(main())
