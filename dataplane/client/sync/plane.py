"""connect() and Plane.

Made of dataplane/client/aio/plane.py, which is the one to change.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from dataplane.client import arguments, core
from dataplane.client.checkpoint import restore, save
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle
from dataplane.client.operations import reads
from dataplane.client.ref import Ref
from dataplane.client.session.devices import wish_of
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.opening import open_session, reconnect
from dataplane.client.sync.batch import Rows
from dataplane.client.sync.calls import Calls
from dataplane.client.sync.driver import Connecting, leave
from dataplane.client.sync.partition import Partition


def connect(
    name: str | None = None,
    *,
    run: str | None = None,
    fresh: bool | Literal["force"] = False,
    devices: str | None = None,
) -> Plane:
    """Attach to this host's peer, or start an embedded one: `with connect() as plane: …`, or
    `plane = connect()`.

    name: which peer, where several run on this host (default: DATAPLANE_PEER).

    run: the name of the run whose plane this is. Default: DATAPLANE_RUN, else the launcher's, else
    an unnamed run of this process. Processes that this one starts from now on belong to the same
    run. To share a run between programs of several terminals, or of several lines of a script, give
    them one name. An unnamed run ends with its last process.

    fresh: True ends what an earlier launch left of the run, with all its rows, and starts a new
    run. This happens once per launch: all its processes may pass True. In a run of several hosts
    all must, under a launcher that gives each launch an id. A run with clients is not ended:
    RunInUse names the clients. "force" ends the run under them. Clients of this process do not
    count.

    devices: whether values in the peer's device arenas are read in place, as views of GPU memory:
    "auto", where this process works on that GPU when it connects; "required", on the current GPU
    (DeviceMissing otherwise); "off", never: they come by way of the host (default:
    DATAPLANE_DEVICES, else auto).

    The log says in one line which run was begun or joined, and warns where that is perhaps not
    meant. Raises PeerNotFound, PeerAmbiguous, SeedsMissing, RunMissing, RunInUse, or another
    ConnectError that says what to do; InvalidCall if `fresh` is not possible.
    """
    return Connecting(Plane, partial(open_session, name, run, fresh, wish_of(devices)))


class Plane(Calls):
    """One client of the plane, for any number of threads and loops. A context manager; `close` it.

    Forked children must connect anew.
    """

    def __init__(self, keeper: Housekeeper) -> None:
        super().__init__(keeper.session)
        self._keeper = keeper
        weakref.finalize(self, keeper.desert).atexit = False

    @property
    def name(self) -> str:
        """The plane's name, which is its run's."""
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
        replicas: int = 1,
        fields: Mapping[str, str] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Partition:
        """Declare a partition, or attach to it as it was declared (PartitionConflict otherwise).

        stages: per stage the fields that must be there before it gets a row. group_size: a group
        closes with that many rows. groups: seal by itself once so many groups are closed. free:
        "acked" frees a row when every stage has acked it, "drop" keeps rows until dropped; default
        "acked" where stages are given. replicas: 2 keeps a second copy of the bytes on another
        peer. fields: a schema, of fields that need one: `{"tokens": "int64[*]"}` refuses a value of
        another dtype or rank at the put (InvalidValue); `float32[3,*]` has three vectors a row,
        `float32` is one number, `bfloat16[...]` any shape, `object` a Python object. With a name
        alone, the partition is attached to on first use, waiting until somebody declares it.
        """
        handle = Handle(self._session, arguments.text(name, "a partition"))
        definition = core.definition_of(stages, group_size, groups, free, replicas, fields)
        if definition is not None:
            self.run(handle.define(definition, core.Deadline(timeout)))
        return Partition(self.run, handle)

    def partitions(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> list[str]:
        """The names of the plane's partitions, drained ones too, until they are dropped."""
        return self.run(core.partitions(timeout))

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

    def metrics(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, float]:
        """What this client did since it was last asked, and how its peer stands: a flat dict of
        floats, for `wandb.log` or TensorBoard, once a step. docs/observe.md lists them.

        Per stage `wait_s`, `rows`, `rows_per_s`, `bytes`, `behind_rows`, …; of puts and gets the
        same; bytes that were copied or pulled; the arena. Costs as `stats` does.
        """
        stats = self.run(core.stats(None, timeout))
        return self._session.tally.take(stats)

    def checkpoint(
        self, directory: str | os.PathLike[str], *, timeout: float | None = None
    ) -> None:
        """Write all rows, their bytes and what the stages have done to a new directory.

        Every group is in it whole as it stood at one moment, while the plane is used on. Whatever
        was put before the call is in it, unless it went meanwhile; leased rows are in it as ready
        ones. timeout None: each request to a peer has its 30 s, all together have no limit. Raises
        CheckpointFailed, and leaves nothing of that name, where it cannot be finished.
        """
        self.run(save.checkpoint(self._session, directory, timeout))

    def restore(
        self, directory: str | os.PathLike[str], *, timeout: float | None = None
    ) -> list[str]:
        """Put the rows of a checkpoint back, and return the names of its partitions.

        They live on this host then, whatever the plane they come from. CheckpointCorrupt names a
        file that is not as it was written; PartitionConflict where a partition is there already;
        nothing was restored then. A restore that fails, is cancelled or interrupted drops what it
        has restored; a process that is killed leaves the restored rows behind.
        """
        return self.run(restore.restore(self._session, directory, timeout))

    def close(self) -> None:
        """Release leases and grants, and leave. Views in hand stay readable; calls of other threads
        or tasks end at once, done or not: ClientClosed."""
        why = "this client was closed; call dataplane.connect() for another"
        leave(self._keeper, why)

    def __reduce__(self) -> Any:
        """In the process that unpickles it: a client of the same run, one for all of them there."""
        return reconnect, (Plane, *self._session.origin)

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._session.closed else ""
        return f"<Plane {self.name!r} at peer {self.peer!r}{state}>"
