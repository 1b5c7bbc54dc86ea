"""What the attacks share: a call that is cancelled at one of its awaits, and the leak check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dataplane import Plane
from tests.end_to_end.conftest import Cluster, until

Planes = tuple[Plane, Plane, Plane]


class CancelledAt:
    """Awaits `work`, whose task is cancelled at its `at`-th await.

    late: only when what it awaited is there, which is then lost: a time-out that fires in the same
    moment. meanwhile: called at each await, for what others do in that moment. `reached` is false
    when the work had fewer awaits.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        at: int,
        late: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.work = work
        self.at = at
        self.late = late
        self.meanwhile = meanwhile
        self.awaits = 0

    @property
    def reached(self) -> bool:
        return self.awaits >= self.at

    def __await__(self) -> Generator[Any, Any, Any]:
        failure: BaseException | None = None
        while True:
            try:
                step = self.work.throw(failure) if failure else self.work.send(None)
            except StopIteration as stop:
                return stop.value
            self.awaits += 1
            self.meanwhile()
            here = self.awaits == self.at
            if here and not self.late:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            failure = None
            try:
                yield step
            except BaseException as exc:
                failure = exc
            if here and self.late and failure is None:
                failure = asyncio.CancelledError()


def leaks(plane: Plane) -> dict[str, int]:
    """What a peer still holds that a call in flight, a lease or a view would explain."""
    stats = plane.stats()
    arena = stats["arena"]
    found = {name: arena[name] for name in ("granted_bytes", "pinned_bytes", "quarantined_bytes")}
    found |= {name: stats[name] for name in ("leases", "waiting_claims", "waiting_puts")}
    found["store_leases"] = sum(p["leases"] for p in stats["partitions"].values())
    return {name: amount for name, amount in found.items() if amount}


def no_leaks(*planes: Plane, seconds: float = 10.0) -> None:
    """Everything came back; what is still held is named."""
    found: list[dict[str, int]] = []

    def clean() -> bool:
        found[:] = [leaks(plane) for plane in planes]
        return not any(found)

    try:
        until(clean, "nothing is held", seconds)
    except AssertionError as exc:
        raise AssertionError(f"still held: {found}") from exc


def used_bytes(plane: Plane) -> int:
    """Bytes of rows, without cached copies."""
    arena = plane.stats()["arena"]
    return int(arena["used_bytes"] - arena["cached_bytes"])


def all_free(plane: Plane) -> None:
    until(lambda: used_bytes(plane) == 0, f"every byte of {plane} came back")


@contextmanager
def clients_of_three(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planes]:
    """Clients of the peers a, b and c; every partition goes at the end, and leaves nothing."""
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(cluster.run_dir))
    a, b, c = (cluster.connect(name) for name in "abc")
    yield a, b, c
    cluster.end_workers()
    for name in a.partitions():
        a.partition(name).drop()
    no_leaks(a, b, c)
    for plane in (a, b, c):
        all_free(plane)
        plane.close()
