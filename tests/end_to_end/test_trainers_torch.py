"""What a trainer does with torch: TensorDicts in and out, parts of a batch, a loader.

Every test runs with both clients at one peer, and with each at a host of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import dataplane
from dataplane import aio
from tests.end_to_end.conftest import Cluster
from tests.end_to_end.hosts import Hosts, one_and_two


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, Hosts]]:
    with one_and_two() as running:
        yield running


@pytest.fixture(params=["one", "two"])
def hosts(both: dict[str, Hosts], request: pytest.FixtureRequest) -> Iterator[Hosts]:
    shared = both[request.param]
    yield shared
    shared.drop_everything()


def rollouts(lengths: list[int]) -> TensorDict:
    """What a rollout worker has: ragged ids and log-probabilities, position ids, texts."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])

    def nested(values: torch.Tensor, axis: int = 1) -> torch.Tensor:
        made: torch.Tensor = torch.nested.nested_tensor_from_jagged(
            values, offsets, jagged_dim=axis
        )
        return made

    return TensorDict(
        {
            "ids": nested(torch.arange(total)),
            "logp": nested(torch.full((total,), 0.5, dtype=torch.bfloat16)),
            "position_ids": nested(torch.arange(3 * total).reshape(3, total), 2),
            "score": torch.arange(float(len(lengths))),
            "chat": NonTensorStack(
                *({"turn": i, "image": torch.ones(i)} for i in range(len(lengths)))
            ),
        },
        batch_size=[len(lengths)],
    )


def test_a_tensordict_goes_through_a_stage(hosts: Hosts) -> None:
    here, there = hosts.partition({"train": ["ids"]})
    data = rollouts([3, 700, 5, 5])
    ref = here.put(data, key=[0, 1, 2, 3])
    assert ref.fields == ("ids", "logp", "position_ids", "score", "chat")
    with there.claim("train", rows=4) as batch:
        made = batch.tensordict(["ids", "logp", "position_ids", "score", "chat"])
        assert made.batch_size == (4,) and made["position_ids"]._ragged_idx == 2
        order = [int(key) for key in batch.keys]
        for row, of in enumerate(order):
            for name in ("ids", "logp", "position_ids"):
                assert torch.equal(made[name].unbind()[row], data[name].unbind()[of])
        assert made["score"].tolist() == [float(of) for of in order]
        chat = made.get("chat").tolist()
        assert [one["turn"] for one in chat] == order and chat[0]["image"].dtype == torch.float32
        weighted = made["ids"] * made["logp"]
        assert weighted.offsets() is made["ids"].offsets()
        alone = batch.torch("ids", "jagged") * batch.torch("logp", "jagged")
        assert torch.equal(alone.values(), weighted.values())
        padded, mask = batch.torch("ids", "padded", side="left", multiple=64, mask=True)
        assert padded.shape == mask.shape == (4, 704) and mask.sum() == 713


def test_names_and_tags_may_be_tensors(hosts: Hosts) -> None:
    here, there = hosts.partition({"train": ["x"]})
    ids: Any = torch.arange(4)
    lengths = [torch.tensor(1.5), 2, torch.tensor(True), torch.tensor(3)]
    ref = here.put({"x": ids}, key=ids, group=ids // 2, tags={"length": lengths, "step": ids[1]})
    assert (ref.keys, ref.groups) == ([0, 1, 2, 3], (0, 1))
    rows = there.get(keys=ids[2:])
    assert (rows.keys, rows.group_ids) == ([2, 3], [1, 1])
    assert rows.tags == {"length": [True, 3], "step": [1, 1]}
    here.put({"x": ids[:1]}, group=ids[2])
    assert there.drop(groups=ids[:2]).rows == 4


async def test_a_tensordict_is_made_on_a_loop(alone: Cluster) -> None:
    data = rollouts([3, 2])
    async with aio.connect("a", run="test") as plane:
        part = await plane.partition("p", {"train": ["ids"]})
        await part.put(data)
        async with await part.claim("train", rows=2) as batch:
            made = await batch.tensordict(["ids", "score"], layout="padded", mask="mask")
            assert made["ids"].shape == (2, 3) and made["mask"].sum() == 5
            pair = await batch.torch("ids", "padded", mask=True)
            assert torch.equal(pair[0], made["ids"])
            with pytest.raises(dataplane.InvalidCall, match="mask=True needs"):
                await batch.torch("ids", mask=True)


def test_a_part_of_a_batch_is_what_its_rows_are(hosts: Hosts) -> None:
    here, there = hosts.partition({"train": ["ids"]}, group_size=2, free="drop")
    data = rollouts([1, 2, 3, 4])
    here.put(data, key=["a", "b", "c", "d"], group=[0, 0, 1, 1], tags={"n": [1, 2, 3, 4]})
    with there.claim("train", groups=2) as batch:
        part = batch[1:3]
        assert isinstance(part, dataplane.Batch) and len(part) == 2
        assert (part.keys, part.tags["n"]) == (batch.keys[1:3], batch.tags["n"][1:3])
        assert part.group_ids == batch.group_ids[1:3]
        assert [len(group) for group in part.groups()] == [1, 1]
        assert [len(row) for row in part["ids"]] == [len(row) for row in batch["ids"]][1:3]
        assert part.torch("position_ids", "jagged").shape[:2] == (2, 3)  # fetched for all of it
        assert "position_ids" in batch
        back = batch.rows([3, 0])
        assert back.keys == [batch.keys[3], batch.keys[0]] and back[:1].keys == back.keys[:1]
        assert len(batch.rows([True, False, True, False])) == 2
        assert len(batch.tensordict(["ids"])[1:3]) == len(part.tensordict(["ids"])) == 2
        bad: list[Any] = [[4], [0, 0], [0.5], [[1]]]
        for wrong in bad:
            with pytest.raises(dataplane.InvalidRows, match="positions"):
                batch.rows(wrong)
    read = here.get(["a", "b", "c"])
    assert read[1:].keys == ["b", "c"] and read[1:].tensordict(["score"])["score"].tolist() == [
        1,
        2,
    ]


def test_parts_of_a_batch_are_acked_and_released_alone(hosts: Hosts) -> None:
    here, there = hosts.partition({"train": ["x"], "after": ["y"]}, free="acked")
    here.put({"x": list(range(8))}, key=list(range(8)))
    batch = there.claim("train", rows=8)
    first, second, third = batch[0:3], batch[3:5], batch.rows([6, 5])
    first.add(y=[10 * x for x in first["x"]])
    first.ack()
    assert (first.state, second.state, batch.state) == ("acked", "leased", "leased")
    with pytest.raises(dataplane.LeaseExpired, match="this part of the batch are already acked"):
        first.ack()
    second.release(tags={"tried": [1, 2]})
    again = there.claim("train", rows=2)
    assert sorted(again["x"]) == sorted(second["x"]) and again.tags["tried"] in ([1, 2], [2, 1])
    third.add({"y": [x * 10 for x in third["x"]]})
    with pytest.raises(dataplane.FieldExists):
        batch.rows([6]).add(y=[1])
    batch.rows([7]).add(TensorDict({"y": torch.tensor([70])}, [1]))
    batch.ack()
    again.add(y=[x * 10 for x in again["x"]])
    again.ack()
    assert (batch.state, third.state) == ("acked", "acked")
    done = there.claim("after", rows=7)
    assert sorted(int(y) for y in done["y"]) == sorted(10 * int(key) for key in done.keys)
    left = [key for key in batch.keys if key not in done.keys]
    assert here.get(left, ["x"])["x"][0] == left[0]
    done.ack()


@pytest.mark.parametrize("size", [1, 300, 3000])
def test_what_was_added_to_a_batch_is_acked_in_parts(hosts: Hosts, size: int) -> None:
    here, there = hosts.partition({"train": ["x"], "after": ["y", "z"]})
    n = 40
    here.put({"x": list(range(n))}, key=list(range(n)))
    with there.claim("train", rows=n) as batch:
        keys = [int(key) for key in batch.keys]
        batch.add(y=[torch.full((size,), key) for key in keys])
        batch.add(z=[{"of": key, "a": torch.full((3,), key)} for key in keys])
        for start in range(0, n - 10, 10):
            batch[start : start + 10].ack()
        batch.rows([n - 1, n - 3]).release()
    with there.claim("after", rows=n - 2) as done:
        for key, y, z in zip(done.keys, done["y"], done["z"], strict=True):
            assert y.tolist() == [key] * size
            assert z["of"] == key and z["a"].tolist() == [key] * 3
        assert set(keys) - set(done.keys) == {keys[n - 1], keys[n - 3]}
    there.claim("train", rows=2).release()


async def test_parts_are_acked_on_a_loop(alone: Cluster) -> None:
    async with aio.connect("a", run="test") as plane:
        part = await plane.partition("p", {"train": ["x"]})
        await part.put({"x": list(range(4))})
        batch = await part.claim("train", rows=4)
        async with batch[:2] as first:
            await first.add({"y": [1, 2]})
            assert (await first.tensordict(["x"]))["x"].tolist() == list(first["x"])
        assert (first.state, batch.state) == ("acked", "leased")
        await batch.rows([2, 3]).release()
        assert batch.state == "released"
