"""What keeps a plane whole: life signs, rosters, operations for backups, what was not answered, and
whether anybody still moves."""

from __future__ import annotations

import msgspec

from dataplane.wire.messages import Body
from dataplane.wire.tables import Definition, Owner, RosterTable


class Beat(Body, tag=140):
    """The sender lives; answered by `Rostered`. Any peer may be asked for its roster so.

    synced: its backup, in the roster of this message's epoch, has all that it has. leaving: it
    wants to hand over its shards. clear: members at which none of its rows' values lie. wanted:
    somebody uses it, or may soon. spare: one bit a shard, those of the sender that go to a
    member without any: nothing lives in them, and nothing will before the next roster.
    """

    synced: bool = False
    leaving: bool = False
    clear: list[str] = []
    wanted: bool = False
    spare: bytes = b""


class Rostered(Body, tag=141):
    """The sender's roster; None where the receiver has it. Also sent unasked, when it is new.

    wanted: to a member's `Beat`, whether the authority was told so by any member.
    """

    table: RosterTable | None = None
    wanted: bool = False


class Shipment(msgspec.Struct, array_like=True, frozen=True):
    """Operations of one partition, each as `journal.encode_ops` of one. definition: the backup
    makes a new copy first, of the partition as it was declared."""

    partition: str
    generation: int
    ops: list[bytes]
    definition: Definition | None = None


class Append(Body, tag=143):
    """To the sender's backup: what its shards did, in order.

    stream: of one dump and all that follows. first: number of the first operation in the stream;
    0 begins it.
    """

    stream: int
    first: int
    shipments: list[Shipment]


class Inherited(Body, tag=144):
    """To every owner of values: the sender has taken over the shards of `origin`, and holds these
    references of the receiver's that those held. RANGE records, u4 counts.

    began: number of the roster under which the sender began with nothing, also what it was given
    by that or one before. Else 0; then `origin` is nobody."""

    origin: Owner
    ranges: bytes
    counts: bytes
    began: int = 0


class Void(Body, tag=152):
    """Was this operation carried out, which the receiver never answered? If not, it never will be.

    session and op are the envelope's. part: which part of it, see protocol/peers.md. `PutDone`
    where it was."""

    part: int


class CanFree(Body, tag=150):
    """The sender's producers wait for room: can anybody of the receiver's clients free some?"""


class Stirring(Body, tag=151):
    """Who at the sender's host may still free rows.

    filled: partitions of which it has rows. busy: partitions of clients that do not wait in a call.
    held: rows are leased, or stay or go for other reasons than a stage's. claims: how many wait.
    claimable: rows are ready for some stage. done: operations so far, to see whether any came.
    """

    filled: list[str]
    busy: list[str]
    held: bool
    claims: int
    claimable: bool
    done: int
