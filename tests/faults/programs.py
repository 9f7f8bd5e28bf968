"""A rank that does what its test says, one verb at a time, and tells how it went."""

from __future__ import annotations

import os
import time
from typing import Any

from harness import Process

COUNT = 20_000
LIFE = 1_000_000_000_000
"""A coded tensor holds its position, its rank and its step below this, and above it the life of the job that saved."""


def do(rank: Process, verb: str, within_s: float = 30.0, **facts: Any) -> dict[str, Any]:
    """Have ``rank`` do ``verb`` and wait until it has."""
    rank.tell("do", verb=verb, **facts)
    return rank.expect(verb, within_s)


def all_do(ranks: list[Process], verb: str, within_s: float = 30.0, **facts: Any) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.tell("do", verb=verb, **facts)
    return [rank.expect(verb, within_s) for rank in ranks]


def leave(ranks: list[Process]) -> None:
    """A clean goodbye of all."""
    for said in all_do(ranks, "close"):
        if said["error"]:
            raise AssertionError(f"not a clean goodbye: {said}")  # no assert: this is no test module, see python -O
    for rank in ranks:
        rank.end()


def ready(ranks: list[Process]) -> list[Process]:
    for rank in ranks:
        rank.expect("ready")
    return ranks


def obeys(me: Any, options: dict[str, Any] | None = None) -> None:
    """memory, storage (step, count, life), result (step, timeout_s), restore, fork, close, raise, exit; says the same
    verb with ``error`` ("" or the class) and ``seconds``. ``life`` goes into the bytes, and comes back at restore."""
    engine = me.engine(**(options or {}))
    me.say("ready", pid=os.getpid())
    handles: dict[int, Any] = {}
    while True:
        order = me.hear("do", within_s=120)
        verb, begin = order.pop("verb"), time.monotonic()
        order.pop("command")
        if verb == "raise":
            with engine:
                raise KeyError("in the training loop")
        if verb == "exit":
            return
        facts: dict[str, Any] = {"error": "", "text": ""}
        try:
            facts |= _do(me, engine, handles, verb, **order)
        except Exception as error:
            facts |= {"error": type(error).__name__, "text": str(error)}
            facts |= {key: value for key, value in vars(error).items() if isinstance(value, int | str | tuple)}
        me.say(verb, at=time.monotonic(), **facts, seconds=time.monotonic() - begin)
        if verb == "close":
            return


def _do(me: Any, engine: Any, handles: dict[int, Any], verb: str, **order: Any) -> dict[str, Any]:
    step = order.get("step", 0)
    if verb in ("memory", "storage"):
        coded = me.coded(step, order.get("count", COUNT)) + LIFE * order.get("life", 0)
        state: dict[str, Any] = {f"rank{me.rank}.pt": {"w": coded, "bad": order.get("bad")}}
        if order.get("bad"):
            state[f"rank{me.rank}.pt"]["bad"] = lambda: None
        if verb == "storage":
            handles[step] = engine.save_to_storage(step, state, tag=order.get("tag"))
            staged = handles[step].staged
        else:
            staged = engine.save_to_memory(step, state)
        return {"wait_s": staged.wait_s, "waited_for": staged.waited_for}
    if verb == "result":
        return {"path": handles[step].result(order.get("timeout_s", 30)).path}
    if verb == "restore":
        report = engine.restore(order.get("step"))
        found = {"step": report.step, "source": report.source, "skipped": len(report.skipped)}
        if report.step == 0:
            return {**found, "whole": True, "life": 0}
        own = report.state[f"rank{me.rank}.pt"]["w"]
        life = int(own[-1]) // LIFE
        expected = me.coded(report.step, order.get("count", COUNT)) + LIFE * life
        return {**found, "whole": bool((own == expected).all()), "life": life}
    if verb == "counters":
        from ckpt_engine.events import counters

        return dict(counters)
    if verb == "close":
        engine.close(timeout_s=order.get("timeout_s"))
    if verb == "fork":  # a data-loader worker that outlives its rank
        child = os.fork()
        if child == 0:
            time.sleep(order["seconds"])
            os._exit(0)
        return {"child": child}
    return {}
