"""`python -m bench perf`: the hot path against this machine's ceilings, in one run.

Every round measures the ceilings and our figures one after the other, so a ratio is made of
neighbours in time; what is reported is the median over rounds, with the range beside it. Peers,
clients and the ends of the ceilings are processes of their own, as in real use.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.processes import die_with
from bench.usage import cpu_seconds
from tests.cluster import clients
from tests.perf import lives
from tests.perf.ceilings import Ceilings
from tests.perf.children import processor_s, spawned

ROWS = 256
VALUE_BYTES = 1 << 20
SMALL_BYTES = 1 << 10
CLAIM_FIELDS = "abcd"
CYCLES = 300
CALLS = 2_000
PULLS, PULLED_BYTES = 256, 4 << 10
CLIENT_S = 0.7
FEW_ROWS, MANY_ROWS = 10_000, 1_000_000
SHARD_CLAIMS = 40
ARENA = "2304MiB"

Samples = dict[str, list[float]]


def measure(rounds: int, tick: Callable[[int, int], None]) -> dict[str, Any]:
    """All figures, as the report holds them. tick(done, all): after each round.

    `spread` has the smallest and the largest of each measured time (seconds) and rate.
    """
    samples: Samples = defaultdict(list)
    block = np.random.default_rng(0).integers(0, 255, (ROWS, VALUE_BYTES), np.uint8)
    with ExitStack() as stack:
        (alone,) = stack.enter_context(clients(["alone"], ARENA))
        # Last, for clients that are processes of their own look for these. Their ceiling is a
        # socket, so bytes go over TCP.
        near, far = stack.enter_context(clients("ab", ARENA, "--transport", "off"))
        ceilings = stack.enter_context(Ceilings(block))
        figures = _Figures(near, far, alone, block, samples)
        figures.touch_arenas()
        for nth in range(rounds + 1):
            figures.round(ceilings)
            if not nth:  # connections, imports and caches are made in the first
                samples.clear()
            tick(nth + 1, rounds + 2)
        figures.shard()
    samples["life_s"] = lives.measure()
    tick(rounds + 2, rounds + 2)
    return report_of(samples)


class _Figures:
    """Our side: a client at one peer, one at another that pulls from it and backs it up, and one
    at a peer without others."""

    def __init__(
        self, near: Any, far: Any, alone: Any, block: np.ndarray, samples: Samples
    ) -> None:
        self.near, self.far, self.alone, self.samples = near, far, alone, samples
        self.block = block
        self.put_here = near.partition("put", stages={"s": ["x"]})
        self.pulled = near.partition("pull", stages={"s": ["x"]})
        self.pulling = far.partition("pull", stages={"s": ["x"]})
        self.claimed = alone.partition("claim", stages={"s": list(CLAIM_FIELDS)})
        self.claimed_backed_up = near.partition("claim", stages={"s": list(CLAIM_FIELDS)})
        self.owned = near.partition("owner", stages={"s": ["x"]}, free="drop")
        self.owned_there = far.partition("owner")
        self.pids = {client.peer: client.stats()["pid"] for client in (near, far)}
        self.pid_alone = alone.stats()["pid"]
        self.cycled = alone.partition("cycle", stages={"s": ["x"]})
        self.cycled_backed_up = near.partition("cycle", stages={"s": ["x"]})
        self.fields = {n: near.partition(f"fields-{n}", stages={"s": _names(n)}) for n in (1, 32)}

    def touch_arenas(self) -> None:
        """Pull until the far arena's room for copies was used once: the first touch of a page is
        several times slower than a copy, and happens once in a peer's life."""
        touched = -1
        while (now := self.far.stats()["arena"]["touched_bytes"]) > touched:
            touched = now
            self._pull()
            self._pull()
        self._claim(self.claimed, self.block)
        self._claim(self.claimed_backed_up, self.block)

    def round(self, ceilings: Ceilings) -> None:
        note = self._note
        for _ in range(3):
            note("memcpy_s", ceilings.memcpy_s())
            note("put_s", self._put(self.put_here, {"x": self.block}))
            note("put_list_s", self._put(self.put_here, {"x": list(self.block)}))
        for _ in range(2):
            note("socket_s", ceilings.socket_s())
            note("pull_s", self._pull())
        note("round_trip_s", ceilings.round_trip_s())
        for _ in range(4):
            note("claim_s", self._claim(self.claimed, self.block))
            small = self.block[:, :SMALL_BYTES]
            note("claim_small_s", self._claim(self.claimed, small))
            # Before a claim of 1 MiB values, 1 GiB was copied: the same for small ones.
            note("claim_small_cold_s", self._claim(self.claimed, small, ceilings.memcpy_s))
            note("claim_backed_up_s", self._claim(self.claimed_backed_up, self.block))
        note("round_trip_s", ceilings.round_trip_s())
        client_s, peer_s = self._bare_calls()
        note("bare_client_s", client_s)
        note("bare_peer_s", peer_s)
        note("cycle_s", self._cycles(self.cycled))
        note("relayed_s", ceilings.relayed_s())
        note("cycle_backed_up_s", self._cycles(self.cycled_backed_up))
        note("pull_owner_s", self._pull_owner())
        for n, part in self.fields.items():
            rows = np.split(self.block[: ROWS // 4], n, axis=1)
            columns = dict(zip(_names(n), map(np.ascontiguousarray, rows), strict=True))
            note(f"fields_{n}_s", self._put(part, columns))
        for count in (1, 4):
            note(f"clients_{count}", _many_clients(self.near.peer, self.near.name, count))

    def _note(self, name: str, value: float) -> None:
        self.samples[name].append(value)

    @staticmethod
    def _put(part: Any, columns: dict[str, Any]) -> float:
        began = time.perf_counter()
        part.put(columns)
        took = time.perf_counter() - began
        _drain(part)
        return took

    def _pull(self) -> float:
        self.pulled.put({"x": self.block})
        began = time.perf_counter()
        batch = self.pulling.claim("s", rows=ROWS, timeout=30)
        took = time.perf_counter() - began
        batch.ack()
        return took

    @staticmethod
    def _claim(part: Any, block: np.ndarray, between: Callable[[], object] = lambda: None) -> float:
        """Until all 1,024 views are in hand. between: done after the put."""
        part.put(dict.fromkeys(CLAIM_FIELDS, block))
        between()
        began = time.perf_counter()
        batch = part.claim("s", rows=ROWS, timeout=30)
        views = [list(batch[name]) for name in CLAIM_FIELDS]
        took = time.perf_counter() - began
        assert sum(map(len, views)) == ROWS * len(CLAIM_FIELDS)
        batch.ack()
        return took

    @staticmethod
    def _cycles(part: Any) -> float:
        began = time.perf_counter()
        _cycle(part, CYCLES)
        return (time.perf_counter() - began) / CYCLES

    def _bare_calls(self) -> tuple[float, float]:
        """Processor seconds of a client and of its peer for a call that does nothing."""
        from dataplane.client._sync.calls import ask
        from dataplane.client.arguments import Deadline
        from dataplane.wire.messages import Done, GiveBack

        before = time.process_time(), processor_s(self.pid_alone)
        for _ in range(CALLS):
            ask(self.alone._session, GiveBack(b""), Done, Deadline(30.0))
        client_s, peer_s = time.process_time() - before[0], processor_s(self.pid_alone) - before[1]
        return client_s / CALLS, peer_s / CALLS

    def _pull_owner(self) -> float:
        """Processor seconds of both peers for a pull: a value got from the other host, less what it
        takes to get it once more, when it is here."""
        ref = self.owned.put({"x": self.block[:PULLS, :PULLED_BYTES]})
        pulled, here = (self._got_one_by_one(ref.keys) for _ in range(2))
        self.owned.drop(keys=ref.keys)
        return (pulled - here) / PULLS

    def _got_one_by_one(self, keys: Any) -> float:
        before = sum(cpu_seconds(self.pids).values())
        for key in keys:
            self.owned_there.get(keys=[key], fields=["x"])
        return sum(cpu_seconds(self.pids).values()) - before

    def shard(self) -> None:
        """Claims while 10 thousand and a million rows live at the peer."""
        part = self.near.partition("shard", stages={"s": list(CLAIM_FIELDS)})
        rows = 0
        for goal in (FEW_ROWS, MANY_ROWS):
            while rows < goal:
                rows += _put_small(part, 10_000)
            for _ in range(SHARD_CLAIMS):
                began = time.perf_counter()
                batch = part.claim("s", rows=ROWS, timeout=30)
                self._note(f"shard_{goal}_s", time.perf_counter() - began)
                batch.release()
        self._note("bytes_per_row", part.stats()["bytes_per_row"])
        part.drop()


def _names(count: int) -> list[str]:
    return [f"f{n}" for n in range(count)]


def _drain(part: Any) -> None:
    batch = part.claim("s", rows=ROWS, min=1, timeout=30)
    batch.ack()


def _cycle(part: Any, times: int) -> None:
    for _ in range(times):
        part.put({"x": [1]})
        batch = part.claim("s", rows=1)
        assert batch["x"][0] == 1
        batch.ack()


def _put_small(part: Any, rows: int) -> int:
    values = np.zeros((rows, 8), np.int64)
    tags = {"version": list(range(rows)), "length": list(range(rows))}
    part.put(dict.fromkeys(CLAIM_FIELDS, values), tags=tags)
    return rows


# clients side by side


def _many_clients(peer: str, plane: str, count: int) -> float:
    """Operations a second (put, claim, ack) of all clients together, each a process."""
    pipes: list[Connection] = []
    children = []
    for nth in range(count):
        child, ours = spawned(_client, peer, plane, nth)
        children.append(child)
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(CLIENT_S)
    per_s = float(sum(pipe.recv() for pipe in pipes))
    for child in children:
        child.join()
    return per_s


def _client(pipe: Connection, peer: str, plane: str, nth: int, parent: int) -> None:
    die_with(parent)
    import dataplane

    with dataplane.connect(peer, run=plane) as client:
        part = client.partition(f"client-{nth}", stages={"s": ["x"]})
        _cycle(part, 20)
        pipe.send(True)
        span_s, cycles = pipe.recv(), 0
        began = time.perf_counter()
        while (took := time.perf_counter() - began) < span_s:
            _cycle(part, 10)
            cycles += 10
        pipe.send(3 * cycles / took)


# the report


def report_of(samples: Samples) -> dict[str, Any]:
    taken = {name: np.array(values) for name, values in samples.items()}
    middle = {name: float(np.median(values)) for name, values in taken.items()}
    gigabytes = ROWS * VALUE_BYTES / 1e9
    rtt = middle["round_trip_s"]

    def of(name: str, ceiling: str) -> float:
        return float(np.median(taken[ceiling] / taken[name]))

    report: dict[str, Any] = {
        "ceiling": {
            "memcpy_GBps": gigabytes / middle["memcpy_s"],
            "socket_GBps": gigabytes / middle["socket_s"],
            "unix_rtt_us": rtt * 1e6,
            "relayed_us": middle["relayed_s"] * 1e6,
        },
        "put": {"GBps": gigabytes / middle["put_s"], "of_memcpy": of("put_s", "memcpy_s")},
        "pull": {"GBps": gigabytes / middle["pull_s"], "of_socket": of("pull_s", "socket_s")},
        "claim_local": {
            "ms_p50": middle["claim_s"] * 1e3,
            "ms_p99": float(np.percentile(taken["claim_s"], 99)) * 1e3,
        },
        "pull_owner": {"cpu_ms": middle["pull_owner_s"] * 1e3},
        "bare_call": {
            "client_cpu_us": middle["bare_client_s"] * 1e6,
            "peer_cpu_us": middle["bare_peer_s"] * 1e6,
        },
        "cycle": {"per_s": 1 / middle["cycle_s"]},
        "shard": {
            "claim_ms_p50_at_10k": middle[f"shard_{FEW_ROWS}_s"] * 1e3,
            "claim_ms_p50_at_1m": middle[f"shard_{MANY_ROWS}_s"] * 1e3,
            "bytes_per_row": middle["bytes_per_row"],
        },
        "group_life": {"per_s": 1 / middle["life_s"], "cpu_ms": middle["life_s"] * 1e3},
        "clients": {str(n): middle[f"clients_{n}"] for n in (1, 4)},
        "fields": {str(n): gigabytes / 4 / middle[f"fields_{n}_s"] for n in (1, 32)},
    }
    report["backed_up"] = {  # the same where a second peer has every change before it is answered
        "claim_ms_p50": middle["claim_backed_up_s"] * 1e3,
        "cycle_per_s": 1 / middle["cycle_backed_up_s"],
    }
    report["ratios"] = {
        "put_list_of_memcpy": of("put_list_s", "memcpy_s"),
        "claim_round_trips": middle["claim_s"] / rtt,
        "claim_1MiB_of_1KiB": middle["claim_s"] / middle["claim_small_s"],
        "claim_1MiB_of_cold_1KiB": middle["claim_s"] / middle["claim_small_cold_s"],
        "cycle_round_trips": middle["cycle_s"] / rtt,
        "cycle_backed_up_relayed": middle["cycle_backed_up_s"] / middle["relayed_s"],
        "shard_1m_of_10k": middle[f"shard_{MANY_ROWS}_s"] / middle[f"shard_{FEW_ROWS}_s"],
        "clients_4_of_1": middle["clients_4"] / middle["clients_1"],
        "fields_32_of_1": of("fields_32_s", "fields_1_s"),
    }
    report["spread"] = spread_of(samples)
    return report


def spread_of(samples: Samples) -> dict[str, dict[str, float]]:
    """The smallest, the largest and the number of each kind of sample."""
    return {
        name: {"min": min(values), "max": max(values), "samples": len(values)}
        for name, values in samples.items()
    }
