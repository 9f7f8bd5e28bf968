"""What the disk itself can do: fio, past the page cache."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from crew import NotRun

BLOCK_MIB = 8
MOST_S = 300


def fio(folder: Path, nbytes: int, *, write: bool = True, depth: int = 4, keep: bool = False) -> float:
    """Seconds in which fio writes (and syncs) ``nbytes`` to a new file, or reads them, in blocks like ours.

    ``keep``: the file stays, to be read. Raises NotRun.
    """
    if shutil.which("fio") is None:
        raise NotRun("fio is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    file, block = folder / "fio", min(BLOCK_MIB << 20, -(-nbytes // 4096) * 4096)
    words = ["fio", "--name=a", f"--filename={file}", f"--size={nbytes}", f"--bs={block}", "--direct=1"]
    words += ["--ioengine=libaio", f"--iodepth={depth}", "--output-format=json"]
    words += ["--rw=write", "--end_fsync=1"] if write else ["--rw=read"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotRun(f"fio took more than {MOST_S} s") from error
    finally:
        if not keep:
            file.unlink(missing_ok=True)
    if done.returncode:
        raise NotRun(f"fio: {done.stderr.strip()[:200]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return max(float(job["job_runtime"]), float(job["write" if write else "read"]["runtime"])) / 1e3
