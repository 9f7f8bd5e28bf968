"""The lives of a root that are cut at every step; each acts on a disk that holds one committed checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disk_model import attempt_of, claim_of, content

from .checks import require
from .fault_disk import FaultDisk
from .savers import ROOT, Act, Files, History, Pair, World, begin_root

FILES: Files = {0: ("mp_rank_00_model_states.pt", "sub/dir/a.pt"), 1: ("zero_1_optim_states.pt", "zero_to_fp32.py")}
OTHERS: Files = {0: ("mp_rank_00_model_states.pt", "sub/dir/a.pt", "sub/b.pt"), 1: ()}
FEWER: Files = {0: ("mp_rank_00_model_states.pt",), 1: ("other.pt",)}
BEFORE = attempt_of(1, "global_step10")


def prepared(files: Files = FILES, **how: Any) -> World:
    """A root with ``BEFORE`` committed, all of it durable."""
    world = World(FaultDisk(), History())
    begin_root(world.disk)
    require(world.saver(**how).save(BEFORE, files).status == "committed", "the first checkpoint is committed")
    return World(world.disk.settled(), world.history)


def first_save(world: World) -> None:
    """A second checkpoint beside the first."""
    world.saver().save(attempt_of(2, "global_step20"), FILES)


def first_of_a_root(world: World) -> None:
    """Nothing was here before."""
    begin_root(world.disk)
    world.saver().save(attempt_of(2, "global_step20"), FILES)


def re_save(world: World) -> None:
    """The tag is saved anew, twice: names stay, go and come, also in directories."""
    saver = world.saver()
    saver.save(attempt_of(2, BEFORE.tag), OTHERS)
    saver.save(attempt_of(3, BEFORE.tag), FEWER)


def roll_back(world: World) -> None:
    """A run goes on from the first checkpoint and saves a tag that the abandoned line has saved, too."""
    world.saver().save(attempt_of(2, "global_step20"), FILES)
    claim = claim_of(2, BEFORE, "1" * 16)
    world.saver().save(attempt_of(0, "global_step20", 2, claim.run), FEWER, claim)


def retention(world: World) -> None:
    """One is kept: each save removes its predecessor."""
    saver = world.saver(keep_last=1)
    saver.save(attempt_of(2, "global_step20"), OTHERS)
    saver.save(attempt_of(3, "global_step30"), FEWER)


def framework(world: World) -> None:
    """DeepSpeed makes the tag and writes files of its own, none of it synced; the saver seals them."""
    tag, names = "framework", ("mp_rank_00_model_states.pt", "sub/dir/a.pt")
    attempt = attempt_of(2, tag)
    for folder in (tag, f"{tag}/sub", f"{tag}/sub/dir"):
        world.disk.make_dir(f"{ROOT}/{folder}")
    for name in names:
        world.disk.foreign_write(f"{ROOT}/{tag}/{name}", content(attempt, name))
    world.saver().save(attempt, {0: tuple(f"ext:{name}" for name in names), 1: ("w.pt",)})


def node_local(world: World) -> None:
    """A root of one node of two: its own manifest, a tag saved anew, retention."""
    saver = world.saver(nodes=2, layout="node-local", keep_last=1)
    for seq, tag in ((2, "global_step20"), (3, "global_step20"), (4, "global_step40")):
        saver.save(attempt_of(seq, tag), {0: OTHERS[0] if seq == 3 else FILES[0]})


def pair(tag: str, keep_last: int | None = None, names: tuple[str, ...] = OTHERS[0]) -> Callable[[], Pair]:
    """Two nodes with a rank each; the saver of node 0 has made its receipt and looks for the other's."""

    def begin() -> Pair:
        world = prepared()
        attempt = attempt_of(2, tag)
        one, other = (world.saver(node=node, nodes=2, keep_last=keep_last) for node in (0, 1))
        world.history.begin(attempt)
        world.history.publishers = 1 + (tag == BEFORE.tag)
        one.persist(attempt, {0: names}, claim_of(1))
        one.committer._pass()

        def first() -> None:
            other.persist(attempt, {1: FILES[1]}, claim_of(1))
            other.end()

        def done() -> bool:
            ends = [saver.outcome is not None and saver.outcome.status for saver in (one, other)]
            return ends == ["committed"] * 2

        return Pair(world, first, one.committer._pass, done)

    return begin


PAIRS: dict[str, Callable[[], Pair]] = {
    "two_first_saves": pair("global_step20"),
    "two_re_saves": pair(BEFORE.tag),
    "two_re_saves_of_fewer": pair(BEFORE.tag, names=("mp_rank_00_model_states.pt",)),
    "two_retentions": pair("global_step20", keep_last=1),
}

SCENARIOS: dict[str, tuple[Act, Callable[[], World]]] = {
    "first_save": (first_save, prepared),
    "first_of_a_root": (first_of_a_root, lambda: World(FaultDisk(), History())),
    "re_save": (re_save, prepared),
    "roll_back": (roll_back, prepared),
    "retention": (retention, prepared),
    "framework": (framework, prepared),
    "node_local": (node_local, lambda: prepared({0: FILES[0]}, nodes=2, layout="node-local")),
}
