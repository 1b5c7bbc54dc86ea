"""Turns exceptions into replies and into the outcome of futures.

An exception that is not one of the package's typed errors is a bug. It is logged with its
traceback.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from dataplane.errors import DataplaneError, InternalError, Unavailable
from dataplane.wire.messages import Failed

log = logging.getLogger(__name__)

ErrorT = TypeVar("ErrorT", bound=DataplaneError)


class LinkBroken(Unavailable):
    """The connection to a peer ended before the reply arrived, or was not made. The mesh repeats
    the request, or raises Unavailable."""


def again(why: ErrorT) -> ErrorT:
    """Copy an error for another caller, so that each caller's error keeps its own traceback."""
    return type(why)(why.message, **why.details)


def fail(answer: asyncio.Future[Any], why: Exception) -> None:
    """Fail a future with an error, unless it already has a result."""
    if not answer.done():
        answer.set_exception(why)
        answer.exception()  # the caller may have left, which is no bug to log


def failed(exc: Exception) -> Failed:
    """Return the message that reports an exception instead of a reply."""
    if isinstance(exc, DataplaneError):
        return Failed(type(exc).__name__, exc.message, plain(exc.details))
    log.exception("peer: internal error while serving a request", exc_info=exc)
    return Failed(
        InternalError.__name__,
        f"{type(exc).__name__}: {exc}. This is a bug in "
        "dataplane: report it with the traceback from "
        "the peer's log",
    )


def plain(value: Any) -> Any:
    """Convert details to values that MessagePack can carry."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    return str(value)
