"""What a trainer does with torch: TensorDicts in and out, parts of a batch, a loader.

Every test runs with both clients at one peer, and with each at a host of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

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


async def test_a_tensordict_is_made_on_a_loop(cluster: Cluster) -> None:
    cluster.start("a")
    data = rollouts([3, 2])
    async with aio.connect("a", run="test") as plane:
        part = await plane.partition("p", {"train": ["ids"]})
        await part.put(data)
        async with await part.claim("train", rows=2) as batch:
            made = await batch.tensordict(["ids", "score"], layout="padded", mask="mask")
            assert made["ids"].shape == (2, 3) and made["mask"].sum() == 5
            pair = await batch.torch("ids", "padded", mask=True)
            assert torch.equal(pair[0], made["ids"])
            with pytest.raises(dataplane.InvalidCall, match="mask=True goes with"):
                await batch.torch("ids", mask=True)
