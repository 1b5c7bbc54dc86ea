"""An etcd server of this machine, which can be stopped and started with what it kept."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bench.peers import free_addresses
from bench.processes import leashed
from tests.cluster import START_S, until


def missing() -> str:
    """Why there can be none; "" where there can."""
    if not shutil.which("etcd"):
        return "there is no etcd here: make system-packages"
    return "" if find_spec("aiohttp") else "pip install 'dataplane-rl[etcd]'"


class Etcd:
    """server: HOST:PORT for clients. roster: what `dataplane peer --roster` takes."""

    def __init__(self, folder: Path) -> None:
        self._url, peer = (a.replace("tcp://", "http://") for a in free_addresses(2))
        self.server = self._url.removeprefix("http://")
        self.roster = f"etcd://{self.server}"
        self._log = folder / "etcd.log"
        command = ["etcd", "--name", "e", "--data-dir", str(folder / "etcd")]
        command += ["--log-level", "error"]
        command += ["--listen-client-urls", self._url, "--advertise-client-urls", self._url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._command = leashed([*command, "--initial-cluster", f"e={peer}"])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self._is_healthy, "etcd is up", START_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def etcd() -> Iterator[Etcd]:
    """A server for as long as the body runs."""
    with tempfile.TemporaryDirectory(prefix="dp-etcd-") as folder:
        server = Etcd(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()
