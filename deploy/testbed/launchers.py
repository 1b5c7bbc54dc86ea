"""Real launchers on hosts of their own: workers only connect, and become one plane.

Each host has a run directory and a token file of its own, as machines have; nothing names the
hosts but what the launcher itself puts into the environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.links import Network, address
from bench.peers import token_file
from bench.processes import leashed
from dataplane.launch import rundir
from dataplane.launch.token import new_token
from deploy.testbed.peers import ARENA

HOSTS, RANKS = 2, 2
LIMIT_S = 200.0
_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_torchrun.py"
_PORT = 29_500
_SHOWN = 2_000


def torchrun() -> dict[str, Any]:
    """`examples/grpo_torchrun.py`, one torchrun a host: the second host's peer joins the first."""
    if importlib.util.find_spec("torch") is None:
        return {"ok": True, "skipped": "torch is not installed"}
    with Network(HOSTS) as network, tempfile.TemporaryDirectory(prefix="dp-") as folder:
        token, began = new_token(), time.monotonic()
        agents = [_agent(network, Path(folder, str(host)), host, token) for host in range(HOSTS)]
        try:
            said = [_said(agent, began + LIMIT_S) for agent in agents]
        finally:
            _end(agents, Path(folder))
        return {
            "ok": all(agent.returncode == 0 for agent in agents)
            and f"128 rows on {HOSTS} host(s)" in said[0],
            "seconds": round(time.monotonic() - began, 1),
            "said": [text[-_SHOWN:] for text in said],
        }


def _agent(network: Network, home: Path, host: int, token: str) -> subprocess.Popen[str]:
    home.mkdir(0o700)
    secret = token_file(home, token)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS)]
    command += ["--nproc-per-node", str(RANKS), "--node-rank", str(host), "--rdzv-id", "testbed"]
    command += ["--master-addr", address(0), "--master-port", str(_PORT), str(_EXAMPLE)]
    environment = {
        **os.environ,
        "DATAPLANE_RUN_DIR": str(home),
        "DATAPLANE_TOKEN_FILE": str(secret),
        "DATAPLANE_ARENA": ARENA,
        "DATAPLANE_LINGER": "1",
        "GLOO_SOCKET_IFNAME": "eth0",  # gloo's default is the host name's address
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        network.wrap(host, leashed(command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def _end(agents: list[subprocess.Popen[str]], folder: Path) -> None:
    """Agents, and the peers that their workers started; those would leave by themselves."""
    for agent in agents:
        agent.kill()
        agent.wait()
    for plane in folder.glob("*/*/"):
        for peer in rundir.living_peers(plane):
            if peer.card is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.card.pid, signal.SIGKILL)


def _said(agent: subprocess.Popen[str], deadline: float) -> str:
    try:
        return agent.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired as exc:
        return f"{(exc.stdout or b'').decode()}\nnot over after {LIMIT_S:g} s"
