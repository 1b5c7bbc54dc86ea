"""The network: a bridge, and for each host a namespace whose only interface is plugged into it.

Everything lies in a namespace of the test bed's own, which the whole process enters first: when it
ends, in whatever way, the kernel takes bridge, links and hosts with it, and nothing of the machine
is ever changed. Root is not needed where users may have namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.processes import leashed

_INSIDE = "DATAPLANE_TESTBED_INSIDE"
_TOOLS = ("ip", "unshare", "nsenter")
_BRIDGE = "dp-br"
_NET = "10.77.0"
_FIRST = 10
MAX_HOSTS = 200
_START_S = 20.0
_BURST = "1mb"
_QUEUE = "50ms"


class NoNamespaces(Exception):
    """This machine allows no test bed; says why."""


def enter(arguments: Sequence[str]) -> None:
    """Become `python -m deploy.testbed` with these arguments, in a network namespace of its own.

    Returns where this process is in one already. NoNamespaces.
    """
    if os.environ.get(_INSIDE):
        return
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NoNamespaces(f"{' and '.join(missing)} not installed (Debian: iproute2, util-linux)")
    door = ["unshare", "--net"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
    probe = subprocess.run(
        [*door, "ip", "link", "add", _BRIDGE, "type", "bridge"], capture_output=True, text=True
    )
    if probe.returncode:
        raise NoNamespaces(f"no network namespace with a bridge: {probe.stderr.strip()}")
    os.environ[_INSIDE] = "1"
    os.execvp(door[0], [*door, sys.executable, "-m", "deploy.testbed", *arguments])


class Network:
    """Hosts number 0 to n-1. A context manager: its hosts end with it."""

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        """rate: of every link and direction, as `tc` writes it (`10gbit`); None: no limit."""
        self.hosts = hosts
        self._rate = rate
        self._holders: list[subprocess.Popen[bytes]] = []
        if not 0 < hosts <= MAX_HOSTS:
            raise ValueError(f"a test bed has 1 to {MAX_HOSTS} hosts, not {hosts}")

    def __enter__(self) -> Network:
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "link", "set", _BRIDGE, "up")
            for host in range(self.hosts):
                self._plug_in(host)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def address(self, host: int) -> str:
        return f"{_NET}.{_FIRST + host}"

    def wrap(self, host: int, argv: Sequence[str]) -> list[str]:
        """A command line that enters the host and then becomes `argv`, with the same pid."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--", *argv]

    def cut(self, host: int) -> None:
        """Pull its cable: nothing arrives, and nobody is told."""
        _run("ip", "link", "set", _port(host), "down")

    def heal(self, host: int) -> None:
        _run("ip", "link", "set", _port(host), "up")

    def sever(self, one: int, other: int) -> None:
        """These two reach each other no more; both reach everybody else."""
        for here, there in ((one, other), (other, one)):
            self._on(here, "ip", "route", "add", "blackhole", f"{self.address(there)}/32")

    def mend(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            self._on(here, "ip", "route", "del", "blackhole", f"{self.address(there)}/32")

    def received_bytes(self, host: int) -> int:
        """What came to the host over its link, headers included."""
        (link,) = json.loads(self._on(host, "ip", "-s", "-json", "link", "show", "eth0"))
        return int(link["stats64"]["rx"]["bytes"])

    def _plug_in(self, host: int) -> None:
        holder = subprocess.Popen(
            leashed(["unshare", "--net", "--", "sleep", "infinity"]), stdin=subprocess.DEVNULL
        )
        self._holders.append(holder)
        _await_namespace(holder)
        port = _port(host)
        _run("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", port, "master", _BRIDGE, "up")
        self._on(host, "ip", "link", "set", "lo", "up")
        self._on(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._on(host, "ip", "link", "set", "eth0", "up")
        if self._rate:
            limit = ("root", "tbf", "rate", self._rate, "burst", _BURST, "latency", _QUEUE)
            _run("tc", "qdisc", "add", "dev", port, *limit)
            self._on(host, "tc", "qdisc", "add", "dev", "eth0", *limit)

    def _on(self, host: int, *argv: str) -> str:
        return _run(*self.wrap(host, argv))

    def _end(self) -> None:
        # Of a namespace that ended the kernel takes the links some time later: not before a next
        # network, which would find its names taken.
        for host in range(len(self._holders)):
            subprocess.run(["ip", "link", "del", _port(host)], capture_output=True)
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._holders.clear()
        subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True)


def _port(host: int) -> str:
    return f"dp{host}"


def _await_namespace(holder: subprocess.Popen[bytes]) -> None:
    """Until the process has a namespace of its own."""
    ours = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + _START_S
    while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours:
        if holder.poll() is not None or time.monotonic() > deadline:
            raise NoNamespaces("a host's namespace could not be made")
        time.sleep(0.005)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
