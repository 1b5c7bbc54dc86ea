"""What a checkpoint asks for once, and what makes it begin anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataplane.client.checkpoint.archive import Archive, verified
from dataplane.client.checkpoint.save import _Checkpoint, _each_once
from dataplane.client.deadline import Deadline
from dataplane.client.session.outgoing import Call
from dataplane.errors import CheckpointFailed, PartitionUndefined, Unavailable
from dataplane.progress import Bar
from dataplane.wire.checkpoint import CensusDone
from dataplane.wire.messages import Define

A, B, C = (bytes([digit]) * 16 for digit in (1, 2, 3))


def test_a_name_that_two_peers_told_is_taken_from_the_last() -> None:
    assert _each_once([A + B, b"", B + C, b""]) == [A, b"", B + C, b""]
    assert _each_once([A + A, B, b"", B]) == [A, b"", b"", B]
    assert _each_once([A, B, C, b""]) == [A, B, C, b""]


class Session:
    plane = "p"


def asked(directory: Path, placements: list[int]) -> int:
    """Make a checkpoint of no partitions, while rows are placed so; how often that was asked."""
    session: Any = Session()
    archive = Archive(directory)
    archive.begin()
    steps = _Checkpoint(session, archive, Deadline(None), Bar("checkpoint")).write()
    answers, answer, count = iter(placements), None, 0
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return count
        if isinstance(step, Call):
            answer, count = CensusDone([], next(answers)), count + 1
        else:
            answer = step.work()


def test_it_begins_anew_where_rows_moved_meanwhile(tmp_path: Path) -> None:
    assert asked(tmp_path / "still", [1, 1]) == 2
    assert asked(tmp_path / "moved", [1, 2, 2, 3, 3, 3]) == 6
    assert verified(tmp_path / "moved", Bar("restore")).partitions == []
    with pytest.raises(CheckpointFailed, match="peers joined, left or died"):
        asked(tmp_path / "restless", [1, 2, 3, 4, 5, 6])
    assert not (tmp_path / "restless").exists()


def test_a_partition_is_asked_for_for_as_long_as_a_fail_over_may_take(tmp_path: Path) -> None:
    session: Any = Session()
    late = Unavailable("its shard is not served")
    for fails in (2, 6):
        steps = _Checkpoint(
            session, Archive(tmp_path / "c"), Deadline(None), Bar("checkpoint")
        )._partition("p")
        step = next(steps)
        for _ in range(min(fails, 5)):
            assert isinstance(step, Call) and isinstance(step.body, Define)
            step = steps.throw(late)
        with pytest.raises(Unavailable if fails == 6 else StopIteration):
            steps.throw(late if fails == 6 else PartitionUndefined("dropped meanwhile"))
