"""Shorten the tracebacks of our errors, so that they end at the public call.

The frames inside the package do not help a user, and hide the line of the user's own code.
`DATAPLANE_TRACEBACKS=full` keeps them. A bug of ours (`InternalError`, or an exception of another
class) always keeps its traceback.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from dataplane.errors import DataplaneError, InternalError, InvalidConfig
from dataplane.launch import settings

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def shorten(error: DataplaneError) -> None:
    """Remove the package's frames from the traceback of an error and of its causes. Frames of code
    that the package called, such as a user's `__array__`, stay. Call this in an `except` block that
    ends with a bare `raise`."""
    if isinstance(error, InternalError) or _full():
        return
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        trace = one.__traceback__
        # what the user was handling when he made the call keeps its traceback
        if trace is not None and _is_ours(trace):
            one.__traceback__ = _of_others(trace)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def public_at_once(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a public method that blocks in neither client: the traceback of its errors ends at the
    caller's line. For the others see `calls.public`."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except DataplaneError as exc:
            shorten(exc)
            raise

    return call


def _full() -> bool:
    try:
        return bool(settings.of_variable("tracebacks") == "full")
    except InvalidConfig:  # `connect` says so
        return False


def is_ours(filename: str) -> bool:
    """Return whether this file belongs to the package."""
    return filename.startswith(_PACKAGE)


def _is_ours(trace: TracebackType) -> bool:
    return is_ours(trace.tb_frame.f_code.co_filename)


def _of_others(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not _is_ours(trace):
            kept.append(trace)
        trace = trace.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
