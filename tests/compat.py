"""``make compat``: the tests of the integrations with each supported line of their frameworks. One line a combination.

Each has an environment of its own in ``build/compat``, which holds what is pinned here and takes everything else
(torch, DeepSpeed, pytest, the package) from the one that runs this. WORDS pick those whose name holds all of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "compat"
HF = ("tests/e2e/test_hf.py", "tests/e2e/test_hf_ranks.py", "tests/e2e/test_accelerate.py")
LIGHTNING = ("tests/e2e/test_lightning.py",)


@dataclass(frozen=True)
class Line:
    """``packages``: what differs; none: the newest, as ``make test`` has it. ``setting``: an environment variable."""

    name: str
    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    setting: str = ""


LINES = (
    Line("transformers 4.46", HF, ("transformers==4.46.3", "accelerate==1.1.1"), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"),
    Line("transformers 4.57", HF, ("transformers==4.57.6", "accelerate==1.10.1")),
    Line("transformers newest", HF),
    Line("lightning 2.5", LIGHTNING, ("lightning==2.5.6", "pytorch-lightning==2.5.6")),
    Line("lightning newest", LIGHTNING),
)


def environment(line: Line) -> Path:
    """Its Python."""
    if not line.packages:
        return Path(sys.executable)
    folder = BUILD / line.name.replace(" ", "-")
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists() or done.read_text().split() != list(line.packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (own / "zz-rest.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *line.packages]
        subprocess.run(command, check=True)
        done.write_text("\n".join(line.packages))
    return python


def versions(python: Path) -> str:
    names = ("transformers", "accelerate", "lightning", "deepspeed", "torch")
    code = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {names}), sep=', ')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run(line: Line) -> bool:
    python, begin = environment(line), time.monotonic()
    log = BUILD / f"{line.name.replace(' ', '-')}.log"
    with log.open("wb") as file:
        command = [python, "-m", "pytest", "-q", "-W", "ignore", *line.tests]  # old ones warn of what is newer
        env = {**os.environ, **dict([line.setting.split("=")] if line.setting else [])}
        code = subprocess.run(command, cwd=REPOSITORY, env=env, stdout=file, stderr=file).returncode
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    said = re.sub(r" in .*", "", last[0].strip("= ")) if last else "nothing was said"
    print(f"{line.name}: {said}, {time.monotonic() - begin:.0f} s ({versions(python)}) {line.setting}", flush=True)
    if code:
        print(f"  exit code {code}; see {log}", flush=True)
    return code == 0


def main() -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONPATH", None)
    chosen = [line for line in LINES if all(word in line.name for word in sys.argv[1:])]
    if not chosen:
        print(f"no line is called {' '.join(sys.argv[1:])!r}: {', '.join(line.name for line in LINES)}")
        return 2
    good = [run(line) for line in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
