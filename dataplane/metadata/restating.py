"""What a shard's peer tells a new home: names whose place in the directory moved.

Sans-I/O. The directory and the homes of partitions hold nothing that their peers do not know: when
another peer takes a part of them over, it learns it from all the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataplane.metadata.columns import Array
from dataplane.metadata.groups import FREE
from dataplane.metadata.names import key_shards
from dataplane.metadata.roster import Roster
from dataplane.metadata.state import State
from dataplane.metadata.store import Store
from dataplane.wire.records import KEY
from dataplane.wire.rosters import KnownNames

NAMES_PER_MESSAGE = 65_536


def gained(old: Roster, new: Roster) -> dict[str, Array]:
    """Member -> per shard, whether its process was given it by the new roster.

    A process knows nothing of what another one at its address served; the first that is seen there
    counts as another, for it may have been started when rosters had long moved things to and fro.
    """
    numbers: dict[tuple[str, int], int] = {}
    moved = _lives(old, numbers)[old.primaries] != _lives(new, numbers)[new.primaries]
    after = np.unique(new.primaries[moved]).tolist()
    given = {new.members[member]: moved & (new.primaries == member) for member in after}
    return dict(sorted(given.items()))


def _lives(roster: Roster, numbers: dict[tuple[str, int], int]) -> Array:
    """A number for each member's process; equal ones have equal numbers."""
    pairs = zip(roster.members, roster.incarnations, strict=True)
    return np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs])


def names_for(store: Store, roster: Roster, given: Array, address: str) -> Iterator[KnownNames]:
    """The names of a store whose directory shard is among those `given` to another peer. All lie
    at `address`, so any of its shards says where."""
    mine = roster.mint_shards(address)
    if not len(mine):
        return
    for groups in (False, True):
        keys, named, minted = _keys(store.state, groups)
        if not len(keys):
            continue
        own = key_shards(keys)
        shard = np.minimum(own, roster.shards - 1)
        # A minted key is looked for at its own shard; it is entered where that leads elsewhere.
        stray = minted & (own < roster.shards) & (roster.primary(shard) != roster.primary(mine[0]))
        at_name = named & given[roster.directory_shards(store.partition, keys)]
        told = keys[at_name | stray & given[shard]]
        for start in range(0, len(told), NAMES_PER_MESSAGE):
            some = np.ascontiguousarray(told[start : start + NAMES_PER_MESSAGE], KEY).tobytes()
            yield KnownNames(store.partition, store.generation, groups, int(mine[0]), some)


def _keys(state: State, groups: bool) -> tuple[Array, Array, Array]:
    """(KEY of all rows, or groups, and of dropped ones; which of them may have a given name, and
    which a minted one)."""
    if groups:
        ids, index, names = (
            (state.groups.phase != FREE).nonzero()[0],
            state.groups.index,
            state.groups.names,
        )
    else:
        ids, index, names = state.live(), state.index, state.names
    # A dropped name says no more which kind it was, nor whether it was given: a few entries too
    # many do no harm, and it must be found.
    dropped = state.tombstones.keys()
    keys = np.concatenate([index.keys[ids], dropped])
    named, minted = np.ones((2, len(keys)), np.bool_)
    named[: len(ids)] = np.fromiter((id_ in names for id_ in ids.tolist()), np.bool_, len(ids))
    minted[: len(ids)] = ~named[: len(ids)]
    return np.ascontiguousarray(keys).view(KEY).reshape(-1), named, minted
