"""Every case of ``faults/story.py``: each span, at its start and its end, times who dies or stops. One line per case.

    python tests/deaths.py [WORD ...]     only cases whose line holds all of the words, e.g. "publish" "kill"

Exit code 1 if a case failed, was late, or left something behind.
"""

from __future__ import annotations

import sys
import time
import traceback

from faults.story import Case, Story, every_case
from harness import Lab


def run(case: Case) -> tuple[bool, str]:
    """(went as promised, what was found)."""
    lab = Lab()
    story = Story(lab, case)
    try:
        story.run()
        text = story.told
    except AssertionError as error:
        text = f"FAILED: {error}\n{traceback.format_exc()}"
    remains = lab.close()
    if remains and not text.startswith("FAILED"):
        text = "FAILED: left behind: " + ", ".join(remains)
    return not text.startswith("FAILED"), text


def main(words: list[str]) -> int:
    cases = [case for case in every_case() if all(word in str(case) for word in words)]
    failed, begin, longest = [], time.monotonic(), 0.0
    for case in cases:
        start = time.monotonic()
        good, text = run(case)
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        print(f"{case!s:40} {seconds:5.1f} s  {text}", flush=True)
        if not good:
            failed.append(str(case))
    print(
        f"{len(cases)} cases, {len(failed)} failed, {time.monotonic() - begin:.0f} s, the longest took {longest:.1f} s"
    )
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
