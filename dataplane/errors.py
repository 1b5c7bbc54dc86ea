"""Every error that `dataplane` raises."""

# An error crosses the wire as (code, message, details). The code is the name of a class here; no
# other class can arrive. Details are numbers and names that a program may act on. The message is
# for people: what is wrong, why, and what to do next.
#
# The docstring of a class says when it is raised. `next_step` says what the caller may do, and
# `retry` whether the call may be repeated. From them, `python -m tests.docs.make_error_table` makes
# the tables of docs/troubleshooting.md and protocol/README.md.

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar, Literal

__all__ = [
    "AddressInUse",
    "BackPressure",
    "CheckpointCorrupt",
    "CheckpointFailed",
    "ClaimTimeout",
    "ClientClosed",
    "ConnectError",
    "DataplaneError",
    "DeadlineExceeded",
    "DeviceMissing",
    "FieldExists",
    "FieldUnknown",
    "FrameTooLarge",
    "GroupClosed",
    "InternalError",
    "InvalidCall",
    "InvalidConfig",
    "InvalidRows",
    "InvalidValue",
    "LeaseExpired",
    "LimitExceeded",
    "NotFetched",
    "PartitionConflict",
    "PartitionGone",
    "PartitionSealed",
    "PartitionUndefined",
    "PeerAmbiguous",
    "PeerEnded",
    "PeerLeaves",
    "PeerLost",
    "PeerNameTaken",
    "PeerNotFound",
    "ProtocolError",
    "PutIncomplete",
    "RosterMismatch",
    "RowsDropped",
    "RowsGone",
    "RowsLost",
    "RunInUse",
    "RunMissing",
    "SeedsMissing",
    "SpillFull",
    "StageUndefined",
    "StaleEpoch",
    "StreamEnd",
    "TagConflict",
    "TicketRefused",
    "TokenMissing",
    "TransferFailed",
    "TransportMissing",
    "Unavailable",
    "ValueCorrupt",
    "ValueTooLarge",
    "VersionMismatch",
]

MAX_COMPARED = 1_000
"""A misspelt name is compared with at most this many others."""

Retry = Literal["yes", "with keys", "no"]
"""Whether the same call may be repeated.

yes: nothing has changed, and the call can succeed later.
with keys: the call may have taken effect. With the same keys a repeated put stores no row twice.
no: the call fails again until something else changes; `next_step` says what.
"""


class DataplaneError(Exception):
    """Base class of all errors in this package. `details` holds the values that the message
    mentions."""

    next_step: ClassVar[str] = "Read the message."
    retry: ClassVar[Retry] = "no"

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


def counted(n: int, one: str, many: str = "") -> str:
    """Format a count for a message, such as "1 row", "3 rows" or, with a verb, "1 row has"."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def few(names: Sequence[str], most: int) -> str:
    """Format the first `most` names for a message, with "and 3 more" if there are others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def joined(names: Sequence[str], last: str = " and ") -> str:
    """Join names for a message, such as "a", "a and b" or "a, b and c"."""
    return last.join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def nearest(name: str, among: Iterable[str]) -> str:
    """Return the name that `name` is probably a misspelling of, or "" if there is none.

    Names that differ only in their numbers, such as "step-12" and "step-13", are not considered.
    """
    plain = name.casefold()
    others: dict[str, str] = {}
    for other in islice(among, MAX_COMPARED):
        if other != name and re.sub(r"\d+", "#", other) != re.sub(r"\d+", "#", name):
            others.setdefault(other.casefold(), other)
    found = difflib.get_close_matches(plain, others, n=1, cutoff=0.7)
    return others[found[0]] if found else ""


def did_you_mean(name: str, among: Iterable[str]) -> str:
    """Return " (did you mean …?)" for the end of a message, or "" if no name is similar."""
    near = nearest(name, among)
    return f" (did you mean {near!r}?)" if near else ""


def sized(nbytes: float) -> str:
    """Format a number of bytes for a message, such as "512 B" or "28.6 MiB"."""
    value, units, unit = float(nbytes), iter(("KiB", "MiB", "GiB", "TiB")), "B"
    while value >= 1024 and (larger := next(units, None)):
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Format a duration for a message, such as "0.2 s", "5 s", "3 min" or "2.5 h"."""
    if 0 < seconds < 0.01:
        return f"{1000 * seconds:.1g} ms"
    if seconds < 9.95:
        return f"{round(seconds, 2):.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


# finding and reaching a peer


class ConnectError(DataplaneError, ConnectionError):
    """No peer could be reached or started."""

    next_step = "Check `dataplane status` and the peer's log."
    retry: ClassVar[Retry] = "yes"


class PeerNotFound(ConnectError):
    """No peer with this name is running on this host."""

    next_step = "Start the peer, or connect to one that the message lists."
    retry: ClassVar[Retry] = "no"


class PeerAmbiguous(ConnectError):
    """More than one peer or run on this host matches the arguments of the call."""

    next_step = "Name the peer or the run."
    retry: ClassVar[Retry] = "no"


class PeerNameTaken(ConnectError):
    """A live peer of this run already has this name."""

    next_step = "Stop that peer, or choose another `--name`."
    retry: ClassVar[Retry] = "no"


class AddressInUse(ConnectError):
    """Another process is already listening on this address."""

    next_step = "Choose another address, or stop that process."
    retry: ClassVar[Retry] = "no"


class TokenMissing(ConnectError):
    """An address is reachable from other machines, but there is no cluster token."""

    next_step = "Give every peer the token that `dataplane token` prints."
    retry: ClassVar[Retry] = "no"


class SeedsMissing(ConnectError):
    """The job spans several hosts, but has no seeds."""

    next_step = "Set `DATAPLANE_SEEDS` to the same value on every host."
    retry: ClassVar[Retry] = "no"


class RunMissing(ConnectError):
    """The job spans several hosts, but has no run name."""

    next_step = "Set `DATAPLANE_RUN` to the same value on every host."
    retry: ClassVar[Retry] = "no"


class RunInUse(ConnectError):
    """`connect(fresh=True)` would end a run that still has clients (`details["clients"]`)."""

    next_step = 'Stop the clients, choose another run name, or pass `fresh="force"`.'
    retry: ClassVar[Retry] = "no"


class InvalidConfig(DataplaneError, ValueError):
    """An environment variable, option or argument has an invalid value."""

    next_step = "Correct the value."


class PeerLost(ConnectError):
    """The connection to the peer was lost during a call. The call may have taken effect."""

    next_step = "Connect again, then repeat the call."
    retry: ClassVar[Retry] = "with keys"


class PeerLeaves(PeerLost):
    """The peer left during a call. The call may have taken effect. The peer's rows are moving to
    other hosts."""

    next_step = "Repeat the call at another peer."


class PeerEnded(PeerLost):
    """The peer has shut down, and its rows are lost."""

    next_step = "Connect again. The run starts empty."
    retry: ClassVar[Retry] = "no"


class ClientClosed(ConnectError):
    """The client was closed, or was inherited by a forked process."""

    next_step = "Call `dataplane.connect()` in this process. With `multiprocessing`, use `spawn`."
    retry: ClassVar[Retry] = "no"


class Unavailable(DataplaneError):
    """A peer that the call needs did not answer. The call may have taken effect."""

    next_step = "Check `dataplane status`."
    retry: ClassVar[Retry] = "with keys"


class InvalidCall(DataplaneError, ValueError):
    """An argument is missing or invalid, or two arguments conflict."""

    next_step = "Correct the call."


# the wire


class ProtocolError(DataplaneError):
    """A message violates the protocol, or exceeds one of the protocol's limits."""

    next_step = "Install the same dataplane release everywhere, or report a bug."


def mixed_releases(what: str, /, **details: Any) -> ProtocolError:
    """Return the error for a message that another peer or client of this release does not send.
    what: what is wrong with it."""
    return ProtocolError(f"{what}. Install the same dataplane release everywhere", **details)


@contextmanager
def reading_statistics() -> Iterator[None]:
    """Raise ProtocolError, not KeyError, if a peer's statistics lack an entry that the body reads:
    the peer is of another release."""
    try:
        yield
    except KeyError as exc:
        raise mixed_releases(f"a peer's statistics have no entry {exc}") from exc


class FrameTooLarge(ProtocolError):
    """A message exceeds the size limit of the connection."""

    next_step = "Use fewer rows or fields per call."


class VersionMismatch(ProtocolError):
    """The two sides have no protocol version in common."""

    next_step = "Install the same dataplane release everywhere."


class RosterMismatch(ProtocolError):
    """Two peers of the same plane have different seeds, run names or shard counts."""

    next_step = "Start all peers with the same `--run` and `--seeds`."


class StaleEpoch(ProtocolError):
    """The roster changed during the call. The call may have taken effect."""

    next_step = "Repeat the call."
    retry: ClassVar[Retry] = "with keys"


# partitions, rows, groups


class ChangeExpired(DataplaneError):
    """The request arrived too late to take effect. An earlier attempt may have succeeded."""

    next_step = "Repeat the call."
    retry: ClassVar[Retry] = "with keys"


class PartitionUndefined(DataplaneError):
    """No process has declared this partition."""

    next_step = "Declare it, or wait until another process does."
    retry: ClassVar[Retry] = "yes"


class PartitionConflict(DataplaneError):
    """The partition already has a different definition, or callers passed conflicting arguments."""

    next_step = "Use one definition everywhere, or drop the partition first."


class PartitionGone(DataplaneError):
    """The partition was dropped, or was lost with both hosts that stored its metadata.
    `details["reason"]` is "dropped" or "lost"."""

    next_step = "Declare it again. It starts empty."


class PartitionSealed(DataplaneError):
    """The partition is sealed and accepts no new rows."""

    next_step = "Use another partition. New fields are still accepted."


class StageUndefined(DataplaneError):
    """The partition has no such stage, and stages can no longer be added."""

    next_step = "Correct the name, or declare the stage with the partition."


class FieldUnknown(DataplaneError, KeyError):
    """None of these rows has this field."""

    next_step = "Use one of the fields that the message lists."

    def __str__(self) -> str:
        return self.message


class FieldExists(DataplaneError):
    """The rows already have these fields. Without `replace=True`, a field is written once."""

    next_step = "After a retried put, continue. To overwrite, pass `replace=True`."


class InvalidRows(DataplaneError, ValueError):
    """The rows of a call have invalid or inconsistent lengths, keys, groups or tags."""

    next_step = "Correct the call. Nothing was stored."


def without_group(rows: int, group_size: int) -> InvalidRows:
    """Return the error for new rows without a group in a partition that has `group_size`."""
    return InvalidRows(
        f"{counted(rows, 'new row has', 'new rows have')} no group, but the partition has "
        f"group_size={group_size}, so group claims would never return "
        f"{'it' if rows == 1 else 'them'}: pass group= with one id per row, or declare the "
        "partition without group_size",
        rows=rows,
        group_size=group_size,
    )


class InvalidValue(DataplaneError, TypeError):
    """A value has a type or form that cannot be stored or converted."""

    next_step = "Convert the value that the message names."


class LimitExceeded(DataplaneError, ValueError):
    """The call would exceed a limit."""

    next_step = "Reduce what the message names, or split the call."


class GroupClosed(DataplaneError):
    """The group is closed and accepts no more rows."""

    next_step = "After a retried put, continue. Otherwise, use another group id."


class RowsDropped(DataplaneError):
    """The call names rows or groups that were dropped."""

    next_step = "Leave them out. To reuse their keys, pass `reuse=True`."


class RowsGone(DataplaneError, LookupError):
    """The rows were freed, dropped, lost, or never put."""

    next_step = "Read before the last ack. After a retried put, continue."


class ValueCorrupt(DataplaneError):
    """A value's bytes do not fit its layout. `details`: `field`, `key`, `writer`."""

    next_step = "Put the row again, or drop it."


class RowsLost(DataplaneError):
    """The only copy of these rows was on a host that died."""

    next_step = "`part.lost()` lists them. Put them again, or continue without them."


class TagConflict(DataplaneError):
    """The tags differ from `expect=`: another caller changed them."""

    next_step = "Read the current tags, then decide whether to retry."


class PutIncomplete(DataplaneError):
    """A put failed after storing some of its rows, which `details["committed"]` lists."""

    next_step = "Repeat the put with the same keys."
    retry: ClassVar[Retry] = "with keys"


# claims


class ClaimTimeout(DataplaneError, TimeoutError):
    """Not enough rows became ready in time."""

    next_step = "Repeat the call, or correct what the message names."
    retry: ClassVar[Retry] = "yes"


class StreamEnd(DataplaneError):
    """The partition is sealed, and no rows are left for the stage."""

    next_step = "Leave the loop. This is not a failure."


class LeaseExpired(DataplaneError):
    """The lease has ended, or its partition or plan no longer exists. Nothing was stored."""

    next_step = "Claim again."


class NotFetched(DataplaneError, LookupError):
    """The field was not fetched with this batch or these rows."""

    next_step = "Name the field in `fields=`, or call `fetch(…)`."


# memory


class BackPressure(DataplaneError):
    """The arena stayed full until the deadline."""

    next_step = "Free what the message names, or use a larger arena."
    retry: ClassVar[Retry] = "yes"


class ShardFull(BackPressure):
    """The host that stores the partition's metadata has no space left for it."""

    next_step = "Consume or drop rows, or give that host a larger arena."


class SpillFull(BackPressure):
    """The arena and the disk that holds the spill directory are full."""

    next_step = "Free rows, or free space on that disk."


class ValueTooLarge(DataplaneError):
    """A row, a group or a claim needs more bytes than the host can provide."""

    next_step = "Use fewer rows per call, or a larger arena."


class DeviceMissing(DataplaneError):
    """A GPU, or the software needed to use its memory, is not available."""

    next_step = "Install or enable what the message names."


class DeadlineExceeded(DataplaneError, TimeoutError):
    """The call did not finish within its deadline. It may have taken effect."""

    next_step = "Repeat the call, perhaps with a longer `timeout=`."
    retry: ClassVar[Retry] = "with keys"


# bulk transfer


class TransferFailed(DataplaneError):
    """A transfer of values between hosts was interrupted. Partial data was discarded."""

    next_step = "Repeat the call."
    retry: ClassVar[Retry] = "yes"


class TransportMissing(DataplaneError):
    """A required transport does not work on this host."""

    next_step = "Install what the message names, or choose another `--transport`."


class TicketRefused(DataplaneError):
    """A transfer was not authorized, or reached the wrong peer."""

    next_step = "Start all peers with the same run, seeds and token."


# checkpoints


class CheckpointFailed(DataplaneError):
    """A checkpoint could not be written or read. A failed write leaves no files behind."""

    next_step = "Correct what the message names."
    retry: ClassVar[Retry] = "yes"


class CheckpointCorrupt(DataplaneError):
    """A checkpoint file (`details["file"]`) is truncated, altered or missing. Nothing was
    restored."""

    next_step = "Use another checkpoint."


class InternalError(DataplaneError):
    """A bug in dataplane."""

    next_step = "Report it with the traceback from the peer's log."


_BY_CODE: dict[str, type[DataplaneError]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, DataplaneError)
}


def from_wire(code: str, message: str, details: dict[str, Any]) -> DataplaneError:
    """Return the error that a peer reported, or a plain DataplaneError if its code is unknown."""
    known = _BY_CODE.get(code)
    return known(message, **details) if known else DataplaneError(f"{code}: {message}", **details)
