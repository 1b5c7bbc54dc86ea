"""A trace as a Parquet file: one row a sample, the file's metadata name the task and the seed.

Group numbers are unique across steps. `response_tokens` includes tool texts. Media grids are in
patches. `times` (recorded jobs only) is a StageTimes. Writing a trace twice gives equal files.
Writing streams, so only the disk limits the length. Reading loads the whole file, so its rows are
limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow
import pyarrow.parquet

from bench.options import Impossible
from bench.outputs import replacing
from bench.traces.sample import Medium, Prompt, Sample, StageTimes, Turn
from bench.traces.tasks import TASKS

T = TypeVar("T")
_FORMAT = b"4"
_GROUP_ROWS = 8_192  # rows in memory while the file is written
MOST_ROWS = 1_000_000  # limit for a file that is read: about 0.5 GB in each process
_INT, _FLOAT = pyarrow.int64(), pyarrow.float64()
_TURN = {"tokens": _INT, "seconds": _FLOAT, "tool_seconds": _FLOAT, "tool_tokens": _INT}
_MEDIUM = {"content": _INT, "grid": pyarrow.list_(_INT)}
_TIMES = {"reference": _FLOAT, "train": _FLOAT, "optimiser": _FLOAT}
SCHEMA = pyarrow.schema(
    {
        **dict.fromkeys(("step", "group", "sample", "prompt_tokens", "response_tokens"), _INT),
        "turns": pyarrow.list_(pyarrow.struct(_TURN)),
        "media": pyarrow.list_(pyarrow.struct(_MEDIUM)),
        "reward": _FLOAT,
        "reward_seconds": _FLOAT,
        "times": pyarrow.list_(pyarrow.struct(_TIMES)),
    }
)


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    group: int
    sample: int
    prompt_tokens: int
    response_tokens: int
    turns: tuple[Turn, ...]
    media: tuple[Medium, ...]
    reward: float
    reward_seconds: float
    times: list[StageTimes]


class TraceError(Impossible):
    """A trace file that cannot be used: its path and line, and the reason."""

    def __init__(self, path: Path, why: str, line: int | None = None) -> None:
        super().__init__(f"{path}:{line}: {why}" if line else f"{path}: {why}")
        self.path = path
        self.line = line


def unreadable(path: Path, exc: OSError) -> TraceError:
    why = f"cannot read this file: {exc.strerror}. Correct its path or its permissions"
    return TraceError(path, why)


def write(
    path: Path,
    task: str,
    seed: int,
    prompts: Iterable[Prompt],
    tick: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write a trace. tick: called with the number of rows so far. Raises NotWritten."""
    metadata = {b"bench.trace": _FORMAT, b"task": task.encode(), b"seed": str(seed).encode()}
    schema = SCHEMA.with_metadata(metadata)
    with (
        replacing(path) as partial,
        pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as file,
    ):
        done, rows = 0, chain.from_iterable(map(_rows, prompts))
        while held := list(islice(rows, _GROUP_ROWS)):
            table = pyarrow.Table.from_pylist(msgspec.to_builtins(held), schema)
            file.write_table(table)
            done += len(held)
            tick(done)


def _rows(prompt: Prompt) -> list[_Row]:
    times = [prompt.times] if prompt.times else []
    rows = []
    for number, sample in enumerate(prompt.samples):
        names = (prompt.step, prompt.index, number, prompt.prompt_tokens)
        scored = (sample.reward, sample.reward_seconds, times)
        rows.append(_Row(*names, sample.tokens, sample.turns, prompt.media, *scored))
    return rows


def read_rows(path: Path, form: type[list[T]], instead: str) -> tuple[dict[bytes, bytes], list[T]]:
    """The metadata and rows of a Parquet file. instead: what to do if it cannot be read. Raises
    TraceError."""
    try:
        told = pyarrow.parquet.read_metadata(path)
        # Sum the row groups, because pyarrow allocates by their numbers of rows, not by the file's
        # total.
        rows = sum(told.row_group(number).num_rows for number in range(told.num_row_groups))
        if rows > MOST_ROWS:
            what = f"this file has {rows} rows, over the limit of {MOST_ROWS:,}"
            raise TraceError(path, f"{what}, because a run holds them all: use a smaller file")
        table = pyarrow.parquet.read_table(path)
        return table.schema.metadata or {}, msgspec.convert(table.to_pylist(), form)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as exc:  # damaged pages or names
        raise TraceError(path, f"not a readable Parquet file ({exc}): {instead}") from exc
    except msgspec.MsgspecError as exc:
        why = f"the columns or their values do not fit ({exc}): {instead}"
        raise TraceError(path, why) from exc


def read(path: Path) -> tuple[str, list[Prompt]]:
    """The task's name and the prompts. Raises TraceError for any other file."""
    metadata, rows = read_rows(path, list[_Row], "write it again with `python -m bench trace`")
    task = metadata.get(b"task", b"").decode(errors="replace")
    if metadata.get(b"bench.trace") != _FORMAT or task not in TASKS:
        why = "not written by this version of `python -m bench trace`: write it again"
        raise TraceError(path, why)
    if not rows:
        raise TraceError(path, "this file has no rows: write it again with `python -m bench trace`")
    groups = groupby(rows, key=lambda row: row.group)
    return task, [_prompt(index, list(group)) for index, (_, group) in enumerate(groups)]


def _prompt(index: int, rows: list[_Row]) -> Prompt:
    first = rows[0]
    samples = tuple(Sample(row.turns, row.reward, row.reward_seconds) for row in rows)
    times = first.times[0] if first.times else None
    return Prompt(index, first.step, first.prompt_tokens, samples, first.media, times)
