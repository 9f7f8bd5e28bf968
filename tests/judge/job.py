"""The job whose saver is judged: ``python job.py ROOT [--no-fsync]``. ckpt-chaos runs it, armed or not.

What ckpt-chaos asks of its process is passed on to the saver of the trainer (``portable``). When that saver has died
where it was told to, the node is lost: the trainer is killed, and what lies in shared memory is removed, so that the
next start has the disk and nothing else. Exit code: the trainer's; 137 after a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import posix_ipc  # noqa: E402

from ckpt_engine import locks, shm  # noqa: E402
from ckpt_engine.errors import ConfigError  # noqa: E402
from ckpt_engine.names import SHM, Names, names_for  # noqa: E402

WITHIN_S = 500.0


def orders(root: str, fsync: bool) -> dict[str, str]:
    """The environment of the trainer: not armed itself, with a saver that is."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("CKPT_CHAOS_")}
    if "CKPT_CHAOS_WATCH" not in os.environ:
        return env
    log = os.environ["CKPT_CHAOS_LOG"]
    judge = {
        "watch": root,
        "log": log,
        "crash_at": int(os.environ.get("CKPT_CHAOS_CRASH_AT") or 0) or None,
        "mode": os.environ.get("CKPT_CHAOS_MODE", "before"),
        "fired": str(Path(log).with_name("fired")),
        "fsync": fsync,
    }
    env["CKPT_ENGINE_HOOK"], env["CKPT_ENGINE_JUDGE"] = "tests.judge.portable:hook", json.dumps(judge)
    env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", ""), str(REPOSITORY)])
    return env


def saver(names: Names) -> int | None:
    try:
        return locks.holder(names.saver_lock)
    except (ConfigError, OSError):
        return None


def clear(names: Names) -> None:
    """The node is gone, and all in its memory."""
    if (pid := saver(names)) is not None:
        os.kill(pid, signal.SIGKILL)
    for file in [found for found in os.listdir(SHM) if found.startswith(f"ckpt-{names.hash}")]:
        path = os.path.join(SHM, file)
        shutil.rmtree(path) if os.path.isdir(path) else shm.unlink(f"/{file}")
    for queue in (names.events_queue, names.notify_queue(0)):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_message_queue(queue)


def main() -> int:
    root = os.path.realpath(sys.argv[1])
    env = orders(root, "--no-fsync" not in sys.argv)
    fired = Path(os.environ["CKPT_CHAOS_LOG"]).with_name("fired") if "CKPT_CHAOS_LOG" in os.environ else Path("/none")
    names = names_for(root=root)
    command = [sys.executable, str(REPOSITORY / "examples" / "train_ddp.py"), "--root", root, "--steps", "100"]
    trainer = subprocess.Popen(command, env=env)
    end, told = time.monotonic() + WITHIN_S, False
    while not fired.exists():
        if time.monotonic() > end:
            trainer.kill()
            return 99
        if trainer.poll() is not None:  # the saver finishes what it has and leaves
            pid = saver(names)
            if pid is None:
                break
            if not told:
                os.kill(pid, signal.SIGTERM)
                told = True
        time.sleep(0.02)
    crashed = fired.exists()
    if crashed:
        trainer.kill()
    code = trainer.wait()
    clear(names)
    return 137 if crashed else code


if __name__ == "__main__":
    sys.exit(main())
