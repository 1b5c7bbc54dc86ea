"""Change rows without moving values: set tags, drop rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dataplane.client import arguments
from dataplane.client._async.calls import ask, attach
from dataplane.client.arguments import Deadline
from dataplane.client.ref import Dropped
from dataplane.client.session.session import Handle
from dataplane.client.write.rows import (
    Index,
    Names,
    TagValues,
    in_parts,
    name_list,
    named_rows,
    tag_columns,
    take_tags,
)
from dataplane.errors import InvalidCall
from dataplane.metadata.tables.where import Where
from dataplane.wire import messages
from dataplane.wire.messages import Done, Drop, Tag
from dataplane.wire.tables import Scalar


async def tag(
    handle: Handle,
    keys: Names,
    tags: TagValues,
    expect: Mapping[str, Scalar] | None,
    timeout: float | None,
) -> None:
    """Set tags of rows, with at most `max_rows` rows per message."""
    names = name_list(keys, "key")
    columns = tag_columns(tags, len(names))
    expected = {n: v[0] for n, v in tag_columns(expect, 1).items()} if expect is not None else None
    deadline = Deadline(timeout)
    generation = await attach(handle, deadline)
    size = handle.session.max_rows
    for start in range(0, len(names), size):
        part = names[start : start + size]
        at: Index = np.arange(start, start + len(part), dtype=np.intp)
        body = Tag(handle.name, generation, named_rows(part), take_tags(columns, at), expected)
        await ask(handle.session, body, Done, deadline)


async def drop(
    handle: Handle,
    keys: Names | None,
    groups: Names | None,
    where: Where | None,
    timeout: float | None,
) -> Dropped:
    """Drop rows, with one message unless the list of keys or groups is very long."""
    if sum(a is not None for a in (keys, groups, where)) > 1:
        raise InvalidCall(
            "drop() got more than one of keys=, groups= and where=: pass only one, or none to drop "
            "the whole partition"
        )
    deadline = Deadline(timeout)
    generation = await attach(handle, deadline)
    name, size = handle.name, handle.session.max_rows
    bodies: list[Drop]
    if keys is not None:
        parts = in_parts(name_list(keys, "key", ordered=False), size)
        bodies = [Drop(name, generation, rows=named_rows(part)) for part in parts]
    elif groups is not None:
        parts = in_parts(name_list(groups, "group", ordered=False), size)
        bodies = [Drop(name, generation, groups=part) for part in parts]
    else:
        bodies = [Drop(name, generation, where=arguments.filter_of(where))]
    rows = nbytes = 0
    for body in bodies:
        done = await ask(handle.session, body, messages.Dropped, deadline)
        handle.session.warn_of_tags(name, done.unknown_tags)
        rows += done.rows
        nbytes += done.bytes
    if keys is None and groups is None and where is None:
        handle.session.leases.end(name)
    return Dropped(rows, nbytes)
