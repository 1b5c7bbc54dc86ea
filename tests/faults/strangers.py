"""Corrupt frames at every door of a peer: messages of the protocol, damaged, and plain noise.

What is sent follows from a seed. With a cluster token ($DATAPLANE_TOKEN_FILE) it comes from
strangers and from members, without one all are members. `python -m tests.faults.strangers` does
it to a peer of this host: it and its bulk workers must neither end nor grow, and every door must
answer or close.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq

import dataplane
from bench.options import whole
from dataplane.launch import rundir, settings
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.streams import ID_BYTES, KEY_BYTES, Sealer
from dataplane.transport.bulk_frames import CHALLENGE_BYTES, Join, Joined, decode_from_owner, encode
from dataplane.transport.tickets import plane_key, proof
from dataplane.wire import frames, limits, peering
from dataplane.wire.messages import Hello, Request, Welcome
from dataplane.wire.peering import PeerHello, PeerRequest
from tests.faults.command import FRAMES

VECTORS = Path(__file__).resolve().parents[2] / "protocol" / "vectors"
BETWEEN_PEERS = 8
"""Descriptors of what one peer has with another: four for a link, one for the other's, a bulk
connection or two. A link that a busy machine had broken when they were first counted is back."""
PATIENCE_S = 20.0
AT_ONCE = 64
"""Damaged messages that a zmq link carries before their answers are awaited."""
HEADER_BYTES = 4
GROWTH_BYTES = 16 << 20
"""What an allocator may keep; a leak of 200 bytes a frame is more, over 100,000 frames."""


class DoorHangs(Exception):
    """A door neither answered nor closed."""


def samples(channel: str) -> list[bytes]:
    """One valid body, without a length in front, of every message of a channel."""
    bodies = [
        bytes.fromhex(v["hex"]) for v in json.loads((VECTORS / f"{channel}.json").read_text())
    ]
    return bodies if channel == "peers" else [body[HEADER_BYTES:] for body in bodies]


class Damage:
    """An endless supply of damaged bodies."""

    def __init__(self, seed: int, *channels: str) -> None:
        self._random = random.Random(seed)
        self._bodies = [body for channel in channels for body in samples(channel)]

    def body(self) -> bytes:
        kinds = (self._flipped, self._cut, self._stretched, self._spliced, self._noise, self._deep)
        return self._random.choice(kinds)(bytearray(self._random.choice(self._bodies)))

    def frame(self) -> bytes:
        """With a length in front, which lies now and then."""
        body = self.body()
        lies = (0, 1, len(body) + 1, 0xFFFF_FFFF, self._random.getrandbits(32))
        length = self._random.choice(lies) if self._random.random() < 0.2 else len(body)
        return length.to_bytes(HEADER_BYTES, "little") + body

    def noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(1, 300))

    def _flipped(self, body: bytearray) -> bytes:
        for _ in range(self._random.randrange(1, 9)):
            body[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
        return bytes(body)

    def _cut(self, body: bytearray) -> bytes:
        return bytes(body[: self._random.randrange(len(body))])

    def _stretched(self, body: bytearray) -> bytes:
        where = self._random.randrange(len(body) + 1)
        return bytes(body[:where]) + self.noise() + bytes(body[where:])

    def _spliced(self, body: bytearray) -> bytes:
        other = self._random.choice(self._bodies)
        return bytes(body[: self._random.randrange(len(body))]) + other[len(other) // 2 :]

    def _noise(self, body: bytearray) -> bytes:
        return self.noise()

    def _deep(self, body: bytearray) -> bytes:
        where = self._random.randrange(len(body))
        return bytes(body[:where]) + self._random.choice((b"\x91", b"\x81\xa1a")) * 20_000


@dataclass(frozen=True)
class Target:
    """A peer's doors, and what its members know."""

    pid: int
    path: Path
    address: str
    bulk: str
    gate: Gate
    key: bytes
    plane: str
    founding: tuple[int, int]

    @staticmethod
    def find(name: str | None = None, plane: str | None = None) -> Target:
        """The peer that a client of this host would be connected to."""
        with dataplane.connect(name, run=plane) as connected:
            stats = connected.stats()
        path = rundir.plane_dir(stats["plane"]) / f"{stats['peer']}.sock"
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(str(path))
            welcome = frames.decode_reply(next_frame(door.makefile("rb").read)).body
        assert isinstance(welcome, Welcome)
        token = settings.of_variable("token-file")
        founding = tuple(stats["roster"]["founding"])
        return Target(
            stats["pid"],
            path,
            stats["address"],
            stats["bulk"]["address"] if stats["bulk"] else "",
            Gate(token, welcome.plane),
            plane_key(welcome.plane, founding, token and token.key(welcome.plane, "bulk")),
            welcome.plane,
            founding,
        )

    def greeting(self) -> bytes:
        """What a member says that is in no roster yet."""
        versions = (limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION)
        who = "stranger", 1, "tcp://127.0.0.1:1"
        hello = PeerHello(versions, self.plane, *who, self.founding, limits.SHARDS, "")
        return peering.encode(PeerRequest(1, who[2], who[1], 0, self.founding, 1000, hello))

    def processes(self) -> list[psutil.Process]:
        """The peer and its bulk workers."""
        peer = psutil.Process(self.pid)
        return [peer, *peer.children()]

    def holds(self) -> tuple[int, int]:
        """Bytes of its processes' own memory, without the arena, and their descriptors."""
        processes = self.processes()
        memory = [process.memory_info() for process in processes]
        return sum(m.rss - m.shared for m in memory), sum(p.num_fds() for p in processes)


def attack(target: Target, count: int, seed: int) -> dict[str, Any]:
    """`count` frames at every door, and what became of the peer. DoorHangs when one is silent."""
    _everywhere(target, max(100, count // 10), seed)  # buffers and caches are there afterwards
    pids = {process.pid for process in target.processes()}
    memory, descriptors = target.holds()
    began = time.monotonic()
    sent = _everywhere(target, count, seed + 1)
    seconds = time.monotonic() - began
    deadline = time.monotonic() + PATIENCE_S
    while target.holds()[1] > descriptors and time.monotonic() < deadline:
        time.sleep(0.1)  # connections that are being closed
    after = target.holds()
    outcome: dict[str, Any] = {
        "sent": sent,
        "seconds": round(seconds, 1),
        "grown_bytes": after[0] - memory,
        "more_descriptors": after[1] - descriptors,
        "same_processes": pids == {process.pid for process in target.processes()},
    }
    good = outcome["same_processes"] and outcome["more_descriptors"] <= BETWEEN_PEERS
    return {"ok": good and outcome["grown_bytes"] < GROWTH_BYTES, **outcome}


def _everywhere(target: Target, count: int, seed: int) -> dict[str, int]:
    sent = {"local": at_local_door(target.path, count, seed)}
    if target.address:
        sent["peer"] = at_peer_door(target.address, count, seed, target.gate)
        sent["streams"] = at_streams(target, count, seed)
    if target.bulk:
        sent["bulk"] = at_bulk(target.bulk, count, seed, target.key)
    return sent


def at_local_door(path: Path, count: int, seed: int) -> int:
    """A connection each, every other one after a handshake."""
    damage, sent = Damage(seed, "local"), 0
    while sent < count:
        frame = damage.frame()
        if _is_request(frame):
            continue
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(str(path))
            door.settimeout(PATIENCE_S)
            door.recv(1 << 16)
            if sent % 2:
                door.sendall(frames.encode(Request(1, 0, 0, 0, 0, Hello(1))))
                door.recv(1 << 16)
            _send_and_leave(door, frame)
        sent += 1
    return sent


def _is_request(frame: bytes) -> bool:
    """Whether the damage left a message that a client may well send."""
    with contextlib.suppress(dataplane.ProtocolError):
        return bool(frames.decode_request(frame[HEADER_BYTES:]))
    return False


def at_peer_door(address: str, count: int, seed: int, gate: Gate) -> int:
    """Damaged requests of a member, and as many pieces of noise from whoever can connect."""
    damage = Damage(seed, "peers")
    for _ in range(count // 2):
        _knock(address.removeprefix("tcp://"), damage.noise())
    left = count - count // 2
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        gate.secure_dealer(dealer)
        dealer.connect(address)
        while left > 0:
            batch = min(AT_ONCE, left)
            for _ in range(batch):
                dealer.send(damage.body())
            for _ in range(batch):
                if not dealer.poll(round(PATIENCE_S * 1_000)):
                    raise DoorHangs(f"no answer at {address}")
                dealer.recv()
            left -= batch
    return count


def at_streams(target: Target, count: int, seed: int) -> int:
    """A connection each, every other one of a member that was promised a stream and says a damaged
    request on it, sealed like any other where there is a token, now and then not; else noise."""
    damage, sent = Damage(seed, "peers"), 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        target.gate.secure_dealer(dealer)
        dealer.connect(target.address)
        while sent < count:
            dealer.send(target.greeting())
            if not dealer.poll(round(PATIENCE_S * 1_000)):
                raise DoorHangs(f"no greeting at {target.address}")
            promised = peering.decode_reply(dealer.recv()).body
            assert isinstance(promised, PeerHello), promised
            frame = damage.body()
            if _is_peers_request(frame):
                continue
            secret = promised.stream_secret
            if keys := secret[ID_BYTES:] if sent % 8 else b"":
                frame = Sealer(keys[:KEY_BYTES]).seal(frame)
            said = len(frame).to_bytes(HEADER_BYTES, "little") + frame
            _knock(promised.stream, secret[:ID_BYTES] + said if sent % 2 else damage.noise())
            sent += 1
    return count


def _is_peers_request(body: bytes) -> bool:
    """As `_is_request`, of a peer."""
    with contextlib.suppress(dataplane.ProtocolError):
        return bool(peering.decode_request(body))
    return False


def at_bulk(address: str, count: int, seed: int, key: bytes) -> int:
    """A connection each, every other one after both sides have proved themselves."""
    damage = Damage(seed, "bulk", "worker")
    for number in range(count):
        _knock(address, damage.frame(), key if number % 2 else None)
    return count


def _knock(address: str, said: bytes, key: bytes | None = None) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S) as door:
        if key is not None:
            _join(door, key)
        _send_and_leave(door, said)


def _join(door: socket.socket, key: bytes) -> None:
    with door.makefile("rb") as answers:
        greeting = decode_from_owner(next_frame(answers.read))
        mine = bytes(CHALLENGE_BYTES)
        shown = proof(key, "reader", greeting.challenge, mine)  # type: ignore[union-attr]
        door.sendall(encode(Join(1, mine, shown)))
        assert isinstance(decode_from_owner(next_frame(answers.read)), Joined)


def next_frame(read: Callable[[int], bytes]) -> bytes:
    """The body of the next frame."""
    return read(int.from_bytes(read(HEADER_BYTES), "little"))


def _send_and_leave(door: socket.socket, said: bytes) -> None:
    """Says it and nothing more, and waits for the other side to close."""
    try:
        door.sendall(said)
        door.shutdown(socket.SHUT_WR)
        while door.recv(1 << 16):
            pass
    except TimeoutError:
        raise DoorHangs("a door keeps a connection that has said its last") from None
    except OSError:
        return  # it was closed before all of it was said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.strangers")
    parser.add_argument("--name", help="the peer (default: the only one of this host)")
    parser.add_argument("--run", help="the run (default: this process's)")
    parser.add_argument("--count", type=FRAMES, default=100_000, help="frames at each door")
    parser.add_argument("--seed", type=whole, default=0)
    options = parser.parse_args(argv)
    outcome = attack(Target.find(options.name, options.run), options.count, options.seed)
    print(json.dumps(outcome))
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
