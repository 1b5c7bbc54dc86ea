"""tests/flakes.toml lists tests that are there, with reasons."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_flake_that_is_listed_is_a_test_and_has_its_reason() -> None:
    listed = tomllib.loads((ROOT / "tests/flakes.toml").read_text()).get("flake", [])
    for flake in listed:
        path, _, name = flake["test"].partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), flake["test"]
        assert len(flake["reason"]) > 20 and flake["seen"]
