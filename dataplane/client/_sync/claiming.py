"""Claims: one request for rows of a stage, sent once or repeatedly.

Generated from dataplane/client/_async/claiming.py: change that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dataplane.client import arguments
from dataplane.client._sync.calls import (
    Call,
    attach_to_wait,
    background_timeout_s,
    milliseconds,
    send,
)
from dataplane.client.arguments import Deadline, Demand
from dataplane.client.read.table import TableReader, reader_of
from dataplane.client.session.connection import expect
from dataplane.client.session.session import Handle
from dataplane.errors import InvalidCall
from dataplane.wire.messages import Claim, Claimed

Leased = tuple[int, TableReader]
"""The number of the lease, and its rows."""


class Claiming:
    """A claim for rows of one stage. It can be sent repeatedly. Raises InvalidCall for invalid
    arguments."""

    def __init__(
        self,
        handle: Handle,
        stage: str,
        demand: Demand,
        fields: Sequence[str] | None,
        timeout: float | None,
        lease_s: float | None,
        ahead: bool = False,
    ) -> None:
        """timeout: seconds to wait; None waits as long as rows can still become ready. ahead: the
        caller does not wait for this claim, because it still works on the rows of the last one.
        """
        self._handle, self._demand, self._ahead = handle, demand, ahead
        self._unit = handle.unit
        self._want = demand.want(self._unit)
        self._stage = arguments.text(stage, "a stage")
        self._wanted = arguments.optional_texts(fields, "fields")
        self._timeout = arguments.seconds(timeout, "timeout")
        self.limit_s = background_timeout_s(self._timeout)
        """seconds that an ack or a release of the claimed rows may take"""
        lease_s = arguments.seconds(lease_s, "lease")
        if lease_s is not None and lease_s <= 0:
            raise InvalidCall(
                f"lease={lease_s:g}: expected a positive number of seconds, or None for no limit"
            )
        self._lease_ms = 0 if lease_s is None else max(1, int(lease_s * 1e3))

    def claim(self) -> Leased:
        """Send the claim, and return the leased rows."""
        if self._handle.defined is None:
            attach_to_wait(self._handle, self._timeout)
        return self.claimed(self.call())

    def call(self, after: int | None = None) -> Call:
        """Return the request. The handle must be attached. after: the lease that this client
        finishes just before the claim."""
        handle = self._handle
        if self._unit != handle.unit:  # it was attached since
            self._unit, self._want = handle.unit, self._demand.want(handle.unit)
        body = Claim(
            handle.name,
            handle.generation,
            self._stage,
            self._want,
            self._wanted,
            declare=None if self._stage in handle.definition.stages else self._wanted,
            timeout_ms=milliseconds(self._timeout),
            lease_ms=self._lease_ms,
            own=not self._ahead and handle.session.leases.mine(handle.name, but=after),
        )
        return Call(body, Deadline(self._timeout), True)

    def claimed(self, call: Call) -> Leased:
        """Send `call`, and return the leased rows from its reply."""
        session, stage, began = self._handle.session, self._stage, time.monotonic()
        try:
            claimed = expect(send(session, call), Claimed, call.body)
        except BaseException:
            session.tally.claim_waited(stage, time.monotonic() - began)
            if session.spans is not None:
                session.spans.claim(self._handle.name, stage, began, ahead=self._ahead)
            raise
        session.leased(claimed.lease, self._handle.name, self._ahead)
        reader, rows = reader_of(session, claimed), claimed.table.rows
        n = rows.count
        session.tally.claimed(stage, n, reader.volume, time.monotonic() - began)
        if session.spans is not None:
            tags = claimed.table.tags
            session.spans.claim(
                self._handle.name, stage, began, claimed.lease, tags, ahead=self._ahead
            )
        session.known_keys.note(self._handle.generation, rows.group_keys or rows.keys)
        return claimed.lease, reader
