"""The programs that are traced: ``python -m tests.crash.programs verbs|saves ROOT``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from typing import Any

import ckpt_engine
from ckpt_engine.storage import PosixStorage

from .syscalls import MARK


def mark(**facts: Any) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(MARK + json.dumps(facts).encode().hex())


def verbs(root: str) -> None:
    """Every verb that promises to be durable when it returns, and marks of what it has promised."""
    disk = PosixStorage()
    aligned = memoryview(bytearray(1 << 16))
    shift = -_address(aligned) % 4096
    for nbytes in (0, 5000, 8192):
        aligned[shift : shift + nbytes] = bytes(range(256)) * 32 if nbytes == 8192 else b"x" * nbytes
        for direct in (False, True):
            path = f"{root}/file-{nbytes}-{direct}"
            disk.write_new(path, aligned, offset=shift, nbytes=nbytes, direct=direct)
            mark(bytes=path, nbytes=nbytes, crc32=zlib.crc32(aligned[shift : shift + nbytes]))
    fd = os.open(f"{root}/foreign", os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(fd, b"of a framework", 0)
    os.close(fd)
    disk.sync_file(f"{root}/foreign")
    mark(bytes=f"{root}/foreign", nbytes=14, crc32=zlib.crc32(b"of a framework"))
    disk.make_dir(f"{root}/sub")
    disk.sync_dir(root)
    mark(name=f"{root}/sub")
    mark(name=f"{root}/foreign")


def _address(buffer: memoryview) -> int:
    from ckpt_engine import _C

    return int(_C.address_of(buffer))


def saves(root: str) -> None:
    """One save, a tag saved anew, and a save that retention follows: a rank, its saver, the native writer."""
    import torch

    from ckpt_engine import CheckpointEngine, SaverOptions

    options = SaverOptions(linger_s=0.1, grace_s=0.1, start_s=60.0)
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "saver": options, "job": root}
    with CheckpointEngine(root, **how) as engine:
        _save(engine, 1, "one", torch)
        _save(engine, 2, "one", torch)
    with CheckpointEngine(root, **how, keep_last=1) as engine:
        _save(engine, 3, "three", torch)


def _save(engine: Any, step: int, tag: str, torch: Any) -> None:
    weights = torch.arange(1500) + step
    state = {"mp_rank_00_model_states.pt": {"w": weights, "step": step}, "sub/optim.pt": {"m": weights.float()}}
    mark(begin=tag)
    handle = engine.save_to_storage(step, state, tag=tag)
    handle.result()
    mark(done=tag, attempt=handle.staged.attempt.to_dict())


if __name__ == "__main__":
    if os.environ["CRASH_PACKAGE"] != os.path.dirname(os.path.dirname(ckpt_engine.__file__)):
        sys.exit(f"{ckpt_engine.__file__} is not of the package that is to be traced")
    {"verbs": verbs, "saves": saves}[sys.argv[1]](sys.argv[2])
