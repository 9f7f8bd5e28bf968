"""A process that is stopped before every disk operation, and the disk that such processes share."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, ClassVar

from disk_model import ModelDisk, content

from ckpt_engine.errors import StorageError
from ckpt_engine.header import Header, SlotFile
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.names import SegmentName
from ckpt_engine.retention import Retention
from ckpt_engine.slots import DATA_OFFSET
from ckpt_engine.states import State, Word, check_transition

from .explorer import Violation

ROOT = "/root"
FILES = ("a_model_states.pt", "b.pt")


class Disk(ModelDisk):
    """A disk that can be copied and compared; slots of the nodes lie in it too, for they are as shared."""

    bytes_of: ClassVar[dict[int, bytes]] = {}
    number_of: ClassVar[dict[tuple[str, bytes], int]] = {}

    def __init__(self, other: ModelDisk | None = None) -> None:
        super().__init__()
        self.slots: dict[int, State] = {}
        self.data = Disk.bytes_of
        if other is not None:
            self.now, self.safe, self.pending = dict(other.now), dict(other.safe), list(other.pending)
            self.slots = dict(getattr(other, "slots", {}))

    def write_new(self, path: str, source: Any, **where: Any) -> bool:
        offset, nbytes = where.get("offset", 0), where.get("nbytes", -1)
        data = bytes(memoryview(source)[offset : None if nbytes < 0 else offset + nbytes])
        number = Disk.number_of.setdefault((path, data), len(Disk.number_of))
        self._room("write", path)
        if path in self.now:
            raise Violation(f"two writers of {path}")
        Disk.bytes_of[number] = data
        self._set(path, number)
        return False

    def slot_state(self, rank: int) -> State:
        return self.slots[rank]

    def slot_change(self, rank: int, old: State, new: State) -> bool:
        check_transition("saver", old, new)
        if self.slots[rank] is not old:
            return False
        self.slots[rank] = new
        return True

    def key(self) -> Any:
        slots = tuple(sorted((rank, int(state)) for rank, state in self.slots.items()))
        power = (frozenset(self.safe.items()), tuple(self.pending)) if self.slots else ()
        return frozenset(self.now.items()), power, slots


READS = ("list_dir", "read_small", "size", "same_file", "crc_of_file", "free_bytes", "slot_state")


class Paused(BaseException):
    """The process wants to do this now."""


class Replayed:
    """What a process takes for its disk: old answers come again, then it is stopped."""

    VERBS = (
        "write_new", "rename", "link", "unlink", "make_dir", "remove_dir", "sync_dir", "sync_file", "list_dir",
        "read_small", "crc_of_file", "size", "same_file", "free_bytes", "slot_state", "slot_change",
    )  # fmt: skip

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for answer in self._answers:
                if isinstance(answer, StorageError):
                    raise answer
                return answer
            raise Paused(verb, args, kwargs)

        if verb not in self.VERBS:
            raise AttributeError(verb)
        return call


class ModelSlot:
    """The part of ``slots.Slot`` that the writer uses, over the shared disk."""

    progress_offset = 0

    def __init__(self, storage: Any, header: Header) -> None:
        self._storage, self._header = storage, header
        self.name = SegmentName("0" * 16, 0, 0, 1)
        self.memory = bytes(DATA_OFFSET) + b"".join(content(header.attempt, file.name) for file in header.files)

    def word(self) -> Word:
        return Word(self._storage.slot_state(self._header.rank))

    def change(self, actor: str, old: Word, state: State) -> bool:
        return bool(self._storage.slot_change(self._header.rank, old.state, state))

    def flags(self) -> int:
        return 0

    def reset_progress(self) -> None:
        pass

    def put_error(self, failure: Any) -> None:
        raise Violation(f"a write failed: {failure}")


def header_of(attempt: Attempt, claim: RunClaim, rank: int, nodes: int, keep_last: int | None) -> Header:
    table, offset = [], 0
    for name in files_of(rank):
        data = content(attempt, name)
        table.append(SlotFile(name, offset, len(data), zlib.crc32(data)))
        offset += len(data)
    return Header(
        attempt, claim, rank, 0, nodes, rank, nodes, (rank,), "shared", ROOT, f"{ROOT}/{attempt.tag}",
        Retention(keep_last=keep_last), None, True, tuple(table),
    )  # fmt: skip


def files_of(rank: int) -> tuple[str, ...]:
    return FILES[rank : rank + 1]
