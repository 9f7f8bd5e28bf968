"""The same deaths for DeepSpeed's own ``save_checkpoint`` and for ckpt_engine: what does the next start find?

    python benchmarks/deepspeed_kills.py [--keep DIRECTORY]

Two ranks (CPU, gloo, ZeRO-1) train 5 steps and save, train 3 more and save again; during or after the second save one
process dies by SIGKILL at a chosen moment, and half a second later the other rank does, as a launcher would have it.
New processes then load what there is, with the default tag. Their parameters are compared with those of a run that
nobody killed. Kills only: what was written and not synced is not lost here (DeepSpeed's own saver never syncs).

With "the node", shared memory is removed, so that the disk is all there is.

The asynchronous ("decoupled") engine of DeepSpeed writes by its async_io extension, and is not run where that cannot
be built; the last lines say so.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matrix import PRELOAD, WITHIN_S, _free_port, _rank, build, digest, parameters, run_ranks, train

FIRST, SECOND = 5, 8
PEER_S = 0.5

STOCK = {  # moment → (rank that dies, at which call)
    "half of rank 0's model file is written": (0, "half of model_states"),
    "half of rank 1's optimizer file is written; rank 0 was faster": (1, "half of optim_states"),
    "rank 0 has all its files, `latest` is not touched yet": (0, "before latest"),
    "rank 0 has opened `latest` and not written it": (0, "in latest"),
    "rank 0 has written `latest`; rank 1 writes its first byte": (1, "late optim_states"),
    "`save_checkpoint` has returned": (0, "returned"),
}
OURS = {
    "rank 0 fills its slot": (0, "fill started"),
    "rank 1 fills its slot; rank 0 was faster": (1, "fill started"),
    "rank 0 has sealed, nobody has queued": (0, "queue started"),
    "the save has returned": (0, "returned"),
    "the saver writes; saver and ranks die": (-1, "persist started"),
    "the saver has all files and no manifest; saver and ranks die": (-1, "publish started"),
    "the saver writes; the node dies with its memory": (-2, "persist started"),
    "the saver has all files and no manifest; the node dies with its memory": (-2, "publish started"),
    "the manifest and `latest` are there; the node dies with its memory": (-2, "publish complete"),
}


def now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- in a rank --------------------------------------------------------------------------------------------------------


def unkilled(root: str) -> dict[str, Any]:
    """The parameters after either save."""
    engine, found = build(1, "fp32"), {}
    for first, last in ((0, FIRST), (FIRST, SECOND)):
        train(engine, first, last)
        found[str(last)] = digest(parameters(engine))
    return found


def stock_dies(root: str, who: int, moment: str) -> dict[str, Any]:
    import torch

    engine = build(1, "fp32")
    train(engine, 0, FIRST)
    engine.save_checkpoint(root)
    train(engine, FIRST, SECOND)
    rank, save, opened = engine.global_rank, torch.save, builtins.open

    def dying_save(state: Any, path: Any, *args: Any, **how: Any) -> None:
        if moment == "late optim_states" and rank == who:
            time.sleep(2 * PEER_S)  # rank 0 does not wait for it before it writes `latest`
            now()
        buffer = io.BytesIO()
        save(state, buffer, *args, **how)
        data = buffer.getvalue()
        half = moment.startswith("half") and moment.split()[-1] in str(path) and rank == who
        if half and rank == 1:
            time.sleep(2 * PEER_S)
        with opened(path, "wb") as file:
            file.write(data[: len(data) // 2] if half else data)
        if half:
            now()

    def dying_open(path: Any, mode: str = "r", *args: Any, **how: Any) -> Any:
        latest = rank == who and str(path).endswith("/latest") and "w" in mode
        if latest and moment == "before latest":
            now()
        file = opened(path, mode, *args, **how)
        if latest and moment == "in latest":
            now()
        return file

    torch.save, builtins.open = dying_save, dying_open
    engine.save_checkpoint(root)
    now()
    return {}


def ours_die(root: str, who: int, moment: str) -> dict[str, Any]:
    import ckpt_engine
    from ckpt_engine import events

    if who < 0:
        os.environ["CKPT_ENGINE_HOOK"] = "deepspeed_kills:saver_hook"
        os.environ["CKPT_ENGINE_DIES"] = moment
    engine = build(1, "fp32")
    ckpt = ckpt_engine.attach(engine, root)
    train(engine, 0, FIRST)
    ckpt.save_to_storage(FIRST).result(WITHIN_S)
    train(engine, FIRST, SECOND)

    def hook(event: events.Event) -> None:
        if engine.global_rank == who and f"{event.name} {event.phase}" == moment:
            if who == 1:
                time.sleep(2 * PEER_S)
            now()

    events.add_hook(hook)
    handle = ckpt.save_to_storage(SECOND)
    if moment == "returned":
        now()
    handle.result(WITHIN_S)
    time.sleep(WITHIN_S)  # to be killed
    return {}


def saver_hook(event: Any) -> None:
    """In the saver: it dies in the second save, and takes the ranks with it."""
    if f"{event.name} {event.phase}" == os.environ["CKPT_ENGINE_DIES"] and event.facts.get("step") == SECOND:
        now()


def stock_back(root: str) -> dict[str, Any]:
    engine = build(1, "fp32")
    path, _ = engine.load_checkpoint(root)
    return {"step": engine.global_steps if path else 0, "state": digest(parameters(engine))}


def ours_back(root: str) -> dict[str, Any]:
    import ckpt_engine

    engine = build(1, "fp32")
    with ckpt_engine.attach(engine, root) as ckpt:
        report = ckpt.restore()
        return {"step": report.step, "state": digest(parameters(engine)), "from": report.source}


# -- in the parent ----------------------------------------------------------------------------------------------------


def let_die(phase: Callable[..., dict[str, Any]], root: str, log: Path, who: int, moment: str) -> None:
    """Two ranks until one is dead, or the saver is; then none is left."""
    from ckpt_engine import locks
    from ckpt_engine.names import names_for

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = _free_port()
    told = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(told[rank][1], phase, rank, 2, port, log, root, who, moment))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    names, seen, deadline = names_for(root=os.path.realpath(root)), None, time.monotonic() + WITHIN_S
    while all(process.is_alive() for process in ranks):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody died at {moment!r}\n{log.read_text(errors='replace')[-2000:]}")
        if who < 0:
            saver = locks.holder(names.saver_lock) if names.saver_lock.exists() else None
            if seen is not None and saver != seen:
                break
            seen = saver or seen
        time.sleep(0.005)
    if who >= 0:
        time.sleep(PEER_S)
    for process in ranks:
        process.kill()
        process.join()
    if who < 0:  # not the saver that a rank may just have started
        with contextlib.suppress(ProcessLookupError, OSError):
            if (saver := locks.holder(names.saver_lock)) is not None:
                os.kill(saver, signal.SIGKILL)
    if who == -2:
        for name in [name for name in os.listdir("/dev/shm") if name.startswith(f"ckpt-{names.hash}")]:
            path = os.path.join("/dev/shm", name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def outcome(phase: Callable[..., dict[str, Any]], root: str, log: Path, truth: dict[str, Any]) -> str:
    try:
        answers = run_ranks(phase, 2, root, log)
    except RuntimeError as error:
        reason = re.sub(r"^.*rank \d: |\S*/", "", str(error).splitlines()[0])
        return f"**load fails**: {reason}"
    steps = {answer["step"] for answer in answers}
    if steps == {0}:
        return "**starts from nothing**, without an error"
    if len(steps) > 1 or any(answer["state"] != truth[str(answer["step"])] for answer in answers):
        return f"**wrong state** at step {steps}"
    source = f" from {answers[0]['from']}" if "from" in answers[0] else ""
    return f"step {steps.pop()}{source}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="leave checkpoints and logs here")
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    place = args.keep or Path(tempfile.mkdtemp(prefix="ckpt-kills-"))
    place.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        truth = run_ranks(unkilled, 2, str(place / "none"), place / "unkilled.log")[0]
        for title, moments, dies, back in (
            ("DeepSpeed, save_checkpoint", STOCK, stock_dies, stock_back),
            ("ckpt_engine, save_to_storage", OURS, ours_die, ours_back),
        ):
            print(f"\n| {title}: killed when | the next start finds |\n|---|---|")
            for number, (words, (who, moment)) in enumerate(moments.items()):
                folder = place / f"{dies.__name__}-{number}"
                folder.mkdir()
                root = str(folder / "checkpoints")
                let_die(dies, root, folder / "dies.log", who, moment)
                print(f"| {words} | {outcome(back, root, folder / 'back.log', truth)} |", flush=True)
    finally:
        if args.keep is None:
            shutil.rmtree(place, ignore_errors=True)
    print(f"\n{time.monotonic() - begin:.0f} s. {decoupled()}")
    return 0


def decoupled() -> str:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with contextlib.redirect_stdout(io.StringIO()):
        can = AsyncIOBuilder().is_compatible()
    return "DeepSpeed's decoupled engine: " + ("can be built here, and is not part of this table" if can else
            "not run, its async_io extension cannot be built here (libaio)")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
