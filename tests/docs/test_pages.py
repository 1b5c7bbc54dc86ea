"""The pages: what they show runs, their links lead somewhere, and they make a site."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

import dataplane
from tests.docs.test_examples import run

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/history/*.md", "protocol/*.md")
    for page in ROOT.glob(pattern)
)
LAUNCHERS = r"DATAPLANE|SLURM|LWS|RAY|TORCHELASTIC|JOB|WORLD|LOCAL|MASTER|OMPI|PMIX"
MOST_WORDS = 18_000
"""Of all pages in docs/. A new answer takes the place of something that another page says too."""
VERL = Path(sys.executable).parent.parent / "verl" / "bin" / "python"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def programs(page: str) -> list[str]:
    """A block that begins with an import begins a program; others go on with the one before."""
    found: list[str] = []
    for block in blocks(page):
        if found and not re.match("import |from ", block):
            found[-1] += f"\n\n{block}"
        else:
            found.append(block)
    return found


@pytest.mark.timeout(900)  # a page of recipes is eighteen programs, each with a peer of its own
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page != "README.md"])
def test_the_python_of_a_page_runs(
    page: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    for program in programs(page):
        compile(program, page, "exec")
        assert not re.search("run=|DATAPLANE_RUN", program)  # or another launch would meet it
        if python := python_for(program):
            run([str(python), "-c", program])
        else:
            left_out.append(program)
    if left_out:
        pytest.skip("what it imports is not installed: `make test-ray` or `make test-verl` does it")


def python_for(program: str) -> Path | None:
    """The interpreter that has what a program imports; None where there is none."""
    if re.search(r"^(from|import) verl\b", program, re.MULTILINE):
        return VERL if VERL.exists() else None
    if re.search(r"^import ray\b", program, re.MULTILINE) and not find_spec("ray"):
        return None
    return Path(sys.executable)


def test_the_readmes_quick_start_runs_two_at_a_time_and_twice_in_a_notebook(run_dir: Path) -> None:
    (program,) = programs("README.md")
    assert len([line for line in program.splitlines() if line]) == 11
    twice = f"for _ in range(2): exec({program!r})"
    with ThreadPoolExecutor() as launches:
        for told in launches.map(run, [[sys.executable, "-c", twice]] * 2):
            once = "torch.Size([4, 5]) tensor([ 6., 15.,  3., 10.], dtype=torch.float64)"
            assert told.splitlines() == [once] * 4


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_and_picture_of_a_page_leads_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    ("page", "heading", "column", "home"),
    [
        ("CONTRIBUTING.md", "## Where an idea lives", 2, ROOT),
        ("docs/architecture.md", "### The same way in the code", 3, ROOT / "dataplane"),
        ("docs/architecture.md", "### A put, call by call", 2, ROOT / "dataplane"),
    ],
)
def test_every_file_that_a_page_names_for_an_idea_is_there(
    page: str, heading: str, column: int, home: Path
) -> None:
    table = (ROOT / page).read_text().split(heading)[1].split("\n#")[0]
    rows = [line.split("|")[column] for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        folder = home
        for name in re.findall(r"`([^`]+)`", row):
            path = home / name if "/" in name else folder / name
            if not path.exists():
                path = path.with_suffix(".py")
            assert path.exists(), name
            folder = path if path.is_dir() else path.parent


def test_every_call_on_the_way_of_a_put_is_in_a_file_that_its_line_names() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("### A put, call by call")[1]
    rows = [line.split("|") for line in table.split("\n#")[0].splitlines() if line[:3] == "| `"]
    assert len(rows) > 10
    for _, calls, files, *_ in rows:
        folder, code = ROOT / "dataplane", ""
        for name in re.findall(r"`([^`]+)`", files):
            path = ROOT / "dataplane" / name if "/" in name else folder / name
            folder, code = path.parent, code + path.read_text()
        for call in re.findall(r"`([^`]+)`", calls):
            assert re.search(rf"def {call.split('.')[-1]}\(", code), call


def test_the_pages_stay_short() -> None:
    """Architecture is not among them: it is rewritten with the code that it describes."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "architecture.md"]
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, words


@pytest.mark.parametrize("name", ["docs/guarantees.md", "docs/history/bugs-found.md"])
def test_every_test_that_a_page_names_is_there(name: str) -> None:
    page = (ROOT / name).read_text()
    named = re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?`", page)
    assert len(named) > 20
    for path, test in named:
        file = ROOT / (path if "/" in path else f"tests/end_to_end/{path}")
        assert not test or f"def {test}(" in file.read_text(), test
        assert file.exists(), path


def test_the_pages_make_a_site_without_a_broken_link_or_reference(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "docs/.site/gather.py"], cwd=ROOT, check=True)
    # Not with --quiet: mkdocs does not count the warnings that it hides, so --strict passes.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site/api.html").read_text()
    methods = [
        f"dataplane.{kind.__name__}.{name}"
        for kind in (dataplane.Plane, dataplane.Partition, dataplane.Batch)
        for name in dir(kind)
        if not name.startswith("_") and name not in ("run", "closed")
    ]
    for name in ("dataplane.connect", *methods):
        assert f'id="{name}"' in api, name
    assert "<code>float32[3,*]</code>" in api and "<em>" not in api  # no * of code is emphasis
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named
    for page in (tmp_path / "site").glob("[a-z]*.html"):
        told = re.findall(r"<(?:img|source|script|link)\b[^>]*>", page.read_text())
        files = re.findall(r'(?:src|srcset|href)="([^"?]+)', "".join(told))
        assert files and [name for name in files if not (page.parent / name).exists()] == []


def test_every_variable_that_discovery_reads_is_in_its_table() -> None:
    table = (ROOT / "docs/settings.md").read_text()
    source = (ROOT / "dataplane/launch/discovery.py").read_text()
    read = set(re.findall(rf'"((?:{LAUNCHERS})_[A-Z_]*[A-Z])"', source))
    assert {"SLURM_JOB_ID", "MASTER_ADDR"} <= read
    assert sorted(name for name in read if name not in table) == []
