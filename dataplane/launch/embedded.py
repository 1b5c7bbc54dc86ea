"""Attaching to this host's peer, or starting an embedded one; runs in the client's process.

Many processes may ask at once: one of them starts the peer while it holds a lock, the others wait
until the peer's socket answers. The peer gets a session of its own and no parent that waits for
it, so that neither Ctrl-C nor the end of its starter ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dataplane.errors import ConnectError, PeerAmbiguous, PeerNotFound
from dataplane.launch import discovery, rundir
from dataplane.launch.config import (
    EMBEDDED,
    LINGER_S,
    LINGER_UNREAD_S,
    PeerConfig,
    default_arena_bytes,
    parse_seconds,
    refuse_reserved,
)

START_TIMEOUT_S = 20.0
_POLL_S = 0.01
_LOG_TAIL_BYTES = 2_000

# A tiny interpreter in between starts the peer and ends: the peer is then nobody's child, and no
# zombie of it stays in the client. It needs neither a shell nor a fork of a process with threads.
_LAUNCHER = "import os, sys; os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)"


def attach(
    plane: str | None = None,
    peer_name: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The path of a socket at which a peer of this host answers.

    peer_name: which of several (default DATAPLANE_PEER). Without one: the only peer of the plane,
    or an embedded one that is started. Raises PeerNotFound, PeerAmbiguous, SeedsMissing, or
    ConnectError when no peer answers within 20 s.
    """
    plane = plane or discovery.plane_name(environ)
    peer_name = peer_name or environ.get("DATAPLANE_PEER") or None
    base = rundir.run_dir(environ)
    folder = rundir.plane_dir(plane, base)
    deadline = time.monotonic() + START_TIMEOUT_S
    peer = _choose(folder, plane, peer_name)
    if peer is None:
        peer = _start_once(embedded_config(plane, base, environ), folder, deadline)
    _wait_until_answers(peer, folder, deadline)
    return str(peer.socket)


def embedded_config(plane: str, run_dir: Path, environ: Mapping[str, str]) -> PeerConfig:
    """What the embedded peer is started with; everything that can be refused is refused here."""
    refuse_reserved(environ)
    seeds = discovery.find_seeds(environ)
    listen = discovery.own_seed(seeds)
    if seeds and listen is None:
        raise ConnectError(
            f"none of the seeds ({', '.join(seeds)}) is an address of this host: start its peer "
            "by hand, dataplane peer --name ... --listen tcp://host:port --seeds ...",
            seeds=seeds,
        )
    linger = environ.get("DATAPLANE_LINGER")
    return PeerConfig(
        plane=plane,
        name=EMBEDDED,
        listen=listen,
        seeds=seeds,
        arena_bytes=default_arena_bytes(environ),
        run_dir=run_dir,
        linger_s=parse_seconds(linger) if linger else LINGER_S,
        linger_unread_s=parse_seconds(linger) if linger else LINGER_UNREAD_S,
        embedded=True,
    )


def answers(path: Path) -> bool:
    """Whether something accepts connections at a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _choose(folder: Path, plane: str, name: str | None) -> rundir.LivingPeer | None:
    living = {peer.name: peer for peer in rundir.living_peers(folder)}
    names = ", ".join(living) or "none"
    if name is not None:
        if name not in living and name != EMBEDDED:
            raise PeerNotFound(
                f"no peer named {name!r} of plane {plane!r} runs on this host (running: {names}): "
                f"start it, dataplane peer --name {name} --plane {plane}, or name another",
                name=name,
                running=list(living),
            )
        return living.get(name)
    if len(living) > 1:
        raise PeerAmbiguous(
            f"several peers of plane {plane!r} run on this host: {names}; say which, "
            f"connect({next(iter(living))!r}) or DATAPLANE_PEER={next(iter(living))}",
            running=list(living),
        )
    return next(iter(living.values()), None)


def _start_once(config: PeerConfig, folder: Path, deadline: float) -> rundir.LivingPeer:
    """Start the embedded peer, or wait for whoever is doing so."""
    with _start_lock(folder, deadline):
        peer = _choose(folder, config.plane, None)
        if peer is None:
            peer = rundir.LivingPeer(config.name, folder / f"{config.name}.sock", None)
            alive = _spawn(config, folder)
            try:
                _wait_until_answers(peer, folder, deadline, alive)
            finally:
                os.close(alive)
        return peer


@contextlib.contextmanager
def _start_lock(folder: Path, deadline: float) -> Iterator[None]:
    while (fd := rundir.try_lock(folder / ".starting")) is None:
        if time.monotonic() > deadline:
            raise ConnectError(
                f"another process has been starting the embedded peer for {START_TIMEOUT_S:.0f} s; "
                f"its log is {log_path(folder)}",
                log=str(log_path(folder)),
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(fd)


def log_path(folder: Path) -> Path:
    """Where an embedded peer's output goes; the one before it is kept as `.old`."""
    return folder / f"{EMBEDDED}.log"


def _spawn(config: PeerConfig, folder: Path) -> int:
    """Start the peer; a descriptor that reports hang-up when it has ended."""
    log = log_path(folder)
    if log.exists():
        log.replace(log.with_suffix(".log.old"))
    alive, held_by_peer = os.pipe()
    try:
        with log.open("xb") as out:
            launcher = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command_line(config)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=[held_by_peer],
                env=_environment(),
                cwd="/",
                check=False,
            )
    finally:
        os.close(held_by_peer)
    if launcher.returncode:
        os.close(alive)
        raise ConnectError(f"the embedded peer could not be started: {_tail(log)}")
    return alive


def command_line(config: PeerConfig) -> list[str]:
    """The command that starts this peer."""
    command = [sys.executable, "-m", "dataplane", "peer", "--embedded", "--name", config.name]
    command += ["--plane", config.plane, "--run-dir", str(config.run_dir)]
    command += ["--arena", str(config.arena_bytes), "--seeds", ",".join(config.seeds) or "none"]
    command += ["--listen", config.listen] if config.listen else []
    if config.linger_s is not None:
        command += ["--linger", str(config.linger_s)]
    if config.linger_unread_s is not None:
        command += ["--linger-unread", str(config.linger_unread_s)]
    return command


def _environment() -> dict[str, str]:
    """Ours, and a checkout that is imported without being installed."""
    environment = dict(os.environ)
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        paths = [str(home), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _wait_until_answers(
    peer: rundir.LivingPeer, folder: Path, deadline: float, alive: int | None = None
) -> None:
    while not answers(peer.socket):
        ended = alive is not None and bool(select.select([alive], [], [], 0)[0])
        if ended or time.monotonic() > deadline:
            log = log_path(folder)
            what = "ended at once" if ended else f"does not answer within {START_TIMEOUT_S:.0f} s"
            if peer.card is not None and not peer.socket.exists():
                what = (
                    f"(pid {peer.card.pid}) lives, but its socket {peer.socket} is missing: end "
                    "it and start it again"
                )
            hint = f"; its log, {log}, ends: {_tail(log)}" if peer.name == EMBEDDED else ""
            raise ConnectError(f"peer {peer.name!r} {what}{hint}", peer=peer.name, log=str(log))
        time.sleep(_POLL_S)


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
    except OSError:
        return "(no log)"
