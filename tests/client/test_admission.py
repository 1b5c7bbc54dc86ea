"""What callers say of an admission, before anything is asked of the peer."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dataplane.client.core import Handle
from dataplane.client.operations.changes import Admitting, advance
from dataplane.errors import InvalidCall

NOWHERE = cast(Handle, None)


@pytest.mark.parametrize("number", [False, True, 0.0, 1.0, -1, None, "0"])
def test_what_is_no_version_or_lag_is_refused_here(number: Any) -> None:
    with pytest.raises(InvalidCall, match="max_lag=.* int of 0 or more"):
        Admitting(NOWHERE, 1, number, 1, None)
    with pytest.raises(InvalidCall, match="version=.* int of 0 or more"):
        next(advance(NOWHERE, number, None))
