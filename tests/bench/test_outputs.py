"""Files that commands write: tried before anything starts, and what is left of the trial."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from bench import outputs, run
from bench.cli import main
from bench.planes.base import Job
from bench.planes.dataplane_plane import DataplanePlane

ROOT = Path(__file__).parents[2]


def test_a_folder_is_made_with_its_report_and_not_left_before(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    assert outputs.report(str(path)) == path
    assert list(tmp_path.iterdir()) == []
    outputs.write_json(path, {})
    assert list(path.parent.iterdir()) == [path]


def test_a_report_that_is_there_stays_until_there_is_another(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("of yesterday")
    outputs.report(str(path))
    assert path.read_text() == "of yesterday"


@pytest.mark.parametrize("name", ["", "file/report.json", "page.html"])
def test_what_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentTypeError):
        outputs.report(str(tmp_path / name))


def test_a_page_that_cannot_be_written_is_refused_with_its_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ArgumentTypeError, match=r"report\.html"):
        outputs.report(str(tmp_path / "report.json"))


@pytest.mark.parametrize(
    "command",
    [
        ["trace", "math", "-o"],
        ["perf", "--json"],
        ["compare", "--json"],
        ["sim", "--json"],
        ["memory", "--json"],
        ["faults", "--json"],
    ],
)
def test_every_command_refuses_before_it_measures(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*command, "/dev/null/out"])
    assert refused.value.code == 2
    assert "'/dev/null' is not a directory" in capsys.readouterr().err


def test_a_file_that_breaks_off_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("of yesterday")
    with pytest.raises(KeyboardInterrupt), outputs.replacing(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "of yesterday" and list(tmp_path.iterdir()) == [path]


def test_a_report_that_is_not_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "r.json", tmp_path / "latest.json"
    path.write_text("of yesterday")
    link.symlink_to(path)

    def stopped(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "write_text", stopped)
        outputs.write_json(path, {"runs": []})
    assert path.read_text() == "of yesterday" and sorted(tmp_path.iterdir()) == [link, path]
    outputs.write_json(link, {"runs": []})
    assert json.loads(path.read_text()) == {"runs": []} and link.is_symlink()


def test_a_disk_that_fills_up_ends_a_command_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(outputs.NotWritten, match="No space left"):
        outputs.write_json(Path("/dev/full"), {})


def test_a_disk_that_is_full_is_seen_before_anything_starts(tmp_path: Path) -> None:
    """Files can be made on it; only what is written into them finds no room."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        with pytest.raises(ArgumentTypeError, match="File too large"):
            outputs.report(str(tmp_path / "report.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [["run", "--trace", "math"], ["perf", "--only", "hot-path"]], ids=["run", "perf"]
)
def test_figures_that_cannot_be_written_are_shown(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk filled up while they were measured."""
    job = Job(plane="dataplane", trace="math", prompts=1)
    with monkeypatch.context() as patched:
        patched.setattr(DataplanePlane, "packages", ("no-such-package",))
        told = run.execute(job, lambda rows, expected: None)
    path = tmp_path / "r.json"

    def measured(*_: object) -> dict[str, Any]:
        path.mkdir()  # no report can take its place
        return told

    monkeypatch.setattr("bench.run.execute", measured)
    monkeypatch.setattr("tests.perf.hot_path.measure", measured)
    assert main([*command, "--json", str(path)]) == 1
    said = capsys.readouterr()
    assert "no-such-package" in said.out and f"cannot write {path}" in said.err


def test_a_command_that_is_refused_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "math", "-o", str(tmp_path / "a" / "b" / "t.parquet"), "--steps", "0"])
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "a" / "b" / "t.parquet"
    assert main(["trace", "math", "--prompts", "1", "-o", str(path)]) == 0
    assert path.is_file()


def test_an_option_that_may_be_0_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--trace", "math", "--seed", "x"])
    assert "use a whole number of at least 0" in " ".join(capsys.readouterr().err.split())


def test_without_its_packages_the_bench_says_what_to_install() -> None:
    command = [sys.executable, "-S", "-m", "bench", "run"]  # -S: an environment without packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = r"the package '\w+' is not installed for .*pip install -e '\.\[bench\]'"
    assert re.search(said, done.stderr)
