"""Why a step was slow: each planted cause is named, and none where nothing is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from dataplane.events.merge import Event
from dataplane.timeline.causes import HEALTHY, Cause
from dataplane.timeline.step import Step, leases
from dataplane.timeline.why import Why, explain, steps
from dataplane.wire.events import Kind, Reason
from tests.timeline.steps import STEP, Steps

SEEDS = range(10)
LEASES = itertools.count(1)
PLANTED: dict[str, tuple[dict[str, Any], Cause]] = {
    "slow reward host": ({"slow_reward": 20.0, "generate_s": 0.4}, Cause.SLOW_WORKER),
    "slow rollout host": ({"slow_rollout": 4.0}, Cause.SLOW_WORKER),
    "too few reward workers": (
        {"reward_s": 3.0, "generate_s": 0.3, "train_s": 0.1, "batch": 16},
        Cause.TOO_FEW_WORKERS,
    ),
    "slow link": ({"slow_link": 200.0, "pull_s": 0.02}, Cause.SLOW_LINK),
    "full arena": ({"room_s": 4.0}, Cause.FULL_ARENA),
    "forgotten lease": ({"forgotten": True}, Cause.UNACKED_LEASE),
    "no seal": ({"sealed": False, "more": "too_few"}, Cause.NOT_SEALED),
    "filter": ({"more": "filter"}, Cause.FILTER),
    "admit": ({"admit_s": 3.0}, Cause.ADMIT),
    "straggler": ({"straggler": 12.0, "batch": 16}, Cause.STRAGGLER),
    "starved peer": ({"stall_s": 15.0, "batch": 16}, Cause.STARVED_PEER),
    "starved backup": ({"backup_s": 6.0}, Cause.STARVED_PEER),
}
SOUND: dict[str, dict[str, Any]] = {
    "bound by generation": {},
    "bound by the trainer": {"train_s": 5.0},
    "one batch": {"batch": 16},
    "reward as slow as rollout": {"reward_s": 0.8},
    "many reward workers": {"rewarders": 3, "reward_s": 1.0},
    "two hosts": {"hosts": 2, "groups": 8},
    "one host": {"hosts": 1, "groups": 8},
    "many groups": {"groups": 64},
}


def why(seed: int, **how: Any) -> Why:
    return explain(Step(Steps(seed, **how).play(), STEP))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named(name: str) -> None:
    how, cause = PLANTED[name]
    found = [why(seed, **how) for seed in SEEDS]
    assert [one.cause for one in found] == [cause] * len(SEEDS), found[0].sentence


@pytest.mark.parametrize("name", SOUND)
def test_no_cause_is_named_where_nothing_is_wrong(name: str) -> None:
    for seed in SEEDS:
        found = why(seed, **SOUND[name])
        named = {one.cause for one in found.shares if one.seconds >= 0.2 * found.idle_s}
        assert named <= HEALTHY, found.sentence


def test_the_sentence_says_how_long_for_what_and_where() -> None:
    said = why(0, slow_reward=12.0).sentence
    assert said.startswith("step-41 took ")
    assert "train was idle " in said
    assert " lacked `reward`: reward on host d ran at 0.08 × the speed of the other reward" in said
    assert "holds" not in said
    assert why(0, train_s=5.0).sentence.endswith("so train itself bounds the step")


def test_a_starved_backup_is_named_for_as_long_as_calls_waited_for_it() -> None:
    found = why(0, backup_s=6.0)
    assert "peer z, which holds the backup of this partition, got no processor" in found.sentence
    assert found.shares[0].seconds == pytest.approx(6.0, abs=0.2)
    overdue = why(0, backup_s=6.0, overdue_s=2.0)
    starved = [one for one in overdue.shares if one.cause is Cause.STARVED_PEER]
    assert sum(one.seconds for one in starved) == pytest.approx(2.0, abs=0.2), overdue.shares


def test_a_stall_between_two_batches_is_named_if_an_answer_waited_for_it() -> None:
    """The shard had recorded the ack, and the trainer got its answer when the backup ran again."""
    of = {"stage": "train", "worker": "t", "host": "a"}
    events = [happened(Kind.PUT, 1.0, group="g0"), happened(Kind.PUT, 1.1, group="g1")]
    for lease, begin in ((1, 1.2), (2, 7.6)):
        more = of | {"lease": lease, "group": f"g{lease - 1}", "rows": 8}
        events += [
            happened(Kind.LEASE_BEGIN, begin, **more),
            happened(Kind.LEASE_END, begin + 0.4, **more, reason=Reason.ACK),
        ]
    events += [
        happened(Kind.STALL, 7.5, peer="b", seconds=6.0),
        happened(Kind.BACKUP, 9.0, peer="a", by="b", seconds=9.0),
    ]
    found = explain(Step(events, STEP))
    assert found.cause is Cause.STARVED_PEER, found.sentence
    assert found.idle_s == pytest.approx(6.0)


def test_two_causes_at_once_are_both_named() -> None:
    for seed in SEEDS:
        found = why(seed, slow_link=300.0, room_s=4.0)
        causes = {share.cause for share in found.shares[:2]}
        assert causes == {Cause.SLOW_LINK, Cause.FULL_ARENA}, found.sentence


@pytest.mark.parametrize("seed", [1011, 1043, 1071])
def test_a_slow_host_that_delays_nothing_is_not_named(seed: int) -> None:
    """It took one group and was done before the last rollout, so others took the rest."""
    slow, even = why(seed, slow_reward=12.0), why(seed)
    assert slow.idle_s < 1.05 * even.idle_s
    assert slow.cause in HEALTHY, slow.sentence


def test_what_is_missing_is_said() -> None:
    events = Steps().play()
    gone = Event(Kind.MISSING, events[-1].at, "b", reason=Reason.SILENT)
    assert "events of b are missing" in explain(Step([*events, gone], STEP)).sentence


def test_a_step_whose_first_events_were_overwritten_says_so() -> None:
    """The oldest event that a peer still has is the first that is known of the step."""
    events = [e for e in Steps().play() if e.kind is not Kind.CLAIM_WAIT]
    for nth, kept in enumerate(events[:6], 1):
        gone = Event(Kind.MISSING, kept.at, kept.peer, reason=Reason.OVERWRITTEN, rows=nth)
        found = explain(Step([gone, *events[nth - 1 :]], STEP))
        assert found.missing == (kept.peer,), nth
    early = msgspec.structs.replace(gone, at=events[0].at - 1.0)
    assert explain(Step([early, *events], STEP)).missing == ()


def test_leases_of_two_generations_are_not_mixed() -> None:
    """A partition that was dropped and declared again counts its leases from 1 again."""
    of = {"stage": "train", "worker": "trainer", "lease": 1, "rows": 8}
    events = [
        happened(Kind.LEASE_BEGIN, 1.0, **of),
        happened(Kind.LEASE_BEGIN, 5.0, **of, generation=2),
        happened(Kind.LEASE_END, 6.0, **of, generation=2, reason=Reason.ACK),
    ]
    first, second = leases(events, 9.0)
    assert (first.began, first.rows, first.is_open) == (1.0, 8, True)
    assert (second.began, second.ended, second.is_open) == (5.0, 6.0, False)


def test_without_evidence_nothing_is_named() -> None:
    """Of a step of which only the trainer's waits are known."""
    known = [e for e in Steps().play() if e.stage == "train" and e.kind is not Kind.READY]
    found = explain(Step(known, STEP))
    assert found.cause is Cause.UNKNOWN
    assert "the events do not show" in found.sentence


@pytest.mark.parametrize("many", range(0, 80, 7))
def test_any_beginning_of_a_step_is_explained_somehow(many: int) -> None:
    for events in (Steps(slow_reward=5.0).play(), Steps(forgotten=True).play()):
        assert explain(Step(events[:many], STEP)).sentence
        assert explain(Step(events[many:], STEP)).sentence


def test_steps_are_named_in_the_order_in_which_they_begin() -> None:
    events = [Event(Kind.PUT, float(n), partition=f"step-{n % 3}") for n in range(6)]
    assert steps(events) == ["step-0", "step-1", "step-2"]


def happened(kind: Kind, at: float, **more: Any) -> Event:
    told: dict[str, Any] = {"peer": "a", "partition": STEP, "generation": 1} | more
    return Event(kind, at, **told)


def put(at: float, group: str, worker: str) -> list[Event]:
    """A group of eight rows, with all that the stage needs."""
    of = {"rows": 8, "group": group, "worker": worker, "host": "a"}
    return [
        happened(Kind.PUT, at, **of),
        happened(Kind.READY, at, **of, stage="train", field="x"),
    ]


def test_a_plan_that_waits_for_the_seal_says_so() -> None:
    """Two ranks of a trainer; the last row came a second after they asked, the seal four more."""
    events = [*put(100.5, "g0", "rollout"), *put(101.0, "g1", "rollout")]
    events.append(happened(Kind.SEAL, 105.0))
    plan = {"stage": "train", "lease": 1}
    for group in ("g0", "g1"):
        events.append(happened(Kind.LEASE_BEGIN, 105.0, rows=8, group=group, **plan))
    for rank in range(2):
        of = {"stage": "train", "worker": f"rank {rank}", "host": "a", "lease": 2 + rank}
        wait = {"seconds": 5.0, "reason": Reason.PLAN}
        events.append(happened(Kind.CLAIM_WAIT, 105.0, **of | {"lease": 0}, **wait))
        events.append(happened(Kind.LEASE_BEGIN, 105.0, **of))
        events.append(happened(Kind.LEASE_END, 106.0, **of, reason=Reason.ACK))
    events.append(happened(Kind.LEASE_END, 106.0, rows=16, reason=Reason.ACK, **plan))
    found = explain(Step(sorted(events, key=lambda event: event.at), STEP))
    assert found.cause is Cause.NOT_SEALED, found.sentence
    said = "train was idle 5 s of it, 4 s because the partition was sealed 4 s after its last row"
    assert said in found.sentence


def stage(
    name: str, began: float, ended: float, group: str, worker: str, **how: Any
) -> list[Event]:
    """A lease of a group of eight rows, from one time to another; a stage before the last one adds
    what `train` needs."""
    of = {"stage": name, "worker": worker, "host": "a", "group": group, "rows": 8}
    of |= {"lease": next(LEASES)}
    begin = happened(Kind.LEASE_BEGIN, began, **of)
    end = happened(Kind.LEASE_END, ended, **of, **({"reason": Reason.ACK} | how))
    if name == "train" or how:
        return [begin, end]
    ready = of | {"stage": "train", "field": name, "by": name}
    return [begin, happened(Kind.READY, ended, **ready), end]


def waits(since: float, until: float, reason: Reason) -> Event:
    of = {"stage": "train", "worker": "trainer", "host": "a", "going_on": True}
    return happened(Kind.CLAIM_WAIT, until, seconds=until - since, reason=reason, **of)


def rolled(
    many: int, every_s: float = 0.1, worker: str = "rollout", begin: float = 1.0
) -> list[Event]:
    """Groups for a reward stage, and by what `put` says for `train` nothing."""
    found = list[Event]()
    for nth in range(many):
        at = begin + every_s * (nth + 1)
        of = {"rows": 8, "group": f"{worker}{nth}", "worker": worker, "host": "a"}
        found.append(happened(Kind.PUT, at, **of))
        found.append(happened(Kind.READY, at, **of, stage="reward", field="x"))
    return found


def explained(events: list[Event]) -> Why:
    return explain(Step(sorted(events, key=lambda event: event.at), STEP))


def test_a_stage_without_a_worker_is_named() -> None:
    """Nobody ever claimed from it, or its worker died, or stopped claiming."""
    never = explained([*rolled(4), waits(1.0, 20.0, Reason.FIELD)])
    assert never.cause is Cause.TOO_FEW_WORKERS
    text = "because 4 groups waited for reward, and no worker "
    assert f"{text}had claimed from it" in never.sentence
    for how, words in (({"reason": Reason.DIED}, "died"), ({}, "stopped claiming")):
        work = stage("reward", 1.2, 1.5, "rollout0", "pid 7")
        work += stage("reward", 1.6, 2.0, "rollout1", "pid 7", **how)
        found = explained([*rolled(5), *work, waits(1.0, 20.0, Reason.FIELD)])
        assert found.cause is Cause.TOO_FEW_WORKERS
        assert f"no worker claimed from it after pid 7 {words}" in found.sentence
        assert found.shares[0].seconds == pytest.approx(18.0, abs=0.2)


def test_a_step_that_waits_for_the_next_put_says_so_while_puts_come() -> None:
    """They come every second; after four without one, the partition is not sealed."""
    for until, cause in ((5.0, Cause.GENERATION), (9.0, Cause.NOT_SEALED)):
        events = [e for nth in range(3) for e in put(1.0 + nth, f"g{nth}", "rollout")]
        for nth in range(3):
            events += stage("train", 1.0 + nth, 1.1 + nth, f"g{nth}", "trainer")
        found = explained([*events, waits(3.1, until, Reason.NO_ROWS)])
        assert found.cause is cause, found.sentence


def test_a_stage_whose_worker_came_late_is_named_after_the_step() -> None:
    """Rows were ready at 1.1 s; the first worker claimed at 9 s."""
    events = [*rolled(1), *stage("reward", 9.0, 9.5, "rollout0", "pid 7")]
    events += stage("train", 9.5, 9.6, "rollout0", "trainer")
    of = {"stage": "train", "worker": "trainer", "host": "a", "reason": Reason.FIELD}
    events.append(happened(Kind.CLAIM_WAIT, 9.5, seconds=8.5, **of))
    found = explained(events)
    assert found.finished
    assert "7.9 s because 1 group waited for reward, and no worker had claimed" in found.sentence


def test_a_last_stage_that_nobody_claims_from_is_named() -> None:
    """Also if its workers are busy with another step: then nothing is wrong."""
    events = rolled(3)
    for nth in range(3):
        events += stage("reward", 2.0 + nth, 2.5 + nth, f"rollout{nth}", "pid 7")
    later = happened(Kind.ARENA, 20.0, partition="")
    found = explained([*events, later])
    assert (found.stage, found.finished, found.cause) == ("train", False, Cause.TOO_FEW_WORKERS)
    assert "because 3 groups waited for train, and no worker had claimed from it" in found.sentence
    busy = {"stage": "train", "worker": "trainer", "lease": 1, "rows": 8, "partition": "step-40"}
    found = explained([*events, happened(Kind.LEASE_BEGIN, 0.5, **busy), later])
    assert found.cause is Cause.STAGE
    assert "while train had rows of other steps" in found.sentence


def test_a_lease_ends_with_its_partition() -> None:
    """The reward worker held rows of another step that was dropped before this one began."""
    before = {"partition": "step-40", "stage": "reward"}
    begun = before | {"worker": "pid 7", "rows": 8, "lease": 1}
    dropped = happened(Kind.DROP, 0.9, **{"partition": "step-40", "rows": 8, "nbytes": 64})
    events = [happened(Kind.LEASE_BEGIN, 0.5, **begun), dropped, *rolled(4)]
    found = explained([*events, waits(1.0, 20.0, Reason.FIELD)])
    assert found.cause is Cause.TOO_FEW_WORKERS, found.sentence
    assert "4 groups waited for reward, and no worker had claimed from it" in found.sentence


def test_a_lease_ends_though_its_rows_were_dropped_or_lost_meanwhile() -> None:
    """Its holder acks what is left of it, which is nothing."""
    for kind in (Kind.DROP, Kind.LOST):
        begun, ended = stage("train", 1.2, 2.0, "g", "pid 7")
        gone = happened(kind, 1.5, rows=8, group="g")
        other = happened(kind, 1.5, rows=8, group="h")
        nothing = msgspec.structs.replace(ended, rows=0, group="")
        (lease,) = leases([begun, gone, nothing], 20.0)
        assert (lease.is_open, lease.ended) == (False, 2.0)
        for yet in ([begun, gone], [begun, other, nothing]):
            assert leases(yet, 20.0)[0].is_open


def test_groups_that_were_dropped_or_lost_are_not_waited_for() -> None:
    """Unless they were put again. Rows that were lost are said to be."""
    events = [*rolled(4), *stage("reward", 1.2, 1.4, "rollout0", "pid 7", reason=Reason.DROP)]
    events += [happened(Kind.DROP, 1.5, rows=8, group="rollout1")]
    events += [happened(Kind.LOST, 1.6, rows=8, group=f"rollout{nth}", by="c") for nth in (2, 3)]
    again = {"rows": 8, "group": "rollout3", "worker": "rollout", "host": "a"}
    events += [happened(Kind.PUT, 1.7, **again), happened(Kind.DROP, 1.5, rows=3, group="rollout3")]
    events += [happened(Kind.READY, 1.7, **again, stage="reward", field="x")]
    found = explained([*events, waits(1.0, 20.0, Reason.FIELD)])
    assert found.cause is Cause.TOO_FEW_WORKERS
    assert "because 1 group waited for reward, and " in found.sentence
    assert "; 16 rows were lost with peer c (events of c are missing" in found.sentence
    assert found.lost == {"c": 16}


def test_a_step_whose_puts_died_with_the_peer_that_served_it_is_explained() -> None:
    events = [happened(Kind.LOST, 2.0, rows=8, group="g", by="c", peer="b")]
    events += [waits(1.0, 20.0, Reason.FIELD)]
    assert steps(events) == [STEP]
    said = explained(events).sentence
    assert said.startswith(f"{STEP} has taken 19 s; train has been idle 19 s of it, 19 s for a ")
    assert said.endswith(
        "; 8 rows were lost with peer c (events of c are missing, so this may be wrong)"
    )


def test_a_group_that_lacks_rows_is_named() -> None:
    of = {"rows": 3, "group": "short", "worker": "rollout", "host": "a"}
    events = [*put(1.1, "g0", "rollout"), *put(1.2, "g1", "rollout"), happened(Kind.PUT, 1.3, **of)]
    found = explained([*events, waits(1.0, 20.0, Reason.OPEN_GROUP)])
    assert found.cause is Cause.NOT_SEALED
    assert "1 group is incomplete ('short' has 3 rows) and the partition is not" in found.sentence


def test_a_slow_rollout_worker_among_those_of_its_host_is_named_and_a_single_group_is_not() -> None:
    for slow_s, cause in ((0.5, Cause.SLOW_WORKER), (0.1, Cause.STRAGGLER)):
        events = list[Event]()
        for worker, every_s in (("u", 0.1), ("v", 0.1), ("w", slow_s)):
            for nth in range(4):
                events += put(1.0 + every_s * (nth + 1), f"{worker}{nth}", worker)
        if slow_s == 0.1:
            events += put(4.0, "w4", "w")
        end = max(e.at for e in events)
        of = {"stage": "train", "worker": "trainer", "host": "a"}
        events.append(happened(Kind.CLAIM_WAIT, end, seconds=end - 1.0, **of))
        for e in [e for e in events if e.kind is Kind.PUT]:
            lease = of | {"group": e.group, "rows": 8, "lease": 1}
            events.append(happened(Kind.LEASE_BEGIN, end, **lease))
            events.append(happened(Kind.LEASE_END, end + 0.1, **lease, reason=Reason.ACK))
        found = explained(events)
        assert found.cause is cause, found.sentence
        if cause is Cause.SLOW_WORKER:
            assert "because rollout in w ran at 0.2 × the speed of the other" in found.sentence


def test_a_slow_worker_of_the_last_stage_is_named_if_it_ends_alone() -> None:
    for slow_s, cause in ((4.0, Cause.SLOW_WORKER), (1.0, Cause.LAST_STAGE)):
        events = list[Event]()
        for nth in range(8):
            worker = "pid 8" if nth % 4 == 3 else "pid 7"
            begin = 1.0 + nth % 4 / 4 * 3 + nth // 4 / 4
            events += put(1.0, f"g{nth}", "rollout")
            if worker == "pid 7":
                events += stage("train", begin, begin + 0.24, f"g{nth}", worker)
        for nth, group in enumerate(("g3", "g7")):
            begin = 1.0 + slow_s * nth
            events += stage("train", begin, begin + slow_s, group, "pid 8")
        found = explained(events)
        assert found.cause is cause, found.sentence
        if cause is Cause.SLOW_WORKER:
            slow = "step-41 took 8 s, 6 s of it because train in pid 8 ran at 0.06 × the speed of"
            assert found.sentence.startswith(slow)
            assert found.sentence.endswith("; train was busy 100% of it")


def test_a_worker_that_died_early_makes_no_other_one_slow() -> None:
    """Of its two leases one ended when it died, after a moment."""
    events = list[Event]()
    for nth in range(8):
        events += put(1.0, f"g{nth}", "rollout")
    events += stage("train", 1.0, 1.5, "g0", "pid 7")
    events += stage("train", 1.5, 1.51, "g1", "pid 7", reason=Reason.DIED)
    for nth in range(1, 8):
        events += stage("train", 1.0 + 0.5 * nth, 1.5 + 0.5 * nth, f"g{nth}", "pid 8")
    found = explained(events)
    assert found.cause is Cause.LAST_STAGE, found.sentence


def test_a_stalled_peer_is_named_and_not_the_link_from_it() -> None:
    """Peer b does not run for four of the five seconds that a pull from it takes."""
    events = [*put(1.0, "g0", "rollout"), *stage("train", 1.1, 6.2, "g0", "trainer")]
    pull = {"stage": "train", "by": "b", "nbytes": 1 << 20, "partition": "", "generation": 0}
    events.append(happened(Kind.PULL, 6.1, seconds=5.0, **pull))
    events.append(happened(Kind.STALL, 5.5, peer="b", seconds=4.0, partition=""))
    found = explained(events)
    assert found.cause is Cause.STARVED_PEER, found.sentence
    assert "4 s because peer b got no processor time" in found.sentence


def test_many_bytes_at_full_speed_and_few_bytes_are_no_slow_link() -> None:
    """A quarter of a second a batch, for 60 MB; and for 4 KiB, which say nothing of the link."""
    events = Steps(pull_s=0.25, train_s=0.2, generate_s=0.3).play()
    assert Cause.SLOW_LINK in {share.cause for share in explain(Step(events, STEP)).shares}
    for nbytes in (60_000_000, 4_096):
        told = [
            msgspec.structs.replace(e, nbytes=nbytes) if e.kind is Kind.PULL else e for e in events
        ]
        found = {share.cause for share in explain(Step(told, STEP)).shares}
        assert Cause.TRANSFER in found and Cause.SLOW_LINK not in found


def test_admit_is_named_where_it_holds_back_the_workers_that_do_not_generate() -> None:
    """Of four rollout workers one generates at a time; the trainer takes each group at once."""
    events, at = list[Event](), 100.0
    for nth in range(8):
        worker = f"rollout {nth % 4}"
        if nth:
            of = {"worker": worker, "host": "a", "reason": Reason.LAG}
            events.append(happened(Kind.ADMIT_WAIT, at, **of, seconds=min(3.0, nth)))
        at += 1.0
        events += put(at, f"g{nth}", worker)
        train: dict[str, Any] = {"stage": "train", "worker": "trainer", "host": "a"}
        events.append(happened(Kind.CLAIM_WAIT, at, **train, seconds=0.99))
        train |= {"group": f"g{nth}", "rows": 8, "lease": nth + 1}
        events.append(happened(Kind.LEASE_BEGIN, at, **train))
        events.append(happened(Kind.LEASE_END, at + 0.01, **train, reason=Reason.ACK))
    found = explain(Step(sorted(events, key=lambda event: event.at), STEP))
    assert found.cause is Cause.ADMIT, found.sentence
    assert "admit held " in found.sentence
