"""The entry of every worker process: `python -m bench.worker JSON`.

Workers of early stages are done while trainers are still at the last step. An interpreter takes 40
to 80 ms of a core to take itself apart, more than many a worker took for all its work: with 8 hosts
on 2 cores that made a last step up to a half longer. So a worker that is done is gone at once.
"""

from __future__ import annotations

import atexit
import os
import sys

import msgspec

from bench import flow
from bench.planes import PLANES
from bench.planes.base import Worker
from bench.processes import die_with

if __name__ == "__main__":
    worker = msgspec.json.decode(sys.argv[1], type=Worker)
    die_with(worker.job.parent)
    flow.main(worker, PLANES[worker.job.plane].endpoint)
    atexit._run_exitfuncs()  # of what a plane brought along: Ray says farewell to its own
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
