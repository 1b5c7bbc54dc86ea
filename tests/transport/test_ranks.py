"""The twin's ranks, which stand for NCCL's where there is no GPU, and NCCL's over a library
that only takes notes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import TransferFailed
from dataplane.transport.engines.communicators import _GpuRank, joined, wait
from dataplane_twin import HostRanks
from tests.transport.ranks import check_abort, check_given_up, check_order, nothing, pair_of


def test_ranks_send_in_order_and_end_when_they_are_aborted() -> None:
    source = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    target = np.zeros(4096, np.uint8)
    receiver, sender = pair_of(HostRanks(), HostRanks())
    check_order(receiver, sender, target.ctypes.data, source.ctypes.data)
    assert np.array_equal(target[:1024], source[2048:3072])
    assert np.array_equal(target[1024:3072], source[:2048]) and not target[3072:].any()
    check_abort(receiver, sender, target.ctypes.data)


def test_a_join_is_given_up_when_nobody_needs_it_and_a_rank_that_is_gone_is_said() -> None:
    ranks = HostRanks()
    check_given_up(ranks)
    with pytest.raises(TransferFailed, match="did not join"):
        joined(ranks, b"\0dataplane-nobody", 1, nothing)


def test_a_rank_of_nccls_that_fails_is_aborted_and_its_gpu_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Stream:
        ptr, done = 7, False

        def __init__(self, non_blocking: bool) -> None: ...

        def synchronize(self) -> None:
            done.append("synchronized")

    class Rank:
        def send(self, *asked: int) -> None:
            done.append("asked")

        def check_async_error(self) -> None:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

        def abort(self) -> None:
            done.append("aborted")

    cuda = SimpleNamespace(Stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    nccl = SimpleNamespace(groupStart=nothing, groupEnd=nothing, NCCL_UINT8=1)
    device: Any = SimpleNamespace(bind=nothing)
    rank = _GpuRank(nccl, device, Rank(), 0)
    rank.send([(64, 8)])
    with pytest.raises(TransferFailed, match="NCCL_ERROR_SYSTEM_ERROR"):
        wait(rank, nothing)
    assert done == ["asked", "aborted", "synchronized"]
    rank.abort()
