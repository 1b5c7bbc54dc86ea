"""Rows whose values tell their number, so that a reader can say which it got, and whether whole."""

from __future__ import annotations

import numpy as np

import dataplane

MIB = 1 << 20


def rows(first: int, count: int) -> dict[str, list[object]]:
    """A value of 1 MiB, a text, and an object with an array leaf, that tell their number."""
    numbers = range(first, first + count)
    return {
        "x": [np.full(MIB - 8192, n % 256, np.uint8) for n in numbers],
        "text": [f"{n}:" + "t" * n for n in numbers],
        "meta": [{"n": n, "a": np.arange(n * 10)} for n in numbers],
    }


def check(batch: dataplane.Batch | dataplane.Rows) -> list[int]:
    """The numbers of a batch whose values are what they were."""
    seen = []
    for x, text, meta in zip(batch["x"], batch["text"], batch["meta"], strict=True):
        n = meta["n"]
        assert text == f"{n}:" + "t" * n and np.array_equal(meta["a"], np.arange(n * 10))
        assert len(x) == MIB - 8192 and (x == n % 256).all()
        seen.append(n)
    return seen


def arena(plane: dataplane.Plane) -> dict[str, int]:
    found: dict[str, int] = plane.stats()["arena"]
    return found
