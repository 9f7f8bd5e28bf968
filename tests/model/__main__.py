"""``python -m tests.model``: explore every model, then show that every planted bug is found, and how."""

from __future__ import annotations

import sys

from .bugs import BUGS, REPAIRED
from .explorer import Counterexample, explore
from .suite import MODELS


def main(words: list[str]) -> int:
    """``--traces`` prints the whole way to each planted bug."""
    states = transitions = 0
    for build in MODELS:
        report = explore(build())
        states, transitions = states + report.states, transitions + report.transitions
        print(report, flush=True)
    print(f"{'all models':32} {states:8} states {transitions:9} transitions; no promise is broken\n")
    for bug in [*BUGS, *REPAIRED]:
        try:
            with bug.planted():
                explore(bug.model())
        except Counterexample as found:
            print(f"planted: {bug.name:48} found after {len(found.trace):2} steps: {found.promise}", flush=True)
            if "--traces" in words:
                print(found)
        else:
            print(f"planted: {bug.name}: NOT FOUND")
            return 1
    return 0


sys.exit(main(sys.argv[1:]))
