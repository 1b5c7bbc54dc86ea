"""Planes on Ray: what they do without a cluster, and that a plane not installed is reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.machine import memory_bytes
from bench.planes import PLANES
from bench.planes.base import Job
from bench.planes.dataplane_plane import DataplanePlane
from bench.planes.ray_cluster import store_bytes
from bench.planes.ray_store import Board, shareable
from bench.run import execute, prepared

LIMIT_S = 200
OPTIONAL = [name for name, plane in PLANES.items() if plane.packages]


def silent(rows: int, expected: int) -> None:
    """No progress bar."""


async def test_a_group_is_offered_for_training_once_both_annotators_are_done() -> None:
    board = Board([1])
    await board.put(0, 7, {"tokens": "a"})
    assert await board.next(0, "reward", ["tokens"]) == (7, {"tokens": "a"})
    assert await board.next(0, "reward", ["tokens"]) is None
    training = asyncio.create_task(board.next(0, "train", ["tokens", "score", "log_prob"]))
    await board.add(7, {"score": "b"})
    await board.next(0, "reference", ["tokens"])
    assert not training.done()
    await board.add(7, {"log_prob": "c"})
    assert await training == (7, {"tokens": "a", "score": "b", "log_prob": "c"})


async def test_a_dropped_group_reaches_no_later_stage_and_nobody_waits_for_it() -> None:
    board = Board([2])
    for prompt in (0, 1):
        await board.put(0, prompt, {})
    scored = {"reward": "a"}
    waiting = [asyncio.create_task(board.next(0, "reference", ["reward"])) for _ in range(2)]
    over = asyncio.create_task(board.finished())
    for prompt in (0, 1):
        assert await board.next(0, "reward", []) == (prompt, {})
    await board.end(0, dropped=True)
    await board.add(1, scored)
    done = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert sorted(done, key=bool) == [None, (1, scored)]
    assert await board.next(0, "reward", []) is None
    assert await board.next(0, "train", ["reward"]) == (1, scored)
    assert not over.done()
    await board.end(1, dropped=False)
    await asyncio.wait_for(over, 5)


def test_a_store_has_what_a_peer_has_under_a_limit_and_else_what_ray_would_take() -> None:
    def store(**told: Any) -> int:
        job = Job(plane="ray-store", trace="video", dedup=False, prompts=2, **told)
        return store_bytes(prepared(job, Path("/nowhere")))

    gigabyte = 1 << 30
    assert store(memory_limit_bytes=12 * gigabyte) == 3 * gigabyte
    assert store(memory_limit_bytes=gigabyte) == gigabyte // 4
    assert store(memory_limit_bytes=1 << 20) > 75 << 20  # or Ray does not start
    assert store(arena_bytes=500 * gigabyte) == 500 * gigabyte
    assert store(arena_bytes=1) == int(0.3 * memory_bytes()) // 2


def test_a_stored_column_is_repeated_only_without_dedup() -> None:
    media = np.zeros(100)
    for dedup in (True, False):
        first, second = shareable([media, media], dedup)
        assert (first is second) == dedup


def test_a_plane_that_is_not_installed_is_a_result_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DataplanePlane, "packages", ("no-such-package",))
    run = execute(Job(plane="dataplane", trace="math", prompts=1), silent)
    assert (run["status"], run["error"]) == (
        "not installed",
        "missing packages: no-such-package",
    )
    assert run["rows"] == 0


@pytest.mark.compare
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("trace", ["math_open", "video"])
def test_every_row_reaches_a_trainer_through_another_plane(name: str, trace: str) -> None:
    if missing := PLANES[name].missing():
        pytest.skip(f"not installed: {', '.join(missing)}: `make test-compare` installs it")
    for dedup in sorted({False, PLANES[name].can_dedup and trace == "video"}):
        limits: dict[str, Any] = {"prompts": 2, "steps": 2, "timeout_s": LIMIT_S}
        run = execute(Job(plane=name, trace=trace, dedup=dedup, **limits), silent)
        assert (run["status"], run["error"]) == ("ok", "")
