"""The quick part of ``python -m tests.crash``: every step of every scenario, fewer of the combinations at each."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import real, syscalls
from .checks import Broken
from .explore import Tally, cut_everywhere, cut_recovery, cut_two_savers, fail_everywhere
from .fault_disk import FaultDisk
from .memory import remembered
from .mutants import Mutant, fsyncs, swaps
from .promises import PROMISES, keep_promise
from .savers import Pair
from .scenarios import PAIRS, SCENARIOS
from .table import QUICK

MISSING = syscalls.missing()


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    with remembered():
        yield


@pytest.mark.parametrize("name", PROMISES)
def test_promise_of_one_function(name: str) -> None:
    assert keep_promise(name).cases > 2


@pytest.mark.parametrize("name", SCENARIOS)
def test_power_cut_at_every_step_keeps_what_was_committed(name: str) -> None:
    act, begin = SCENARIOS[name]
    tally = cut_everywhere(name, act, begin(), bound=QUICK)
    print(tally)
    assert tally.cases > tally.steps > 60


@pytest.mark.parametrize("name", ["first_of_a_root", "re_save"])
def test_every_power_cut_of_a_recovery(name: str) -> None:
    act, begin = SCENARIOS[name]
    tally = cut_recovery(name, act, begin())
    print(tally)
    assert tally.cases > 50


@pytest.mark.parametrize("name", ["two_first_saves"])
def test_every_power_cut_of_two_savers(name: str) -> None:
    pair: Callable[[], Pair] = PAIRS[name]
    tally = cut_two_savers(name, pair, bound=QUICK)
    print(tally)
    assert tally.cases > 500


@pytest.mark.parametrize("name", ["first_of_a_root", "framework"])
def test_every_step_refused(name: str) -> None:
    act, begin = SCENARIOS[name]
    tally = fail_everywhere(name, act, begin, errno.EIO, for_good=False, bound=QUICK)
    print(tally)
    assert tally.steps > 60


def reds(mutant: Mutant, tests: list[Callable[[], Tally]]) -> bool:
    with mutant.planted():
        for test in tests:
            try:
                test()
            except Broken:
                return True
    return False


@pytest.mark.parametrize("mutant", [m for m in fsyncs() if m.module.split(".")[-1] in ("base", "commit")], ids=str)
def test_one_fsync_less_breaks_the_promise_of_its_function(mutant: Mutant) -> None:
    assert reds(mutant, [lambda name=name: keep_promise(name) for name in PROMISES])


def test_every_mutant_fits_the_source() -> None:
    mutants = [*fsyncs(), *swaps()]
    assert len(mutants) > 30
    for mutant in mutants:
        with mutant.planted():
            pass
    for path, known, fsync in ((real.POSIX, real.PYTHON, "    _sync(path"), (real.WRITER, real.NATIVE, "::fsync(")):
        text = path.read_text()
        assert all(text.count(old) == 1 for _, old, _ in known), path
        assert sum(fsync in old for _, old, _ in known) >= text.count(fsync), f"a new fsync in {path} has no mutant"


def test_close_syncs_nothing_and_a_failed_fsync_is_not_mended_by_the_next() -> None:
    failing = []

    def refuse_once(step: object) -> None:
        if getattr(step, "kind", "") == "fsync" and not failing:
            failing.append(step)
            raise OSError(errno.EIO, "once")

    disk = FaultDisk()
    disk.foreign_write("/x", b"four")
    assert [choice.states for choice in disk.choices()] == [(None, 1), (b"", b"fo", bytes(4), b"four")]
    disk.before = refuse_once
    with pytest.raises(OSError, match="once"):
        disk.sync_file("/x")
    disk.sync_file("/x")
    assert disk.choices()[1].states[0] == b"" and disk.files[1].data == b"four"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_what_the_kernel_was_asked_for_keeps_the_promise_of_every_verb(tmp_path: Path) -> None:
    print(real.keep_verbs(tmp_path))


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_every_power_cut_of_traced_saves(tmp_path: Path) -> None:
    tally = real.keep_saves(tmp_path, bound=QUICK)
    print(tally)
    assert tally.steps > 100
