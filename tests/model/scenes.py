"""What savers do in the publish model, production's writer and committer one call at a time, and where they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from disk_model import ROOT_ID, claim_of, write_node

from ckpt_engine import commit, disk_names, listing, runs
from ckpt_engine.config import SaverOptions
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt
from ckpt_engine.saver.committer import Committer
from ckpt_engine.saver.persist import Job, Writer
from ckpt_engine.states import State

from .publishing import Act, Publishing
from .replay import ROOT, Disk, ModelSlot, files_of, header_of


def persist(header: Header) -> Act:
    """The writer with one slot."""

    def run(storage: Any) -> str:
        slot: Any = ModelSlot(storage, header)
        writer = Writer(storage, _committer(storage, header), lambda rank, message: None, 0.0)
        writer._persist(Job(slot, slot.word(), header))
        return "released"

    return Act(f"persisting {header.attempt.id}", run)


def receipt(header: Header) -> Act:
    """The first look of the committer: the receipt, and to publish if all others are there."""
    return Act(f"the receipt of {header.attempt.id}", lambda storage: _commit(storage, header, receipted=False) or "")


def publish(header: Header) -> Act:
    """Later looks; one that finds a receipt missing changes nothing."""

    def all_there(disk: Disk) -> bool:
        path = commit.attempt_path(ROOT, header.attempt)
        committed = listing.read_manifest(disk, header.commit_dir)
        there = header.decides_alone or all(
            disk.size(f"{path}/{disk_names.receipt(node)}") is not None for node in range(header.nodes)
        )
        return there or (committed is not None and committed.attempt.order >= header.attempt.order)

    return Act(f"publishing {header.attempt.id}", lambda storage: _commit(storage, header, receipted=True), all_there)


def _committer(storage: Any, header: Header, ended: Callable[..., None] = lambda header, outcome: None) -> Committer:
    return Committer(
        storage, SaverOptions(), ended=ended, live_run=lambda run: True, held=lambda: (header,),
        look_at_us=lambda: None,
    )  # fmt: skip


def _commit(storage: Any, header: Header, *, receipted: bool) -> Attempt | str | None:
    ended: list[str] = []
    committer = _committer(storage, header, lambda header, outcome: ended.append(f"{outcome.status} {outcome.reason}"))
    committer.durable(header, header.shard_record())
    committer._pending[header.attempt].receipted = receipted
    committer._pass()
    return header.attempt if ended and ended[0].startswith("committed") else ended[0] if ended else None


# -- where they begin ----------------------------------------------------------------------------------------------

OTHER_RUN = "1" * 16


def attempt_of(seq: int, tag: str, generation: int = 1) -> Attempt:
    return Attempt(generation, OTHER_RUN if generation > 1 else "0" * 16, seq, 10 * seq, tag, ROOT_ID)


def root(*, committed: Iterable[Attempt], nodes: int) -> Disk:
    """A root with checkpoints of all ranks, one on each node."""
    disk = Disk()
    runs.adopt_root_id(disk, ROOT, ROOT_ID)
    runs.claim_run(disk, ROOT, claim_of(1))
    for attempt in committed:
        received(disk, attempt, nodes)
        done = commit.try_publish(disk, ROOT, attempt, nodes=nodes, world=nodes, runs=runs.read_runs(disk, ROOT))
        assert isinstance(done, commit.Published) and done.trouble is None
    return disk


def received(disk: Disk, attempt: Attempt, nodes: int) -> None:
    """Everything but the manifest."""
    for node in range(nodes):
        write_node(disk, ROOT, attempt, {node: files_of(node)}, world=nodes, node=node, nodes=nodes)


FIRST = claim_of(1)


def first_save(nodes: int = 2) -> Publishing:
    attempt = attempt_of(2, "two")
    disk = root(committed=[attempt_of(1, "one")], nodes=nodes)
    commit.make_tag_dir(disk, ROOT, "two")
    disk.slots = dict.fromkeys(range(nodes), State.QUEUED)
    headers = [header_of(attempt, FIRST, node, nodes, None) for node in range(nodes)]
    savers = [[persist(header), receipt(header), publish(header)] for header in headers]
    return Publishing(
        "publish: first save", f"{nodes} nodes, from the slot to latest", disk, savers, last=attempt, switches=1
    )


def re_save(nodes: int = 2, switches: int = 2) -> Publishing:
    attempt = attempt_of(2, "one")
    disk = root(committed=[attempt_of(1, "one")], nodes=nodes)
    received(disk, attempt, nodes)
    savers = [[publish(header_of(attempt, FIRST, node, nodes, None))] for node in range(nodes)]
    return Publishing(
        "publish: re-save of a tag", f"{nodes} nodes, all receipts there", disk, savers, last=attempt, switches=switches
    )


def three_at_once() -> Publishing:
    return re_save(3, 1)


def retention(nodes: int = 2) -> Publishing:
    attempt = attempt_of(2, "two")
    disk = root(committed=[attempt_of(1, "one")], nodes=nodes)
    received(disk, attempt, nodes)
    savers = [[publish(header_of(attempt, FIRST, node, nodes, 1))] for node in range(nodes)]
    bounds = f"{nodes} nodes, all receipts there, keep_last=1, sweep"
    return Publishing("publish: retention", bounds, disk, savers, last=attempt, switches=1)


def two_runs() -> Publishing:
    """A saver of an old run comes late: its attempt has all receipts, and a new run saves under the same tag."""
    old, new = attempt_of(2, "two"), attempt_of(1, "two", 2)
    claim = claim_of(2, attempt_of(1, "one"), OTHER_RUN)
    disk = root(committed=[attempt_of(1, "one")], nodes=2)
    received(disk, old, 2)
    runs.claim_run(disk, ROOT, claim)
    received(disk, new, 2)
    savers = [[publish(header_of(old, FIRST, 0, 2, None))], [publish(header_of(new, claim, 1, 2, None))]]
    bounds = "a saver of generation 1, one of generation 2, one tag"
    return Publishing("publish: two generations", bounds, disk, savers, last=new, never=[old])


def stale_attempt() -> Publishing:
    """Two attempts at one tag in one run; a saver tries the older one again when the newer one is committed."""
    old, new = attempt_of(2, "two"), attempt_of(3, "two")
    disk = root(committed=[attempt_of(1, "one"), new], nodes=2)
    received(disk, old, 2)
    savers = [[publish(header_of(old, FIRST, 0, 2, None))], [publish(header_of(new, FIRST, 1, 2, None))]]
    return Publishing("publish: stale attempt", "2 savers, 2 attempts at one tag", disk, savers, last=new, never=[old])


SCENES: list[Callable[[], Publishing]] = [re_save, three_at_once, retention, two_runs, stale_attempt, first_save]
