"""Every name on disk is built and parsed here; FORMAT.md shows the tree.

A parser answers None for a name that is not ours: such a name is never touched.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import NamedTuple

ROOT_ID = ".ckpt-root"
LATEST = "latest"
LOST_AND_FOUND = "lost+found"
"""The file system's own, where a root is a mount point."""
PIN = ".pinned"
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""DeepSpeed's, made to be executed where they lie."""
MAX_DEPTH = 32
"""Parts of a file name; a name that is all slashes would cost its square."""

_NUMBER = r"(0|[1-9][0-9]{0,18})"
_NODE = r"(?:-node([0-9]{4,18}))?"
_ATTEMPT_ID = rf"g{_NUMBER}-([0-9a-f]{{16}})-q{_NUMBER}"
_RUN = re.compile(rf"\.run-{_NUMBER}")
_OFFER = re.compile(rf"\.offer-{_NUMBER}-node{_NUMBER}")
_LEASE = re.compile(r"\.reading-([0-9a-f]{16})")
_TEMP = re.compile(r"\.tmp-([1-9][0-9]{0,9})-[0-9a-f]{16}")
_ATTEMPT = re.compile(rf"\.attempt-{_ATTEMPT_ID}{_NODE}")
_TOMBSTONE = re.compile(rf"\.removed-{_ATTEMPT_ID}{_NODE}\.json")
_MANIFEST = re.compile(rf"MANIFEST{_NODE}\.json")
_SHARD = re.compile(r"\.shard-([0-9]{5,18})\.json")
_RECEIPT = re.compile(r"\.receipt-node([0-9]{4,18})\.json")


class AttemptName(NamedTuple):
    """What an attempt's name says; ``node`` is None unless its layout is node-local."""

    generation: int
    run: str
    seq: int
    node: int | None

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)

    @property
    def id(self) -> str:
        return attempt_id(self.generation, self.run, self.seq)


def attempt_id(generation: int, run: str, seq: int) -> str:
    return f"g{generation}-{run}-q{seq}"


def run_claim(generation: int) -> str:
    return f".run-{generation}"


def parse_run_claim(name: str) -> int | None:
    match = _RUN.fullmatch(name)
    return int(match[1]) if match else None


def offer(generation: int, node: int) -> str:
    return f".offer-{generation}-node{node}"


def parse_offer(name: str) -> tuple[int, int] | None:
    match = _OFFER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def lease(token: str) -> str:
    """``token``: 16 hexadecimal digits."""
    return f".reading-{token}"


def parse_lease(name: str) -> str | None:
    match = _LEASE.fullmatch(name)
    return match[1] if match else None


def temp() -> str:
    """A name no other writer has or will have; short, so that it fits wherever the final name fits."""
    return f".tmp-{os.getpid()}-{secrets.token_hex(8)}"


def is_temp(name: str) -> bool:
    return _TEMP.fullmatch(name) is not None


def attempt_dir(id: str, node: int | None = None) -> str:
    """One per attempt; one per node where the layout is node-local, so that nodes never share one."""
    return f".attempt-{id}{_node(node)}"


def parse_attempt_dir(name: str) -> AttemptName | None:
    return _attempt(_ATTEMPT.fullmatch(name))


def tombstone(id: str, node: int | None = None) -> str:
    """Where a manifest lies while the files it named are removed."""
    return f".removed-{id}{_node(node)}.json"


def parse_tombstone(name: str) -> AttemptName | None:
    return _attempt(_TOMBSTONE.fullmatch(name))


def manifest(node: int | None = None) -> str:
    return f"MANIFEST{_node(node)}.json"


def is_manifest(name: str) -> bool:
    return _MANIFEST.fullmatch(name) is not None


def shard_record(rank: int) -> str:
    return f".shard-{rank:05}.json"


def receipt(node: int) -> str:
    return f".receipt-node{node:04}.json"


def is_record(name: str) -> bool:
    """True for a shard record or a receipt."""
    return bool(_SHARD.fullmatch(name) or _RECEIPT.fullmatch(name))


def is_ours(name: str) -> bool:
    """True for a name only this package may use, in the root or in a commit directory."""
    patterns = (_RUN, _OFFER, _LEASE, _TEMP, _ATTEMPT, _TOMBSTONE, _MANIFEST, _SHARD, _RECEIPT)
    return name in (ROOT_ID, PIN) or any(pattern.fullmatch(name) for pattern in patterns)


def check_file_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a relative posix path that stays inside its directory and is not ours."""
    if len(os.fsencode(name)) > 4096:
        raise ValueError("file name longer than 4096 bytes")
    parts = name.split("/")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"file name with more than {MAX_DEPTH} parts")
    for part in parts:
        _check_part(part, name)


def check_tag(tag: str) -> None:
    """Raise ValueError unless ``tag`` can be a directory in the root."""
    _check_part(tag, tag)
    if "/" in tag or tag in (LATEST, LOST_AND_FOUND):
        raise ValueError(
            f"{tag!r} is not one plain name" if "/" in tag else f"{tag!r} has a meaning of its own in a root"
        )


def _check_part(part: str, name: str) -> None:
    if part in ("", ".", "..") or "\0" in part or len(os.fsencode(part)) > 255:
        raise ValueError(f"{name!r} is not a relative name that stays inside its directory")
    if is_ours(part):
        raise ValueError(f"{name!r} uses a name reserved for checkpoint metadata")


def _node(node: int | None) -> str:
    return "" if node is None else f"-node{node:04}"


def _attempt(match: re.Match[str] | None) -> AttemptName | None:
    if match is None:
        return None
    return AttemptName(int(match[1]), match[2], int(match[3]), None if match[4] is None else int(match[4]))
