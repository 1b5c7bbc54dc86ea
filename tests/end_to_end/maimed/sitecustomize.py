"""Loaded by the interpreter of a peer that has this folder on its path: another release of it.

What its shards answer about a partition names its chunks as the partition's name says.
"""

from collections.abc import Sequence

import msgspec

from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.blocks import Rows
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.wire.tables import Table

answered = rows_out.table_of


def maimed(state: State, rows: Rows, values: OutgoingValues, groups: Sequence[bytes] = ()) -> Table:
    table = answered(state, rows, values, groups)
    how, said, change = state.partition.rpartition(" ")[2], table.values, msgspec.structs.replace
    if how == "nobody's":
        said = change(said, owners=[])
    elif how == "another's":
        said = change(said, chunks=[change(one, owner=7) for one in said.chunks])
    elif how == "last":
        said = change(said, chunks=[change(one, owner=-1) for one in said.chunks])
    elif how == "negative":
        said = change(said, chunks=[change(one, nbytes=-1) for one in said.chunks])
    return change(table, values=said)


rows_out.table_of = maimed
