"""Control pages: a reader finds one whole record at any instant, whoever died while writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine import _C, shm
from ckpt_engine.control import Outcome, Page, RankPage, SaverPage
from ckpt_engine.errors import CkptError

NAME = "/ckpt-test-control-page"


@pytest.fixture
def page() -> Iterator[Page]:
    shm.unlink(NAME)
    it = Page.own(NAME)
    yield it
    it.close()
    shm.unlink(NAME)


def test_a_record_comes_back_as_it_went_and_an_empty_page_is_none(page: Page) -> None:
    assert page.read(RankPage) is None
    record = RankPage(pid=7, rank=3, entered=(2, 9), label=b"\0\xff", outcome="failed", reason="köln", goodbye=True)
    page.write(record)
    other = Page.find(NAME)
    assert other is not None and other.read(RankPage) == record
    other.close()


def test_sixty_four_outcomes_with_long_reasons_stay_in_the_ring(page: Page) -> None:
    ring = tuple(
        Outcome((1, number), "0" * 16, "failed", "StorageError", 3, "x" * 200, "write", "/p" * 50, 28)
        for number in range(64)
    )
    record = SaverPage(pid=1, version="v", epoch=2, ready=True, outcomes=ring)
    assert Page.fits(record)
    page.write(record)
    assert page.read(SaverPage) == record


def test_a_record_is_read_once_and_again_when_it_has_changed(page: Page) -> None:
    reader = Page.find(NAME)
    assert reader is not None
    for rank in range(4):
        page.write(RankPage(rank=rank))
        first = reader.read(RankPage)
        assert first == RankPage(rank=rank) and reader.read(RankPage) is first
    assert reader.read(SaverPage) == SaverPage(), "the same bytes as another kind"
    assert reader.read(RankPage) == RankPage(rank=3)
    reader.close()


def test_a_record_that_cannot_fit_is_refused_and_the_old_one_stays(page: Page) -> None:
    page.write(RankPage(rank=1))
    with pytest.raises(CkptError, match="does not fit"):
        page.write(RankPage(label=b"x" * 100_000))
    assert page.read(RankPage) == RankPage(rank=1)


def test_the_longest_paths_there_are_fit_a_label(page: Page) -> None:
    page.write(RankPage(label=b"x" * 2 * 4096, reason="r" * 500))
    assert page.read(RankPage) is not None


def test_a_writer_that_died_anywhere_in_a_write_leaves_the_previous_record(page: Page) -> None:
    page.write(RankPage(rank=1))
    page.write(RankPage(rank=2))
    memory = page._mapping.memory
    counter = _C.load(memory, 8)
    start = 4096 + ((counter + 1) & 1) * 30720
    memory[start : start + 200] = b"\xff" * 200  # the next record, half written
    assert page.read(RankPage) == RankPage(rank=2)


def test_garbage_in_the_current_copy_is_no_record(page: Page) -> None:
    page.write(RankPage(rank=1))
    memory = page._mapping.memory
    start = 4096 + (_C.load(memory, 8) & 1) * 30720
    for position in (start, start + 4, start + 9):
        was = memory[position]
        memory[position] = was ^ 0x40
        assert page.read(RankPage) is None
        memory[position] = was
    assert page.read(RankPage) == RankPage(rank=1)


def test_fields_of_a_newer_version_are_ignored(page: Page) -> None:
    import msgpack

    from ckpt_engine import control

    plain = control._pack
    control._pack = lambda record: msgpack.packb({"rank": 5, "invented": [1, 2]})  # type: ignore[assignment]
    try:
        page.write(RankPage())
    finally:
        control._pack = plain
    assert page.read(RankPage) == RankPage(rank=5)


@pytest.mark.parametrize("content", [b"", b"CKPT", b"CKPTPAGE" + bytes(4088), b"NOTAPAGE" + bytes(65528)])
def test_what_is_no_page_is_not_found_and_is_replaced_by_its_owner(content: bytes) -> None:
    path = Path("/dev/shm" + NAME)
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        assert Page.find(NAME) is None
        page = Page.own(NAME)
        page.write(RankPage(rank=4))
        assert page.read(RankPage) == RankPage(rank=4)
        page.close()
    finally:
        path.unlink()


def test_only_the_saver_of_that_epoch_is_asked_to_leave(page: Page) -> None:
    page.ask_to_leave(3)
    assert page.asked_to_leave(3) and not page.asked_to_leave(4)


def test_a_page_whose_name_was_removed_knows_it(page: Page) -> None:
    assert not page.unlinked()
    shm.unlink(NAME)
    assert page.unlinked()
