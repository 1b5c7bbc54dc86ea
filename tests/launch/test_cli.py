"""The command line: one-line errors, exit codes, and what `status` prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataplane import cli, cli_probe
from dataplane.launch import rundir


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--arena", "much"], "8GiB"),
        (["--name", "a/b"], "is not a valid peer name"),
        (["--listen", "nowhere"], "tcp://host:port"),
        (["--seeds", "nowhere"], "tcp://host:port"),
        (["--linger", "soon"], "number of seconds"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    assert cli.main(["peer", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dataplane: ") and hint in error and error.count("\n") == 1


def test_a_listen_address_beyond_loopback_is_refused() -> None:
    command = [sys.executable, "-m", "dataplane", "peer", "--listen", "tcp://0.0.0.0:7101"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("dataplane: tcp://0.0.0.0:7101 can be reached")
    assert done.stderr.count("\n") == 1


def test_status_says_when_nothing_runs_and_starts_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--run", "p"]) == 2
    told = capsys.readouterr().err
    assert f"found no runs of this user on this host (looked in {run_dir}). Start one" in told
    assert not list(run_dir.iterdir())


@pytest.mark.parametrize("command", [["status"], ["status", "--peer", "embedded"], ["clean"]])
def test_a_peer_of_another_commit_that_reports_less_hides_no_other_run(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    runs = []
    for name in ("older", "newer"):
        folder = rundir.plane_dir(name)
        peer = rundir.LivingPeer("embedded", folder / "embedded.sock", None)
        runs.append(rundir.LivingRun(name, folder, [peer]))
    monkeypatch.setattr(rundir, "living_runs", lambda base=None: runs)
    older = {"peer": "embedded", "peers": {"embedded": {}}}
    told = iter([older, {"error": "it is stopped"}])
    monkeypatch.setattr(cli, "_stats", lambda peer, visits=None: next(told))
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "a peer's statistics have no entry" in shown and "it is stopped" in shown


@pytest.mark.parametrize("command", ["status", "clean"])
def test_looking_at_a_peer_that_has_just_left_starts_none(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    folder = rundir.plane_dir("grpo")
    left = rundir.LivingPeer("embedded", folder / "embedded.sock", None)
    seen = [rundir.LivingRun("grpo", folder, [left])]
    monkeypatch.setattr(rundir, "living_runs", lambda base=None: seen)
    assert cli.main([command]) == 0
    assert "does not answer" in capsys.readouterr().out
    assert not folder.exists() or not list(folder.iterdir())


def test_a_probe_names_the_peers_whose_releases_differ() -> None:
    def report(*versions: str) -> dict[str, object]:
        peer = {
            "address": "",
            "arena_bytes": 1 << 30,
            "requested": "auto",
            "runs": "tcp",
            "tls": False,
            "missing": "",
            "devices": {"runs": [], "missing": {}},
            "from": [],
        }
        named = zip("abc", versions, strict=False)
        return {"peers": [{**peer, "peer": name, "version": it} for name, it in named]}

    first, *_ = cli_probe.lines(report("3.0", "3.1", "3.0"))
    assert first == (
        "versions differ: 3.0 on a, 3.1 on b, 3.0 on c; install the same dataplane release "
        "everywhere"
    )
    assert not any("differ" in line for line in cli_probe.lines(report("3.0", "3.0")))
