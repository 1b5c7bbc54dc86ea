"""Which run this process belongs to. A plane belongs to one run, and has its name.

The first of these that is there:
1. what is said by hand: `connect(run="grpo")`, `dataplane peer --run grpo`;
2. DATAPLANE_RUN. The first `connect()` of a process sets it for the processes that it starts;
3. the launcher's: Slurm's job and step, Kubernetes' set, Ray's session and job, the id of torchrun
   or mpirun;
4. the launch itself: the process group that the shell made for what was typed, by the pid and the
   start time of its leader. Such a run is unnamed, and lasts no longer than its processes.

So what one command starts belongs together, and the same command typed again, or in another
terminal, is another run. Peers that are started by hand are of run `default` instead of 4.
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

from dataplane.launch import discovery, rundir, settings
from dataplane.launch.rundir import Starter
from dataplane.launch.values import check_run

DEFAULT = "default"
"""The run of peers that are started by hand, where nothing names another."""

_LAUNCH = re.compile(r"launch-(\d+)-[0-9a-f]{8}")
_COMMAND_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Run:
    """A run's name, and where it comes from."""

    name: str
    said_by: Literal["hand", "variable", "launcher", "launch"]

    @property
    def unnamed(self) -> bool:
        """Whether it ends with the processes of one launch: nobody else can name it."""
        return is_unnamed(self.name)


def find_run(given: str | None = None, environ: Mapping[str, str] = os.environ) -> Run:
    """The run of this process, see above."""
    if given is not None:
        return Run(check_run(given), "hand")
    if variable := settings.of_variable("run", environ):
        return Run(variable, "variable")
    if launched := discovery.launchers_run(environ):
        return Run(launched, "launcher")
    return Run(_launch(environ), "launch")


def run_of_peer(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The run of a peer that is started by hand."""
    run = find_run(given, environ)
    return DEFAULT if run.said_by == "launch" else run.name


def is_unnamed(name: str) -> bool:
    """Whether this is the name of a launch."""
    return _LAUNCH.fullmatch(name) is not None


def has_ended(name: str) -> bool:
    """Whether an unnamed run's launch has no process any more, so that nobody can join it."""
    match = _LAUNCH.fullmatch(name)
    if match is None or not (leader := int(match[1])):
        return False
    found = _Process.read(leader)
    if found is not None and _name_of(leader, found) != name:
        return True  # the pid is another process's now
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def ended(base: Path) -> list[Path]:
    """The folders of unnamed runs that are over, with what a crash left."""
    names = (folder for folder in base.iterdir() if is_unnamed(folder.name))
    return [one for one in names if has_ended(one.name) and not rundir.living_peers(one)]


def this_process(environ: Mapping[str, str] = os.environ) -> Starter:
    """This process as the one that begins something."""
    group = _group(environ)
    pid, me = os.getpid(), _Process.read(os.getpid())
    launch = discovery.launchers_run(environ) or _name_of(group, _Process.read(group))
    return Starter(
        launch, f"{pid}-{me.started if me else 0}", pid, _command(group) or _command(pid)
    )


@dataclass(frozen=True, slots=True)
class _Process:
    """What /proc says of a process. started: in clock ticks since the host's boot."""

    parent: int
    group: int
    started: int

    @classmethod
    def read(cls, pid: int) -> _Process | None:
        """None where it has ended, or may not be seen."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The second field is the program's name in brackets, and may have brackets in it.
        fields = stat.rpartition(")")[2].split()
        return cls(int(fields[1]), int(fields[2]), int(fields[19]))


def _launch(environ: Mapping[str, str]) -> str:
    group = _group(environ)
    leader = _Process.read(group)
    if group and leader is None:
        # Its script or shell has ended, and the number is its group's for as long as that has
        # processes. Who connected before it ended knows more than its number.
        for run in rundir.living_runs(rundir.run_dir(environ)):
            match = _LAUNCH.fullmatch(run.name)
            if match and int(match[1]) == group:
                return run.name
    return _name_of(group, leader)


def _group(environ: Mapping[str, str]) -> int:
    """The process group of this launch. torchrun gives each rank one of its own: there it is that
    of torchrun."""
    group = os.getpgrp()
    if "TORCHELASTIC_RUN_ID" not in environ:
        return group
    agents, leader = group, _Process.read(group)
    while leader is not None and _is_rank(agents) and leader.parent:
        above = _Process.read(leader.parent)
        if above is None:
            break
        agents = above.group
        leader = _Process.read(agents)
    return agents


def _is_rank(pid: int) -> bool:
    try:
        return b"\0TORCHELASTIC_RUN_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _name_of(group: int, leader: _Process | None) -> str:
    """A launch's name. Group 0 is led from outside of this container, whose first process stands
    for it then."""
    leader = leader if group else _Process.read(1)
    identity = f"{_container()}-{leader.started if leader else 'ended'}"
    return f"launch-{group}-{xxhash.xxh3_64_hexdigest(identity.encode())[:8]}"


def _container() -> str:
    """What tells the pids of one container from those of another that shares the run directory."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if words[0] == sys.executable or "/" in words[0]:
        words[0] = words[0].rpartition("/")[2]
    line = " ".join(word for word in words if word)
    line = "".join(character if character.isprintable() else " " for character in line)
    return line if len(line) <= _COMMAND_CHARACTERS else f"{line[: _COMMAND_CHARACTERS - 1]}…"


def age(seconds: float) -> str:
    """A duration as people say it: 5 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
