"""A job that `dataplane record` recorded, as prompts with their recorded times.

A group has its recorded size, in rows of text of equal length: the recording has bytes, not tokens.
Rollout begins a step when the recording shows that it could: the previous step was rolled out, and
the last stage had finished the step `staleness` + 1 before. If a stage had more than MOST_WORKERS
workers per host, each replaying worker is as fast as several recorded ones together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from bench.traces.parquet import TraceError, read_rows, unreadable
from bench.traces.sample import Prompt, Sample, StageReplay, StageTimes, Turn

INDEX = "recording.json"
NEAR_S = 0.05
"""Tolerance for the differing clocks of hosts."""
MOST_WORKERS = 4
"""Workers of a stage per host, because each is a process on this machine."""
_FORMAT = 1
_TOKEN_BYTES = 44  # of a response's token, in all columns that rollout writes
_ROW_BYTES = 16  # its uid
_MOST_TOKENS = 1 << 24

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Some = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Step(msgspec.Struct, frozen=True):
    number: Count
    partition: str
    began: Seconds
    first_put: Seconds
    last_put: Seconds
    first_lease: Seconds
    ended: Seconds
    pause_s: Seconds
    hosts: Some
    workers: dict[str, Count]
    claims: dict[str, tuple[Some, Some]]
    stages: list[str]
    last_stage: str


class _Index(msgspec.Struct, frozen=True):
    format: int
    run: str
    ended: str | None
    hosts: Some
    steps: list[_Step]
    lost_peers: list[str] = []


class _Worked(msgspec.Struct, frozen=True):
    stage: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: Some
    nbytes: Count
    put_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    host: Count
    trained: bool
    stages: list[_Worked]


@dataclass(frozen=True, slots=True)
class Recording:
    """hosts, staleness, phased: as recorded. step_seconds: from the end of the previous step to its
    own. ended: why the recording ended; None if the recorder still runs or was killed. folded:
    stages that are replayed as `reference`. untrained: groups that the last stage did not ack.
    lost_peers: the peers that the recorder lost while it read their events. stages: their replay on
    the recorded number of hosts."""

    run: str
    hosts: int
    staleness: int
    phased: bool
    steps: list[list[Prompt]]
    step_seconds: list[float] = field(default_factory=list)
    ended: str | None = None
    folded: list[str] = field(default_factory=list)
    untrained: int = 0
    lost_peers: list[str] = field(default_factory=list)
    stages: tuple[StageReplay, ...] = ()


def read(folder: Path) -> Recording:
    index = _index(folder / INDEX)
    if index.format != _FORMAT:
        what = f"this recording has format {index.format}, but this bench reads only {_FORMAT}"
        raise TraceError(folder / INDEX, f"{what}: record again with this version")
    if not index.steps:
        why = "this recording has no complete step: record for at least one whole step"
        raise TraceError(folder, why)
    steps = sorted(index.steps, key=lambda step: step.number)
    staleness = _staleness(steps)
    optimiser = _optimiser(steps, staleness)
    starts = _starts(steps, staleness, optimiser)
    ends = [step.ended + seconds for step, seconds in zip(steps, optimiser, strict=True)]
    hosts = index.hosts
    had = dict[str, int]()  # workers of each stage, which may be fewer in some steps
    for step in steps:
        had |= {stage: max(1, n, had.get(stage, 1)) for stage, n in step.workers.items()}
    workers = _replayed(steps, had, hosts)
    made, number, folded, untrained = list[list[Prompt]](), 0, dict[str, None](), 0
    for at, step in enumerate(steps):
        others = [stage for stage in step.stages if _role(step, stage) == "reference"]
        folded |= dict.fromkeys(others if len(others) > 1 else [])
        path = folder / f"step-{step.number:06}.parquet"
        _, found = read_rows(path, list[_Group], "record again with this version")
        groups = _in_turn(found, hosts)
        prompts = []
        for group in groups:
            put = max(0.0, step.began + group.put_seconds - starts[at])
            spent = dict.fromkeys(("reward", "reference", "train"), 0.0)
            for one in group.stages:
                role = _role(step, one.stage)
                spent[role] += one.seconds * workers[role] / had.get(one.stage, 1)
            times = StageTimes(spent["reference"], spent["train"], optimiser[at])
            prompts.append(_prompt(group, number, at, put, spent["reward"], times))
            number += 1
            untrained += not group.trained
        made.append(prompts)
    seconds = [ends[0] - starts[0], *(after - before for before, after in pairwise(ends))]
    phased = all(step.first_lease >= step.last_put for step in steps)
    stages = (StageReplay(r, many, *_claim(steps, r, had, many)) for r, many in workers.items())
    return Recording(
        run=index.run,
        hosts=hosts,
        staleness=staleness,
        phased=phased and all(len(prompts) > 1 for prompts in made),
        steps=made,
        step_seconds=seconds,
        ended=index.ended,
        folded=list(folded),
        untrained=untrained,
        lost_peers=index.lost_peers,
        stages=tuple(stages),
    )


def _index(path: Path) -> _Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except OSError as exc:
        raise unreadable(path, exc) from exc
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise TraceError(path, str(exc)) from exc


def _staleness(steps: Sequence[_Step]) -> int:
    """The smallest staleness that explains the first puts of all steps."""
    for staleness in range(len(steps)):
        pairs = zip(steps, steps[staleness + 1 :], strict=False)
        if all(before.ended <= after.first_put + NEAR_S for before, after in pairs):
            return staleness
    return max(0, len(steps) - 1)


def _optimiser(steps: Sequence[_Step], staleness: int) -> list[float]:
    """How long the last stage paused after each step, at most until the first put of the rollout
    that waited for it. The last step gets the median of the others."""
    found = []
    for at, step in enumerate(steps[:-1]):
        pause = max(0.0, steps[at + 1].pause_s)
        if at + 1 + staleness < len(steps):
            pause = min(pause, max(0.0, steps[at + 1 + staleness].first_put - step.ended))
        found.append(pause)
    return [*found, median(found) if found else 0.0]


def _starts(steps: Sequence[_Step], staleness: int, optimiser: Sequence[float]) -> list[float]:
    starts = list[float]()
    for at, step in enumerate(steps):
        start = step.began
        if at and steps[at - 1].number == step.number - 1:
            behind = at - staleness - 1
            policy = steps[behind].ended + optimiser[behind] if behind >= 0 else starts[0]
            start = max(policy, steps[at - 1].last_put if staleness else policy)
        starts.append(min(start, step.first_put))
    return starts


def _role(step: _Step, stage: str) -> str:
    """The role in which a stage is replayed."""
    if stage == step.last_stage:
        return "train"
    others = [one for one in step.stages if one != step.last_stage]
    reward = next((one for one in others if "reward" in one), next(iter(others), ""))
    return "reward" if stage == reward else "reference"


def _replayed(steps: Sequence[_Step], had: dict[str, int], hosts: int) -> dict[str, int]:
    """The number of workers that replay each stage. `reward` has at least one."""
    workers = {"reward": 1}
    for step in steps:
        for stage in step.stages:
            role, many = _role(step, stage), min(had.get(stage, 1), MOST_WORKERS * hosts)
            workers[role] = max(many, workers.get(role, 1))
    return workers


def _claim(steps: Sequence[_Step], role: str, had: dict[str, int], workers: int) -> tuple[int, int]:
    """The number of groups that a claim takes with this many workers, as (least, most)."""
    least, most = list[float](), [1.0]
    for step in steps:
        for stage, of in step.claims.items():
            if _role(step, stage) == role:
                each = had.get(stage, 1) / workers
                least.append(of[0] * each)
                most.append(of[1] * each)
    return max(1, round(median(least or [1]))), max(1, round(max(most)))


def _in_turn(groups: list[_Group], hosts: int) -> list[_Group]:
    """The groups in the order in which a run of as many hosts puts each group on its recorded
    host."""
    lanes: dict[int, list[_Group]] = {host: [] for host in range(hosts)}
    for group in groups:
        lanes[group.host % hosts].append(group)
    longest = max(map(len, lanes.values()))
    return [lane[at] for at in range(longest) for lane in lanes.values() if at < len(lane)]


def _prompt(
    group: _Group, number: int, step: int, put: float, reward_s: float, times: StageTimes
) -> Prompt:
    tokens = round((group.nbytes / group.rows - _ROW_BYTES) / _TOKEN_BYTES)
    turn = Turn(min(max(1, tokens), _MOST_TOKENS), put)
    # Rewards that differ survive dynamic sampling, equal ones do not.
    rewards = [float(group.trained and at == 0 and group.rows > 1) for at in range(group.rows)]
    samples = (Sample((turn,), reward, reward_s / group.rows) for reward in rewards)
    return Prompt(number, step, 0, tuple(samples), times=times)
