"""The peer process: from a configuration to a clean end.

Takes the peer's name, builds the peer, serves until SIGTERM, SIGINT or the end of its lingering,
and removes its files. Everything it can refuse it refuses before it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import uvloop

from dataplane.launch import rundir
from dataplane.launch.config import PeerConfig
from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)


def run(config: PeerConfig, ready: Callable[[], None] | None = None) -> int:
    """Serve until told to stop. Returns the exit code; configuration errors are raised.

    PeerNameTaken, AddressInUse, ListenRefused, RosterMismatch.
    """
    lock = rundir.claim_name(rundir.plane_dir(config.plane, config.run_dir), config.name)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, lock, ready))
    finally:
        lock.release()
    return 0


async def _serve(
    config: PeerConfig, lock: rundir.PeerLock, ready: Callable[[], None] | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    peer = Peer(config)
    try:
        await peer.start(str(lock.socket_path))
        lock.write_card(config.listen)
        log.info(
            "peer %r of plane %r serves: pid %d, arena %d bytes, %d peers",
            config.name,
            config.plane,
            os.getpid(),
            peer.host.space.size_bytes,
            len(peer.host.roster.members),
        )
        if ready is not None:
            ready()
        await peer.run(stop)
    finally:
        await peer.close()
