"""`dataplane trace`, of a run over two hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("perfetto", reason="needs perfetto: pip install 'dataplane-rl[trace]'")

import dataplane
from dataplane import cli
from tests.end_to_end.conftest import Cluster, until
from tests.timeline.perfetto import perfetto
from tests.timeline.traces import read

STAGES = {"reward": ["x"], "train": ["x", "reward"]}


def run_step(plane: dataplane.Plane, far: dataplane.Plane, name: str) -> None:
    """Two groups: put and rewarded on one host, trained on the other."""
    part = plane.partition(name, stages=STAGES, group_size=2, groups=2)
    for group in range(2):
        part.put({"x": [bytes(100_000)] * 2}, group=group)
    for batch in part.stream("reward", groups=1):
        batch.add(reward=[0.5, 1.0])
    for batch in far.partition(name).stream("train", groups=2):
        assert len(batch["x"]) == 4


def test_a_step_over_two_hosts_is_written_as_a_trace(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.start("a", "b")
    path = tmp_path / "step.pftrace"
    asked = ["trace", "--peer", "a", "-o", str(path)]
    with cluster.connect("a") as near, cluster.connect("b") as far:
        near.partition("other", stages=STAGES)
        assert cli.main(asked) == 2
        assert "nothing to trace" in capsys.readouterr().err
        assert not path.exists()
        run_step(near, far, "step-1")
        run_step(near, far, "step-2")
        until(
            lambda: {e.peer for e in near.events() if e.kind == "arena"} == {"a", "b"},
            "both peers record how full their arena is",
        )
        path.write_text("an older file")
        assert cli.main([*asked, "--last", "1", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["steps"] == ["step-2"]
        assert told["nbytes"] == path.stat().st_size
        found = read(path.read_bytes())
        assert {one.partition("host ")[2] for one in _hosts(found)} == {"a", "b"}
        assert len(found.of("put")) == 2
        assert [one.name for one in found.of("step")] == ["step-2"]
        assert len(found.arrows) == 4
        assert not found.unended
        categories = {tuple(one.category for one in way) for way in found.arrows.values()}
        assert categories == {
            ("put", "ready", "lease", "lease_end"),
            ("lease", "ready", "lease", "lease_end"),
        }
        assert "link from a" in found.threads["b"]
        assert {host for host, name in found.counters if name == "arena"} == {"a", "b"}
        assert found.counters["", "train: rows ready"][-1][1] == 0
        for track in found.processes.values():
            assert "clock" in track.description
        assert cli.main([*asked, "--last", "3"]) == 0
        assert "2 steps: step-1, step-2" in capsys.readouterr().out
        assert [one.name for one in read(path.read_bytes()).of("step")] == ["step-1", "step-2"]
        _bad_input(asked, capsys)
        assert list(tmp_path.iterdir()) == [path], "nothing else is left"


@pytest.mark.needs("chromium")
def test_perfetto_opens_the_trace_and_answers_questions_about_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", "b")
    path = tmp_path / "step.pftrace"
    with cluster.connect("a") as near, cluster.connect("b") as far:
        run_step(near, far, "step-1")
        assert cli.main(["trace", "--peer", "a", "-o", str(path)]) == 0
    with perfetto(path.read_bytes()) as page:
        named = "select name from process where name is not null order by name"
        assert page.ask(named) == [["host a"], ["host b"]]
        kinds = "select name, count(*) from slice where name in ('put', 'ack') group by name"
        assert page.ask(kinds) == [["ack", "4"], ["put", "2"]]
        threads = "select count(*) from thread where name = 'link from a'"
        assert page.ask(threads) == [["1"]]
        assert page.ask("select count(*) from flow") == [["12"]]
        assert page.ask("select count(*) from slice where dur < 0") == [["0"]]
        counters = "select count(*) from counter_track where name = 'train: rows ready'"
        assert page.ask(counters) == [["1"]]
        wrong = "select name, value from stats where severity = 'error' and value > 0"
        assert page.ask(wrong) == []
        assert "Oops" not in page.said()


def _hosts(found: object) -> list[str]:
    return [track.process.process_name for track in found.processes.values()]  # type: ignore[attr-defined]


def _bad_input(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(asked[-1])
    before = path.read_bytes()
    for more, said in (
        (["--last", "0"], "--last 0 is out of range: use a value of at least 1"),
        (
            ["--step", "step-9"],
            "--step 'step-9': no peer has recorded events for a partition with this name",
        ),
        (["-o", str(path.parent)], "it exists and is not a regular file"),
        (["-o", "/dev/null"], "it exists and is not a regular file"),
        (["-o", str(path.parent / "none" / "x")], "does not exist"),
    ):
        assert cli.main([*asked, *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert path.read_bytes() == before


def test_a_trace_that_cannot_be_written_whole_leaves_no_part_of_it(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    path = tmp_path / "step.pftrace"
    path.write_text("an older file")
    with dataplane.connect() as plane:
        plane.partition("p", stages={"train": ["x"]}).put({"x": [1]})
        monkeypatch.setattr(Path, "replace", full)
        assert cli.main(["trace", "--run", plane.name, "-o", str(path)]) == 2
    assert "No space left on device. Pass another path" in capsys.readouterr().err
    assert [one.read_text() for one in tmp_path.iterdir()] == ["an older file"]


def test_without_the_package_the_command_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    assert cli.main(["trace", "-o", str(tmp_path / "step.pftrace")]) == 2
    error = capsys.readouterr().err
    assert "pip install 'dataplane-rl[trace]'" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
