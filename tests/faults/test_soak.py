"""The soak run: short here; and that it tells growth from noise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.faults.soak import Sample, main, verdict

MIB = 1 << 20
STEADY = Sample(0.0, 90 * MIB, 40, 9, 0, 2.0, 9.0)


def samples(count: int, **growth: float) -> list[Sample]:
    """Each sample has so much more of these than the one before; memory also goes up and down."""
    found = []
    for n in range(count):
        more = {name: getattr(STEADY, name) + n * step for name, step in growth.items()}
        more.setdefault("own_bytes", STEADY.own_bytes + (n * 7919) % (6 * MIB))
        found.append(dataclasses.replace(STEADY, **more))
    return found


def test_what_goes_up_and_down_is_flat() -> None:
    assert verdict(samples(50))["ok"]
    assert verdict(samples(2))["ok"]


@pytest.mark.parametrize(
    "growth", [{"own_bytes": MIB}, {"descriptors": 1}, {"threads": 0.5}, {"p50_ms": 1.0}]
)
def test_what_grows_is_told(growth: dict[str, float]) -> None:
    assert not verdict(samples(50, **growth))["ok"]


def test_a_short_run_is_clean_and_says_what_it_saw(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    main(["--minutes", "0.1", "--json", str(report)])
    outcome = json.loads(report.read_text())["outcome"]
    assert "error" not in outcome and outcome["rows"] > 0, outcome
    assert outcome["grown_descriptors"] < 12, outcome
