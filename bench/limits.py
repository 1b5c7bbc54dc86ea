"""A memory cgroup (v1 or v2) for each host of a run, with the limit that was asked for. Without a
limit it counts the processes that the kernel kills.

The groups are below the runner's own, so that its limits still apply. Processes are in a group from
their first instruction. There is no substitute: if no group can be made, `NoLimits` says why.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import counted

_PREFIX = "dataplane-bench"
_RUNNER = f"{_PREFIX}-runner"
_ROOT, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_EMPTY_S = 10.0  # a killed process with gigabytes takes a while to go
_TICK_S = 0.01
_LAST_CHARGE = 4 << 20


class NoLimits(RuntimeError):
    """The bench cannot limit memory on this machine. The message says why."""


class OutOfMemory(RuntimeError):
    """The kernel killed a process of a host at the host's limit."""


class MachineFull(RuntimeError):
    """The kernel killed a process below its host's limit, or without one: the machine itself ran
    out of memory."""


@dataclass(frozen=True, slots=True)
class _Files:
    """The file names of one version of cgroups."""

    limit: str
    swap_limit: str  # of memory and swap (v1), of swap (v2)
    usage: str
    kills: str
    file_cache: str  # in memory.stat, shared memory included
    shared: str


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    "total_cache",
    "total_shmem",
)
_V2 = _Files("memory.max", "memory.swap.max", "memory.current", "memory.events", "file", "shmem")


@dataclass(frozen=True, slots=True)
class HostCgroup:
    """One host's cgroup. limit_bytes: 0 where there is no limit."""

    path: Path
    files: _Files
    limit_bytes: int

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """A command line that enters the group and then becomes `argv`, with the same pid."""
        enter = 'echo $$ >"$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.path / "cgroup.procs"), *argv]

    def kills(self) -> int:
        """How many of the group's processes the kernel killed because memory ran out."""
        return _table(self.path / self.files.kills)["oom_kill"]

    def close(self) -> None:
        """Remove the group, and kill the processes that are left in it."""
        deadline = time.monotonic() + _EMPTY_S
        while self.path.exists():
            for pid in (self.path / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TICK_S)

    def held_bytes(self) -> int:
        """The bytes that the kernel charges the host, without file pages that it could reclaim."""
        stat = _table(self.path / "memory.stat")
        usage = int((self.path / self.files.usage).read_text())
        return max(0, usage - stat[self.files.file_cache] + stat[self.files.shared])

    def met_limit(self) -> bool:
        """Whether the host ever reached its limit. Otherwise a kill had another cause."""
        if not self.limit_bytes:
            return False
        if self.files is _V2:
            return _table(self.path / "memory.events")["max"] > 0
        # Its counter of refusals stays 0 on new kernels. The last charge asks for up to 2 MiB.
        most = int((self.path / "memory.max_usage_in_bytes").read_text())
        return most >= self.limit_bytes - _LAST_CHARGE

    def _open(self) -> None:
        self.path.mkdir()
        if not self.limit_bytes:
            return
        (self.path / self.files.limit).write_text(str(self.limit_bytes))
        swap = self.path / self.files.swap_limit
        if swap.exists():  # otherwise this kernel does not limit swap
            swap.write_text(str(self.limit_bytes if self.files is _V1 else 0))


@contextmanager
def host_cgroups(hosts: int, limit_bytes: int) -> Iterator[list[HostCgroup]]:
    """Yield one cgroup per host, and remove them at the end. If the machine allows none, raise
    NoLimits, or yield [] if no limit was asked for."""
    limits: list[HostCgroup] = []
    with ExitStack() as opened:
        try:
            parent, files = _parent()
            _remove_leftovers(parent)
            for host in range(hosts):
                path = parent / f"{_PREFIX}-{os.getpid()}-host{host}"
                limits.append(HostCgroup(path, files, limit_bytes))
                opened.callback(limits[-1].close)
                limits[-1]._open()
        except (OSError, NoLimits) as exc:
            if not limit_bytes:
                opened.close()
                limits.clear()
            elif isinstance(exc, NoLimits):
                raise
            else:
                raise NoLimits(
                    f"cannot set a memory limit on this machine: {exc}. Leave out "
                    "the limit, or run as root"
                ) from exc
        yield limits


def check(limits: Sequence[HostCgroup]) -> None:
    """Raise OutOfMemory or MachineFull if the kernel has killed a process on one of the hosts."""
    for host, limit in enumerate(limits):
        if limit.kills():
            if not limit.met_limit():
                below = "was below its limit" if limit.limit_bytes else "had no limit"
                raise MachineFull(
                    f"the machine ran out of memory while host {host} {below}: end other programs "
                    "on the machine, or use fewer hosts or a lower limit"
                )
            raise OutOfMemory(f"host {host} reached its limit of {limit.limit_bytes >> 20} MiB")


def _parent(root: Path = _ROOT, proc: Path = _PROC) -> tuple[Path, _Files]:
    """The group below which groups can be made, and the version of its cgroups. With version 2 the
    runner may have to leave it for one below."""
    group, files = _own(root, proc)
    if files is _V1:
        return group, files
    if group.name == _RUNNER:
        return group.parent, files
    if "memory" not in _words(group / "cgroup.controllers"):
        raise NoLimits(
            "cannot set a memory limit on this machine, because this cgroup has no "
            "memory controller: enable it, or leave out the limit"
        )
    if "memory" not in _words(group / "cgroup.subtree_control"):
        _enable(group)
    return group, files


def _own(root: Path = _ROOT, proc: Path = _PROC) -> tuple[Path, _Files]:
    """The runner's own group, and the version of its cgroups."""
    lines = (proc / "self" / "cgroup").read_text().splitlines()
    parts = (line.split(":", 2) for line in lines)
    own = {controllers: path.lstrip("/") for _, controllers, path in parts}
    if "memory" in own:
        # In a container the path may be the host's: then only the root of the mount is there.
        mount = root / "memory"
        group = mount / own["memory"]
        return (group if group.is_dir() else mount), _V1
    group = root / own.get("", "")
    return (group if group.is_dir() else root), _V2


def _enable(group: Path) -> None:
    """v2: a group with processes may limit none below it, so the runner steps down first."""
    others = [pid for pid in _words(group / "cgroup.procs") if int(pid) != os.getpid()]
    if others:
        raise NoLimits(
            f"cannot set a memory limit on this machine: {group} contains "
            f"{counted(len(others), 'other process', 'other processes')}. Start the bench in its "
            "own group: systemd-run --user --scope -p Delegate=yes …"
        )
    leaf = group / _RUNNER
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    (group / "cgroup.subtree_control").write_text("+memory")


def _remove_leftovers(parent: Path) -> None:
    """Groups of runners that were killed; their processes died with them."""
    for path in parent.glob(f"{_PREFIX}-*-host*"):
        runner = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if not Path(f"/proc/{runner}").exists():
            with suppress(OSError):  # a process is still exiting: the next run removes it
                path.rmdir()


def _table(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def _words(path: Path) -> list[str]:
    return path.read_text().split()
