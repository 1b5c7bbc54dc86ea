"""Layouts of a trainer's ranks: in step whatever the rows weigh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.metadata.plans import PADDING, Shape, even_parts, lay_out, parts

shapes = st.builds(
    Shape,
    ranks=st.integers(1, 5),
    minibatches=st.integers(1, 4),
    budget=st.none() | st.floats(1, 400),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    remainder=st.sampled_from(["pad", "drop"]),
)
row_weights = st.lists(st.integers(0, 200).map(float), max_size=40)


@given(shapes, row_weights, st.integers(1, 4))
def test_every_rank_takes_as_many_steps_and_every_row_its_turn(
    shape: Shape, weighed: list[float], size: int
) -> None:
    weights = np.array(weighed, np.float64)
    rows = list(range(len(weighed)))
    units = [rows[at : at + size] for at in range(0, len(rows), size)]
    plans = lay_out(shape, units, weights)
    assert len(plans) == shape.ranks
    steps = [[[len(mini) for mini in epoch] for epoch in plan] for plan in plans]
    assert all(one == steps[0] for one in steps)
    assert [len(epoch) for epoch in plans[0]] == [shape.minibatches] * shape.epochs
    for epoch in range(shape.epochs):
        taken = [
            row for plan in plans for mini in plan[epoch] for micro in mini for row in micro
            if row != PADDING
        ]  # fmt: skip
        assert len(set(taken)) == len(taken)
        if shape.remainder == "pad":
            assert sorted(taken) == rows
        else:
            assert len(units) - len({row // size for row in taken}) == len(units) % (
                shape.ranks * shape.minibatches
            )
    for plan in plans:  # a rank keeps its rows
        mine = [
            {r for mini in epoch for micro in mini for r in micro} - {PADDING} for epoch in plan
        ]
        assert all(one == mine[0] for one in mine)


@given(shapes, row_weights)
def test_no_micro_batch_is_heavier_than_the_budget_unless_it_is_one_row(
    shape: Shape, weighed: list[float]
) -> None:
    weights = np.array(weighed, np.float64)
    plans = lay_out(shape, [[row] for row in range(len(weighed))], weights)
    for micro in (micro for plan in plans for epoch in plan for mini in epoch for micro in mini):
        real = [row for row in micro if row != PADDING]
        assert micro or shape.budget is None
        if shape.budget is not None:
            assert len(micro) == 1 or weights[real].sum() <= shape.budget


@given(shapes, row_weights)
def test_whoever_computes_it_gets_the_same(shape: Shape, weighed: list[float]) -> None:
    units = [[row] for row in range(len(weighed))]
    weights = np.array(weighed, np.float64)
    assert lay_out(shape, units, weights) == lay_out(shape, units, weights)


def test_a_group_stays_at_one_rank_and_in_one_mini_batch() -> None:
    units = [list(range(at, at + 4)) for at in range(0, 64, 4)]
    weights = np.random.default_rng(0).lognormal(5, 1, 64)
    for plan in lay_out(Shape(ranks=4, minibatches=2, budget=900.0), units, weights):
        for mini in plan[0]:
            here = {row for micro in mini for row in micro}
            assert all(here >= set(unit) or not here & set(unit) for unit in units)


def test_an_epoch_shuffles_anew_and_another_seed_otherwise() -> None:
    units = [[row] for row in range(64)]
    one = lay_out(Shape(ranks=2, minibatches=4, epochs=2), units, np.ones(64))
    other = lay_out(Shape(ranks=2, minibatches=4, epochs=2, seed=1), units, np.ones(64))
    assert one[0][0] != one[0][1]
    assert one[0][0] != other[0][0]


@pytest.mark.parametrize("count", [2, 8, 64])
def test_parts_of_long_tailed_rows_weigh_nearly_the_same(count: int) -> None:
    weights = np.random.default_rng(1).lognormal(8, 1, 1024).clip(max=32_000).tolist()
    for made in (even_parts(weights, count), parts(weights, count)):
        assert sorted(at for part in made for at in part) == list(range(1024))
        sums = [sum(weights[at] for at in part) for part in made]
        assert max(sums) / (sum(weights) / count) < 1.01
    assert {len(part) for part in even_parts(weights, count)} == {1024 // count}
