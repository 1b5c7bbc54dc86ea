"""PolyTrace's published files: recorded lengths and times. The profile adds what they lack.

Four forms, told apart by their first record:
- one JSON object, step → {"input": [...], "output": [...]}, one number a response; for multi-turn
  tasks step → a list of such objects, one a session, one number a turn;
- JSON lines, one a prompt: `input`, and `output` with one number a response;
- JSON lines, one a trajectory: `turns` and `tool_calls` with their times;
- JSON lines, one a batch of rewards: `batch_size` and `reward_time_s`. It has no lengths: they come
  from another file, or from the generator.
A line that does not fit its form raises TraceError with file and line.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from bench.traces.parquet import TraceError, unreadable
from bench.traces.sample import Turn
from bench.traces.tasks import TOKEN_SECONDS

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Group = tuple[int, list[list[Turn]]]  # prompt tokens, and the turns of each sample
Lines = Sequence[tuple[int, str]]
Recorded = tuple[dict[int, list[Group]], dict[int, float]]
"""By step: its groups, and seconds of reward for one row."""
T = TypeVar("T")


class _Lengths(msgspec.Struct):
    input: list[Count]
    output: list[Count]


class _PromptLine(msgspec.Struct):
    step: Count
    input: Count
    output: Annotated[list[Count], msgspec.Meta(min_length=1)]
    n_sampling: Count | None = None
    tp_rank: Count = 0
    dp_rank: Count = 0
    local_index: Count = 0
    validate: bool = False


class _TurnRecord(msgspec.Struct):
    prompt_tokens: Count
    completion_tokens: Count
    engine_latency_s: Seconds | None = None


class _ToolCall(msgspec.Struct):
    turn: Count
    latency_s: Seconds
    response_token_len: Count = 0


class _TrajectoryLine(msgspec.Struct):
    prompt_len: Count
    turns: Annotated[list[_TurnRecord], msgspec.Meta(min_length=1)]
    prompt_group_id: str | int
    sample_id: str | int
    tool_calls: list[_ToolCall] = []
    step: Count | None = None
    validate: bool = False


class _RewardLine(msgspec.Struct):
    step: Count
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    reward_time_s: Seconds
    validate: bool = False


def read(path: Path, samples: int) -> Recorded:
    """Read one file. samples: rows of a group, if the form does not say it. Raises TraceError."""
    text = _text(path)
    # Not splitlines: a JSON string may contain other characters that it takes for line ends.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise TraceError(path, "this file is empty: pass another one")
    if not lines[0][1].rstrip().endswith("}"):  # the beginning of an object over many lines
        return _by_step(path, text, samples)
    [(number, first)] = _records(path, lines[:1], dict[str, Any])
    if all(name.isdecimal() for name in first):
        return _by_step(path, text, samples)
    forms = {"turns": _trajectories, "reward_time_s": _rewards, "output": _prompts}
    for name, form in forms.items():
        if name in first:
            return form(path, lines)
    what = f"a record with the fields {sorted(first)} has none of PolyTrace's forms"
    raise TraceError(path, f"{what}: pass a file of PolyTrace", number)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as exc:
        raise unreadable(path, exc) from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        why = f"this file is not UTF-8 text ({exc.reason}): convert it to UTF-8"
        raise TraceError(path, why, line) from exc


def _records(path: Path, lines: Lines, form: type[T]) -> Iterator[tuple[int, T]]:
    decoder = msgspec.json.Decoder(form)
    for number, line in lines:
        try:
            yield number, decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise TraceError(path, str(exc), number) from exc


def _by_step(path: Path, text: str, samples: int) -> Recorded:
    try:
        steps = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise TraceError(path, str(exc), getattr(exc, "lineno", None)) from exc
    if not isinstance(steps, dict):
        raise TraceError(path, "this file is no record: pass a file of PolyTrace", 1)
    seen: set[str] = set()
    for name in re.finditer(r'"(\d+)"\s*:', text):  # only steps have numbers as names
        step, line = name[1].lstrip("0") or "0", text.count("\n", 0, name.start()) + 1
        if step in seen:  # the decoder keeps the last of two
            raise TraceError(path, f"step {step} occurs twice: give each step its own number", line)
        seen.add(step)
    found: dict[int, list[Group]] = {}
    for name, told in steps.items():
        line = text[: max(0, text.find(f'"{name}"'))].count("\n") + 1
        if not name.isdecimal():
            why = f"{name!r} is not a step number: name each step with a whole number"
            raise TraceError(path, why, line)
        try:
            if isinstance(told, list):
                rows = [_session(session) for session in msgspec.convert(told, list[_Lengths])]
            else:
                rows = _single(msgspec.convert(told, _Lengths), samples)
            found[int(name)] = _chunks(rows, samples)
        except ValueError as exc:  # msgspec's are ValueErrors
            raise TraceError(path, f"step {name}: {exc}", line) from exc
    return found, {}


def _single(lengths: _Lengths, samples: int) -> list[tuple[int, list[Turn]]]:
    """One number per response. The file has one input per response, or one per prompt."""
    inputs = lengths.input
    if len(inputs) * samples == len(lengths.output):
        inputs = [tokens for tokens in inputs for _ in range(samples)]
    if len(inputs) != len(lengths.output):
        raise ValueError(f"{len(lengths.input)} inputs do not match {len(lengths.output)} outputs")
    return [(i, [written(o)]) for i, o in zip(inputs, lengths.output, strict=True)]


def _session(session: _Lengths) -> tuple[int, list[Turn]]:
    """An input after the first is the tool's answer to the previous turn."""
    if not session.input or len(session.input) != len(session.output):
        counts = f"{len(session.input)} inputs but {len(session.output)} outputs"
        raise ValueError(f"a session has {counts}")
    told = zip(session.output, [*session.input[1:], 0], strict=True)
    return session.input[0], [written(tokens, tool_tokens=answer) for tokens, answer in told]


def _chunks(rows: list[tuple[int, list[Turn]]], samples: int) -> list[Group]:
    if not rows or len(rows) % samples:
        raise ValueError(f"{len(rows)} responses do not form whole groups of {samples}")
    starts = range(0, len(rows), samples)
    return [(rows[at][0], [turns for _, turns in rows[at : at + samples]]) for at in starts]


def _prompts(path: Path, lines: Lines) -> Recorded:
    """Groups by rank and local index, without validation and repeats by tensor-parallel ranks."""
    found: dict[int, list[tuple[tuple[int, int], Group]]] = {}
    for number, record in _records(path, lines, _PromptLine):
        told = record.n_sampling
        if told not in (None, len(record.output)):
            what = f"n_sampling is {told}, but the record has {len(record.output)} outputs"
            raise TraceError(path, f"{what}: correct one of them", number)
        if not record.validate and record.tp_rank == 0:
            group = (record.input, [[written(tokens)] for tokens in record.output])
            place = record.dp_rank, record.local_index
            found.setdefault(record.step, []).append((place, group))
    placed = {step: sorted(told, key=itemgetter(0)) for step, told in found.items()}
    return {step: [group for _, group in told] for step, told in placed.items()}, {}


def _trajectories(path: Path, lines: Lines) -> Recorded:
    found: dict[int, dict[str | int, tuple[int, dict[str | int, list[Turn]]]]] = {}
    for number, record in _records(path, lines, _TrajectoryLine):
        if record.validate:
            continue
        groups = found.setdefault(record.step or 0, {})
        _, samples = groups.setdefault(record.prompt_group_id, (record.prompt_len, {}))
        if record.sample_id in samples:
            why = f"sample {record.sample_id!r} of group {record.prompt_group_id!r} occurs twice"
            raise TraceError(path, why, number)
        try:
            samples[record.sample_id] = _trajectory(record)
        except ValueError as exc:
            raise TraceError(path, str(exc), number) from exc
    return {
        step: [(tokens, list(samples.values())) for tokens, samples in groups.values()]
        for step, groups in found.items()
    }, {}


def _trajectory(record: _TrajectoryLine) -> list[Turn]:
    seconds, tokens = [0.0] * len(record.turns), [0] * len(record.turns)
    for call in record.tool_calls:
        if call.turn >= len(record.turns):
            count = len(record.turns)
            raise ValueError(
                f"a tool call belongs to turn {call.turn}, but there are only {count} turns"
            )
        seconds[call.turn] += call.latency_s
        tokens[call.turn] += call.response_token_len
    return [
        written(turn.completion_tokens, turn.engine_latency_s, waited, answered)
        for turn, waited, answered in zip(record.turns, seconds, tokens, strict=True)
    ]


def _rewards(path: Path, lines: Lines) -> Recorded:
    rows, seconds = Counter[int](), defaultdict[int, float](float)
    for _, record in _records(path, lines, _RewardLine):
        if not record.validate:
            rows[record.step] += record.batch_size
            seconds[record.step] += record.reward_time_s
    return {}, {step: total / rows[step] for step, total in seconds.items()}


def written(
    tokens: int, seconds: float | None = None, tool_seconds: float = 0.0, tool_tokens: int = 0
) -> Turn:
    """A turn. If the engine's time was not recorded, the profile's time per token is used."""
    engine = tokens * TOKEN_SECONDS if seconds is None else seconds
    return Turn(tokens, engine, tool_seconds, tool_tokens)
