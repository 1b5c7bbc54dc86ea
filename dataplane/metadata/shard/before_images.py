"""Before-images: blocks, groups, queues and tombstones as they were when a snapshot started.

A snapshot is sent in pieces while the store continues to change. A change first saves the image of
what it changes, if the snapshot has not sent that yet. The snapshot then sends the image. Images
exist only during a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dataplane.metadata.shard.blocks import Block, Group, Standing
from dataplane.metadata.tables.pieces import Chunk
from dataplane.metadata.tables.remembered import Part
from dataplane.wire.tables import Owner

if TYPE_CHECKING:
    from dataplane.metadata.shard.stages import QueueEntry, ReadyQueue

_copy_block: Callable[[Block], Block] = Block.__copy__  # type: ignore[attr-defined]
_copy_group: Callable[[Group], Group] = Group.__copy__  # type: ignore[attr-defined]
_copy_standing: Callable[[Standing], Standing] = Standing.__copy__  # type: ignore[attr-defined]


class BeforeImages:
    """The images of one snapshot. last: the highest number of a block or group when the snapshot
    started; higher ones are new.

    The snapshot sends blocks in the order of their numbers, and groups likewise.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._sent_block = self._sent_group = 0
        """numbers up to which the snapshot has sent blocks and groups"""
        self._blocks: dict[int, Block] = {}
        self._groups: dict[int, Group] = {}
        self._queues: dict[ReadyQueue, list[QueueEntry]] = {}
        self._entries: dict[QueueEntry, int] = {}
        self.names: dict[Chunk, tuple[Owner, int]] = {}
        """owner and number that moved chunks had before"""
        self._tombstones: dict[int, Part] = {}
        """by the id of the part"""

    # called before a change

    def keep_block(self, block: Block) -> None:
        number = block.number
        if self._sent_block < number <= self._last and number not in self._blocks:
            self._blocks[number] = _copied(block)

    def keep_group(self, group: Group) -> None:
        """Save a group. New rows need no image, because a snapshot contains how many rows of a
        group are gone, not which ones."""
        number = group.number
        if self._sent_group < number <= self._last and number not in self._groups:
            self._groups[number] = _copy_group(group)

    def keep_queue(self, queue: ReadyQueue, entry: QueueEntry | None = None) -> None:
        """Save a queue. entry: the last one of a unit that leaves."""
        if queue not in self._queues:
            self._queues[queue] = queue.entries()
        while entry is not None:
            self._entries.setdefault(entry, entry.bits)
            entry = entry.before

    def keep_chunk(self, chunk: Chunk) -> None:
        self.names.setdefault(chunk, (chunk.owner, chunk.number))

    def keep_tombstones(self, part: Part) -> None:
        if id(part) not in self._tombstones:
            self._tombstones[id(part)] = part.copy()

    # called by the snapshot

    def block(self, block: Block) -> Block:
        """Return a block as it was; the block itself if it did not change. Valid until the next
        change."""
        return self._blocks.get(block.number, block)

    def blocks(self, some: Sequence[Block]) -> list[Block]:
        """Return blocks as they were, and mark them as sent. They are copies: later changes
        affect only their standings."""
        self._sent_block = some[-1].number
        return [_copy_block(self._blocks.pop(one.number, one)) for one in some]

    def group(self, group: Group) -> Group:
        """Return a group as it was; the group itself if it did not change. Valid until the next
        change."""
        self._sent_group = group.number
        return self._groups.pop(group.number, group)

    def queue(self, queue: ReadyQueue, many: int) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        """Yield the units that were ready, with the rows of each, from at most `many` entries at
        a time. The number counts those that leases returned, which come first."""
        self.keep_queue(queue)
        entries = self._queues[queue]
        for at in range(0, len(entries), many):
            some = entries[at : at + many]
            ready = [(one, bits) for one in some if (bits := self._entries.get(one, one.bits))]
            returned = sum([one.returned for one, _ in ready])
            yield [(one.unit, bits) for one, bits in ready], returned
        queue.images = None

    def tombstones(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The tombstones as they were. The caller keeps the parts, so that their ids stay valid."""
        for part in parts:
            yield self._tombstones.pop(id(part), part)


def _copied(block: Block) -> Block:
    """Values and tags are replaced by a change: the copy shares them."""
    image = _copy_block(block)
    image.standings = tuple(map(_copy_standing, block.standings))
    return image
