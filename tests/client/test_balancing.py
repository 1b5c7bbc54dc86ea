"""Layouts of a trainer's ranks: in step whatever the rows weigh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.balancing import Layout, even_parts, packed, parts
from dataplane.errors import InvalidRows
from dataplane.wire.tables import PlanRows, Shape

shapes = st.builds(
    Shape,
    ranks=st.integers(1, 5),
    minibatches=st.integers(1, 4),
    budget_tag=st.sampled_from([None, "cost"]),
    budget=st.floats(1, 400),
    balance=st.sampled_from([None, "cost", "other"]),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    remainder=st.sampled_from(["pad", "drop"]),
)
costs = st.lists(st.integers(0, 200), min_size=1, max_size=40)


def plan_rows(weights: list[int], size: int = 0) -> PlanRows:
    """Groups of `size` rows; 0: none."""
    raw = np.array(weights, "<f8").tobytes()
    groups = (np.arange(len(weights)) // size).astype("<u4").tobytes() if size else b""
    other = np.array(weights[::-1], "<f8").tobytes()
    return PlanRows(len(weights), groups, {"cost": raw, "other": other})


@given(shapes, costs, st.integers(0, 4))
def test_ranks_take_as_many_steps_and_every_row_its_turn(
    shape: Shape, weights: list[int], size: int
) -> None:
    rows_in = plan_rows(weights, size)
    units, every = -(-len(weights) // (size or 1)), shape.ranks * shape.minibatches
    if shape.remainder == "drop" and units < every:
        with pytest.raises(InvalidRows, match="leaves no rows"):
            Layout(shape, rows_in)
        return
    layout, again = Layout(shape, rows_in), Layout(shape, rows_in)
    left_out = units % every if shape.remainder == "drop" else 0
    kept: list[set[int]] = []
    for epoch in range(shape.epochs):
        turns: list[int] = []
        mine: list[set[int]] = [set() for _ in range(shape.ranks)]
        for number in range(shape.minibatches):
            minis = [layout.mini(rank, epoch, number) for rank in range(shape.ranks)]
            assert minis == [again.mini(rank, epoch, number) for rank in range(shape.ranks)]
            assert len({len(mini) for mini in minis}) == 1
            for rank, mini in enumerate(minis):
                rows = [row for micro in mini for row in micro if row >= 0]
                for micro in mini:
                    cost = sum(weights[row if row >= 0 else ~row] for row in micro)
                    assert micro and (
                        shape.budget_tag is None or len(micro) == 1 or cost <= shape.budget
                    )
                groups = {row // size for row in rows} if size else set()
                whole = {row for row in range(len(weights)) if size and row // size in groups}
                assert whole <= set(rows), "groups stay together"
                turns += rows
                mine[rank] |= set(rows)
        assert len(set(turns)) == len(turns)
        assert units - len({row // (size or 1) for row in turns}) == left_out
        kept = kept or mine
        assert mine == kept, "a rank keeps its rows"


def test_an_epoch_shuffles_anew_and_another_seed_otherwise() -> None:
    rows = plan_rows([1] * 64)
    one = Layout(Shape(ranks=2, minibatches=4, epochs=2), rows)
    other = Layout(Shape(ranks=2, minibatches=4, epochs=2, seed=1), rows)
    assert one.mini(0, 0, 0) != one.mini(0, 1, 0)
    assert one.mini(0, 0, 0) != other.mini(0, 0, 0)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_parts_of_long_tailed_rows_weigh_nearly_the_same(count: int) -> None:
    weights = np.random.default_rng(1).lognormal(8, 1, 1024).clip(max=32_000).tolist()
    for made in (even_parts(weights, count), parts(weights, count)):
        assert sorted(at for part in made for at in part) == list(range(1024))
        sums = [sum(weights[at] for at in part) for part in made]
        assert max(sums) / (sum(weights) / count) < 1.01
    assert {len(part) for part in even_parts(weights, count)} == {1024 // count}


@pytest.mark.parametrize(
    ("rows", "ranks", "minis", "most"), [(512, 8, 4, 1.06), (8192, 64, 16, 1.03)]
)
def test_ranks_are_even_in_every_step_and_not_just_over_an_epoch(
    rows: int, ranks: int, minis: int, most: float
) -> None:
    """A step takes as long as its heaviest rank."""
    weights = np.random.default_rng(1).lognormal(8, 1, rows).clip(max=32_000).tolist()
    weighed = PlanRows(rows, weights={"cost": np.array(weights, "<f8").tobytes()})
    layout = Layout(Shape(ranks=ranks, minibatches=minis, balance="cost"), weighed)
    heaviest = 0.0
    for number in range(minis):
        steps = (layout.mini(rank, 0, number) for rank in range(ranks))
        heaviest += max(sum(weights[row] for row in micro) for (micro,) in steps)
    assert heaviest / (sum(weights) / ranks) < most


def test_no_step_is_of_padding_alone() -> None:
    for seed in range(20):
        layout = Layout(Shape(ranks=2, minibatches=4, seed=seed), plan_rows([1] * 10))
        for number in range(4):
            steps = [row for rank in range(2) for row in layout.mini(rank, 0, number)[0]]
            assert sum(row >= 0 for row in steps) >= 2


def test_what_is_packed_has_few_parts_and_none_is_too_large() -> None:
    weights = np.random.default_rng(2).integers(1, 120, 500).tolist()
    made = packed(weights, 100)
    assert sorted(at for part in made for at in part) == list(range(500))
    assert all(len(part) == 1 or sum(weights[at] for at in part) <= 100 for part in made)
    large = [weight for weight in weights if weight > 100]
    assert len(made) <= len(large) + 1.25 * (sum(weights) - sum(large)) / 100
