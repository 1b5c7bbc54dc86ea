"""The local door's limits: who may come in, how many, and how much of what they send is held."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dataplane
from dataplane.wire import frames, limits
from dataplane.wire.messages import (
    Define,
    Done,
    Failed,
    GiveBack,
    Hello,
    HelloDone,
    Request,
    Reserve,
    Reserved,
    Unpin,
    Welcome,
)
from dataplane.wire.packed import EXTENT
from dataplane.wire.tables import Definition
from tests.end_to_end.conftest import PLANE, Cluster, peer_command, until
from tests.end_to_end.test_strangers_at_the_doors import still_works
from tests.processes import ending

MIB = 1 << 20
NOBODY = 65_534


class Guest:
    """A client that speaks the protocol by hand."""

    def __init__(self, path: Path, connected: socket.socket | None = None) -> None:
        self.sock = connected or socket.socket(socket.AF_UNIX)
        if connected is None:
            self.sock.connect(str(path))  # waits where many wait, which a time-out would not
        self.sock.settimeout(20)

    def body(self) -> Any:
        header = self.sock.recv(4, socket.MSG_WAITALL)
        whole = self.sock.recv(frames.body_length(header), socket.MSG_WAITALL)
        return frames.decode_reply(whole).body

    def ask(self, body: Any, rid: int = 1) -> None:
        self.sock.sendall(frames.encode(Request(rid, 0, 0, 0, 0, body)))

    def enter(self) -> Guest:
        assert isinstance(self.body(), Welcome)
        self.ask(Hello(1))
        assert isinstance(self.body(), HelloDone)
        return self

    def send_until_it_stalls(self, data: bytes) -> int:
        """How many bytes went out until a second passed without room for one more."""
        sent = 0
        while sent < len(data) and select.select([], [self.sock], [], 1.0)[1]:
            with contextlib.suppress(BlockingIOError):
                sent += self.sock.send(data[sent : sent + MIB], socket.MSG_DONTWAIT)
        return sent


Knock = Callable[[], Guest]


@pytest.fixture
def knock(cluster: Cluster) -> Iterator[Knock]:
    """Opens connections to peer a's local door; all are closed in the end."""
    with contextlib.ExitStack() as opened:

        def one() -> Guest:
            guest = Guest(path_of(cluster))
            opened.callback(guest.sock.close)
            return guest

        yield one


def path_of(cluster: Cluster) -> Path:
    return cluster.run_dir / PLANE / "a.sock"


def memory(cluster: Cluster) -> int:
    """The peer's own, without its arena, which is touched in the background."""
    info = psutil.Process(cluster.peers["a"].pid).memory_info()
    return int(info.rss - info.shared)


KNOCK = """
import os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
door = socket.socket(socket.AF_UNIX)
try:
    door.connect(sys.argv[1])
except OSError as exc:
    sys.exit(type(exc).__name__)
door.settimeout(20)
sys.stdout.buffer.write(door.recv(65536) + door.recv(65536))
"""


def knock_as_nobody(path: Path) -> subprocess.CompletedProcess[bytes]:
    # It changes its user itself: nobody may not be allowed to run this interpreter.
    command = [sys.executable, "-I", "-S", "-c", KNOCK, str(path), str(NOBODY)]
    return subprocess.run(command, capture_output=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_gets_nothing_from_a_peer(cluster: Cluster) -> None:
    cluster.start("a")
    path = path_of(cluster)
    assert path.stat().st_mode & 0o777 == 0o600
    for folder in (path.parent, cluster.run_dir):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert knock_as_nobody(path).stderr.strip() == b"PermissionError"
    # Even where somebody opened the doors, the peer asks the kernel who it is.
    for opened in (path, path.parent, cluster.run_dir):
        opened.chmod(0o777)
    answer = knock_as_nobody(path).stdout
    refusal = frames.decode_reply(answer[frames.HEADER_BYTES :]).body
    assert isinstance(refusal, Failed) and refusal.code == "ConnectError"
    assert f"not accept clients of uid {NOBODY}" in refusal.message
    for opened in (path.parent, cluster.run_dir):
        opened.chmod(0o700)
    with cluster.connect("a") as plane:
        assert plane.stats()["refused"] == 1
        still_works(plane)


HAND_ON = """
import socket, sys
door, us = socket.socket(socket.AF_UNIX), socket.socket(fileno=int(sys.argv[2]))
door.connect(sys.argv[1])
socket.send_fds(us, [b"."], [door.fileno()])
sys.stdin.read()
"""


def test_what_a_dead_process_left_in_its_connection_is_handed_nothing(cluster: Cluster) -> None:
    cluster.start("a")
    path, (ours, theirs) = path_of(cluster), socket.socketpair()
    command = [sys.executable, "-I", "-S", "-c", HAND_ON, str(path), str(theirs.fileno())]
    with ours, theirs, cluster.connect("a") as plane:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
        with ending(started):
            door = socket.recv_fds(ours, 1, 1)[1][0]
            guest = Guest(path, socket.socket(fileno=door)).enter()
            guest.ask(Define("p", Definition({"s": ["x"]})))
            defined = guest.body()
        with guest.sock:
            until(lambda: plane.stats()["clients"] == 1, "the process is seen to be gone")
            guest.ask(Reserve("p", defined.generation, [np.array([9000], "<u8").tobytes()]))
            refused = guest.body()
            assert isinstance(refused, Failed) and refused.code == "ClientClosed"
            assert plane.stats()["arena"]["granted_bytes"] == 0


def test_who_hangs_up_and_lives_on_keeps_what_it_may_still_write(
    cluster: Cluster, knock: Knock
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        guest = knock().enter()  # of this process, which does not end
        guest.ask(Define("p", Definition({"s": ["x"]})))
        generation = guest.body().generation
        guest.ask(Reserve("p", generation, [np.array([9000], "<u8").tobytes()]))
        assert isinstance(guest.body(), Reserved)
        guest.sock.close()
        until(lambda: plane.stats()["clients"] == 1, "it is seen to have hung up")
        assert plane.stats()["arena"]["quarantined_bytes"] >= 9000


def test_one_connection_too_many_is_refused_and_the_others_go_on(
    cluster: Cluster, knock: Knock
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        plane.stats()  # has its connection now
        crowd = [knock() for _ in range(limits.MAX_CONNECTIONS)]
        refusals = [
            guest
            for guest in crowd[-2:]
            if isinstance(failed := guest.body(), Failed) and failed.code == "LimitExceeded"
        ]  # the client has one or two of the connections
        assert refusals
        with pytest.raises(dataplane.LimitExceeded, match="4096 client connections"):
            cluster.connect("a")
        assert plane.stats()["refused"]
        for guest in crowd:
            guest.sock.close()
        until(lambda: plane.stats()["connections"] < 10, "the crowd has left")
        cluster.connect("a").close()


def start_with_few_descriptors(cluster: Cluster, limit: int) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    with open(cluster.run_dir / "a.log", "wb") as log:
        cluster.peers["a"] = subprocess.Popen(
            peer_command("a", PLANE, "--arena", "64MiB"), stdout=log, stderr=log, preexec_fn=few
        )
    cluster.await_up("a")


def test_a_peer_lets_in_as_many_clients_as_it_has_descriptors_for_and_serves_them(
    cluster: Cluster,
) -> None:
    start_with_few_descriptors(cluster, 100)
    let_in = list[dataplane.Plane]()
    with contextlib.ExitStack() as stack:
        with pytest.raises(dataplane.LimitExceeded, match=r"100 file descr.*ulimit -n") as refused:
            for _ in range(100):
                let_in.append(stack.enter_context(cluster.connect("a")))
        assert refused.value.details["limit"] == 100 and len(let_in) >= 10
        part = let_in[0].partition("p", {"s": ["x"]})
        everybody = threading.Barrier(len(let_in))

        def puts(number: int) -> None:
            here = let_in[number].partition("p", {"s": ["x"]})
            everybody.wait(20)  # all calls are under way at once
            with contextlib.suppress(dataplane.ClaimTimeout):
                here.claim("s", rows=1_000, timeout=1)
            here.put({"x": [np.arange(100)]}, key=[number])

        with ThreadPoolExecutor(len(let_in)) as pool:
            assert list(pool.map(puts, range(len(let_in)))) == [None] * len(let_in)
        assert len(part.get(keys=list(range(len(let_in))))) == len(let_in)
        let_in[-1].close()
        until(lambda: _comes_in(cluster, stack), "one more is let in when one has left")


def _comes_in(cluster: Cluster, stack: contextlib.ExitStack) -> bool:
    try:
        stack.enter_context(cluster.connect("a"))
    except dataplane.LimitExceeded:
        return False
    return True


def test_a_peer_without_descriptors_lets_others_in_when_some_are_free(
    cluster: Cluster, knock: Knock
) -> None:
    start_with_few_descriptors(cluster, 60)
    with cluster.connect("a") as plane:
        plane.stats()  # has its connection now
        crowd = [knock() for _ in range(80)]
        until(lambda: "cannot accept another client" in cluster.log("a"), "the limit is reached")
        assert plane.stats()["refused"]
        for guest in crowd:
            guest.sock.close()
        cluster.connect("a").close()
        still_works(plane)


def test_a_peer_says_at_once_that_it_may_open_too_few_files(run_dir: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 30 && exec "$@"', "-", *peer_command("a", PLANE)]
    ended = subprocess.run(limited, capture_output=True, text=True)
    assert ended.returncode == 2 and "ulimit -n" in ended.stderr


def test_frames_are_small_until_the_handshake_is_over(cluster: Cluster, knock: Knock) -> None:
    cluster.start("a")
    header = (limits.MAX_HELLO_BYTES + 1).to_bytes(4, "little")
    guest = knock()
    assert isinstance(guest.body(), Welcome)
    guest.sock.sendall(header)
    failed = guest.body()
    assert isinstance(failed, Failed) and failed.code == "FrameTooLarge"
    assert guest.sock.recv(1) == b""
    member = knock().enter()
    member.sock.sendall(header)
    member.sock.sendall(b"\xc1" * (limits.MAX_HELLO_BYTES + 1))
    failed = member.body()
    assert isinstance(failed, Failed) and failed.code == "ProtocolError"


def test_a_client_that_takes_no_answers_is_not_read_any_further(
    cluster: Cluster, knock: Knock
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        guest = knock().enter()
        one = bytes(frames.encode(Request(7, 0, 0, 0, 0, Unpin([]))))
        before = memory(cluster)
        many = one * (64 * MIB // len(one))
        sent = guest.send_until_it_stalls(many)
        assert sent < len(many)
        assert memory(cluster) - before < 16 * MIB
        still_works(plane)
        for _ in range(sent // len(one)):
            assert isinstance(guest.body(), Done)


def test_requests_that_overlap_without_end_end_the_connection(
    cluster: Cluster, knock: Knock
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        guest = knock().enter()
        ask: Callable[[int], bytes] = lambda rid: bytes(  # noqa: E731
            frames.encode(Request(rid, 0, rid, 1, 60_000, Define("nobody's", None)))
        )
        guest.sock.sendall(b"".join(map(ask, range(1, limits.MAX_REQUESTS_PER_CONNECTION + 2))))
        while not isinstance(answer := guest.body(), Failed):
            pass
        assert answer.code == "ProtocolError" and "requests in flight" in answer.message
        still_works(plane)


def test_large_frames_wait_for_room(cluster: Cluster, knock: Knock) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        before = memory(cluster)
        at_once = limits.MAX_BYTES_UNDER_WAY // limits.MAX_FRAME_BYTES
        whole = limits.MAX_FRAME_BYTES.to_bytes(4, "little") + b"\xc1" * limits.MAX_FRAME_BYTES
        guests = [knock().enter() for _ in range(at_once + 2)]
        sent = [guest.send_until_it_stalls(whole[:-1]) for guest in guests]
        assert sent[:at_once] == [len(whole) - 1] * at_once
        assert all(stalled < MIB * 2 for stalled in sent[at_once:])
        assert memory(cluster) - before < limits.MAX_BYTES_UNDER_WAY * 1.5
        still_works(plane)
        for guest, done in zip(guests, sent, strict=True):
            guest.sock.sendall(whole[done:])
            failed = guest.body()
            assert isinstance(failed, Failed) and failed.code == "ProtocolError"
        still_works(plane)


def test_a_client_holds_a_bounded_number_of_pieces_of_the_arena(
    cluster: Cluster, knock: Knock
) -> None:
    """A client that keeps every other 64 bytes of its reservation made each message of 4,096
    chunks cost its peer 0.6 s of processor time."""
    cluster.start("a", arena="64MiB")
    guest = knock().enter()
    guest.ask(Define("p", Definition({"s": ["x"]})))
    reserve = Reserve("p", guest.body().generation, [np.array([4 * MIB], "<u8").tobytes()])
    guest.ask(reserve)
    granted = guest.body()
    assert isinstance(granted, Reserved)
    start = int(np.frombuffer(granted.extents, EXTENT)["offset"][0])
    most = limits.MAX_EXTENTS_PER_SESSION

    def returned(count: int) -> Any:
        pieces = np.zeros(count, EXTENT)
        pieces["offset"], pieces["length"] = start + 128 * np.arange(count), 64
        guest.ask(GiveBack(pieces.tobytes()))
        return guest.body()

    with cluster.connect("a") as plane:
        before = plane.stats()["arena"]["granted_bytes"]
        refused = returned(most + 1)
        assert isinstance(refused, Failed) and refused.code == "LimitExceeded", refused
        assert f"the limit of {most}" in refused.message
        assert plane.stats()["arena"]["granted_bytes"] == before  # all or nothing
        assert isinstance(returned(most), Done)
        assert plane.stats()["arena"]["granted_bytes"] == before - 64 * most
        guest.ask(reserve)
        refused = guest.body()
        assert isinstance(refused, Failed) and refused.code == "LimitExceeded", refused
        still_works(plane)
