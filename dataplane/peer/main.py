"""The peer process: from its configuration to its exit.

It locks the peer's name, builds the peer, serves until it is told to stop or no client is left
for long enough, and removes its files. On SIGTERM it first moves its rows to other peers. On
SIGINT or a second SIGTERM it stops at once. It checks its configuration before it reports that
it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.ma  # noqa: F401  np.unique imports it on first use: 40 ms of a put
import uvloop

from dataplane.errors import DataplaneError, InvalidConfig, PeerEnded, counted, joined
from dataplane.launch import embedded, rundir
from dataplane.launch.settings import PeerConfig
from dataplane.peer import descriptors
from dataplane.peer.peer import Peer
from dataplane.peer.tasks import first_of, within

if TYPE_CHECKING:
    from dataplane.peer.watch.metrics import Metrics

log = logging.getLogger(__name__)


FILES_S = 1.0
"""How often a peer checks that its files still exist."""
CARD_S = 5.0
"""A slow disk delays the reply to the first put for at most this long."""


def run(config: PeerConfig, ready: Callable[[], None] | None = None) -> int:
    """Serve until told to stop. Return the exit code.

    Raises PeerNameTaken, AddressInUse, TokenMissing, RosterMismatch or InvalidConfig.
    """
    descriptors.allow()
    folder = rundir.plane_dir(config.run, config.run_dir)
    lock = rundir.claim_name(folder, config.name, config.run, config.starter)
    ended = ""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ended = runner.run(_serve(config, lock, ready))
    finally:
        lock.release(ended)
        if not ended:
            rundir.remove(folder)
    return 0


async def _serve(
    config: PeerConfig, lock: rundir.PeerLock, ready: Callable[[], None] | None
) -> str:
    """Serve until the end. Return why the peer ended if rows or clients were lost with it, else
    ""."""
    leave, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[str] = []

    def told(number: signal.Signals) -> None:
        signals.append(number.name)
        (stop if number == signal.SIGINT or leave.is_set() else leave).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told, number)
    metrics = await _metrics(config)
    while True:
        peer, why = Peer(config), None
        if metrics is not None:
            metrics.show(peer)
        try:
            if not await _started(peer, str(lock.socket_path), (leave, stop)):
                return ""
            lock.write_card(config.listen)
            _note(lock, peer)
            log.info(
                "peer %r of run %r: serving, pid %d, arena %d bytes, %s",
                config.name,
                config.run,
                os.getpid(),
                peer.host.space.size_bytes,
                counted(len(peer.host.roster.members), "peer"),
            )
            if ready is not None:
                ready()
                ready = None
            keeping = asyncio.create_task(_keep_files(lock, peer))
            try:
                again = await peer.run(leave, stop)
            finally:  # a thread may still be writing the card
                keeping.cancel()
                await asyncio.wait([keeping])
            if not again:
                why = _end(peer, lock.word() or joined(signals))
                _note(lock, peer)
        finally:
            await peer.close(why)
            if metrics is not None:
                metrics.hide()
        if not again:
            return str(why.details["why"]) if why is not None else ""
        log.warning("peer %r: restarting as a new, empty peer", config.name)


def _end(peer: Peer, who: str) -> PeerEnded | None:
    """Return the error for clients and for the next start if rows or clients are lost with the
    peer, and log it. Return None otherwise."""
    host, clients = peer.host, len(peer.sessions)
    if not host.rows and not clients:
        return None
    why = f"ended by {who}" if who else "shut down because no clients were left"
    left = f"{counted(host.rows, 'row')} and {counted(clients, 'client')}"
    ended = f"was {why}" if who else why
    said = f"peer {host.name!r} of run {host.plane!r} (pid {os.getpid()}) {ended}, with {left}"
    log.warning("%s", said)
    again = "call dataplane.connect() again, which starts a new peer"
    if peer.config.starter is None:
        again = "start the peer again, then call dataplane.connect()"
    message = f"{said}. Its rows are lost: {again}"
    return PeerEnded(message, peer=host.name, run=host.plane, why=why)


async def _keep_files(lock: rundir.PeerLock, peer: Peer) -> None:
    """Restore this peer's files if they are removed: without them the next connect() would start a
    second peer of the run. Also keep its card up to date."""
    failed = ""
    while True:
        await asyncio.sleep(FILES_S)
        missing: list[str] = []
        rows, declared, notes = peer.host.rows, peer.directory.declared(), lock.notes
        if not rows:
            _await_first_rows(lock, peer)
        try:
            # In a thread: a busy disk takes long to replace a file.
            await peer.host.threads.run(_restore, lock, missing, rows, declared, notes)
            if peer.config.starter is not None:
                _reopen_log(embedded.log_path(lock.folder, lock.name))
            if not peer.door.is_at(lock.socket_path):
                missing.append(lock.socket_path.name)
                peer.door.open(str(lock.socket_path))
        except (OSError, DataplaneError) as exc:
            if str(exc) != failed:
                log.warning(
                    "peer %r: could not restore its deleted runtime files: %s", lock.name, exc
                )
            failed = str(exc)
            continue
        if missing:
            log.warning(
                "peer %r: restored its deleted runtime files: %s", lock.name, ", ".join(missing)
            )
        failed = ""


def _note(lock: rundir.PeerLock, peer: Peer) -> None:
    """Write the number of rows to the card."""
    lock.note(peer.host.rows, peer.directory.declared())
    if not peer.host.rows:
        _await_first_rows(lock, peer)


def _await_first_rows(lock: rundir.PeerLock, peer: Peer) -> None:
    """Write to the card that the peer has rows before the first rows are confirmed, because the
    peer may be killed right after. Later changes wait for `_keep_files`."""
    host = peer.host

    async def write(rows: int, declared: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # `_keep_files` retries, and logs the error
            await within(CARD_S, host.threads.run(lock.note, rows, declared))

    def note() -> None:
        host.on_first_rows = None
        writing = write(host.rows, peer.directory.declared())
        why = (
            f"the peer could not write {lock.card_path} in time, as it must before it confirms its "
            "first rows: the disk may be slow"
        )
        host.progress.hold(peer.mesh.spawn(writing), why)

    if peer.config.listen is None:  # a peer with an address always reports lost rows
        host.on_first_rows = note


def _restore(
    lock: rundir.PeerLock, missing: list[str], rows: int, declared: Sequence[str], notes: int
) -> None:
    """Restore the peer's files other than its socket, add their names to `missing`, and bring its
    card up to date."""
    missing += lock.restore()
    lock.note(rows, declared, notes)


def _reopen_log(path: Path) -> None:
    """Continue the log in a new file if the file that `connect()` made was removed."""
    if os.fstat(2).st_nlink == 0:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)


async def _metrics(config: PeerConfig) -> Metrics | None:
    """Start metrics, if configured. A peer without metrics does not import their library."""
    if config.metrics is None:
        return None
    try:
        from dataplane.peer.watch.metrics import Metrics
    except ImportError as exc:
        raise InvalidConfig(
            f"metrics need the {exc.name} package: install it with pip install "
            "'dataplane-rl[metrics]', or remove --metrics and unset DATAPLANE_METRICS"
        ) from exc
    metrics = Metrics()
    await metrics.open(config.metrics.host, config.metrics.port)
    return metrics


async def _started(peer: Peer, socket_path: str, ends: tuple[asyncio.Event, ...]) -> bool:
    """Start the peer. Return False if it was told to end before it joined."""
    starting = asyncio.create_task(peer.start(socket_path))
    if starting not in await first_of(starting, *(end.wait() for end in ends)):
        return False
    starting.result()
    return True
