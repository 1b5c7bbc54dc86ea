"""Every error that `dataplane` raises, by phase.

An error crosses the wire as (code, message, details): the code is the class name, so both sides
agree on the type. Details are numbers and names that a program may act on; the message is for
people and says what to do. Nothing outside this package's classes is ever raised from the wire.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

MAX_COMPARED = 1_000
"""Names that a misspelt one is compared with."""


class DataplaneError(Exception):
    """Base of every error here. `details` holds the figures that the message mentions."""

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


def counted(n: int, one: str, many: str = "") -> str:
    """How messages count: "1 row", "3 rows"; with a verb, "1 row lacks", "3 rows lack"."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def few(names: Sequence[str], most: int) -> str:
    """A list as messages have it: the first ones, "and 3 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, among: Iterable[str]) -> str:
    """The name that `name` may be a misspelling of, "" where there is none. "step-12" and "step-13"
    are no misspellings of each other: they differ in their numbers alone."""
    plain = name.casefold()
    others: dict[str, str] = {}
    for other in islice(among, MAX_COMPARED):
        if other != name and re.sub(r"\d+", "#", other) != re.sub(r"\d+", "#", name):
            others.setdefault(other.casefold(), other)
    found = difflib.get_close_matches(plain, others, n=1, cutoff=0.7)
    return others[found[0]] if found else ""


def did_you_mean(name: str, among: Iterable[str]) -> str:
    """A question for the end of a message, "" where no name is near."""
    near = nearest(name, among)
    return f" (did you mean {near!r}?)" if near else ""


def sized(nbytes: float) -> str:
    """Bytes as messages have them: "512 B", "28.6 MiB"."""
    value, units, unit = float(nbytes), iter(("KiB", "MiB", "GiB", "TiB")), "B"
    while value >= 1024 and (larger := next(units, None)):
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as messages have them: "5 s", "3 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# finding and reaching a peer


class ConnectError(DataplaneError, ConnectionError):
    """No peer could be reached or started."""


class PeerNotFound(ConnectError):
    """The named peer does not run on this host."""


class PeerAmbiguous(ConnectError):
    """Several named peers run on this host and none was named."""


class PeerNameTaken(ConnectError):
    """A living peer of this plane already has this name."""


class AddressInUse(ConnectError):
    """The listen address belongs to another process."""


class TokenMissing(ConnectError):
    """A listen address that is not loopback was asked for without a cluster token."""


class SeedsMissing(ConnectError):
    """The job spans several hosts, and neither seeds nor a way to derive them are there."""


class RunMissing(ConnectError):
    """The run spans several hosts, and nothing names it alike on all of them."""


class RunInUse(ConnectError):
    """`connect(fresh=True)` would end a run that has clients; `details["clients"]` names them."""


class InvalidConfig(DataplaneError, ValueError):
    """A setting (variable, option or argument) does not have the form that it needs."""


class PeerLost(ConnectError):
    """The peer went away in the middle of a call; the call may or may not have taken effect."""


class PeerLeaves(PeerLost):
    """The peer leaves the plane; the call may or may not have taken effect. What the peer has moves
    to other hosts, where the call can be repeated."""


class PeerEnded(PeerLost):
    """Somebody ended the peer, with its rows; the message says who. The call may or may not have
    taken effect."""


class ClientClosed(ConnectError):
    """The client was closed, or belongs to the parent of this forked process: connect again."""


class Unavailable(DataplaneError):
    """A peer that this call needs does not answer."""


class InvalidCall(DataplaneError, ValueError):
    """The arguments of a call contradict each other, or one is missing."""


# the wire


class ProtocolError(DataplaneError):
    """What arrived is not a message of this protocol, or breaks one of its limits."""


class FrameTooLarge(ProtocolError):
    """A frame announces more bytes than the limit told in the handshake."""


class VersionMismatch(ProtocolError):
    """The two sides have no protocol version in common."""


class RosterMismatch(ProtocolError):
    """Two peers were started with different seeds, planes or shard counts."""


class StaleEpoch(ProtocolError):
    """The message was sent under a roster that is no longer in force."""


# partitions, rows, groups


class ChangeExpired(DataplaneError):
    """The change arrived after its caller had stopped asking for it; nothing was changed."""


class PartitionUndefined(DataplaneError):
    """Nobody has declared this partition."""


class PartitionConflict(DataplaneError):
    """The partition exists with another definition."""


class PartitionGone(DataplaneError):
    """The partition was dropped since this handle was opened, or lost with both hosts that had its
    metadata: `reason` is "dropped" or "lost"."""


class PartitionSealed(DataplaneError):
    """The partition accepts no new rows."""


class StageUndefined(DataplaneError):
    """The partition has no such stage, and it cannot be declared now."""


class FieldUnknown(DataplaneError, KeyError):
    """No row of this selection has such a field."""

    def __str__(self) -> str:
        return self.message


class FieldExists(DataplaneError):
    """Fields are write-once; `replace=True` writes a new value."""


class InvalidRows(DataplaneError, ValueError):
    """The rows of a call do not fit together: lengths, keys, groups or tags."""


def without_group(rows: int, group_size: int) -> InvalidRows:
    """New rows that no claim of whole groups would ever get."""
    return InvalidRows(
        f"{counted(rows, 'new row has', 'new rows have')} no group in a partition with "
        f"group_size={group_size}, where groups= claims would never get them: give group=, one id "
        "a row, or declare the partition without group_size",
        rows=rows,
        group_size=group_size,
    )


class InvalidValue(DataplaneError, TypeError):
    """A value cannot travel: its type has no form on the wire."""


class LimitExceeded(DataplaneError, ValueError):
    """A named limit of the protocol would be broken."""


class GroupClosed(DataplaneError):
    """The group is closed: it takes no further rows."""


class RowsDropped(DataplaneError):
    """Rows of this call were dropped: their trajectories are cancelled."""


class RowsGone(DataplaneError, LookupError):
    """The rows were freed, dropped, lost with a peer that died, or never put."""


class RowsLost(DataplaneError):
    """The only bytes of these rows were on a peer that died."""


class TagConflict(DataplaneError):
    """`expect=` did not hold: somebody else changed the tags."""


class PutIncomplete(DataplaneError):
    """A put failed half-way: `details["committed"]` are the rows that are in."""


# claims


class ClaimTimeout(DataplaneError, TimeoutError):
    """Not enough rows became ready in time; the message says what is missing and who holds it."""


class StreamEnd(DataplaneError):
    """The partition is sealed and the stage has had every row, or every group that was whole."""


class LeaseExpired(DataplaneError):
    """The lease ended: its rows went back to the stage."""


class NotFetched(DataplaneError, LookupError):
    """The field was not fetched, and this object cannot block to fetch it."""


# memory


class BackPressure(DataplaneError):
    """The arena is full; the message says what is needed and who holds the bytes."""


class ShardFull(BackPressure):
    """The host that keeps the rows of a partition has no room for more metadata."""


class SpillFull(BackPressure):
    """The arena is full, and the disk that it spills to has no room either."""


class ValueTooLarge(DataplaneError):
    """One row, or one group's part, is larger than its share of the arena."""


class DeviceMissing(DataplaneError):
    """A GPU, or what is needed to use its memory, is not there; the message says what."""


class DeadlineExceeded(DataplaneError, TimeoutError):
    """The call did not end within its deadline."""


# bulk transfer


class TransferFailed(DataplaneError):
    """A bulk transfer broke off unconfirmed: nothing of it counts, and it may be retried."""


class TransportMissing(DataplaneError):
    """A transport that was required does not work here; the message says what is missing."""


class TicketRefused(DataplaneError):
    """The owner does not honour the ticket of a bulk read."""


# checkpoints


class CheckpointFailed(DataplaneError):
    """A checkpoint could not be written, or read; nothing is left of one that was not finished."""


class CheckpointCorrupt(DataplaneError):
    """A file of a checkpoint is torn, altered or missing: `details["file"]`. Nothing came back."""


class InternalError(DataplaneError):
    """A bug of ours. The peer's log has the traceback."""


_BY_CODE: dict[str, type[DataplaneError]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, DataplaneError)
}


def from_wire(code: str, message: str, details: dict[str, Any]) -> DataplaneError:
    """The error that a peer reported. A code of a newer protocol becomes the base class."""
    known = _BY_CODE.get(code)
    return known(message, **details) if known else DataplaneError(f"{code}: {message}", **details)
