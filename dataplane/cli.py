"""The command line: `dataplane peer` starts a peer by hand, `dataplane status` shows what runs,
`dataplane probe` tries what carries values between hosts, `dataplane token` makes the secret that
peers of several machines share.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dataplane.errors import DataplaneError, PeerNotFound
from dataplane.launch import config, discovery, rundir
from dataplane.launch.bulk_tls import find_bulk_tls
from dataplane.launch.config import PeerConfig
from dataplane.launch.device import find_device_arena
from dataplane.launch.metrics import find_metrics, parse_metrics
from dataplane.launch.spill import find_spill, parse_spill
from dataplane.launch.token import new_token, read_token
from dataplane.launch.transport import find_transport, parse_transport

_WATCH_PERIOD_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except DataplaneError as error:
        print(f"dataplane: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dataplane", description="Rows between RL stages.")
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
    peer.add_argument("--plane", help="the plane's name (default: uid and job id)")
    peer.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    peer.add_argument("--linger", metavar="S", help="leave so long after the last client")
    peer.add_argument("--linger-unread", metavar="S", help="... while rows are unread")
    peer.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    peer.set_defaults(run=_peer)

    status = commands.add_parser("status", help="show the peers of this host and what they hold")
    status.add_argument("--peer", help="only this one")
    status.add_argument("--plane", help="the plane's name (default: uid and job id)")
    status.add_argument("--watch", action="store_true", help="again every two seconds")
    status.add_argument("--json", action="store_true", help="one JSON object, for programs")
    status.set_defaults(run=_status)

    probe = commands.add_parser("probe", help="try what carries values between the hosts")
    probe.add_argument("--peer", help="ask this one of the host's peers")
    probe.add_argument("--plane", help="the plane's name (default: uid and job id)")
    probe.add_argument("--require", metavar="NAME", help="exit 1 unless it works between all")
    probe.add_argument("--json", action="store_true", help="one JSON object, for programs")
    probe.set_defaults(run=_probe)

    token = commands.add_parser("token", help="make a cluster token: dataplane token > F")
    token.set_defaults(run=_token)
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
    if arguments.seeds:
        place = discovery.Place(config.parse_seeds(arguments.seeds), arguments.listen)
    else:
        place = discovery.find_place()
    linger = arguments.linger or os.environ.get("DATAPLANE_LINGER")
    unread = arguments.linger_unread or linger
    arena_bytes = (
        config.parse_size(arguments.arena) if arguments.arena else config.default_arena_bytes()
    )
    token = read_token(arguments.token_file) if arguments.token_file else config.find_token()
    return PeerConfig(
        plane=arguments.plane or discovery.plane_name(),
        name=arguments.name,
        listen=arguments.listen or place.listen,
        seeds=place.seeds,
        arena_bytes=arena_bytes,
        run_dir=rundir.run_dir() if arguments.run_dir is None else arguments.run_dir,
        linger_s=config.parse_seconds(linger) if linger else None,
        linger_unread_s=config.parse_seconds(unread) if unread else None,
        embedded=arguments.embedded,
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
    while True:
        seen = _collect(arguments.plane or discovery.plane_name(), arguments.peer)
        if arguments.json:
            print(json.dumps(seen, default=str), flush=True)
        else:
            clear = "\x1b[2J\x1b[H" if arguments.watch and sys.stdout.isatty() else ""
            print(clear + "\n".join(_lines(seen)), flush=True)
        if not arguments.watch:
            return 0
        time.sleep(_WATCH_PERIOD_S)


def _probe(arguments: argparse.Namespace) -> int:
    # Imported here: `dataplane peer` must not load the client.
    from dataplane import cli_probe

    report = cli_probe.probe(arguments.plane or discovery.plane_name(), arguments.peer)
    return cli_probe.show(report, arguments.require, arguments.json)


def _collect(plane: str, name: str | None) -> dict[str, Any]:
    """The stats of the plane's peers on this host, by name. Looking never starts a peer."""
    # Imported here: `dataplane peer` must not load the client.
    import dataplane

    living = [peer.name for peer in rundir.living_peers(rundir.plane_dir(plane))]
    names = living if name is None else [peer for peer in living if peer == name]
    if not names:
        running = ", ".join(living) or "none"
        raise PeerNotFound(
            f"no peer{f' named {name!r}' if name else ''} of plane {plane!r} runs on this host "
            f"(running: {running})",
            running=living,
        )
    peers = {}
    for peer in names:
        with dataplane.connect(peer, plane=plane) as connected:
            peers[peer] = connected.stats()
    return {"plane": plane, "peers": peers}


def _lines(tree: dict[str, Any], depth: int = 0) -> Iterator[str]:
    """A nested dict as indented text, sizes readable."""
    indent = "  " * depth
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, depth + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            for item in value:
                yield from _lines(item, depth + 1)
        else:
            yield f"{indent}{key}: {_readable(str(key), value)}"


def _readable(key: str, value: Any) -> str:
    if key.endswith("bytes") and isinstance(value, int) and value >= 1024:
        size, units = float(value), iter(("KiB", "MiB", "GiB", "TiB"))
        unit = "B"
        while size >= 1024 and (larger := next(units, None)):
            size, unit = size / 1024, larger
        return f"{size:.1f} {unit} ({value})"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
