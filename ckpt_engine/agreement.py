"""What ranks agree on before the first save: the id of the root, number and name of the run, and what it leaves."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

from ckpt_engine import listing, runs
from ckpt_engine.buffers import Buffers
from ckpt_engine.errors import CkptError, ConfigError, StorageError
from ckpt_engine.events import log
from ckpt_engine.group import Group, Place, together
from ckpt_engine.header import Header
from ckpt_engine.manifest import Attempt, RunClaim
from ckpt_engine.metrics import Metric
from ckpt_engine.states import LEASED, Order, State
from ckpt_engine.storage.base import Storage
from ckpt_engine.waits import Deadline, until

NFS_STALE_S = 75.0
"""An NFS client may not see a new name for 60 s."""


def agree_on_root(storage: Storage, group: Group, place: Place, root: str, layout: str) -> str:
    """The id of ``root``, drawn and written if it has none. Collective.

    Raises ConfigError on all ranks: different directories or ids where one root is shared, or it cannot be used.
    """

    def look() -> tuple[str, str | None, str]:
        return root, runs.root_id(storage, root) if place.leader else None, secrets.token_hex(8)

    told = together(group, look)
    roots = sorted({path for path, _, _ in told})
    if len(roots) > 1 and layout == "shared":
        raise ConfigError(f"the ranks were given different roots {roots[:4]}: a shared root is one directory for all")
    ids = sorted({found for _, found, _ in told if found})
    if len(ids) > 1:
        raise ConfigError(f"{' and '.join(roots)} is not one root: the nodes found the ids {' and '.join(ids)}")
    drawn: str = ids[0] if ids else told[0][2]
    unknown = place.leader and told[group.rank][1] is None

    def adopt() -> str:
        if unknown and place.reads_root(layout) and (layout == "node-local" or not ids):
            try:
                runs.adopt_root_id(storage, root, drawn)
            except StorageError as error:
                raise ConfigError(f"the root {root} cannot be used: {error}") from error
            except ConfigError:
                faster = runs.root_id(storage, root) if layout == "shared" else None
                if faster is None:
                    raise
                return faster  # another job came to this new root in the same instant
        return drawn

    def see() -> None:
        if unknown and not until(lambda: _shows(storage, root, root_id), Deadline(NFS_STALE_S), every_s=0.1):
            raise ConfigError(
                f"node {place.node} does not see the root id {root_id} in {root}: the directory is not shared. Use a "
                "shared one, or layout='node-local'"
            )

    root_id: str = together(group, adopt)[0]
    together(group, see)
    return root_id


def agree_on_run(
    storage: Storage,
    group: Group,
    place: Place,
    root: str,
    layout: str,
    held: Iterable[Header],
    resumed_from: Attempt | None,
) -> RunClaim:
    """A new run: its generation is 1 + the highest that any root or slot header knows. Collective; claims nothing."""

    def look() -> tuple[int, str, int]:
        known = [0 if resumed_from is None else resumed_from.generation]
        known += [header.attempt.generation for header in held]
        if place.reads_root(layout):
            known.append(listing.highest_generation(storage, root))
        return max(known), secrets.token_hex(8), int(time.time())

    told = together(group, look)
    highest = max(known for known, _, _ in told)
    if highest >= 2**63 - 1:
        raise ConfigError(
            f"there is no generation after {highest}, which a name in {root} claims: remove .run-{highest}, or what "
            "else has this number in its name"
        )
    return RunClaim(1 + highest, told[0][1], resumed_from, group.world, told[0][2])


def agree_on_confirmed(
    storage: Storage, group: Group, place: Place, root: str, metrics: tuple[Metric, ...]
) -> tuple[Order | None, tuple[Metric, ...]]:
    """Node-local roots: the newest attempt that every node has committed, as far as this save knows. Collective.

    And the ``metrics`` of rank 0, so that every node judges by the same.
    """
    mine: Order | None = None
    if place.leader:
        try:
            own = runs.root_id(storage, root)
            found = [one for one in listing.list_committed(storage, root).committed if one.manifest.node == place.node]
            mine = max((one.order for one in found if one.manifest.attempt.root_id == own), default=(0, 0))
        except CkptError:  # nothing is confirmed, so nothing is removed
            mine = (0, 0)
    told = group.gather((mine, metrics))
    return min((order for order, _ in told if order is not None), default=None), told[0][1]


def leave_other_lines(storage: Storage, root: str, buffers: Buffers, claim: RunClaim) -> None:
    """Before the first fill of a run: free this rank's slots of what it did not resume from (invariant 9)."""
    held = [found[1].claim for slot in buffers.node_slots() if (found := slot.snapshot())]
    known = (*held, claim)
    try:
        known = (*runs.read_runs(storage, root), *known)
    except StorageError as error:  # a memory save does not depend on the disk; the saver looks again
        log.warning("cannot tell which snapshots were abandoned, those in the saver's hands stay: %s", error)

    def unwanted(header: Header, state: State) -> bool:
        return runs.left_behind(header.attempt, claim, known, leased=state in LEASED)

    buffers.drop(unwanted)


def _shows(storage: Storage, root: str, root_id: str) -> bool:
    try:
        return runs.root_id(storage, root) == root_id
    except CkptError:
        return False
