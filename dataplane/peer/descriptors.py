"""File descriptors: how many this process may open, and how they are divided.

A peer reserves what it needs for itself and for links to other members, and admits as many
clients as the rest allows. An admitted client can always make one call at a time; calls that its
threads make at once need more connections, and are refused if no descriptor is left.
"""

from __future__ import annotations

import resource

from dataplane.errors import InvalidConfig

MOST = 65_536
"""The soft limit that a peer raises its own to, where the hard limit allows."""
OWN = 48
"""Descriptors for the peer itself: 30 before its first link or client, and some that are open for a
moment, for example for spilling or for connections that are not identified yet."""
OF_A_LINK = 11
"""Descriptors per other member: to it a dealer, its monitor, its connection and three streams; from
it four connections."""
OF_A_CLIENT = 3
"""Descriptors per client: one connection that stays, one for calls, and the pidfd of its
process."""
LEAST = OWN + OF_A_CLIENT


def allow() -> None:
    """Raise the soft limit of file descriptors, whose usual value of 1,024 is for programs that
    use select(). Raise InvalidConfig if the hard limit is too low even for one client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MOST:
        return
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if most < LEAST:
        raise InvalidConfig(
            f"a peer needs at least {LEAST} file descriptors, plus {OF_A_CLIENT} per "
            f"client, but this process may open only {most}: raise the limit with ulimit "
            "-n",
            limit=most,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    """The number of file descriptors that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def for_clients(members: int) -> int:
    """The number of file descriptors left for clients in a run with this many members; enough
    for at least one client."""
    return max(OF_A_CLIENT, limit() - OWN - OF_A_LINK * max(0, members - 1))


def short() -> str:
    """The message for a client when no descriptor is left."""
    return (
        f"this peer has reached its limit of {limit()} file descriptors: raise the limit "
        "with ulimit -n and restart the peer"
    )
