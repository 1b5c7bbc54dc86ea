"""What two ranks must do, whoever makes them: `communicators` says the rules."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dataplane.errors import TransferFailed
from dataplane.transport.engines.communicators import Communicator, Ranks, joined, wait


def nothing() -> None:
    """A check that never gives up."""


def pair_of(first: Ranks, second: Ranks) -> tuple[Communicator, Communicator]:
    made: list[Communicator] = []
    name = first.unique_id()
    joins = threading.Thread(target=lambda: made.append(joined(second, name, 1, nothing)))
    joins.start()
    receiver = joined(first, name, 0, nothing)
    joins.join()
    return receiver, made[0]


def check_order(receiver: Communicator, sender: Communicator, to: int, source: int) -> None:
    """What is sent first arrives first, whole: 3 KiB in pieces, the halves of a page changed."""
    sender.send([(source + 2048, 1024), (source, 2048)])
    receiver.receive([(to, 1024), (to + 1024, 2048)])
    wait(sender, nothing)
    wait(receiver, nothing)


def check_abort(receiver: Communicator, sender: Communicator, to: int) -> None:
    """A rank that waits for the other in vain ends when it is aborted, and stays so."""
    receiver.receive([(to, 1024)])
    assert not receiver.done(0.05)
    receiver.abort()
    with pytest.raises(TransferFailed, match="repeat the call"):
        receiver.done(0)
    sender.abort()


def check_given_up(ranks: Ranks) -> None:
    """A join to which the other rank does not come ends when nobody needs it any more."""
    calls: list[Callable[[], None]] = [nothing] * 3

    def check() -> None:
        if not calls:
            raise TransferFailed("nobody needs it")
        calls.pop()

    with pytest.raises(TransferFailed, match="nobody needs it"):
        joined(ranks, ranks.unique_id(), 0, check)
