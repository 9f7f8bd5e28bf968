"""``CKPT_ENGINE_HOOK=tests.judge.portable:hook``: a saver that writes with ``open`` and ``os.fsync`` and is armed.

ckpt-chaos watches what Python itself opens, renames and syncs; what native code writes past the page cache it cannot
see. So the saver under judgement gets a ``write_new`` that makes the same promises by means the judge knows; every
other verb, their order and all that decides upon them are production's. Ranks are left as they are.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ckpt_engine import _C
from ckpt_engine.events import Event
from ckpt_engine.storage import posix


def hook(_: Event) -> None:
    """Nothing: to be imported is enough."""


def write_new(
    self: posix.PosixStorage,
    path: str,
    source: Any,
    *,
    offset: int = 0,
    nbytes: int = -1,
    direct: bool = False,
    executable: bool = False,
    progress: Any = None,
) -> bool:
    count = memoryview(source).nbytes - offset if nbytes < 0 else nbytes
    with posix._translated("write", path, need_bytes=count):
        posix._refuse_links(path)
        with open(path, "xb") as file:
            file.write(memoryview(source)[offset : offset + count])
            file.flush()
            if ORDERS["fsync"]:
                os.fsync(file.fileno())
            if executable:
                os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | 0o111)
        if progress is not None:
            _C.store(progress[0], progress[1], _C.load(*progress) + count)
    return False


def arm() -> None:
    """Count, and die at the ordered event, in the first saver of this run; its death is left as a file."""
    fired = Path(ORDERS["fired"])
    try:
        os.close(os.open(fired.with_suffix(".armed"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    from ckpt_chaos import inject

    real = os._exit

    def leave(code: int) -> None:
        fired.touch()
        real(code)

    os._exit = leave  # type: ignore[assignment]
    inject.arm(
        ORDERS["watch"],
        crash_at=ORDERS["crash_at"],
        mode=ORDERS["mode"],
        log_path=ORDERS["log"] + ".rank0",
        lazy_native=True,
        torn_python=True,
    )


ORDERS: dict[str, Any] = json.loads(os.environ["CKPT_ENGINE_JUDGE"])
if "ckpt_engine.saver.server" in sys.modules:
    posix.PosixStorage.write_new = write_new  # type: ignore[method-assign]
    arm()
