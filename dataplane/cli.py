"""The command line: parse the arguments, run one command, print its result.

An error is one line on standard error, and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, TypeAlias

from dataplane import plugins, progress
from dataplane.errors import (
    DataplaneError,
    PeerAmbiguous,
    PeerNotFound,
    counted,
    duration,
    reading_statistics,
)
from dataplane.launch import embedded, ending, processes, rundir, runs, settings
from dataplane.launch.settings import PeerConfig
from dataplane.launch.token import new_token
from dataplane.version import __version__

_PAGE = "127.0.0.1:8787"
_JSON = "print one JSON object, for programs"
_ONLY_RUN = "the run (default: the one that DATAPLANE_RUN names, else the only one on this host)"
_THIS_PEER = "the peer on this host to ask (default: any peer of the run)"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    arguments = _parser().parse_args(argv)
    if wrong := settings.unknown():
        print(f"dataplane: {wrong}", file=sys.stderr)
    try:
        code: int = arguments.command(arguments)
        return code
    except DataplaneError as error:
        print(f"dataplane: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, so the rest of the output is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dataplane",
        description="A data plane for RL post-training: run peers and inspect runs.",
    )
    parser.add_argument("--version", action="version", version=f"dataplane {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    looking = (_add_status, _add_why, _add_watch, _add_trace, _add_record, _add_rows, _add_get)
    for add in (_add_peer, *looking, _add_checkpoint, _add_clean, _add_probe, _add_token):
        add(commands)
    return parser


def _command(commands: Commands, name: str, what: str, more: str = "") -> argparse.ArgumentParser:
    """Add a command. Its line in the list of commands also begins its own help text."""
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.{more}")


def _add_peer(commands: Commands) -> None:
    peer = _command(
        commands,
        "peer",
        "run a peer on this host until you stop it",
        " Most options can also be set with an environment variable, such as DATAPLANE_ARENA for "
        "--arena.",
    )
    for one in settings.OF_PEERS:
        told = f"{one.help} (default: {one.default.replace('`', '')})".replace("%", "%%")
        if one.is_switch:
            action = argparse.BooleanOptionalAction
            peer.add_argument(one.flag, dest=one.name, action=action, help=told)
        else:
            peer.add_argument(one.flag, dest=one.name, metavar=one.form, help=told)
    peer.add_argument("--starter", help=argparse.SUPPRESS)
    peer.set_defaults(command=_peer)


def _add_status(commands: Commands) -> None:
    status = _command(
        commands, "status", "show your runs on this host, their rows and their waiting calls"
    )
    status.add_argument("--peer", metavar="NAME", help="show only this peer")
    status.add_argument("--run", metavar="NAME", help="show only this run")
    status.add_argument("--json", action="store_true", help=_JSON)
    status.set_defaults(command=_status)


def _add_why(commands: Commands) -> None:
    why = _command(
        commands,
        "why",
        "explain why a step took so long, in one sentence per step",
        " Each partition is a step.",
    )
    _add_steps(why)
    _add_source(why)
    why.set_defaults(command=_in("cli_why", "why"))


def _add_trace(commands: Commands) -> None:
    trace = _command(commands, "trace", "write the last steps as a trace for ui.perfetto.dev")
    _add_steps(trace)
    trace.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="file to write, for example step.pftrace; an existing file is overwritten",
    )
    _add_source(trace)
    trace.set_defaults(command=_in("cli_trace", "trace"))


def _add_record(commands: Commands) -> None:
    record = _command(
        commands,
        "record",
        "record the sizes and times of steps, to replay them with `python -m bench run`",
    )
    record.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        required=True,
        help="new or empty directory for the recording",
    )
    record.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help="stop after N steps (default: record until the run ends)",
    )
    record.add_argument("--peer", metavar="NAME", help=_THIS_PEER)
    record.add_argument("--run", metavar="NAME", help=_ONLY_RUN)
    record.set_defaults(command=_in("cli_record", "record"))


def _add_watch(commands: Commands) -> None:
    watch = _command(
        commands,
        "watch",
        "show which workers are waiting, and for what, in the terminal or in a browser",
    )
    watch.add_argument("--peer", metavar="NAME", help=_THIS_PEER)
    watch.add_argument("--run", metavar="NAME", help=_ONLY_RUN)
    watch.add_argument(
        "--page",
        metavar="HOST:PORT",
        nargs="?",
        const=_PAGE,
        help=(
            "instead of using the terminal, serve a web page and print the link to it (default "
            f"address: {_PAGE})"
        ),
    )
    watch.add_argument(
        "--token-file",
        metavar="FILE",
        help=(
            "file with the run's cluster token (default: the path in DATAPLANE_TOKEN_FILE); "
            "required if the page has a non-loopback address"
        ),
    )
    watch.set_defaults(command=_in("cli_watch", "watch"))


def _add_rows(commands: Commands) -> None:
    rows = _command(commands, "rows", "list rows of a partition, without their values")
    rows.add_argument("partition", help="name of a partition, as listed by `dataplane status`")
    rows.add_argument(
        "--stage", metavar="NAME", help="show row states for this stage only (default: all stages)"
    )
    rows.add_argument(
        "--where",
        metavar="TAG=VALUE",
        action="append",
        default=[],
        help="show only rows with this tag value; repeat the option to filter by several tags",
    )
    rows.add_argument(
        "--limit", metavar="N", type=int, default=20, help="list at most N rows (default: 20)"
    )
    _add_source(rows)
    rows.set_defaults(command=_in("cli_rows", "rows"))


def _add_get(commands: Commands) -> None:
    get = _command(commands, "get", "show one row: the dtype, shape and first values of each field")
    get.add_argument("partition", help="name of a partition, as listed by `dataplane status`")
    get.add_argument("key", help="key of a row, as listed by `dataplane rows PARTITION`")
    get.add_argument(
        "--field",
        metavar="NAME",
        action="append",
        help=(
            "show only this field, without copying other fields to this host; may be repeated "
            "(default: all fields)"
        ),
    )
    _add_source(get)
    get.set_defaults(command=_in("cli_rows", "get"))


def _add_checkpoint(commands: Commands) -> None:
    checkpoint = _command(commands, "checkpoint", "read a checkpoint, without connecting to a run")
    below = checkpoint.add_subparsers(required=True, metavar="command")
    export = _command(
        below,
        "export",
        "write the rows of a checkpoint as Parquet files, one for each partition",
        " The columns are the key, group, tags and fields of each row.",
    )
    export.add_argument("directory", metavar="DIR", help="directory written by plane.checkpoint(…)")
    export.add_argument(
        "output", metavar="OUT", help="new or empty directory for the Parquet files"
    )
    export.add_argument(
        "--field",
        metavar="NAME",
        action="append",
        help="export only this field; may be repeated (default: all fields)",
    )
    export.add_argument("--json", action="store_true", help=_JSON)
    export.set_defaults(command=_in("cli_checkpoint", "export"))


def _add_clean(commands: Commands) -> None:
    clean = _command(commands, "clean", "end runs on this host that no client uses")
    clean.add_argument("--run", metavar="NAME", help="end only this run")
    clean.add_argument(
        "--force", action="store_true", help="also end runs that still have clients or unread rows"
    )
    clean.set_defaults(command=_clean)


def _add_probe(commands: Commands) -> None:
    probe = _command(commands, "probe", "test the transports between all hosts")
    _add_source(probe)
    probe.add_argument(
        "--require",
        metavar="NAME",
        help="exit with status 1 unless this transport works between every pair of peers",
    )
    probe.set_defaults(command=_in("cli_probe", "probe"))


def _add_token(commands: Commands) -> None:
    token = _command(
        commands,
        "token",
        "print a new cluster token",
        " Save it with `dataplane token > F`, and copy F to every host, with mode 0600.",
    )
    token.set_defaults(command=_token)


def _add_steps(command: argparse.ArgumentParser) -> None:
    """Options of commands about steps."""
    step = command.add_mutually_exclusive_group()
    step.add_argument(
        "--step", metavar="PARTITION", help="select the step whose partition has this name"
    )
    step.add_argument(
        "--last", metavar="N", type=int, default=1, help="select the last N steps (default: 1)"
    )


def _add_source(command: argparse.ArgumentParser) -> None:
    """Options of commands that ask one peer."""
    command.add_argument("--peer", metavar="NAME", help=_THIS_PEER)
    command.add_argument("--run", metavar="NAME", help=_ONLY_RUN)
    command.add_argument("--json", action="store_true", help=_JSON)


def _peer(arguments: argparse.Namespace) -> int:
    processes.open_standard_descriptors()
    configuration = peer_config(arguments)
    # Imported here: `dataplane status` must not load the peer.
    from dataplane.peer.main import run

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    code: int = run(configuration, None)
    return code


def peer_config(arguments: argparse.Namespace) -> PeerConfig:
    """Return the configuration of a peer from the arguments, then the environment variables."""
    said = {one.name: getattr(arguments, one.name) for one in settings.OF_PEERS}
    texts = {name: _SWITCH.get(text, text) for name, text in said.items()}
    starter = rundir.parse_starter(arguments.starter) if arguments.starter else None
    return embedded.peer_config(settings.by_hand(texts), os.environ, starter)


_SWITCH = {True: "1", False: "0"}


def _token(arguments: argparse.Namespace) -> int:
    out = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(out).st_mode):
        os.fchmod(out, 0o600)  # before anything is in it
    print(new_token(), flush=True)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    seen = [_seen(run, arguments.peer) for run in _found(arguments.run, arguments.peer)]
    if arguments.json:
        print(json.dumps({"runs": seen}, default=str), flush=True)
    else:
        texts = [[_heading(one), *_lines(one["peers"])] for one in seen]
        print("\n\n".join("\n".join(text) for text in texts), flush=True)
    return 0


def _lines(peers: dict[str, Any]) -> list[str]:
    """Return the lines about one run. An error of one run must not hide the others."""
    # Imported here: `dataplane peer` must not load what only people read.
    from dataplane import cli_status

    try:
        return cli_status.lines(peers)
    except DataplaneError as error:
        return [f"  ! {error.message}"]


def _in(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command of another module, which is imported when the command runs: `dataplane peer`
    must not load the client. The command gets the arguments, and `_one_run` to find its peer."""

    def run(arguments: argparse.Namespace) -> int:
        command = plugins.own(f"dataplane.{module}:{name}")
        code: int = command(arguments, partial(_one_run, arguments))
        return code

    return run


def _one_run(arguments: argparse.Namespace) -> tuple[str, rundir.LivingPeer]:
    """Return the name of the run, and the peer to ask. Raise PeerAmbiguous."""
    variable = None if arguments.run else runs.of_variable()
    found = _found(arguments.run or variable, arguments.peer, variable is not None)
    if len(found) > 1:
        names = ", ".join(run.name for run in found)
        raise PeerAmbiguous(
            f"several runs ({names}) have peers on this host: choose a run with --run or "
            "DATAPLANE_RUN"
        )
    run = found[0]
    return run.name, next(one for one in run.peers if arguments.peer in (None, one.name))


def _found(run: str | None, peer: str | None, variable: bool = False) -> list[rundir.LivingRun]:
    """Return the user's runs on this host, or the named one. Raise PeerNotFound if there is none.
    Never starts a peer. variable: whether DATAPLANE_RUN named the run."""
    living = rundir.living_runs()
    found = [
        one
        for one in living
        if run in (None, one.name) and (peer is None or peer in [p.name for p in one.peers])
    ]
    if not found:
        asked = (f" named {peer!r}" if peer else "") + (f" of run {run!r}" if run else "")
        asked += " (named by DATAPLANE_RUN)" if variable else ""
        running = [f"{one.name}: {', '.join(peer.name for peer in one.peers)}" for one in living]
        if not running:
            raise PeerNotFound(
                f"found no runs of this user on this host (looked in {rundir.run_dir()}). Start "
                "one with connect() in a program, or with `dataplane peer`. If your run uses "
                "another DATAPLANE_RUN_DIR, set that value in this shell",
                running=running,
            )
        raise PeerNotFound(
            f"found no peer{asked} on this host. Choose one of the running peers, listed by run: "
            f"{'; '.join(running)}",
            running=running,
        )
    return found


def _seen(run: rundir.LivingRun, name: str | None) -> dict[str, Any]:
    """Return a run, its starter, and the stats of its peers on this host, by name. name: the only
    peer to ask, without the other peers of its plane."""
    # Imported here: `dataplane peer` must not load what only people read.
    from dataplane import cli_status

    peers: dict[str, Any] = {}
    for peer in run.peers:
        if name is None:
            peers[peer.name] = _stats(peer)
        elif name == peer.name:
            try:
                peers[peer.name] = cli_status.alone(_stats(peer))
            except DataplaneError as error:
                peers[peer.name] = {"error": error.message}
    starter = run.starter
    return {
        "run": run.name,
        "named": not runs.is_unnamed(run.name),
        "age_s": round(run.age_s, 1),
        "begun_by": {"pid": starter.pid, "command": starter.command} if starter else None,
        "peers": peers,
    }


def _stats(peer: rundir.LivingPeer, visits: set[int] | None = None) -> dict[str, Any]:
    """Return a peer's stats, or its error, so that a stuck peer hides no other. visits: gets the
    session of this visit, which the peer's run may still list as a client when the next peer is
    asked."""
    # Imported here: `dataplane peer` must not load the client.
    from dataplane.client._sync.plane import Plane
    from dataplane.client.session.opening import visit

    try:
        keeper = visit(peer)
        if visits is not None:
            visits.add(keeper.session.id)
        with Plane(keeper) as plane:
            return plane.stats()
    except DataplaneError as error:
        return {"error": error.message}


def _clean(arguments: argparse.Namespace) -> int:
    """End runs that are not needed, and print what was ended or kept, and why. Return 1 if a peer
    could not be ended."""
    with progress.bar("clean") as bar:
        return _end_unneeded(arguments, bar)


def _end_unneeded(arguments: argparse.Namespace, bar: progress.Bar) -> int:
    base, some, code = rundir.run_dir(), False, 0
    who = f"`{processes.own_command()}` (pid {os.getpid()})"
    only = rundir.folder_of(arguments.run, base) if arguments.run else None
    hidden = ending.without_files(base, only, embedded.EMBEDDED)
    for folder in hidden:
        some, code, pid = True, 1, rundir.holder(folder, embedded.EMBEDDED)
        bar.print(
            f"could not end run {folder.name!r}: its peer (pid {pid or 'unknown'}) is alive, but "
            f"its files in {folder} were removed, and the peer has not restored them: kill that "
            "process"
        )
    there = [
        (run, peer)
        for run in rundir.living_runs(base)
        if arguments.run in (None, run.name)
        for peer in run.peers
    ]
    bar.expect(2 * len(there))
    looked = []  # before any peer ends, because the others may not answer then
    visits = set[int]()
    for run, peer in there:
        stats = _stats(peer, visits)
        looked.append((run, peer, _needed(stats, peer, arguments.run is not None, visits)))
        bar.advance(1, f"asked peer {peer.name!r} of run {run.name!r}")
    for run, peer, needed in looked:
        some = True
        what = f"run {run.name!r}, {duration(run.age_s)} old: peer {peer.name!r}"
        if needed and not arguments.force:
            bar.print(f"kept {what}, because {needed}; use --force to end it")
        elif ending.end(peer, who):
            bar.print(f"ended {what}{f', although {needed}' if needed else ''}")
        else:
            bar.print(f"could not end {what}: {ending.not_ended(peer)}")
            code = 1
        bar.advance(1)
    for folder in rundir.abandoned(base):
        if only in (None, folder) and folder not in hidden and rundir.remove(folder):
            some = True
            bar.print(f"removed the files of run {folder.name!r} in {folder}")
    if not some:
        bar.print("found no runs to end")
    return code


def _needed(stats: dict[str, Any], peer: rundir.LivingPeer, named: bool, visits: Set[int]) -> str:
    """Return why a peer is not ended without --force, or "". visits: sessions of this command."""
    if "error" in stats:
        return f"it does not answer ({stats['error']})"
    try:
        with reading_statistics():
            return _needed_by(stats, peer, named, visits)
    except DataplaneError as error:
        return error.message


def _needed_by(
    stats: dict[str, Any], peer: rundir.LivingPeer, named: bool, visits: Set[int]
) -> str:
    # The rows of the whole run count, because their values may be on this host.
    partitions = stats["everywhere"]["partitions"]
    rows = {name: one["rows"] for name, one in partitions.items() if one["rows"]}
    if rows:
        names = ", ".join(f"{count} in {name!r}" for name, count in rows.items())
        return f"its run has unread rows: {names}"
    own = 1 + sum(one["session"] in visits for one in stats["everywhere"]["clients"])
    clients = sum(one.get("clients", 0) for one in stats["peers"].values()) - own
    if clients:
        return f"its run has {counted(clients, 'client')}"
    if (peer.card is None or peer.card.starter is None) and not named:
        return "it was started by hand"
    return ""


def _heading(seen: dict[str, Any]) -> str:
    """Return a line with the run's name and its starter."""
    by = seen["begun_by"]
    who = f"`{by['command']}` (pid {by['pid']})" if by else "hand"
    unnamed = "" if seen["named"] else " (unnamed)"
    return f"run {seen['run']}{unnamed}, started {duration(seen['age_s'])} ago by {who}"
