"""`dataplane checkpoint export`: write the rows of a checkpoint as Parquet files."""

from __future__ import annotations

import argparse
import dataclasses
import json

from dataplane import progress
from dataplane.client._sync.save import path_of
from dataplane.client.checkpoint import export as files
from dataplane.errors import counted, sized
from dataplane.launch.rundir import Find


def export(arguments: argparse.Namespace, find: Find) -> int:
    """find: not called, because a checkpoint needs no run."""
    source, target = path_of(arguments.directory), path_of(arguments.output)
    with progress.bar("export") as bar:
        partitions = files.export(source, target, arguments.field, bar)
    if arguments.json:
        print(json.dumps({"partitions": [*map(dataclasses.asdict, partitions)]}), flush=True)
        return 0
    lines = [
        f"  {one.file}: partition {one.name}, {counted(one.rows, 'row')}, {sized(one.bytes)}"
        for one in partitions
    ]
    written = f"wrote {counted(len(partitions), 'partition')} to {arguments.output}"
    print("\n".join([written, *lines]), flush=True)
    return 0
