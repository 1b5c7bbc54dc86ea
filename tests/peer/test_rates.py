"""Averages over the last half minute."""

from __future__ import annotations

import pytest

from dataplane.peer.rates import Rate


@pytest.mark.parametrize(("batch", "every_s"), [(1, 0.2), (8, 1.6), (20, 4.0)])
def test_a_steady_rate_reads_steadily_however_large_its_batches_are(
    batch: int, every_s: float
) -> None:
    recent, seen = Rate(100.0), []
    for n in range(200):
        now = 100.0 + n * every_s
        recent.sample(now, (n + 1) * batch)
        seen += [recent.per_s(now + part * every_s) for part in (0.1, 0.5, 0.9)]
    late = seen[len(seen) // 2 :]
    assert 5 - 2 * batch / 29 <= min(late) <= max(late) <= 5 + 2 * batch / 29


def test_a_rate_begins_at_once_and_ends_within_half_a_minute() -> None:
    recent = Rate(100.0)
    for second in range(3):
        recent.sample(100.0 + second, 6 * second + 6)
    assert recent.per_s(103.0) == 6
    assert recent.per_s(129.0) == 18 / 29
    assert recent.per_s(133.0) == 0
