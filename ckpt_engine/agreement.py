"""What all ranks agree on before the first save: the id of the root, and the number and name of the run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

from ckpt_engine import runs
from ckpt_engine.errors import CkptError, ConfigError, StorageError
from ckpt_engine.group import Group, Place
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.slots import Slot
from ckpt_engine.storage.base import Storage, make_dirs
from ckpt_engine.waits import Deadline, until

NFS_STALE_S = 75.0
"""An NFS client may not see a new name for 60 s."""


def agree_on_root(storage: Storage, group: Group, place: Place, root: str, layout: str) -> str:
    """The id of ``root``, drawn and written if it has none. Collective.

    Raises ConfigError: two different ids, a directory that is not shared though it should be, or not writable.
    """
    mine, problem = None, ""
    if place.leader:
        try:
            mine = runs.root_id(storage, root)
        except CkptError as error:
            problem = str(error)
    told = group.gather((mine, problem))
    _raise_first([text for _, text in told])
    ids = sorted({found for found, _ in told if found})
    if len(ids) > 1:
        raise ConfigError(f"{root} is not one root: the nodes found the ids {' and '.join(ids)}")
    drawn = group.gather(secrets.token_hex(8) if group.rank == 0 else "")[0]
    root_id: str = ids[0] if ids else drawn
    problem = ""
    writes = mine is None and (place.leader if layout == "node-local" else group.rank == 0 and not ids)
    try:
        if writes:
            make_dirs(storage, root)
            runs.adopt_root_id(storage, root, root_id)
    except StorageError as error:
        problem = f"the root {root} cannot be used: {error}"
    except CkptError as error:
        problem = str(error)
    _raise_first(group.gather(problem))
    if place.leader and mine is None and not until(lambda: runs.root_id(storage, root) == root_id, Deadline(NFS_STALE_S)):
        problem = (
            f"node {place.node} does not see the root id {root_id} in {root}: the directory is not shared. Use a shared "
            "one, or layout='node-local'"
        )
    _raise_first(group.gather(problem))
    return root_id


def agree_on_run(
    storage: Storage,
    group: Group,
    place: Place,
    root: str,
    layout: str,
    slots: Iterable[Slot],
    resumed_from: Attempt | None,
) -> RunClaim:
    """A new run: its generation is 1 + the highest that any root or slot header knows. Collective; claims nothing."""
    known = [slot.header() for slot in slots]
    highest = max((header.attempt.generation for header in known if header is not None), default=0)
    problem = ""
    if place.leader if layout == "node-local" else group.rank == 0:
        try:
            highest = max((highest, *(claim.generation for claim in runs.read_runs(storage, root))))
        except CkptError as error:
            problem = str(error)
    told = group.gather((highest, secrets.token_hex(8), problem))
    _raise_first([text for _, _, text in told])
    if resumed_from is not None:
        highest = max(highest, resumed_from.generation)
    generation = 1 + max(highest, *(number for number, _, _ in told))
    now = group.gather(int(time.time()))[0]
    return RunClaim(generation, told[0][1], resumed_from, group.world, now)


def _raise_first(problems: Iterable[str]) -> None:
    for rank, text in enumerate(problems):
        if text:
            raise ConfigError(f"rank {rank}: {text}")
