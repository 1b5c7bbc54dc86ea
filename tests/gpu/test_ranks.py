"""NCCL's ranks on GPUs, and what a peer says where they cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.errors import TransportMissing
from dataplane.gpu.cuda import CudaDevice
from dataplane.transport.engines import communicators
from dataplane.transport.engines.communicators import NcclRanks
from tests.gpu.conftest import bring, two_planes
from tests.transport.ranks import check_abort, check_given_up, check_order, pair_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def sharing() -> bool:
    """Whether NCCL takes two ranks on the one GPU here."""
    try:
        return communicators.shares_gpus()
    except TransportMissing:
        return False


def in_a_process(name: str) -> None:
    """Runs a function of this file where NCCL may leave threads and descriptors behind."""
    work = f"import os; from tests.gpu import test_ranks; test_ranks.{name}(); os._exit(0)"
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", work]
    subprocess.run(command, check=True, timeout=60, env=os.environ | {"PYTHONPATH": path})


def test_ranks_send_in_order_and_end_when_they_are_aborted() -> None:
    if CudaDevice.count() < 2 and not sharing():
        pytest.skip(
            "not run: needs two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1 for two ranks"
        )
    in_a_process("order_and_abort")


def order_and_abort() -> None:
    devices = CudaDevice(0), CudaDevice(min(1, CudaDevice.count() - 1))
    pools = [device.allocate(2 * MIB) for device in devices]
    source = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    devices[1].copy(pools[1].address, source.ctypes.data, source.nbytes)
    assert devices[1].finish(10)
    receiver, sender = pair_of(NcclRanks(devices[0]), NcclRanks(devices[1]))
    check_order(receiver, sender, pools[0].address, pools[1].address)
    target = np.zeros(3072, np.uint8)
    devices[0].copy(target.ctypes.data, pools[0].address, target.nbytes)
    assert devices[0].finish(10)
    assert np.array_equal(target[:1024], source[2048:3072])
    assert np.array_equal(target[1024:], source[:2048])
    check_abort(receiver, sender, pools[0].address)


def test_a_join_is_given_up_when_nobody_needs_it() -> None:
    in_a_process("join_given_up")


def join_given_up() -> None:
    check_given_up(NcclRanks(CudaDevice(0)))


def test_values_go_from_one_peer_to_another_over_nccl(
    run_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sharing():
        pytest.skip("not run: needs NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1: one GPU")
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "required:nccl")
    with two_planes(run_dir) as (a, b):
        ways = [bring(a, b, first) for first in (0, 8, 16)]
        (path,) = ways[-1]["peers"].values()
        assert path["transport"] == "nccl" and path["tried"]["nccl"]["exact"]
        assert a.stats()["devices"][0]["staged_bytes"] == 0


def test_two_ranks_on_one_gpu_are_refused_with_the_reason(
    run_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "required:nccl")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with two_planes(run_dir) as (a, b), pytest.raises(TransportMissing, match="one rank per GPU"):
        bring(a, b)
