"""A trace as a Parquet file: one row a sample, the file's metadata name the task and the seed.

Columns: step, group and sample (numbers; a group's number counts through all steps),
prompt_tokens, response_tokens (tool texts included), turns (a list of tokens, seconds,
tool_seconds, tool_tokens), media (a list of content id, grid in patches),
reward, reward_seconds, times (of a recorded job: one of StageTimes). Written twice, a trace gives
the same file. It is written as it is drawn, so its length is limited by the disk; read it is held
whole, so there only so many rows are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from bench.outputs import replacing
from bench.traces.sample import Medium, Prompt, Sample, StageTimes, Turn
from bench.traces.tasks import TASKS

_FORMAT = b"4"
_GROUP_ROWS = 8_192  # of the file: so many are held at a time while it is written
MOST_ROWS = 1_000_000  # of a file that is read: some 0.5 GB of them in each process


def _whole(**columns: pyarrow.DataType) -> list[pyarrow.Field]:
    """Fields of which no value is missing: a file of these has no way to say that one is."""
    return [pyarrow.field(name, values, nullable=False) for name, values in columns.items()]


def _several(values: pyarrow.DataType) -> pyarrow.DataType:
    return pyarrow.list_(*_whole(element=values))


_COLUMNS = {
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "tuple[int, int, int]": _several(pyarrow.int64()),
}


def _of(dataclass: type) -> pyarrow.DataType:
    """Several of these, with the fields that the dataclass has."""
    columns = {field.name: _COLUMNS[str(field.type)] for field in fields(dataclass)}
    return _several(pyarrow.struct(_whole(**columns)))


SCHEMA = pyarrow.schema(
    _whole(
        step=pyarrow.int64(),
        group=pyarrow.int64(),
        sample=pyarrow.int64(),
        prompt_tokens=pyarrow.int64(),
        response_tokens=pyarrow.int64(),
        turns=_of(Turn),
        media=_of(Medium),
        reward=pyarrow.float64(),
        reward_seconds=pyarrow.float64(),
        times=_of(StageTimes),
    )
)


class TraceError(ValueError):
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
    """Write a trace. An existing file is replaced once the new one is complete. tick(rows): called
    with the number of rows written. Raises NotWritten."""
    metadata = {b"bench.trace": _FORMAT, b"task": task.encode(), b"seed": str(seed).encode()}
    schema = SCHEMA.with_metadata(metadata)
    with (
        replacing(path) as partial,
        pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as file,
    ):
        done, rows = 0, chain.from_iterable(map(_rows, prompts))
        while held := list(islice(rows, _GROUP_ROWS)):
            file.write_table(pyarrow.Table.from_pylist(held, schema))
            done += len(held)
            tick(done)


def _rows(prompt: Prompt) -> Iterator[dict[str, Any]]:
    media = [asdict(medium) for medium in prompt.media]
    times = [asdict(prompt.times)] if prompt.times else []
    for number, sample in enumerate(prompt.samples):
        yield {
            "step": prompt.step,
            "group": prompt.index,
            "sample": number,
            "prompt_tokens": prompt.prompt_tokens,
            "response_tokens": sample.tokens,
            "turns": [asdict(turn) for turn in sample.turns],
            "media": media,
            "reward": sample.reward,
            "reward_seconds": sample.reward_seconds,
            "times": times,
        }


def read_table(path: Path, instead: str) -> pyarrow.Table:
    """Read any Parquet file of at most MOST_ROWS rows. instead: what to do with a file that cannot
    be read. Raises TraceError."""
    try:
        told = pyarrow.parquet.read_metadata(path)
        # Of its row groups, as pyarrow makes room for so many before it reads any; what the file
        # says of all of them together it does not follow.
        rows = sum(told.row_group(number).num_rows for number in range(told.num_row_groups))
        if rows > MOST_ROWS:
            raise TraceError(
                path,
                f"this file has {rows} rows, over the limit of {MOST_ROWS:,}, because a run holds "
                "them all: use a smaller file",
            )
        return pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as exc:  # damaged pages or names
        raise TraceError(path, f"not a readable Parquet file ({exc}): {instead}") from exc


def read(path: Path) -> tuple[str, list[Prompt]]:
    """The task's name and the prompts. Raises TraceError for any other file."""
    table = read_table(path, "write it again with `python -m bench trace`")
    metadata = table.schema.metadata or {}
    task = metadata.get(b"task", b"").decode(errors="replace")
    if metadata.get(b"bench.trace") != _FORMAT or task not in TASKS:
        raise TraceError(
            path, "not written by this version of `python -m bench trace`: write it again"
        )
    if not table.schema.equals(SCHEMA):
        raise TraceError(
            path,
            "the columns or their types differ from those of a trace, "
            f"{SCHEMA.names}: write the file again with `python -m bench trace`",
        )
    rows = table.to_pylist()
    if not rows:
        raise TraceError(path, "this file has no rows: write it again with `python -m bench trace`")
    groups = groupby(rows, key=lambda row: row["group"])
    return task, [_prompt(index, list(group)) for index, (_, group) in enumerate(groups)]


def _prompt(index: int, rows: list[dict[str, Any]]) -> Prompt:
    first = rows[0]
    samples = (
        Sample(tuple(Turn(**turn) for turn in row["turns"]), row["reward"], row["reward_seconds"])
        for row in rows
    )
    media = (Medium(m["content"], tuple(m["grid"])) for m in first["media"])
    times = StageTimes(**first["times"][0]) if first["times"] else None
    return Prompt(index, first["step"], first["prompt_tokens"], tuple(samples), tuple(media), times)
