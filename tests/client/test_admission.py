"""What callers say of an admission, before anything is asked of the peer."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from dataplane.client._sync.partition import Partition
from dataplane.client._sync.producing import Admission
from dataplane.client.session.session import MAX_KNOWN_KEYS, Handle, KnownKeys
from dataplane.errors import InvalidCall
from dataplane.metadata.tables.keys import mint_many

NOWHERE = cast(Handle, None)


@pytest.mark.parametrize("number", [False, True, 0.0, 1.0, -1, None, "0"])
def test_what_is_no_version_or_lag_is_refused_here(number: Any) -> None:
    with pytest.raises(InvalidCall, match="max_lag=.* non-negative int"):
        Admission(NOWHERE, 1, number, 1, None)
    with pytest.raises(InvalidCall, match="version=.* non-negative int"):
        Partition(NOWHERE).advance(number)


def test_a_client_knows_its_last_keys_and_forgets_older_ones_at_once() -> None:
    known, began = KnownKeys(), time.process_time()
    for first in range(0, 400_000, 20_000):
        known.note(7, mint_many(1, first, 20_000))
        assert known.knows(7, mint_many(1, first + 19_999, 1))
    assert known.knows(7, mint_many(1, 400_000 - MAX_KNOWN_KEYS, 1))
    assert not known.knows(7, mint_many(1, 0, 1))
    assert not known.knows(8, mint_many(1, 399_999, 1))
    assert time.process_time() - began < 10
