"""Puts to a GPU, reads there, claims, copies to it, and reads from another peer's.

Each round measures a ceiling and what it is the ceiling of one after the other; reported are the
medians over rounds. Peers are processes; the values are made and read in this one. What is measured
with a claim before it does not count the claim.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cluster import clients
from tests.perf.gpu.device import Gpu

MIB = 1 << 20
LARGE_BYTES = 128 * MIB
ROWS = 8
"""values at a time: a GPU copies one in less than a call takes"""
SMALL_BYTES = 4 * 1024
CLAIM_S = 60.0

Samples = dict[str, list[float]]


def measure(
    gpu: Gpu,
    rounds: int,
    tick: Callable[[int, int], None],
    nbytes: int = LARGE_BYTES,
) -> dict[str, Any]:
    """The report's `gpu`. nbytes: of each large value. tick(done, all): after each round."""
    samples: Samples = defaultdict(list)
    arena = f"{4 * ROWS * nbytes // MIB}MiB"
    options = ["--transport", "off:nixl", "--device-arena", f"{gpu.kind}{arena}"]
    with clients("ab", arena, *options, devices="required") as (near, far):
        figures = _Figures(gpu, near, far, nbytes, samples)
        for nth in range(rounds + 1):
            figures.round()
            if not nth:  # pools are opened, pages pinned and buffers made in the first
                samples.clear()
            tick(nth + 1, rounds + 1)
        return report_of(samples, nbytes) | {"between_peers": figures.between_peers()}


class _Figures:
    def __init__(self, gpu: Gpu, near: Any, far: Any, nbytes: int, samples: Samples) -> None:
        self._gpu, self._near, self._far, self._nbytes = gpu, near, far, nbytes
        self._samples = samples
        stages = {"s": ["x"]}
        self._on_gpu = near.partition("on-gpu", stages=stages)
        self._on_host = near.partition("on-host", stages=stages)
        self._shared = near.partition("shared", stages=stages)
        self._pulling = far.partition("shared", stages=stages)
        self._on_host_now = np.random.default_rng(0).integers(0, 255, (ROWS, nbytes), np.uint8)

    def round(self) -> None:
        gpu, nbytes = self._gpu, ROWS * self._nbytes
        small = [gpu.array(SMALL_BYTES) for _ in range(ROWS)]
        large = [gpu.array(self._nbytes) for _ in range(ROWS)]
        self._note("device_copy_s", gpu.device_copy_s(nbytes))
        self._note("put_s", _timed(lambda: self._on_gpu.put({"x": large})))
        batch = self._claim(self._on_gpu, "claim_large_s")
        self._note("get_s", _timed(lambda: gpu.tensor(batch, "x")))
        self._note("view_s", _timed(lambda: list(batch["x"])))
        batch.ack()
        self._on_gpu.put({"x": small})
        self._claim(self._on_gpu, "claim_small_s").ack()
        self._on_host.put({"x": self._on_host_now})
        batch = self._claim(self._on_host, "claim_host_s")
        self._note("pinned_copy_s", gpu.pinned_copy_s(nbytes))
        self._note("to_gpu_s", _timed(lambda: gpu.tensor(batch, "x")))
        batch.ack()
        self._shared.put({"x": large})
        self._note("other_peer_s", _timed(lambda: self._pull().ack()))

    def _pull(self) -> Any:
        batch = self._pulling.claim("s", rows=ROWS, timeout=CLAIM_S)
        self._gpu.tensor(batch, "x")
        return batch

    def _claim(self, part: Any, name: str) -> Any:
        began = time.perf_counter()
        batch = part.claim("s", rows=ROWS, timeout=CLAIM_S)
        self._note(name, time.perf_counter() - began)
        return batch

    def _note(self, name: str, seconds: float) -> None:
        self._samples[name].append(seconds)

    def between_peers(self) -> dict[str, Any]:
        """How values came from the other peer's GPU, as the peers themselves say."""
        near, far = (plane.stats()["devices"][0] for plane in (self._near, self._far))
        return {**far["to_others"], "staged_bytes": near["staged_bytes"]}


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report_of(samples: Samples, nbytes: int = LARGE_BYTES) -> dict[str, Any]:
    """Rates in GB/s, shares of the ceiling measured beside them, latencies in ms."""
    taken = {name: np.array(values) for name, values in samples.items()}

    def rate(name: str) -> float:
        return ROWS * nbytes / 1e9 / float(np.median(taken[name]))

    def beside(name: str, ceiling: str) -> dict[str, float]:
        share = float(np.median(taken[ceiling] / taken[name]))
        return {"GBps": rate(name), "of_ceiling": share}

    def ms(name: str) -> float:
        return float(np.median(taken[name])) * 1e3

    return {
        "rows": ROWS,
        "value_bytes": nbytes,
        "ceiling": {
            "device_copy_GBps": rate("device_copy_s"),
            "pinned_copy_GBps": rate("pinned_copy_s"),
        },
        "put": beside("put_s", "device_copy_s"),
        "get": beside("get_s", "device_copy_s"),
        "to_gpu": beside("to_gpu_s", "pinned_copy_s"),
        "other_peer": beside("other_peer_s", "device_copy_s"),
        "claim_ms": {
            "small": ms("claim_small_s"),
            "large": ms("claim_large_s"),
            "host": ms("claim_host_s"),
            "view": ms("view_s"),
        },
    }
