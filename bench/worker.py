"""The entry of every worker process: `python -m bench.worker JSON`."""

from __future__ import annotations

import sys

import msgspec

from bench import flow
from bench.planes import PLANES
from bench.planes.base import Worker
from bench.processes import die_with

if __name__ == "__main__":
    worker = msgspec.json.decode(sys.argv[1], type=Worker)
    die_with(worker.job.parent)
    plane = PLANES[worker.plane]
    flow.main(worker, plane.pieces, plane.attach)
