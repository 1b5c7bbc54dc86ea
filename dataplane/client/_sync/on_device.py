"""Values that lie on a device, on their way into its arena: copied there, on the caller's streams.

The copy is behind all that was asked of the stream of a value, so nobody has to wait before a put.
The peer is told when the copy is done: a value that is there is whole, whoever dies. Where the
device is full the same copies go to the host arena.


Generated from dataplane/client/_async/on_device.py: change that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client._sync.backend import offload
from dataplane.client._sync.write import Continuing, room_for
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.devices import Devices, Opened
from dataplane.client.session.session import Session
from dataplane.client.write import parcel as parcels_of
from dataplane.client.write.parcel import Parcel
from dataplane.client.write.values import Prepared, PreparedColumn, Specs, Strip, checked_name
from dataplane.client.write.written import Written, written_of
from dataplane.errors import InvalidCall, InvalidRows
from dataplane.gpu.device import Copy, Located
from dataplane.memory.placement import place, remainder
from dataplane.wire.arrays import spec_of
from dataplane.wire.limits import MAX_RANK, MAX_ROWS_PER_MESSAGE
from dataplane.wire.records import EXTENT, column

_OFF_LOOP_BYTES = 64 << 20
"""Waiting for a device is work for a thread, however little is copied."""

Columns = dict[str, list[Located]]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The fields of a put whose values all lie on the device of this pool."""

    opened: Opened
    prepared: Prepared


def take_located(
    devices: Devices, columns: Mapping[str, Any], n: int | None, dedup: Collection[str]
) -> list[OnDevice]:
    """The fields whose values all are on one device that this peer has an arena of; other fields
    are the host's. InvalidRows where they have no n values each."""
    found: dict[int, tuple[Opened, Columns]] = {}
    for name, values in columns.items() if isinstance(columns, Mapping) else ():
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
                f"field {name!r} has {count} values on a device, but the put has {n} rows: pass "
                "one value per row",
                lengths=taken,
            )
    return [OnDevice(opened, _prepared(some)) for opened, some in found.values()]


def _located(devices: Devices, values: Any) -> tuple[Opened, list[Located]] | None:
    """The values of a column that lie on one device; None where not all do."""
    whole = not isinstance(values, (list, tuple))
    found = devices.locate([values] if whole else values) if whole or len(values) else None
    if found is None or any([len(one.shape) > MAX_RANK for one in found[1]]):
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


def _prepared(columns: Columns) -> Prepared:
    specs = Specs()
    prepared = []
    for name, values in columns.items():
        sizes = np.array([value.nbytes for value in values], np.int64)
        numbers = [specs.number(spec_of(value.dtype, value.shape)) for value in values]
        prepared.append(
            PreparedColumn(name, Strip(len(values), values, sizes, np.array(numbers, np.uint32)))
        )
    return Prepared(len(values), prepared, specs.specs)


@dataclass(frozen=True, slots=True)
class DevicePart:
    """The fields of a put that go to one pool: a `write.Elsewhere`; to the host arena where
    that is full."""

    opened: Opened
    parcels: Sequence[Parcel]

    @property
    def memory(self) -> int:
        return self.opened.number

    def upto(self, first: int, last: int) -> int:
        if last == first + 1:
            return 1
        most = self.opened.pool.nbytes // 4
        return min(self.parcels[first].run(MAX_ROWS_PER_MESSAGE, most, 0, 1), last) - first

    def write(
        self, handle: Handle, generation: int, which: slice, continues: Continuing, until: Deadline
    ) -> Written:
        """As `Elsewhere.write` says."""
        session, run = handle.session, self.parcels[which]
        ranges: list[npt.NDArray[Any]] = []
        done = 0
        try:
            while done < len(run):
                rest = run[done:]
                granted = room_for(handle, generation, rest, continues, until, self.memory)
                some = parcels_of.join(rest[: granted.units])
                copies = _Copies(session, self.opened, some, column(granted.extents, EXTENT))
                ranges.append(copies.carry_out(until))
                done += granted.units
        except BaseException:
            for extents in ranges:
                session.keep(extents)
            raise
        return written_of(parcels_of.join(run), np.concatenate(ranges))


class _Copies:
    """Copies of the values of a parcel into granted extents, asked of the streams that the values
    are on."""

    def __init__(
        self, session: Session, opened: Opened, parcel: Parcel, extents: npt.NDArray[Any]
    ) -> None:
        self._session, self._opened, self._parcel = session, opened, parcel
        self._extents = extents
        self._offsets = place(parcel.sizes, extents)
        self._windows: list[object] = []

    def carry_out(self, until: Deadline) -> npt.NDArray[Any]:
        """EXTENT records of what was written, when it is there. Room that is not used goes back,
        after a failure when no stream works on it any more."""
        session, offsets, sizes = self._session, self._offsets, self._parcel.sizes
        try:
            offload(lambda: self._copy(until), self._parcel.nbytes + _OFF_LOOP_BYTES)
        except BaseException:
            session.keep_when_finished(self._extents, self)
            raise
        session.keep(remainder(sizes, offsets, self._extents))
        ranges = np.empty(len(offsets), EXTENT)
        ranges["offset"], ranges["length"] = offsets, sizes
        return ranges

    def _copy(self, until: Deadline) -> None:
        copies: list[Copy] = []
        for strand in self._parcel.strands():
            at = np.arange(len(strand.records)) if strand.at is None else strand.at
            targets = self._offsets[strand.records["range"]] + strand.records["delta"]
            for index, target in zip((strand.first + at).tolist(), targets.tolist(), strict=True):
                value: Located = strand.source[index]
                address = self._address(target, value.nbytes)
                copies.append((address, value.address, value.nbytes, value.stream))
        self._opened.device.carry_out(copies, lambda: until.check("copying to the device arena"))

    def _address(self, target: int, nbytes: int) -> int:
        """Where an address of the peer's memory is in this process."""
        if target >= self._opened.base:
            return self._opened.place(target)
        window = self._session.writes.view(target, max(1, nbytes))
        self._windows.append(window)
        return int(window.__array_interface__["data"][0])
