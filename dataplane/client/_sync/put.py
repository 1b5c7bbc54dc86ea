"""put: check the arguments, plan the messages, send them, and return a `Ref` of the rows.

A put checks all of its arguments before it sends the first message. A later error would leave rows
that a second put without keys would store twice.


Generated from dataplane/client/_async/put.py: change that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.client._sync.attaching import attach, comes_too_late
from dataplane.client._sync.backend import offload
from dataplane.client._sync.other_memory import OtherPart
from dataplane.client._sync.write import Putting, row_cost
from dataplane.client.arguments import flag, texts
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.ref import Ref
from dataplane.client.session.slabs import AHEAD_BYTES
from dataplane.client.write import schema
from dataplane.client.write.chunks import UNIT_BYTES, Unit, order_of, plan
from dataplane.client.write.columns import ValueColumn, by_name, prepare
from dataplane.client.write.rows import (
    Names,
    TagValues,
    check_groups,
    check_names,
    identify,
    name_list,
    row_names,
    tag_columns,
)
from dataplane.errors import DataplaneError, FieldExists, InvalidRows, RowsGone, counted
from dataplane.wire.foreign import pairs_of
from dataplane.wire.tables import Name

if TYPE_CHECKING:
    from dataplane.gpu.client.puts import OnDevice

log = logging.getLogger(__name__)

SHOWN_NAMES = 8
"""An error lists at most this many keys and group ids."""


def put(
    handle: Handle,
    columns: Mapping[str, Any],
    key: Names | None,
    group: Names | Sequence[Name | None] | None,
    tags: TagValues | None,
    dedup: Collection[str],
    replace: bool,
    reuse: bool,
    timeout: float | None,
) -> Ref:
    """Put rows, and return a Ref of them. In a loop over `producing`, a put that arrives after the
    partition was sealed or dropped stores nothing and returns a Ref without rows."""
    try:
        return _put(handle, columns, key, group, tags, dedup, replace, reuse, timeout)
    except DataplaneError as exc:
        if not comes_too_late(handle, exc):
            raise
        log.info(
            "partition %r: put() in a producing() loop came too late and stored nothing: %s",
            handle.name,
            exc.message,
        )
    session = handle.session
    return Ref(session.plane, session.peer, handle.name, handle.generation, b"", None, (), ())


def _put(
    handle: Handle,
    columns: Mapping[str, Any],
    key: Names | None,
    group: Names | Sequence[Name | None] | None,
    tags: TagValues | None,
    dedup: Collection[str],
    replace: bool,
    reuse: bool,
    timeout: float | None,
) -> Ref:
    """Write rows, run by run; PutIncomplete where some runs are in and one failed."""
    session, deadline, began = handle.session, Deadline(timeout), time.monotonic()
    columns = by_name(columns)
    if isinstance(columns, (dict, Mapping)):
        # its own way to iterate may be another one
        columns = pairs_of("the mapping of columns", columns, InvalidRows)
    dedup = texts(dedup, "dedup")
    replace, reuse = flag(replace, "replace"), flag(reuse, "reuse")
    names = None if key is None else name_list(key, "key")
    n = None if names is None else len(names)
    prepared, others = _prepare(handle, columns, n, dedup, deadline)
    if handle.defined is None:
        attach(handle, deadline)
        if handle.definition.fields:
            prepared, others = _prepare(handle, columns, n, dedup, deadline)
    n = (prepared or others[0].columns)[0].count
    identity = identify(session, n, names, group)
    tagged = tag_columns(tags, n)
    if tagged:
        tagged = {tag: v * n if len(v) == 1 else v for tag, v in tagged.items()}
    order = order_of(identity.groups)
    units: list[list[Unit]] = offload(
        lambda: plan(
            prepared,
            identity.groups,
            handle.takes_inline(),
            min(UNIT_BYTES, session.share_bytes[0] // 4),
            identity.group_names,
            [one.columns for one in others],
            order,
        ),
        (n << 6) + (AHEAD_BYTES if dedup else 0),
    )
    generation = attach(handle, deadline)
    check_groups(identity, handle.definition.group_size)
    work = Putting(handle, generation, identity, tagged, replace, deadline, began, reuse)
    if order is not None:
        work.order = np.array(order, np.intp)
    if len(units[0]) > 1:
        check_names(identity)
        work.check_units(units[0])
    if others:
        work.others = [OtherPart(one, some) for one, some in zip(others, units[1:], strict=True)]
    work.put_units(units[0], row_cost(identity))
    session.known_keys.note(generation, identity.continued_keys())
    session.tally.put_waited(time.monotonic() - began)
    if session.spans is not None:
        session.spans.put(handle.name, began, n, tagged)
    kept = work.gone + work.there
    if kept:
        _check_passed_over(work, next(iter(columns), ""))
    return Ref(
        session.plane,
        session.peer,
        handle.name,
        generation,
        identity.keys,
        None if identity.names is None else tuple(identity.names),
        tuple(identity.group_names),
        tuple(columns),
        kept,
    )


def _check_passed_over(work: Putting, field: str) -> None:
    """FieldExists or RowsGone where all rows of a put were there. field: one that it brings."""
    partition, identity = work.handle.name, work.identity
    n = len(identity)
    if work.gone + work.there < n:
        if work.there:
            log.warning(
                "partition %r: %d of %d rows of a put already exist with these fields and keep "
                "their values (ref.kept); the other rows were stored",
                partition,
                work.there,
                n,
            )
        return
    keys = row_names(identity.wire(None))[:SHOWN_NAMES]
    if work.there:
        freed = f" ({work.gone} of them freed since)" if work.gone else ""
        raise FieldExists(
            f"nothing was put: partition {partition!r} already has these fields for all "
            f"{counted(n, 'row')} of this put{freed}, for example row {keys[0]!r}. If this put is "
            "a retry, the first attempt succeeded. Fields are written once; pass replace=True to "
            "write new values",
            field=field,
            keys=keys,
        )
    groups = identity.group_names[:SHOWN_NAMES]
    which = f"group {groups[0]!r}" if groups else f"key {keys[0]!r}"
    which += ", …" if len(groups or keys) > 1 else ""
    raise RowsGone(
        f"nothing was put into partition {partition!r}: all {counted(n, 'row')} of this put "
        f"({which}) have already been stored, and every stage has acked them. A restarted "
        "producer should continue with its next rows. To put new rows with these keys or group "
        "ids, pass reuse=True",
        keys=keys,
        groups=groups,
    )


def _prepare(
    handle: Handle,
    columns: Mapping[str, Any],
    n: int | None,
    dedup: Collection[str],
    deadline: Deadline,
) -> tuple[list[ValueColumn], list[OnDevice]]:
    """Return the fields that go to the host arena, and those that go to other memory. All are as
    the schema has them, as far as that is known."""
    session, fields = handle.session, handle.definition.fields

    def check_time() -> None:
        deadline.check("put")

    if session.pools is None or not isinstance(columns, Mapping):
        return prepare(columns, n, dedup, fields, check_time=check_time), []
    others, rest = session.pools.take(columns, n, dedup)
    for one in others:
        schema.check(one.columns, fields)
        n = one.columns[0].count
    host = prepare(rest, n, dedup, fields, check_time=check_time) if rest or not others else []
    return host, others
