"""Corrupt frames, and strangers without the token, at every port of a peer."""

from __future__ import annotations

import contextlib
import socket
import stat
from typing import Any

import zmq

from dataplane.launch import rundir
from dataplane.transport.bulk_frames import (
    CHALLENGE_BYTES,
    Join,
    Refused,
    decode_from_owner,
    encode,
)
from tests.cluster import Cluster
from tests.faults.load import CALL_S, Consumer, Producer, join, start
from tests.faults.peers import OTHER, PLANE, VICTIM, peers
from tests.faults.strangers import Target, attack, next_frame

ANSWER_S = 2.0
HONEST_S = 0.05
"""Between two rows of honest clients: the doors are what is tried."""


def corrupt_frames(count: int) -> dict[str, Any]:
    """`count` at every door, from members and strangers: nothing ends, nothing grows, and rows go
    from a client of another host to one of the attacked peer meanwhile, as if nothing happened."""
    with peers() as cluster, cluster.connect(VICTIM) as far, cluster.connect(OTHER) as near:
        part = far.partition("honest", {"s": ["x"]}, free="acked")
        producer, consumer = Producer(part, "far", HONEST_S), Consumer(near.partition("honest"))
        threads = start(producer, consumer)
        outcome = attack(Target.find(OTHER, PLANE), count, seed=0)
        producer.stopped.set()
        ended = join(threads[:1], CALL_S)
        part.seal()
        ended &= join(threads[1:], CALL_S)
    errors = {**producer.errors, **consumer.errors}
    arrived = producer.acknowledged == consumer.seen.keys() and bool(consumer.seen)
    undisturbed = ended and arrived and not consumer.wrong and not errors
    return {
        **outcome,
        "ok": outcome["ok"] and undisturbed,
        "honest_rows": len(consumer.seen),
        "honest_errors": errors,
        "honest_undisturbed": undisturbed,
        "slowest_honest_call_s": round(consumer.slowest_s, 2),
    }


def stranger() -> dict[str, Any]:
    """Who does not have the token gets nothing but a refusal."""
    with peers() as cluster:
        answers = {name: _at_peer_door(at) for name, at in cluster.addresses.items()}
        target = Target.find(OTHER, PLANE)
        bulk = _at_bulk_port(target.bulk)
        mode = stat.S_IMODE(rundir.plane_dir(PLANE).stat().st_mode)
        works = _still_works(cluster)
    ok = not any(answers.values()) and not bulk and mode == 0o700 and works
    return {
        "ok": ok,
        "peer_ports": len(answers),
        "accepted_at_peer_ports": sum(answers.values()),
        "accepted_at_bulk_port": bulk,
        "local_doors_mode": oct(mode),
        "members_undisturbed": works,
    }


def _at_peer_door(address: str) -> bool:
    """Whether anything comes back to somebody without keys, on a link."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        dealer.send(b"hello")
        return bool(dealer.poll(int(ANSWER_S * 1000)))


def _at_bulk_port(address: str) -> bool:
    """Whether a proof made without the token's key gets more than the greeting and a refusal."""
    host, _, port = address.rpartition(":")
    door = socket.create_connection((host.strip("[]"), int(port)), ANSWER_S)
    with door, door.makefile("rb") as answers, contextlib.suppress(ConnectionError):
        next_frame(answers.read)
        door.sendall(encode(Join(1, bytes(CHALLENGE_BYTES), bytes(CHALLENGE_BYTES))))
        answer = next_frame(answers.read)
        return bool(answer) and not isinstance(decode_from_owner(answer), Refused)
    return False


def _still_works(cluster: Cluster) -> bool:
    with cluster.connect(OTHER) as plane:
        part = plane.partition("works", {"s": ["x"]})
        part.put({"x": [1]}, key=["k"])
        with part.claim("s", rows=1, timeout=ANSWER_S) as batch:
            return batch.keys == ["k"]
