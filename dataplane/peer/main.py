"""The peer process: from a configuration to a clean end.

Takes the peer's name, builds the peer, serves until it is told to end or has lingered long enough,
and removes its files. SIGTERM: what it has moves to other peers first; SIGINT, or SIGTERM again: it
ends at once. Everything it can refuse it refuses before it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy.ma  # noqa: F401  np.unique brings it in when first called: 40 ms of somebody's put
import uvloop

from dataplane.errors import InvalidConfig
from dataplane.launch import rundir, runs
from dataplane.launch.settings import PeerConfig
from dataplane.peer.peer import Peer
from dataplane.peer.tasks import first_of

if TYPE_CHECKING:
    from dataplane.peer.watch.metrics import Metrics

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 65_536
MIN_DESCRIPTORS = 40
"""One of two peers has 34 before its first client comes, and 5 for each further peer. With fewer it
would fail somewhere on its way, or wait for ever to be let in."""


def run(config: PeerConfig, ready: Callable[[], None] | None = None) -> int:
    """Serve until told to stop. Returns the exit code; configuration errors are raised.

    PeerNameTaken, AddressInUse, TokenMissing, RosterMismatch, InvalidConfig.
    """
    _allow_descriptors()
    folder = rundir.plane_dir(config.run, config.run_dir)
    lock = rundir.claim_name(folder, config.name, config.run, config.starter)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, lock, ready))
    finally:
        lock.release()
        if runs.is_unnamed(config.run):
            rundir.remove(folder)
    return 0


def _allow_descriptors() -> None:
    """Each connection takes one, and the usual limit of 1,024 is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_DESCRIPTORS:
        return
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if most < MIN_DESCRIPTORS:
        raise InvalidConfig(
            f"a peer needs at least {MIN_DESCRIPTORS} file descriptors, and one more for each "
            f"connection; this process may open {most}: raise the limit (ulimit -n)",
            limit=most,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _serve(
    config: PeerConfig, lock: rundir.PeerLock, ready: Callable[[], None] | None
) -> None:
    leave, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: (stop if leave.is_set() else leave).set())
    metrics = await _metrics(config)
    again = True
    while again:
        peer = Peer(config)
        if metrics is not None:
            metrics.show(peer)
        try:
            if not await _started(peer, str(lock.socket_path), (leave, stop)):
                return
            lock.write_card(config.listen)
            log.info(
                "peer %r of run %r serves: pid %d, arena %d bytes, %d peers",
                config.name,
                config.run,
                os.getpid(),
                peer.host.space.size_bytes,
                len(peer.host.roster.members),
            )
            if ready is not None:
                ready()
                ready = None
            again = await peer.run(leave, stop)
        finally:
            await peer.close()
            if metrics is not None:
                metrics.hide()
        if again:
            log.warning("peer %r returns as an empty new one", config.name)


async def _metrics(config: PeerConfig) -> Metrics | None:
    """The library is not there for peers that show none."""
    if config.metrics is None:
        return None
    try:
        from dataplane.peer.watch.metrics import Metrics
    except ImportError as exc:
        raise InvalidConfig(
            f"metrics need {exc.name}: pip install 'dataplane-rl[metrics]', or leave out --metrics "
            "and DATAPLANE_METRICS"
        ) from exc
    metrics = Metrics()
    await metrics.open(config.metrics.host, config.metrics.port)
    return metrics


async def _started(peer: Peer, socket_path: str, ends: tuple[asyncio.Event, ...]) -> bool:
    """Whether it serves; False where it was told to end while it waited to be let in."""
    starting = asyncio.create_task(peer.start(socket_path))
    if starting not in await first_of(starting, *(end.wait() for end in ends)):
        return False
    starting.result()
    return True
