"""A ticket that runs out after its chunks were pinned is refused, on the connection that asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.errors import DeadlineExceeded
from dataplane.transport.bulk_frames import (
    COPY,
    MAX_GET_FRAME_BYTES,
    FromOwner,
    Get,
    Held,
    Refused,
    decode_from_owner,
    encode,
)
from dataplane.transport.connections import Connections
from dataplane.transport.control import PinDesk
from dataplane.transport.owner import ChunkServer, Service
from dataplane.transport.reading import Reading
from dataplane.transport.seam import (
    ReadRequest,
    Records,
    Region,
    Remote,
    Transport,
)
from dataplane.transport.secure_stream import door
from dataplane.transport.slices import pieces_of
from dataplane.transport.stream import BulkStream
from dataplane.transport.tcp import TcpTransport
from dataplane.transport.tickets import new_identity, ticket_of
from dataplane.wire.frames import HEADER_BYTES
from dataplane.wire.packed import EXTENT
from dataplane.wire.tables import Owner

KEY = b"k" * 32
OWNER = Owner("a", 7)
NBYTES = 4096


def sleep_until(deadline: float) -> None:
    while time.monotonic() <= deadline:
        time.sleep(0.001)


class SlowDesk(PinDesk):
    """Pins only after the ticket has expired."""

    slow = True

    def __init__(self) -> None:
        self.held: list[int] = []

    def pin(self, chunks: Records, deadline: float) -> tuple[int, Records]:
        if self.slow:
            sleep_until(deadline)
        self.held.append(1)
        return 1, np.array([(0, NBYTES)], EXTENT)

    def unpin(self, ask: int, nbytes: int) -> None:
        assert nbytes == 0
        self.held.remove(ask)


class PromptDesk(SlowDesk):
    slow = False


class SlowStream(BulkStream):
    """A stream that returns from sending `Held` only after the ticket has expired."""

    def send(self, data: bytes | bytearray, deadline: float) -> None:
        super().send(data, deadline)
        if isinstance(decode_from_owner(data[HEADER_BYTES:]), Held):
            sleep_until(deadline)


class Engine(Transport):
    """A transport whose tickets expire before it moves a byte."""

    name = "engine"
    memory = frozenset({"host"})

    def register(self, region: Region) -> bytes:
        return b"card"

    def read(self, request: ReadRequest) -> None: ...

    def forget(self, owner: Owner) -> None: ...


class Served:
    def __init__(self, tls: bool, late: str = "pin") -> None:
        self.desk = SlowDesk() if late == "pin" else PromptDesk()
        identity = new_identity() if tls else None
        self.arena = np.zeros(NBYTES, np.uint8)
        region = Region(self.arena.ctypes.data, NBYTES)
        listener = socket.create_server(("127.0.0.1", 0))
        fingerprint = identity.fingerprint if identity else ""
        self.remote = Remote(OWNER, f"127.0.0.1:{listener.getsockname()[1]}", fingerprint)
        plain = BulkStream if late == "pin" else SlowStream
        stream_of = door(identity.pem) if identity else plain
        services = {
            transport.name: Service(transport, transport.register(region), region, self.desk, KEY)
            for transport in (TcpTransport(OWNER), Engine(OWNER))
        }
        ChunkServer(listener, OWNER, KEY, services, stream_of).start()
        self.listener = listener

    def ask(self, transport: str) -> BulkStream:
        """Send a request whose ticket lasts 50 ms."""
        deadline = time.monotonic() + 30
        connection = Connections(KEY).borrow(Reading(self.remote, np.zeros(0, COPY), deadline))
        pieces = pieces_of(np.array([(1 << 32, 0, NBYTES, 0)], COPY)).tobytes()
        get = Get(OWNER, 50, pieces, transport)
        get.ticket = ticket_of(KEY, connection.nonce(), get)
        connection.stream.send(encode(get), deadline)
        return connection.stream

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def answer(stream: BulkStream) -> FromOwner | None:
    frame = stream.receive(MAX_GET_FRAME_BYTES, time.monotonic() + 30)
    return None if frame is None else decode_from_owner(frame)


@pytest.fixture(params=[False, True], ids=["tcp", "tls"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(request.param)
    yield served
    served.close()


@pytest.mark.parametrize("transport", ["tcp", "engine"])
def test_a_ticket_that_runs_out_between_pin_and_first_byte_is_refused(
    served: Served, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = served.ask(transport)
    refused = answer(stream)
    assert refused is not None, "the owner closed the connection without a word"
    assert isinstance(refused, Refused) and isinstance(refused.error(), DeadlineExceeded)
    assert not served.desk.held
    stream.close()
    caplog.clear()  # the error that was logged keeps frames, and they what was to be sent


def test_nothing_follows_the_answer_of_a_ticket_that_runs_out_before_the_bytes() -> None:
    """The reader would take a refusal for bytes of values."""
    served = Served(tls=False, late="answer")
    stream = served.ask("tcp")
    assert isinstance(answer(stream), Held)
    assert answer(stream) is None
    stream.close()
    served.close()
