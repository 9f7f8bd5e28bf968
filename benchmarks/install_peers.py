"""An environment for each rival in benchmarks/peers: .venv-peers/NAME, with what NAME.txt pins.

    python benchmarks/install_peers.py [NAME …] [--python python3]

torch comes first, in the version that we are tested with, so that nothing else chooses one. ``# --no-deps`` as the
first line of NAME.txt: then the lines are all there is to install. An environment that is complete has a file "ready",
with the hash of its NAME.txt; what could not be installed leaves .venv-peers/NAME.log, which its row quotes.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers"


def torch_pin() -> str:
    found = re.search(r"^torch==\S+", (HERE.parent / "requirements-dev.txt").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("requirements-dev.txt pins no torch")
    return found[0]


def install(requirements: Path, python: str) -> str:
    """Empty, or the last line of what went wrong."""
    text = requirements.read_text()
    folder, log = PEERS / requirements.stem, PEERS / f"{requirements.stem}.log"
    mark = hashlib.sha256((torch_pin() + text).encode()).hexdigest()
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == mark:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    PEERS.mkdir(exist_ok=True)
    pip = [str(folder / "bin" / "pip"), "install", "--disable-pip-version-check", "-q"]
    own = re.search(r"^torch==\S+", text, re.MULTILINE)  # a rival that needs another version says so
    more = ["--no-deps"] if text.startswith("# --no-deps") else []
    for words in (
        [python, "-m", "venv", str(folder)],
        [*pip, own[0] if own else torch_pin()],
        [*pip, *more, "-r", str(requirements)],
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            log.write_text(done.stdout + done.stderr)
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
            return (lines or [f"{words[0]} ended with {done.returncode}"])[-1]
    log.unlink(missing_ok=True)
    ready.write_text(mark)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--python", default="python3", help="makes the environments")
    args = parser.parse_args()
    for requirements in sorted((HERE / "peers").glob("*.txt")):
        if not args.names or requirements.stem in args.names:
            reason = install(requirements, args.python)
            print(f"{requirements.stem}: {reason or 'ready'}", flush=True)


if __name__ == "__main__":
    main()
