"""The first stage: each rollout worker makes groups and puts each one when its slowest row is done.

All rows of a worker are written at once, as an engine with continuous batching does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.columns import rollout_fields
from bench.events import emit
from bench.media import Source
from bench.work import Work, digests


def rollout(work: Work) -> Iterator[None]:
    """Make and put the groups of this worker's share of the prompts.

    A step starts when the trainers are at most `staleness` steps behind it.
    """
    job = work.job
    mine = [p for p in job.generate() if p.index % job.hosts == work.worker.rank]
    mine.sort(key=lambda prompt: prompt.rollout_seconds)
    fields = rollout_fields(job.task)
    source = Source(job.seed, max((prompt.media_bytes for prompt in mine), default=0))
    yield
    for step in range(job.steps):
        with work.clock.timing("policy"):
            work.orders.wait_for_policy(step - job.staleness)
        work.pace.restart()
        emit("rolling", step=step, at=time.monotonic())
        for prompt in (prompt for prompt in mine if prompt.step == step):
            with work.clock.timing("rollout"):
                work.pace.until(prompt.rollout_seconds)
            with work.clock.timing("generate"):
                columns = {field.name: source.column(field, prompt) for field in fields}
            with work.clock.timing("digest"):
                told = {name: digests(values) for name, values in columns.items()}
            with work.clock.timing("put"):
                work.endpoint.put(step, prompt.index, columns)
            rows = [(prompt.index, sample) for sample in range(len(prompt.samples))]
            emit("produced", rows=rows, digests=told)
        with work.clock.timing("finish"):
            work.endpoint.finish(step)
        emit("rolled", step=step)
