"""Consumers that race over three peers, some of which die: nothing is lost, nothing is left."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from tests.end_to_end.attacks import Planes, all_free, clients_of_three, no_leaks
from tests.end_to_end.conftest import Cluster, line
from tests.end_to_end.hosts import running


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("a", "b", "c") as started:
        yield started


@pytest.fixture
def planes(
    cluster: Cluster, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Planes]:
    """Clients of three peers; "a" keeps the roster and no rows."""
    with clients_of_three(cluster, monkeypatch) as clients:
        yield clients


CONSUMER = """
    import dataplane, sys
    part = dataplane.connect().partition("{name}")
    for number, batch in enumerate(part.stream("s", rows=4, min=1)):
        assert all((x == int(k[1:])).all() for k, x in zip(batch.keys, batch["x"]))
        print(*batch.keys, flush=True)
        if number == {last}:
            sys.stdin.read()
    print("ended", flush=True)
"""


def produce(parts: tuple[Partition, ...], rows: int) -> None:
    """Rows "k0", "k1" … from several hosts at once, then the seal."""

    def put(at: int) -> None:
        for i in range(at, rows, len(parts)):
            parts[at].put({"x": [np.full(3000, i)]}, key=[f"k{i}"])

    threads = [threading.Thread(target=put, args=(i,)) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts[0].seal()


def test_racing_consumers_of_whom_some_die_get_every_row(planes: Planes, cluster: Cluster) -> None:
    name, killed = "race", 3  # tests/end_to_end/test_several_hosts has a race where none dies
    parts = tuple(p.partition(name, stages={"s": ["x"]}) for p in planes)
    workers = []
    for at, peer in enumerate("abcabcab"):
        last = 3 + 4 * at if at < killed else -1
        workers.append(cluster.worker(CONSUMER.format(name=name, last=last), DATAPLANE_PEER=peer))
    claims: list[list[list[str]]] = [[] for _ in workers]

    def read(at: int) -> None:
        while (text := line(workers[at])) != "ended":
            claims[at].append(text.split())
            if at < killed and len(claims[at]) == 4 + 4 * at:
                workers[at].kill()
                return

    readers = [threading.Thread(target=read, args=(i,)) for i in range(len(workers))]
    for reader in readers:
        reader.start()
    produce(parts, 600)
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive(), "the stream ends for everybody"
    times = Counter(key for of in claims for keys in of for key in keys)
    assert set(times) == {f"k{i}" for i in range(600)}
    held_by_the_dead = {key for of in claims[:killed] for key in of[-1]}
    assert {key for key, n in times.items() if n > 1} == held_by_the_dead
    no_leaks(*planes)
    for plane in planes:
        all_free(plane)


def sized_groups(count: int, seed: int) -> list[tuple[str, int, int]]:
    """(name, rows, length a row) of groups of many sizes."""
    rng = random.Random(seed)
    return [(f"g{i}", rng.randint(1, 9), rng.randint(1, 100)) for i in range(count)]


def put_group(part: Partition, name: str, size: int, length: int, mark: int) -> None:
    """A group in two puts, the rows known by their group and number; then it is closed."""
    cut = size // 2
    for low, high in ((0, cut), (cut, size)):
        if low < high:
            part.put(
                {"x": [f"{name}.{i}" for i in range(low, high)]},
                group=name,
                key=[f"{name}.{i}" for i in range(low, high)],
                tags={"length": length, "mark": mark},
            )
    part.close(name, size)


def test_groups_of_many_sizes_never_mix(planes: Planes) -> None:
    parts = tuple(p.partition("sizes", stages={"s": ["x"]}) for p in planes)
    groups = sized_groups(120, 1)
    sizes = {name: size for name, size, _ in groups}
    spent: dict[str | int | None, int] = {name: size * length for name, size, length in groups}
    got: dict[str | int | None, list[str]] = {}
    failures: list[BaseException] = []
    lock = threading.Lock()
    calls: list[dict[str, Any]] = [
        {"groups": 3, "min": 1},
        {"groups": 2, "min": 2, "where": dataplane.tag("mark") == 1},
        {"budget": {"length": 1000}, "unit": "groups"},
        {"budget": {"length": 1500}, "unit": "groups", "where": dataplane.tag("mark") != 1},
        {"groups": 1},
        {"groups": 5, "min": 1, "where": dataplane.tag("length") > 50},
    ]

    def consume(at: int) -> None:
        part, call = parts[at % 3], calls[at]
        try:
            for batch in part.stream("s", timeout=20, **call):
                ids = [g.id for g in batch.groups()]
                if "budget" in call:
                    assert sum(spent[g] for g in ids) <= call["budget"]["length"]
                else:
                    assert len(ids) <= call["groups"]
                with lock:
                    for g in batch.groups():
                        assert g.id not in got, f"{g.id} came twice"
                        got[g.id] = sorted(str(x) for x in g["x"])
        except BaseException as exc:
            failures.append(exc)

    def put(at: int) -> None:
        try:
            for i, (name, size, length) in list(enumerate(groups))[at::3]:
                put_group(parts[at], name, size, length, i % 2)
        except BaseException as exc:
            failures.append(exc)

    consumers = [threading.Thread(target=consume, args=(i,)) for i in range(len(calls))]
    producers = [threading.Thread(target=put, args=(i,)) for i in range(3)]
    for thread in consumers + producers:
        thread.start()
    for thread in producers:
        thread.join(30)
    parts[1].seal()
    for thread in consumers:
        thread.join(30)
    assert not failures, failures
    assert not any(t.is_alive() for t in consumers)
    assert got == {n: sorted(f"{n}.{i}" for i in range(size)) for n, size in sizes.items()}


@pytest.mark.parametrize("turn", range(3))
def test_a_partition_seals_itself_when_its_groups_are_there(planes: Planes, turn: int) -> None:
    parts = tuple(
        p.partition(f"counted-{turn}", stages={"s": ["x"]}, group_size=4, groups=60) for p in planes
    )
    accepted: list[str] = []

    def put(at: int) -> None:
        for i in itertools.count(at, 3):
            try:
                # Two halves of a group from two hosts.
                for host, rows in ((at, (0, 1)), ((at + i) % 3, (2, 3))):
                    parts[host].put({"x": [i, i]}, group=f"g{i}", key=[f"{i}.{r}" for r in rows])
            except (dataplane.PartitionSealed, dataplane.RowsDropped):
                return  # the second: its group was half there at the seal, and went
            accepted.append(f"g{i}")

    producers = [threading.Thread(target=put, args=(i,)) for i in range(3)]
    for thread in producers:
        thread.start()
    got: Counter[str | int | None] = Counter()
    for batch in parts[2].stream("s", groups=7, min=1, timeout=20):
        for group in batch.groups():
            assert len(group) == 4, group
            got[group.id] += 1
    for thread in producers:
        thread.join(20)
        assert not thread.is_alive()
    assert max(got.values()) == 1
    assert set(got) == set(accepted)
    assert len(accepted) >= 60
