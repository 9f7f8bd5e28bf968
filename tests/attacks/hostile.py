"""Hostile roots and records, made small; every test of ``attacks`` that needs one takes it from here.

``Root`` is a root with three committed checkpoints (steps 10, 20, 30, two ranks, a file in a subdirectory), a fourth
one half written, and one of every other thing that lies on disk. ``restored`` does what a restart does, all but the
processes, and reads every byte; ``served`` does what the next saver does.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk_model import ROOT_ID, RUN, attempt_of, claim_of, content, publish, write_node, write_shard

from ckpt_engine import commit, listing, restore, runs, settle, sweep
from ckpt_engine.errors import CkptError
from ckpt_engine.group import Alone, Place
from ckpt_engine.header import Header
from ckpt_engine.manifest import Failure, Lease, Manifest, Offer, Receipt
from ckpt_engine.names import Names
from ckpt_engine.record import digest_of
from ckpt_engine.slots import Slot
from ckpt_engine.source import Candidate, Share, Source
from ckpt_engine.storage import PosixStorage

disk = PosixStorage()
PLACE = Place(0, 1, 0, 0, ((0,),))
FILES = {0: ("a.pt", "sub/b.pt")}
TOKEN = "0123456789abcdef"


class Root:
    """``path`` is the root; ``outside`` lies beside it and must never change."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "root"
        self.outside = folder / "outside"
        self._before = self._state_outside()

    @classmethod
    def make(cls, folder: Path) -> Root:
        self = cls(folder)
        self.outside.mkdir(parents=True)
        (self.outside / "precious").write_bytes(b"precious")
        (self.outside / "sub").mkdir()
        (self.outside / "sub" / "b.pt").write_bytes(b"precious")
        root = str(self.path)
        runs.adopt_root_id(disk, root, ROOT_ID)
        runs.claim_run(disk, root, claim_of(1))
        for seq in (1, 2, 3):
            self.save(seq)
        write_shard(disk, root, attempt_of(4, "tag4"), 0, FILES[0], world=1)
        receipt = Receipt(attempt_of(4, "tag4"), 0, 1, 1, "shared", (), Failure(0, "on order"))
        commit.write_receipt(disk, root, receipt)
        runs.write_offer(disk, root, Offer(1, RUN, 0, (attempt_of(4, "tag4"),)))
        runs.write_lease(disk, root, Lease(TOKEN, "tag1", 0))
        older = listing.read_manifest(disk, str(self.path / "tag2"))
        assert older is not None
        grave = {**older.to_dict(), "attempt": attempt_of(0, "tag2").to_dict()}
        (self.path / "tag2" / f".removed-{attempt_of(0, 'tag2').id}.json").write_bytes(
            Manifest.from_dict(grave).to_bytes()
        )
        return cls(folder)

    def save(self, seq: int) -> Any:
        """A whole save of one rank, as savers do it."""
        attempt = attempt_of(seq, f"tag{seq}")
        write_node(disk, str(self.path), attempt, FILES, world=1)
        return publish(disk, str(self.path), attempt, world=1)

    def manifest(self, seq: int) -> Path:
        return self.path / f"tag{seq}" / "MANIFEST.json"

    def one_of_each(self) -> dict[str, Path]:
        """Every kind of file, the newest of it."""
        newest, pending = self.path / "tag3", self.path / "tag4" / f".attempt-{attempt_of(4, 'tag4').id}"
        return {
            "data file": newest / "a.pt",
            "data file in a subdirectory": newest / "sub" / "b.pt",
            "manifest": self.manifest(3),
            "shard record": pending / ".shard-00000.json",
            "receipt": pending / ".receipt-node0000.json",
            "latest": self.path / "latest",
            "root id": self.path / ".ckpt-root",
            "run claim": self.path / ".run-1",
            "offer": self.path / ".offer-1-node0",
            "lease": self.path / f".reading-{TOKEN}",
            "tombstone": next((self.path / "tag2").glob(".removed-*")),
        }

    def untouched_outside(self) -> bool:
        return self._state_outside() == self._before

    def _state_outside(self) -> dict[str, bytes]:
        found = sorted(self.outside.rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


def restored(root: Path, step: int | None = None) -> tuple[int, tuple[str, ...]]:
    """(step, what was skipped and why) of a restart on this root; raises what a restart raises."""
    folder = str(root)
    root_id = runs.root_id(disk, folder) or ROOT_ID
    facts = [restore.look(disk, [], folder, PLACE, "shared", step)]
    choice = restore.candidates(facts, root_id, "shared")

    def wants(known: Any) -> tuple[list[str], list[str]]:
        return [entry.name for _, entry in known], []

    def opened(candidate: Candidate) -> Source:
        return Source(candidate, PLACE, [], disk, 1)

    share = Share(Alone(), PLACE, Names("0" * 16))
    source, tried = restore.choose(Alone(), PLACE, lambda: choice.candidates, restore.How(opened, wants, share))
    skipped = tuple(one.reason for one in (*choice.damaged, *tried))
    if source is None:
        restore.nothing_usable(folder, facts, choice, tried)
        return 0, skipped
    try:
        attempt = source.candidate.attempt
        for name in FILES[0]:
            assert source.fetch(name)[:] == content(attempt, name), f"{name} of {attempt.tag} is not what was saved"
        return attempt.step, skipped
    finally:
        source.close()


def served(root: Path, seq: int = 5) -> list[CkptError]:
    """The next saver's work: a save, retention and sweep, twice; the errors of ours that it met. Others are raised."""
    folder, errors, watch = str(root), [], runs.LeaseWatch()
    attempt = attempt_of(seq, f"tag{seq}")

    def work() -> list[Callable[[], object]]:
        return [
            lambda: listing.highest_generation(disk, folder),
            lambda: write_node(disk, folder, attempt, FILES, world=1),
            lambda: publish(disk, folder, attempt, world=1),
            lambda: watch.tags(disk, folder, 0.0),
            lambda: runs.read_offers(disk, folder, claim_of(1), 2),
            lambda: commit.read_shard_records(disk, folder, attempt_of(4, "tag4"), [0]),
            lambda: commit.read_receipts(disk, folder, attempt_of(4, "tag4"), [0]),
            *(lambda seq=seq: settle.roll_forward(disk, folder, f"tag{seq}") for seq in range(1, 6)),  # type: ignore[misc]
            *(
                lambda one=one: sweep.remove_checkpoint(disk, one)  # type: ignore[misc]
                for one in listing.list_committed(disk, folder).committed[2:]
            ),
            lambda: sweep.sweep(disk, folder, node=0, live=(), sweep_after_s=0, age_of=lambda path: 1.0),
            lambda: listing.unmanaged(disk, folder),
        ]

    for act in work() + work():
        try:
            act()
        except CkptError as error:
            errors.append(error)
    return errors


def envelope(body: object, kind: str = "manifest", **changes: object) -> bytes:
    """A record with a correct checksum, whatever it says."""
    whole = {"body": body, "checksum": digest_of(body), "format_version": 1, "kind": kind, **changes}
    return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()


def copy_of(pristine: Path, folder: Path) -> Path:
    shutil.copytree(pristine, folder, symlinks=True)
    return folder


def put_raw_header(slot: Slot, packed: bytes) -> None:
    """A header record with a correct CRC, whatever it says."""
    slot._put_record(8192, 48, packed)


def repacked(header: Header, **changes: Any) -> bytes:
    """``header`` as a rank packs it, with fields that no ``Header`` would have."""
    import msgpack

    values = msgpack.unpackb(header.pack(), unicode_errors="surrogateescape")
    packed: bytes = msgpack.packb({**values, **changes}, unicode_errors="surrogateescape")
    return packed


def crc(data: bytes) -> int:
    return zlib.crc32(data)
