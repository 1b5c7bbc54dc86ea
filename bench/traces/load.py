"""Trace files of any form, as prompts numbered from 0 in steps numbered from 0."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.traces import parquet, polytrace
from bench.traces import recording as recordings
from bench.traces.generator import draw
from bench.traces.parquet import TraceError, unreadable
from bench.traces.polytrace import Group
from bench.traces.recording import Recording
from bench.traces.sample import Prompt
from bench.traces.tasks import TASKS, Task

PROMPTS = 16  # default number of groups in a step of a run
_PARQUET = b"PAR1"
_TOOL_TIMES = 1 << 33  # a separate stream, above every step's number


def load(paths: Sequence[Path], task: str | None, seed: int = 0) -> tuple[str, list[Prompt]]:
    """A Parquet trace; PolyTrace files: one with lengths, one with reward times, or both; or a
    recording of `dataplane record`.

    task: the profile of what PolyTrace's files lack (media, rewards, tool times); the other files
    are complete. Raises TraceError.
    """
    first = paths[0]
    if (recording := recorded_job(paths)) is not None:
        prompts = [prompt for step in recording.steps for prompt in step]
        if task is not None:
            _check_replay(first, TASKS[task], recording)
        return task or f"run {recording.run}", prompts
    if is_parquet(first):
        if len(paths) > 1:
            why = "a Parquet trace is complete by itself: pass no other files with it"
            raise TraceError(first, why)
        name, prompts = parquet.read(first)
        if task not in (None, name):
            why = f"this file is a trace of {name!r}, not of {task!r}: pass --trace {name}"
            raise TraceError(first, why)
        return name, prompts
    if task is None:
        raise TraceError(first, "this file does not name its task: pass --task TASK")
    if prompts := _recorded(paths, TASKS[task], seed):
        return task, prompts
    why = "no group of this file is trained on, so there is nothing to run: pass another file"
    raise TraceError(first, why)


def recorded_job(paths: Sequence[Path]) -> Recording | None:
    """Return the recording of `dataplane record`, or None for other files. Raises TraceError."""
    if not (paths[0] / recordings.INDEX).is_file():
        return None
    if len(paths) > 1:
        raise TraceError(paths[0], "a recording is complete by itself: pass no other files with it")
    return recordings.read(paths[0])


def _check_replay(path: Path, task: Task, recording: Recording) -> None:
    if task.media:
        why = f"a recording has no media, but the task {task.name} has: pass --trace math"
        raise TraceError(path, why)
    if task.survive is None and recording.untrained:
        why = (
            f"{recording.untrained} groups of the recording were not trained on, but the task "
            f"{task.name} trains on all groups: pass --trace math_open"
        )
        raise TraceError(path, why)


def is_parquet(path: Path) -> bool:
    """Whether a file starts like a Parquet file. Raises TraceError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_PARQUET)) == _PARQUET
    except OSError as exc:
        raise unreadable(path, exc) from exc


def cut(prompts: Sequence[Prompt], steps: int, per_step: int) -> list[Prompt]:
    """The first prompts of the first steps, renumbered."""
    taken: Counter[int] = Counter()
    kept: list[Prompt] = []
    for prompt in prompts:
        taken[prompt.step] += 1
        if prompt.step < steps and taken[prompt.step] <= per_step:
            kept.append(dataclasses.replace(prompt, index=len(kept)))
    return kept


def of_run(
    paths: Sequence[Path], task: str, seed: int, steps: int, per_step: int | None
) -> list[Prompt]:
    """The prompts of a run with this many steps, and groups per step. per_step None: all groups of
    a recorded job, else at most `PROMPTS`. Steps of a recorded job may differ in their number of
    groups.

    Raises TraceError, also if the files have fewer, or groups of different sizes.
    """
    _, prompts = load(paths, task, seed)
    counts = Counter(prompt.step for prompt in prompts)
    sizes = [counts[step] for step in range(steps)]
    if not min(sizes):
        raise TraceError(
            paths[0],
            f"--steps {steps} asks for more than the {len(counts)} steps in "
            f"this file: pass --steps {len(counts)} or less",
        )
    recorded = prompts[0].times is not None
    has = max(sizes) if recorded else min(sizes)
    if per_step and has < per_step:
        why = f"--prompts {per_step} asks for more than the {has} groups of a step in this file"
        raise TraceError(paths[0], why)
    kept = cut(prompts, steps, per_step or (has if recorded else min(PROMPTS, has)))
    if len(rows := {len(prompt.samples) for prompt in kept}) > 1:
        why = f"groups have {min(rows)} to {max(rows)} rows, but a run needs groups of one size"
        raise TraceError(paths[0], why)
    return kept


def _recorded(paths: Sequence[Path], task: Task, seed: int) -> list[Prompt]:
    """The prompts of PolyTrace's files. Missing lengths or times are drawn."""
    steps: dict[int, list[Group]] = {}
    rewards: dict[int, float] = {}  # seconds of a row
    for path in paths:
        lengths, seconds = polytrace.read(path, task.samples)
        if lengths and steps:
            what = "pass one file with lengths and one with reward times"
            raise TraceError(path, f"this is a second file with lengths: {what}")
        steps |= lengths
        rewards = seconds or rewards
    prompts: list[Prompt] = []
    for number, step in enumerate(sorted(steps or rewards)):
        count = len(steps[step]) if steps else task.prompts
        for position in range(count):
            prompt = draw(task, seed, number, len(prompts), position)
            if steps:
                prompt = _as_told(prompt, steps[step][position], task, seed)
            if step in rewards:
                took = rewards[step]
                samples = (dataclasses.replace(s, reward_seconds=took) for s in prompt.samples)
                prompt = dataclasses.replace(prompt, samples=tuple(samples))
            prompts.append(prompt)
    return prompts


def _as_told(drawn: Prompt, group: Group, task: Task, seed: int) -> Prompt:
    """The drawn prompt with the lengths and times of the file."""
    tokens, sessions = group
    rng = np.random.default_rng((seed, task.number, _TOOL_TIMES, drawn.index))
    samples = []
    for number, told in enumerate(sessions):
        like = drawn.samples[number % len(drawn.samples)]
        if task.tools and len(told) > 1 and not any(turn.tool_seconds for turn in told):
            waits = task.tools.seconds.at(rng.standard_normal(len(told) - 1))
            calls = zip(told[:-1], waits, strict=True)
            waited = [dataclasses.replace(turn, tool_seconds=float(wait)) for turn, wait in calls]
            told = [*waited, told[-1]]
        samples.append(dataclasses.replace(like, turns=tuple(told)))
    return dataclasses.replace(drawn, prompt_tokens=tokens, samples=tuple(samples))
