"""The other planes of the comparison, where `make test-compare` has installed them."""

from __future__ import annotations

import pytest

from tests import leaks
from tests.perf.compare.ends import NAMES
from tests.perf.compare.measure import Report, Settings, describe, measure

MIB = 1 << 20
OTHERS = [name for name in NAMES if name != "dataplane"]

pytestmark = pytest.mark.timeout(600)  # longer than a tree waits for any one answer


def silent(done: int, whole: int) -> None:
    """No progress bar."""


@pytest.mark.compare
@pytest.mark.parametrize("name", OTHERS)
def test_another_plane_hands_out_what_was_put(name: str) -> None:
    told = describe(name)
    if told["status"] == "not installed":
        pytest.skip(f"{told['error']}: `make test-compare` installs it")
    settings = Settings(
        planes=(name,), sizes=(MIB,), hosts=(2,), rows=16, rounds=1, repeats=1, singles=3
    )
    kept: list[Report] = []
    report = measure(settings, silent, kept.append)
    assert report["planes"][name]["error"] == ""
    operations = {(line["batch"], line["operation"]) for line in report["results"]}
    forms = {("1 MiB", form) for form in ("floor", "put", "handle", "read")}
    assert operations == forms | {("1 row", "put"), ("1 row", "cycle")}
    assert not leaks.children()
