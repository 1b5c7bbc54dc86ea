"""Attach to a partition: declare it, find it, and query its phase.

Generated from dataplane/client/_async/attaching.py: change that.
"""

from __future__ import annotations

from dataplane.client._sync.calls import ATTACH_S, DEFAULT_TIMEOUT_S, ask
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.session import caller
from dataplane.errors import (
    ClientClosed,
    DataplaneError,
    PartitionGone,
    PartitionSealed,
    PutIncomplete,
    RowsDropped,
)
from dataplane.wire.messages import Define, Defined
from dataplane.wire.tables import Definition


def attach(handle: Handle, deadline: Deadline) -> int:
    """Return the generation of the partition, after a process has declared it."""
    if handle.session.closed is not None:  # before anything is copied
        raise ClientClosed(handle.session.closed)
    if handle.defined is None:
        define(handle, None, deadline)
    return handle.generation


def attach_to_wait(handle: Handle, timeout_s: float | None) -> int:
    """Attach for a call that waits for rows. Without a timeout, there is no limit."""
    return attach(handle, Deadline(None if timeout_s is None else max(timeout_s, ATTACH_S)))


def define(handle: Handle, definition: Definition | None, deadline: Deadline) -> None:
    """Declare the partition; with None, wait until a process has declared it."""
    doing = f"attaching to partition {handle.name!r}"
    handle.defined = ask(handle.session, Define(handle.name, definition), Defined, deadline, doing)


def takes_rows(handle: Handle) -> bool:
    """Return whether the partition accepts new rows: it is neither sealed nor dropped."""
    attach_to_wait(handle, None)
    body = Define(handle.name, None, generation=handle.generation)
    try:
        now = ask(handle.session, body, Defined, Deadline(DEFAULT_TIMEOUT_S))
    except PartitionGone as exc:
        if exc.details.get("reason") == "lost":
            raise
        return False
    return now.phase == "open"


def comes_too_late(handle: Handle, exc: DataplaneError) -> bool:
    """Return whether a call in a loop over `producing` failed because the partition accepts no new
    rows. The loop then ends without an error."""
    if (handle.name, caller()) not in handle.session.producers:
        return False
    if isinstance(exc, PartitionSealed):
        return True
    if isinstance(exc, PartitionGone | RowsDropped | PutIncomplete):
        return not takes_rows(handle)
    return False
