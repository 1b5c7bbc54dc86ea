"""verl's classic path on Ray: every stage's results go through the driver.

The driver fetches the results of all workers of a stage from the object store, concatenates them,
reorders the rows (longest groups first, dealt in turn, as its balancing does), splits them into a
chunk a worker, puts the chunks and hands them to the next stage; then the same again. It holds the
whole batch. Media are repeated for every row of a group unless dedup is on, which verl has not.

In its favour: nothing is padded, only a stage's columns are sent to it if so asked, and groups stay
whole (verl's rows do not, which sends a prompt's media to several ranks).
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from bench.columns import DEDUP
from bench.events import emit
from bench.planes import ray_cluster
from bench.planes.base import Array, Batch, Columns, Endpoint, Group, Job, Moved, Service, Worker
from bench.planes.ray_board import Mailbox
from bench.planes.ray_store import RayPlane, nodes_of, shareable, written
from bench.processes import die_with

Groups = dict[int, dict[str, list[Array]]]  # by prompt and field


class RayDriverPlane(RayPlane):
    """The driver is the cluster's first service."""

    name = "ray-driver"
    dedup_variants = (False, True)

    def services(self) -> list[Service]:
        head = [sys.executable, "-m", "bench.planes.ray_driver"]
        head.append(msgspec.json.encode(self.job).decode())
        return ray_cluster.services(nodes_of(self.job), head=head)

    @classmethod
    def attach(cls, worker: Worker) -> Endpoint:
        return DriverEndpoint(worker)


class Packed(msgspec.Struct, frozen=True):
    """Rows of one field, concatenated, as a DataProto has them. Shared rows are one part."""

    flat: Array
    shapes: list[tuple[int, ...]]  # of each row
    parts: list[tuple[int, int]]  # of each row: where it starts and ends in `flat`

    def rows(self) -> list[Array]:
        """Views. Rows of one part are one object, so that they are known as such again."""
        views: dict[tuple[int, int], Array] = {}
        for part, shape in zip(self.parts, self.shapes, strict=True):
            if part not in views:
                views[part] = self.flat[slice(*part)].reshape(shape)
        return [views[part] for part in self.parts]


def concatenated(values: Sequence[Array], dedup: bool) -> Packed:
    """A copy of the rows in one piece; with dedup an array that several rows share is one part."""
    pieces: list[Array] = []
    parts: list[tuple[int, int]] = []
    known: dict[int, tuple[int, int]] = {}
    end = 0
    for value in values:
        part = known.get(id(value)) if dedup else None
        if part is None:
            part = known[id(value)] = (end, end + value.size)
            end += value.size
            pieces.append(value.reshape(-1))
        parts.append(part)
    return Packed(np.concatenate(pieces), [value.shape for value in values], parts)


class Driver:
    """The process that everything passes through."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._mail = ray_cluster.actor(Mailbox)
        self._copied: Counter[str] = Counter()

    def run(self) -> Moved:
        """All steps. A step's stages run one after the other, reward and reference together."""
        import ray

        for step in range(self._job.steps):
            batch = self._gathered(("rollout", step), len(written(self._job, step)))
            for stages in self._job.phases():
                count = len(batch)
                held = [
                    reference for stage in stages for reference in self._sent(step, stage, batch)
                ]
                for stage in stages:
                    added = self._gathered((stage, step), count)
                    batch = {p: columns | added[p] for p, columns in batch.items() if p in added}
                del held
        ray.get(self._mail.finish.remote())
        return Moved(**self._copied)

    def _gathered(self, queue: tuple[str, int], count: int) -> Groups:
        """The results of a stage, concatenated over its workers and put into the next order."""
        import ray

        results: Groups = {}
        for prompt, host, nbytes, references in ray.get(self._mail.take.remote(queue, count)):
            if references is None:  # the stage has dropped it
                continue
            self._copied["across"] += nbytes if host else 0
            fetched = ray.get(list(references.values()))
            results[prompt] = dict(zip(references, fetched, strict=True))
        if not any(results.values()):
            return results
        order = sorted(results, key=lambda prompt: -_weight(results[prompt]))
        first = self._together(results, list(results))
        return self._together(first, order)

    def _together(self, groups: Groups, order: list[int]) -> Groups:
        """A copy of all groups in this order, a field in one piece: concatenated, or reordered."""
        whole: Groups = {prompt: {} for prompt in order}
        for field in groups[order[0]]:
            packed = concatenated([v for p in order for v in groups[p][field]], self._dedup(field))
            self._copied["copied_out"] += packed.flat.nbytes
            rows = deque(packed.rows())
            for prompt in order:
                whole[prompt][field] = [rows.popleft() for _ in groups[prompt][field]]
        return whole

    def _dedup(self, field: str) -> bool:
        return self._job.dedup and field in DEDUP

    def _sent(self, step: int, stage: str, batch: Groups) -> list[Any]:
        """Put a chunk for each worker of a stage, and tell them; returns the references. The ranks
        of a trainer share the object: Ray brings it to their host once."""
        import ray

        job = self._job
        workers = job.trainers if stage == "train" else job.hosts
        held = []
        copies = job.tp if stage == "train" else 1
        for rank in range(workers):
            chunk = list(batch)[rank::workers]
            packed = {}
            for field in job.stages()[stage] if chunk else ():
                rows = [value for prompt in chunk for value in batch[prompt][field]]
                packed[field], nbytes = shareable(rows, self._dedup(field))
                self._copied["copied_in"] += nbytes
                self._copied["across"] += nbytes if job.host_of(stage, rank * copies) else 0
            held.append(ray.put(packed))
            offer = (chunk, [held[-1]])
            for nth in range(rank * copies, (rank + 1) * copies):
                ray.get(self._mail.offer.remote((stage, step, nth), offer))
        return held


def _weight(group: Mapping[str, Sequence[Array]]) -> int:
    return sum(value.nbytes for values in group.values() for value in values)


class DriverEndpoint(Endpoint):
    """A worker of a stage: it is given a chunk, and gives back results by reference."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._mail = ray_cluster.attach(worker.address)
        self._copied_in = 0

    def put(self, step: int, prompt: int, columns: Columns) -> None:
        self._give("rollout", step, prompt, columns)

    def _give(self, stage: str, step: int, prompt: int, columns: Columns | None) -> None:
        """A group's results as objects, None for a dropped group. What the driver fetches crosses
        if it is elsewhere."""
        import ray

        references: dict[str, Any] | None = None if columns is None else {}
        total = 0
        for field, values in (columns or {}).items():
            assert references is not None
            form, nbytes = shareable(values, self._worker.job.dedup and field in DEDUP)
            references[field] = ray.put(form)
            total += nbytes
        self._copied_in += total
        result = (prompt, self._worker.host, total, references)
        ray.get(self._mail.offer.remote((stage, step), result))

    def finish(self, step: int) -> None:
        """The driver knows how many groups a step has."""

    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        import ray

        name = (stage, step, self._worker.rank)
        prompts, (reference,) = ray.get(self._mail.take.remote(name))[0]
        chunk = ray.get(reference)
        samples = self._worker.job.samples
        for nth, prompt in enumerate(prompts):
            rows = slice(nth * samples, (nth + 1) * samples)
            group = Group(prompt, {field: values[rows] for field, values in chunk.items()})
            yield group
            if not self._worker.tp_rank:  # the others have the same
                self._give(stage, step, prompt, None if group.dropped else group.added)
            del group

    def moved(self) -> Moved:
        return Moved(copied_in=self._copied_in)

    def close(self) -> None:
        """What a process has put goes with it: it stays until the job is over."""
        import ray

        ray.get(self._mail.finished.remote())
        ray.shutdown()


def main(job: Job, nodes: ray_cluster.Nodes) -> None:
    """The driver's process: the cluster, the job, its counters."""
    with ray_cluster.cluster(nodes) as address:
        driver = Driver(job)
        emit("ready", cluster=address)
        emit("done", moved=msgspec.to_builtins(driver.run()))
        ray_cluster.wait_for_the_end()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Job)
    die_with(given.parent)
    main(given, msgspec.json.decode(sys.argv[2], type=ray_cluster.Nodes))
