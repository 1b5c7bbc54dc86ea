"""What every test shares: a private run directory, no launcher's variables, and a look at what it
left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import leaks
from tests.leaks import FAILED

# Tests start hundreds of processes, which share compiled modules whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A deadline for each example is an assertion about time, which a busy machine breaks: an example of
# 1 ms took 0.5 s at load 30. What takes too long meets the limit of its test.
settings.register_profile("dataplane", parent=settings.default, deadline=None)
settings.load_profile("dataplane")

# Processes that tests start find the kind of device that is host memory.
_TWIN = str(Path(__file__).with_name("twin"))
os.environ["PYTHONPATH"] = os.pathsep.join([_TWIN, *filter(None, [os.environ.get("PYTHONPATH")])])

# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

_PROCESS = os.getpid()


def _end(number: int, frame: object) -> None:
    """A run that is told to end, as by `timeout`, ends what its tests started, as after Ctrl-C."""
    if os.getpid() == _PROCESS:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)  # this is a fork of the test process
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _end)

_PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "etcd": ("etcd",),
    "ip": ("ip",),
}

_LONG_FIRST = (
    "docs",
    "bench",
    "perf",
    "deploy",
    "simulation",
    "integrations",
    "chaos",
    "end_to_end",
)
"""Folders whose files take up to two minutes. They come first, so that short files are left to
share out when the first worker has nothing more to do."""

_LAUNCHERS = (
    "DATAPLANE_", "SLURM_", "RAY_", "LWS_", "TORCHELASTIC_", "KUBERNETES_", "JOB_",
    "OMPI_", "PMIX_",
)  # fmt: skip
_TORCHRUN = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose Debian program is missing, and say what installs it; sort the files."""
    for item in items:
        for marker in item.iter_markers("needs"):
            (program,) = marker.args
            if not any(map(shutil.which, _PROGRAMS[program])):
                why = f"{program} is not on this machine: `make system-packages` installs it"
                item.add_marker(pytest.mark.skip(reason=why))
    tests, last = Path(__file__).parent, len(_LONG_FIRST)
    order = {folder: place for place, folder in enumerate(_LONG_FIRST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(tests).parts[0], last))


def pytest_collection_finish() -> None:
    """Exclude what the collection made from later garbage collections.

    torch and five thousand tests are half a million objects. Tests collect garbage to see what they
    left, and each collection would visit all of these objects (0.35 s).
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test had to be tried again: a second try that passes hides it otherwise."""
    for report in terminalreporter.stats.get("rerun", ()):
        reason = str(report.longrepr).strip().splitlines()[-12:]
        terminalreporter.write_line(f"first try of {report.nodeid} ({report.when}):")
        terminalreporter.write_line("\n".join(f"    {line}" for line in reason))


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """The first fixture of a test, so that it looks when all others are done."""
    before = leaks.now()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps what it had, and one failure is enough
    (request.node.funcargs or {}).clear()  # what the fixtures made lives no longer than the test
    found = leaks.left(before)
    assert not found, "the test left behind: " + "; ".join(found)


@pytest.fixture(autouse=True)
def no_launcher(nothing_is_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must not join a plane of the machine or job that they run in."""
    for name in os.environ:
        if name.startswith(_LAUNCHERS) or name in _TORCHRUN:
            monkeypatch.delenv(name)
    monkeypatch.setenv("DATAPLANE_TRACEBACKS", "full")  # a test that fails shows where


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> Iterator[Path]:
    """A run directory of the test's own. Not `tmp_path`: paths of sockets must stay short."""
    before = leaks.running()
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        path = Path(folder)
        monkeypatch.setenv("DATAPLANE_RUN_DIR", folder)
        yield path
        found = leaks.settled(lambda: leaks.processes_of(path, before))
        leaks.end_processes_of(path, before)
    assert not found, "the test left running: " + "; ".join(found)
