"""Eight bugs of the protocol, each planted by replacing one function of production; the explorer must find each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine import commit, restore, settle, states
from ckpt_engine.manifest import Attempt, Manifest, Receipt, Shard
from ckpt_engine.saver.peers import Peer
from ckpt_engine.source import Candidate, Held
from ckpt_engine.states import Order, SlotView, State
from ckpt_engine.storage.base import Storage, write_durably

from . import lines, node, scenes
from .explorer import Model


@dataclass(frozen=True)
class Bug:
    """``promise``: part of what the explorer must say."""

    name: str
    promise: str
    model: Callable[[], Model[Any]]
    replaced: Sequence[tuple[Any, str, Any]]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for where, name, what in self.replaced:
                stack.callback(setattr, where, name, getattr(where, name))
                setattr(where, name, what)
            yield


def superseded_early(views: Iterable[SlotView], local_ranks: Collection[int]) -> Order | None:
    """The newest attempt that any rank holds."""
    return max((view.order for view in views if view.state in states.SNAPSHOT and view.order), default=None)


def decide_without_missing(
    storage: Storage, root: str, attempt: Attempt, nodes: int, world: int, on_node: int | None, own: Receipt | None
) -> Manifest | commit.Waiting | commit.Failed:
    """A node without a receipt counts as one without files."""
    found = [*commit.read_receipts(storage, root, attempt, range(nodes), node=on_node).values(), own]
    records = [record for one in found if isinstance(one, Receipt) for record in one.shards]
    if not records:
        return commit.Waiting(tuple(range(nodes)), tuple(range(world)))
    files = {record.rank: record.files for record in records}
    shards = tuple(Shard(rank, files.get(rank, ())) for rank in range(world))
    return Manifest(attempt, world, "shared", on_node, nodes, shards, records[0].resumed_from)


_write_manifest, _finish = commit._write_manifest, settle.finish
_without, _failed, _tended = Peer.without, Peer.failed, states.tended


def latest_first(storage: Storage, root: str, manifest: Manifest, older: Manifest | None) -> None:
    write_durably(storage, f"{root}/latest", manifest.attempt.tag.encode())
    _write_manifest(storage, root, manifest, older)


_from_memory = restore._from_memory


def match_by_step(held: Sequence[Held], root_id: str, partial: Any) -> list[Candidate]:
    """Parts of one step are taken for parts of one attempt."""
    one: dict[int, Attempt] = {}
    same = [one.setdefault(part.header.attempt.step, part.header.attempt) for part in held]
    parts = [
        replace(part, header=replace(part.header, attempt=attempt)) for part, attempt in zip(held, same, strict=True)
    ]
    return _from_memory(parts, root_id, partial)


def impatient() -> Model[Any]:
    """Savers that look for receipts before all are there."""
    model = scenes.first_save()
    for acts in model._savers:
        acts[:] = [act._replace(when=lambda disk: True) for act in acts]
    return model


_victim = states.victim


def reuse_queued(mine: Sequence[SlotView], kept: Order | None, hopeless: Callable[[Order], bool]) -> SlotView | None:
    """What is queued is taken for what is only ready."""
    seen = {view.slot: replace(view, state=State.READY) if view.state is State.QUEUED else view for view in mine}
    return _victim(list(seen.values()), kept, hopeless)


BUGS = [
    Bug(
        "reuse while QUEUED",
        "must not turn a QUEUED slot FILLING",
        lambda: node.Node("SSS", deaths=0),
        [(states, "victim", reuse_queued), (node, "LEASED", frozenset({State.PERSISTING}))],
    ),
    Bug(
        "slot superseded before all local ranks sealed",
        "invariant 12",
        lambda: node.Node("MMM", deaths=0, mishaps=1),
        [(states, "newest_common", superseded_early)],
    ),
    Bug(
        "release before durable",
        "invariant 1",
        scenes.first_save,
        [(commit, "write_shard_record", lambda storage, root, record: None)],
    ),
    Bug("publish without one receipt", "invariant 4", impatient, [(commit, "_decide", decide_without_missing)]),
    Bug("latest before manifest", "invariant 5", scenes.retention, [(commit, "_write_manifest", latest_first)]),
    Bug(
        "stale attempt accepted",
        "given up and is committed",
        scenes.stale_attempt,
        [(commit, "manifest_or_none", lambda storage, folder, node: None)],
    ),
    Bug(
        "old generation published",
        "given up and is committed",
        scenes.two_runs,
        [(commit, "on_the_line", lambda attempt, runs: True)],
    ),
    Bug(
        "equal step of another attempt matched",
        "put together from several attempts",
        lines.Lines,
        [(restore, "_from_memory", match_by_step)],
    ),
]

REPAIRED = [
    Bug(
        "retention before latest",
        "latest names what is not committed",
        scenes.retention,
        [(commit, "finish", lambda *args, keep_copies: None if keep_copies else _finish(*args, keep_copies=False))],
    ),
    Bug(
        "a part that nobody will queue is waited for",
        "waits for ever for the missing parts",
        lambda: node.Node("S", "M", together=True, late=True),
        [(Peer, "without", lambda peer, attempt, ready=False: "" if ready else _without(peer, attempt))],
    ),
    Bug(
        "a part that is here counts as failed",
        "is not committed",
        lambda: node.Node("S", grace=True),
        [(Peer, "failed", lambda peer, sealed: _failed(peer, sealed=False))],
    ),
    Bug(
        "a new life's fill is taken for its predecessor's",
        "was taken from",
        lambda: node.Node("M", "M", ranks=1, deaths=1),
        [(node, "tended", lambda word, handed, dead: _tended(replace(word, incarnation=0), handed=handed, dead=dead))],
    ),
]
"""What the explorer found in production, planted again."""
