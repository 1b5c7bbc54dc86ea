"""How a call's failure is told to whoever made the call: the one place where an exception becomes a
message, or the outcome of what is awaited. What is none of our typed errors is a bug of ours, and
goes to the log with its traceback.
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
    """The connection to a peer ended before the answer came, or was not made. For the mesh, which
    asks again or says so as Unavailable."""


def again(why: ErrorT) -> ErrorT:
    """For one more who is told: each gets an error of its own, which keeps the frames that it went
    through."""
    return type(why)(why.message, **why.details)


def fail(answer: asyncio.Future[Any], why: Exception) -> None:
    """Whoever waits for it is told, unless it has its answer."""
    if not answer.done():
        answer.set_exception(why)
        answer.exception()  # who asked may have gone: that is no bug to log


def failed(exc: Exception) -> Failed:
    """What is sent in the place of an answer."""
    if isinstance(exc, DataplaneError):
        return Failed(type(exc).__name__, exc.message, plain(exc.details))
    log.exception("peer: internal error while serving a request", exc_info=exc)
    return Failed(InternalError.__name__, f"{type(exc).__name__}: {exc}; see the peer's log")


def plain(value: Any) -> Any:
    """Details as MessagePack can carry them."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    return str(value)
