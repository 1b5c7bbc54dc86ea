"""`dataplane checkpoint export`: write the rows of a checkpoint as Parquet files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from dataplane import progress
from dataplane.client._sync.save import path_of
from dataplane.client.checkpoint.export import ExportedPartition
from dataplane.client.checkpoint.export import export as exported
from dataplane.errors import counted, sized


def export(directory: str, output: str, fields: Sequence[str] | None) -> list[ExportedPartition]:
    """Write the files, and return what is in them."""
    with progress.bar("export") as bar:
        return exported(path_of(directory), path_of(output), fields, bar)


def show(partitions: list[ExportedPartition], output: str, as_json: bool) -> int:
    """Print the result of `export`, and return the exit code."""
    if as_json:
        print(json.dumps({"partitions": [*map(dataclasses.asdict, partitions)]}), flush=True)
        return 0
    lines = [
        f"  {one.file}: partition {one.name}, {counted(one.rows, 'row')}, {sized(one.bytes)}"
        for one in partitions
    ]
    written = f"wrote {counted(len(partitions), 'partition')} to {output}"
    print("\n".join([written, *lines]), flush=True)
    return 0
