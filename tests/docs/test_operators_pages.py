"""The pages for operators: every link leads somewhere, every variable that is read is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("deployment", "operations", "metrics")
LAUNCHERS = r"DATAPLANE|SLURM|LWS|RAY|TORCHELASTIC|JOB|WORLD|LOCAL|MASTER"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    page = ROOT / f"docs/{name}.md"
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_variable_that_discovery_reads_is_in_its_table() -> None:
    table = (ROOT / "docs/deployment.md").read_text()
    source = (ROOT / "dataplane/launch/discovery.py").read_text()
    read = set(re.findall(rf'"((?:{LAUNCHERS})_[A-Z_]*[A-Z])"', source))
    assert {"DATAPLANE_SEEDS", "SLURM_JOB_ID", "MASTER_ADDR"} <= read
    assert sorted(name for name in read if name not in table) == []
