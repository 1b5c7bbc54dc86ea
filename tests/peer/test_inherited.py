"""What an owner keeps of its values when the peers that it had lent them to are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer.grants import Grants
from dataplane.peer.host import Caller
from dataplane.wire.records import EXTENT
from dataplane.wire.rosters import Inherited
from dataplane.wire.tables import Owner

LOST, BETWEEN, HEIR = (Owner(f"tcp://10.0.0.{n}:7101", n) for n in (2, 3, 4))
TOLD_AT = 8


def lent_ranges(**host: Any) -> tuple[Grants, Any]:
    """An owner, and two ranges of its that LOST has in its rows."""
    space = Space(1 << 20)
    granted = space.grant(1, Admission.OPEN, 8192)
    start = int(granted["offset"][0])
    written = np.array([(start, 64), (start + 4096, 64)], EXTENT)
    ranges = space.commit(1, written, np.ones(2, "<u4"), Admission.OPEN)
    me = SimpleNamespace(space=space, owner=Owner("tcp://10.0.0.1:7101", 1), **host)
    room = SimpleNamespace(pump=lambda: None)
    mesh = SimpleNamespace(handlers={})
    grants = Grants(me, mesh, None, room, None)  # type: ignore[arg-type]
    grants.lent.lend(LOST, ranges)
    return grants, ranges


@pytest.mark.parametrize(("began", "kept"), [(TOLD_AT, 0), (TOLD_AT + 1, 0), (TOLD_AT - 1, 2)])
def test_what_was_lent_to_a_lost_peer_is_free_when_its_heir_began_empty(
    began: int, kept: int
) -> None:
    heirs = {LOST: BETWEEN, BETWEEN: HEIR}
    at = {LOST: TOLD_AT - 4, BETWEEN: TOLD_AT}
    grants, ranges = lent_ranges(heirs=heirs, inherited_at=at)
    told = Inherited(Owner(HEIR.peer, 0), b"", b"", began)
    grants.inherited(Caller(HEIR.peer, HEIR.incarnation), told)
    # One that came before it was given the shards may have had copies of them: it says which.
    assert grants.host.space.alive(ranges).sum() == len(grants.lent) == kept


def test_an_heir_keeps_what_it_names_and_the_rest_is_free() -> None:
    grants, ranges = lent_ranges(heirs={LOST: HEIR}, inherited_at={LOST: TOLD_AT})
    told = Inherited(LOST, ranges[:1].tobytes(), np.ones(1, "<u4").tobytes())
    grants.inherited(Caller(HEIR.peer, HEIR.incarnation), told)
    assert grants.host.space.alive(ranges).tolist() == [True, False]
    assert grants.lent.holders() == [HEIR]
