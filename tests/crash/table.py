"""The tests by name, and the table: mutant → the first test that turns red."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from .checks import Broken
from .explore import Tally, cut_everywhere, cut_recovery, cut_two_savers, fail_everywhere
from .memory import remembered
from .mutants import Mutant
from .promises import PROMISES, keep_promise
from .scenarios import PAIRS, SCENARIOS

QUICK, FAST, FULL = 0, 16, 512
"""Combinations of unsynced changes that are all tried at one step; see ``choices.selections``."""


def _less(bound: int) -> int:
    """For what is cut after every pair of steps, or after every refusal."""
    return FAST if bound > FAST else min(bound, 1)


def tests(bound: int) -> Iterator[tuple[str, Callable[[], Tally]]]:
    """(name as pytest has it, what it does), the quickest first."""
    for name in PROMISES:
        yield f"test_promise_of_one_function[{name}]", lambda name=name: keep_promise(name)
    for name, (act, begin) in SCENARIOS.items():
        yield (
            f"test_power_cut_at_every_step_keeps_what_was_committed[{name}]",
            lambda name=name, act=act, begin=begin: cut_everywhere(name, act, begin(), bound=bound),
        )
    for name, pair in PAIRS.items():
        yield (
            f"test_every_power_cut_of_two_savers[{name}]",
            lambda name=name, pair=pair: cut_two_savers(name, pair, bound=_less(bound)),
        )
    for name, (act, begin) in SCENARIOS.items():
        yield (
            f"test_every_power_cut_of_a_recovery[{name}]",
            lambda name=name, act=act, begin=begin: cut_recovery(name, act, begin()),
        )
    for number in (errno.EIO, errno.ENOSPC):
        for for_good in (False, True):
            for name, (act, begin) in SCENARIOS.items():
                often = "from then on" if for_good else "once"
                yield (
                    f"test_every_step_refused[{name}-{errno.errorcode[number]} {often}]",
                    lambda name=name, act=act, begin=begin, number=number, for_good=for_good: fail_everywhere(
                        name, act, begin, number, for_good=for_good, bound=_less(bound)
                    ),
                )


NEAREST = {
    "sweep": ("[retention]", "[two_retentions]"),
    "settle": ("[re_save]", "[two_re_saves_of_fewer]"),
    "commit": ("[re_save]",),
    "saver.persist": ("[node_local]",),
}
"""Module → the tests that see most of it; only the order in which they are tried."""


def first_red(mutant: Mutant, bound: int = FAST) -> tuple[str, str] | None:
    """(test, what it says), or None: the mutant survives."""
    near = NEAREST.get(mutant.module.removeprefix("ckpt_engine."), ())

    def place(test: tuple[str, object]) -> int:
        if "promise" in test[0]:
            return 0
        return 1 if "recovery" not in test[0] and test[0].endswith(near or ("[first_save]",)) else 2

    ordered = sorted(tests(bound), key=place)
    with mutant.planted(), remembered():
        for name, test in ordered:
            try:
                test()
            except Exception as error:  # a mutant may also fail at once
                return name, str(error) if isinstance(error, Broken) else repr(error)
    return None
