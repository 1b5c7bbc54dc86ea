"""connect() and Plane: the sync shell, which carries operations out with blocking sockets."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from dataplane.client import arguments, core, reads
from dataplane.client.batch import Rows
from dataplane.client.core import DEFAULT_TIMEOUT_S, Call, Handle, Operation, Step, Tell
from dataplane.client.housekeeping import Housekeeper
from dataplane.client.opening import framed, further, open_session, told
from dataplane.client.partition import Partition
from dataplane.client.ref import Ref

T = TypeVar("T")


def connect(name: str | None = None, *, plane: str | None = None) -> Plane:
    """Attach to this host's peer, or start an embedded one.

    name: which peer, where several run on this host (default: DATAPLANE_PEER). plane: which plane
    (default: DATAPLANE_PLANE, else uid and job id). Raises PeerNotFound, PeerAmbiguous,
    SeedsMissing, or another ConnectError that says what to do.
    """
    return Plane(open_session(name, plane))


class Plane:
    """One client of the plane, for any number of threads. A context manager; `close` it.

    Forked children must connect anew.
    """

    def __init__(self, keeper: Housekeeper) -> None:
        self._keeper = keeper
        self._session = keeper.session
        weakref.finalize(self, keeper.desert).atexit = False

    @property
    def name(self) -> str:
        """The plane's name."""
        return self._session.plane

    @property
    def peer(self) -> str:
        """The name of the peer that this client is attached to."""
        return self._session.peer

    def partition(
        self,
        name: str,
        stages: Mapping[str, Sequence[str]] | None = None,
        group_size: int | None = None,
        groups: int | None = None,
        free: str | None = None,
        place: str = "local",
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Partition:
        """Declare a partition, or attach to it as it was declared (PartitionConflict otherwise).

        stages: per stage the fields that must be there before it gets a row. group_size: a group
        closes with that many rows. groups: seal by itself once so many groups are closed. free:
        "acked" frees a row when every stage has acked it, "drop" keeps rows until dropped; default
        "acked" where stages are given. place: "local", on the host that puts; another is refused
        as yet. With a name alone, the partition is attached to on first use, waiting until somebody
        declares it.
        """
        handle = Handle(self._session, arguments.text(name, "a partition"))
        definition = core.definition_of(stages, group_size, groups, free, place)
        if definition is not None:
            self.run(handle.define(definition, core.Deadline(timeout)))
        return Partition(self.run, handle)

    def get(
        self,
        ref: Ref,
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """The rows of a ref, from wherever they are. fields None: all of them."""
        handle = reads.handle_of(self._session, ref)
        found = self.run(reads.read_ref(handle, ref, fields, timeout))
        return Rows(self.run, handle, *found)

    def stats(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """What this peer holds, as nested dicts: `stats()["arena"]["used_bytes"]`."""
        return self.run(core.stats(None, timeout))

    def close(self) -> None:
        """Release leases and grants, and leave. Views in hand stay readable."""
        self._keeper.close("this client was closed; call dataplane.connect() for another")

    def __enter__(self) -> Plane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._session.closed else ""
        return f"<Plane {self.name!r} at peer {self.peer!r}{state}>"

    # carrying operations out

    def run(self, operation: Operation[T]) -> T:
        """Carry out the steps of an operation in this thread, and return its result."""
        outcome: Any = None
        failure: BaseException | None = None
        while True:
            try:
                step = operation.throw(failure) if failure else operation.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                # An error that this frame kept would keep the frames of its traceback, this one
                # and the caller's, and so the batches in them, until the collector runs.
                outcome, failure = None, None
            try:
                outcome = self._perform(step)
            except BaseException as exc:
                failure = exc

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Call):
            return self._call(step)
        if isinstance(step, Tell):
            return self._tell(step)
        return step.work()

    def _call(self, step: Call) -> Any:
        session = self._session
        connection = session.connections.idle() or further(session)
        try:
            request, frame, limit_s = framed(session, connection, step)
            try:
                return connection.exchange(frame, request.rid, limit_s, step.waiting)
            finally:
                session.answered(request)
        finally:
            session.connections.give_back(connection)

    def _tell(self, step: Tell) -> None:
        session = self._session
        connection = session.connections.idle() or further(session)
        try:
            connection.post(told(session, step))
        finally:
            session.connections.give_back(connection)
