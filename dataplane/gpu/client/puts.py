"""Put values that are on a device: copy them into the device arena, on the values' own streams.

The copy of a value runs after all earlier work on the value's stream, so the caller need not wait
before a put. The client names the values to the peer only after the copies have finished, so no
process can see a partial value. If the device arena is full, the copies go to the host arena.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataplane.client.arguments import Deadline
from dataplane.client.write.chunks import NewChunk, Unit
from dataplane.client.write.columns import ValueColumn, checked_name, lengths_of, spec_of
from dataplane.errors import InvalidCall, InvalidRows, counted
from dataplane.gpu.device import Copy, Located
from dataplane.memory.arena import WriteMaps
from dataplane.wire.limits import MAX_RANK

if TYPE_CHECKING:
    from dataplane.gpu.client.pools import Opened, OpenPools

Columns = dict[str, list[Located]]


@dataclass(slots=True)
class OnDevice:
    """The fields of a put whose values are all on the device of `opened`. units: their parts, which
    cover the same rows as the other fields."""

    opened: Opened
    columns: list[ValueColumn]
    units: Sequence[Unit] = ()

    @property
    def memory(self) -> int:
        """The number of the device arena."""
        return self.opened.number

    def upto(self, first: int, last: int) -> int:
        """Return how many of the units from `first` to `last` fit in one run, a quarter of the
        device arena. At least one does."""
        most, nbytes = self.opened.pool.nbytes // 4, 0
        for stop in range(first, last):
            nbytes += self.units[stop].nbytes
            if stop > first and nbytes > most:
                return stop - first
        return last - first

    def copy(
        self, chunks: Sequence[NewChunk], writes: WriteMaps, until: Deadline, keep: list[object]
    ) -> None:
        """Copy values to the places of their chunks, and return once the copies have finished. If
        this raises, a stream may still use the chunks and what is in `keep`."""
        copies: list[Copy] = []
        for chunk in chunks:
            for column, start in chunk.places():
                target = chunk.offset + start
                for value in column.source:
                    if target >= self.opened.base:
                        address = self.opened.place(target)
                    else:  # in the host arena, because the device arena is full
                        window = writes.view(target, max(1, value.nbytes))
                        keep.append(window)
                        address = int(window.__array_interface__["data"][0])
                    copies.append((address, value.address, value.nbytes, value.stream))
                    target += value.nbytes
        self.opened.device.carry_out(copies, lambda: until.check("copying to the device arena"))


def fields_on_devices(
    devices: OpenPools, columns: Mapping[str, Any], n: int | None, dedup: Collection[str]
) -> list[OnDevice]:
    """Return the fields whose values are all on one device on which this peer has an arena. The
    other fields go to the host arena. Raise InvalidRows if a field does not have n values."""
    found: dict[int, tuple[Opened, Columns]] = {}
    for name, values in columns.items():
        located = _located(devices, values)
        if located is not None:
            opened, each = located
            found.setdefault(opened.number, (opened, {}))[1][checked_name(name)] = each
    taken = {name: len(each) for _, some in found.values() for name, each in some.items()}
    for name, count in taken.items():
        if name in dedup:
            raise InvalidCall(
                f"dedup= needs values in host memory, but field {name!r} is on a GPU: leave the "
                "field out of dedup=, or move its values to the host first"
            )
        if count != (n := count if n is None else n) or not count:
            raise InvalidRows(
                f"field {name!r} has {counted(count, 'value')} on a device, but the put has "
                f"{counted(n, 'row')}: pass one value per row",
                lengths=taken,
            )
    return [
        OnDevice(opened, [_column(name, each) for name, each in some.items()])
        for opened, some in found.values()
    ]


def _located(devices: OpenPools, values: Any) -> tuple[Opened, list[Located]] | None:
    """Return the addresses of a column's values if all are on one device and have one dtype and
    rank; else None."""
    whole = not isinstance(values, (list, tuple))
    found = devices.locate([values] if whole else values) if whole or len(values) else None
    if found is None or len(found[1][0].shape) > MAX_RANK:
        return None
    if len({(one.dtype, len(one.shape)) for one in found[1]}) > 1:
        return None
    if not whole:
        return found
    opened, (one,) = found
    return (opened, _rows(one)) if one.shape else None


def _rows(whole: Located) -> list[Located]:
    count, *shape = whole.shape
    step = whole.nbytes // count if count else 0
    return [
        whole._replace(address=whole.address + step * row, shape=tuple(shape))
        for row in range(count)
    ]


def _column(name: str, values: list[Located]) -> ValueColumn:
    spec, lengths = spec_of(values[0].dtype, [value.shape for value in values])
    sizes = [value.nbytes for value in values]
    packed = lengths_of(name, lengths, len(values))
    return ValueColumn(name, len(values), spec, values, sum(sizes), sizes, packed)
