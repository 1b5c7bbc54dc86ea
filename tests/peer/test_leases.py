"""Leases of a host's clients: limits that the peer keeps, and grants that come too late."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import LeaseExpired
from dataplane.peer import leases as leases_module
from dataplane.peer.leases import Leases, Part
from dataplane.wire.tables import Owner

PARTS = [Part(Owner("a", 1), 7, 2)]


class Client:
    """What a lease sees of a session."""

    def __init__(self) -> None:
        self.leases: set[int] = set()


def client() -> Any:
    return Client()


def test_a_lease_is_over_its_limit_once_and_not_before() -> None:
    leases = Leases()
    one, other = client(), client()
    first = leases.open(one, "p", 1, "s", PARTS)
    leases.limit(first.id, 5.0)
    leases.open(other, "p", 1, "s", PARTS)
    acked = leases.open(one, "p", 1, "s", PARTS)
    leases.limit(acked.id, 4.0)
    leases.close(acked)
    assert leases.overdue(4.9) == []
    assert leases.overdue(5.0) == [first]
    assert leases.overdue(9.0) == []


def test_a_lease_is_fenced_off_at_its_limit_before_anybody_ends_it() -> None:
    leases = Leases()
    holder = client()
    lease = leases.open(holder, "p", 1, "s", PARTS)
    leases.limit(lease.id, 5.0)
    assert leases.of(holder, lease.id, 4.9) is lease
    with pytest.raises(LeaseExpired, match="claim again"):
        leases.of(holder, lease.id, 5.0)


def test_what_was_refused_stays_so_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "MAX_REFUSED", 2)
    leases = Leases()
    leases.refuse([1, 2])
    leases.refuse([3])
    assert [leases.is_refused(number) for number in (1, 2, 3, 4)] == [False, True, True, False]
