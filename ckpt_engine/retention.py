"""Which committed checkpoints may go: (committed, policy) → victims; pure.

Two options are limits, and make old checkpoints go: ``keep_last`` and ``max_bytes``. All else says what stays.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ckpt_engine.errors import ConfigError
from ckpt_engine.manifest import Attempt, Committed
from ckpt_engine.metrics import check_name

_MOST = 2**63 - 1


class KeepBest(NamedTuple):
    """The ``number`` best by ``metric``; ``mode``: is the least ("min") or the greatest ("max") value best?"""

    metric: str
    mode: str
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which committed checkpoints stay; without ``keep_last`` and ``max_bytes`` all of them do.

    keep_last: the newest n stay, older ones go. keep_every: whose step is a multiple of it stays. keep_best:
    ``(metric, "min" or "max")``, with a third item for more than one: the best by a metric given at the save stays; of
    equal ones the newer. max_bytes: what no other rule keeps goes only while all together are larger, the oldest
    first. min_age_s: nothing goes before the saver has seen it committed for so long, by its own monotonic clock.

    The newest, what is pinned, in flight or being read always stays. Raises ConfigError.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | tuple[str, str] | tuple[str, str, int] | None = None
    max_bytes: int | None = None
    min_age_s: float = 0.0

    def __post_init__(self) -> None:
        _whole("keep_last", self.keep_last, "keep every checkpoint")
        _whole("keep_every", self.keep_every, "keep none for its step")
        _whole("max_bytes", self.max_bytes, "set no limit")
        object.__setattr__(self, "keep_best", _best(self.keep_best))
        age = self.min_age_s
        if isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age < float("inf"):
            raise ConfigError(f"min_age_s must be a number of seconds >= 0, not {age!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def one_policy(keep_last: int | None, retention: Retention | None) -> Retention:
    """``keep_last=n`` is short for ``retention=Retention(keep_last=n)``. Raises ConfigError if both are given."""
    if retention is None:
        return Retention(keep_last=keep_last)
    if keep_last is not None:
        raise ConfigError("keep_last and retention were both given: write retention=Retention(keep_last=…, …)")
    return retention


def victims(
    committed: Iterable[Committed],
    policy: Retention,
    *,
    root_id: str,
    protected: Collection[str] = (),
    confirmed: tuple[int, int] | None = None,
    ages_s: Mapping[Attempt, float] | None = None,
) -> list[Committed]:
    """What may go, oldest first; never the newest, so never the last one.

    Age is the order of attempts, (generation, seq): never a time, a step or a name. An abandoned line counts by its
    order like any other. What one rule keeps stays, whatever the others say, and what it keeps in a whole view it keeps
    in every part of it: a stale view removes less, and two deleters cannot go from one to none. Neither victims nor
    counted: checkpoints of another root, and directories that somebody renamed (renaming one is a way to keep it).
    ``protected``: tags in flight or being read. ``confirmed``: the order of the newest attempt that all nodes hold;
    only what is older goes where the layout is node-local. ``ages_s``: how long each was seen; unknown = just now.
    """
    ours = _ours(committed, root_id)
    if policy.keep_last is None and policy.max_bytes is None:
        return []
    stays = _kept(ours, policy)
    may_go = [
        one
        for one in sorted(ours, key=lambda one: one.order)
        if one.order not in stays
        and one.manifest.attempt.tag not in protected
        and (ages_s or {}).get(one.manifest.attempt, 0.0) >= policy.min_age_s
        and (one.manifest.node is None or (confirmed is not None and one.order < confirmed))
    ]
    if policy.max_bytes is None:
        return may_go
    chosen, excess = [], sum(one.nbytes for one in ours) - policy.max_bytes
    for one in may_go:
        if excess <= 0:
            break
        chosen.append(one)
        excess -= one.nbytes
    return chosen


def kept_bytes(committed: Iterable[Committed], policy: Retention, *, root_id: str) -> int:
    """Bytes of what the rules and pins keep: if they are more than ``max_bytes``, that cannot be met."""
    ours = _ours(committed, root_id)
    stays = _kept(ours, policy)
    return sum(one.nbytes for one in ours if one.order in stays)


def _kept(ours: Sequence[Committed], policy: Retention) -> set[tuple[int, int]]:
    """Orders of what stays for ever, or until something newer or better is committed."""
    newest_first = sorted({one.order for one in ours}, reverse=True)
    stays = set(newest_first[: policy.keep_last or 1])
    stays |= {one.order for one in ours if one.pinned}
    if policy.keep_every is not None:
        stays |= {one.order for one in ours if one.manifest.attempt.step % policy.keep_every == 0}
    if policy.keep_best is not None:
        stays |= set(_best_first(ours, KeepBest(*policy.keep_best)))
    return stays


def _best_first(ours: Iterable[Committed], best: KeepBest) -> list[tuple[int, int]]:
    """Of equal ones the newer first; one without the metric is never best."""
    metrics = [(one.order, metric) for one in ours for metric in one.manifest.metrics]
    sign = 1 if best.mode == "max" else -1
    rated = {(sign * metric.value, order) for order, metric in metrics if metric.name == best.metric}
    return [order for _, order in sorted(rated, reverse=True)[: best.number]]


def _ours(committed: Iterable[Committed], root_id: str) -> list[Committed]:
    return [
        one
        for one in committed
        if one.manifest.attempt.root_id == root_id and os.path.basename(one.commit_dir) == one.manifest.attempt.tag
    ]


def _whole(key: str, value: object, none: str) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
        raise ConfigError(f"{key} must be a whole number, at least 1, or None to {none}, not {value!r}")


def _best(given: Any) -> KeepBest | None:
    if given is None:
        return None
    try:
        best = KeepBest(*given)
        check_name(best.metric)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"keep_best must be (metric, 'min' or 'max'), e.g. ('eval_loss', 'min'): {error}") from error
    if best.mode not in ("min", "max"):
        raise ConfigError(f"the mode of keep_best must be 'min' or 'max', not {best.mode!r:.80}")
    _whole("the number of keep_best", best.number, "keep one")
    return best._replace(number=best.number or 1)
