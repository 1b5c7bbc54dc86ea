"""What a stage gives back with its rows: only it gets that again, and nothing hangs on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.errors import FieldExists, InvalidRows, LeaseExpired, LimitExceeded
from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.shard.journal import apply, snapshot
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.takes import PullCredit
from dataplane.metadata.tables.keys import KEY_BYTES
from dataplane.wire.limits import MAX_FIELDS, MAX_NAME_BYTES
from dataplane.wire.messages import Want
from dataplane.wire.tables import Owner, Table
from tests.chunk_numbers import chunk_numbers, indexes
from tests.metadata.stores import Column, finish, numbers, put, store, take, values

STAGES = {"rollout": ["prompt"], "train": ["tokens"], "other": ["prompt"]}


def holding(*keys: str) -> Store:
    s = store(stages=STAGES)
    put(s, list(keys), fields=("prompt",))
    return s


def claim(s: Store, count: int, stage: str = "rollout") -> Any:
    return take(s, stage, Want("rows", count, count))


def so_far(count: int, first: int, field: str = "so_far") -> list[Column]:
    """Values in the chunks from `first` on."""
    return [Column(field, values(count, first=first - 1))]


def seen(s: Store, taken: Any, stage: str = "rollout", field: str = "so_far") -> list[int | None]:
    """The chunk of each row's value, as a claim of the stage gets it."""
    table = rows_out.table(s, taken.lease, ["prompt"], stage=stage)
    return chunks_of(table).get(field, [])


def chunks_of(table: Table) -> dict[str, list[Any]]:
    return numbers(table.values, len(table.rows.keys) // KEY_BYTES)


def freed(s: Store) -> list[int]:
    return sorted(number for _, chunks, _ in s.freed() for number in indexes(chunks))


def test_the_next_claim_of_the_stage_gets_it_and_no_other_does() -> None:
    s = holding("a", "b")
    finish(s, claim(s, 2), "release", columns=so_far(2, 70))
    assert seen(s, claim(s, 2)) == [70, 71]
    assert seen(s, claim(s, 2, "other"), "other") == []
    assert list(chunks_of(rows_out.table(s, rows_out.read(s)[0]))) == ["prompt"]


def test_nothing_is_ready_by_it() -> None:
    s = holding("a")
    finish(s, claim(s, 1), "release", columns=so_far(1, 70, "tokens"))
    assert s.counts("train").ready == 0
    finish(s, claim(s, 1), columns=so_far(1, 80, "tokens"))
    assert s.counts("train").ready == 1
    assert freed(s) == [70]


def test_a_part_of_a_batch_gives_back_its_own() -> None:
    s = holding("a", "b", "c")
    taken = claim(s, 3)
    finish(s, taken, "release", index=np.array([2], "<u4").tobytes(), columns=so_far(1, 70))
    finish(s, taken, "release")
    assert sorted(seen(s, claim(s, 3)), key=str) == [70, None, None]


def test_the_next_release_replaces_it_field_by_field_and_a_plain_one_leaves_it() -> None:
    s = holding("a")
    finish(s, claim(s, 1), "release", columns=so_far(1, 70))
    finish(s, claim(s, 1), "release", columns=so_far(1, 75, "logp"))
    finish(s, claim(s, 1), "release", columns=so_far(1, 80))
    finish(s, claim(s, 1), "release")
    taken = claim(s, 1)
    assert (seen(s, taken), seen(s, taken, field="logp")) == ([80], [75])
    assert freed(s) == [70]


@pytest.mark.parametrize("how", ["ack", "drop"])
def test_it_ends_with_the_ack_and_with_the_row(how: str) -> None:
    s = holding("a")
    finish(s, claim(s, 1), "release", columns=so_far(1, 70))
    finish(s, claim(s, 1), how)
    assert 70 in freed(s)
    s.reset("rollout")
    assert how == "drop" or seen(s, claim(s, 1)) == []


def test_a_copy_gets_it_under_the_longest_names() -> None:
    stage, field = "s" * MAX_NAME_BYTES, "f" * MAX_NAME_BYTES
    s, copy = (store(stages={stage: ["prompt"]}) for _ in range(2))
    put(s, ["a"], fields=("prompt",))
    finish(s, claim(s, 1, stage), "release", columns=so_far(1, 70, field))
    for op in snapshot(s):
        apply(copy, op)
    copy.emit = lambda op: None
    assert seen(copy, claim(copy, 1, stage), stage, field) == [70]


def test_progress_under_the_name_of_a_field_that_the_rows_have_is_refused() -> None:
    s = holding("a")
    taken = claim(s, 1)
    with pytest.raises(
        FieldExists,
        match=r"a value for field 'prompt'.*Store the values of release\(\) under another",
    ):
        finish(s, taken, "release", columns=so_far(1, 70, "prompt"))
    with pytest.raises(InvalidRows, match="cannot add fields to rows that this call drops"):
        finish(s, taken, "drop", columns=so_far(1, 70))
    finish(s, taken, "release", columns=so_far(1, 70, "tokens"))
    put(s, ["a"], fields=("tokens",))  # by another writer: that is the row's own
    assert seen(s, claim(s, 1), field="tokens") == []
    table = rows_out.table(s, rows_out.read(s)[0], ["tokens"], stage="rollout")
    assert chunks_of(table)["tokens"] == [1]


def test_whoever_has_lost_the_lease_stores_none() -> None:
    s = holding("a")
    taken = claim(s, 1)
    s.release_holder(1)
    with pytest.raises(LeaseExpired):
        finish(s, taken, "release", columns=so_far(1, 70))
    assert seen(s, claim(s, 1)) == []


def test_a_row_is_not_lost_with_its_progress() -> None:
    s, far = holding("a"), Owner("far", 9)
    finish(s, claim(s, 1), "release", columns=so_far(1, 70), owners=[far])
    assert s.lost(far) == 0
    assert seen(s, claim(s, 1)) == []


def test_it_moves_and_is_pulled_and_held_as_values_are() -> None:
    s, far = holding("a"), Owner("far", 9)
    finish(s, claim(s, 1), "release", columns=so_far(1, 70), owners=[far])
    assert {owner.peer for owner, _, _ in s.holdings()} == {"a", "far"}
    want, credit = Want("rows", 1, 1), PullCredit("a", 4_096, ["prompt"])
    assert take(s, "rollout", want, credit=credit).needed_bytes >= 8_192
    old, new = chunk_numbers([(70, 0)]), chunk_numbers([(5, 1)])
    assert s.relocate(far, old, Owner("near", 1), new).tolist() == [1]
    assert seen(s, claim(s, 1)) == [1 << 32 | 5]


def test_names_of_progress_take_room_while_a_row_has_it_and_one_too_many_changes_nothing() -> None:
    s = holding("a", "b")  # two fields are known: a stage waits for the other
    names = [f"turn_{i}" for i in range(MAX_FIELDS - 2)]
    taken = claim(s, 1)
    finish(s, taken, "release", columns=[one for n in names for one in so_far(1, 70, n)])
    taken = claim(s, 1)
    before = inspection.stats(s), freed(s)
    with pytest.raises(LimitExceeded, match="at most 64 fields"):
        finish(s, taken, "release", columns=so_far(1, 7, "one_more"))
    assert (inspection.stats(s), freed(s)) == before
    finish(s, taken, "release", columns=so_far(1, 75, names[-1]))
    finish(s, claim(s, 1), "release")
    taken = claim(s, 1)
    assert seen(s, taken, field=names[-1]) == [75]
    finish(s, taken)
    for i in range(2 * MAX_FIELDS):
        finish(s, claim(s, 1), "release", columns=so_far(1, 70 + i, f"next_{i}"))
        if i % 40 == 39:
            finish(s, claim(s, 1))
            s.reset("rollout")
    finish(s, claim(s, 1), columns=so_far(1, 80, "tokens"))
    assert s.counts("train").ready == 1
