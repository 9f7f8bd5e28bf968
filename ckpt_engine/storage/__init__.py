"""All disk verbs behind one small protocol: ``base`` says what they promise, ``posix`` does them."""

from ckpt_engine.storage.base import Entry, Progress, Storage
from ckpt_engine.storage.posix import PosixStorage

__all__ = ["Entry", "PosixStorage", "Progress", "Storage"]
