"""Who serves a node: ranks that join, savers that retire, another version, and all of them dying in between.

Locks are what they are in production: tied to a file, and a retiring saver removes the directory with the files in
it. So ``home`` counts the directories there have been, and a lock on a file of an older one means nothing. What a
rank does about the saver it finds, and whether a saver stays, is production's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpt_engine.control import PROTOCOL, RankPage, SaverPage
from ckpt_engine.link import what_next
from ckpt_engine.names import Names
from ckpt_engine.saver.peers import Peer, Peers

OLD = "an older version"


class Rank(NamedTuple):
    at: str = "out"  # out, spawn (wants spawn.lock), locked, look, ready, gone
    home: int = 0  # the directory its lock file lies in
    alive: bool = False


class Saver(NamedTuple):
    at: str = "born"  # born, serving, spawn (wants to retire), leaving, dead
    home: int = 0
    version: str = PROTOCOL
    asked: bool = False


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    savers: tuple[Saver, ...] = ()
    home: int = 0  # 0: no run directory
    homes: int = 0
    spawn: tuple[str, int, int] | None = None  # (who, number, directory) holds spawn.lock
    deaths: int = 0


class Joining:
    """``old``: the saver that is there at first is of another version."""

    def __init__(self, *, ranks: int = 2, savers: int = 4, deaths: int = 1, old: bool = False) -> None:
        self.name = "join and retire" + (", another version" if old else "")
        self.bounds = f"{ranks} ranks, {savers} savers, {deaths} deaths"
        self._ranks, self._savers, self._deaths, self._old = ranks, savers, deaths, old

    def world(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self) -> Iterable[World]:
        there = (Saver("serving", 1, OLD),) if self._old else ()
        yield World((Rank(),) * self._ranks, there, home=int(self._old), homes=int(self._old))

    def wrong(self, world: World) -> str:
        serving = [
            saver for saver in world.savers if saver.at in ("serving", "spawn", "judged") and saver.home == world.home
        ]
        if len(serving) > 1:
            return "two savers serve one directory"
        for number, rank in enumerate(world.ranks):
            if rank.alive and rank.at in ("look", "ready") and rank.home != world.home:
                return f"rank {number} registered, and its directory was removed"
        return ""

    def rests(self, world: World) -> str:
        for number, rank in enumerate(world.ranks):
            if rank.at not in ("gone", "ready") and (rank.alive or rank.at == "out"):
                return f"rank {number} waits for ever (at {rank.at})" if self._room(world) else ""
            if rank.at == "ready" and not serving(world) and self._room(world):
                return f"rank {number} has no saver"
        if any(saver.at not in ("dead", "serving") for saver in world.savers):
            return "a saver waits for ever"
        if not any(rank.alive for rank in world.ranks) and serving(world):
            return "nobody is left, and the saver stays"
        return ""

    def _room(self, world: World) -> bool:
        return len(world.savers) < self._savers

    # -- what may happen -----------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        for number, rank in enumerate(world.ranks):
            if rank.alive or rank.at == "out":
                for step, after in self._rank(world, number, rank):
                    yield f"rank {number} {step}", after
            if rank.alive and world.deaths < self._deaths:
                after = put(world, number, at="gone", alive=False)._replace(deaths=world.deaths + 1)
                yield f"! rank {number} dies (at {rank.at})", free(after, "rank", number)
        for number, saver in enumerate(world.savers):
            if saver.at != "dead":
                for step, after in self._saver(world, number, saver):
                    yield f"saver {number} {step}", after
                if world.deaths < self._deaths:
                    after = put_saver(world, number, at="dead")._replace(deaths=world.deaths + 1)
                    yield f"! saver {number} dies (at {saver.at})", free(after, "saver", number)

    def _rank(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        if rank.at == "out":
            world, home = make_home(world)
            yield "makes the run directory and opens spawn.lock", put(world, number, at="spawn", home=home, alive=True)
        elif rank.at == "spawn":
            if rank.home != world.home:
                world, home = make_home(world)
                yield "finds the directory removed, and makes it again", put(world, number, home=home)
            elif world.spawn is None:
                held = world._replace(spawn=("rank", number, world.home))
                yield "takes spawn.lock and its own lock", put(held, number, at="locked")
        elif rank.at == "locked":
            if holder(world) is None and self._room(world):
                world = world._replace(savers=(*world.savers, Saver(home=0)))
                yield "starts a saver", world
            elif holder(world) is not None or not self._room(world):
                yield "lets go of spawn.lock", free(put(world, number, at="look"), "rank", number)
        elif rank.at == "look":
            record = page(world)
            todo = what_next(record)
            if todo == "use":
                yield "is served", put(world, number, at="ready")
            elif todo == "ask to leave":
                found = holder(world)
                assert found is not None
                if not world.savers[found].asked:
                    yield f"asks saver {found} to leave", put_saver(world, found, asked=True)
            elif todo == "start" and world.spawn is None and self._room(world):
                held = world._replace(spawn=("rank", number, world.home))
                yield "takes spawn.lock to start a saver", put(held, number, at="locked")
        elif rank.at == "ready":
            if holder(world) is None:
                if self._room(world):
                    yield "notices that its saver is gone", put(world, number, at="look")
            else:
                yield "says goodbye", put(world, number, at="gone", alive=False)

    def _saver(self, world: World, number: int, saver: Saver) -> Iterator[tuple[str, World]]:
        living = tuple(rank.alive and rank.home == world.home and rank.at != "spawn" for rank in world.ranks)
        if saver.at == "born":
            world, home = make_home(world)
            if holder(world) is None:
                yield "takes its lock", put_saver(world, number, at="serving", home=home)
            else:
                yield "finds another", put_saver(world, number, at="dead")
        elif saver.at == "serving":
            if saver.asked:
                yield "leaves as asked", put_saver(world, number, at="leaving")
            elif not any(living) and world.spawn is None and self._began(world):
                held = world._replace(spawn=("saver", number, world.home))
                yield "is alone and takes spawn.lock", put_saver(held, number, at="spawn")
        elif saver.at == "spawn":
            peers = Peers(Names("0" * 16), 0.0)
            peers.update((rank, Peer(RankPage(), alive)) for rank, alive in enumerate(living))
            if not peers.any_alive:
                gone = free(put_saver(world, number, at="leaving"), "saver", number)
                yield "removes the directory", gone._replace(home=0)
            else:
                yield "stays, a rank is back", free(put_saver(world, number, at="serving"), "saver", number)
        elif saver.at == "leaving":
            yield "ends", put_saver(world, number, at="dead")

    def _began(self, world: World) -> bool:
        """A young saver waits for the rank that wants it (``grace_s``), or until all have come and gone."""
        return all(rank.at in ("gone", "spawn", "out") for rank in world.ranks) and any(
            rank.at == "gone" for rank in world.ranks
        )


def serving(world: World) -> bool:
    return any(saver.at == "serving" and saver.home == world.home for saver in world.savers)


def holder(world: World) -> int | None:
    """Who holds the saver's lock, on the file that lies there now."""
    for number, saver in enumerate(world.savers):
        if saver.at in ("serving", "spawn", "leaving") and saver.home == world.home and world.home:
            return number
    return None


def page(world: World) -> SaverPage | None:
    number = holder(world)
    if number is None:
        return None
    saver = world.savers[number]
    leaving = saver.at == "leaving"
    return SaverPage(pid=number + 1, version=saver.version, ready=not leaving, leaving=leaving)


def make_home(world: World) -> tuple[World, int]:
    if not world.home:
        world = world._replace(home=world.homes + 1, homes=world.homes + 1)
    return world, world.home


def put(world: World, number: int, **changes: object) -> World:
    ranks = list(world.ranks)
    ranks[number] = ranks[number]._replace(**changes)  # type: ignore[arg-type]
    return world._replace(ranks=tuple(ranks))


def put_saver(world: World, number: int, **changes: object) -> World:
    savers = list(world.savers)
    savers[number] = savers[number]._replace(**changes)  # type: ignore[arg-type]
    return world._replace(savers=tuple(savers))


def free(world: World, who: str, number: int) -> World:
    """The kernel lets go of what a process held; so does the process when it is done."""
    return world._replace(spawn=None) if world.spawn and world.spawn[:2] == (who, number) else world
