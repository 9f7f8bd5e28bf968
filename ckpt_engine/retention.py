"""Which committed checkpoints may go: (committed, policy) → victims; pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpt_engine.errors import ConfigError
from ckpt_engine.manifest import Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keep the newest ``keep_last`` checkpoints; None keeps every one. Raises ConfigError unless None or ≥ 1."""

    keep_last: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 1):
            raise ConfigError(f"keep_last must be at least 1, or None to keep every checkpoint, not {self.keep_last!r}")


def victims(
    committed: Iterable[Committed],
    policy: Retention,
    *,
    root_id: str,
    protected: Collection[str] = (),
    confirmed: tuple[int, int] | None = None,
) -> list[Committed]:
    """What may go, oldest first; never the newest, so never the last one.

    Age is the order of attempts, (generation, seq): never a time, a step or a name. An abandoned line counts by its
    order like any other. A victim is older than the newest ``keep_last``, whoever else looks, so a stale
    view removes less and two deleters cannot go from one to none. Neither victims nor counted: checkpoints of
    another root, and directories that somebody renamed (renaming one is a way to keep it).
    ``protected``: tags in flight, being read or pinned. ``confirmed``: the order of the newest
    attempt that all nodes hold; only what is older goes where the layout is node-local.
    """
    ours = [one for one in committed if _is_ours(one, root_id)]
    if policy.keep_last is None:
        return []
    newest_first = sorted({one.order for one in ours}, reverse=True)
    doomed = set(newest_first[policy.keep_last :])
    chosen = [one for one in ours if one.order in doomed and one.manifest.attempt.tag not in protected]
    return sorted((one for one in chosen if _may_go(one, confirmed)), key=lambda one: one.order)


def _is_ours(one: Committed, root_id: str) -> bool:
    attempt = one.manifest.attempt
    return attempt.root_id == root_id and os.path.basename(one.commit_dir) == attempt.tag


def _may_go(one: Committed, confirmed: tuple[int, int] | None) -> bool:
    return one.manifest.node is None or (confirmed is not None and one.order < confirmed)
