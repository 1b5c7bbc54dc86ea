"""Greetings: how peers meet over zmq, before they call each other over streams, and which are
admitted.

A peer that connects to another sends one greeting and gets one reply. Everything else uses streams.
The connection closes after the reply, so libzmq's threads say nothing about which peers live. If it
closes earlier, zmq would reconnect and lose the greeting, so the dialling peer is notified instead.

If the run has a cluster token, greetings are encrypted. CURVE key pairs are derived from the
token: one for each side. libzmq would admit any client key, so a ZAP handler (ZeroMQ RFC 27)
admits only the run's keys. A process without the token can neither complete a handshake nor read
the traffic. Without a token any process that reaches the port is admitted, except over ZMTP 1,
which libzmq also accepts for arbitrary bytes, at the cost of memory.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from socket import AF_INET, SOCK_STREAM, getaddrinfo
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from dataplane.errors import AddressInUse, InvalidConfig
from dataplane.launch.token import Token
from dataplane.launch.values import is_loopback, parse_address
from dataplane.peer import descriptors
from dataplane.peer.failures import LinkBroken
from dataplane.wire import limits
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

DOMAIN = "dataplane"
"""The ZAP domain: it must equal the socket's exactly, `*` matches nothing."""
DESK = "inproc://zeromq.zap.01"
"""Where libzmq asks whether to admit a process."""
_ZAP_VERSION = b"1.0"
_WATCH = "inproc://router-events"
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_MONITOR_STOPPED,
)
CONNECT_MS = 1_500
"""After this long, a connection attempt starts over. The kernel would retransmit its first packet
ever more rarely, and notice late that a cut has healed."""
HANDSHAKE_MS = 3_000
KEEPALIVE_S, KEEPALIVES = 1, 7
"""A connection ends when the host answers none of these probes. Nothing else is in flight on it."""
RECONNECT_MS, RECONNECT_MAX_MS = (25, 50), (700, 1_000)
"""The first and the longest pause before dialling an absent peer again; pauses double. Each socket
draws its own values from these ranges, because libzmq has no jitter once there is a maximum.
Without it, all peers would redial at the same moments."""
SOCKETS_OF_A_LINK = 3
"""Sockets of libzmq: the dealer, and both ends of its monitor."""
OWN_SOCKETS = 16
"""Sockets that admit peers, and some to spare."""
MAX_SOCKETS = SOCKETS_OF_A_LINK * limits.MAX_MEMBERS + OWN_SOCKETS
"""libzmq's default is 1,023 sockets per context, enough for 340 links."""
MAX_QUEUED_MESSAGES = 256
"""Greetings and replies that may wait at each end."""


class Gate:
    """Admission to one run. libzmq draws new session keys for every connection."""

    def __init__(self, token: Token | None, plane: str) -> None:
        """Raise InvalidConfig if there is a token and libzmq was built without CURVE."""
        self.refusals = Refusals(log, "peer door")
        self.encrypted = token is not None
        self._credentials = [b"NULL"]
        if token is None:
            return
        if not zmq.has("curve"):
            raise InvalidConfig(
                "this libzmq was built without CURVE, so peers cannot use a token: install "
                "the pyzmq wheel from PyPI, which includes CURVE"
            )
        self._dialled = z85.encode(token.key(plane, "control server"))
        self._dialling = z85.encode(token.key(plane, "control client"))
        self._credentials = [b"CURVE", z85.decode(zmq.curve_public(self._dialling))]

    def secure_router(self, router: zmq.Socket[Any]) -> None:
        """Configure a router socket, before it is bound and while the ZAP handler runs."""
        if self.encrypted:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._dialled)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        # Without a handler, libzmq admits every process.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_dealer(self, dealer: zmq.Socket[Any]) -> None:
        """Configure a dealer socket, before it connects."""
        if self.encrypted:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._dialled))
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._dialling))
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._dialling)

    def answer(self, asked: list[bytes]) -> list[bytes]:
        """Return the ZAP reply to libzmq: whether to admit a process."""
        # version, request id, domain, address, routing id, mechanism, credentials
        known = len(asked) > 5 and asked[0] == _ZAP_VERSION and asked[2] == DOMAIN.encode()
        request = asked[1] if len(asked) > 1 else b""
        if known and asked[5:] == self._credentials:
            return [_ZAP_VERSION, request, b"200", b"", b"member", b""]
        self.refusals.count("another peer has a different token or run name")
        return [_ZAP_VERSION, request, b"400", b"not a member of this plane", b"", b""]


def bindable(address: str) -> str:
    """Return the address with a numeric host, because libzmq binds only to those.

    Raise InvalidConfig for a name that does not resolve to this host, or only within this host.
    """
    host, port = parse_address(address)
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM)
    except OSError as exc:
        raise InvalidConfig(
            f"cannot listen on {address}: {exc}; use a name or address of this host in --listen",
            address=address,
        ) from exc
    number = str(min(found, key=lambda info: info[0] != AF_INET)[4][0])
    if is_loopback(number) and not is_loopback(host):
        raise InvalidConfig(
            f"this host resolves {host} to {number}, an address that other machines cannot reach: "
            "correct /etc/hosts, or use the host's IP address in --listen and --seeds",
            address=address,
        )
    return f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}"


def tune(socket: zmq.Socket[Any], address: str) -> None:
    """Set socket options that differ from libzmq's defaults: size limit, linger, keepalive,
    IPv6."""
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_HELLO_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVES)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, random.randint(*RECONNECT_MS))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, random.randint(*RECONNECT_MAX_MS))


class Greetings:
    """The greetings of one peer, sent and received."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._watching: threading.Thread | None = None

    def bind(self, address: str) -> str:
        """Accept greetings at this address from now on. Raise AddressInUse if another process
        uses it, or InvalidConfig."""
        where = bindable(address)
        self._desk = self._context.socket(zmq.ROUTER)
        self._desk.bind(DESK)  # before the router is bound
        self._router = self._context.socket(zmq.ROUTER)
        tune(self._router, where)
        self._gate.secure_router(self._router)
        self._router.monitor(_WATCH, sum(map(int, _WATCHED)))
        # Connected before the thread runs: without a reader, stopping the monitor never returns.
        events: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PAIR)
        events.connect(_WATCH)
        try:
            self._router.bind(where)
        except zmq.ZMQError as exc:
            events.close()
            raise AddressInUse(
                f"cannot listen on {address}: {exc}; choose another --listen address, or stop the "
                "process that is using this address",
                address=address,
            ) from exc
        self._watching = threading.Thread(
            target=self._watch, args=[events], name="greetings", daemon=True
        )
        self._watching.start()
        return where

    def _watch(self, events: zmq.Socket[bytes]) -> None:
        """Count the connections that end without a handshake, until the monitor stops. Runs in its
        own thread: libzmq's threads block until their events are read, and the event loop may be
        busy."""
        handshakes = ended = counted = 0
        with events:
            while (event := recv_monitor_message(events)["event"]) != zmq.EVENT_MONITOR_STOPPED:
                if event == zmq.EVENT_DISCONNECTED:
                    ended += 1
                else:  # the gate counts those whose key is wrong
                    handshakes += 1
                if ended - handshakes > counted:
                    counted += 1
                    self._gate.refusals.count(
                        "another process connected, but the handshake failed: it is no peer, has a "
                        "different token or run name, or gave up"
                    )

    async def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Admit peers and answer greetings until cancelled."""

        def greeted(parts: list[bytes]) -> list[list[bytes]]:
            who, *frames = parts
            return [[who, answer(frame)] for frame in frames]

        def let_in(parts: list[bytes]) -> list[list[bytes]]:
            who, empty, *asked = parts
            return [[who, empty, *self._gate.answer(asked)]]

        await asyncio.gather(_served(self._router, greeted), _served(self._desk, let_in))

    def dial(
        self,
        address: str,
        greeting: bytes,
        take: Callable[[bytes], None],
        broke: Callable[[], None],
    ) -> Callable[[], None]:
        """Greet the peer at an address as soon as it accepts connections. Return a function that
        closes the connection, or the attempt, without further notifications.

        take: gets the reply. broke: called when the connection ends after it was made. Raises
        LinkBroken if no file descriptor is left for it; one may be free a moment later.
        """
        socket: zmq.asyncio.Socket | None = None
        try:
            socket = self._context.socket(zmq.DEALER)
            tune(socket, address)
            self._gate.secure_dealer(socket)
            monitor = socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
            socket.connect(address)
        except zmq.ZMQError as exc:
            if socket is not None:
                socket.close(linger=0)
            why = descriptors.short() if exc.errno == errno.EMFILE else str(exc)
            raise LinkBroken(f"cannot connect to {address}: {why}", address=address) from exc
        ended = asyncio.ensure_future(monitor.recv_multipart())
        ended.add_done_callback(lambda _: None if ended.cancelled() else broke())
        answer = asyncio.ensure_future(socket.recv())
        answer.add_done_callback(lambda _: None if answer.cancelled() else take(answer.result()))
        with suppress(zmq.Again):  # if the peer refused already, `broke` will be called
            asyncio.ensure_future(socket.send(greeting, zmq.NOBLOCK)).result()

        def close() -> None:
            if not socket.closed:
                socket.disable_monitor()
                monitor.close(linger=0)
                socket.close(linger=0)

        return close

    def close(self) -> None:
        """Close every socket. Messages that are not sent yet are lost."""
        if self._watching is not None:
            self._router.monitor(None, 0)
            self._watching.join()
            self._watching = None
        self._context.destroy(linger=0)


async def _served(
    socket: zmq.asyncio.Socket, answers: Callable[[list[bytes]], list[list[bytes]]]
) -> None:
    while True:
        parts = await socket.recv_multipart()
        try:
            for answer in answers(parts):
                await socket.send_multipart(answer)
        except Exception:  # later messages must still be handled
            log.exception("greeting: could not send a reply")
        await asyncio.sleep(0)  # let other tasks run, however many messages arrive
