"""Hosts with links of their own, on one machine: one network namespace per host, connected to a
bridge.

Everything is inside a network namespace of the bench, which the whole process enters first
(`enter`). When it ends, for any reason, the kernel removes bridge, links and hosts, and nothing
of the machine is ever changed. Root is not needed if users may create namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.processes import leashed
from dataplane.errors import joined

NONE = "none"
"""The value of `--link` for hosts on loopback, without limits."""
_INSIDE = "BENCH_LINKS_INSIDE"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_BRIDGE = "dp-br"
_NET = "10.77.0"
_FIRST = 10
_BURST = "1mb"
_QUEUE = "50ms"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST_BITS, _MOST_BITS = 1e6, 1e12
INTERVAL_S = 0.1
_FULL = 0.8
"""A link is full in an interval in which a direction carried this share of its rate."""
NODE_CORES, NODE_BITS = 64, 100e9
"""Cores of a usual training node, and bits per second of its link."""


class NoNamespaces(Exception):
    """This machine allows no hosts with links of their own. The message says why."""


def bits_per_second(rate: str) -> float:
    """The bits per second of `400mbit`, in tc's notation. Raises ValueError for what tc refuses."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"{rate!r} is not a rate: use a rate such as 400mbit or 10gbit")
    bits = float(match[1]) * _UNITS[match[2]]
    if not _LEAST_BITS <= bits <= _MOST_BITS:
        raise ValueError(f"{rate!r} is out of range: use 1mbit to 1000gbit")
    return bits


def rated(rate: str) -> str:
    """The rate `520mbit` in tc's notation as text for people: `520 Mbit/s`."""
    number = rate.rstrip("kmgbit")
    return f"{number} {rate.removeprefix(number).capitalize()}/s"


def fair_rate(hosts: int) -> str:
    """The rate of a host's link here if it relates to the host's cores as 100 Gbit/s to 64
    cores, a usual training node: `390mbit` for one of eight hosts on two cores."""
    cores = len(os.sched_getaffinity(0)) / hosts
    mbit = max(1.0, cores / NODE_CORES * NODE_BITS / 1e6)
    return f"{float(f'{mbit:.2g}'):g}mbit"


def rate(text: str) -> str:
    """The type of `--link`, for argparse."""
    try:
        return text if text == NONE or bits_per_second(text) else NONE
    except ValueError as exc:
        raise ArgumentTypeError(f"{exc}, or {NONE}") from None


def inside() -> bool:
    """Whether this process is in a network namespace of the bench's own."""
    return bool(os.environ.get(_INSIDE))


def enter(module: str, arguments: Sequence[str]) -> None:
    """Become `python -m module` with these arguments, in a new network namespace. Return if this
    process is in one already. Raises NoNamespaces."""
    if inside():
        return
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
        raise NoNamespaces(f"missing {joined(missing)}: run apt-get install {packages}")
    door = ["unshare", "--net"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
    probe = subprocess.run(
        [*door, "sh", "-c", f"ip link add {_BRIDGE} type bridge && tc qdisc add dev {_BRIDGE} "
         f"root tbf rate 1mbit burst {_BURST} latency {_QUEUE}"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    if probe.returncode:
        said = probe.stderr.strip().partition("\n")[0]
        raise NoNamespaces(
            f"cannot create a network namespace with a bridge and tc's tbf: {said}. Run as root"
        )
    os.environ[_INSIDE] = "1"
    os.execvp(door[0], [*door, sys.executable, "-m", module, *arguments])


def address(host: int) -> str:
    """The address at which other hosts reach a host."""
    return f"{_NET}.{_FIRST + host}"


class Network:
    """The hosts, numbered 0 to n-1. A context manager: its hosts end with it."""

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        """rate: of every link and direction, as `tc` writes it (`10gbit`); None: no limit."""
        self.hosts = hosts
        self.rate = rate
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "link", "set", _BRIDGE, "up")
            for host in range(self.hosts):
                self._plug_in(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Of a namespace that ended the kernel takes the links some time later: not before a next
        # network, which would find its names taken.
        for host in range(len(self._holders)):
            subprocess.run(["ip", "link", "del", _port(host)], capture_output=True)
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders.clear()
        subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True)

    def wrap(self, host: int, argv: Sequence[str]) -> list[str]:
        """A command line that enters the host and then becomes `argv`, with the same pid."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--", *argv]

    def cut(self, host: int) -> None:
        """Disconnect a host: nothing arrives, and no process is notified."""
        _run("ip", "link", "set", _port(host), "down")

    def heal(self, host: int) -> None:
        _run("ip", "link", "set", _port(host), "up")

    def on(self, host: int, *argv: str) -> None:
        """Run a command on a host. If it fails, raise NoNamespaces with its output."""
        _run(*self.wrap(host, argv))

    def carried(self) -> list[tuple[int, int]]:
        """The bytes that arrived at each host over its link, and that left it, with headers."""
        counted: dict[str, tuple[int, int]] = {}
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
            port, _, counters = line.partition(":")
            numbers = counters.split()
            # The host has received what the bridge's end of the link sent.
            counted[port.strip()] = (int(numbers[8]), int(numbers[0]))
        return [counted[_port(host)] for host in range(self.hosts)]

    def _plug_in(self, host: int) -> None:
        waiting = ["unshare", "--net", "--", "sh", "-c", "echo && exec sleep infinity"]
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        holder = subprocess.Popen(leashed(waiting), **pipes)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():  # it prints a line once it has its own namespace
            raise NoNamespaces("could not create the network namespace of a host: run as root")
        port = _port(host)
        _run("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", port, "master", _BRIDGE, "up")
        self.on(host, "ip", "link", "set", "lo", "up")
        self.on(host, "ip", "address", "add", f"{address(host)}/24", "dev", "eth0")
        self.on(host, "ip", "link", "set", "eth0", "up")
        if self.rate:
            limit = ("root", "tbf", "rate", self.rate, "burst", _BURST, "latency", _QUEUE)
            _run("tc", "qdisc", "add", "dev", port, *limit)
            self.on(host, "tc", "qdisc", "add", "dev", "eth0", *limit)


class Traffic:
    """The traffic of the links while the body runs, from their own counters, ten times a second."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._full = bits_per_second(str(network.rate)) / 8 * _FULL  # bytes per second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="links", daemon=True)
        self._before: list[tuple[int, int]] = []
        self._after: list[tuple[int, int]] = []
        self._intervals = 0
        self._full_intervals = [0] * network.hosts

    def __enter__(self) -> Traffic:
        self._before = self._after = self._network.carried()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def busiest(self) -> dict[str, Any]:
        """The link that carried most. bytes: of both directions. busy_share: the share of 100 ms
        intervals in which either direction carried at least 80 % of its rate."""
        pairs = zip(self._before, self._after, strict=True)
        moved = [(new[0] - old[0], new[1] - old[1]) for old, new in pairs]
        host = max(range(len(moved)), key=lambda h: sum(moved[h]))
        return {
            "host": host,
            "bytes": sum(moved[host]),
            "received_bytes": moved[host][0],
            "sent_bytes": moved[host][1],
            "busy_share": self._full_intervals[host] / max(1, self._intervals),
        }

    def _watch(self) -> None:
        at = time.monotonic()
        while not self._stop.wait(INTERVAL_S):
            now, after = time.monotonic(), self._network.carried()
            for host, (old, new) in enumerate(zip(self._after, after, strict=True)):
                most = max(new[0] - old[0], new[1] - old[1])
                self._full_intervals[host] += most >= self._full * (now - at)
            self._intervals += 1
            self._after, at = after, now
        self._after = self._network.carried()


def _port(host: int) -> str:
    return f"dp{host}"


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
