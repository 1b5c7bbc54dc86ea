"""Checkpoints of planes whose hosts die: what was restored is backed up, what is read may move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataplane import DataplaneError, Partition, Plane
from dataplane.client._sync import restore
from dataplane.client.checkpoint import records
from tests.end_to_end.conftest import until
from tests.end_to_end.test_attacks_peers import Addressed, hosts
from tests.end_to_end.test_succession import GO_ON_S, check, planes, put

__all__ = ["hosts", "planes"]


def twice_kept(planes: dict[str, Plane]) -> Partition:
    """Ten rows put at each of two hosts, with second copies."""
    part = planes["b"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(part, "b")
    put(planes["c"].partition("p"), "c")
    return part


def test_what_a_host_without_shards_restored_outlives_another(
    hosts: Addressed, planes: dict[str, Plane], tmp_path: Path
) -> None:
    part = twice_kept(planes)
    done = part.claim("s", rows=5, timeout=GO_ON_S)
    done.ack()
    planes["a"].checkpoint(tmp_path / "c")
    part.drop()
    planes["a"].restore(tmp_path / "c")
    hosts.kill("b")
    batch = planes["c"].partition("p").claim("s", rows=15, timeout=GO_ON_S)
    check(batch)
    assert not {*batch.keys} & {*done.keys}


def test_a_restore_that_meets_a_death_goes_on_at_the_successor(
    hosts: Addressed, planes: dict[str, Plane], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with `Unavailable`: nobody could say whether its rows had been entered."""
    part = planes["a"].partition(hosts.homed("b"), stages={"s": ["x"]})
    put(part, "a")
    planes["a"].checkpoint(tmp_path / "c")
    part.drop()
    put_rows = restore._put

    def after_a_kill(*args: Any) -> Any:
        hosts.kill("b")
        return put_rows(*args)

    monkeypatch.setattr(restore, "_put", after_a_kill)
    planes["a"].restore(tmp_path / "c")
    batch = planes["c"].partition(part.name).claim("s", rows=10, timeout=GO_ON_S)
    check(batch)
    assert len({*batch.keys}) == 10


def test_a_checkpoint_that_a_death_ended_is_made_once_the_rows_are_served_again(
    hosts: Addressed, planes: dict[str, Plane], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice_kept(planes)
    write = records.write
    killed: list[str] = []

    def then_kill(*args: Any) -> None:
        write(*args)
        if not killed:
            hosts.kill("b")
            killed.append("b")

    monkeypatch.setattr(records, "write", then_kill)

    def written() -> bool:
        try:
            planes["a"].checkpoint(tmp_path / "c", timeout=20)
        except DataplaneError:
            assert [path.name for path in tmp_path.iterdir()] == []
            return False
        return True

    until(written, "a checkpoint of what is left", 60)
    planes["c"].partition("p").drop()
    planes["c"].restore(tmp_path / "c")
    batch = planes["c"].partition("p").claim("s", rows=20, timeout=GO_ON_S)
    check(batch)
    assert len({*batch.keys}) == 20
