"""`dataplane rows` and `dataplane get`, of a real peer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dataplane import cli
from tests.end_to_end.conftest import Cluster


def test_rows_are_looked_at_from_a_shell_and_stay_as_they_are(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def out(*arguments: str) -> Any:
        assert cli.main([*arguments, "--peer", "a", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def refused(*arguments: str) -> str:
        assert cli.main([*arguments, "--peer", "a"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        return told

    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("step-12", {"reward": ["tokens"], "train": ["score"]}, group_size=2)
        tokens = [np.arange(5), np.arange(3)]
        part.put({"tokens": tokens}, key=["k0", 1], group="g", tags={"version": 7})
        part.put({"tokens": tokens}, key=["k2", "k3"], group="h", tags={"version": 8})
        part.put({"score": [0.5]}, key=["k0"])
        batch = part.claim("reward", groups=1, timeout=20)

        found = out("rows", "step-12", "--where", "version=7")
        states = [row.pop("states") for row in found["shown"]]
        assert found["shown"] == [
            {"key": "k0", "group": "g", "tags": {"version": 7}, "fields": ["score", "tokens"]},
            {"key": 1, "group": "g", "tags": {"version": 7}, "fields": ["tokens"]},
        ]
        assert {one["reward"] for one in states} == {"leased"}
        assert [one["train"] for one in states] == ["ready", "pending"]
        assert (found["rows"], found["more"]) == (4, False)
        found = out("rows", "step-12", "--limit", "3", "--stage", "reward")
        assert [row["states"] for row in found["shown"]] == [
            {"reward": state} for state in ("leased", "leased", "ready")
        ]
        assert found["more"]

        row = out("get", "step-12", "1")
        assert row["key"] == 1 and row["fields"]["tokens"]["shape"] == [3]
        assert row["fields"]["tokens"]["preview"] == "0, 1, 2"
        assert list(out("get", "step-12", "k0", "--field", "score")["fields"]) == ["score"]

        assert "no partition 'stp-12' (did you mean 'step-12'?)" in refused("rows", "stp-12")
        assert "no row with key 'k9'" in (told := refused("get", "step-12", "k9")) and "k0" in told
        assert "no row has a field 'scor'" in refused("get", "step-12", "k0", "--field", "scor")
        assert "--limit 0 is out of range: use a value from 1 to 1000" in refused(
            "rows", "step-12", "--limit", "0"
        )
        batch.ack()

        part.put({"score": [1, 2], "tokens": tokens}, key=[7, "7"], group=["7", 7], tags={"v": "7"})
        shown = [out("get", "step-12", key)["fields"]["score"]["preview"] for key in ("7", '"7"')]
        assert shown == ["1", "2"]
        assert cli.main(["rows", "step-12", "--peer", "a", "--where", 'v="7"']) == 0
        table = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]]
        assert table == [["7", '"7"', 'v="7"'], ['"7"', "7", 'v="7"']]
        part.put({"at": np.array(["2030-01-02", "NaT"], "M8[ns]")}, key=["k0", 1])
        shown = [out("get", "step-12", key)["fields"]["at"]["preview"] for key in ("k0", "1")]
        assert shown == ["2030-01-02T00:00:00.000000000", "NaT"]
        assert plane.stats()["partitions"].keys() <= {"step-12"}
