"""``ckpt-engine``: run a saver, list what a root or this node holds, verify a root, pin, export, collect leftovers.

``saver`` is answered before anything else is imported: a service manager starts it on every node.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_engine.names import Names


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. 0 = done, 1 = something is wrong with what was looked at, 2 = cannot be done."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["saver"]:
        from ckpt_engine.saver.__main__ import main as saver

        return saver(arguments[1:])
    args = _parser().parse_args(arguments)
    from ckpt_engine.errors import CkptError

    try:
        return int(args.act(args))
    except (CkptError, OSError) as error:
        sys.stderr.write(f"ckpt-engine: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    from ckpt_engine import __version__

    top = argparse.ArgumentParser(prog="ckpt-engine", description="Asynchronous checkpoints for DeepSpeed and PyTorch.")
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("saver", help="run the saver daemon of this node (see 'ckpt-engine saver run --help')")
    listing = verbs.add_parser("list", help="committed checkpoints of a root, newest first")
    listing.add_argument("root")
    listing.set_defaults(act=_list)
    verify = verbs.add_parser("verify", help="read every file of the committed checkpoints and check its CRC-32")
    verify.add_argument("root")
    verify.add_argument("--tag", default="", help="only this one")
    verify.set_defaults(act=_verify)
    for verb, act, what in (
        ("pin", _pin, "keep a checkpoint from retention, whatever its policy"),
        ("unpin", _unpin, "give a pinned checkpoint back to retention"),
    ):
        pinning = verbs.add_parser(verb, help=what)
        pinning.add_argument("root")
        pinning.add_argument("tag")
        pinning.set_defaults(act=act)
        if verb == "pin":
            pinning.add_argument("--reason", default="", help="shown by 'ckpt-engine list'")
    export = verbs.add_parser("export", help="write a checkpoint of CheckpointEngine in a form that others read")
    export.add_argument("root")
    export.add_argument("out", help="a new directory (dcp) or file")
    export.add_argument("--format", choices=("dcp", "torch", "safetensors"), default="dcp")
    export.add_argument("--tag", default="", help="this one instead of the newest")
    export.add_argument("--part", default="model", help="what of it goes into safetensors (default: %(default)s)")
    export.set_defaults(act=_export)
    gc = verbs.add_parser("gc", help="snapshots of dead jobs in this node's shared memory; --delete removes them")
    gc.add_argument("--root", default="", help="only those of jobs that checkpoint into this directory")
    gc.add_argument("--delete", action="store_true", help="remove what belongs to no live process, snapshots included")
    gc.set_defaults(act=_gc)
    return top


def _list(args: argparse.Namespace) -> int:
    from ckpt_engine import listing, pins
    from ckpt_engine.storage.posix import PosixStorage

    storage, root = PosixStorage(), os.path.realpath(args.root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no directory {root}")
    found = listing.list_committed(storage, root)
    for one in found.committed:
        manifest = one.manifest
        nbytes = sum(entry.nbytes for entry in manifest.files())
        node = "" if manifest.node is None else f"  node {manifest.node} of {manifest.nodes}"
        _say(
            f"{manifest.attempt.tag}  step {manifest.attempt.step}  {manifest.world} ranks  {nbytes} bytes  "
            f"{manifest.attempt.id}{node}"
            + "".join(f"  {metric.name}={metric.value:g}" for metric in manifest.metrics)
            + (f"  pinned {pins.reason_of(storage, one.commit_dir)!r}" if one.pinned else "")
        )
        foreign = listing.foreign(storage, one)
        if foreign:
            _say(f"  foreign, never deleted: {', '.join(map(repr, foreign))}")
    unmanaged = listing.unmanaged(storage, root)
    if not (found.committed or unmanaged or found.damaged):
        _say(f"no checkpoints in {root}")
    for tag in unmanaged:
        _say(f"{tag}  unmanaged (no manifest: written by someone else, never deleted)")
    for damage in found.damaged:
        _say(f"damaged: {damage}")
    return 1 if found.damaged else 0


def _pin(args: argparse.Namespace) -> int:
    from ckpt_engine import pins
    from ckpt_engine.storage.posix import PosixStorage

    pins.pin(PosixStorage(), pins.by_tag(PosixStorage(), os.path.realpath(args.root), args.tag), args.reason)
    return 0


def _unpin(args: argparse.Namespace) -> int:
    from ckpt_engine import pins
    from ckpt_engine.storage.posix import PosixStorage

    if not pins.unpin(PosixStorage(), pins.by_tag(PosixStorage(), os.path.realpath(args.root), args.tag).folder):
        _say(f"{args.tag} was not pinned")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ckpt_engine import listing
    from ckpt_engine.storage.posix import PosixStorage

    storage, root = PosixStorage(), os.path.realpath(args.root)
    found = listing.list_committed(storage, root)
    chosen = [one for one in found.committed if args.tag in ("", one.manifest.attempt.tag)]
    if not chosen and not found.damaged:
        _say(f"no committed checkpoint {args.tag} in {root}".replace("  ", " "))
        return 1
    problems = [str(damage) for damage in found.damaged]
    for one in chosen:
        wrong = listing.verify(storage, one)
        _say(f"{one.manifest.attempt.tag}  {'damaged' if wrong else 'intact'}")
        problems += [str(damage) for damage in wrong]
    for problem in problems:
        _say(f"  {problem}")
    return 1 if problems else 0


def _export(args: argparse.Namespace) -> int:
    from ckpt_engine import export

    if args.format == "dcp":
        export.to_dcp(args.root, args.out, tag=args.tag)
    elif args.format == "torch":
        export.to_torch(args.root, args.out, tag=args.tag)
    else:
        export.to_safetensors(args.root, args.out, part=args.part, tag=args.tag)
    return 0


def _gc(args: argparse.Namespace) -> int:
    from ckpt_engine import locks
    from ckpt_engine.names import Names

    left, waiting = 0, set[int]()
    for hash_ in _hashes():
        names = Names(hash_)
        roots, lines = _held(names)
        if args.root and os.path.realpath(args.root) not in roots:
            continue
        ours = names.run_dir.is_dir() and names.run_dir.lstat().st_uid == os.geteuid()
        locked = [locks.holder(path) for path in names.rank_locks().values()] if ours else []
        ranks = [pid for pid in locked if pid is not None]
        saver = locks.holder(names.saver_lock) if ours else None
        alive = bool(ranks) or saver is not None
        what = "live" if ranks else f"waits (saver {saver})" if alive else "removed" if args.delete else "dead"
        for line in lines:
            _say(f"{what}  {line}")
        left += not alive
        waiting |= {saver} if saver is not None and not ranks else set()
        if args.delete and not alive:
            _remove(names, with_run_dir=ours)
    if waiting:
        _say(
            f"savers {sorted(waiting)} wait for a restart of their jobs, and end by themselves after linger_s; SIGTERM "
            "ends one earlier: what is newer than its checkpoints is saved first"
        )
    if left and not args.delete:
        _say("dead ones wait for a restart of their job; 'ckpt-engine gc --delete' removes them")
    return 0


def _held(names: Names) -> tuple[set[str], list[str]]:
    """The roots that the snapshots of one engine were made for, and a line for each segment."""
    from ckpt_engine.errors import ConfigError
    from ckpt_engine.slots import Slot

    roots, lines = set(), []
    for segment in names.segments():
        try:
            slot = Slot.open(segment)
        except ConfigError as error:  # what another user put there is not ours to list or remove
            lines.append(f"foreign: {error}")
            continue
        found = slot.snapshot() if slot is not None else None
        what = "nothing restorable"
        if found is not None:
            roots.add(found[1].root)
            what = f"{found[1].attempt.tag} of {found[1].root}, rank {found[1].rank}, {found[0].state.name}"
        lines.append(f"/dev/shm{segment}  {what}")
        if slot is not None:
            slot.close()
    return roots, lines


def _remove(names: Names, *, with_run_dir: bool) -> None:
    """Remove all that a dead engine left in shared memory and message queues."""
    from ckpt_engine import messages, shm

    for file_name in names.shm_files():
        shm.unlink(f"/{file_name}")
    messages.unlink(names.events_queue)
    for local_rank in range(64):
        messages.unlink(names.notify_queue(local_rank))
    if with_run_dir:
        shutil.rmtree(names.run_dir, ignore_errors=True)


def _hashes() -> Iterator[str]:
    """Hashes of all engines of this user that left something in /dev/shm."""
    from ckpt_engine.names import SHM

    found = set()
    for entry in os.scandir(SHM):
        match = re.match(r"ckpt-([0-9a-f]{16})(?:-|$)", entry.name)
        if match and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
            found.add(match[1])
    yield from sorted(found)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
