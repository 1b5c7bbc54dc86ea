"""Reads between bulk workers against the engine's bare loop: `python -m tests.engines.read_loop
nixl|tcp [ROUNDS]`.

What `bench perf` leaves when there are no claims, clients and rows: the transport alone, with its
pins, tickets and confirmations. Both take turns, so that a busy machine slows them alike; medians,
and the best of each, with the processor time of both workers. NIXL must be on PYTHONPATH
(`make test-nixl` puts it into .venv/engines).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterable

import numpy as np
import psutil

from dataplane.testing import Host, hosts
from tests.perf.transports import Shape
from tests.perf.transports.loops import Loop

MIB = 1 << 20
ARENA_BYTES = 256 * MIB
SHAPES = (Shape(256, MIB), Shape(4096, 16 << 10), Shape(2, 128 * MIB))


async def read(reader: Host, owner: Host, shape: Shape) -> float:
    """Seconds; in another order than the values lie, so that none adjoin."""
    count, size = shape.rows, shape.value_bytes
    copies = owner.place(np.arange(count) * size, np.full(count, size))
    copies = copies[np.random.default_rng(0).permutation(count)]
    began = time.perf_counter()
    outcome = await reader.read(owner, copies, 60)
    took = time.perf_counter() - began
    assert outcome.nbytes == shape.nbytes
    return took


def processor_s(pids: Iterable[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


async def measure(name: str, rounds: int) -> None:
    with Loop(name, ARENA_BYTES) as loop:
        async with hosts(name) as start:
            owner, reader = await start("owner", ARENA_BYTES), await start("reader", ARENA_BYTES)
            owner.fill()
            reader.bytes[:] = 0
            pids = {"loop": loop.pids, "read": (owner.pid, reader.pid)}
            for shape in SHAPES:
                taken: dict[str, list[float]] = {"loop": [], "read": []}
                await read(reader, owner, shape)
                loop.read_s(shape)
                before = {what: processor_s(ids) for what, ids in pids.items()}
                for _ in range(rounds):
                    taken["loop"].append(await asyncio.to_thread(loop.read_s, shape))
                    taken["read"].append(await read(reader, owner, shape))
                spent = {what: processor_s(ids) - before[what] for what, ids in pids.items()}
                show(shape, taken, spent)


def show(shape: Shape, taken: dict[str, list[float]], spent: dict[str, float]) -> None:
    pairs = zip(taken["loop"], taken["read"], strict=True)
    ratio = statistics.median(loop / read for loop, read in pairs)
    gigabytes = shape.nbytes / 1e9
    told = []
    for what, times in taken.items():
        rates = [gigabytes / s for s in times]
        processor = spent[what] / gigabytes / len(times)
        told.append(
            f"{what} {statistics.median(rates):.2f} GB/s (best {max(rates):.2f}), "
            f"{processor:.2f} processor s/GB"
        )
    print(f"{shape.name:12} {'; '.join(told)}; of it {ratio:.2f}", flush=True)


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 9))
