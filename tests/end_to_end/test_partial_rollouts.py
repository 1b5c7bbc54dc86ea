"""Rollouts that are interrupted, and go on elsewhere with what there was of them."""

from __future__ import annotations

import numpy as np
import pytest

import dataplane
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.hosts import held

STAGES = {"rollout": ["prompt"], "train": ["tokens"]}


def test_a_partial_rollout_goes_on_on_another_host(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        for name in "pq":  # one has its shard here, one there, as it comes
            part, far = here.partition(name, stages=STAGES), there.partition(name)
            part.put({"prompt": ["1?", "2?", "3?"]}, key=["1", "2", "3"])
            batch = part.claim("rollout", rows=3, timeout=30)
            assert batch.get("so_far") == [None] * 3 and "so_far" not in batch
            long, short = np.arange(50_000), [{"text": "so", "logp": np.ones(3)}] * 2
            batch.rows([0, 2]).release(
                values={"so_far": [long, long[:9]], "state": short}, tags={"tried": 1}
            )
            batch.ack()  # of what is left: the one in the middle
            with far.claim("rollout", rows=2, timeout=30, fields=["prompt"]) as again:
                got = dict(zip(again.keys, again["so_far"], strict=True))
                assert np.array_equal(got["1"], long) and got["3"].tolist() == list(range(9))
                assert again["state"][1]["logp"].tolist() == [1.0] * 3
                assert again.tags["tried"] == [1, 1]
                again.release()
            with far.claim("rollout", rows=2, timeout=30, fields=["prompt", "so_far"]) as again:
                assert {len(one) for one in again["so_far"]} == {50_000, 9}
                again.add(tokens=[np.append(one, 7) for one in again["so_far"]])
            with part.claim("train", rows=2, timeout=30) as done:
                assert {len(one) for one in done["tokens"]} == {50_001, 10}
                with pytest.raises(dataplane.FieldUnknown):
                    done["so_far"]
            del batch, again, got, done
            part.drop()
        until(lambda: not held(here) and not held(there), "progress was freed", 10)


def test_progress_of_a_lease_that_has_ended_is_refused(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = plane.partition("p", stages=STAGES)
        part.put({"prompt": ["1?", "2?"]})
        batch = part.claim("rollout", rows=2, timeout=30)
        with pytest.raises(dataplane.FieldExists, match="under another field name"):
            batch.release(values={"prompt": ["x", "y"]})
        with pytest.raises(dataplane.InvalidRows):
            batch.release(values={"so_far": ["x"]})
        batch.release(values={"so_far": ["x", "y"]})
        with pytest.raises(dataplane.LeaseExpired):
            batch.release(values={"so_far": ["z", "z"]})
        assert part.claim("rollout", rows=2, timeout=30).get("so_far") == ["x", "y"]
