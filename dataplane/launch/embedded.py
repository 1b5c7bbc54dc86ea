"""Attaching to this host's peer, or starting an embedded one. Runs in the client's process.

Many processes may attach at once: one of them starts the peer while it holds a lock, and the
others wait until the peer's socket answers. The peer gets a session of its own and no parent, so
neither Ctrl-C nor the exit of its starter ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
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
    counted,
    duration,
    few,
    nearest,
)
from dataplane.launch import discovery, processes, rundir, runs, settings
from dataplane.launch.ending import FreshStart
from dataplane.launch.settings import PeerConfig
from dataplane.launch.values import allowed_memory_bytes, check_peer_name, parse_address
from dataplane.version import __version__
from dataplane.wire.messages import HelloDone

EMBEDDED = "embedded"
"""The name of a peer that `connect()` started; see `embedded_name`."""
log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
MEET_TIMEOUT_S = 300.0
"""The same for a peer that joins other hosts: the hosts of a job start at different times."""
OLD_S = 86_400.0
RECENT_S = 60.0
"""An unnamed run that ended with rows less than this long ago is reported: its user may have meant
them for the next line of a script."""
SHOWN_RUNS = 3
_POLL_S = 0.01
_RESTORED_POLL_S = 0.1
_LOG_TAIL_BYTES = 2_000

# A tiny interpreter starts the peer and exits. The peer is then not a child of the client, and
# leaves no zombie there. This needs neither a shell nor a fork of a process with threads. Signals
# that the client blocks or ignores, as Ray's workers do, would not end the peer either.
_LAUNCHER = (
    "import os, sys, signal; os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, "
    "setsigmask=[], setsigdef=[signal.SIGINT, signal.SIGTERM])"
)


@dataclass(frozen=True, slots=True)
class Attached:
    """A peer of this host that answers. began: whether it was started for this process. before:
    the cards of earlier peers."""

    run: runs.Run
    peer: rundir.LivingPeer
    living: rundir.LivingRun
    me: rundir.Starter
    began: bool = False
    before: tuple[rundir.DeadPeer, ...] = ()

    def line(self, found: HelloDone | None, first: bool = False) -> tuple[int, str]:
        """Describe the attachment in one log line, and return its level: WARNING if something
        may surprise the user. found: what the run had; None if that is not known. first: the peer
        had no client before."""
        card, starter = self.peer.card, self.living.starter
        peer = f"peer {self.peer.name!r}"
        if card is not None:
            peer += f", pid {card.pid}, dataplane {card.version}"
        if self.began:
            of_its_own = f" (unnamed, for `{self.me.command}`)" if self.run.unnamed else ""
            said = f"started run {self.run.name!r}{of_its_own}: {peer}"
        else:
            by = f"by `{starter.command}` (pid {starter.pid})" if starter else "by hand"
            age = duration(self.living.age_s)
            said = f"joined run {self.run.name!r}, started {by} {age} ago: {peer}"
        remarks = self._of_beginning() if self.began else self._of_joining(found)
        if first and not self.began and card is not None and card.before is not None:
            left = rundir.DeadPeer(card.before, self.living.folder, card.before_s + card.age_s)
            remarks = [*_gone(left), *remarks]
        if card is not None and card.version != __version__:
            remarks.append(f"this process uses dataplane {__version__}")
        if self.run.unnamed and discovery.waits_for_ray():
            remarks.append(
                "Ray is not initialised yet, so this process uses its own run. To join the run of "
                "the Ray job, call connect() after ray.init()"
            )
        return logging.WARNING if remarks else logging.INFO, "; ".join((said, *remarks))

    def _of_joining(self, found: HelloDone | None) -> list[str]:
        if found is None or found.clients:
            return []
        starter = self.living.starter
        if found.rows:
            said = f"the run has {counted(found.rows, 'row')} but no clients"
            if found.left_by:
                said += (
                    f": the last client on this host (`{found.left_by}`) disconnected "
                    f"{duration(found.left_ms / 1000.0)} ago"
                )
            if starter is not None and not self.run.unnamed:
                said += ". To start with an empty run instead, call connect(fresh=True)"
            return [said]
        named = self.run.said_by in ("hand", "variable") and not self.run.unnamed
        # No client has left: the process that started this run is about to connect.
        if named and found.left_by and starter is not None and not runs.is_of_launch(starter):
            return [
                "another launch started this run and has no clients left. To start with a new "
                "run instead, call connect(fresh=True)"
            ]
        return []

    def _of_beginning(self) -> list[str]:
        expected = self.me.fresh  # connect(fresh=True) asks for an empty run
        remarks = [] if expected else [one for dead in self.before[:1] for one in _gone(dead)]
        if self.run.said_by == "launch" and not remarks and not expected:
            base = self.living.folder.parent
            left = [one for one in runs.left_by_siblings(base) if one.age_s < RECENT_S]
            remarks += [_ended(min(left, key=lambda one: one.age_s))] if left else []
        if self.run.over:
            remarks.append(
                f"DATAPLANE_RUN={self.run.over} refers to an unnamed run whose processes have "
                "exited or are on another host: to share one run between hosts, set DATAPLANE_RUN "
                "to a name of your choice"
            )
        if self.run.said_by in ("hand", "variable"):
            named = {one.name: one for one in rundir.living_runs(self.living.folder.parent)}
            if near := nearest(self.run.name, named):
                remarks.append(
                    f"this host also has {_introduced(named[near])}, which has a similar name: to "
                    f"join that run instead, call connect(run={near!r})"
                )
        if self.run.said_by != "launch":
            return remarks
        relatives = runs.related_runs(self.run.name)
        if relatives:
            return [*remarks, f"{few(relatives, SHOWN_RUNS)}. {_SHARE}"]
        if (parent := runs.parent_of_multiprocessing()) is not None:
            remarks.append(
                f"`{processes.command(parent)}` (pid {parent}), which started this "
                f"process, has not connected. {_SHARE}"
            )
        living = [one for one in rundir.living_runs() if not runs.has_ended(one.name)]
        others = [_introduced(one) for one in living[::-1] if one.name != self.run.name]
        if others:
            remarks.append(
                f"this host also has {few(others, SHOWN_RUNS)}: to share rows between programs "
                "that you start separately, give all of them the same run name with "
                "connect(run=…) or DATAPLANE_RUN"
            )
        return remarks

    @property
    def socket(self) -> str:
        """The path of the peer's socket."""
        return str(self.peer.socket)


_SHARE = (
    "This process uses its own run, and runs do not share rows. To share rows, call "
    "connect() in the common parent before it starts the processes, or give all of them "
    "the same run name with connect(run=…) or DATAPLANE_RUN"
)


def _gone(dead: rundir.DeadPeer) -> list[str]:
    """Return lines about the rows that were lost with a peer; none if it had none."""
    card = dead.card
    last = f"its last peer {card.name!r} (pid {card.pid})"
    rows, age = counted(card.rows, "row"), duration(dead.age_s)
    if card.address is not None:  # its rows and values may be on several hosts
        how = f"stopped ({card.ended})" if card.ended else "was killed"
        return [f"this host starts empty: {last} {how}. part.lost() lists rows that were lost"]
    if not card.rows:
        return []
    if card.ended:
        return [f"the run starts empty: {last} stopped {age} ago with {rows} ({card.ended})"]
    # Its card is older than its end, which no process saw.
    log = f". See its log, {log_path(dead.folder, card.name)}.old" if card.starter else ""
    return [f"the run starts empty: {last} was killed. It had {rows} {age} ago{log}"]


def _ended(dead: rundir.DeadPeer) -> str:
    """Return a line about the rows of an unnamed run that may have been meant for this process."""
    card = dead.card
    who = f" of `{card.starter.command}`, which has the same parent," if card.starter else ""
    return (
        f"an unnamed run{who} ended {duration(dead.age_s)} ago with {counted(card.rows, 'row')}: "
        "to pass rows from one program to the next, give both the same run name with "
        "connect(run=…) or DATAPLANE_RUN"
    )


def attach(
    run: str | None = None,
    peer_name: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    fresh_start: FreshStart | None = None,
) -> Attached:
    """Return a peer of this host and of a run (default: this process's, see `runs`) that answers.

    peer_name: the peer (default DATAPLANE_PEER), of any run if none is named. Without a name: the
    only peer of the run, or an embedded one that is started. Raises PeerNotFound, PeerAmbiguous,
    SeedsMissing, RunMissing, or ConnectError if no peer answers within 20 s, or 300 s if it must
    join other hosts.

    fresh_start: ends an embedded peer of an earlier launch, but not one of this launch. With
    several hosts, each process ends the peers of its host, and peers of the new launch refuse
    older ones. Raises InvalidCall if this call may not end the peer, or if launches cannot be
    distinguished.
    """
    peer_name = peer_name or settings.of_variable("peer", environ)
    base = rundir.run_dir(environ)
    belongs = runs.find_run(run, environ)
    if peer_name is not None and peer_name != EMBEDDED:
        belongs = _run_of(peer_name, belongs, base)
    folder = rundir.plane_dir(belongs.name, base)
    deadline = time.monotonic() + START_TIMEOUT_S
    me, begun = runs.this_process(environ), None
    if fresh_start is not None:
        if peer_name is not None:
            raise InvalidCall(
                "fresh=True starts the run with a new peer, so it cannot be combined "
                f"with the peer name {peer_name!r}: leave out one of the two. If the peer name "
                "comes from DATAPLANE_PEER, unset that variable"
            )
        me = replace(me, fresh=True)
        with _start_lock(folder, deadline):
            fresh_start.end_earlier_launches(folder, belongs.name, me, environ)
    while True:
        peer = _choose(folder, belongs.name, peer_name, environ)
        if peer is None or (is_embedded(peer.name) and not answers(peer.socket)):
            config = embedded_config(belongs.name, environ, me)
            if config.seeds:
                deadline = max(deadline, time.monotonic() + MEET_TIMEOUT_S)
            if peer is None:
                peer, begun = _start_once(config, folder, deadline)
        if _answers_in_time(peer, folder, deadline):
            break  # else the peer was leaving: ask the next one
    living = rundir.LivingRun(belongs.name, folder, rundir.living_peers(folder))
    # Its card may have been written after the first look.
    seen = dataclasses.replace(peer, card=rundir.read_card(folder, peer.name) or peer.card)
    return Attached(belongs, seen, living, me, begun is not None, tuple(begun or ()))


def _introduced(run: rundir.LivingRun) -> str:
    who = f"`{run.starter.command}`" if run.starter else ", ".join(one.name for one in run.peers)
    return f"run {run.name!r} ({who}, {duration(run.age_s)} old)"


def _run_of(peer_name: str, mine: runs.Run, base: Path) -> runs.Run:
    """Return the run of the named peer, if no run is named."""
    living = rundir.living_runs(base)
    found = [one.name for one in living if peer_name in (peer.name for peer in one.peers)]
    named = mine.said_by in ("hand", "variable") and not mine.unnamed
    if named or mine.name in found:
        return mine
    if len(found) > 1:
        raise PeerAmbiguous(
            f"{len(found)} runs on this host ({', '.join(found)}) have a peer named "
            f"{peer_name!r}: choose a run with connect({peer_name!r}, run={found[0]!r}) or "
            f"DATAPLANE_RUN={found[0]}",
            running=found,
        )
    return runs.Run(found[0], "hand") if found else mine


def embedded_config(
    run: str, environ: Mapping[str, str], starter: rundir.Starter | None = None
) -> PeerConfig:
    """Return the configuration of the embedded peer. Raises every error that can be found before it
    starts."""
    place = discovery.find_place(run, environ)
    seeds = place.seeds
    if seeds and runs.is_unnamed(run):
        raise RunMissing(
            f"this job has peers on several hosts ({', '.join(seeds)}), but they have no common "
            "run name: set DATAPLANE_RUN to a name that is the same on every host and new for each "
            "launch. With torchrun, passing --rdzv-id NAME is enough",
            seeds=seeds,
        )
    if seeds and place.listen is None:
        raise ConnectError(
            f"none of the seeds ({', '.join(seeds)}) is an address of this host: correct "
            "DATAPLANE_SEEDS, or start this host's peer by hand with `dataplane peer --name … "
            "--listen tcp://host:port --seeds …`",
            seeds=seeds,
        )
    given = settings.by_hand({"run": run, "name": embedded_name(place.listen)})
    return peer_config(given, environ, starter or runs.this_process(environ), place)


def peer_config(
    given: Mapping[str, settings.SettingText],
    environ: Mapping[str, str] = os.environ,
    starter: rundir.Starter | None = None,
    place: discovery.Place | None = None,
) -> PeerConfig:
    """Return the configuration of a peer, from arguments, else variables, else the launcher.
    starter: the process that starts it by `connect()`, None for a peer started by hand. place: the
    peer's place in its run, if the caller knows it."""
    said = {**settings.settings_in(environ, by_hand=starter is None), **given}
    value = partial(settings.value, said=said)
    run = runs.run_of_peer(given["run"].text if "run" in given else None, environ)
    listen: str | None = value("listen")
    if place is None and "seeds" in given:
        place = discovery.Place(value("seeds") or (), listen)
    elif place is None:
        place = discovery.find_place(run, environ)
    own = {"run", "listen", "seeds"}
    fields = {
        one.field: text
        for one in settings.OF_PEERS
        if one.name not in own and (text := value(one.name)) is not None
    }
    fields.setdefault("name", "a")
    fields.setdefault("linger_unread_s", fields.get("linger_s"))
    if starter is not None:
        fields.setdefault("linger_s", settings.LINGER_S)
        if fields["linger_unread_s"] is None:
            fields["linger_unread_s"] = settings.LINGER_UNREAD_S
    if "arena_bytes" not in fields:
        fields["arena_bytes"] = allowed_memory_bytes() // 4
    if "run_dir" not in fields:
        fields["run_dir"] = rundir.run_dir(environ)
    if place.join and not listen:
        fields["join"] = True
    return PeerConfig(
        run=run, listen=listen or place.listen, seeds=place.seeds, starter=starter, **fields
    )


def embedded_name(listen: str | None) -> str:
    """The name `embedded`, with a suffix for this host in a run of several hosts."""
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
    """Whether a process accepts connections at a unix socket."""
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
                f"run {run!r} has no peer named {name!r} on this host (running: {names}): start "
                f"that peer with `dataplane peer --name {name} --run {run}`, or choose another "
                "peer",
                name=name,
                running=list(living),
            )
        return living[name]
    if len(living) > 1 and (own := discovery.node_peer(environ)) in living:
        return living[own]
    if len(living) > 1:
        raise PeerAmbiguous(
            f"run {run!r} has several peers on this host ({names}): choose one with "
            f"connect({next(iter(living))!r}) or DATAPLANE_PEER={next(iter(living))}",
            running=list(living),
        )
    return next(iter(living.values()), None)


def _start_once(
    config: PeerConfig, folder: Path, deadline: float
) -> tuple[rundir.LivingPeer, list[rundir.DeadPeer] | None]:
    """Start the embedded peer, or wait for the process that does. Return the peer, and the dead
    peers of the run if this process started it, else None."""
    with _start_lock(folder, deadline):
        while (peer := _choose(folder, config.run, None, {})) is None and (
            rundir.is_inhabited(folder) or rundir.holder(folder, config.name) is not None
        ):
            # The peer lives, and will restore its files, which were removed.
            if time.monotonic() > deadline:
                pid = rundir.holder(folder, config.name)
                raise ConnectError(
                    f"a peer of run {config.run!r} (pid {pid or 'unknown'}) is alive, but "
                    f"its files in {folder} were removed, and the peer has not restored them. The "
                    "process may be suspended: kill it, or use another run name",
                    run=config.run,
                    pid=pid,
                )
            time.sleep(_RESTORED_POLL_S)
        if peer is not None:
            return peer, None
        _remove_old(config.run_dir)
        before = rundir.dead_peers(folder)
        start(config, deadline - time.monotonic())
        return rundir.LivingPeer(config.name, folder / f"{config.name}.sock", None), before


def _remove_old(base: Path) -> None:
    """Remove old folders of runs whose peers crashed or ended with rows. They stay for a while, for
    their logs and cards."""
    for folder in rundir.abandoned(base):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > OLD_S:
                rundir.remove(folder)


@contextlib.contextmanager
def _start_lock(folder: Path, deadline: float) -> Iterator[None]:
    while (fd := rundir.try_lock(folder / rundir.STARTING)) is None:
        if time.monotonic() > deadline:
            raise ConnectError(
                "another process started a peer for this run, but that peer was not "
                f"ready in time: check its log, {log_path(folder)}, then call connect() "
                "again",
                log=str(log_path(folder)),
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(fd)


def log_path(folder: Path, name: str = EMBEDDED) -> Path:
    """Return the log file of a peer that `connect()` started. The previous one is kept as
    `.old`."""
    return folder / f"{EMBEDDED if is_embedded(name) else name}.log"


def start(config: PeerConfig, timeout_s: float) -> None:
    """Start a peer that outlives this process. Return when it answers; raises ConnectError."""
    folder = rundir.plane_dir(config.run, config.run_dir)
    peer = rundir.LivingPeer(config.name, folder / f"{config.name}.sock", None)
    alive = _spawn(config, folder)
    try:
        _answers_in_time(peer, folder, time.monotonic() + timeout_s, alive)
    finally:
        os.close(alive)


def _spawn(config: PeerConfig, folder: Path) -> int:
    """Start the peer. Return a descriptor that reports hang-up once the peer has exited."""
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
        raise ConnectError(
            "could not start a peer, because its launcher process "
            f"failed: {_tail(log)}. Fix the cause, then call connect() again"
        )
    return alive


def command_line(config: PeerConfig) -> list[str]:
    """The command that starts this peer."""
    return [sys.executable, "-m", "dataplane", "peer", *config.arguments()]


def _environment() -> dict[str, str]:
    """Return this process's environment without settings, which are on the command line. Adds the
    path of a checkout that is imported without being installed."""
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
    """Wait until the peer answers. Raise ConnectError if that takes too long, or if `alive` reports
    that the peer has exited. Without `alive`, return False if it has."""
    while not answers(peer.socket):
        if alive is None and not rundir.is_living(peer):
            return False
        ended = alive is not None and bool(select.select([alive], [], [], 0)[0])
        if ended or time.monotonic() > deadline:
            log = log_path(folder, peer.name)
            pid = None if ended else rundir.holder(folder, peer.name)
            what = "exited at startup" if ended else _silent(pid)
            if peer.card is not None and not peer.socket.exists():
                what = (
                    f"(pid {peer.card.pid}) is alive, but its socket {peer.socket} is missing: "
                    "stop the peer and start it again"
                )
            ours = alive is not None or is_embedded(peer.name)
            hint = f". Last lines of its log, {log}: {_tail(log)}" if ours else ""
            raise ConnectError(
                f"peer {peer.name!r} {what}{hint}", peer=peer.name, pid=pid, log=str(log)
            )
        time.sleep(_POLL_S)
    return True


def _silent(pid: int | None) -> str:
    """Describe a peer that accepts no connection: the queue of its socket is full, or it is not
    ready. pid: None or 0 if unknown."""
    if not pid:
        return "did not answer in time: check its log, then connect again"
    stopped, log = processes.is_stopped(pid), "check its log, then connect again"
    return (
        f"(pid {pid}) did not answer in time: {processes.how_to_continue(pid) if stopped else log}"
    )


def _tail(log: Path) -> str:
    try:
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
    except OSError:
        return "(no log)"
