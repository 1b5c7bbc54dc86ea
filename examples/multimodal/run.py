"""Move photographs, processed for a vision model, from one host to a reader on another.

    python examples/multimodal/run.py

Two peers stand for two hosts, and values between them go over TCP, as between machines. On host a,
rollout puts eight responses to each picture. On host b, a trainer claims whole groups. The output
shows the size of the rows, what a host stores, and what was transferred.
"""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import uuid
from contextlib import ExitStack

import numpy as np
from processor import process
from skimage import data

import dataplane

PICTURES = ("astronaut", "cat", "coffee", "rocket", "hubble_deep_field", "retina")
GROUP = 8
MEDIA = ["pixel_values", "image_grid_thw"]


def rollout(run: str) -> None:
    """On host a: process each picture once, and put the result with each response."""
    with dataplane.connect("a", run=run) as plane:
        stages = {"train": ["tokens", *MEDIA]}
        part = plane.partition("step-0", stages=stages, group_size=GROUP, free="drop")
        rng = np.random.default_rng(0)
        for name in PICTURES:
            media = process(getattr(data, name)())
            responses = [rng.integers(0, 150_000, n) for n in rng.integers(200, 2_000, GROUP)]
            columns = {"tokens": responses} | {field: [media[field]] * GROUP for field in MEDIA}
            part.put(columns, group=name, tags={"picture": name}, dedup=MEDIA)
        part.seal()
        part.wait("train", below=1)  # until the trainer has read this host's values
        used = plane.stats()["arena"]["used_bytes"]
        print(f"host a stored {used / 2**20:.0f} MiB for {len(PICTURES)} x {GROUP} rows")


def train(run: str) -> None:
    """On host b: check that every row has what the processor returned."""
    with dataplane.connect("b", run=run) as plane:
        part, had = plane.partition("step-0"), 0
        for batch in part.stream("train", groups=1):
            (name,) = set(batch.tags["picture"])
            wanted = process(getattr(data, name)())
            for field in MEDIA:
                assert all(np.array_equal(value, wanted[field]) for value in batch[field])
            nbytes = sum(value.nbytes for field in ("tokens", *MEDIA) for value in batch[field])
            had += nbytes
            tokens = len(wanted["pixel_values"]) // 4
            print(f"{name:18} {tokens:5} visual tokens, {GROUP} rows: {nbytes / 2**20:5.1f} MiB")
        moved = plane.stats()["pulled_bytes"]
    print(f"host b read {had / 2**20:.0f} MiB, and pulled {moved / 2**20:.0f} MiB from host a")


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_:
        found = [open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def main() -> None:
    run = f"multimodal-{uuid.uuid4().hex[:6]}"
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    peer = [sys.executable, "-m", "dataplane", "peer", "--run", run, "--arena", "512MiB"]
    peers = []
    for name, address in zip("ab", addresses, strict=True):
        given = ["--name", name, "--listen", address, "--seeds", ",".join(addresses)]
        peers.append(subprocess.Popen([*peer, *given], stderr=subprocess.DEVNULL))
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(run,)) for work in (rollout, train)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for process_ in (*workers, *peers):
            process_.terminate()
        for one in peers:
            one.wait()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
