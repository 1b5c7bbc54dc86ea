"""The public surface against a model, on one real peer and on three: any calls in any order.

The model is a dict of rows and who had them. A call goes through a client of any of the peers; what
it answers, and what is left at the end, must be what the model says. `make surface` tries more.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import dataplane
from dataplane import Batch, Plane
from tests.end_to_end.conftest import until
from tests.end_to_end.hosts import running, warm

EXAMPLES = int(os.environ.get("SURFACE_EXAMPLES", "5"))
STEPS = 20
CALL_S = 30.0
NEEDS = {"s": {"x"}, "t": {"x", "y"}}
SIZES = st.sampled_from([1, 3, 700, 5000])
"""Values that go inline, that share a chunk, and that have a chunk of their own."""
_numbers = itertools.count()


def value(seed: int, size: int) -> np.ndarray:
    return np.arange(seed, seed + size)


@dataclass
class Row:
    fields: dict[str, np.ndarray]
    tag: int
    stages: dict[str, str] = field(default_factory=lambda: dict.fromkeys(NEEDS, "free"))


class Surface(RuleBasedStateMachine):
    """One partition; `planes` are set by the test that runs it."""

    planes: list[Plane]

    def __init__(self) -> None:
        super().__init__()
        name = f"model-{next(_numbers)}"
        stages = {stage: sorted(needs) for stage, needs in NEEDS.items()}
        self.parts = [self.planes[0].partition(name, stages, free="drop")]
        self.parts += [plane.partition(name) for plane in self.planes[1:]]
        self.rows: dict[str, Row] = {}
        self.dropped: set[str] = set()
        self.held: list[tuple[str, Batch]] = []
        self.turn = 0

    @property
    def part(self) -> dataplane.Partition:
        """The peers take turns."""
        self.turn += 1
        return self.parts[self.turn % len(self.parts)]

    def ready(self, stage: str, least: int = 0) -> set[str]:
        return {
            key
            for key, row in self.rows.items()
            if row.stages[stage] == "free"
            and row.tag >= least
            and NEEDS[stage] <= row.fields.keys()
        }

    def keys_of(self, batch: Batch) -> list[str]:
        return [str(key) for key in batch.keys]

    @rule(count=st.integers(1, 4), size=SIZES, both=st.booleans(), tag=st.integers(0, 3))
    def put(self, count: int, size: int, both: bool, tag: int) -> None:
        keys = [f"k{len(self.rows) + len(self.dropped) + n}" for n in range(count)]
        names = ("x", "y") if both else ("x",)
        columns = {name: [value(n, size) for n in range(count)] for name in names}
        self.part.put(columns, key=keys, tags={"n": tag}, timeout=CALL_S)
        for at, key in enumerate(keys):
            self.rows[key] = Row({name: columns[name][at] for name in names}, tag)

    @rule(count=st.integers(1, 3))
    def produce(self, count: int) -> None:
        first = len(self.rows) + len(self.dropped)
        keys = [f"k{first + n}" for n in range(count)]
        part, seen = self.part, []
        for key in part.producing(keys):
            part.put({"x": [value(1, 3)]}, key=[key], tags={"n": 0}, timeout=CALL_S)
            self.rows[key] = Row({"x": value(1, 3)}, 0)
            seen.append(key)
        assert seen == keys

    @rule(data=st.data())
    def wait_for_a_key(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([*sorted(self.rows), *sorted(self.dropped), "never"]))
        if key in self.rows:
            self.part.wait(key=key, timeout=CALL_S)
            return
        gone = key in self.dropped
        with pytest.raises(dataplane.RowsDropped if gone else dataplane.ClaimTimeout):
            self.part.wait(key=key, timeout=CALL_S if gone else 0.05)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), size=SIZES)
    def add_a_field(self, data: st.DataObject, size: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.rows)))
        row, fresh = self.rows[key], value(7, size)
        if "y" in row.fields:
            self.part.put({"y": [fresh]}, key=[key], replace=True, timeout=CALL_S)
        else:
            self.part.put({"y": [fresh]}, key=[key], timeout=CALL_S)
        row.fields["y"] = fresh

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tag=st.integers(0, 3))
    def retag(self, data: st.DataObject, tag: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.rows)))
        self.part.tag([key], {"n": tag}, timeout=CALL_S)
        self.rows[key].tag = tag

    @rule(stage=st.sampled_from(sorted(NEEDS)), count=st.integers(1, 3), least=st.integers(0, 2))
    def claim(self, stage: str, count: int, least: int) -> None:
        ready = self.ready(stage, least)
        where = dataplane.tag("n") >= least if least else None
        if len(ready) < count:
            with pytest.raises(dataplane.ClaimTimeout):
                self.part.claim(stage, rows=count, where=where, timeout=0.05)
            return
        batch = self.part.claim(stage, rows=count, where=where, timeout=CALL_S)
        keys = self.keys_of(batch)
        assert len(set(keys)) == count and set(keys) <= ready, (keys, ready)
        for key, found in zip(keys, batch["x"], strict=True):
            np.testing.assert_array_equal(found, self.rows[key].fields["x"])
            self.rows[key].stages[stage] = "leased"
        self.held.append((stage, batch))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), acks=st.booleans())
    def finish(self, data: st.DataObject, acks: bool) -> None:
        stage, batch = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if acks:
            batch.ack()
        else:
            batch.release()
        for key in self.keys_of(batch):
            self.rows[key].stages[stage] = "done" if acks else "free"

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rows)))
        if "leased" in self.rows[key].stages.values():
            return
        self.part.drop(keys=[key], timeout=CALL_S)
        del self.rows[key]
        self.dropped.add(key)

    @precondition(lambda self: self.dropped)
    @rule(data=st.data())
    def late_put(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.dropped)))
        with pytest.raises(dataplane.RowsDropped):
            self.part.put({"x": [1]}, key=[key], timeout=CALL_S)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.rows)))
        row, found = self.rows[key], self.part.get(keys=[key], timeout=CALL_S)
        assert set(found.fields) == row.fields.keys() and found.tags == {"n": [row.tag]}
        for name, expected in row.fields.items():
            np.testing.assert_array_equal(found[name][0], expected)

    @rule()
    def read_all(self) -> None:
        found = self.part.get(timeout=CALL_S)
        assert sorted(map(str, found.keys)) == sorted(self.rows)
        assert self.part.stats()["rows"] == len(self.rows)

    def teardown(self) -> None:
        for _, batch in self.held:
            batch.release()
        for key, row in self.rows.items():
            if "y" not in row.fields:
                self.part.put({"y": [1]}, key=[key], timeout=CALL_S)
        self.part.seal()
        assert list(self.part.producing(["late"])) == []
        for stage in NEEDS:
            left = sorted(k for k, row in self.rows.items() if row.stages[stage] != "done")
            seen = [key for batch in self.part.stream(stage, rows=3) for key in self.keys_of(batch)]
            assert sorted(seen) == left
        self.held.clear()
        self.part.drop()


@pytest.fixture(scope="module", params=["a", "abc"], ids=["one peer", "three peers"])
def planes(request: pytest.FixtureRequest) -> Iterator[list[Plane]]:
    with running(*request.param, arena="64MiB") as cluster:
        found = [cluster.connect(name) for name in request.param]
        until(
            lambda: found[0].stats()["roster"]["unprotected"] == 0 or len(found) == 1, "in sync", 60
        )
        for plane in found:
            warm(plane)
        yield found
        for plane in found:
            plane.close()


@pytest.mark.timeout(1800)
def test_any_calls_in_any_order_do_what_the_model_says(planes: list[Plane]) -> None:
    machine = type("Machine", (Surface,), {"planes": planes})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            database=None,
            derandomize=not os.environ.get("SURFACE_EXAMPLES"),
            suppress_health_check=list(HealthCheck),
        ),
    )
