"""Who is let in at the peer door, and encryption where the plane has a cluster token.

CURVE key pairs are derived from the token: one for the side that is dialled, one for the side that
dials. libzmq would let any client key in, so a ZAP handler (ZeroMQ RFC 27) admits the plane's only.
Whoever lacks the token can neither begin a handshake nor read what passes. Without a token whoever
reaches the door may enter, but not by ZMTP 1, which libzmq speaks with any noise where nobody is
asked, and pays for with memory.
"""

from __future__ import annotations

import logging
from typing import Protocol

import zmq
from zmq.utils import z85

from dataplane.errors import InvalidConfig
from dataplane.launch.token import Token
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

DOMAIN = "dataplane"
"""The ZAP domain: it must equal the socket's exactly, `*` matches nothing."""
DESK = "inproc://zeromq.zap.01"
"""Where libzmq asks whom to let in."""
_ZAP_VERSION = b"1.0"


class Tuned(Protocol):
    """Any zmq socket, also a plain one."""

    def setsockopt(self, option: int, value: int | bytes, /) -> None: ...


class Gate:
    """Of one plane. libzmq draws new keys for every connection by itself."""

    def __init__(self, token: Token | None, plane: str) -> None:
        """InvalidConfig where there is a token and libzmq was built without CURVE."""
        self.refusals = Refusals(log, "the peer door")
        self.encrypted = token is not None
        self._credentials = [b"NULL"]
        if token is None:
            return
        if not zmq.has("curve"):
            raise InvalidConfig(
                "this libzmq was built without CURVE, so peers cannot use a token: install the "
                "pyzmq wheel of PyPI, which has it"
            )
        self._dialled = z85.encode(token.key(plane, "control server"))
        self._dialling = z85.encode(token.key(plane, "control client"))
        self._credentials = [b"CURVE", z85.decode(zmq.curve_public(self._dialling))]

    def __repr__(self) -> str:
        return f"<Gate {'encrypted' if self.encrypted else 'open'}>"

    def secure_router(self, router: Tuned) -> None:
        """Before it is bound, and with the desk open."""
        if self.encrypted:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._dialled)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        # Without a handler nobody would be asked, and everybody let in.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_dealer(self, dealer: Tuned) -> None:
        """Before it connects."""
        if self.encrypted:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._dialled))
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._dialling))
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._dialling)

    def answer(self, asked: list[bytes]) -> list[bytes]:
        """What libzmq is told at the desk: whether to let somebody in."""
        # version, request id, domain, address, routing id, mechanism, credentials
        known = len(asked) > 5 and asked[0] == _ZAP_VERSION and asked[2] == DOMAIN.encode()
        request = asked[1] if len(asked) > 1 else b""
        if known and asked[5:] == self._credentials:
            return [_ZAP_VERSION, request, b"200", b"", b"member", b""]
        self.refusals.count("a stranger's key")
        return [_ZAP_VERSION, request, b"400", b"not a member of this plane", b"", b""]
