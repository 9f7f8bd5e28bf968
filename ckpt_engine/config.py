"""Options: frozen dataclasses validated once. The only room that reads the environment."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_engine import events
from ckpt_engine.errors import ConfigError
from ckpt_engine.retention import Retention

LAYOUTS = ("shared", "node-local")
MIN_BYTES_PER_S = 1 << 20
STAGINGS = ("blocking", "overlap", "auto")
_KEPT_FOR_SAVER = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_KEPT_PYTHON = ("PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverOptions:
    """How the node's daemon behaves; times in seconds, no value below 0.

    start_s: how long a rank waits for a saver to be ready. stall_s: no byte written for this long = stalled.
    grace_s: after the first death of a rank, how long its peers may live on before the newest common snapshot
    is persisted. linger_s: after the last death, how long snapshots wait for a restart. commit_s: how long a
    node waits for the receipts of the others (more than the 60 s for which an NFS client may be stale).
    sweep_after_s: age at which another node's abandoned files may be swept. retry_s: how long a failing write
    is tried again. term_s: budget after SIGTERM. nice: niceness of its process, up to 19; its I/O class is "best
    effort" at the level that follows from it. write_bytes_per_s: no file is written faster while ranks train (0: as
    fast as the disk goes).
    """

    start_s: float = 30.0
    stall_s: float = 120.0
    grace_s: float = 30.0
    linger_s: float = 3600.0
    commit_s: float = 600.0
    sweep_after_s: float = 3600.0
    retry_s: float = 30.0
    term_s: float = 30.0
    nice: float = 10
    write_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(f"SaverOptions.{spec.name} must be a number >= 0, not {value!r}")
        if self.nice > 19 or self.nice % 1:
            raise ConfigError(f"SaverOptions.nice must be a whole number in 0..19, not {self.nice!r}")
        if 0 < self.write_bytes_per_s < MIN_BYTES_PER_S:
            raise ConfigError(
                f"SaverOptions.write_bytes_per_s must be 0 (no limit) or at least {MIN_BYTES_PER_S}, "
                f"not {self.write_bytes_per_s!r}"
            )

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SaverOptions:
        known = {spec.name for spec in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown saver option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**values)  # type: ignore[arg-type]  # validated by __post_init__


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How one engine of one rank behaves. See ``CheckpointEngine`` for what each option means to a user."""

    job: str = ""
    name: str = "default"
    node_id: str = ""
    layout: str = "shared"
    slots: int = 2
    wait_s: float = 1800.0
    when_busy: str = "wait"
    on_error: str = "warn"
    threads: int = 0
    staging: str = "blocking"
    verify_staging: bool = False
    slot_bytes: int = 0
    retention: Retention = field(default_factory=Retention)
    saver: SaverOptions = field(default_factory=SaverOptions)

    def __post_init__(self) -> None:
        for key in ("job", "name", "node_id"):
            value = getattr(self, key)
            if not isinstance(value, str) or len(value) > 200 or "\0" in value:
                raise ConfigError(f"{key} must be a text of at most 200 characters, not {value!r}")
        one_of("layout", self.layout, LAYOUTS)
        one_of("when_busy", self.when_busy, ("wait", "skip"))
        one_of("on_error", self.on_error, ("warn", "raise"))
        one_of("staging", self.staging, STAGINGS)
        one_of("verify_staging", self.verify_staging, (False, True))
        whole("slots", self.slots, 1, 8)
        whole("slot_bytes", self.slot_bytes, 0, 2**50)
        whole("threads", self.threads, 0, 64)
        if isinstance(self.wait_s, bool) or not isinstance(self.wait_s, int | float) or not self.wait_s >= 0:
            raise ConfigError(f"wait_s must be a number of seconds >= 0, not {self.wait_s!r}")
        if not isinstance(self.retention, Retention):
            raise ConfigError(f"retention must be a Retention, not {self.retention!r}")
        if not isinstance(self.saver, SaverOptions):
            raise ConfigError(f"saver must be a SaverOptions, not {self.saver!r}")


def one_of(key: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{key} must be one of {', '.join(map(repr, known))}, not {value!r}")


def whole(key: str, value: object, low: int, high: int) -> int:
    """``value`` as an int, if it is a whole number in [low, high]. Raises ConfigError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{key} must be a whole number, not {value!r}")
    number = int(value.__index__())
    if not low <= number <= high:
        raise ConfigError(f"{key} must be in {low}..{high}, not {number}")
    return number


def omp_threads() -> int:
    """OMP_NUM_THREADS, its first level; 0 if it says nothing."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() else 0


def require_linux() -> None:
    if sys.platform != "linux":
        raise ConfigError(f"ckpt_engine needs Linux (POSIX shared memory and record locks); this is {sys.platform}")


def saver_environment(package_parent: str) -> dict[str, str]:
    """The few variables that a saver inherits; ``package_parent`` makes this very package importable there."""
    keep = {
        key: value
        for key, value in os.environ.items()
        if key in _KEPT_FOR_SAVER + _KEPT_PYTHON or key.startswith("LC_")
    }
    keep |= {key: value for key, value in os.environ.items() if key.startswith("CKPT_ENGINE_")}
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    keep["PYTHONPATH"] = os.pathsep.join((package_parent, *map(os.path.abspath, paths)))  # the saver starts in "/"
    return keep


def torch_load_has_orders() -> bool:
    """True if variables of torch's own rule how ``torch.load`` may load."""
    return any(os.environ.get(f"TORCH_FORCE_{what}_LOAD") for what in ("WEIGHTS_ONLY", "NO_WEIGHTS_ONLY"))


def launched_world() -> int:
    """How many processes a launcher says there are; never an identity, only a reason to doubt that we are alone."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def hook_from_environment() -> None:
    """Install the event hook that ``CKPT_ENGINE_HOOK=package.module:function`` names, if it is set."""
    spec = os.environ.get("CKPT_ENGINE_HOOK", "")
    if not spec:
        return
    module, _, function = spec.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"CKPT_ENGINE_HOOK={spec!r} must be package.module:function ({error})") from error
    if hook not in events._hooks:
        events.add_hook(hook)
