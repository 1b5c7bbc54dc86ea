"""Which run this process belongs to. A plane belongs to one run, and has its name.

The first source that names a run counts:
1. an argument: `connect(run="grpo")`, `dataplane peer --run grpo`;
2. DATAPLANE_RUN. The first `connect()` of a process sets it for the processes that it starts after
   that, so they share its run, named or not;
3. the launcher's id: Slurm's job and step, Kubernetes' set, Ray's session and job, the id of
   torchrun or mpirun;
4. otherwise an unnamed run of this process alone, named after its pid and start time. The ranks of
   a torchrun without an id share one, named after torchrun's process.

Processes never share an unnamed run because one shell started them. An unnamed run ends with its
last process: when the process that it is named after has exited and no client is left, its peer
ends too, and a DATAPLANE_RUN that still names it is ignored. Peers that are started by hand use
run `default` instead of 4.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from dataplane.launch import discovery, processes, rundir, settings
from dataplane.launch.processes import Process
from dataplane.launch.rundir import Starter
from dataplane.launch.values import check_run

DEFAULT = "default"
"""The default run of peers that are started by hand."""

_UNNAMED = re.compile(r"launch-(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Run:
    """A run's name, and its source. over: the unnamed run in DATAPLANE_RUN, if it has ended."""

    name: str
    said_by: Literal["hand", "variable", "launcher", "launch"]
    over: str = ""

    @property
    def unnamed(self) -> bool:
        """Whether the run ends with its processes, because no other process can name it."""
        return is_unnamed(self.name)


def find_run(given: str | None = None, environ: Mapping[str, str] = os.environ) -> Run:
    """The run of this process, by the rules above."""
    if given is not None:
        return Run(check_run(given), "hand")
    if variable := of_variable(environ):
        return Run(variable, "variable")
    over = settings.of_variable("run", environ) or ""
    if launched := discovery.launchers_run(environ):
        return Run(launched, "launcher", over)
    return Run(_unnamed(_leader(environ)), "launch", over)


def of_variable(environ: Mapping[str, str] = os.environ) -> str | None:
    """The run that DATAPLANE_RUN names, unless it is an unnamed run that has ended."""
    variable = settings.of_variable("run", environ)
    return variable if variable and not _is_over(variable, environ) else None


def run_of_peer(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The run of a peer that is started by hand."""
    run = find_run(given, environ)
    return DEFAULT if run.said_by == "launch" else run.name


def is_unnamed(name: str) -> bool:
    """Whether this is the name of an unnamed run."""
    return _UNNAMED.fullmatch(name) is not None


def has_ended(name: str) -> bool:
    """Whether this is an unnamed run whose leader, the process that it is named after, has
    exited. Clients that the leader started may still live."""
    match = _UNNAMED.fullmatch(name)
    if match is None:
        return False
    leader = processes.read(int(match[1]))
    return leader is None or _unnamed(leader) != name


def _is_over(name: str, environ: Mapping[str, str]) -> bool:
    """Whether this is an unnamed run without living processes. Its peer ends with them."""
    if not has_ended(name):
        return False
    return not rundir.living_peers(rundir.folder_of(name, rundir.run_dir(environ)))


def this_process(environ: Mapping[str, str] = os.environ) -> Starter:
    """This process as the starter of a run."""
    me, parent = processes.this(), processes.read(os.getppid())
    launch = discovery.launchers_run(environ) or _unnamed(_leader(environ))
    return Starter(
        launch,
        me.identity,
        me.pid,
        processes.own_command(),
        parent=parent.identity if parent else "",
    )


def is_of_launch(starter: Starter) -> bool:
    """Whether this process belongs to the launch of `starter`: both have one launcher, or
    `starter` is this process or a living ancestor of it."""
    me = processes.this()
    if starter.launch == this_process().launch or starter.process == me.identity:
        return True
    return any(above.identity == starter.process for above in processes.ancestors(me))


def related_runs(run: str) -> list[str]:
    """Texts that name the starters of other living runs which users may expect to share rows:
    ancestors and descendants of this process, and processes with a common ancestor that is a
    Python program."""
    me = processes.this()
    above = {one.identity: one.pid for one in processes.ancestors(me)}
    found = []
    for other in rundir.living_runs():
        starter = other.starter
        if starter is None or other.name == run:
            continue
        common, theirs = above.get(starter.parent), processes.read(starter.pid)
        if starter.process in above:
            how = "which started this process"
        elif common is not None and processes.is_python(common):
            how = f"which `{processes.command(common)}` (pid {common}) also started"
        elif theirs is not None and me in processes.ancestors(theirs):
            how = "which this process started before it connected"
        else:
            continue
        found.append(f"`{starter.command}` (pid {starter.pid}), {how}, is in run {other.name!r}")
    return found


def left_by_siblings(base: Path) -> list[rundir.DeadPeer]:
    """The peers of unnamed runs that ended with rows and were started by a process with the same
    parent as this one, such as another line of one script."""
    me, parent = processes.this(), processes.read(os.getppid())
    # A shell may replace itself by its last command, which keeps its pid.
    parents = {me.identity, parent.identity if parent else ""}
    dead = [
        one
        for folder in rundir.abandoned(base)
        if is_unnamed(folder.name) and has_ended(folder.name)
        for one in rundir.dead_peers(folder)
    ]
    return [
        one
        for one in dead
        if one.card.rows and one.card.starter and one.card.starter.parent in parents
    ]


def parent_of_multiprocessing() -> int | None:
    """The pid of the process that started this one by `multiprocessing`, or None."""
    module = sys.modules.get("multiprocessing.process")
    parent = module.parent_process() if module is not None else None
    return parent.pid if parent is not None and processes.read(parent.pid) else None


def _leader(environ: Mapping[str, str]) -> Process:
    """Return the process that names this process's unnamed run: torchrun for its ranks and their
    children, else this process."""
    me = processes.this()
    if _OF_RANKS in environ:
        above = processes.ancestors(me)
        agent = next((p for p in above if not processes.environ_has(p.pid, _OF_RANKS)), None)
        if agent is not None and processes.is_python(agent.pid):
            return agent
    return me


_OF_RANKS = "TORCHELASTIC_RUN_ID"


def _unnamed(leader: Process) -> str:
    identity = f"{_container()}-{leader.started}"
    return f"launch-{leader.pid}-{xxhash.xxh3_64_hexdigest(identity.encode())[:8]}"


def _container() -> str:
    """Return what distinguishes pids of containers that share the run directory."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
