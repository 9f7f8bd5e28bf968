"""``latest`` is a hint that others may write: read with a limit, and never followed out of its directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.hostile import disk

from ckpt_engine.errors import RestoreError, StorageError
from ckpt_engine.integrations.deepspeed_shim import tag_in


@pytest.mark.parametrize("text", [b"..", b"../outside", b"a/../../x", b"/etc", b"tag\0x"])
def test_a_latest_that_leads_out_of_its_directory_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "latest").write_bytes(text)
    with pytest.raises(RestoreError, match="latest"):
        tag_in(disk, str(tmp_path / "latest"))


@pytest.mark.parametrize(
    "make",
    [
        os.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(b"x" * 5000),
    ],
)
def test_a_latest_that_is_no_small_file_is_an_error_that_names_it(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "latest")
    with pytest.raises(StorageError, match="latest"):
        tag_in(disk, str(tmp_path / "latest"))


def test_what_deepspeed_writes_is_read_as_it_is(tmp_path: Path) -> None:
    assert tag_in(disk, str(tmp_path / "latest")) == ""
    for text, tag in ((b"global_step10\n", "global_step10"), (b"a/b", "a/b"), (b"\xff", "\udcff"), (b"", "")):
        (tmp_path / "latest").write_bytes(text)
        assert tag_in(disk, str(tmp_path / "latest")) == tag
