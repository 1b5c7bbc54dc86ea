"""Changes of rows that move no bytes: tags and drops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dataplane.client import arguments
from dataplane.client.core import Deadline, Handle, Operation, ask
from dataplane.client.write.rows import (
    Index,
    Names,
    TagValues,
    chunks,
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


class Dropped(NamedTuple):
    """What a drop took away."""

    rows: int
    bytes: int


def tag(
    handle: Handle,
    keys: Names,
    tags: TagValues,
    expect: Mapping[str, Scalar] | None,
    timeout: float | None,
) -> Operation[None]:
    names = name_list(keys, "key")
    columns = tag_columns(tags, len(names))
    expected = {n: v[0] for n, v in tag_columns(expect, 1).items()} if expect is not None else None
    deadline = Deadline(timeout)
    generation = yield from handle.attach(deadline)
    size = handle.session.max_rows
    for start in range(0, len(names), size):
        part = names[start : start + size]
        at: Index = np.arange(start, start + len(part), dtype=np.intp)
        body = Tag(handle.name, generation, named_rows(part), take_tags(columns, at), expected)
        yield from ask(body, Done, deadline)


def drop(
    handle: Handle,
    keys: Names | None,
    groups: Names | None,
    where: Where | None,
    timeout: float | None,
) -> Operation[Dropped]:
    """One message, but for very long lists of keys or groups."""
    if sum(a is not None for a in (keys, groups, where)) > 1:
        raise InvalidCall(
            "drop takes one of keys=, groups=, where=, or nothing: the whole partition"
        )
    deadline = Deadline(timeout)
    generation = yield from handle.attach(deadline)
    name, size = handle.name, handle.session.max_rows
    bodies: list[Drop]
    if keys is not None:
        parts = chunks(name_list(keys, "key", ordered=False), size)
        bodies = [Drop(name, generation, rows=named_rows(part)) for part in parts]
    elif groups is not None:
        parts = chunks(name_list(groups, "group", ordered=False), size)
        bodies = [Drop(name, generation, groups=part) for part in parts]
    else:
        bodies = [Drop(name, generation, where=arguments.filter_of(where))]
    rows = nbytes = 0
    for body in bodies:
        done = yield from ask(body, messages.Dropped, deadline)
        rows += done.rows
        nbytes += done.bytes
    return Dropped(rows, nbytes)
