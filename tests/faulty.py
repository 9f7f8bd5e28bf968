"""A hook for ranks and savers (``CKPT_ENGINE_HOOK=faulty:hook``): their disk refuses, or waits, as a file says.

``CKPT_ENGINE_FAULTS`` names a JSON file with a list of rules, read anew before every disk verb. A rule has ``verb``
(a method of ``Storage``, "*" for all), and may have ``who`` ("rank" or "saver"), ``node`` (a node id), ``path`` (part
of it), ``directory`` (only where it is one), ``direct`` (the bytes of a shard), ``errno`` to refuse with, and ``hold``:
wait while the rule is there. A rule with neither only takes notes. What a rule hit is appended to the file's
neighbour ``hits``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ckpt_engine.events import Event
from ckpt_engine.storage import posix

VERBS = (
    "write_new", "rename", "link", "unlink", "make_dir", "remove_dir", "sync_dir", "sync_file", "list_dir",
    "read_small", "read_into", "crc_of_file", "size",
)  # fmt: skip


def hook(event: Event) -> None:
    """Nothing: to be imported is enough."""


def _identity() -> tuple[str, str]:
    if "--identity" in sys.argv:
        identity = json.loads(sys.argv[sys.argv.index("--identity") + 1])
        return "saver", identity.get("node_id", "")
    return "rank", os.environ.get("CKPT_ENGINE_NODE", "")


def _rules(verb: str, paths: list[str], direct: bool) -> list[dict[str, Any]]:
    who, node = _identity()
    try:
        rules = json.loads(Path(os.environ["CKPT_ENGINE_FAULTS"]).read_text())
    except FileNotFoundError:
        return []
    return [
        rule
        for rule in rules
        if rule["verb"] in (verb, "*")
        and rule.get("who", who) == who
        and rule.get("node", node) == node
        and rule.get("direct", direct) == direct
        and any(rule.get("path", "") in path for path in paths)
        and not (rule.get("directory") and not os.path.isdir(paths[0]))
    ]


def _before(verb: str, paths: list[str], direct: bool) -> None:
    rules = _rules(verb, paths, direct)
    if rules:
        who, node = _identity()
        line = json.dumps({"who": who, "node": node, "pid": os.getpid(), "verb": verb, "path": paths[-1]}) + "\n"
        hits = os.open(Path(os.environ["CKPT_ENGINE_FAULTS"]).parent / "hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(hits, line.encode())
        os.close(hits)
    for rule in rules:
        while rule.get("hold") and rule in _rules(verb, paths, direct):
            time.sleep(0.01)
        if rule.get("errno"):
            with posix._translated(verb, paths[-1]):
                raise OSError(rule["errno"], os.strerror(rule["errno"]), paths[-1])


def _install() -> None:
    for verb in VERBS:
        plain = getattr(posix.PosixStorage, verb)

        def faulty(self: Any, path: str, *rest: Any, _plain: Any = plain, _verb: str = verb, **more: Any) -> Any:
            _before(_verb, [path, *(one for one in rest if isinstance(one, str))], more.get("direct", False))
            return _plain(self, path, *rest, **more)

        setattr(posix.PosixStorage, verb, functools.wraps(plain)(faulty))


_install()
