"""What is reported of transports: figures out of samples and counts, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from bench.transports.pulls import Counted
from bench.transports.shapes import Shape

_COLUMNS = ("GB/s", "bare loop", "of it", "copies\na byte", "exchanges\na batch")


def figures(
    shape: Shape,
    taken: Mapping[str, list[float]],
    written_bytes: int,
    before: Counted,
    after: Counted,
) -> dict[str, float]:
    """Of one transport and shape.

    taken: seconds of pulls and of bare loops, taken in turn. written_bytes: that this library wrote
    to bring the batches from one arena into a user's hands; what kernel and engine copy inside is
    theirs. before, after: the counts of both peers around the batches.
    """
    pull_s, loop_s = np.array(taken["pull_s"]), np.array(taken["loop_s"])
    batches = len(pull_s)
    exchanges = after.requests + after.bulk_requests - before.requests - before.bulk_requests
    return {
        "GBps": shape.nbytes / 1e9 / float(np.median(pull_s)),
        "ceiling_GBps": shape.nbytes / 1e9 / float(np.median(loop_s)),
        "of_ceiling": float(np.median(loop_s / pull_s)),
        "copies_per_byte": written_bytes / (batches * shape.nbytes),
        "exchanges_per_batch": exchanges / batches,
    }


def table(transports: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line for each transport and shape, and for each transport that was not run."""
    shown = Table(
        title="pulls between two peers, beside the same engine without them",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown.add_column("transport", no_wrap=True)
    shown.add_column("batch", no_wrap=True)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    for name, shapes in transports.items():
        if shapes.get("status") == "not run":
            shown.add_row(name, "not run")
            continue
        for shape, told in shapes.items():
            shown.add_row(
                name,
                shape,
                f"{told['GBps']:.2f}",
                f"{told['ceiling_GBps']:.2f}",
                f"{told['of_ceiling']:.2f}",
                f"{told['copies_per_byte']:.2f}",
                f"{told['exchanges_per_batch']:.1f}",
            )
    return shown


def reasons(transports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each transport that was not run."""
    return [
        f"{name} was not run: {told['error']}"
        for name, told in transports.items()
        if told.get("status") == "not run"
    ]
