"""Queries about a plane: its partitions, statistics, events and transports."""

from __future__ import annotations

from typing import Any

from dataplane.client import arguments
from dataplane.client._async.calls import ask, attach
from dataplane.client.arguments import Deadline
from dataplane.client.session.session import Handle, Session
from dataplane.errors import InvalidCall, PartitionGone, Unavailable
from dataplane.events.merge import Event, merged
from dataplane.wire.checkpoint import Census, CensusDone
from dataplane.wire.events import Events, EventsDone
from dataplane.wire.messages import Stats, StatsDone

MAX_PAGES = 64
"""The maximum number of pages of events from one peer; its ring has fewer."""


async def partitions(session: Session, timeout: float | None) -> list[str]:
    """Return the names of all partitions that were not dropped, sorted."""
    done = await ask(session, Census(), CensusDone, Deadline(timeout), "partitions")
    return sorted(done.partitions)


async def probe(session: Session, timeout: float | None) -> dict[str, Any]:
    """Measure the transports between all peers again, and return the results."""
    done = await ask(session, Stats(probe=True), StatsDone, Deadline(timeout))
    return done.stats


async def events(session: Session, since: float | None, timeout: float | None) -> list[Event]:
    """Return the events of all peers. Asks one peer after another, page by page."""
    deadline = Deadline(timeout)
    since = 0.0 if since is None else arguments.moment(since, "since")
    pages = await _pages(session, "", since, deadline)
    silent: list[str] = []
    for address in pages[0].members:
        if address == pages[0].address:
            continue
        try:
            pages += await _pages(session, address, since, deadline)
        except (Unavailable, InvalidCall):  # the peer died or left
            silent.append(address)
    return merged(pages, silent)


async def _pages(
    session: Session, address: str, since: float, deadline: Deadline
) -> list[EventsDone]:
    after = 0
    pages: list[EventsDone] = []
    while len(pages) < MAX_PAGES:
        page = await ask(session, Events(address, since, after), EventsDone, deadline)
        pages.append(page)
        after = page.first + len(page.records) - 1
        if after >= page.last or not page.records:
            break
    return pages


async def stats(session: Session, timeout: float | None) -> dict[str, Any]:
    """Return the statistics of this client's peer."""
    return (await ask(session, Stats(), StatsDone, Deadline(timeout))).stats


async def partition_stats(handle: Handle, timeout: float | None) -> dict[str, Any]:
    """Return the statistics of a partition. Raise PartitionGone if it was dropped, also if a new
    partition has its name."""
    deadline = Deadline(timeout)
    generation = await attach(handle, deadline)
    done = await ask(handle.session, Stats(handle.name), StatsDone, deadline)
    if done.stats.get("generation") != generation:
        raise PartitionGone(
            f"partition {handle.name!r} was dropped after this Partition object was created: call "
            f"plane.partition({handle.name!r}, …) again",
            partition=handle.name,
        )
    return done.stats
