"""What a store gives out for a checkpoint, and what another makes of it, at any moment."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from dataplane.errors import DataplaneError, PartitionConflict, ProtocolError
from dataplane.metadata.shard import checkpoint, finishes
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store
from dataplane.wire.checkpoint import Progress, Restore, SaveDone
from dataplane.wire.journal import LogRecord, decode, encode
from dataplane.wire.messages import Want
from dataplane.wire.tables import Definition, Rows, Values
from tests.metadata import stores
from tests.metadata.observed import carried_over, observed
from tests.metadata.stores import fill, keys_of, named, put, take
from tests.metadata.test_store_against_a_model import StoreMachine

ALL = 1 << 60
KEY = 16


def saved(store: Store, nbytes: int) -> tuple[list[SaveDone], int]:
    """All answers, and the groups that closed and are gone."""
    survey = checkpoint.survey(store, 0)
    groups, rows = survey.groups, survey.rows
    answers = []
    while groups or rows:
        answers.append(checkpoint.save(store, groups, rows, nbytes))
        done = answers[-1].units * KEY
        groups, rows = groups[done:], rows[max(0, done - len(groups)) :]
    return answers, survey.closed_groups


def message(one: SaveDone, closed: int = 0) -> Restore:
    table = one.table
    made = Restore(
        *("step-1", 1, table.rows, table.values, table.tags),
        *(one.progress, closed),
    )
    carried = decode(encode(made))
    assert isinstance(carried, Restore)
    return carried


def restored(store: Store, nbytes: int = ALL, ops: list[LogRecord] | None = None) -> Store:
    made = Store("step-1", store.definition, 1)
    made.emit = (ops if ops is not None else []).append
    answers, closed = saved(store, nbytes)
    for one in answers:
        made.restore(message(one))
    if closed:
        made.restore(Restore("step-1", 1, Rows(b""), Values(), {}, Progress(), closed))
    return made


def seen(store: Store) -> dict[str, Any]:
    """What a checkpoint keeps: not which rows are or were leased, nor in which order they became
    ready."""
    found = observed(store)
    kept = {name: found[name] for name in ("rows", "groups", "holdings")}
    kept["closed_groups"] = store.closed_groups
    kept["stages"] = {
        name: {
            "rows": {key: flags[:-1] for key, flags in stage["rows"].items()},
            "groups": stage["groups"],
        }
        for name, stage in found["stages"].items()
    }
    return kept


def fields_of(store: Store) -> set[str]:
    return {field for block in store.blocks.values() for field in block.values.fields}


def given_back(store: Store) -> Store:
    """A copy whose leases have all ended, without the progress that `release(values=…)` saved:
    checkpoints have none."""
    copy = Store("step-1", store.definition, 1)
    carried_over(copy, list(snapshot(store)))
    for lease in reversed(list(copy.leases)):
        finishes.give_back(copy, lease)
    for block, bits in copy.rows.parts:
        for stage in copy.stages:
            copy.end_progress(block, stage, bits)
    return copy


@pytest.mark.parametrize("nbytes", [0, 20_000, ALL])
def test_rows_come_back_as_they_stood_whatever_goes_at_once(nbytes: int) -> None:
    store = Store("step-1", Definition({"s1": ["a"], "s2": ["a", "b"]}), 1)
    fill(store)
    ops: list[LogRecord] = []
    made = restored(store, nbytes, ops)
    assert seen(made) == seen(given_back(store))
    replica = Store("step-1", store.definition, 1)
    carried_over(replica, ops)
    assert observed(replica) == observed(made)


def test_a_checkpoint_has_no_progress() -> None:
    store = stores.store()
    put(store, ["a"])
    taken = take(store, "reward", Want("rows", 1, 1))
    stores.finish(store, taken, "release", [stores.Column("so_far", stores.values(1, first=69))])
    assert "reward~so_far" in fields_of(store)
    made = restored(store)
    assert seen(made) == seen(given_back(store))
    assert "reward~so_far" not in fields_of(made)


def test_a_leased_row_is_ready_again_and_an_acked_one_is_done() -> None:
    store = stores.store()
    put(store, ["a", "b", "c"])
    stores.finish(store, take(store, "reward", Want("rows", 1, 1)))
    take(store, "reward", Want("rows", 1, 1))
    made = restored(store)
    assert keys_of(made, take(made, "reward", Want("rows", 2, 2))) == ["b", "c"]


def test_a_group_of_which_a_row_was_taken_is_not_offered_whole_afterwards() -> None:
    store = stores.store(group_size=2)
    put(store, ["a", "b", "c", "d"], ["g", "g", "h", "h"])
    take(store, "reward", Want("rows", 1, 1))
    made = restored(store)
    assert keys_of(made, take(made, "reward", Want("groups", 1, 1))) == ["c", "d"]
    assert take(made, "reward", Want("groups", 1, 1)).lease is None


def test_an_open_group_goes_on_and_closes_with_its_last_row() -> None:
    store = stores.store(group_size=3)
    put(store, ["a", "b"], ["g", "g"])
    made = restored(store)
    put(made, ["c"], ["g"])
    assert keys_of(made, take(made, "reward", Want("groups", 1, 1))) == ["a", "b", "c"]
    assert made.closed_groups == 1


def test_a_group_knows_which_of_its_rows_were_dropped_and_which_were_done() -> None:
    store = stores.store(free="acked", stages={"reward": ["tokens"]})
    put(store, ["a", "b", "c"], ["g", "g", "g"])
    stores.finish(store, take(store, "reward", Want("rows", 1, 1)))
    store.drop(rows=named(["b"]))
    made = restored(store)
    assert seen(made) == seen(store)


def test_groups_that_were_done_with_still_count_as_closed() -> None:
    store = stores.store(group_size=1, free="acked", stages={"reward": ["tokens"]})
    put(store, ["a", "b"], ["g", "h"])
    stores.finish(store, take(store, "reward", Want("groups", 1, 1)))
    assert len(store) == 1
    assert restored(store).closed_groups == store.closed_groups == 2


def test_groups_that_end_between_survey_and_save_are_told_but_for_dropped_ones() -> None:
    store = stores.store(group_size=1, free="acked", stages={"reward": ["tokens"]})
    put(store, ["a", "b", "c"], ["g", "h", "i"])
    survey = checkpoint.survey(store, 0)
    stores.finish(store, take(store, "reward", Want("groups", 1, 1)))
    store.drop(groups=["h"])
    answer = checkpoint.save(store, survey.groups, survey.rows, ALL)
    assert (answer.units, answer.ended_groups) == (3, 1)
    assert answer.table.rows.names == ["c"]


def test_rows_that_are_lost_between_survey_and_save_are_told() -> None:
    store = stores.store(group_size=1)
    put(store, ["a", "b"], ["g", "h"])
    survey = checkpoint.survey(store, 0)
    assert checkpoint.save(store, survey.groups, survey.rows, ALL).lost == survey.lost == 0
    store.lost(stores.OWNERS[0])
    answer = checkpoint.save(store, survey.groups, survey.rows, ALL)
    assert answer.lost == checkpoint.survey(store, 0).lost == 2


def test_a_survey_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.store()
    for key, group in (("a", "g"), ("b", None), ("c", "h"), ("d", None)):
        put(store, [key], [group])
    whole = checkpoint.survey(store, 0)
    monkeypatch.setattr(checkpoint, "MAX_UNITS_PER_SURVEY", 1)
    groups, rows, cursor = b"", b"", 0
    for _ in range(4):
        part = checkpoint.survey(store, cursor)
        groups, rows, cursor = groups + part.groups, rows + part.rows, part.cursor
    assert (groups, rows, cursor) == (whole.groups, whole.rows, 0)


def test_an_answer_has_no_more_pieces_than_a_message_has_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = stores.store()
    put(store, ["a", "b", "c", "d"])
    put(store, ["e", "f", "g"], ["g", "g", "g"])
    monkeypatch.setattr(checkpoint, "MAX_CHUNKS_PER_MESSAGE", 2)
    assert [one.units for one in saved(store, ALL)[0]] == [1, 2, 2]


def test_rows_that_are_there_are_not_restored_once_more() -> None:
    store = stores.store()
    put(store, ["a", "b"], ["g", None])
    before = observed(store)
    (answer,), _ = saved(store, ALL)
    with pytest.raises(PartitionConflict):
        store.restore(message(answer))
    assert observed(store) == before


BAD: dict[str, dict[str, Any]] = {
    "sizes of another number of groups": {"sizes": []},
    "more rows dropped than gone": {"sizes": [(-1, 0, 1, False)]},
    "more rows gone than a group may have": {"sizes": [(-1, 1 << 40, 0, False)]},
    "a closed group has no rows": {
        "rows": Rows(b"", None, b"", bytes(16)),
        "sizes": [(-1, 0, 0, True)],
    },
    "an open group has all its rows": {"sizes": [(1, 0, 0, False)]},
    "marks of another number of rows": {"acked": {"reward": b"\1"}},
    "a stage that is not there": {"acked": {"other": bytes(2)}},
    "a tag's marks of another number of rows": {"tagged": {"v": b""}},
}


@pytest.mark.parametrize("what", BAD)
def test_what_contradicts_itself_is_refused_and_changes_nothing(what: str) -> None:
    store = stores.store()
    put(store, ["a", "b"], ["g", None], v=[1])
    (answer,), _ = saved(store, ALL)
    op = message(answer)
    changes = BAD[what]
    if "rows" in changes:
        op.rows, op.values, op.tags = changes["rows"], Values(), {}
    told = {name: value for name, value in changes.items() if name != "rows"}
    op.progress = msgspec.structs.replace(op.progress, **told)
    fresh = stores.store()
    before = observed(fresh)
    with pytest.raises(DataplaneError):
        fresh.restore(op)
    assert observed(fresh) == before


def test_columns_without_rows_are_refused() -> None:
    store = stores.store()
    op = Restore("step-1", 1, Rows(b""), Values(["tokens"]), {}, Progress())
    with pytest.raises(ProtocolError):
        store.restore(op)


class CheckpointMachine(StoreMachine):
    """The store of the model, checkpointed after every step."""

    @invariant()
    def a_checkpoint_has_all_that_is_there(self) -> None:
        assert seen(restored(self.store, 3)) == seen(given_back(self.store))


TestAtAnyMoment = CheckpointMachine.TestCase
TestAtAnyMoment.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow],
)
