"""What a checkpoint is worth: finite numbers by name, given at its save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, SupportsFloat

from ckpt_engine.errors import ConfigError
from ckpt_engine.events import log
from ckpt_engine.record import Record, require

MAX_METRICS, MAX_NAME_BYTES = 64, 100
"""They travel in slot headers and control pages, which are small."""

Metrics = Mapping[str, SupportsFloat]


@dataclass(frozen=True, slots=True)
class Metric(Record):
    kind: ClassVar[str] = "metric"

    name: str
    value: float

    def _check(self) -> None:
        check_name(self.name)
        require(math.isfinite(self.value), f"{self.name} is {self.value}")


def check_name(name: str) -> None:
    """Raises ValueError unless ``name`` can name a metric."""
    require(type(name) is str and name.isprintable(), f"{name!r:.80} is not a printable text")
    require(0 < len(name.encode()) <= MAX_NAME_BYTES, f"{name!r:.80} is empty or longer than {MAX_NAME_BYTES} bytes")


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Raises ValueError unless each is there once, in the order of names, and they are not too many."""
    names = [metric.name for metric in metrics]
    require(len(names) <= MAX_METRICS, f"{len(names)} metrics, {MAX_METRICS} are the most")
    require(names == sorted(set(names)), "metrics are twice there or out of order")


def of_user(given: Metrics | None) -> tuple[Metric, ...]:
    """What was given to a save. What is not finite is left out, with a warning: a loss that is NaN must not end a job.

    Raises ConfigError for what is no mapping of names to numbers, or too much of it.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"metrics must be {{name: number}}, not a {type(given).__name__}")
    found = []
    for name, value in (given or {}).items():
        try:
            check_name(name)
            require(hasattr(value, "__float__"), f"{value!r:.80} is not a number")
            number = float(value)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"the metric {name!r:.80} cannot be kept: {error}") from error
        if math.isfinite(number):
            found.append(Metric(name, number))
        else:
            log.warning("the metric %s is %s: the checkpoint is saved without it, so it is not the best", name, number)
    if len(found) > MAX_METRICS:
        raise ConfigError(f"{len(found)} metrics were given, at most {MAX_METRICS} can be kept: choose")
    return tuple(sorted(found, key=lambda metric: metric.name))


def by_name(metrics: Iterable[Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}
