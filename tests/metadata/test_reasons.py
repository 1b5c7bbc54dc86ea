"""What people are told of a wait: the sentence, and when it is due."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any
from unittest import mock

import pytest

from dataplane.errors import StageUndefined, duration, nearest
from dataplane.metadata.shard import inspection
from dataplane.metadata.shard.inspection import idle, lacks, unfinished, unknown_tags
from dataplane.metadata.shard.journal import apply, snapshot
from dataplane.metadata.shard.reasons import (
    FIRST_S,
    MOST_S,
    SEAL,
    Facts,
    FullArena,
    Notices,
    Producer,
    Subject,
    of_admission,
    of_full_arena,
    of_key,
    only_own,
    reason,
    seen_by_others,
)
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.remembered import MAX_PRODUCERS
from dataplane.wire.journal import decode, encode
from dataplane.wire.messages import Want
from dataplane.wire.peering import StoredRows
from tests.metadata.stores import finish, named, put, store, take, wrote

SUBJECT = Subject("claim", "p", "s")
ME, OTHER = "pid 1 on host a", "pid 7 on host b"
ALIVE = Producer("pid 7 on host b, `python rollout.py`", 4, 300.0, 0.0)
GONE = Producer("pid 8 on host b, `python rollout.py`", 4, 300.0, 290.0)
PUT = {"put_rows": 4, "producers": [ALIVE]}
FROM = (
    "the partition is not sealed; 4 rows have been put so far, the last 5 min ago, by pid 7 on "
    "host b, `python rollout.py` (connected)"
)

WAITS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing was ever put": (
        {},
        "no row ready, 4 wanted; the partition is not sealed; no rows have been put into it: start "
        "its producer in this run, with this partition name",
    ),
    "the partition's name is misspelt": (
        {"near_partitions": ["step1"]},
        "no row ready, 4 wanted; the partition is not sealed; no rows have been put into it; this "
        "run also has a partition 'step1': is one of the names misspelt?",
    ),
    "the partition's name is near two others": (
        {"near_partitions": ["step1", "step_1"]},
        "no row ready, 4 wanted; the partition is not sealed; no rows have been put into it; this "
        "run also has partitions 'step1' and 'step_1': is one of the names misspelt?",
    ),
    "the run's name is misspelt": (
        {"elsewhere": ["run 'grpo-7' (`python rollout.py`, 3 min old)"]},
        "no row ready, 4 wanted; the partition is not sealed; no rows have been put into it; a "
        "partition with this name also exists in run 'grpo-7' (`python rollout.py`, 3 min old): "
        "connect both sides to the same run with connect(run=…)",
    ),
    "nobody sealed": (PUT, f"no row ready, 4 wanted; {FROM}: {SEAL}"),
    "every producer died": (
        {"put_rows": 4, "producers": [GONE]},
        "no row ready, 4 wanted; the partition is not sealed; 4 rows have been put so far, the "
        "last 5 min ago, by pid 8 on host b, `python rollout.py` (disconnected 5 min ago): no "
        f"producer is connected, so restart one, or {SEAL}",
    ),
    "the producer's host died with its rows": (
        {
            "put_rows": 4,
            "lost": 3,
            "producers": [Producer("a client of a peer that is gone", 4, 300.0, math.inf)],
        },
        "no row ready, 4 wanted; 3 rows were lost with a peer: part.lost() lists them; the "
        "partition is not sealed; 4 rows have been put so far, the last 5 min ago, by a client of "
        f"a peer that is gone (disconnected): no producer is connected, so restart one, or {SEAL}",
    ),
    "some producers are forgotten": (
        {"put_rows": 9, "producers": [Producer("a client of peer 'b'", 4, None)]},
        "no row ready, 4 wanted; the partition is not sealed; 9 rows have been put so far, by a "
        f"client of peer 'b', and by clients that this peer no longer remembers: {SEAL}",
    ),
    "a group is short, and its producer died": (
        {
            "unit": "groups",
            "units": 2,
            "open_groups": 2,
            "short": [("p7", 3, 4, ""), ("p9", 1, -1, "")],
            "put_rows": 4,
            "producers": [GONE],
        },
        "0 of 2 groups ready, 4 wanted; 2 groups are still open: 'p7' has 3 of 4 rows, 'p9' has 1 "
        "row, and part.close() has not been called for it; the partition is not sealed; 4 rows "
        "have been put so far, the last 5 min ago, by pid 8 on host b, `python rollout.py` "
        "(disconnected 5 min ago): no producer is connected, so restart one to complete the open "
        "groups",
    ),
    "a group is short, and its producer is there": (
        {
            "unit": "groups",
            "units": 1,
            "open_groups": 1,
            "short": [("p7", 3, 4, "")],
            "groups_wanted": 5,
            "groups_closed": 1,
            **PUT,
        },
        "0 of 1 groups ready, 4 wanted; 1 group is still open: 'p7' has 3 of 4 rows; the partition "
        "is not sealed; 1 of its 5 groups has been closed (groups=); "
        f"{FROM.removeprefix('the partition is not sealed; ')}: complete the open groups, or "
        f"{SEAL}",
    ),
    "rows are leased": (
        {"leased": 4, "leases": [(OTHER, "s", 4, 90.2)], **PUT},
        f"no row ready, 4 leased, 4 wanted; 4 rows have been leased by {OTHER} for 90 s; {FROM}",
    ),
    "rows are leased, and there are too few in all": (
        {"leased": 3, "needed": 4, "leases": [(OTHER, "s", 3, 90.2)], **PUT},
        f"no row ready, 3 leased, 4 wanted; 3 rows have been leased by {OTHER} for 90 s; {FROM}: "
        f"{SEAL}",
    ),
    "this process holds them": (
        {"leased": 4, "leases": [(ME, "s", 4, 1.0)], "sealed": True},
        f"no row ready, 4 leased, 4 wanted; 4 rows have been leased by this process ({ME}) for 1 "
        "s; the partition is sealed, so no new rows can arrive",
    ),
    "many hold some": (
        {"leases": [(OTHER, "s", 1, float(n)) for n in range(5)], "sealed": True},
        f"no row ready, 4 wanted; 1 row has been leased by {OTHER} for 4 s; 1 row has been leased "
        f"by {OTHER} for 3 s; 1 row has been leased by {OTHER} for 2 s; 2 more clients hold "
        "leases; the partition is sealed, so no new rows can arrive",
    ),
    "the stage before lags": (
        {
            "units": 4,
            "missing": {"reward": 3},
            "adders": {"reward": "judge"},
            "leases": [(OTHER, "judge", 3, 90.2)],
            **PUT,
        },
        "0 of 4 rows ready, 4 wanted; 3 rows lack `reward`, which stage 's' needs and stage "
        f"'judge' adds; 3 rows have been leased by {OTHER} for stage 'judge' for 90 s; {FROM}",
    ),
    "nobody runs the stage before": (
        {"units": 4, "missing": {"reward": 4}, "idle": [("judge", 4, None)], **PUT},
        "0 of 4 rows ready, 4 wanted; 4 rows lack `reward`, which stage 's' needs; 4 rows are "
        f"ready for stage 'judge', but no client has ever claimed from it; {FROM}",
    ),
    "the stage before has stopped": (
        {"units": 4, "missing": {"reward": 1}, "idle": [("judge", 1, 240.0)], **PUT},
        "0 of 4 rows ready, 4 wanted; 1 row lacks `reward`, which stage 's' needs; 1 row is ready "
        f"for stage 'judge', but no client has claimed from it for 4 min; {FROM}",
    ),
    "a field is misspelt": (
        {"units": 4, "missing": {"reward": 4}, "near_fields": {"reward": "rewrad"}, **PUT},
        "0 of 4 rows ready, 4 wanted; 4 rows lack `reward`, which stage 's' needs; rows have "
        f"`rewrad`: is `rewrad` or `reward` misspelt?; {FROM}",
    ),
    "a tag of the filter is misspelt": (
        {"units": 4, "excluded": 4, "unknown_tags": {"verison": "version"}, **PUT},
        "0 of 4 rows ready, 4 wanted; the filter excludes 4 ready rows; no row has the tag "
        f"'verison' of the filter: did you mean 'version'?; {FROM}",
    ),
    "rows have no group": (
        {"unit": "groups", "alone": 1, **PUT},
        "no group ready, 4 wanted; 1 row has no group, so a claim of groups cannot include it; "
        + FROM,
    ),
    "rows of a group were claimed individually": (
        {"unit": "groups", "split": 1, **PUT},
        "no group ready, 4 wanted; rows of 1 group were claimed individually, so a claim of groups "
        f"cannot include them; {FROM}",
    ),
    "others come first, and there is no room": (
        {"ready": 2, "units": 2, "before": 1, "waiting_puts": 2, **PUT},
        "2 of 2 rows ready, 4 wanted; 1 older claim waits for the same rows; 2 puts wait for "
        f"space; {FROM}: {SEAL}",
    ),
    "an older claim has been short for long": (
        {"ready": 5, "units": 5, "before": 2, "reason": "behind", **PUT},
        "5 of 5 rows ready, 4 wanted; 2 older claims wait for the same rows; ready rows are kept "
        f"for an older claim, which has waited for over 1 s; {FROM}: {SEAL}",
    ),
    "nothing that is left matches": (
        {"sealed": True, "units": 1},
        "0 of 1 rows ready, 4 wanted; the partition is sealed, and none of its remaining rows can "
        "satisfy this call",
    ),
    "a plan waits for the seal": (
        {"plan": "the partition is not sealed yet", "units": 4, "ready": 4, **PUT},
        "4 of 4 rows ready, 4 wanted; the partition is not sealed yet; 4 rows have been put so "
        f"far, the last 5 min ago, by pid 7 on host b, `python rollout.py` (connected): {SEAL}",
    ),
    "its shard's peer does not answer": (
        {"silent": "b at tcp://b:1"},
        "peer b at tcp://b:1, which serves this partition, does not answer: check it with "
        "`dataplane status`",
    ),
}
"""What a claim that waits says, by what keeps it waiting."""


@pytest.mark.parametrize("situation", WAITS)
def test_each_situation_has_a_sentence_of_its_own(situation: str) -> None:
    told, says = WAITS[situation]
    assert reason(Facts(**told), "s", "4 wanted", ME) == says


def test_who_waits_for_rows_to_go_is_not_told_to_seal() -> None:
    facts = Facts(ready=2, units=2, put_rows=4, producers=[ALIVE])
    assert reason(facts, "s", "fewer than 2 unfinished wanted", for_rows=False) == (
        "2 of 2 rows ready, fewer than 2 unfinished wanted"
    )


def test_a_reason_that_one_process_was_told_is_for_others_too() -> None:
    facts = Facts(leases=[(ME, "s", 4, 1.0)], sealed=True)
    assert f"leased by {ME} for" in seen_by_others(reason(facts, "s", "4 wanted", ME))


# what a store knows of it


def missing(of: Store, stage: str, unit: str, now: float, **form: Any) -> dict[str, Any]:
    """What is found block by block, between which others are served."""
    with mock.patch.object(inspection, "PIECE", 1):
        look = inspection.Look(of, stage, unit, **form)
        while look.go_on():
            pass
    return inspection.missing(look, now)


def test_blocks_and_groups_are_looked_at_in_pieces() -> None:
    s = store(stages={"train": ["tokens", "reward"]}, group_size=2)
    for row in range(5):
        put(s, [row], [f"group-{row}"])
    with mock.patch.object(inspection, "PIECE", 2):
        look, seen = inspection.Look(s, "train", "groups"), [(0, 0)]
        while look.go_on():
            seen.append((look.lacking["reward"], look.open_groups))
        seen.append((look.lacking["reward"], look.open_groups))
    pieces = itertools.pairwise(seen)
    assert all(sum(after) - sum(before) <= 2 for before, after in pieces)
    missing = inspection.missing(look, 0.0)
    assert missing["open_groups"] == 5 and missing["missing"] == {"reward": 5}
    assert [name for name, *_ in missing["short"]] == ["group-0", "group-1", "group-2"]


def told(of: Store, stage: str, unit: str = "rows", **how: Any) -> str:
    facts = missing(of, stage, unit, how.pop("now", 100.0), **how)
    facts["producers"] = [Producer("it", *more) for _, *more in facts["producers"]]
    return reason(Facts(unit, **facts), stage, "1 wanted")


def test_misspelt_names_are_seen_by_the_shard() -> None:
    one = store()
    put(one, ["a", "b"], fields=("tokens", "rewrad"), version=[1])
    assert "rows have `rewrad`: is `rewrad` or `reward` misspelt?" in told(one, "train")
    assert "2 rows are ready for stage 'reward', but no client has ever claimed from it" in told(
        one, "train"
    )
    assert "no row has the tag 'verison' of the filter: did you mean 'version'?" in told(
        one, "reward", where=["not", ["ge", "verison", 2]]
    )
    with pytest.raises(StageUndefined, match=r"no stage 'trian' \(did you mean 'train'\?\)"):
        one.stage("trian")


def test_a_group_that_was_closed_and_got_no_row_is_named_with_a_near_one() -> None:
    one = store()
    put(one, ["a", "b"], ["type", "type"])
    one.close("tpye", 2)  # legal: a producer may close a group before it puts rows
    one.close("zzz", 1)
    assert (
        "3 groups are still open: 'tpye' was closed with 2 rows, but has none (did you mean "
        "'type'?), 'zzz' was closed with 1 row, but has none, 'type' has 2 rows, and part.close() "
        "has not"
    ) in told(one, "train", "groups")


def test_a_stage_that_is_claimed_is_not_called_idle() -> None:
    one = store()
    put(one, ["a", "b"])
    taken = take(one, "reward", Want("rows", 1, 1))
    assert "no client" not in told(one, "train")  # `train` has leased rows
    finish(one, taken)
    assert "no client" not in told(one, "train", now=29.0)  # a client may be at work
    assert "1 row is ready for stage 'reward', but no client has claimed from it for 60 s" in told(
        one, "train", now=60.0
    )


def test_short_groups_are_named() -> None:
    one = store(group_size=4)
    put(one, ["a", "b", "c"], ["g"] * 3)
    assert "1 group is still open: 'g' has 3 of 4 rows" in told(one, "train", "groups")


def test_a_shard_knows_who_put_rows_and_tells_its_backup() -> None:
    one, ops = store(), list[Any]()
    one.emit = ops.append
    for session in range(100):
        one.put(wrote(named([session]), [], holder=session), now=float(session))
    copy = store()
    for op in ops:
        apply(copy, decode(encode(op)), 100.0)
    learner = store()
    for op in snapshot(one):
        apply(learner, op, 100.0)
    for kept in (one, copy, learner):
        latest = kept.producers.latest(100.0)
        assert kept.producers.rows == 100 and len(latest) == MAX_PRODUCERS
        assert [session for session, *_ in latest[:2]] == [99, 98]
    assert one.producers.latest(100.0)[0] == (99, 1, 1.0)
    assert learner.producers.latest(100.0)[0] == (99, 1, None)


# admit


ADMISSION = {
    "version": 3,
    "lag": 1,
    "unfinished_groups": 1,
    "finished_groups": 0,
    "held_groups": 2,
    "slots": 4,
    "before": 0,
}
HELD = (
    "this call wants 1 of 4 slots; taken: 1 by unfinished groups, 2 by groups finished at earlier "
    "versions; groups started at version 2 are not complete yet; "
)


def test_admit_names_what_the_slowest_group_lacks_and_who_adds_it() -> None:
    one = store(group_size=2)
    put(one, ["a", "b"], ["g", "g"])
    slow = unfinished(one, next(iter(one.groups.values())))
    assert of_admission(ADMISSION, 1, {}, slow=[slow], idle=idle(one, 100.0)) == HELD + (
        "group 'g' has all its rows, but lacks `reward`, which stage 'train' needs; 2 rows are "
        "ready for stage 'reward', but no client has ever claimed from it"
    )
    slow["lacks"]["reward"] = ("train", "reward", "rewrad")
    assert of_admission(ADMISSION, 1, {}, slow=[slow]).endswith(
        "group 'g' has all its rows, but lacks `reward`, which stage 'train' needs and stage "
        "'reward' adds; rows have `rewrad`: is `rewrad` or `reward` misspelt?"
    )
    put(one, ["c"], ["h"])
    slow = unfinished(one, list(one.groups.values())[-1])
    assert of_admission(ADMISSION, 1, {}, slow=[slow]).startswith(
        HELD + "group 'h' has 1 of 2 rows: put the missing rows, or drop the group"
    )


def test_admit_names_groups_that_lack_the_same_fields_together() -> None:
    lacks = {"reward": ("train", "", ""), "safe": ("train", "", "")}
    slow = [{"group": g, "rows": 2, "of": 0, "lacks": lacks} for g in ("f", "g", "h")]
    slow.append({**slow[0], "group": "i", "lacks": {**lacks, "kl": ("train", "ref", "")}})
    assert of_admission(ADMISSION, 1, {}, slow=slow, idle=[("reward", 4, None)]) == HELD + (
        "groups 'f', 'g' and 'h' have all their rows, but lack `reward` and `safe`, which stage "
        "'train' needs; group 'i' has all its rows, but lacks `reward` and `safe`, which stage "
        "'train' needs, and `kl`, which stage 'train' needs and stage 'ref' adds; 4 rows are ready "
        "for stage 'reward', but no client has ever claimed from it"
    )


def test_admit_says_who_has_the_rows_of_complete_groups() -> None:
    told = ADMISSION | {"unfinished_groups": 4, "held_groups": 0}
    leases = [(ME, "train", 2, 5.0)]
    assert of_admission(told, 1, {}, ME, (), [("train", 6, None)], leases) == (
        "this call wants 1 of 4 slots; taken: 4 by unfinished groups; 6 rows are ready for stage "
        f"'train', but no client has ever claimed from it; 2 rows have been leased by "
        f"this process ({ME}) for stage 'train' for 5 s"
    )


def test_admit_says_that_the_trainer_has_to_go_on() -> None:
    told = ADMISSION | {"finished_groups": 3, "held_groups": 0, "before": 1}
    assert of_admission(told, 1, {ME: 1, OTHER: 2}, ME) == (
        f"this call wants 1 of 4 slots; taken: 1 by unfinished groups, 1 by permits of this "
        f"process ({ME}), 2 by permits of {OTHER}, 3 by groups finished at version 3; "
        "1 call waits ahead of this one; finished groups free their slots at the next "
        "part.advance(version)"
    )


# a full arena

FULL = FullArena("a", "a put of new rows", 6 << 20, 2 << 20, 60 << 20, 64 << 20)
NEEDS = (
    "a put of new rows needs 6.0 MiB, but the arena of peer 'a' has only 2.0 MiB available for it "
    "(60.0 MiB of 64.0 MiB are used); "
)
LARGER = (
    "give the peer a larger arena (--arena, DATAPLANE_ARENA) or a spill directory "
    "(--spill DIR:SIZE)"
)


@pytest.mark.parametrize(
    ("changes", "says", "do"),
    [
        ({}, "", "Consume or drop rows"),
        (
            {"kept": [StoredRows("step-1", 5, 40 << 20, [("judge", 5, None)])]},
            "partition 'step-1' has 5 rows with 40.0 MiB on this host: 5 rows are ready for stage "
            "'judge', but no client has ever claimed from it",
            "Run the stage 'judge', or leave it out of stages= if nobody needs it",
        ),
        (
            {"kept": [StoredRows("step-1", 5, 1 << 20, [("judge", 5, 29.0)])]},
            "partition 'step-1' has 5 rows with 1.0 MiB on this host: 5 rows are ready for stage "
            "'judge'",
            "Consume or drop rows",
        ),
        (
            {
                "kept": [StoredRows("step-1", 5, 1 << 20, [], [(OTHER, "train", 5, 90.0)])],
                "claims": True,
            },
            "partition 'step-1' has 5 rows with 1.0 MiB on this host: 5 rows have been leased by "
            f"{OTHER} for stage 'train' for 90 s",
            "Claim fewer rows at a time (or pass min=), if claims wait for more rows than fit",
        ),
        (
            {
                "kept": [
                    StoredRows("w", 5, 1 << 20, [("judge", 5, None)], until_dropped=True),
                    *[StoredRows(f"p{i}", 1, 1 << 19) for i in range(3)],
                ],
                "more": 2,
            },
            "partition 'w' has 5 rows with 1.0 MiB on this host, which stay until they are "
            "dropped; partition 'p0' has 1 row with 512 KiB on this host; partition 'p1' has 1 row "
            "with 512 KiB on this host; 3 more partitions have values on this host",
            "Drop rows that are no longer needed (part.drop)",
        ),
        (
            {"kept": [StoredRows("step-1", 5, 1 << 20, lacks=[("train", "reward", 5)])]},
            "partition 'step-1' has 5 rows with 1.0 MiB on this host: 5 rows lack `reward`, which "
            "stage 'train' needs",
            "Add the missing field `reward`",
        ),
        (
            {"silent": [("b", 1)]},
            "1 value on this host belongs to partitions that peer 'b' serves, but that peer did "
            "not answer which stages still need them",
            "Check peer 'b' with `dataplane status`",
        ),
        (
            {"holders": [(OTHER, 40 << 20)], "elsewhere": 3},
            "3 values on this host belong to partitions that other peers serve; "
            f"{OTHER} holds 40.0 MiB in reservations and views",
            "Delete batches and arrays that you no longer need",
        ),
    ],
)
def test_a_full_arena_says_who_has_the_room_and_what_to_do(
    changes: dict[str, Any], says: str, do: str
) -> None:
    full = dataclasses.replace(FULL, **changes)
    clauses = "; ".join(filter(None, ("no space was freed within 30 s", says)))
    assert of_full_arena(full, "no space was freed within 30 s") == (
        f"{NEEDS}{clauses}. {do}; or {LARGER}"
    )


# near names


@pytest.mark.parametrize(
    ("name", "among", "near"),
    [
        ("rewrad", ["tokens", "reward"], "reward"),
        ("Reward", ["reward"], "reward"),
        ("step_1", ["step-1"], "step-1"),
        ("step-12", ["step-11", "step-13"], ""),
        ("rollouts", ["weights", "eval"], ""),
        ("reward", ["reward"], ""),
    ],
)
def test_names_are_near_where_one_may_be_meant_for_the_other(
    name: str, among: list[str], near: str
) -> None:
    assert nearest(name, among) == near


# who waits


@pytest.mark.parametrize(
    ("leases", "sealed", "alone", "own"),
    [
        ([(ME, "s", 1, 0.0)], True, False, True),
        ([(ME, "s", 1, 0.0)], False, True, True),
        ([(ME, "s", 1, 0.0)], False, False, False),
        ([(ME, "s", 1, 0.0), (OTHER, "s", 1, 0.0)], True, True, False),
        ([(ME, "t", 1, 0.0)], True, True, True),
        ([(ME, "t", 1, 0.0)], True, False, False),
        ([], True, True, False),
    ],
)
def test_a_wait_that_only_its_own_process_can_end_is_known(
    leases: list[tuple[str, str, int, float]], sealed: bool, alone: bool, own: bool
) -> None:
    assert only_own(Facts(leases=leases, sealed=sealed), "s", ME, alone) is own


def test_one_of_many_speaks_and_less_and_less_often() -> None:
    notices, now, lines = Notices(), 100.0, []
    for _ in range(8):
        notices.begin(SUBJECT, now)
    while now < 100 + 2 * 3600:
        now += notices.wait_s(SUBJECT, now)
        lines += [(now - 100, many) for _ in range(8) if (many := notices.take(SUBJECT, now))]
    assert [at for at, _ in lines[:4]] == [FIRST_S, 3 * FIRST_S, 7 * FIRST_S, 15 * FIRST_S]
    assert {many for _, many in lines} == {8}
    assert lines[-1][0] - lines[-2][0] == MOST_S
    for _ in range(8):
        notices.end(SUBJECT)
    assert len(notices) == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (0.00126, "1 ms"),
        (0.034, "0.03 s"),
        (0.2, "0.2 s"),
        (0.999, "1 s"),
        (1.99, "2 s"),
        (2.53, "2.5 s"),
        (9.97, "10 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (5969.0, "99 min"),
        (5971.0, "1.7 h"),
        (2e5, "55.6 h"),
    ],
)
def test_durations_are_rounded_to_two_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("near", "told", "says"),
    [
        (
            "",
            {},
            "; no rows have been put into the partition: start its producer in this run, with",
        ),
        (
            "version-7",
            {"put_rows": 4, "producers": [ALIVE]},
            ", but one has 'version-7': is one of the keys misspelt?; 4 rows have been put so "
            "far, the last 5 min ago, by pid 7 on host b, `python rollout.py` (connected)",
        ),
        (
            "",
            {"put_rows": 4, "producers": [GONE]},
            "; 4 rows have been put so far, the last 5 min ago, by pid 8 on host b, `python "
            "rollout.py` (disconnected 5 min ago): no producer is connected, so restart one",
        ),
    ],
)
def test_a_wait_for_a_key_says_who_could_put_it(near: str, told: dict[str, Any], says: str) -> None:
    assert of_key("v-7", near, Facts(**told)).startswith(f"no row has the key 'v-7'{says}")


def test_a_value_that_no_row_has_is_named_with_those_that_rows_have() -> None:
    def told(*where: Any) -> Any:
        return missing(s, "s", "rows", 1.0, where=list(where))["unknown_values"]

    s = store(stages={"s": ["tokens"]})
    put(s, [1, 2, 3, 4], version=[4, 3, 2, 1], lang=["rust", "c", "python", "c"])
    near = ("lang", "'pyhton'", ["'python'", "'c'", "'rust'"], 0)
    assert told("eq", "lang", "pyhton") == [near]
    older = ("version", "8 or 9", ["1", "2", "3"], 1)
    assert told("and", ["eq", "lang", "pyhton"], ["in", "version", [8, 9]]) == [near, older]
    assert told("or", ["in", "lang", ["pyhton", "c"]], ["not", ["eq", "version", 9]]) == []
    assert told("eq", "langs", "python") == []  # that is an unknown tag
    s.drop(rows=named([3]))
    assert told("eq", "lang", "python") == [("lang", "'python'", ["'c'", "'rust'"], 0)]
    facts = Facts(unknown_values=[near, older])
    assert reason(facts, "s", "1 wanted").startswith(
        "no row ready, 1 wanted; the filter wants 'pyhton' in the tag 'lang', but rows have only "
        "'python', 'c' and 'rust'; the filter wants 8 or 9 in the tag 'version', but rows have "
        "only 1, 2, 3 and 1 more"
    )


def test_a_field_that_only_one_stage_knows_may_be_a_misspelling_of_any_that_rows_have() -> None:
    s = store(stages={"s": ["tokens"], "t": ["tokns"]})
    put(s, [1, 2])
    assert missing(s, "t", "rows", 1.0)["near_fields"] == {"tokns": "tokens"}


def test_a_tag_that_no_row_has_is_named_with_those_that_rows_have() -> None:
    s = store()
    assert unknown_tags(s, ["eq", "vresion", 3]) == {}  # nothing is there that could have tags
    put(s, [1, 2], version=[1, 2], lang=["a", "b"])
    where = ["and", ["eq", "vresion", 3], ["or", ["eq", "zzz", 1], ["eq", "lang", "a"]]]
    assert unknown_tags(s, where) == {"vresion": ["version"], "zzz": ["lang", "version"]}
    assert unknown_tags(s, None) == {}
    assert unknown_tags(s, ["not", ["exists", "zzz"]]) == {}  # it asks whether rows have the tag


def test_what_rows_lack_is_counted_though_the_store_changes_meanwhile() -> None:
    """A peer looks through many rows in pieces, and carries out other calls after each."""
    s = store()
    put(s, [1, 2])
    before = list(s.blocks.values())
    s.clear()
    s.declare_stage("later", ["score"])
    put(s, [3])
    assert not lacks(s, before)
    assert lacks(s, list(s.blocks.values()))["later", "score"] == 1
