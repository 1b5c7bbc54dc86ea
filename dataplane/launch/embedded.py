"""Attaching to this host's peer, or starting an embedded one; runs in the client's process.

Many processes may ask at once: one of them starts the peer while it holds a lock, the others wait
until the peer's socket answers. The peer gets a session of its own and no parent that waits for
it, so that neither Ctrl-C nor the end of its starter ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash
from msgspec.structs import replace

from dataplane.errors import (
    ConnectError,
    InvalidCall,
    InvalidConfig,
    PeerAmbiguous,
    PeerNotFound,
    RunMissing,
    few,
)
from dataplane.launch import discovery, rundir, runs, settings
from dataplane.launch.settings import PeerConfig
from dataplane.launch.values import (
    AUTO,
    Spill,
    allowed_memory_bytes,
    check_peer_name,
    parse_address,
)
from dataplane.version import __version__

EMBEDDED = "embedded"
"""The name of a peer that `connect()` started; see `embedded_name`."""
log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
MEET_TIMEOUT_S = 300.0
"""... of a peer that other hosts must let in: the hosts of a job start at different times."""
END_S = 15.0
OLD_S = 86_400.0
SHOWN_RUNS = 3
_POLL_S = 0.01
_LOG_TAIL_BYTES = 2_000

# A tiny interpreter in between starts the peer and ends: the peer is then nobody's child, and no
# zombie of it stays in the client. It needs neither a shell nor a fork of a process with threads.
# Signals that the client blocks or ignores, as Ray's workers do, would not end the peer either.
_LAUNCHER = (
    "import os, sys, signal; os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, "
    "setsigmask=[], setsigdef=[signal.SIGINT, signal.SIGTERM])"
)


@dataclass(frozen=True, slots=True)
class Attached:
    """A peer of this host that answers, and whether it was started for it."""

    run: runs.Run
    peer: rundir.LivingPeer
    living: rundir.LivingRun
    me: rundir.Starter
    began: bool = False

    def line(self) -> str:
        """What happened, in one line for the log."""
        card, starter = self.peer.card, self.living.starter
        peer = f"peer {self.peer.name!r}"
        if card is not None:
            peer += f", pid {card.pid}, dataplane {card.version}"
        if self.began:
            of_its_own = f" of its own (`{self.me.command}`)" if self.run.unnamed else ""
            said = f"began run {self.run.name!r}{of_its_own}: {peer}"
        else:
            by = f"by `{starter.command}` (pid {starter.pid})" if starter else "by hand"
            age = runs.age(self.living.age_s)
            said = f"joined run {self.run.name!r}, begun {by} {age} ago: {peer}"
        return "; ".join((said, *self.remarks()))

    def remarks(self) -> list[str]:
        """What is not as most people expect it, and what to do then."""
        card, starter = self.peer.card, self.living.starter
        remarks = []
        named = self.run.said_by in ("hand", "variable") and not self.run.unnamed
        if not self.began and named and starter and starter.launch != self.me.launch:
            remarks.append("another launch began it: connect(fresh=True) would end it first")
        if card is not None and card.version != __version__:
            remarks.append(f"this process has dataplane {__version__}")
        if self.run.unnamed and discovery.waits_for_ray():
            remarks.append(
                "ray is not initialised yet, so this is a run of its own: connect() after "
                "ray.init() to be in the run of its job"
            )
        if self.began and self.run.said_by == "launch":
            living = [one for one in rundir.living_runs() if not runs.has_ended(one.name)]
            others = [_introduced(one) for one in living[::-1] if one.name != self.run.name]
            if others:
                remarks.append(
                    f"on this host there is also {few(others, SHOWN_RUNS)}: programs in several "
                    "terminals share a name, connect(run=…) or DATAPLANE_RUN"
                )
        return remarks

    @property
    def socket(self) -> str:
        """The path of the socket at which it answers."""
        return str(self.peer.socket)


def attach(
    run: str | None = None,
    peer_name: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    fresh: bool = False,
) -> Attached:
    """A peer of this host and of a run (default: this process's, see `runs`), which answers.

    peer_name: which of several (default DATAPLANE_PEER), of whatever run where none is named.
    Without one: the only peer of the run, or an embedded one that is started. Raises PeerNotFound,
    PeerAmbiguous, SeedsMissing, RunMissing, or ConnectError when no peer answers within 20 s, or
    300 s where other hosts have to let it in.

    fresh: an embedded peer that another launch has left is ended before, and one of this process;
    on several hosts each ends its own, and those of the new launch refuse what is left elsewhere.
    InvalidCall where that is not this call's to end, or launches cannot be told apart.
    """
    peer_name = peer_name or settings.of_variable("peer", environ)
    base = rundir.run_dir(environ)
    belongs = runs.find_run(run, environ)
    if peer_name is not None and peer_name != EMBEDDED:
        belongs = _run_of(peer_name, belongs, base)
    folder = rundir.plane_dir(belongs.name, base)
    deadline = time.monotonic() + START_TIMEOUT_S
    me, began = runs.this_process(environ), False
    if fresh:
        me = replace(me, fresh=True)
        _end_what_is_left(folder, belongs.name, peer_name, me, environ, deadline)
    while True:
        peer = _choose(folder, belongs.name, peer_name, environ)
        if peer is None or (is_embedded(peer.name) and not answers(peer.socket)):
            config = embedded_config(belongs.name, environ, me)
            if config.seeds:
                deadline = max(deadline, time.monotonic() + MEET_TIMEOUT_S)
            if peer is None:
                peer, began = _start_once(config, folder, deadline)
        if _answers_in_time(peer, folder, deadline):
            break  # else it was about to leave when it was seen, and the next one is asked
    living = rundir.LivingRun(belongs.name, folder, rundir.living_peers(folder))
    return Attached(belongs, rundir.seen_again(folder, peer), living, me, began)


def _introduced(run: rundir.LivingRun) -> str:
    who = f"`{run.starter.command}`" if run.starter else ", ".join(one.name for one in run.peers)
    return f"run {run.name!r} ({who}, {runs.age(run.age_s)} old)"


def _end_what_is_left(
    folder: Path,
    run: str,
    peer_name: str | None,
    me: rundir.Starter,
    environ: Mapping[str, str],
    deadline: float,
) -> None:
    """End the embedded peers of a run that is begun anew, unless this launch has done so before."""
    several = bool(discovery.find_seeds(run, environ))
    if several and discovery.launchers_run(environ) is None:
        raise InvalidCall(
            f"fresh=True cannot tell this launch of run {run!r} from the one before on its other "
            "hosts: no launcher (Slurm, mpirun, Ray, torchrun --rdzv-id) says an id that is alike "
            "on all hosts and new each time; give the new launch another name, DATAPLANE_RUN"
        )
    if peer_name is not None:
        raise InvalidCall(
            f"fresh=True begins a run with a peer of its own, and peer {peer_name!r} is asked for: "
            "leave one of them out (DATAPLANE_PEER too)"
        )
    with _start_lock(folder, deadline):
        for peer in rundir.living_peers(folder):
            starter = peer.card.starter if peer.card else None
            if peer.card is None or starter is None:
                raise InvalidCall(
                    f"peer {peer.name!r} of run {run!r} was started by hand: stop it there, "
                    f"dataplane clean --run {run} --force does it, and fresh=True begins the run"
                )
            mine = starter.launch == me.launch
            if several and mine and not starter.fresh:
                raise InvalidCall(
                    f"`{starter.command}` (pid {starter.pid}) of this launch has connected to run "
                    f"{run!r} without fresh=True: where a run has several hosts, all processes of "
                    "a launch say so or none does"
                )
            if not mine or (starter.process == me.process and not several):
                end(peer)
                log.info("ended run %r, begun %s ago", run, runs.age(peer.card.age_s))


def end(peer: rundir.LivingPeer, patience_s: float = END_S) -> None:
    """End a peer at once, with all rows, and wait for it; one that does not react is killed."""
    if peer.card is None:
        return
    try:
        handle = os.pidfd_open(peer.card.pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], patience_s)[0]:
                return
    finally:
        os.close(handle)


def _run_of(peer_name: str, mine: runs.Run, base: Path) -> runs.Run:
    """The run of the peer that is named, where nobody has named the run."""
    living = rundir.living_runs(base)
    found = [one.name for one in living if peer_name in (peer.name for peer in one.peers)]
    named = mine.said_by in ("hand", "variable") and not mine.unnamed
    if named or mine.name in found:
        return mine
    if len(found) > 1:
        raise PeerAmbiguous(
            f"{len(found)} runs have a peer {peer_name!r} on this host: {', '.join(found)}; say "
            f"which, connect({peer_name!r}, run={found[0]!r}) or DATAPLANE_RUN={found[0]}",
            running=found,
        )
    return runs.Run(found[0], "hand") if found else mine


def _names(folder: Path) -> list[str]:
    return [peer.name for peer in rundir.living_peers(folder)]


def embedded_config(
    run: str, environ: Mapping[str, str], starter: rundir.Starter | None = None
) -> PeerConfig:
    """What the embedded peer is started with; everything that can be refused is refused here."""
    place = discovery.find_place(run, environ)
    seeds = place.seeds
    if seeds and runs.is_unnamed(run):
        raise RunMissing(
            f"peers of several hosts ({', '.join(seeds)}) must know that they are of one run, and "
            "nothing here has the same name on all of them: set DATAPLANE_RUN=NAME alike on every "
            "host (with torchrun, --rdzv-id NAME does it), a new name for a new launch",
            seeds=seeds,
        )
    if seeds and place.listen is None:
        raise ConnectError(
            f"none of the seeds ({', '.join(seeds)}) is an address of this host: start its peer "
            "by hand, dataplane peer --name ... --listen tcp://host:port --seeds ...",
            seeds=seeds,
        )
    given = settings.by_hand({"run": run, "name": embedded_name(place.listen)})
    return peer_config(given, environ, starter or runs.this_process(environ), place)


def peer_config(
    given: Mapping[str, settings.Said],
    environ: Mapping[str, str] = os.environ,
    starter: rundir.Starter | None = None,
    place: discovery.Place | None = None,
) -> PeerConfig:
    """What a peer is started with: what is given by hand, else what variables say, else what a
    launcher does. starter: who starts it by `connect()`, None where somebody does it by hand.
    place: where it is in its plane, where the caller has found that."""
    said = {**settings.said_in(environ, by_hand=starter is None), **given}
    value = partial(settings.value, said=said)
    run = runs.run_of_peer(given["run"].text if "run" in given else None, environ)
    listen: str | None = value("listen")
    if place is None and "seeds" in given:
        place = discovery.Place(value("seeds") or (), listen)
    elif place is None:
        place = discovery.find_place(run, environ)
    arena_bytes: int | None = value("arena")
    if arena_bytes is None:
        arena_bytes = allowed_memory_bytes() // 4
    spill: Spill | None = value("spill")
    linger_s, unread_s = value("linger"), value("linger-unread")
    unread_s = linger_s if unread_s is None else unread_s
    if starter is not None:
        linger_s = settings.LINGER_S if linger_s is None else linger_s
        unread_s = settings.LINGER_UNREAD_S if unread_s is None else unread_s
    return PeerConfig(
        run=run,
        name=value("name") or "a",
        listen=listen or place.listen,
        seeds=place.seeds,
        arena_bytes=arena_bytes,
        run_dir=value("run-dir") or rundir.run_dir(environ),
        linger_s=linger_s,
        linger_unread_s=unread_s,
        starter=starter,
        token=value("token-file"),
        join=value("join") or (place.join and not listen),
        roster=value("roster") or (),
        spill=spill.beside(arena_bytes) if spill else None,
        metrics=value("metrics"),
        transport=value("transport") or AUTO,
        bulk_tls=bool(value("bulk-tls")),
        device_arena=value("device-arena"),
    )


def embedded_name(listen: str | None) -> str:
    """`embedded`, and in a plane of several hosts what tells it from those of the others."""
    if listen is None:
        return EMBEDDED
    host, _ = parse_address(listen)
    plain = f"{EMBEDDED}-{host}"
    try:
        check_peer_name(plain)
    except InvalidConfig:
        return f"{EMBEDDED}-{xxhash.xxh3_64_hexdigest(host.encode())}"
    return plain


def is_embedded(name: str) -> bool:
    """Whether a peer of this name was started by `connect()`."""
    return name == EMBEDDED or name.startswith(f"{EMBEDDED}-")


def answers(path: Path) -> bool:
    """Whether something accepts connections at a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _choose(
    folder: Path, run: str, name: str | None, environ: Mapping[str, str]
) -> rundir.LivingPeer | None:
    living = {peer.name: peer for peer in rundir.living_peers(folder)}
    names = ", ".join(living) or "none"
    if name is not None:
        if name == EMBEDDED:
            return next((peer for peer in living.values() if is_embedded(peer.name)), None)
        if name not in living:
            raise PeerNotFound(
                f"no peer named {name!r} of run {run!r} runs on this host (running: {names}): "
                f"start it, dataplane peer --name {name} --run {run}, or name another",
                name=name,
                running=list(living),
            )
        return living[name]
    if len(living) > 1 and (own := discovery.node_peer(environ)) in living:
        return living[own]
    if len(living) > 1:
        raise PeerAmbiguous(
            f"several peers of run {run!r} are on this host: {names}; say which, "
            f"connect({next(iter(living))!r}) or DATAPLANE_PEER={next(iter(living))}",
            running=list(living),
        )
    return next(iter(living.values()), None)


def _start_once(
    config: PeerConfig, folder: Path, deadline: float
) -> tuple[rundir.LivingPeer, bool]:
    """Start the embedded peer, or wait for whoever is doing so; whether it was started here."""
    with _start_lock(folder, deadline):
        peer = _choose(folder, config.run, None, {})
        if peer is not None:
            return peer, False
        _remove_old(config.run_dir)
        start(config, deadline - time.monotonic())
        return rundir.LivingPeer(config.name, folder / f"{config.name}.sock", None), True


def _remove_old(base: Path) -> None:
    """Folders of unnamed runs whose peers crashed stay for their logs, but not for ever."""
    for folder in runs.ended(base):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > OLD_S:
                rundir.remove(folder)


@contextlib.contextmanager
def _start_lock(folder: Path, deadline: float) -> Iterator[None]:
    while (fd := rundir.try_lock(folder / rundir.STARTING)) is None:
        if time.monotonic() > deadline:
            raise ConnectError(
                "another process has been starting the embedded peer for too long; its log is "
                f"{log_path(folder)}",
                log=str(log_path(folder)),
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(fd)


def log_path(folder: Path, name: str = EMBEDDED) -> Path:
    """Where a peer's output goes that was started here; the one before it is kept as `.old`."""
    return folder / f"{EMBEDDED if is_embedded(name) else name}.log"


def start(config: PeerConfig, timeout_s: float) -> None:
    """Start a peer that outlives this process; returns when it answers, else ConnectError."""
    folder = rundir.plane_dir(config.run, config.run_dir)
    peer = rundir.LivingPeer(config.name, folder / f"{config.name}.sock", None)
    alive = _spawn(config, folder)
    try:
        _answers_in_time(peer, folder, time.monotonic() + timeout_s, alive)
    finally:
        os.close(alive)


def _spawn(config: PeerConfig, folder: Path) -> int:
    """Start the peer; a descriptor that reports hang-up when it has ended."""
    log = log_path(folder, config.name)
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
    return [sys.executable, "-m", "dataplane", "peer", *config.arguments()]


def _environment() -> dict[str, str]:
    """Ours without settings, which are on its command line; and a checkout that is imported without
    being installed."""
    ours = {setting.env for setting in settings.TABLE} - {"DATAPLANE_RUN_DIR"}
    environment = {name: text for name, text in os.environ.items() if name not in ours}
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        paths = [str(home), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _answers_in_time(
    peer: rundir.LivingPeer, folder: Path, deadline: float, alive: int | None = None
) -> bool:
    """Wait until it answers; ConnectError where that takes too long. False where it has left: who
    starts it knows by `alive` that it has ended, which is an error then."""
    while not answers(peer.socket):
        if alive is None and peer.name not in _names(folder):
            return False
        ended = alive is not None and bool(select.select([alive], [], [], 0)[0])
        if ended or time.monotonic() > deadline:
            log = log_path(folder, peer.name)
            what = "ended at once" if ended else "does not answer in time"
            if peer.card is not None and not peer.socket.exists():
                what = (
                    f"(pid {peer.card.pid}) lives, but its socket {peer.socket} is missing: end "
                    "it and start it again"
                )
            ours = alive is not None or is_embedded(peer.name)
            hint = f"; its log, {log}, ends: {_tail(log)}" if ours else ""
            raise ConnectError(f"peer {peer.name!r} {what}{hint}", peer=peer.name, log=str(log))
        time.sleep(_POLL_S)
    return True


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
    except OSError:
        return "(no log)"
