"""An etcd server of this machine, for as long as a body runs: it keeps the roster of the peers."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from bench.faults.peers import START_S, until
from bench.ports import free_addresses
from bench.processes import leashed


def missing() -> str:
    """Why there can be none; "" where there can."""
    if not shutil.which("etcd"):
        return "there is no etcd here: make system-packages"
    return "" if find_spec("aiohttp") else "pip install 'dataplane-rl[etcd]'"


@contextmanager
def etcd() -> Iterator[str]:
    """What `--roster` takes."""
    client, peer = (a.replace("tcp://", "http://") for a in free_addresses(2))
    with tempfile.TemporaryDirectory(prefix="dp-etcd-") as folder:
        command = ["etcd", "--name", "e", "--data-dir", folder, "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"e={peer}"]
        quiet = subprocess.DEVNULL
        server = subprocess.Popen(leashed(command), stdout=quiet, stderr=quiet)
        try:
            until(lambda: _is_healthy(client), "etcd is up", START_S)
            yield client.replace("http://", "etcd://")
        finally:
            server.kill()
            server.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
