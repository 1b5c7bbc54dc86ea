"""Ending peers of this host, for `connect(fresh=…)` and `dataplane clean`.

The rows of a peer are lost when it ends, so a run in use is ended only by force.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import (
    ConnectError,
    DataplaneError,
    InvalidCall,
    RunInUse,
    counted,
    duration,
    few,
)
from dataplane.launch import discovery, rundir, runs

log = logging.getLogger(__name__)

END_S = 15.0
RESTORE_S = 5.0
"""A peer looks every second whether another program has removed its files."""
PASSING_S, LOOK_S = 2.0, 0.1
"""`dataplane status` and other processes of a launch connect only to look. While every client is
younger than PASSING_S, the clients are listed again every LOOK_S."""
SHOWN_CLIENTS = 3


@dataclass(frozen=True, slots=True)
class Client:
    """A client of a run that is about to be ended. mine: it belongs to this process."""

    pid: int
    command: str
    age_s: float
    mine: bool = False

    def __str__(self) -> str:
        return f"`{self.command}` (pid {self.pid}, {duration(self.age_s)})"


@dataclass(frozen=True, slots=True)
class FreshStart:
    """`connect(fresh=…)`: ends the embedded peers of a run before it starts again, unless this
    launch has done so before.

    clients: asks a peer for the clients of its run; raises DataplaneError if the peer does not
    answer. force: also end a run that has clients.
    """

    clients: Callable[[rundir.LivingPeer], list[Client]]
    force: bool = False

    def end_earlier_launches(
        self, folder: Path, run: str, me: rundir.Starter, environ: Mapping[str, str]
    ) -> None:
        """End the peers of earlier launches.

        Raises RunInUse if the run has clients, unless forced, and InvalidCall if this process
        may not end the run, or if launches cannot be distinguished.
        """
        several = bool(discovery.find_seeds(run, environ))
        if several and discovery.launchers_run(environ) is None:
            raise InvalidCall(
                f"connect(fresh=True) cannot tell this launch of run {run!r} from an "
                "earlier launch, because the launcher sets no launch id that all hosts "
                "share: set DATAPLANE_RUN to a new name for each launch, or use Slurm, "
                "mpirun, Ray or torchrun --rdzv-id, which all set a launch id"
            )
        for peer in rundir.living_peers(folder):
            if _is_to_end(peer, run, me, several):
                self._end(peer, run, me)

    def _end(self, peer: rundir.LivingPeer, run: str, me: rundir.Starter) -> None:
        clients = self._in_use(peer, run)
        shown = few([str(one) for one in clients], SHOWN_CLIENTS)
        if clients and not self.force:
            raise RunInUse(
                f"run {run!r} has {counted(len(clients), 'client')}: {shown}. "
                "connect(fresh=True) does not end a run that is in use: stop the clients, choose "
                'another run name, or call connect(fresh="force") to end the run and lose its rows',
                run=run,
                clients=[
                    {"pid": one.pid, "command": one.command, "age_s": one.age_s} for one in clients
                ],
            )
        age = duration(peer.card.age_s) if peer.card else "?"
        how = 'connect(fresh="force")' if self.force else "connect(fresh=True)"
        if not end(peer, f"`{me.command}` (pid {me.pid}) with {how}"):
            raise ConnectError(
                f"could not stop peer {peer.name!r} of run {run!r}: {not_ended(peer)}",
                peer=peer.name,
            )
        level = logging.WARNING if clients else logging.INFO
        still = f", although it had {counted(len(clients), 'client')}: {shown}" if clients else ""
        log.log(level, "run %r: ended, started %s ago%s", run, age, still)

    def _in_use(self, peer: rundir.LivingPeer, run: str) -> list[Client]:
        """Return the clients that use a run. Clients that connected only to look get PASSING_S to
        disconnect: processes of this launch on other hosts look at the same time."""
        until = time.monotonic() + PASSING_S
        while clients := self._clients(peer, run):
            if self.force or time.monotonic() > until:
                break
            if any(one.age_s > PASSING_S for one in clients):
                break
            time.sleep(LOOK_S)
        return clients

    def _clients(self, peer: rundir.LivingPeer, run: str) -> list[Client]:
        try:
            return [one for one in self.clients(peer) if not one.mine]
        except DataplaneError as exc:
            if self.force:
                return []
            raise RunInUse(
                f"peer {peer.name!r} of run {run!r} did not report its clients ({exc.message}), so "
                'the run may be in use: call connect(fresh="force") to end the run anyway',
                run=run,
                clients=[],
            ) from exc


def _is_to_end(peer: rundir.LivingPeer, run: str, me: rundir.Starter, several: bool) -> bool:
    """several: whether the run has other hosts."""
    starter = peer.card.starter if peer.card else None
    if starter is None:
        raise InvalidCall(
            f"peer {peer.name!r} of run {run!r} was started by hand, and connect(fresh=True) "
            "stops only peers that connect() started: stop this peer first with `dataplane clean "
            f"--run {run} --force`"
        )
    mine = runs.is_of_launch(starter)
    if several and mine and not starter.fresh:
        raise InvalidCall(
            f"`{starter.command}` (pid {starter.pid}), a process of this launch, "
            f"connected to run {run!r} without fresh=True, but all processes of a launch on "
            "several hosts must pass the same fresh= value: pass fresh=True in all of them or "
            "in none"
        )
    return not mine or (starter.process == me.process and not several)


def end(peer: rundir.LivingPeer, who: str) -> bool:
    """End a peer at once, with all rows, and wait until it has exited. A peer that does not react
    is killed. Return whether it has exited. who: the name of the caller for the peer's log and
    clients.

    The kernel supplies the pid, because a card may be missing or come from another pid
    namespace.
    """
    pid = rundir.holder(peer.socket.parent, peer.name)
    if pid is None:
        return not rundir.is_living(peer)
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has exited, or is in another pid namespace
        return not rundir.is_living(peer)
    try:
        rundir.write_ended_by(peer, who)
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], END_S)[0]:
                return True
    except PermissionError:
        return False
    finally:
        os.close(handle)
    return False


def without_files(base: Path, only: Path | None, name: str) -> list[Path]:
    """Return the folders of peers whose files another program has removed, and which have not
    restored them within RESTORE_S. only: the folder of the run to look at, which may be gone too;
    None for all that exist. name: the name of peers that are found without their folder."""

    def lives(folder: Path) -> bool:
        return rundir.is_inhabited(folder) or rundir.holder(folder, name) is not None

    until = time.monotonic() + RESTORE_S
    while True:
        folders = [one for one in base.iterdir() if one.is_dir()] if only is None else [only]
        found = [f for f in sorted(folders) if not rundir.living_peers(f) and lives(f)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(LOOK_S)


def not_ended(peer: rundir.LivingPeer) -> str:
    """Why `end` could not end a peer, and what to do."""
    pid = rundir.holder(peer.socket.parent, peer.name)
    if pid:
        return f"pid {pid} is still alive after SIGKILL; check its state in /proc/{pid}/status"
    return "its process runs in another container or PID namespace; stop it there"
