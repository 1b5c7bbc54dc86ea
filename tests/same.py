"""Whether values came back as they went in, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.wire.arrays import as_array, is_jagged, is_torch, jagged_parts


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal bit by bit and have the same types, key order, dtypes and
    shapes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if is_torch(one):
        parts = (
            map(np.asarray, jagged_parts(t)) if is_jagged(t) else [as_array(t)]
            for t in (one, other)
        )
        return (one.dtype, one.is_nested) == (other.dtype, other.is_nested) and all(
            map(same, *parts)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return bool(one == other)


def dense(values: npt.NDArray[Any] | list[Any]) -> npt.NDArray[Any]:
    """A column that is one array, as its rows have one shape and dtype."""
    assert isinstance(values, np.ndarray), values
    return values


def equals(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether both columns have the same values. NaN equals NaN."""
    return len(one) == len(other) and all(map(same, one, other))
