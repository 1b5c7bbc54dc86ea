"""From the GPU of one peer to that of another, over each transport that moves device memory: two
peers of this machine that require it, so nothing else can stand for it.

What is not installed, or does not work here, is reported as not run, with the peers' own reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.errors import DataplaneError
from dataplane.transport import registry
from tests.cluster import Failed, clients
from tests.perf.gpu.device import Gpu

WAYS = ("cuda_ipc", "nixl", "nccl")
MIB = 1 << 20
ROWS = 8
CLAIM_S = 60.0


def measure(
    gpu: Gpu,
    rounds: int,
    tick: Callable[[int, int], None],
    nbytes: int = 128 * MIB,
    names: tuple[str, ...] = WAYS,
) -> dict[str, Any]:
    """By transport: a claim of 8 values with their bytes, in GB/s and beside a copy on the device
    of the same round. tick(done, all): after each transport."""
    told = {}
    for done, name in enumerate(names, 1):
        try:
            told[name] = _measured(gpu, rounds, nbytes, name)
        except (DataplaneError, Failed) as exc:
            told[name] = _not_run(str(exc))
        tick(done, len(names))
    return told


def _measured(gpu: Gpu, rounds: int, nbytes: int, name: str) -> dict[str, Any]:
    if why := registry.missing(name):
        return _not_run(why)
    arena = f"{4 * ROWS * nbytes // MIB}MiB"
    seconds, ceilings = [], []
    options = ["--transport", f"required:{name}", "--device-arena", f"{gpu.kind}{arena}"]
    with clients("ab", arena, *options, devices="required") as (near, far):
        put, claimed = (one.partition("p", stages={"s": ["x"]}) for one in (near, far))
        for _ in range(rounds + 1):
            put.put({"x": [gpu.array(nbytes) for _ in range(ROWS)]})
            ceilings.append(gpu.device_copy_s(ROWS * nbytes))
            began = time.perf_counter()
            batch = claimed.claim("s", rows=ROWS, timeout=CLAIM_S)
            gpu.tensor(batch, "x")
            seconds.append(time.perf_counter() - began)
            batch.ack()
        ways = far.stats()["devices"][0]["to_others"]
    (path,) = ways["peers"].values() if name in ways["runs"] else [{"why": ways["missing"][name]}]
    if path.get("transport") != name:
        return _not_run(path["why"])
    taken, ceiling = np.array(seconds[1:]), np.array(ceilings[1:])
    return {
        "GBps": ROWS * nbytes / 1e9 / float(np.median(taken)),
        "of_ceiling": float(np.median(ceiling / taken)),
        "tried": path["tried"][name],
    }


def _not_run(why: str) -> dict[str, Any]:
    return {"status": "not run", "error": why}
