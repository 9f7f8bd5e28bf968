"""What must hold on a disk after a power cut or a kill, before and after recovery."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from disk_model import ROOT_ID, attempt_of, authors, content, recover

from ckpt_engine import disk_names, listing, runs
from ckpt_engine.errors import CkptError
from ckpt_engine.manifest import Attempt, Committed, FileEntry, Receipt, ShardRecord

from .fault_disk import FaultDisk
from .savers import ROOT, History, Saver


class Broken(Exception):
    """A promise is broken; the text says which."""


def require(holds: object, promise: str, what: object = "") -> None:
    if not holds:
        raise Broken(f"{promise}: {what}" if what != "" else promise)


def check(
    storage: Any, history: History, root: str = ROOT, bytes_of: Any = content, *, torn: bool = False
) -> list[Committed]:
    """What holds at once, before anybody has mended anything. ``bytes_of(attempt, name)``: what was saved."""
    found = listing.list_committed(storage, root)
    require(not found.damaged, "a manifest is whole or absent", found.damaged)
    committed = list(found.committed)
    for one in committed:
        _loads(storage, one, bytes_of)
    _survive(committed, history)
    _latest(storage, root, committed, history, torn, bytes_of)
    _promised_by_records(storage, root, committed)
    _claims(storage, root)
    return committed


def _loads(storage: Any, one: Committed, bytes_of: Any) -> None:
    require(one.manifest.attempt.root_id == ROOT_ID or bytes_of is None, "a manifest is of this root")
    for entry in one.manifest.files():
        if entry.origin == "tool":
            continue
        buffer = bytearray(entry.nbytes)
        try:
            listing.read_verified(storage, one, entry, buffer)
        except CkptError as error:
            raise Broken(f"no manifest without its files: {error!r}") from error
        same = bytes_of is None or bytes(buffer) == bytes_of(one.manifest.attempt, entry.name)
        require(same, "what was saved is loaded bit for bit", entry.name)


def _survive(committed: list[Committed], history: History) -> None:
    """What was there before, and what was told to be committed, is there."""
    here = {(os.path.basename(one.commit_dir), one.manifest.attempt) for one in committed}
    for tag, allowed in history.expected.items():
        require(any((tag, attempt) in here for attempt in allowed), "what is committed stays committed", tag)
    newest = max((attempt.order for attempt in history.told), default=None)
    if newest is not None:
        require(committed and committed[0].order >= newest, "the newest that was told to be committed is there")
    for one in committed:
        require(one.manifest.attempt in history.begun, "only what was saved is committed", one.manifest.attempt)


def _latest(storage: Any, root: str, committed: list[Committed], history: History, torn: bool, bytes_of: Any) -> None:
    """``latest`` names what is committed, and what a tool that knows only plain names can read."""
    data = storage.read_small(f"{root}/{disk_names.LATEST}", 4096)
    if data is None:
        require(not history.whole, "`latest` is there once a save was told to be done")
        return
    by_tag = {os.path.basename(one.commit_dir): one for one in committed}
    require(data.decode() in by_tag, "`latest` names a committed tag or is absent", data)
    for tag, one in by_tag.items():
        settled = history.settled(one.manifest.attempt)
        named = tag == data.decode() and history.publishers == 1 and not _graves(storage, one)
        if settled or named:
            for path in plain_paths(root, one, tools=not torn):
                require(storage.size(path) is not None, "`latest` and a save that is done have all plain names", path)
        if bytes_of is None:
            continue
        who = authors(storage, one.commit_dir)
        require(len(who) <= 1, "a tool that knows plain names finds no mixture", (tag, who))
        require(not settled or who <= {one.manifest.attempt.id}, "a tool finds what is committed", (tag, who))
    if history.whole:
        newest = max(history.whole, key=lambda attempt: attempt.order)
        there = by_tag.get(data.decode())
        require(there is not None and there.order >= newest.order, "`latest` never goes back", data)


def _graves(storage: Any, one: Committed) -> bool:
    return any(disk_names.parse_tombstone(entry.name) for entry in storage.list_dir(one.commit_dir))


def plain_paths(root: str, one: Committed, *, tools: bool = True) -> list[str]:
    files = [entry for entry in one.manifest.files() if tools or entry.origin != "tool"]
    return [f"{root if entry.origin == 'tool' else one.commit_dir}/{entry.name}" for entry in files]


def _promised_by_records(storage: Any, root: str, committed: list[Committed]) -> None:
    """A shard record or receipt of an attempt still on its way is true: its files are there, synced."""
    newest = max((one.order for one in committed), default=(-1, -1))
    for folder, name in _attempts(storage, root):
        if name.order <= newest:
            continue
        for entry in storage.list_dir(folder):
            if not disk_names.is_record(entry.name):
                continue
            path = f"{folder}/{entry.name}"
            kind = ShardRecord if entry.name.startswith(".shard") else Receipt
            try:
                record: Any = kind.from_bytes(storage.read_small(path, 1 << 20) or b"", path)
            except CkptError as error:
                raise Broken(f"a record is whole or absent: {error!r}") from error
            files = record.files if kind is ShardRecord else [f for shard in record.shards for f in shard.files]
            for shard in [] if kind is ShardRecord else record.shards:
                own = f"{folder}/{disk_names.shard_record(shard.rank)}"
                require(storage.size(own) is not None, "a receipt comes after its ranks' shard records", own)
            for file in files:
                _is_there(storage, folder, file, entry.name)


def _is_there(storage: Any, folder: str, file: FileEntry, record: str) -> None:
    place = os.path.dirname(folder) if file.origin == "external" else folder
    path = f"{place}/{file.name}"
    held = None
    with contextlib.suppress(CkptError):
        held = storage.crc_of_file(path)
    require(held == (file.nbytes, file.crc32), "a record's files are safe before it is", (record, path, held))


def _claims(storage: Any, root: str) -> None:
    """Whatever a run wrote lies in a root that knows the run."""
    known = {claim.run for claim in runs.read_runs(storage, root)}
    for folder, name in _attempts(storage, root):
        require(name.run in known, "a run's claim comes before its first file", folder)


def _attempts(storage: Any, root: str) -> Iterator[tuple[str, disk_names.AttemptName]]:
    for folder in listing.tag_dirs(storage, root):
        for entry in storage.list_dir(folder):
            name = disk_names.parse_attempt_dir(entry.name)
            if name is not None:
                yield f"{folder}/{entry.name}", name


def check_live(storage: Any, history: History) -> None:
    """What a tool may rely on while a saver lives: model states come last under plain names; removal after `latest`."""
    if history.publishers > 1:
        return
    committed = listing.list_committed(storage, ROOT).committed
    for one in committed[:1]:
        first = [listing.paths_of(one, entry)[0] for entry in one.manifest.files() if entry.origin == "shard"]
        named = (storage.read_small(f"{ROOT}/{disk_names.LATEST}", 4096) or b"").decode()
        gone = [path for path in first if storage.size(path) is None]
        require(not gone or named == one.manifest.attempt.tag, "first names go after `latest`", gone)
    for one in committed:
        plain = [f"{one.commit_dir}/{entry.name}" for entry in one.manifest.files() if entry.origin == "shard"]
        last = [path for path in plain if path.endswith("model_states.pt")]
        if last and not _graves(storage, one) and all(storage.size(path) is not None for path in last):
            missing = [path for path in plain if storage.size(path) is None]
            require(not missing, "`*model_states.pt` gets its plain name last", missing)


def check_recovered(storage: Any, history: History, *, torn: bool, bytes_of: Any = content) -> None:
    """Whoever starts next mends all of it, and the next save works and leaves nothing over."""
    recover(storage, ROOT)
    committed = check(storage, history, bytes_of=bytes_of, torn=torn)
    _mended(storage, committed, torn, bytes_of)
    if not torn:
        _no_orphans(storage, committed)
    if bytes_of is not None and any(
        name.order > max((one.order for one in committed), default=(-1, -1)) for _, name in _attempts(storage, ROOT)
    ):
        _next_save(storage, history, torn=torn)


def _mended(storage: Any, committed: list[Committed], torn: bool, bytes_of: Any) -> None:
    if committed:
        tag = (storage.read_small(f"{ROOT}/{disk_names.LATEST}", 4096) or b"").decode()
        require(tag == committed[0].manifest.attempt.tag, "`latest` names the newest after recovery", tag)
    for one in committed:
        own = bytes_of is None or authors(storage, one.commit_dir) <= {one.manifest.attempt.id}
        require(own, "plain names are of their manifest", one.commit_dir)
        for path in plain_paths(ROOT, one, tools=not torn):
            require(storage.size(path) is not None, "no plain name is missing after recovery", path)


def _next_save(storage: Any, history: History, *, torn: bool) -> None:
    """What an interrupted attempt left goes with the first commit after it."""
    newest = max(history.begun, key=lambda attempt: attempt.order)
    then = History(dict(history.expected), list(history.told), list(history.whole), list(history.begun))
    then.publishers = history.publishers
    claims = runs.read_runs(storage, ROOT)
    claim = claims[0] if claims else None
    run = (claim.generation, claim.run) if claim else (newest.generation, newest.run)
    after = attempt_of(newest.seq + 10, "after", *run)
    saver = Saver(storage, then, world=1)
    outcome = saver.save(after, {0: ("w.pt",)}, claim)
    require(outcome.status == "committed", "the next save is committed", outcome)
    recover(storage, ROOT)
    committed = check(storage, then, torn=torn)
    _mended(storage, committed, torn, content)
    if not torn:
        _no_orphans(storage, committed)


def _no_orphans(storage: FaultDisk, committed: list[Committed]) -> None:
    """Every name that is left belongs to the root, to a manifest, or to an attempt after the newest manifest."""
    newest = max((one.order for one in committed), default=(-1, -1))
    own = {f"{ROOT}/{disk_names.ROOT_ID}", f"{ROOT}/{disk_names.LATEST}"}
    for one in committed:
        home = _attempt_home(one)
        records = {f"{home}/{disk_names.shard_record(shard.rank)}" for shard in one.manifest.shards}
        records |= {f"{home}/{disk_names.receipt(node)}" for node in range(one.manifest.nodes)}
        firsts = {f"{home}/{entry.name}" for entry in one.manifest.files() if entry.origin == "shard"}
        own |= records | firsts | set(plain_paths(ROOT, one))
        own.add(f"{one.commit_dir}/{disk_names.manifest(one.manifest.node)}")
    for path, number in storage.walk():
        if number == -1 or path in own or disk_names.parse_run_claim(os.path.basename(path)) is not None:
            continue
        parts = path.split("/")
        coming = any(name and name.order > newest for name in map(disk_names.parse_attempt_dir, parts))
        foreign = _is_tool(path) or _is_coming_external(storage, parts, newest)
        require(coming or foreign, "the sweep leaves no orphan", path)


def _attempt_home(one: Committed) -> str:
    return f"{one.commit_dir}/{disk_names.attempt_dir(one.manifest.attempt.id, one.manifest.node)}"


def _is_tool(path: str) -> bool:
    return os.path.dirname(path) == ROOT and path.endswith(".py")


def _is_coming_external(storage: Any, parts: list[str], newest: tuple[int, int]) -> bool:
    """A framework's own file in a directory that no manifest commits: never ours to remove."""
    folder = "/".join(parts[:3])
    return not any(disk_names.is_manifest(entry.name) for entry in storage.list_dir(folder)) and "framework" in folder


__all__ = ["Attempt", "Broken", "check", "check_live", "check_recovered", "require"]
