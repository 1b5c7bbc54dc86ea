"""What a checkpoint asks for once, and what makes it begin anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataplane.client._sync import calls
from dataplane.client._sync.save import _Checkpoint, _each_once
from dataplane.client.checkpoint.archive import Archive, verified
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
    answers, count = iter(placements), 0

    def send(_: Any, call: Call) -> CensusDone:
        nonlocal count
        count += 1
        return CensusDone([], next(answers))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calls, "send", send)
        _Checkpoint(session, archive, Deadline(None), Bar("checkpoint")).write()
    return count


def test_it_begins_anew_where_rows_moved_meanwhile(tmp_path: Path) -> None:
    assert asked(tmp_path / "still", [1, 1]) == 2
    assert asked(tmp_path / "moved", [1, 2, 2, 3, 3, 3]) == 6
    assert verified(tmp_path / "moved", Bar("restore")).partitions == []
    with pytest.raises(CheckpointFailed, match="peers joined, left or died"):
        asked(tmp_path / "restless", [1, 2, 3, 4, 5, 6])
    assert not (tmp_path / "restless").exists()


def test_a_partition_is_asked_for_for_as_long_as_a_fail_over_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = Session()
    late = Unavailable("its shard is not served")
    for fails in (2, 6):
        failures = iter([late] * fails)

        def send(_: Any, call: Call, failures: Any = failures) -> None:
            assert isinstance(call.body, Define)
            raise next(failures, PartitionUndefined("dropped meanwhile"))

        monkeypatch.setattr(calls, "send", send)
        work = _Checkpoint(session, Archive(tmp_path / "c"), Deadline(None), Bar("checkpoint"))
        if fails == 6:
            with pytest.raises(Unavailable):
                work._partition("p")
        else:
            work._partition("p")
