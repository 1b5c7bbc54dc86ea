"""Recordings of `dataplane record`: replayed with the times, sizes and order that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bench.cli import main
from bench.pace import recorded_seconds
from bench.planes.base import Job
from bench.run_command import told
from bench.traces import parquet, recording
from bench.traces.load import load
from bench.traces.parquet import TraceError

STEP_S = 10.0
Groups = list[dict[str, Any]]


def group(number: int, **more: Any) -> dict[str, Any]:
    spent = {"reward": 0.5, "reference": 0.25, "train": 1.0}
    told = {"rows": 4, "nbytes": 4 * (16 + 44 * 100), "put_seconds": 2.0 + number}
    stages = [{"stage": stage, "seconds": seconds} for stage, seconds in spent.items()]
    return {**told, "host": number // 2, "trained": True, "stages": stages} | more


def step(number: int, **more: Any) -> dict[str, Any]:
    """Rollout from 0 to 5 s, the last ack at 8 s, the optimiser until 9 s, then the next step a
    second later."""
    at = STEP_S * number
    told = {"began": at, "first_put": at + 2, "last_put": at + 5, "first_lease": at + 2}
    told |= {"ended": at + 8, "pause_s": 1.0 if number else -1.0, "hosts": 2}
    workers = {"reward": 2, "reference": 2, "train": 2}
    claims = {stage: [1, 1] for stage in workers}
    names = {"stages": ["reward", "reference", "train"], "last_stage": "train"}
    return (
        {"number": number, "partition": f"step-{number}"}
        | told
        | {"workers": workers, "claims": claims}
        | names
        | more
    )


def write(
    folder: Path, steps: list[dict[str, Any]], groups: Groups | None = None, **more: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    index = {"format": 1, "run": "mine", "ended": "stopped", "lost_events": 0, "left_out": []}
    text = json.dumps(index | {"hosts": 2, "steps": steps} | more)
    (folder / "recording.json").write_text(text)
    for one in steps:
        table = pyarrow.Table.from_pylist(groups or [group(n) for n in range(4)])
        pyarrow.parquet.write_table(table, folder / f"step-{one['number']:06}.parquet")
    return folder


def test_groups_have_the_sizes_and_times_that_were_recorded(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [step(0), step(1)])
    name, prompts = load([folder], "math")
    assert name == "math"
    assert [(p.index, p.step) for p in prompts] == [(n, n // 4) for n in range(8)]
    assert {p.response_tokens for p in prompts} == {(100,) * 4}
    first = prompts[0]
    assert sum(sample.reward_seconds for sample in first.samples) == 0.5
    assert first.times is not None
    assert (first.times.reference, first.times.train, first.times.optimiser) == (0.25, 1.0, 1.0)
    # Two hosts take turns, and each puts what it put.
    assert [p.samples[0].rollout_seconds for p in prompts[:4]] == [2.0, 4.0, 3.0, 5.0]
    # The second step's rollout began when the optimiser had ended, a second before it "began".
    assert [p.samples[0].rollout_seconds for p in prompts[4:]] == [3.0, 5.0, 4.0, 6.0]


def test_a_step_takes_as_long_as_it_took(tmp_path: Path) -> None:
    """From the end of the optimiser to its next end."""
    found = recording.read(write(tmp_path / "r", [step(n) for n in range(4)]))
    assert (found.hosts, found.staleness, found.phased) == (2, 0, False)
    assert "The recording ended: stopped." in told(found)
    assert found.step_seconds == [9.0, 10.0, 10.0, 10.0]
    path = tmp_path / "t.parquet"
    parquet.write(path, "math", 0, [prompt for prompts in found.steps for prompt in prompts])
    job = Job(plane="dataplane", trace="math", prompts=4, steps=4, trace_files=(str(path),))
    assert job.is_recorded
    # The last group is put at 6 s, then 0.5 s of reward, 1 s of training and of the optimiser;
    # the recording has half a second more in which nobody worked.
    assert recorded_seconds(job) / 4 == pytest.approx(8.5, abs=0.5)


def test_steps_that_ended_in_another_order_are_replayed_as_they_began(tmp_path: Path) -> None:
    steps = [step(n) for n in range(3)]
    found = recording.read(write(tmp_path / "r", steps[::-1]))
    assert found == recording.read(write(tmp_path / "r", steps))


def test_rollout_that_was_ahead_is_ahead(tmp_path: Path) -> None:
    """Step n+1 is put while step n is trained."""
    steps = [step(n, ended=STEP_S * n + 14) for n in range(4)]
    found = recording.read(write(tmp_path / "r", steps))
    assert found.staleness == 1
    steps = [step(n, ended=STEP_S * n + 24) for n in range(4)]
    assert recording.read(write(tmp_path / "r", steps)).staleness == 2


def test_stages_that_waited_for_rollout_wait(tmp_path: Path) -> None:
    steps = [step(n, first_lease=STEP_S * n + 5.5) for n in range(2)]
    assert recording.read(write(tmp_path / "r", steps)).phased


def test_a_stage_has_its_workers_and_beyond_four_a_host_faster_ones(tmp_path: Path) -> None:
    """In the second step some have nothing to do."""
    workers = {"reward": 32, "reference": 8, "train": 1}
    idle = {"reward": 8, "reference": 1, "train": 1}
    found = recording.read(write(tmp_path / "r", [step(0, workers=workers), step(1, workers=idle)]))
    assert {one.role: one.workers for one in found.stages} == {
        "reward": 8, "reference": 8, "train": 1
    }  # fmt: skip
    for prompts in found.steps:
        assert prompts[0].times is not None
        assert sum(sample.reward_seconds for sample in prompts[0].samples) == 0.5 / 4
        assert (prompts[0].times.reference, prompts[0].times.train) == (0.25, 1.0)


def test_a_claim_takes_as_many_groups_as_it_did(tmp_path: Path) -> None:
    """64 reward workers are 8 that take 8 times as much."""
    workers = {"reward": 64, "reference": 2, "train": 1}
    claims = {"reward": [1, 2], "reference": [3, 3], "train": [4, 4]}
    folder = write(tmp_path / "r", [step(n, workers=workers, claims=claims) for n in range(2)])
    found = recording.read(folder)
    taken = {one.role: (one.least, one.most) for one in found.stages}
    assert taken == {"reward": (8, 16), "reference": (3, 3), "train": (4, 4)}


def test_a_trainer_that_took_the_whole_step_waits_for_it(tmp_path: Path) -> None:
    """Four groups come a second apart, and a trainer works on each for a second: alone it is done
    a second after the last one came, with all four at once it begins then."""
    of = {"workers": {"reward": 1, "train": 1}, "hosts": 1, "stages": ["reward", "train"]}
    groups = [
        group(n, host=0, put_seconds=1.0 + n, stages=[{"stage": "train", "seconds": 1.0}])
        for n in range(4)
    ]
    took = {}
    for together in (1, 4):
        claims = {"reward": [1, 1], "train": [together, together]}
        name = str(together)
        folder = write(tmp_path / name, [step(0, claims=claims, **of)], groups, hosts=1)
        found = recording.read(folder)
        path = tmp_path / f"{name}.parquet"
        parquet.write(path, "math", 0, found.steps[0])
        job = Job(
            plane="dataplane", trace="math", prompts=4, hosts=1, trainers=1,
            trace_files=(str(path),), recorded=found.stages,
        )  # fmt: skip
        assert "reference" not in job.stages()  # the recorded job had none
        assert "ref_log_prob" not in job.stages()["train"]
        took[together] = recorded_seconds(job)
    assert took == {1: 5.0, 4: 8.0}


def test_other_stages_are_replayed_as_one(tmp_path: Path) -> None:
    names = {"stages": ["critic", "rewards", "values", "actor"], "last_stage": "actor"}
    spent = {"critic": 1.0, "rewards": 2.0, "values": 4.0, "actor": 8.0}
    stages = [{"stage": stage, "seconds": seconds} for stage, seconds in spent.items()]
    folder = write(
        tmp_path / "r",
        [step(0, workers=dict.fromkeys(spent, 2), **names)],
        [group(0, stages=stages)],
    )
    found = recording.read(folder)
    ((prompt,),) = found.steps
    assert sum(sample.reward_seconds for sample in prompt.samples) == 2.0
    assert prompt.times is not None
    assert (prompt.times.reference, prompt.times.train) == (5.0, 8.0)
    assert found.folded == ["critic", "values"]


def test_after_a_step_that_is_left_out_a_step_begins_where_it_was_seen_to(tmp_path: Path) -> None:
    found = recording.read(write(tmp_path / "r", [step(0), step(2)]))
    assert found.steps[1][0].samples[0].rollout_seconds == 2.0


def test_groups_that_were_not_trained_need_a_task_that_filters(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [step(0)], [group(0), group(1, trained=False)])
    _, prompts = load([folder], "math_open")
    assert [prompt.survives for prompt in prompts] == [True, False]
    with pytest.raises(TraceError, match="1 groups of the recording were not trained on"):
        load([folder], "math")


@pytest.mark.parametrize("plane", ["dataplane", "controller-stream"])
def test_a_recording_is_run_with_its_stages_and_workers(plane: str, tmp_path: Path) -> None:
    """Two reward workers on one host, no reference model, a trainer that takes a whole step, and a
    second step with fewer groups than it takes at once."""
    of = {"workers": {"reward": 2, "train": 1}, "hosts": 1, "stages": ["reward", "train"]}
    claims = {"reward": [1, 2], "train": [4, 4]}
    spent = [{"stage": stage, "seconds": 0.01} for stage in ("reward", "train")]
    groups = [group(n, host=0, put_seconds=0.01 * n, stages=spent) for n in range(4)]
    folder = write(
        tmp_path / "r", [step(n, claims=claims, **of) for n in range(2)], groups, hosts=1
    )
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(groups[:3]), folder / "step-000001.parquet"
    )
    report = tmp_path / "report.json"
    argv = ["run", "--trace", "math", "--trace-file", str(folder), "--planes", plane]
    assert main([*argv, "--link", "none", "--json", str(report)]) == 0
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["status"], run["rows"], run["rows_expected"]) == ("ok", 28, 28)
    names = {"rollout-0", "reward-0", "reward-1", "train-0"}
    assert run["workers"].keys() - {"controller"} == names
    assert len(run["step_seconds"]) == 2


BAD: dict[str, tuple[Any, str]] = {
    "no step": (lambda folder: write(folder, []), "this recording has no complete step"),
    "another format": (lambda folder: write(folder, [step(0)], format=9), "format 9, but"),
    "no JSON": (
        lambda folder: (folder / "recording.json").write_text("{"), "recording.json: "
    ),
    "a step's file is missing": (
        lambda folder: (folder / "step-000000.parquet").unlink(), "not a readable Parquet file"
    ),
    "a damaged file": (
        lambda folder: (folder / "step-000000.parquet").write_bytes(b"PAR1"),
        "not a readable Parquet file",
    ),
    "a group of no rows": (
        lambda folder: write(folder, [step(0)], [group(0, rows=0)]), "the columns or their values"
    ),
    "groups of several sizes": (
        lambda folder: write(folder, [step(0)], [group(0), group(1, rows=5)]),
        "groups have 4 to 5 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage, why", BAD.values(), ids=BAD.keys())
def test_a_recording_that_cannot_be_replayed_ends_the_command_with_a_sentence(
    damage: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "r", [step(0)])
    damage(folder)
    assert main(["run", "--trace", "math", "--trace-file", str(folder), "--link", "none"]) == 2
    assert why in capsys.readouterr().err


def test_a_task_with_media_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the task video has: pass --trace math"):
        load([write(tmp_path / "r", [step(0)])], "video")


def test_a_recording_is_replayed_with_its_hosts_and_with_steps_of_several_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.json"
    folder = write(tmp_path / "r", [step(0), step(1)], ended=None, lost_peers=["a"])
    two = pyarrow.Table.from_pylist([group(n) for n in range(2)])
    pyarrow.parquet.write_table(two, folder / "step-000001.parquet")
    options = ["--planes", "dataplane", "--link", "none", "--pace", "20", "--json", str(report)]
    assert main(["run", "--trace", "math", "--trace-file", str(folder), *options]) == 0
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["hosts"], run["steps"], run["rows"]) == (2, 2, (4 + 2) * 4)
    said = " ".join(capsys.readouterr().out.split())
    assert "Recorded run mine: 2 steps of 9.50 s (median), 2 hosts" in said
    assert "The recorder lost peer a and switched to another" in said
    assert "The recorder is still running or was killed" in said
    assert main(["trace-info", str(folder)]) == 0
