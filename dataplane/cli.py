"""The command line: `dataplane peer` starts a peer by hand, `dataplane status` shows what runs.

Errors are one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dataplane.errors import DataplaneError, PeerNotFound
from dataplane.launch import config, discovery, rundir
from dataplane.launch.config import PeerConfig

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
    peer.add_argument("--arena", metavar="SIZE", help="memory for rows, such as 8GiB")
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
    config.refuse_reserved()
    given = config.parse_seeds(arguments.seeds) if arguments.seeds else None
    seeds = discovery.find_seeds() if given is None else given
    listen = arguments.listen or (discovery.own_seed(seeds) if arguments.seeds is None else None)
    linger = arguments.linger or os.environ.get("DATAPLANE_LINGER")
    unread = arguments.linger_unread or linger
    return PeerConfig(
        plane=arguments.plane or discovery.plane_name(),
        name=arguments.name,
        listen=listen,
        seeds=seeds,
        arena_bytes=(
            config.parse_size(arguments.arena) if arguments.arena else config.default_arena_bytes()
        ),
        run_dir=rundir.run_dir() if arguments.run_dir is None else arguments.run_dir,
        linger_s=config.parse_seconds(linger) if linger else None,
        linger_unread_s=config.parse_seconds(unread) if unread else None,
        embedded=arguments.embedded,
    )


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
