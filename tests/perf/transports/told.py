"""What is reported of transports: figures out of samples and counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.perf.transports.pulls import Counted
from tests.perf.transports.shapes import Shape


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
