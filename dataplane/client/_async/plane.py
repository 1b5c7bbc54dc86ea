"""connect() and Plane."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from dataplane.client import arguments
from dataplane.client._async import queries, restore, save
from dataplane.client._async.backend import Connecting, leave
from dataplane.client._async.batch import Rows
from dataplane.client._async.calls import DEFAULT_TIMEOUT_S, define, public
from dataplane.client._async.partition import Partition
from dataplane.client._async.reads import handle_of, read_ref
from dataplane.client.arguments import Deadline
from dataplane.client.ref import Ref
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.opening import open_session, reconnect
from dataplane.client.session.session import Handle
from dataplane.client.tracebacks import public_at_once
from dataplane.client.write.schema import definition_of
from dataplane.errors import reading_statistics
from dataplane.events.merge import Event
from dataplane.gpu.registry import wish_of
from dataplane.launch import settings
from dataplane.timeline.why import figures


@public_at_once
def connect(
    name: str | None = None,
    *,
    run: str | None = None,
    fresh: bool | Literal["force"] = False,
    devices: str | None = None,
) -> Connecting[Plane]:
    """Attach to this host's peer, or start one: `async with connect() as plane: …`, or
    `plane = await connect()`.

    - `name`: the peer to attach to, if this host has several peers of the run. Default:
      `DATAPLANE_PEER`.
    - `run`: the name of the run. Default: `DATAPLANE_RUN`, else the launcher's id, else an unnamed
      run of this process. Processes that this process starts later join the same run. Programs that
      are started separately, in several terminals or by several lines of a script, share a run only
      if you give them the same run name. An unnamed run ends with its last process.
    - `fresh`: True starts with an empty run: if an earlier launch left a run behind, the call ends
      that run, and its rows are lost. The old run is ended only once per launch, so every process
      of a launch may pass True. In a run that spans several hosts, every process must pass `fresh`,
      and the launcher must give each launch an id. If the old run still has clients, the call
      raises RunInUse instead, which names the clients. "force" ends the run anyway.
    - `devices`: whether to read values that are in GPU arenas without copying them through host
      memory. "auto" reads this way on the GPUs that this process is already using when it connects.
      "required" raises DeviceMissing if that is not possible on the current GPU. "off" copies all
      values through host memory. Default: `DATAPLANE_DEVICES`, else "auto".

    The log says which run was started or joined, and warns if it may be the wrong run. Raises
    PeerNotFound, PeerAmbiguous, SeedsMissing, RunMissing, RunInUse or another ConnectError, and
    InvalidCall if `fresh` cannot be used in this job.
    """
    wish = wish_of(devices or settings.of_variable("devices"))
    return Connecting(Plane, partial(open_session, name, run, fresh, wish))


class Plane:
    """A client of the plane. Any number of threads and event loops may share it. Use it as a
    context manager, or call `close` when you are done.

    After a fork, the child process must call `connect()` again.
    """

    def __init__(self, keeper: Housekeeper) -> None:
        self._session = keeper.session
        self._keeper = keeper
        weakref.finalize(self, keeper.desert).atexit = False

    @property
    def name(self) -> str:
        """The plane's name, which is the name of its run."""
        return self._session.plane

    @property
    def peer(self) -> str:
        """The name of the peer that this client is attached to."""
        return self._session.peer

    @public
    async def partition(
        self,
        name: str,
        stages: Mapping[str, Sequence[str]] | None = None,
        group_size: int | None = None,
        groups: int | None = None,
        free: str | None = None,
        replicas: int = 1,
        fields: Mapping[str, str] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Partition:
        """Declare a partition, or attach to an existing one.

        - `stages`: for each stage, the fields that a row must have before the stage gets it.
        - `group_size`: a group closes when it has this many rows.
        - `groups`: seal the partition after this many closed groups.
        - `free`: "acked" frees a row when every stage has acked it; "drop" keeps rows until they
          are dropped. Default: "acked" if there are stages, else "drop".
        - `replicas`: 2 keeps a replica of all values on another peer.
        - `fields`: the types of fields, such as `{"tokens": "int64[*]"}`. A put with another dtype
          or rank raises InvalidValue. `float32` is one number, `float32[3,*]` is three vectors per
          row, `bfloat16[...]` is any shape, and `object` is a Python object.

        All processes that declare the partition must pass the same definition; otherwise the call
        raises PartitionConflict. If you pass only a name, the first call on the partition waits
        until another process has declared it.
        """
        handle = Handle(self._session, arguments.text(name, "a partition"), plane=self)
        definition = definition_of(stages, group_size, groups, free, replicas, fields)
        if definition is not None:
            await define(handle, definition, Deadline(timeout))
        return Partition(handle)

    @public
    async def partitions(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> list[str]:
        """Return the names of all partitions that have not been dropped, even if they have no rows
        left."""
        return await queries.partitions(self._session, timeout)

    @public
    async def get(
        self,
        ref: Ref,
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """Read the rows of a ref from the hosts that have them. `fields`: which fields to read;
        None reads all fields."""
        handle = handle_of(self, self._session, ref)
        return Rows(handle, await read_ref(handle, ref, fields, timeout))

    @public
    async def stats(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Return the statistics of this client's peer as nested dicts, for example
        `stats()["arena"]["used_bytes"]`."""
        return await queries.stats(self._session, timeout)

    @public
    async def metrics(
        self, step: str | None = None, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> dict[str, Any]:
        """Return metrics of this client and its peer as a flat dict of floats. The client's
        metrics cover the time since the last call. Call this once per step, for `wandb.log` or
        TensorBoard. docs/observe.md lists the metrics.

        Each stage has metrics such as `wait_s`, `rows`, `rows_per_s`, `bytes` and `behind_rows`.
        Other metrics cover puts, gets, the bytes copied and pulled, and the arena.

        `step`: the name of a step's partition. With `step`, the call asks all peers for their
        events and adds the idle share of the step, the staleness of its groups, what workers waited
        for, the bytes sent between hosts, and `step/why`, a sentence that says why the step took so
        long.
        """
        deadline = Deadline(timeout)
        stats = await self.stats(timeout=timeout)
        of_step: dict[str, Any] = {}
        if step is not None:
            step = arguments.text(step, "a step")
            of_step = figures(await self.events(timeout=deadline.left("metrics")), step)
        with reading_statistics():
            # Taken last: if a request fails, the next call still reports these sums.
            return {**self._session.tally.take(stats), **of_step}

    @public
    async def events(
        self, since: float | None = None, *, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> list[Event]:
        """Return the recent events of the plane, oldest first.

        Events are puts, leases, waits, pulls and rows becoming ready. docs/observe.md lists the
        kinds. Every peer keeps its last 16,384 events. A call records one event for each group that
        it touches. An event of kind `missing` names a peer whose events are incomplete.

        `since`: return only events after this time, in seconds on the same clock as `Event.at`.
        """
        return await queries.events(self._session, since, timeout)

    @public
    async def checkpoint(
        self, directory: str | os.PathLike[str], *, timeout: float | None = None
    ) -> None:
        """Write all rows, their values and the state of the stages to a new directory.

        Other calls continue in the meantime, and each group is saved as it was at a single moment.
        The checkpoint contains every row that was put before the call, except rows that are freed
        before the call ends. Leased rows are saved as ready. With `timeout=None`, each request to a
        peer times out after 30 s, but the call as a whole has no time limit. If the checkpoint
        cannot be completed, the call raises CheckpointFailed and leaves no directory behind.
        """
        await save.checkpoint(self._session, directory, timeout)

    @public
    async def restore(
        self, directory: str | os.PathLike[str], *, timeout: float | None = None
    ) -> list[str]:
        """Restore the rows of a checkpoint, and return the names of its partitions.

        All restored rows are placed on this host, whichever plane wrote the checkpoint. Raises
        CheckpointCorrupt if a file has changed, or PartitionConflict if a partition already exists;
        in both cases nothing is restored.

        If a restore fails, is cancelled or is interrupted, or its process is killed, the plane
        drops the partitions restored so far, even if other processes have attached to them. Until
        the restore is complete, `partitions()` and checkpoints leave them out.
        """
        return await restore.restore(self._session, directory, timeout)

    async def close(self) -> None:
        """Release all leases and disconnect.

        Values already read remain readable. Calls in progress in other threads or tasks raise
        ClientClosed at once, but may have taken effect.
        """
        why = "this client was closed; call dataplane.aio.connect() again"
        await leave(self._keeper, why)

    def __reduce__(self) -> Any:
        """Pickle the plane. The other process gets a client of the same run, one per process."""
        return reconnect, (Plane, self.name, self.peer)

    async def __aenter__(self) -> Plane:
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = " closed" if self._session.closed else ""
        return f"<aio.Plane {self.name!r} at peer {self.peer!r}{state}>"
