"""The harness itself: what other tests rely on."""

from __future__ import annotations

from typing import Any

import pytest
from harness import NOBODY, Lab, Process, alive, until


def saves(me: Any) -> None:
    with me.engine() as engine:
        me.say("ready")
        me.hear("save")
        staged = engine.save_to_memory(1, {"w.pt": {"w": me.coded(1)}})
        me.say("saved", step=staged.step)
        me.hear("leave")


def speaks(me: Any, word: str) -> None:
    me.say(word, rank=me.rank, world=me.world)


def fails(me: Any) -> None:
    raise ValueError("on purpose")


def test_a_rank_and_its_test_talk_in_lines_and_a_clean_end_leaves_nothing(lab: Lab) -> None:
    rank = lab.rank(saves)
    rank.expect("ready")
    saver = lab.saver()
    assert saver and alive(saver) and lab.savers() == [saver]
    rank.tell("save")
    assert rank.expect("saved")["step"] == 1
    rank.tell("leave")
    rank.end()
    until(lambda: not lab.savers() and not lab.left(), 10)


def test_four_ranks_meet_in_one_group(lab: Lab) -> None:
    ranks = lab.ranks(saves, world=4)
    for rank in ranks:
        rank.expect("ready")
        rank.tell("save")
    for rank in ranks:
        rank.expect("saved")
        rank.tell("leave")
    for rank in ranks:
        rank.end()


def test_a_failing_program_tells_its_exception(lab: Lab) -> None:
    rank = lab.rank(fails)
    assert rank.expect("raised") == {"event": "raised", "type": "ValueError", "text": "on purpose"}
    assert rank.join() == 1
    with pytest.raises(AssertionError, match="ended; 'more' was expected"):
        rank.expect("more")


def test_what_a_test_leaves_behind_is_found_and_removed(lab: Lab) -> None:
    inner = Lab()
    rank = inner.rank(saves)
    rank.expect("ready")
    saver = inner.saver()
    assert saver
    left = inner.left()
    assert any("saver-ctl" in name for name in left) and any(name.endswith("-events") for name in left)
    rank.kill()
    assert any("saver" in line for line in inner.close(patience_s=0))
    assert not alive(saver) and not inner.left()


@pytest.mark.skipif("os.geteuid() != 0")
def test_ranks_can_be_another_user_or_live_in_a_small_shm(lab: Lab) -> None:
    def told(process: Process) -> Any:
        return process.expect("hello")

    assert told(lab.rank(speaks, "hello", uid=NOBODY))["world"] == 1
    assert told(lab.rank(speaks, "hello", within=lab.small_shm("4m")))["rank"] == 0
    lab.clear()
