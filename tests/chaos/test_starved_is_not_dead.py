"""Who is called lost, and how soon; and who is not, however its host or its links stall.

Four hosts, of which "a" keeps the roster and "b" has 80 rows that lie nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest

from dataplane import DataplaneError, InternalError, RowsGone
from dataplane.metadata.roster.roster import Roster
from tests.chaos.hosts import PORT, Hosts
from tests.chaos.network import FAIR, Weather
from tests.end_to_end.conftest import in_sync, until

NAMES = "abcd"
ROWS, GROUP, WORDS = 80, 4, 2_000
SLACK = 2.0
"""A busy machine notices later than is promised, by this factor at most."""
CALL_S = 60.0
LOST_AFTER_S = 8.0
"""`--lost-after` of the hosts that several cases share, so that disturbances are shorter than with
the default of 20 s."""
pytestmark = [pytest.mark.needs("ip"), pytest.mark.timeout(300)]


@dataclass
class _Shared:
    """The hosts of several cases. A case that lost somebody leaves none of them to the next.

    Numbered: repeated cases have partitions of their own.
    """

    stack: ExitStack
    hosts: Hosts | None = None
    lives: dict[str, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def whole(self) -> Hosts:
        if self.hosts is None or not self._is_whole(self.hosts):
            self.stack.close()
            running = _running("--lost-after", f"{LOST_AFTER_S:g}")
            self.hosts = self.stack.enter_context(running)
            self.lives = _lives(self.hosts)
        return self.hosts

    def _is_whole(self, hosts: Hosts) -> bool:
        try:
            return _lives(hosts) == self.lives and len(hosts.members()) == len(NAMES)
        except DataplaneError:
            return False


@pytest.fixture(scope="module")
def shared() -> Iterator[_Shared]:
    with ExitStack() as stack:
        yield _Shared(stack)


@pytest.fixture(scope="class")
def hosts(shared: _Shared) -> Hosts:
    """Once per case, and before what looks whether the case leaves processes behind."""
    return shared.whole()


@contextmanager
def _running(*options: str) -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="dp-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_RUN_DIR", folder)
        patch.setenv("DATAPLANE_TOKEN_FILE", "")
        running = Hosts(Path(folder), *options)
        try:
            running.start_all(*NAMES)
            _put(running, "first")
            _all_there(running, "first")  # what connections and threads there will be there are
            yield running
        except PermissionError as exc:
            pytest.skip(str(exc))
        finally:
            running.stop()


def _put(hosts: Hosts, name: str) -> None:
    part = hosts.planes["b"].partition(name, {"s": ["x"]}, group_size=GROUP, free="drop")
    for group in range(ROWS // GROUP):
        keys = [f"{group}-{row}" for row in range(GROUP)]
        values = [np.full(WORDS, group * GROUP + row) for row in range(GROUP)]
        part.put({"x": values}, key=keys, group=str(group))


def _lives(hosts: Hosts) -> dict[str, int]:
    return {name: plane.stats()["incarnation"] for name, plane in hosts.planes.items()}


def _all_there(hosts: Hosts, name: str) -> None:
    keys = [f"{group}-{row}" for group in range(ROWS // GROUP) for row in range(GROUP)]
    for reader in "acd":
        rows = hosts.planes[reader].partition(name).get(keys=keys, timeout=CALL_S)
        assert [int(value[0]) for value in rows["x"]] == list(range(ROWS))


class _Caller(threading.Thread):
    """Puts a row and reads it, over and over, from one host."""

    def __init__(self, hosts: Hosts, host: str, name: str) -> None:
        super().__init__()
        self.part = hosts.planes[host].partition(name, {"s": ["x"]}, free="drop")
        self.done, self.failed = 0, list[str]()
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            key = f"row {self.done}"
            try:
                self.part.put({"x": [np.arange(100)]}, key=[key], timeout=CALL_S)
                self.part.get(keys=[key], timeout=CALL_S)
            except DataplaneError as exc:
                self.failed.append(repr(exc))
                return
            self.done += 1
            self._end.wait(0.05)

    def end(self) -> None:
        self._end.set()
        self.join()


def _weather(name: str, weather: Weather, seconds: float) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        hosts.switch.set(hosts.address(name), weather)
        try:
            time.sleep(seconds)
        finally:
            hosts.switch.set(hosts.address(name), FAIR)

    return act


def _stop(seconds: float) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        os.kill(hosts.peers["b"].pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(hosts.peers["b"].pid, signal.SIGCONT)

    return act


PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
WALL = 0x40000000


def _ptrace(request: int, thread: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if call(request, thread, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")


def _freeze_io_threads(pid: int, seconds: float) -> None:
    """Stop libzmq's threads of a process, and none of its others. One thread does all of this."""
    tasks = Path(f"/proc/{pid}/task")
    threads = [int(one.name) for one in tasks.iterdir() if "ZMQ" in (one / "comm").read_text()]
    assert threads
    for thread in threads:
        _ptrace(PTRACE_SEIZE, thread)
        _ptrace(PTRACE_INTERRUPT, thread)
        os.waitpid(thread, WALL)
    time.sleep(seconds)
    for thread in threads:
        _ptrace(PTRACE_DETACH, thread)


def _freeze_all_io_threads(hosts: Hosts) -> None:
    """Out of step, as hosts are that look for memory."""
    end = time.monotonic() + 15.0

    def again(name: str) -> None:
        while time.monotonic() < end:
            _freeze_io_threads(hosts.peers[name].pid, 1.15)
            time.sleep(random.uniform(0.0, 0.2))

    with ThreadPoolExecutor(len(NAMES)) as pool:
        list(pool.map(again, NAMES))


CALM: dict[str, Callable[[Hosts], None]] = {
    "stopped for 4 s": _stop(0.5 * LOST_AFTER_S),
    "cut off for 5 s": _weather("b", Weather(cut=True), 5.0),
    "rejects what comes for 4 s": _weather("b", Weather(rejects="to"), 4.0),
    "rejects what goes for 4 s": _weather("b", Weather(rejects="from"), 4.0),
    "resets everything for 4 s": _weather("b", Weather(rejects="both"), 4.0),
    "100 kbit/s": _weather("b", Weather(bytes_per_s=12_500), 0.75 * LOST_AFTER_S),
    "libzmq stands still at every peer": _freeze_all_io_threads,
    "keeper rejects what it sends for 4 s": _weather("a", Weather(rejects="from"), 4.0),
    "keeper cut off for 12 s": _weather("a", Weather(cut=True), 1.5 * LOST_AFTER_S),
}
"""The last one is longer than any ground to declare a peer lost needs."""


@pytest.mark.parametrize("what", CALM, ids=lambda text: text.replace(" ", "-"))
def test_nobody_is_lost_and_calls_go_on(shared: _Shared, hosts: Hosts, what: str) -> None:
    with hosts.logs_of_a_failure():
        _nobody_is_lost(hosts, f"{what}, {next(shared.numbers)}", CALM[what])


def _nobody_is_lost(hosts: Hosts, name: str, disturb: Callable[[Hosts], None]) -> None:
    _put(hosts, f"rows, {name}")
    in_sync(hosts.planes["a"])
    before, members = _lives(hosts), hosts.members()
    callers = [_Caller(hosts, host, f"calls from {host}, {name}") for host in "cd"]
    for caller in callers:
        caller.start()
    try:
        disturb(hosts)
        began = [caller.done for caller in callers]
        until(lambda: all(map(_goes_on, callers, began)), "calls go on, or fail", CALL_S)
    finally:
        for caller in callers:
            caller.end()
    assert [caller.failed for caller in callers] == [[], []]
    assert (_lives(hosts), hosts.members()) == (before, members)
    _all_there(hosts, f"rows, {name}")
    in_sync(hosts.planes["a"])


def _goes_on(caller: _Caller, began: int) -> bool:
    return bool(caller.failed) or caller.done > began


def _kill(hosts: Hosts) -> None:
    hosts.peers["b"].kill()


def _kill_all(hosts: Hosts) -> None:
    peer = psutil.Process(hosts.peers["b"].pid)
    processes = [*peer.children(recursive=True), peer]
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def _pull_the_plug(hosts: Hosts) -> None:
    hosts.switch.set(hosts.address("b"), Weather(cut=True))


def _start_again(hosts: Hosts) -> None:
    process = hosts.peers["b"]
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()
    with contextlib.suppress(DataplaneError):
        hosts.planes["b"].close()
    hosts.start_one("b")
    hosts.planes["b"] = hosts.connect("b")
    until(lambda: hosts.address("b") in hosts.members(), "b is a member again", 60)
    in_sync(hosts.planes["a"])


def test_with_the_default_times_a_stall_is_no_death_and_a_death_is_noticed_in_time() -> None:
    """A stopped process is given 20 s. An ended one is noticed after 2 s, where its bulk workers
    ended too after 7 s, and where its host is gone after 10 s."""
    with _running() as hosts, hosts.logs_of_a_failure():
        _nobody_is_lost(hosts, "stopped for 15 s", _stop(15.0))
        gone = hosts.address("b")
        for kill, within_s in ((_kill, 2.0), (_kill_all, 7.0), (_pull_the_plug, 10.0)):
            kill(hosts)
            began = time.monotonic()
            until(lambda: gone not in hosts.members(), "b is called lost", within_s * SLACK)
            print(f"{kill.__name__}: noticed after {time.monotonic() - began:.2f} s")
            part = hosts.planes["c"].partition(f"after {kill.__name__}", {"s": ["x"]})
            part.put({"x": [np.arange(10)]}, key=["k"], timeout=CALL_S)
            if kill is not _pull_the_plug:
                _start_again(hosts)
        hosts.switch.set(gone, FAIR)


def test_a_primary_that_is_cut_off_answers_nothing_from_the_past(hosts: Hosts) -> None:
    address = f"tcp://{hosts.address('b')}:{PORT}"
    roster = Roster.from_seeds([f"tcp://{hosts.address(name)}:{PORT}" for name in NAMES])
    names = (f"p{i}" for i in range(10_000))
    name = next(n for n in names if roster.home(n) == address)
    here = hosts.planes["b"].partition(name, {"s": ["x"]}, free="drop")
    here.put({"x": [1]}, key=["k"])
    in_sync(hosts.planes["a"])
    hosts.switch.set(hosts.address("b"), Weather(cut=True))
    time.sleep(1.5)
    there = hosts.planes["c"].partition(name)
    changed = False
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        for ask in (
            lambda: here.get(keys=["k"], timeout=0.5),
            lambda: here.stats(),
            lambda: here.wait("s", below=5, timeout=0.5),
        ):
            with pytest.raises(DataplaneError) as caught:
                ask()
            assert not isinstance(caught.value, RowsGone | InternalError), caught.value
        if not changed and hosts.address("b") not in hosts.members():
            there.tag(["k"], {"n": 1}, timeout=CALL_S)
            changed, end = True, time.monotonic() + 3.0
        time.sleep(0.02)
    assert changed
    hosts.switch.set(hosts.address("b"), FAIR)
    until(lambda: hosts.address("b") in hosts.members(), "b is a member again", 60)
