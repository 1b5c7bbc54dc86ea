"""The peers that `bench perf` measures, with a client at each: two that stand for two hosts, or one
as a first client starts it for itself."""

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
    arena: str,
    transport: str,
    device_arena: str = "",
    devices: str | None = None,
    token: str = "",
) -> Iterator[tuple[Any, Any]]:
    """Clients of peers `a` and `b`, which end with the body.

    arena, transport, device_arena: as `dataplane peer` takes them. devices: as `connect` does.
    token: a file with the secret of the cluster, so that all between them is encrypted.
    ProcessDied, with the end of its log, where a peer does not start.
    """
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    options = ["--arena", arena, "--transport", transport]
    options += ["--device-arena", device_arena] if device_arena else []
    options += ["--token-file", token] if token else []
    argvs = {
        name: ["--listen", address, "--seeds", ",".join(addresses), *options]
        for name, address in zip("ab", addresses, strict=True)
    }
    with _peers(f"perf-{os.getpid()}", argvs, devices) as (near, far):
        yield near, far


@contextmanager
def many_peers(count: int, arena: str) -> Iterator[list[Any]]:
    """A client of each of so many peers, all seeds of one roster that the first one keeps."""
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]
    seeds = ["--seeds", ",".join(addresses), "--arena", arena]
    argvs = {f"p{n}": ["--listen", address, *seeds] for n, address in enumerate(addresses)}
    with _peers(f"perf-{count}-{os.getpid()}", argvs) as clients:
        yield clients


@contextmanager
def one_peer(arena: str) -> Iterator[Any]:
    """A client of a peer that has no others, as an embedded one; it ends with the body."""
    with _peers(f"perf-alone-{os.getpid()}", {"alone": ["--arena", arena]}) as (client,):
        yield client


@contextmanager
def _peers(
    plane: str, argvs: dict[str, list[str]], devices: str | None = None
) -> Iterator[list[Any]]:
    """A client of each of these peers. argvs: by name, options of `dataplane peer`."""
    import dataplane
    from dataplane.errors import ConnectError

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        stack.enter_context(_run_dir(folder))
        crew = stack.enter_context(Crew(Path(folder)))
        for name, options in argvs.items():
            argv = [sys.executable, "-m", "dataplane", "peer", "--run", plane, "--name", name]
            crew.start(f"peer-{name}", leashed([*argv, *options]), speaks=False)
        clients: list[Any] = []
        names = list(argvs)
        deadline = time.monotonic() + START_S
        while len(clients) < len(names):
            crew.events()  # raises where a peer ended
            try:
                client = dataplane.connect(names[len(clients)], run=plane, devices=devices)
            except ConnectError:
                if time.monotonic() > deadline:
                    raise
            else:
                stack.callback(client.close)
                clients.append(client)
        yield clients


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
