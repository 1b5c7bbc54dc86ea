"""A partition under load from several hosts, of which one after the other is killed.

Every death is seen by the producers and consumers of hosts that live: what they had to wait is told
by death, what was lost is looked at when the partition is over.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dataplane import DataplaneError, Plane
from tests.cluster import START_S, Cluster, in_sync, members, until
from tests.faults.load import Consumer, Producer, join, start
from tests.faults.peers import KEEPER

PARTITION = "busy"
LONGEST_S = 3.0
"""What a call at a host that lives may take while another one dies."""
DRAIN_S = 60.0
NOTICED_S = 15.0

Outcome = dict[str, Any]


@dataclass(slots=True)
class Busy:
    """clients, producers, consumers: by host, of those that are up."""

    peers: Cluster
    replicas: int
    pause_s: float = 0.01
    clients: dict[str, Plane] = field(default_factory=dict)
    producers: dict[str, Producer] = field(default_factory=dict)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    ended: list[Producer | Consumer] = field(default_factory=list)
    """of hosts that died or left meanwhile"""
    putting: list[threading.Thread] = field(default_factory=list)
    others: list[threading.Thread] = field(default_factory=list)
    named: set[Any] = field(default_factory=set)
    """rows that were reported as lost"""
    deaths: list[Outcome] = field(default_factory=list)

    def join(self, host: str, *, producing: bool = True, consuming: bool = True) -> None:
        """A client of this host's peer, which hears of losses, with that load."""
        self.clients[host] = plane = self.peers.connect(host)
        part = plane.partition(PARTITION, {"s": ["x"]}, replicas=self.replicas)
        hearing = threading.Thread(target=self._hear, args=(part,), daemon=True)
        hearing.start()
        self.others.append(hearing)
        if producing:
            self.producers[host] = Producer(part, f"{host}{len(self.ended)}", self.pause_s)
            self.putting += start(self.producers[host])
        if consuming:
            self.consumers[host] = Consumer(part)
            self.others += start(self.consumers[host])

    def _hear(self, part: Any) -> None:
        with suppress(DataplaneError):  # its peer was ended, or it left
            for keys in part.lost():
                self.named.update(keys)

    def leave(self, host: str) -> None:
        """The client of a host is closed, and its load ends."""
        for workers in (self.producers, self.consumers):
            if worker := workers.pop(host, None):
                worker.stopped.set()
                self.ended.append(worker)
        with suppress(DataplaneError):  # its peer is gone
            self.clients.pop(host).close()

    def serving(self) -> tuple[str, str]:
        """The hosts that are primary and backup of the partition now. All have to be connected."""
        stats = {host: client.stats() for host, client in self.clients.items()}
        primary = next(h for h, told in stats.items() if PARTITION in told["partitions"])
        backup = stats[primary]["roster"]["backup"]
        return primary, next(h for h, told in stats.items() if told["address"] == backup)

    def kill(self, host: str, what: str, down_s: float) -> None:
        """Kill -9 of a host, and for as long as it is down what the others notice of it."""
        workers: list[tuple[str, Producer | Consumer]]
        workers = [*self.producers.items(), *self.consumers.items()]
        living = [worker for name, worker in workers if name != host]
        for worker in living:
            worker.slowest_s = 0.0
        began = time.monotonic()
        self.peers.kill(host)
        self.leave(host)
        told: Outcome = {"killed": what}
        keeps = host == KEEPER and not self.peers.options  # else etcd keeps the roster
        if not keeps:
            client, left = next(iter(self.clients.values())), len(self.peers.peers) - 1
            until(lambda: len(members(client)) == left, f"{what} is no member any more", NOTICED_S)
            told["noticed_s"] = round(time.monotonic() - began, 2)
        time.sleep(max(0.0, began + down_s - time.monotonic()))
        puts = [one.slowest_s for one in living if isinstance(one, Producer)]
        told["slowest_put_s"] = round(max(puts), 2)
        if (
            not keeps
        ):  # what lies at who keeps the roster is neither there nor lost until it is back
            gaps = [one.longest_gap_s(began) for one in living if isinstance(one, Consumer)]
            told["longest_gap_between_claims_s"] = round(max(gaps), 2)
        self.deaths.append(told)

    def again(self, host: str) -> None:
        """A host that was killed is started, and everything has a backup in sync again."""
        self.peers.start_one(host)
        client, count = next(iter(self.clients.values())), len(self.peers.peers)
        until(lambda: len(members(client)) == count, f"{count} are members", START_S)
        in_sync(client)

    def outcome(self) -> Outcome:
        """The partition is sealed and drained: of what was acknowledged no row is lost with two
        replicas, and with one the lost rows are named."""
        for producer in self.producers.values():
            producer.stopped.set()
        hanging = not join(self.putting, DRAIN_S)
        next(iter(self.clients.values())).partition(PARTITION).seal()
        hanging |= not join(self.others, DRAIN_S)
        workers = [*self.ended, *self.producers.values(), *self.consumers.values()]
        for host in list(self.clients):
            self.leave(host)
        made = [one for one in workers if isinstance(one, Producer)]
        took = [one for one in workers if isinstance(one, Consumer)]
        acknowledged = set().union(*(one.acknowledged for one in made))
        lost = acknowledged - set().union(*(one.seen.keys() | one.unsure for one in took))
        unnamed = lost - self.named
        wrong = sum(len(one.wrong) for one in took)
        waits = [death[name] for death in self.deaths for name in death if name.endswith("_s")]
        ok = max(waits) < LONGEST_S and not hanging and not wrong
        ok &= not lost if self.replicas == 2 else not unnamed
        errors: dict[str, int] = {}
        for worker in workers:
            for name, count in worker.errors.items():
                errors[name] = errors.get(name, 0) + count
        return {
            "ok": ok,
            "acknowledged_rows": len(acknowledged),
            "lost_rows": len(lost),
            "lost_rows_not_named": len(unnamed),
            "wrong_rows": wrong,
            "hanging": hanging,
            "deaths": self.deaths,
            "errors": errors,
        }
