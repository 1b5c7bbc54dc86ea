"""Three hosts with networks of their own, and what is done to one of them.

"a" keeps the roster, the test's calls come from "b", and "c" is damaged, which has the row "k", of
which with `replicas=2` a second copy is elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dataplane
from bench.peers import token_file
from dataplane import Plane
from tests.chaos.network import FAIR, Switch, Weather
from tests.cluster import in_sync, members
from tests.end_to_end.conftest import Cluster

PORT = 7101
VICTIM = "c"
HEALED_S = 1.2
"""After so long a damage that passes has passed: less than it takes to call a peer lost."""
LOST_AFTER_S, LONG_S = 4.0, 7.0
"""The grid's peers call one lost that is silent for so long; so these damages last longer."""
HEADROOM_BYTES = 4 << 20
LOG_CHARS = 8_000
X, Y = np.arange(100_000), np.arange(50_000)


class Hosts(Cluster):
    """A cluster whose peers reach each other through a switch."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        """options: what every peer is started with."""
        super().__init__(run_dir, arena="64MiB", options=options)
        self.switch = Switch(PORT)
        self.planes: dict[str, Plane] = {}
        self._timers: list[threading.Timer] = []
        os.environ["DATAPLANE_TOKEN_FILE"] = str(token_file(run_dir))

    @staticmethod
    def address(name: str) -> str:
        return f"10.77.0.{ord(name) - ord('a') + 1}"

    def seed(self, *names: str) -> None:
        self.addresses = {name: f"tcp://{self.address(name)}:{PORT}" for name in "abcde"}
        self.seeds = [self.addresses[name] for name in names]

    def spawn(self, name: str, command: list[str]) -> None:
        log = str(self.run_dir / f"{name}.log")
        self.peers[name] = self.switch.start(self.address(name), command, log)

    def start_all(self, *names: str) -> None:
        super().start_all(*names)
        self.planes = {name: self.connect(name) for name in names}
        in_sync(self.planes["a"])

    def members(self) -> set[str]:
        """Their addresses, without ports."""
        found = members(self.planes["a"])
        return {member.removeprefix("tcp://").rpartition(":")[0] for member in found}

    @property
    def victim(self) -> int:
        return self.peers[VICTIM].pid

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        self._timers.append(timer)
        timer.start()

    @contextlib.contextmanager
    def logs_of_a_failure(self) -> Iterator[None]:
        """Print the end of every peer's log where the body fails."""
        try:
            yield
        except BaseException:
            for name in self.peers:
                print(f"--- end of {name}.log")
                print((self.run_dir / f"{name}.log").read_text()[-LOG_CHARS:])
            raise

    def settle(self) -> None:
        """All that was to pass has passed."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()

    def stop(self) -> None:
        self.settle()
        for process in self.peers.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        for name in self.peers:
            self.switch.set(self.address(name), FAIR)
        for plane in self.planes.values():
            with contextlib.suppress(dataplane.DataplaneError):
                plane.close()
        try:
            super().stop()
        finally:
            self.switch.close()


# what is done to the victim


@dataclass(frozen=True, slots=True)
class Damage:
    """act: do it; what passes by itself is over when the hosts have settled."""

    act: Callable[[Hosts], None]


def _kill(hosts: Hosts) -> None:
    hosts.kill(VICTIM)


def _stop(hosts: Hosts) -> None:
    os.kill(hosts.victim, signal.SIGSTOP)
    hosts.later(LONG_S, lambda: os.kill(hosts.victim, signal.SIGCONT))


def _pause(hosts: Hosts) -> None:
    os.kill(hosts.victim, signal.SIGSTOP)
    hosts.later(HEALED_S / 2, lambda: os.kill(hosts.victim, signal.SIGCONT))


def _weather(weather: Weather, lasts_s: float) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        address = hosts.address(VICTIM)
        hosts.switch.set(address, weather)
        hosts.later(lasts_s, lambda: hosts.switch.set(address, FAIR))

    return act


def _limited(which: int, most: Callable[[int], int]) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        pid = hosts.victim
        soft, hard = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (most(pid), hard))

        def lift() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, which, (soft, hard))

        hosts.later(HEALED_S, lift)

    return act


def _mapped_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


SLOW = Weather(delay_s=0.03, bytes_per_s=4e6)
DAMAGES = {
    "kill": Damage(_kill),
    "stop": Damage(_stop),
    "pause": Damage(_pause),
    "cut": Damage(_weather(Weather(cut=True), HEALED_S)),
    "long cut": Damage(_weather(Weather(cut=True), LONG_S)),
    "slow": Damage(_weather(SLOW, LONG_S)),
    "corrupt": Damage(_weather(Weather(corrupt=5), HEALED_S)),
    "memory": Damage(_limited(resource.RLIMIT_AS, lambda pid: _mapped_bytes(pid) + HEADROOM_BYTES)),
    "descriptors": Damage(
        _limited(resource.RLIMIT_NOFILE, lambda pid: len(os.listdir(f"/proc/{pid}/fd")))
    ),
}
