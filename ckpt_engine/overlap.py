"""Copying while the training goes on: who guards which tensors, and the thread that copies them.

Parameters and the state of an optimizer change in its step and nowhere else, so they may be copied during forward and
backward if the step waits for the copy. Everything else (buffers, averages, random numbers) is copied at once. Torch
does not tell of every change (see ``Image.changed``): it is the guard that makes this safe.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from ckpt_engine.errors import ConfigError
from ckpt_engine.events import log, warn_once
from ckpt_engine.waits import SLICE_S

if TYPE_CHECKING:
    from ckpt_engine.handles import Handle

AUTO_BYTES = 16 << 20
"""``staging="auto"`` copies less than this at once. Measured: call and guard cost as much as 16 MiB on two cores."""


class Work(Protocol):
    """What is left of a save when its call returns; see ``saving.Saving``."""

    @property
    def handle(self) -> Handle: ...

    def copy(self, threads: Callable[[], int]) -> None:
        """Read the sources; they may change after it, behind ``hold`` on a device."""

    def hold(self) -> None: ...
    def seal(self) -> None:
        """All the rest."""

    def fail(self, error: BaseException) -> None: ...


class Flag:
    """An event. That of ``threading`` may keep its lock for ever if a signal handler raises while one waits for it."""

    def __init__(self) -> None:
        self._set = False
        self._news: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._news.put(None)

    def wait(self, timeout_s: float) -> bool:
        if not self._set:
            with contextlib.suppress(Empty):
                self._news.get(timeout=timeout_s)
                self._news.put(None)  # for the next one; lost, he looks when his time is over
        return self._set


class Copier:
    """A thread for the late saves of one engine; it comes with the first of them, and stays.

    No executor of the library, which holds locks while it is given work: a signal handler in the same thread that
    closes, saves or forks would wait for them for ever. A daemon, so that it does not keep the interpreter: for what it
    has begun, ``_finish_all`` does.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, act: Callable[[], None]) -> None:
        """Raises RuntimeError where no thread is to be had."""
        self._work.put(act)  # first: whoever ends this does it behind ``act``
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=_serve, args=(self._work,), name="ckpt-engine-copy", daemon=True)
            thread.start()
            self._thread = thread

    def end(self) -> None:
        """After what was begun. Any thread may, a signal handler too; idempotent."""
        self._work.put(None)

    def __del__(self) -> None:
        self.end()


def _serve(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (act := work.get()) is not None:
        act()
        del act  # it holds the engine
    work.put(None)  # for another thread, if an interrupted ``begin`` has left one


class Late:
    """The rest of one save, done in another thread."""

    def __init__(self, work: Work, threads: int) -> None:
        self.work = work
        self.error: BaseException | None = None
        self._most = threads
        self._threads = max(1, threads // 2)  # forward and backward keep the other half of the cores
        self._once = threading.Lock()
        self._free = Flag()
        self._sealed = Flag()
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._afterwards: list[Callable[[], None]] = []

    def start(self, copier: Copier) -> None:
        if _ending:
            self._run()
            return
        _begun.add(self)
        try:
            copier.begin(self._run)
        except RuntimeError:  # no thread to be had
            self._run()

    def guard(self) -> None:
        """Wait until the sources may change, with all threads on the copy. A forked child has sources of its own."""
        if self._wait(self._free) and self.error is None:
            self.work.hold()

    def join(self) -> None:
        """Wait until it is sealed, or has failed."""
        self._wait(self._sealed)

    def afterwards(self, act: Callable[[], None]) -> None:
        """``act`` as soon as nothing of this save is under way: now, or in its thread."""
        with self._mutex:
            if self._once.locked() and not self._sealed.is_set():
                self._afterwards.append(act)
                return
        act()

    def _wait(self, flag: Flag) -> bool:
        if os.getpid() != self._pid:
            return False
        self._threads = self._most
        while not flag.wait(SLICE_S):  # a native copy ends by itself
            self._run()  # a signal handler that raised kept ``start`` from it
        return True

    def _run(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        try:
            self.work.copy(lambda: self._threads)
            self._free.set()
            self.work.seal()
        except BaseException as error:  # told by the handle, or at the next save
            self.error = error
            self._give_up(error)
            if not isinstance(error, Exception):  # Ctrl-C, where no thread could be had
                raise
        finally:
            self._free.set()
            with self._mutex:
                self._sealed.set()
            for act in self._afterwards:
                act()

    def _give_up(self, error: BaseException) -> None:
        try:
            self.work.fail(error)
        except Exception as more:  # nobody is above this: the engine was closed by a signal handler, for one
            log.warning("a save failed (%s), and could not say so: %s", error, more)


_begun: WeakSet[Late] = WeakSet()
_ending: list[bool] = []


@atexit.register
def _finish_all() -> None:
    """The interpreter ends: what was begun becomes a snapshot; what begins from now on blocks."""
    _ending.append(True)
    for late in list(_begun):
        late.join()


class Guards:
    """What waits for ``wait`` before it changes a tensor, and which tensors that are."""

    def __init__(self, staging: str, wait: Callable[[], None]) -> None:
        self._staging = staging
        self._wait = wait
        self._optimizers = WeakValueDictionary[int, Any]()  # one that was replaced may go, and its state
        self._promised: list[Tensor] = []
        self._hooks: list[Any] = []

    def add(self, what: Any) -> None:
        """Guard an optimizer, or believe that whoever changes these tensors waits before. Raises ConfigError."""
        if isinstance(what, torch.optim.Optimizer):
            if not (getattr(type(what).step, "hooked", False) and hasattr(what, "_optimizer_step_pre_hooks")):
                raise ConfigError(
                    f"{type(what).__name__} was not set up by torch.optim.Optimizer: its step has no hooks"
                )
            if id(what) not in self._optimizers:
                self._optimizers[id(what)] = what
                hook = what.register_step_pre_hook(self._before_step)
                hooks: Any = what._optimizer_step_pre_hooks
                hooks.move_to_end(hook.id, last=False)  # others may change what is copied
                self._hooks.append(hook)
            return
        tensors = [what] if isinstance(what, Tensor) else list(what) if isinstance(what, Iterable) else [what]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise ConfigError(f"guard() takes a torch.optim.Optimizer or tensors, not {type(what).__name__}")
        self._promised += tensors

    def owned(self) -> frozenset[int]:
        """The storages (their ``_cdata``) that may be copied late; empty, for a reason that is logged: none."""
        if self._staging == "blocking":
            return frozenset()
        if not self._optimizers and not self._promised:
            warn_once(f"guard {id(self)}", "nothing is guarded: saves block. See guard(optimizer)")
            return frozenset()
        owners = list(self._optimizers.values())
        backward = [p for one in owners for group in one.param_groups for p in group["params"] if in_backward(p)]
        if backward:
            shape = tuple(backward[0].shape)
            warn_once(
                f"backward {id(self)}",
                f"a parameter of shape {shape} has hooks that may update it in backward: saves block",
            )
            return frozenset()
        return storages([*self._promised, *(tensor for one in owners for tensor in tensors_of(one))])

    @property
    def least_bytes(self) -> int:
        """Fewer than this are copied at once."""
        return AUTO_BYTES if self._staging == "auto" else 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._optimizers.clear()
        self._promised.clear()

    def _before_step(self, *_: object) -> None:
        self._wait()


class Everything:
    """Every storage: of a file that holds nothing but the state of an optimizer."""

    def __contains__(self, _: object) -> bool:
        return True


def tensors_of(optimizer: Any) -> Iterator[Tensor]:
    """The parameters and the state of an optimizer, of torch or one that wraps it."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from (value for value in group["params"] if isinstance(value, Tensor))
    for state in dict(getattr(optimizer, "state", None) or {}).values():
        for value in state.values() if isinstance(state, dict) else ():
            yield from (
                one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)
            )


def in_backward(tensor: Tensor) -> bool:
    """True if an optimizer may run inside of backward, where no step waits."""
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(hooks) or hasattr(tensor, "_in_backward_optimizers")


def storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The storages of strided tensors, by their ``_cdata``."""
    found: set[int] = set()
    left = iter(tensors)
    while True:
        try:
            found.update(map(_CDATA, map(_STORAGE, left)))
            return frozenset(found)
        except (NotImplementedError, RuntimeError) as error:  # sparse, meta, a wrapper without storage: the next ones
            log.debug("copied at once: %s", error)


_STORAGE, _CDATA = operator.methodcaller("untyped_storage"), operator.attrgetter("_cdata")
