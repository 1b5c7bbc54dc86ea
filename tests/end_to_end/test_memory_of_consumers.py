"""What a process that only claims keeps of the rows that it has acked."""

from __future__ import annotations

import numpy as np

from tests.end_to_end.conftest import Cluster, line

ROWS, CLAIMS, WARM = 32_768, 14, 6
"""What a client remembers of keys is full after 4 claims."""
KEPT_BYTES = 100 << 10
"""More than a claim may leave behind, on average. The keys of its rows are 0.5 MiB."""
CONSUMER = """
import gc, tracemalloc
import dataplane

with dataplane.connect() as plane:
    part = plane.partition("p")
    tracemalloc.start()
    for _ in range({claims}):
        with part.claim("s", rows={rows}, timeout=60) as batch:
            assert len(batch.numpy("x")) == len(batch.keys) == {rows}
        del batch
        gc.collect()
        print(tracemalloc.get_traced_memory()[0], flush=True)
"""


def test_a_consumer_keeps_nothing_of_the_rows_that_it_acked(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        consumer = alone.worker(CONSUMER.format(claims=CLAIMS, rows=ROWS), DATAPLANE_PEER="a")
        sizes = []
        for turn in range(CLAIMS):
            part.put({"x": np.arange(ROWS)}, key=[f"{turn}-{row}" for row in range(ROWS)])
            sizes.append(int(line(consumer)))
        assert consumer.wait(30) == 0
    assert sizes[-1] - sizes[WARM] < (CLAIMS - 1 - WARM) * KEPT_BYTES, sizes
