"""The command line: `dataplane peer` starts a peer by hand, `dataplane status` shows what runs,
`dataplane clean` ends what nobody needs, `dataplane probe` tries what carries values between hosts,
`dataplane token` makes the secret that peers of several machines share.

Errors are one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataplane import __version__
from dataplane.errors import DataplaneError, PeerAmbiguous, PeerNotFound, counted
from dataplane.launch import config, discovery, embedded, rundir, runs
from dataplane.launch.bulk_tls import find_bulk_tls
from dataplane.launch.config import PeerConfig
from dataplane.launch.device import find_device_arena
from dataplane.launch.metrics import find_metrics, parse_metrics
from dataplane.launch.spill import find_spill, parse_spill
from dataplane.launch.token import new_token, read_token
from dataplane.launch.transport import find_transport, parse_transport

_WATCH_PERIOD_S = 2.0
_RATE_S = 0.5
"""Between the two looks that tell rates."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        return code
    except DataplaneError as error:
        print(f"dataplane: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has seen enough, and what is left has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dataplane", description="Rows between RL stages.")
    parser.add_argument("--version", action="version", version=f"dataplane {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    peer = commands.add_parser("peer", help="run this host's peer until it is stopped")
    peer.add_argument("--name", default="a", help="its name on this host (default: %(default)s)")
    peer.add_argument("--listen", metavar="tcp://HOST:PORT", help="where other peers reach it")
    peer.add_argument("--seeds", metavar="ADDR,ADDR", help="all peers' addresses, or none")
    peer.add_argument("--join", action="store_true", help="join a plane that runs, as no seed")
    peer.add_argument("--roster", metavar="etcd://HOST:PORT", help="let etcd keep the roster")
    peer.add_argument("--arena", metavar="SIZE", help="memory for rows, such as 8GiB")
    peer.add_argument("--spill", metavar="DIR[:SIZE]", help="where values go when it is full")
    peer.add_argument("--device-arena", metavar="SIZE", help="GPU memory for rows, of each GPU")
    peer.add_argument("--transport", metavar="T", help="auto, required:NAME, off:NAME,NAME or off")
    peer.add_argument("--bulk-tls", action="store_true", help="encrypt values between hosts")
    peer.add_argument("--metrics", metavar="HOST:PORT", help="show them to Prometheus there")
    peer.add_argument("--token-file", metavar="F", help="the secret that all peers share")
    peer.add_argument("--run", metavar="NAME", help="the run that it serves (default: default)")
    peer.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    peer.add_argument("--linger", metavar="S", help="leave so long after the last client")
    peer.add_argument("--linger-unread", metavar="S", help="... while rows are unread")
    peer.add_argument("--starter", help=argparse.SUPPRESS)
    peer.set_defaults(command=_peer)

    status = commands.add_parser("status", help="show your runs on this host and what they hold")
    status.add_argument("--peer", metavar="NAME", help="only this peer")
    status.add_argument("--run", metavar="NAME", help="only this run")
    status.add_argument("--watch", action="store_true", help="again every two seconds")
    status.add_argument("--json", action="store_true", help="one JSON object, for programs")
    status.set_defaults(command=_status)

    clean = commands.add_parser("clean", help="end your runs on this host that nobody needs")
    clean.add_argument("--run", metavar="NAME", help="only this run")
    clean.add_argument("--force", action="store_true", help="also with unread rows or clients")
    clean.set_defaults(command=_clean)

    probe = commands.add_parser("probe", help="try what carries values between the hosts")
    probe.add_argument("--peer", help="ask this one of the host's peers")
    probe.add_argument("--run", metavar="NAME", help="its run (default: the only one there is)")
    probe.add_argument("--require", metavar="NAME", help="exit 1 unless it works between all")
    probe.add_argument("--json", action="store_true", help="one JSON object, for programs")
    probe.set_defaults(command=_probe)

    token = commands.add_parser("token", help="make a cluster token: dataplane token > F")
    token.set_defaults(command=_token)
    return parser


def _peer(arguments: argparse.Namespace) -> int:
    configuration = peer_config(arguments)
    # Imported here: `dataplane status` must not load the peer.
    from dataplane.peer.main import run

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    code: int = run(configuration, None)
    return code


def peer_config(arguments: argparse.Namespace) -> PeerConfig:
    """The configuration that the arguments and, where they are silent, the variables give."""
    run = runs.run_of_peer(arguments.run)
    if arguments.seeds:
        place = discovery.Place(config.parse_seeds(arguments.seeds), arguments.listen)
    else:
        place = discovery.find_place(run)
    linger = arguments.linger or os.environ.get("DATAPLANE_LINGER")
    unread = arguments.linger_unread or linger
    arena_bytes = (
        config.parse_size(arguments.arena) if arguments.arena else config.default_arena_bytes()
    )
    token = read_token(arguments.token_file) if arguments.token_file else config.find_token()
    return PeerConfig(
        run=run,
        name=arguments.name,
        listen=arguments.listen or place.listen,
        seeds=place.seeds,
        arena_bytes=arena_bytes,
        run_dir=rundir.run_dir() if arguments.run_dir is None else arguments.run_dir,
        linger_s=config.parse_seconds(linger) if linger else None,
        linger_unread_s=config.parse_seconds(unread) if unread else None,
        starter=rundir.parse_starter(arguments.starter) if arguments.starter else None,
        join=arguments.join or (place.join and not arguments.listen),
        roster=config.parse_roster(arguments.roster or os.environ.get("DATAPLANE_ROSTER", "")),
        token=token,
        spill=(
            parse_spill(arguments.spill, arena_bytes)
            if arguments.spill
            else find_spill(arena_bytes)
        ),
        metrics=(
            parse_metrics(arguments.metrics, token) if arguments.metrics else find_metrics(token)
        ),
        transport=(
            parse_transport(arguments.transport) if arguments.transport else find_transport()
        ),
        bulk_tls=arguments.bulk_tls or find_bulk_tls(),
        device_arena=find_device_arena(arguments.device_arena),
    )


def _token(arguments: argparse.Namespace) -> int:
    out = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(out).st_mode):
        os.fchmod(out, 0o600)  # before anything is in it
    print(new_token(), flush=True)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    # Imported here: `dataplane peer` must not load what only people read.
    from dataplane import cli_status

    before: dict[str, cli_status.Acked] = {}
    looked = 0.0
    while True:
        found = _found(arguments.run, arguments.peer)
        seen = [_seen(run, arguments.peer) for run in found]
        if arguments.json:
            print(json.dumps({"runs": seen}, default=str), flush=True)
        else:
            now = time.monotonic()
            acked = {one["run"]: cli_status.acked(one["peers"]) for one in seen}
            if looked:
                clear = "\x1b[2J\x1b[H" if arguments.watch and sys.stdout.isatty() else ""
                texts = []
                for one in seen:
                    was = before.get(one["run"], {})
                    rates = {
                        at: (rows - was[at]) / (now - looked)
                        for at, rows in acked[one["run"]].items()
                        if at in was
                    }
                    texts.append([_heading(one), *cli_status.lines(one["peers"], rates)])
                print(clear + "\n\n".join("\n".join(text) for text in texts), flush=True)
            before, looked, again = acked, now, not looked
            if again:  # the second look tells rates
                time.sleep(_RATE_S)
                continue
        if not arguments.watch:
            return 0
        time.sleep(_WATCH_PERIOD_S)


def _probe(arguments: argparse.Namespace) -> int:
    # Imported here: `dataplane peer` must not load the client.
    from dataplane import cli_probe

    found = _found(arguments.run, arguments.peer)
    if len(found) > 1:
        names = ", ".join(run.name for run in found)
        raise PeerAmbiguous(f"several runs have peers on this host: {names}; say which, --run NAME")
    peer = arguments.peer or found[0].peers[0].name
    report = cli_probe.probe(found[0].name, peer)
    return cli_probe.show(report, arguments.require, arguments.json)


def _found(run: str | None, peer: str | None) -> list[rundir.LivingRun]:
    """The user's runs on this host, or those that are asked for. PeerNotFound where none is there.
    Looking never starts a peer."""
    living = rundir.living_runs()
    found = [
        one
        for one in living
        if run in (None, one.name) and (peer is None or peer in [p.name for p in one.peers])
    ]
    if not found:
        asked = (f" named {peer!r}" if peer else "") + (f" of run {run!r}" if run else "")
        running = [f"{one.name}: {', '.join(peer.name for peer in one.peers)}" for one in living]
        raise PeerNotFound(
            f"no peer{asked} runs on this host (running: {'; '.join(running) or 'none'})",
            running=running,
        )
    return found


def _seen(run: rundir.LivingRun, name: str | None) -> dict[str, Any]:
    """A run, who began it, and the stats of its peers on this host, by name."""
    peers: dict[str, Any] = {}
    for peer in run.peers:
        if name in (None, peer.name):
            peers[peer.name] = _stats(run.name, peer.name)
    starter = run.starter
    return {
        "run": run.name,
        "named": not runs.is_unnamed(run.name),
        "age_s": round(run.age_s, 1),
        "begun_by": {"pid": starter.pid, "command": starter.command} if starter else None,
        "peers": peers,
    }


def _stats(run: str, peer: str) -> dict[str, Any]:
    """What a peer says of itself; one that is stuck hides no other."""
    # Imported here: `dataplane peer` must not load the client.
    from dataplane.client.opening import open_session
    from dataplane.client.plane import Plane

    try:
        with Plane(open_session(peer, run, visit=True)) as plane:
            return plane.stats()
    except DataplaneError as error:
        return {"error": error.message}


def _clean(arguments: argparse.Namespace) -> int:
    """End what nobody needs, and say what; leave the rest, and say why."""
    base = rundir.run_dir()
    for run in rundir.living_runs(base):
        for peer in run.peers:
            if arguments.run not in (None, run.name):
                continue
            what = f"run {run.name!r}, {runs.age(run.age_s)} old: peer {peer.name!r}"
            stats = _stats(run.name, peer.name)
            needed = _needed(stats, peer, arguments.run is not None)
            if needed and not arguments.force:
                print(f"left {what}, because {needed}; --force ends it", flush=True)
                continue
            embedded.end(peer)
            print(f"ended {what}{f', though {needed}' if needed else ''}", flush=True)
    for folder in runs.ended(base):
        if arguments.run in (None, folder.name) and rundir.remove(folder):
            print(f"removed what run {folder.name!r} left in {folder}", flush=True)
    return 0


def _needed(stats: dict[str, Any], peer: rundir.LivingPeer, named: bool) -> str:
    """Why a peer is not ended without --force; "" where nobody needs it."""
    if "error" in stats:
        return f"it does not answer ({stats['error']})"
    rows = {name: one["rows"] for name, one in stats["partitions"].items() if one["rows"]}
    if rows:
        names = ", ".join(f"{count} of {name!r}" for name, count in rows.items())
        return f"it has rows that nobody has read to the end: {names}"
    clients = sum(one.get("clients", 0) for one in stats["peers"].values()) - 1  # this one
    if clients:
        return f"its run has {counted(clients, 'client')}"
    if (peer.card is None or peer.card.starter is None) and not named:
        return "it was started by hand"
    return ""


def _heading(seen: dict[str, Any]) -> str:
    """Which run it is, and who began it."""
    by = seen["begun_by"]
    who = f"`{by['command']}` (pid {by['pid']})" if by else "a peer that was started by hand"
    unnamed = "" if seen["named"] else " (unnamed)"
    return f"run {seen['run']}{unnamed}, begun {runs.age(seen['age_s'])} ago by {who}"
