"""The witness of a peer's process, and how other peers watch that process.

When a bulk worker starts, it leaves a witness: a child process without the arena, which waits for
the end of the peer. From then on the witness answers at the worker's port, for LINGER_S, that the
peer has exited. Other peers therefore learn at once that a process has exited, and need not guess
from its silence.

A watch is one idle connection to that port. While the peer lives, its bulk worker answers there,
and TCP's keepalive checks whether the host is reachable. No data is in flight on the connection,
so a loaded link does not matter.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import hmac
import os
import select
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import DataplaneError, ProtocolError, mixed_releases
from dataplane.transport.bulk_frames import (
    MAX_JOIN_FRAME_BYTES,
    Configure,
    FromOwner,
    Watch,
    Watched,
    encode,
)
from dataplane.transport.joining import Joining, answer_of
from dataplane.transport.owner import ChunkServer
from dataplane.transport.secure_stream import door, reading_context
from dataplane.transport.stream import BulkStream, split_address
from dataplane.transport.tickets import check_certificate, nonce_of, watched_mac
from dataplane.wire.frames import HEADER_BYTES, body_length
from dataplane.wire.tables import Owner

PROCESS_NAME = "dp-witness"
"""The witness's name in `ps -o comm`. The process ends by itself."""
LINGER_S = 15.0
"""How long a witness answers: longer than a network cut that makes no peer lost, so that a death
during the cut is proven after it."""
WORKER_FIRST_S = 1.0
"""The most time by which a worker may seem to end before its peer."""
DIAL_S = 1.0
EXCHANGE_S = 5.0
KEEPALIVE_S, KEEPALIVES = 1, 6
"""The kernel probes after KEEPALIVE_S without a packet, up to KEEPALIVES times. A host that answers
no probe is dead or cut off."""
SILENT_S = KEEPALIVE_S * (1 + KEEPALIVES)
"""How long a host has sent nothing when the connection fails: from its last packet on."""
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


# the witness


def leave_witness(listener: socket.socket, first: Configure, keeps_not: Sequence[int]) -> None:
    """Fork the witness. Call this before any thread starts and before the arena is mapped.

    keeps_not: descriptors that the witness must not hold.
    """
    peer = os.pidfd_open(os.getppid())
    worker = os.pidfd_open(os.getpid())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's own threads are idle
        if os.fork():
            os.close(peer)
            os.close(worker)
            return
    try:
        Path("/proc/self/comm").write_text(PROCESS_NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # readers of the worker's output must not wait for the witness
            os.dup2(nothing, descriptor)
        for descriptor in keeps_not:
            os.close(descriptor)
        if _outlives(peer, worker, listener):
            stream_of = door(first.tls) if first.tls else BulkStream
            ChunkServer(listener, first.owner, first.key, {}, stream_of, ended=True).start()
            time.sleep(LINGER_S)
    finally:
        os._exit(0)


def _outlives(peer: int, worker: int, listener: socket.socket) -> bool:
    """Wait for the end of the peer. Return False if only the worker has ended, because its next
    worker gets a witness of its own, or if the port was closed on purpose."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    poll.register(worker, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    poll.unregister(worker)
    until = time.monotonic() + WORKER_FIRST_S
    while peer not in ready and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        if time.monotonic() >= until:
            return False
        ready = {fd for fd, _ in poll.poll(50)}
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


# the watch


class Look(enum.Enum):
    """The result of one look at a process."""

    ANSWERED = enum.auto()
    """Its host answers, and a process listens there."""
    ENDED = enum.auto()
    """Its host reports that the process has exited."""
    REFUSED = enum.auto()
    """Its host refuses every port that the process had."""
    UNANSWERED = enum.auto()
    """Its host answers nothing."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process to watch. bulk: `host:port` of its bulk worker, "" if unknown. fingerprint: see
    `seam.Remote`. ports: `host:port` of its other ports."""

    owner: Owner
    bulk: str
    fingerprint: str
    ports: tuple[str, ...]


Tell = Callable[[Look, float], None]
"""Called with the result of a look, and the time since when it has been so (monotonic)."""


async def watch(
    process: Process, key: bytes, tell: Tell, silent_since: float | None
) -> float | None:
    """Look at a process, and watch it as long as the connection lasts.

    silent_since: the result of the previous watch: when the host stopped answering, or None.
    """
    began = time.monotonic()
    try:
        sock = await _dial(process.bulk or process.ports[0])
    except ConnectionRefusedError:
        others = process.ports if process.bulk else process.ports[1:]
        if all(await asyncio.gather(*map(_is_refused, others))):
            tell(Look.REFUSED, began)
        return None
    except OSError as exc:
        if not isinstance(exc, TimeoutError) and exc.errno not in _NO_ANSWER:
            return None
        since = began if silent_since is None else silent_since
        tell(Look.UNANSWERED, since)
        return since
    tell(Look.ANSWERED, began)
    if not process.bulk:
        sock.close()
        return None
    return await _stay(process, key, tell, sock)


async def _dial(address: str) -> socket.socket:
    """Connect. Raises TimeoutError if the host does not answer, and another OSError if it
    refuses."""
    host, port = split_address(address)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, KEEPALIVE_S),
            (socket.TCP_KEEPINTVL, KEEPALIVE_S),
            (socket.TCP_KEEPCNT, KEEPALIVES),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        async with asyncio.timeout(DIAL_S):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _is_refused(address: str) -> bool:
    try:
        (await _dial(address)).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


async def _stay(process: Process, key: bytes, tell: Tell, sock: socket.socket) -> float | None:
    """Ask at the port, then wait for the connection to end."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(EXCHANGE_S):
            reader, writer = await _opened(process, sock)
            if await _has_ended(process.owner, key, reader, writer):
                tell(Look.ENDED, time.monotonic())
                return None
        await reader.read(1)
    except OSError as exc:
        if exc.errno in _NO_ANSWER:
            return time.monotonic() - SILENT_S
    except (DataplaneError, EOFError):
        pass  # another process, or one that is ending; the next look shows
    finally:
        if writer is not None:
            writer.transport.abort()
        else:
            sock.close()
    return None


async def _opened(
    process: Process, sock: socket.socket
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not process.fingerprint:
        return await asyncio.open_connection(sock=sock)
    context = reading_context()
    reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="")
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    try:
        check_certificate(tls.getpeercert(binary_form=True), process.fingerprint, process.bulk)
    except DataplaneError:
        writer.transport.abort()
        raise
    return reader, writer


async def _has_ended(
    owner: Owner, key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Return the port's answer, proven on both sides as for a pull. Raises DataplaneError or
    EOFError."""
    joining = Joining(owner.peer, key, await _frame(reader))
    writer.write(joining.join())
    joining.check(await _frame(reader))
    writer.write(encode(Watch(owner)))
    watched = await _frame(reader)
    if not isinstance(watched, Watched):
        raise mixed_releases(
            f"unexpected reply to Watch: expected Watched, got {type(watched).__name__}"
        )
    expected = watched_mac(key, nonce_of(joining.greeting.challenge, 0), owner, watched.ended)
    if not hmac.compare_digest(watched.mac, expected):
        raise ProtocolError(
            "the bulk worker's report about its own peer process has an invalid signature: "
            "start all peers with the same --token-file"
        )
    return watched.ended


async def _frame(reader: asyncio.StreamReader) -> FromOwner:
    header = await reader.readexactly(HEADER_BYTES)
    body = await reader.readexactly(body_length(header, MAX_JOIN_FRAME_BYTES))
    return answer_of(body)
