"""Two peers that stand for two hosts, and a client at each: what `bench perf` measures."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.ports import free_ports
from bench.processes import Crew, leashed

START_S = 30.0


@contextmanager
def two_peers(
    arena: str, transport: str, device_arena: str = "", devices: str | None = None
) -> Iterator[tuple[Any, Any]]:
    """Clients of peers `a` and `b`, which end with the body.

    arena, transport, device_arena: as `dataplane peer` takes them. devices: as `connect` does.
    ProcessDied, with the end of its log, where a peer does not start.
    """
    import dataplane
    from dataplane.errors import ConnectError

    plane = f"perf-{os.getpid()}"
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        stack.enter_context(_run_dir(folder))
        crew = stack.enter_context(Crew(Path(folder)))
        for name, address in zip("ab", addresses, strict=True):
            options = ["--plane", plane, "--name", name, "--listen", address]
            options += ["--seeds", ",".join(addresses), "--arena", arena, "--transport", transport]
            options += ["--device-arena", device_arena] if device_arena else []
            argv = [sys.executable, "-m", "dataplane", "peer", *options]
            crew.start(f"peer-{name}", leashed(argv), speaks=False)
        clients: list[Any] = []
        deadline = time.monotonic() + START_S
        while len(clients) < 2:
            crew.events()  # raises where a peer ended
            try:
                client = dataplane.connect("ab"[len(clients)], plane=plane, devices=devices)
            except ConnectError:
                if time.monotonic() > deadline:
                    raise
            else:
                stack.callback(client.close)
                clients.append(client)
        yield clients[0], clients[1]


@contextmanager
def _run_dir(folder: str) -> Iterator[None]:
    """Clients of this process, and the processes that it starts, look for peers there."""
    before = os.environ.get("DATAPLANE_RUN_DIR")
    os.environ["DATAPLANE_RUN_DIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["DATAPLANE_RUN_DIR"]
        else:
            os.environ["DATAPLANE_RUN_DIR"] = before
