"""Read a user's objects, whose own code may raise: `__iter__`, `__getitem__`, `__repr__`.

What it raises becomes an error of ours that names the argument and the entry, with the original as
its cause. A MemoryError stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataplane.errors import DataplaneError, InvalidValue
from dataplane.wire.arrays import kind_of, text_of


def unreadable(
    what: str,
    value: object,
    exc: Exception,
    error: type[DataplaneError] = InvalidValue,
    **details: Any,
) -> DataplaneError:
    """Return the error for a value whose own code has raised `exc`. what: names the value."""
    return error(
        f"{what} is {kind_of(value)}, which cannot be read: {type(exc).__name__}: "
        f"{text_of(exc)}. Pass a list, or an array, of plain values",
        **details,
    )


def items_of(
    what: str, values: Iterable[Any], error: type[DataplaneError] = InvalidValue, **details: Any
) -> list[Any]:
    """Return the entries of an iterable as a list. The error has the index of the entry that could
    not be read as `row`."""
    if type(values) is list:
        return values
    found: list[Any] = []
    try:
        found.extend(values)
    except (DataplaneError, MemoryError):
        raise
    except Exception as exc:
        where = f"{what} at index {len(found)}" if found else what
        raise unreadable(where, values, exc, error, row=len(found), **details) from exc
    return found


def pairs_of(
    what: str, mapping: Mapping[Any, Any], error: type[DataplaneError] = InvalidValue
) -> dict[Any, Any]:
    """Return a mapping as a dict."""
    if type(mapping) is dict:
        return mapping
    try:
        return dict(mapping.items())
    except (DataplaneError, MemoryError):
        raise
    except Exception as exc:
        raise unreadable(what, mapping, exc, error) from exc
