"""NCCL as a transport: device memory between hosts, sent by the owner's worker to the reader's.

Runs in a bulk worker that has opened its device arenas. The two workers are the two ranks of a
pair, which is made when first needed. Its unique id travels in the card of the request, over an
authenticated connection. NCCL cannot tell transfers apart, so a reader runs them one at a time
per owner. A transfer that fails on either side ends its pair, and the reader names another one
with its next request. Only `communicators` uses NCCL.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from dataplane.errors import TransferFailed, TransportMissing
from dataplane.gpu.registry import CUDA
from dataplane.transport.engines.communicators import (
    CHECK_S,
    Communicator,
    Ranks,
    joined,
    ranks_on,
    shares_gpus,
    wait,
)
from dataplane.transport.engines.cuda_ipc import this_host
from dataplane.transport.engines.region import OpenRegion
from dataplane.transport.seam import (
    Offsets,
    ReadRequest,
    Region,
    Remote,
    SendRequest,
    Transport,
)
from dataplane.wire.frames import decoded
from dataplane.wire.tables import Owner

NAME = "nccl"
PAIRS = 64
"""Pairs kept on either side; each takes memory of its GPU."""


class Card(msgspec.Struct, array_like=True, frozen=True):
    """The card of a rank. host, gpu: where it is. The other fields come with each request: the
    reader, the incarnation of its worker, and the pair that it will use. joined: the reader has
    joined that pair already."""

    host: str
    gpu: str
    reader: Owner | None = None
    session: int = 0
    number: int = 0
    unique_id: bytes = b""
    joined: bool = False


_cards = msgspec.msgpack.Decoder(Card)


class _Line:
    """A pair with an owner's worker, at the reader."""

    def __init__(self, ranks: Ranks) -> None:
        self.turn = threading.Lock()
        self.ranks = ranks
        self.number = 0
        self.unique_id = b""
        self.pair: Communicator | None = None

    def drop(self) -> None:
        pair, self.pair = self.pair, None
        if pair is not None:
            pair.abort()
        self.ranks.forget(self.unique_id)


class _Sending:
    """A pair with a reader's worker, at the owner."""

    def __init__(self, card: Card, pair: Communicator) -> None:
        self.reader, self.number, self.pair = card.reader, card.number, pair
        self.busy = True


class NcclTransport(Transport):
    name = NAME
    memory = frozenset({"cuda"})
    one_sided = False

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._lock = threading.Lock()
        self._session = secrets.randbits(48)
        self._lines: OrderedDict[Owner, _Line] = OrderedDict()
        self._in_turn = threading.local()
        """`line`: the pair of the transfer that this thread runs"""
        self._sending: OrderedDict[int, _Sending] = OrderedDict()
        self._opened: tuple[OpenRegion, Ranks] | None = None

    def register(self, region: Region) -> bytes:
        """Look for NCCL. The device is opened for the first transfer, because that uses device
        memory."""
        first = region.pools[0].handle
        self._region = region
        self._shares = first.kind == CUDA and shares_gpus()
        self._card = Card(this_host(), first.device)
        return msgspec.msgpack.encode(self._card)

    def _open(self) -> tuple[OpenRegion, Ranks]:
        with self._lock:
            if self._opened is None:
                region = OpenRegion(self._region, by_one=True)
                self._opened = region, ranks_on(region.devices[0])
            return self._opened

    # the reader

    @contextmanager
    def turn(self, remote: Remote, own: bytes, check: Callable[[], None]) -> Iterator[bytes]:
        _, ranks = self._open()
        line = self._line(remote.owner, ranks)
        while not line.turn.acquire(timeout=CHECK_S):
            check()
        self._in_turn.line = line
        try:
            if line.pair is None:
                line.number += 1
                line.unique_id = ranks.unique_id()
            card = msgspec.structs.replace(
                self._card,
                reader=self.owner,
                session=self._session,
                number=line.number,
                unique_id=line.unique_id,
                joined=line.pair is not None,
            )
            yield msgspec.msgpack.encode(card)
        except BaseException:
            line.drop()
            raise
        finally:
            del self._in_turn.line
            line.turn.release()

    def read(self, request: ReadRequest) -> None:
        line: _Line = self._in_turn.line
        self._check_apart(_card(request.card))
        try:
            if line.pair is None:
                line.pair = joined(line.ranks, line.unique_id, 0, request.check)
            line.pair.receive(self._addresses(request.copies["dest"], request.copies["nbytes"]))
            wait(line.pair, request.check)
        except BaseException:
            line.drop()  # no more bytes are written
            raise

    def _line(self, owner: Owner, ranks: Ranks) -> _Line:
        """Return the pair with this owner. Drop an idle pair if there are too many."""
        with self._lock:
            line = self._lines.setdefault(owner, _Line(ranks))
            self._lines.move_to_end(owner)
            spare = [] if len(self._lines) <= PAIRS else list(self._lines.items())[:-1]
            for other, idle in spare:
                if idle.turn.acquire(blocking=False):
                    del self._lines[other]
                    idle.drop()
                    idle.turn.release()
                    break
        return line

    # the owner

    def send(self, request: SendRequest) -> None:
        card = _card(request.card)
        self._check_apart(card)
        sending = self._pair(card, request.check)
        try:
            sending.pair.send(self._addresses(request.sources, request.nbytes))
            wait(sending.pair, request.check)
            sending.busy = False
        except BaseException:
            with self._lock:
                if self._sending.get(card.session) is sending:
                    del self._sending[card.session]
            sending.pair.abort()
            raise

    def _pair(self, card: Card, check: Callable[[], None]) -> _Sending:
        """Return the pair that the reader names: the existing one, or a new one in its place."""
        with self._lock:
            known = self._sending.get(card.session)
            if known is not None and known.number == card.number and card.joined:
                self._sending.move_to_end(card.session)
                known.busy = True
                return known
            self._sending.pop(card.session, None)
            spare = [one for one in self._sending.items() if not one[1].busy]
            spare = spare[:1] if len(self._sending) >= PAIRS else []
            for session, _ in spare:
                del self._sending[session]
        for idle in [known, *(one for _, one in spare)]:
            if idle is not None:
                idle.pair.abort()
        if card.joined:
            raise TransferFailed(
                "the worker that holds the values has closed its NCCL communicator with the "
                "reader: repeat the call"
            )
        sending = _Sending(card, joined(self._open()[1], card.unique_id, 1, check))
        with self._lock:
            self._sending[card.session] = sending
        return sending

    # both

    def _check_apart(self, other: Card) -> None:
        if (other.host, other.gpu) == (self._card.host, self._card.gpu) and not self._shares:
            raise TransportMissing(
                f"both ranks are on GPU {other.gpu} of the same host, but NCCL allows one rank "
                "per GPU: use NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1, or choose "
                "another --transport",
                transport=NAME,
            )

    def _addresses(self, offsets: Offsets, nbytes: Offsets) -> list[tuple[int, int]]:
        rows: list[Any] = self._open()[0].ranges.descriptors(offsets, nbytes)[:, :2].tolist()
        return [(address, length) for address, length in rows]

    def forget(self, owner: Owner) -> None:
        with self._lock:
            line = self._lines.pop(owner, None)
            gone = [key for key, one in self._sending.items() if one.reader == owner]
            pairs = [self._sending.pop(key).pair for key in gone]
        if line is not None and line.turn.acquire(blocking=False):
            line.drop()  # else the read ends with its connection
            line.turn.release()
        for pair in pairs:
            pair.abort()


def _card(card: bytes) -> Card:
    return decoded(_cards, card, f"an {NAME} memory description")
