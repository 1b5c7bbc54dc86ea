"""Trace files: our Parquet, PolyTrace's four forms, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bench.cli import main
from bench.traces import TASKS, Prompt, generate, parquet
from bench.traces.load import cut, load
from bench.traces.parquet import TraceError


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", TASKS)
def test_a_trace_comes_back_from_its_file_as_it_was(name: str, tmp_path: Path) -> None:
    prompts = generate(TASKS[name], 4, seed=3, steps=2)
    parquet.write(tmp_path / "t.parquet", name, 3, prompts)
    assert load([tmp_path / "t.parquet"], None) == (name, prompts)
    table = pyarrow.parquet.read_table(tmp_path / "t.parquet")
    assert table.num_rows == 2 * 4 * TASKS[name].samples
    assert table.column_names[:5] == [
        "step",
        "group",
        "sample",
        "prompt_tokens",
        "response_tokens",
    ]


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in files:
        assert main(["trace", "search", "--steps", "2", "--prompts", "3", "-o", str(path)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_trace_is_written_as_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 20)
    drawn, written = 0, list[tuple[int, int]]()

    def one_by_one() -> Iterator[Prompt]:
        nonlocal drawn
        for prompt in generate(TASKS["math"], 10, seed=3):
            drawn += 16
            yield prompt

    path = tmp_path / "t.parquet"
    parquet.write(path, "math", 3, one_by_one(), lambda rows: written.append((rows, drawn)))
    assert [rows for rows, _ in written] == [*range(20, 160, 20), 160]
    assert all(ahead - rows < 16 for rows, ahead in written)
    assert load([path], None) == ("math", generate(TASKS["math"], 10, seed=3))


def test_a_trace_that_no_process_could_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write(tmp_path / "t.parquet", "math", 3, generate(TASKS["math"], 2, seed=3))
    monkeypatch.setattr(parquet, "MOST_ROWS", 31)
    with pytest.raises(TraceError, match="32 rows, over the limit of 31"):
        load([tmp_path / "t.parquet"], None)


def test_a_row_group_that_says_it_has_too_many_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(path, "math", 3, generate(TASKS["math"], 2, seed=3))
    written = path.read_bytes()
    # Thrift's compact form: num_rows is 32, and behind it the row group's file_offset is 4.
    right, wrong = b"\x16\x40\x26\x08", b"\x16\x80\x80\x80\x80\x08\x26\x08"
    assert written.count(right) == 1
    body, footer_bytes = written[:-8], int.from_bytes(written[-8:-4], "little")
    longer = (footer_bytes + len(wrong) - len(right)).to_bytes(4, "little")
    path.write_bytes(body.replace(right, wrong) + longer + written[-4:])
    assert pyarrow.parquet.read_metadata(path).num_rows == 32
    with pytest.raises(TraceError, match="1073741824 rows, over the limit"):
        load([path], None)


def test_trace_info_shows_the_distributions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "t.parquet")
    assert main(["trace", "video", "--steps", "3", "--prompts", "5", "-o", path]) == 0
    assert main(["trace-info", path]) == 0
    shown = capsys.readouterr().out
    assert "120 rows in 15 groups and 3 steps" in shown
    assert "media MB a prompt" in shown


def sessions(*turns: tuple[list[int], list[int]]) -> list[dict[str, list[int]]]:
    return [{"input": told, "output": written} for told, written in turns]


def test_an_object_by_step_has_one_number_a_response(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    steps = {"7": {"input": [30] * 8, "output": list(range(1, 9))}}
    steps["5"] = {"input": [10, 20], "output": [*range(100, 108), *range(200, 208)]}
    path.write_text(json.dumps(steps, indent=1))
    name, prompts = load([path], "video")
    assert name == "video"
    assert [(p.step, p.index, p.prompt_tokens) for p in prompts] == [
        (0, 0, 10),
        (0, 1, 20),
        (1, 2, 30),
    ]
    assert prompts[1].response_tokens == tuple(range(200, 208))
    assert prompts[0].media and prompts[0].samples[0].turns[0].seconds > 0  # of the profile


def test_an_object_by_step_has_a_list_of_sessions_for_several_turns(tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    told = sessions(([318, 500, 600], [30, 40, 80]), *[([318], [9])] * 7)
    path.write_text(json.dumps({"0": told}))
    _, (prompt,) = load([path], "search")
    first = prompt.samples[0].turns
    assert [(turn.tokens, turn.tool_tokens) for turn in first] == [(30, 500), (40, 600), (80, 0)]
    assert first[0].tool_seconds > 0 and first[2].tool_seconds == 0  # drawn from the profile
    assert prompt.prompt_tokens == 318
    assert prompt.samples[1].tokens == 9


def prompt_line(**changes: Any) -> dict[str, Any]:
    line = {"step": 1, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": 0, "input": 99}
    return {**line, "output": [5, 6, 7], "n_sampling": 3, "validate": False, **changes}


def test_lines_of_prompts_count_once_and_without_validation(tmp_path: Path) -> None:
    told = [prompt_line(), prompt_line(tp_rank=1, rank=1), prompt_line(validate=True)]
    path = lines(tmp_path / "p.jsonl", *told, prompt_line(step=2, output=[8, 9, 10]))
    _, prompts = load([path], "math_open")
    assert [(p.step, p.response_tokens) for p in prompts] == [(0, (5, 6, 7)), (1, (8, 9, 10))]


def trajectory(sample: int, **changes: Any) -> dict[str, Any]:
    turn = {"prompt_tokens": 250, "completion_tokens": 40, "engine_latency_s": 1.5, "extra": "x"}
    return {
        "prompt_len": 250,
        "turns": [turn, {**turn, "completion_tokens": 60, "engine_latency_s": 2.0}],
        "tool_calls": [{"turn": 0, "latency_s": 0.25, "response_token_len": 470, "name": "sh"}],
        "final_response_len": 570,
        "prompt_group_id": "g1",
        "sample_id": sample,
        **changes,
    }


def test_lines_of_trajectories_have_their_recorded_times(tmp_path: Path) -> None:
    told = [trajectory(0), trajectory(1), trajectory(0, prompt_group_id="g2", prompt_len=9)]
    path = lines(tmp_path / "t.jsonl", *told, trajectory(1, prompt_group_id="g2"))
    _, prompts = load([path], "tool_use")
    assert [(p.prompt_tokens, len(p.samples)) for p in prompts] == [(250, 2), (9, 2)]
    first, second = prompts[0].samples[0].turns
    assert (first.tokens, first.seconds, first.tool_seconds, first.tool_tokens) == (
        40,
        1.5,
        0.25,
        470,
    )
    assert (second.tokens, second.seconds, second.tool_tokens) == (60, 2.0, 0)


def reward_line(step: int, rank: int, seconds: float) -> dict[str, Any]:
    return {"step": step, "rank": rank, "batch_size": 64, "reward_time_s": seconds, "host": "a"}


def test_lines_of_rewards_go_with_lengths_or_with_drawn_ones(tmp_path: Path) -> None:
    rewards = lines(tmp_path / "r.jsonl", reward_line(1, 0, 32.0), reward_line(1, 1, 96.0))
    lengths = lines(tmp_path / "p.jsonl", prompt_line())
    _, (prompt,) = load([lengths, rewards], "programming")
    assert prompt.response_tokens == (5, 6, 7)
    assert {sample.reward_seconds for sample in prompt.samples} == {1.0}
    _, drawn = load([rewards], "programming")
    assert len(drawn) == TASKS["programming"].prompts
    assert {s.reward_seconds for p in drawn for s in p.samples} == {1.0}


def by_step(told: Any) -> str:
    return json.dumps({"1": {"input": [1] * 8, "output": [2] * 8}, "2": told}, indent=0)


BAD = {
    "a negative length": (json.dumps(prompt_line(input=-1)), 1),
    "a text for a number": (f"{json.dumps(prompt_line())}\n{json.dumps(prompt_line(step='x'))}", 2),
    "no output at all": (f"{json.dumps(prompt_line())}\n\n{json.dumps(prompt_line(output=[]))}", 3),
    "fewer outputs than told": (json.dumps(prompt_line(n_sampling=4)), 1),
    "a broken line": (f'{json.dumps(prompt_line())}\n{{"step": 1, "inp', 2),
    "a line that is no record": (f"{json.dumps(trajectory(0))}\n[1, 2]", 2),
    "a sample twice": (f"{json.dumps(trajectory(0))}\n{json.dumps(trajectory(0))}", 2),
    "a tool call after the end": (
        json.dumps(trajectory(0, tool_calls=[{"turn": 2, "latency_s": 1}])),
        1,
    ),
    "a latency that is no number": (
        json.dumps(trajectory(0, tool_calls=[{"turn": 0, "latency_s": "1"}])),
        1,
    ),
    "an empty batch of rewards": (json.dumps({**reward_line(1, 0, 1.0), "batch_size": 0}), 1),
    "an unknown record": ('{"hello": 1}', 1),
    "half a group": (by_step({"input": [1] * 7, "output": [2] * 7}), 24),
    "inputs without outputs": (by_step({"input": [1] * 8, "output": [2] * 4}), 24),
    "uneven sessions": (by_step(sessions(([1, 2], [3]))), 24),
    "a step twice": (by_step({"input": [1] * 8, "output": [2] * 8}).replace('"2":', '"01":'), 24),
    "text where lengths belong": (by_step("none"), 24),
    "broken JSON over many lines": ('{\n"1": {"input": [1,\n}', 3),
    "a line that is no text": (f"{json.dumps(prompt_line())}\n\udcff", 2),
    "a step without a number": ('{\n"first": {"input": [1], "output": [1]}\n}', 2),
}


@pytest.mark.parametrize("text, line", BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_refused_with_file_and_line(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceError) as refused:
        load([path], "video")
    assert refused.value.line == line
    assert str(refused.value).startswith(f"{path}:{line}: ")


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "other.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing else")
    pyarrow.parquet.write_table(pyarrow.table({"misnamed": [1]}), tmp_path / "names.parquet")
    misnamed = (tmp_path / "names.parquet").read_bytes().replace(b"misnamed", b"\x8disnamed")
    (tmp_path / "names.parquet").write_bytes(misnamed)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\xfd")
    lines(tmp_path / "validation.jsonl", prompt_line(validate=True))
    (tmp_path / "steps.json").write_text("{}")
    with pytest.raises(TraceError, match="no group"):
        load([tmp_path / "validation.jsonl"], "video")
    with pytest.raises(TraceError, match="no group"):
        load([tmp_path / "steps.json"], "video")
    names = "other.parquet", "torn.parquet", "names.parquet", "empty.jsonl", "bytes.jsonl"
    for name in (*names, "absent.jsonl"):
        with pytest.raises(TraceError, match=name):
            load([tmp_path / name], "video")


def test_a_trace_in_which_a_value_may_be_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(path, "math", 3, generate(TASKS["math"], 2, seed=3))
    table = pyarrow.parquet.read_table(path)
    turns = table.column_names.index("turns")
    missing = pyarrow.nulls(len(table), table.schema.types[turns])
    pyarrow.parquet.write_table(table.set_column(turns, "turns", missing), path)
    with pytest.raises(TraceError, match="the columns or their values"):
        load([path], None)


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    lengths = lines(tmp_path / "p.jsonl", prompt_line())
    prompts = generate(TASKS["math"], 1, 0)
    parquet.write(tmp_path / "t.parquet", "math", 0, prompts)
    for files, task in (
        ([lengths, lengths], "math"),
        ([lengths], None),
        ([tmp_path / "t.parquet"], "video"),
        ([tmp_path / "t.parquet", lengths], "math"),
        ([tmp_path], "math"),
    ):
        with pytest.raises(TraceError):
            load(files, task)


def test_a_bad_file_ends_the_command_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "p.jsonl", prompt_line(), prompt_line(input="many"))
    assert main(["trace-info", str(path), "--task", "video"]) == 2
    assert f"{path}:2: " in capsys.readouterr().err


def test_a_run_takes_the_first_prompts_of_the_first_steps() -> None:
    prompts = generate(TASKS["math"], 4, 0, steps=3)
    kept: list[Prompt] = cut(prompts, steps=2, per_step=3)
    assert [(p.step, p.index) for p in kept] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert kept[3].samples == prompts[4].samples


def test_a_recorded_trace_is_run(tmp_path: Path) -> None:
    told = [prompt_line(step=step, local_index=i) for step in (1, 2) for i in range(3)]
    path, report = lines(tmp_path / "p.jsonl", *told), tmp_path / "report.json"
    options = ["--planes", "controller", "--hosts", "1", "--link", "none", "--steps", "2"]
    options += ["--json", str(report)]
    assert main(["run", "--trace", "math", "--trace-file", str(path), *options]) == 0
    (run,) = json.loads(report.read_text())["runs"]
    assert run["rows"] == run["rows_expected"] == 2 * 3 * 3
    assert run["samples"] == 3


def test_a_line_ends_only_where_a_line_of_the_file_does(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl")
    path.write_text(json.dumps(prompt_line(rank="a\u2028b"), ensure_ascii=False) + "\r\n")
    assert len(load([path], "math")[1]) == 1


@pytest.mark.parametrize(
    "options, why",
    [
        (["--trace", "math", "--steps", "3"], "--steps 3 asks for more than the 2 steps"),
        (["--trace", "math", "--prompts", "4"], "--prompts 4 asks for more than the 3 groups"),
        (["--trace", "math,video"], "pass exactly one --trace"),
    ],
)
def test_a_run_of_more_than_the_file_has_is_refused(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [prompt_line(step=step, local_index=i) for step in (1, 2) for i in range(3)]
    path = lines(tmp_path / "p.jsonl", *told)
    assert main(["run", "--trace-file", str(path), *options]) == 2
    assert why in capsys.readouterr().err


def test_a_file_that_names_no_task_is_shown_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "p.jsonl", prompt_line())
    assert main(["trace-info", str(path)]) == 2
    assert "--task" in capsys.readouterr().err


def test_a_run_of_groups_of_several_sizes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uneven = [prompt_line(), prompt_line(output=[1, 2], n_sampling=2)]
    path = lines(tmp_path / "p.jsonl", *uneven)
    assert main(["run", "--trace", "math", "--trace-file", str(path)]) == 2
    assert "groups have 2 to 3 rows" in capsys.readouterr().err
