"""dataplane: rows move between the stages of RL post-training, with no controller.

`connect()` attaches to this host's peer, or starts one. `dataplane.aio` is the same with `await`.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"dataplane runs on Linux, and this is {sys.platform}, whose kernel lacks what it is built "
        "on (memfd_create, pidfd_open): run it in a container or on a remote host"
    )

from dataplane import errors
from dataplane.errors import (
    AddressInUse,
    BackPressure,
    CheckpointCorrupt,
    CheckpointFailed,
    ClaimTimeout,
    ClientClosed,
    ConnectError,
    DataplaneError,
    DeadlineExceeded,
    DeviceMissing,
    FieldExists,
    FieldUnknown,
    FrameTooLarge,
    GroupClosed,
    InternalError,
    InvalidCall,
    InvalidConfig,
    InvalidRows,
    InvalidValue,
    LeaseExpired,
    LimitExceeded,
    NotFetched,
    PartitionConflict,
    PartitionGone,
    PartitionSealed,
    PartitionUndefined,
    PeerAmbiguous,
    PeerLeaves,
    PeerLost,
    PeerNameTaken,
    PeerNotFound,
    ProtocolError,
    PutIncomplete,
    RosterMismatch,
    RowsDropped,
    RowsGone,
    RowsLost,
    RunMissing,
    SeedsMissing,
    SpillFull,
    StageUndefined,
    StaleEpoch,
    StreamEnd,
    TagConflict,
    TicketRefused,
    TokenMissing,
    TransferFailed,
    TransportMissing,
    Unavailable,
    ValueTooLarge,
    VersionMismatch,
)
from dataplane.version import __version__

if TYPE_CHECKING:
    from dataplane import aio
    from dataplane.client.changes import Dropped
    from dataplane.client.ref import Ref
    from dataplane.client.selection import Group
    from dataplane.client.sync.batch import Batch, Rows
    from dataplane.client.sync.loader import Loader
    from dataplane.client.sync.partition import Partition
    from dataplane.client.sync.plan import Micro, Mini, Plan
    from dataplane.client.sync.plane import Plane, connect
    from dataplane.client.sync.stream import Stream
    from dataplane.client.values import Kept as object
    from dataplane.metadata.where import Tag, Where, tag
else:
    # Imported when asked for: a peer and its bulk workers load this package too, and no client.
    _HOMES = {
        "Batch": "client.sync.batch",
        "Dropped": "client.changes",
        "Group": "client.selection",
        "Loader": "client.sync.loader",
        "Micro": "client.sync.plan",
        "Mini": "client.sync.plan",
        "Partition": "client.sync.partition",
        "Plan": "client.sync.plan",
        "Plane": "client.sync.plane",
        "Ref": "client.ref",
        "Rows": "client.sync.batch",
        "Stream": "client.sync.stream",
        "Tag": "metadata.where",
        "Where": "metadata.where",
        "aio": "aio",
        "connect": "client.sync.plane",
        "object": "client.values",
        "tag": "metadata.where",
    }

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'dataplane' has no attribute {name!r}", name=name)
        module = importlib.import_module(f"dataplane.{home}")
        found = module if name == "aio" else getattr(module, {"object": "Kept"}.get(name, name))
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AddressInUse",
    "BackPressure",
    "Batch",
    "CheckpointCorrupt",
    "CheckpointFailed",
    "ClaimTimeout",
    "ClientClosed",
    "ConnectError",
    "DataplaneError",
    "DeadlineExceeded",
    "DeviceMissing",
    "Dropped",
    "FieldExists",
    "FieldUnknown",
    "FrameTooLarge",
    "Group",
    "GroupClosed",
    "InternalError",
    "InvalidCall",
    "InvalidConfig",
    "InvalidRows",
    "InvalidValue",
    "LeaseExpired",
    "LimitExceeded",
    "Loader",
    "Micro",
    "Mini",
    "NotFetched",
    "Partition",
    "PartitionConflict",
    "PartitionGone",
    "PartitionSealed",
    "PartitionUndefined",
    "PeerAmbiguous",
    "PeerLeaves",
    "PeerLost",
    "PeerNameTaken",
    "PeerNotFound",
    "Plan",
    "Plane",
    "ProtocolError",
    "PutIncomplete",
    "Ref",
    "RosterMismatch",
    "Rows",
    "RowsDropped",
    "RowsGone",
    "RowsLost",
    "RunMissing",
    "SeedsMissing",
    "SpillFull",
    "StageUndefined",
    "StaleEpoch",
    "Stream",
    "StreamEnd",
    "Tag",
    "TagConflict",
    "TicketRefused",
    "TokenMissing",
    "TransferFailed",
    "TransportMissing",
    "Unavailable",
    "ValueTooLarge",
    "VersionMismatch",
    "Where",
    "__version__",
    "aio",
    "connect",
    "errors",
    "object",
    "tag",
]
