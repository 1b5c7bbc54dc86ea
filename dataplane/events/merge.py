"""Merge the records of several peers into one list of events, on the clock of the peer that was
asked.

Records come from other processes, so every value that decides order or length is checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dataplane.errors import mixed_releases
from dataplane.wire.events import EventRecord, EventsDone, Kind, Reason
from dataplane.wire.tables import Name, Owner


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened in a plane. `kind` says what happened and which other fields are set;
    see `Kind`.

    - `at`: when the event happened or ended, in seconds on the monotonic clock of the client's
      host; comparable with `time.monotonic()` there.
    - `uncertain`: the possible error in `at` relative to events from other peers, in seconds.
    - `peer`: the peer that recorded the event.
    - `incarnation`: the incarnation of that peer, which changes each time the peer restarts.
    - `number`: the event's position among the events of this incarnation, counted from 1. It is 0
      while the event is `going_on`.
    - `offset`: how far the clock of `peer` is ahead of the client's clock, in seconds. `at` is
      already corrected for it.
    - `seconds`: the duration of the event, or the duration so far if the event is `going_on`.
    - `client_s`: for a `put`, how long the call had been running when the client sent the request;
      for a `lease_end`, how long the client worked with the rows. In seconds; 0 if unknown.
    - `worker`: the process that acted or waited, as `client` with a number if no peer that answered
      knows its name; "" if there is none.
    - `host`: the peer that `worker` is attached to.
    """

    kind: Kind
    at: float
    peer: str = ""
    number: int = 0
    uncertain: float = 0.0
    going_on: bool = False
    reason: Reason = Reason.NONE
    partition: str = ""
    generation: int = 0
    stage: str = ""
    group: Name = ""
    rows: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    worker: str = ""
    host: str = ""
    lease: int = 0
    field: str = ""
    by: str = ""
    transport: str = ""
    version: int = 0
    client_s: float = 0.0
    offset: float = 0.0
    incarnation: int = 0

    @property
    def began(self) -> float:
        """When the event began, on the same clock as `at`."""
        return self.at - self.seconds


def merged(pages: Sequence[EventsDone], silent: Iterable[str] = ()) -> list[Event]:
    """Return all events of these pages, the earliest first. `silent`: addresses of peers that
    did not answer. Missing records become an event of kind `Kind.MISSING`. Raises ProtocolError."""
    names = _names(pages)
    workers = {worker: name for page in pages for worker, name in page.workers.items()}
    hosts = _hosts(pages, names)
    events, begun = list[Event](), set[str]()
    for page in pages:
        _check(page)
        name = names[page.address]
        if page.address not in begun and page.first == page.kept > 1 and page.records:
            at = page.records[0].at - page.offset
            lost = page.kept - 1
            gap = Reason.OVERWRITTEN
            events.append(
                Event(Kind.MISSING, at, name, reason=gap, rows=lost, incarnation=page.incarnation)
            )
        begun.add(page.address)
        for number, record in enumerate(page.records, page.first):
            events.append(_event(record, page, names, workers, hosts, number))
        for record in page.going_on:
            events.append(_event(record, page, names, workers, hosts, 0))
    latest = max([event.at for event in events], default=0.0)
    for address in silent:
        name = names.get(address, address)
        events.append(Event(Kind.MISSING, latest, name, reason=Reason.SILENT))
    return sorted(events, key=lambda event: event.at)


def _names(pages: Sequence[EventsDone]) -> dict[str, str]:
    """Return the name of each peer by address, also of those that have ended. Embedded peers of
    one host share a name, so theirs gets the address too."""
    names = {page.address: page.name for page in pages}
    many = Counter(names.values())
    former = {owner.peer: name for page in pages for name, owner in page.former.items()}
    return former | {a: name if many[name] == 1 else f"{name} at {a}" for a, name in names.items()}


def _hosts(pages: Sequence[EventsDone], names: Mapping[str, str]) -> dict[int, str]:
    """Return the peer of each client that a record names, which the client's session number
    tells."""
    peers = {owner: name for page in pages for name, owner in page.former.items()}
    peers |= {Owner(page.address, page.incarnation): names[page.address] for page in pages}
    workers = {one.worker for page in pages for one in (*page.records, *page.going_on)} - {0}
    return {w: name for w in workers for peer, name in peers.items() if peer.has_session(w)}


def _event(
    record: EventRecord,
    page: EventsDone,
    names: Mapping[str, str],
    workers: Mapping[int, str],
    hosts: Mapping[int, str],
    number: int,
) -> Event:
    more = {name: getattr(record, name) for name in _SAME}
    unnamed = f"client {record.worker:x}" if record.worker else ""
    return Event(
        at=record.at - page.offset,
        peer=names[page.address],
        number=number,
        uncertain=page.uncertain,
        offset=page.offset,
        incarnation=page.incarnation,
        going_on=not number,
        worker=workers.get(record.worker) or unnamed,
        by=names.get(record.by, record.by) if record.by else "",
        host=hosts.get(record.worker, ""),
        **more,
    )


_SAME = tuple(name for name in EventRecord.__struct_fields__ if name not in ("at", "worker", "by"))


def _check(page: EventsDone) -> None:
    clocks = [page.now, page.offset, page.uncertain]
    for one in (*page.records, *page.going_on):
        clocks += [one.at, one.seconds, one.client_s]
    counted = 0 < page.kept <= page.first and page.first + len(page.records) <= page.last + 1
    if not (all(map(math.isfinite, clocks)) and (counted or not page.records)):
        raise mixed_releases(
            f"peer {page.name!r} sent events with invalid times or sequence numbers"
        )
