"""What is recorded of a job, from its events: sizes, times, and what is left out and said."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from dataplane.events.follow import Follower, NewEvents
from dataplane.events.merge import Event
from dataplane.timeline import recording
from dataplane.timeline.recording import RecordedStep, Recorder
from dataplane.wire.events import Kind, Reason
from tests.timeline.steps import STEP, Steps


def numbered(events: Sequence[Event], life: int = 1) -> list[Event]:
    """As the peers' rings number them. life: counts how often the peers have started."""
    last, found = dict[str, int](), list[Event]()
    for event in sorted(events, key=lambda one: one.at):
        last[event.peer] = last.get(event.peer, 0) + 1
        of = {"number": last[event.peer], "incarnation": 1_000 * life + ord(event.peer)}
        found.append(msgspec.structs.replace(event, **of))
    return found


def look(events: list[Event]) -> NewEvents:
    """A look that brings these events, and after which nothing is due."""
    return msgspec.structs.replace(Follower().take(events, 0.0), until=math.inf)


def played(step: int = 0, **how: object) -> list[Event]:
    begin = 1_000.0 + 100.0 * step
    events = Steps(seed=step, begin=begin, **how).play()  # type: ignore[arg-type]
    named = [
        msgspec.structs.replace(e, partition=f"step-{step}") if e.partition == STEP else e
        for e in events
    ]
    return [*named, last_seal(named)]


def last_seal(events: Sequence[Event]) -> Event:
    """Nobody puts after the last ack."""
    return msgspec.structs.replace(events[-1], kind=Kind.SEAL, at=max(e.at for e in events))


def recorded(events: Sequence[Event]) -> list[RecordedStep]:
    recorder = Recorder()
    found = [*recorder.take(look(numbered(events))), *recorder.finish()]
    assert not recorder.left_out
    return found


def test_a_step_has_its_groups_with_their_sizes_and_times() -> None:
    events = played()
    (step,) = recorded(events)
    puts = [event for event in events if event.kind is Kind.PUT]
    assert step.partition == "step-0"
    assert (step.last_stage, step.stages) == ("train", ["reward", "train"])
    assert step.workers == {"reward": 4, "train": 1}
    assert step.claims == {"reward": (1, 1), "train": (4, 4)}
    assert [group.rows for group in step.groups] == [8] * 16
    assert [group.nbytes for group in step.groups] == [1 << 20] * 16
    assert all(group.trained for group in step.groups)
    assert sorted(group.host for group in step.groups) == [h for h in range(4) for _ in range(4)]
    began = min(event.began for event in events if event.kind in (Kind.PUT, Kind.CLAIM_WAIT))
    put = sorted(event.at for event in puts)
    assert [group.put_s for group in step.groups] == pytest.approx([at - began for at in put])


def test_a_stage_s_time_is_from_lease_to_ack_without_pulls_and_shared_by_its_groups() -> None:
    slow = played(pull_s=0.5, slow_link=2.0)
    (step,) = recorded(slow)
    worked = sum(group.stage_s["train"] for group in step.groups)
    assert worked == pytest.approx(4 * 0.5, rel=0.2)  # four batches of half a second, no pull
    one_batch = {round(group.stage_s["train"], 9) for group in step.groups}
    assert len(one_batch) == 4


def test_what_the_plane_s_calls_took_is_not_recorded() -> None:
    """A replay makes the calls again."""
    told = {Kind.PUT: 0.25, Kind.LEASE_END: 0.3}
    events = [
        msgspec.structs.replace(e, client_s=told.get(e.kind, 0.0) if e.partition else 0.0)
        for e in played()
    ]
    (before,), (step,) = recorded(played()), recorded(events)
    assert [group.stage_s["train"] for group in step.groups] == pytest.approx([0.3 / 4] * 16)
    called = [max(0.0, group.put_s - 0.25) for group in before.groups]
    assert [group.put_s for group in step.groups] == pytest.approx(called)


def test_a_client_cannot_have_worked_for_longer_than_its_lease_lasted() -> None:
    events = [
        msgspec.structs.replace(e, client_s=1e9) if e.kind is Kind.LEASE_END else e
        for e in played()
    ]
    assert recorded(events) == recorded(played())


def test_leases_that_a_worker_holds_at_once_are_not_counted_twice() -> None:
    of = {"partition": "p", "stage": "train", "worker": "w", "host": "a", "rows": 1}
    events = [Event(Kind.PUT, 0.0, "a", partition="p", group=g, rows=1, host="a") for g in "xy"]
    events += [
        Event(Kind.READY, 0.0, "a", partition="p", stage="train", group=g, rows=1) for g in "xy"
    ]
    for lease, (group, began, ended) in enumerate((("x", 1.0, 3.0), ("y", 1.5, 4.0))):
        end = {"lease": lease, "seconds": ended - began, "reason": Reason.ACK}
        events.append(Event(Kind.LEASE_BEGIN, began, "a", group=group, lease=lease, **of))  # type: ignore[arg-type]
        events.append(Event(Kind.LEASE_END, ended, "a", group=group, **end, **of))  # type: ignore[arg-type]
    events.append(Event(Kind.SEAL, 5.0, "a", partition="p"))
    (step,) = recorded(events)
    assert [group.stage_s for group in step.groups] == [{"train": 2.0}, {"train": 1.0}]


def test_a_worker_that_waits_for_the_last_rows_of_a_step_does_not_pause() -> None:
    """Its claim ends with the step, and the optimiser takes a second."""
    events = list[Event]()
    for step in range(2):
        at, of = 10.0 * step, {"partition": f"step-{step}", "stage": "train"}
        for group, worker in enumerate("vw"):
            who = {"worker": worker, "group": group, "rows": 1, "lease": 2 * step + group}
            put = {"partition": of["partition"], "group": group, "rows": 1}
            events.append(Event(Kind.PUT, at + 1, "a", **put))  # type: ignore[arg-type]
            events.append(Event(Kind.READY, at + 1, "a", stage="train", **put))  # type: ignore[arg-type]
            events.append(Event(Kind.LEASE_BEGIN, at + 1, "a", **who, **of))  # type: ignore[arg-type]
            ended = {"reason": Reason.ACK, "seconds": 1.0 + 6 * group}
            events.append(Event(Kind.LEASE_END, at + 2 + 6 * group, "a", **ended, **who, **of))  # type: ignore[arg-type]
            began = at if step else at + 0.5
            wait = {"worker": worker, "seconds": at + 1 - began}
            events.append(Event(Kind.CLAIM_WAIT, at + 1, "a", **wait, **of))  # type: ignore[arg-type]
        events.append(Event(Kind.CLAIM_WAIT, at + 9, "a", worker="v", seconds=7.0, **of))  # type: ignore[arg-type]
        events.append(Event(Kind.CLAIM_WAIT, at + 9, "a", worker="w", seconds=1.0, **of))  # type: ignore[arg-type]
        events.append(Event(Kind.SEAL, at + 9, "a", partition=f"step-{step}"))
    assert [step.pause_s for step in recorded(events)] == [-1.0, 1.0]


def test_the_ranks_of_a_plan_are_one_worker() -> None:
    of = {"partition": "p", "stage": "train"}
    events = [
        Event(Kind.PUT, 0.0, "a", partition="p", group=0, rows=4),
        Event(Kind.READY, 0.0, "a", group=0, rows=4, **of),  # type: ignore[arg-type]
        Event(Kind.LEASE_BEGIN, 1.0, "a", group=0, rows=4, lease=1, **of),  # type: ignore[arg-type]
    ]
    for rank in range(2):
        begun = {"lease": 2 + rank, "worker": f"rank {rank}"}
        events.append(Event(Kind.LEASE_BEGIN, 1.0, "a", **begun, **of))  # type: ignore[arg-type]
        ended = {"seconds": 2.0, "reason": Reason.ACK}
        events.append(Event(Kind.LEASE_END, 3.0, "a", **begun, **ended, **of))  # type: ignore[arg-type]
    end = {"group": 0, "rows": 4, "lease": 1, "seconds": 2.0, "reason": Reason.ACK}
    events.append(Event(Kind.LEASE_END, 3.0, "a", **end, **of))  # type: ignore[arg-type]
    events.append(Event(Kind.SEAL, 4.0, "a", partition="p"))
    (step,) = recorded(events)
    assert step.workers == {"train": 1}
    (group,) = step.groups
    assert (group.rows, group.trained, group.stage_s) == (4, True, {"train": 2.0})


def test_rows_without_a_group_are_one_group_for_each_put() -> None:
    events = [Event(Kind.PUT, 1.0 + n, "a", partition="p", rows=4, nbytes=400) for n in range(2)]
    events += [Event(Kind.READY, 2.0, "a", partition="p", stage="s", rows=8)]
    of = {"partition": "p", "stage": "s", "worker": "w", "lease": 1, "rows": 8}
    events += [
        Event(Kind.LEASE_BEGIN, 3.0, "a", **of),  # type: ignore[arg-type]
        Event(Kind.LEASE_END, 7.0, "a", seconds=4.0, reason=Reason.ACK, **of),  # type: ignore[arg-type]
        Event(Kind.SEAL, 8.0, "a", partition="p"),
    ]
    (step,) = recorded(events)
    assert [(g.rows, g.nbytes, g.stage_s["s"]) for g in step.groups] == [(4, 400, 2.0)] * 2
    assert step.claims == {"s": (2, 2)}


def test_a_group_that_was_dropped_was_not_trained() -> None:
    of = {"partition": "p", "rows": 2}
    events = [Event(Kind.PUT, 1.0, "a", group=g, **of) for g in (0, 1)]  # type: ignore[arg-type]
    events += [Event(Kind.READY, 1.0, "a", stage="s", group=g, **of) for g in (0, 1)]  # type: ignore[arg-type]
    events.append(Event(Kind.LEASE_BEGIN, 2.0, "a", stage="s", group=0, lease=1, **of))  # type: ignore[arg-type]
    events.append(
        Event(Kind.LEASE_END, 3.0, "a", stage="s", group=0, lease=1, reason=Reason.ACK, **of)  # type: ignore[arg-type]
    )
    events.append(Event(Kind.DROP, 4.0, "a", group=1, **of))  # type: ignore[arg-type]
    events.append(Event(Kind.SEAL, 5.0, "a", partition="p"))
    (step,) = recorded(events)
    assert [group.trained for group in step.groups] == [True, False]


@pytest.mark.parametrize("by", ["reward", "train"])
def test_rows_that_a_stage_drops_under_its_lease_are_not_trained(by: str) -> None:
    """Two groups for reward, critic and then train. One stage drops the second one, with no event
    but the end of its lease, and no other stage acks it."""
    of, events = {"partition": "p", "rows": 2}, list[Event]()
    for group in (0, 1):
        events.append(Event(Kind.PUT, 1.0, "a", group=group, **of))  # type: ignore[arg-type]
        stages = ["reward", "critic", "train"]
        for stage in stages if group == 0 or by == "train" else ["reward", "critic"]:
            at = 10.0 * (1 + stages.index(stage)) + group
            who = {"stage": stage, "group": group} | of
            added = "reward" if stage == "train" else ""
            events.append(Event(Kind.READY, at, "a", by=added, **who))  # type: ignore[arg-type]
            if by == "reward" and (stage, group) == ("critic", 1):
                continue
            who |= {"lease": int(at)}
            reason = Reason.DROP if (stage, group) == (by, 1) else Reason.ACK
            events.append(Event(Kind.LEASE_BEGIN, at, "a", **who))  # type: ignore[arg-type]
            events.append(Event(Kind.LEASE_END, at + 1, "a", reason=reason, seconds=1.0, **who))  # type: ignore[arg-type]
    (step,) = recorded([*events, Event(Kind.SEAL, 50.0, "a", partition="p")])
    assert step.last_stage == "train"
    assert [group.trained for group in step.groups] == [True, False]
    assert step.groups[1].stage_s[by] == 1.0


def test_polled_piece_by_piece_it_is_the_same_recording() -> None:
    events = numbered([*played(0), *played(1), *played(2)])
    whole = recorded(events)
    follower, recorder, found = Follower(), Recorder(), list[RecordedStep]()
    for at in range(0, len(events), 7):  # each look has what the one before had, too
        until = events[min(at + 7, len(events)) - 1].at
        found += recorder.take(follower.take(events[max(0, at - 20) : at + 7], until))
    found += recorder.finish()
    assert found == whole
    assert [step.number for step in found] == [0, 1, 2]
    assert found[1].pause_s == pytest.approx(
        played(1)[0].began - max(e.at for e in played(0) if e.kind is Kind.LEASE_END), abs=3.0
    )


def test_a_step_with_overwritten_events_is_left_out_and_said() -> None:
    events = numbered([*played(0), *played(1), *played(2)])
    in_second = [e for e in events if e.partition == "step-1" and e.peer == "a"]
    lost = {e.number for e in in_second[10:15]}
    kept = [e for e in events if e.peer != "a" or e.number not in lost]
    recorder = Recorder()
    found = [*recorder.take(look(kept)), *recorder.finish()]
    assert [step.partition for step in found] == ["step-0", "step-2"]
    assert [step.number for step in found] == [0, 2]
    assert recorder.lost == 5
    assert recorder.left_out == ["step-1: 5 events were overwritten at peer a"]


def test_a_step_whose_first_events_nobody_has_is_left_out_and_said() -> None:
    events = [e for e in numbered([*played(0), *played(1)]) if e.peer != "a" or e.number > 9]
    first = next(e for e in events if e.peer == "a")
    gone = msgspec.structs.replace(first, kind=Kind.MISSING, number=0, rows=9)
    gone = msgspec.structs.replace(gone, reason=Reason.OVERWRITTEN)
    recorder = Recorder()
    found = [*recorder.take(look([gone, *events])), *recorder.finish()]
    assert [step.partition for step in found] == ["step-1"]
    assert recorder.lost == 0  # before the recording
    assert recorder.left_out == ["step-0: 9 events were overwritten at peer a"]


def test_a_step_that_is_not_over_at_the_end_is_left_out_and_said() -> None:
    events = numbered([*played(0), *[e for e in played(1) if e.at < 1_102.0]])
    recorder = Recorder()
    assert [step.partition for step in recorder.take(look(events))] == ["step-0"]
    assert not recorder.finish()
    assert recorder.left_out == ["step-1: it had not ended"]


def test_a_step_that_nobody_sealed_is_over_at_the_end_if_all_is_acked() -> None:
    unsealed = [e for e in played(sealed=False) if e.kind is not Kind.SEAL]
    recorder = Recorder()
    assert not recorder.take(look(numbered(unsealed)))
    assert [step.partition for step in recorder.finish()] == ["step-0"]


def test_what_is_held_of_unfinished_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_GROUPS", 20)
    puts = [
        Event(Kind.PUT, float(n), "a", partition=f"step-{n // 8}", group=n, rows=1)
        for n in range(80)
    ]
    recorder = Recorder()
    assert not recorder.take(look(numbered(puts)))
    assert len(recorder.left_out) == 8
    assert recorder.left_out[0] == "step-0: over 20 groups were not done"


def test_a_peer_that_starts_again_is_no_gap() -> None:
    follower, recorder, found = Follower(), Recorder(), list[RecordedStep]()
    for life, asked in ((0, 1_090.0), (1, 1_190.0)):
        found += recorder.take(follower.take(numbered(played(life), life), asked))
    found += recorder.finish()
    assert [step.partition for step in found] == ["step-0", "step-1"]
    assert recorder.lost == 0


@pytest.mark.parametrize("lives", [True, False])
def test_a_step_whose_shard_moves_is_left_out_if_the_first_peer_is_not_heard_of_again(
    lives: bool,
) -> None:
    """What it noted between the last look and its death is missing: the numbers have no gap."""
    first, second, third = (played(n, hosts=1) for n in range(3))
    takeover = 1_108.0
    moved = [msgspec.structs.replace(e, peer="b") if e.at > takeover else e for e in second]
    moved += [msgspec.structs.replace(e, peer="b") for e in third]
    if lives:
        moved.append(Event(Kind.ARENA, takeover + 1.0, "a", nbytes=1))
    recorder = Recorder()
    found = [*recorder.take(look(numbered([*first, *moved]))), *recorder.finish()]
    names = ["step-0", "step-1", "step-2"]
    assert [step.partition for step in found] == (names if lives else names[::2])
    why = "peer a served its shard, but sent no events after peer b took over"
    assert recorder.left_out == ([] if lives else [f"step-1: {why}"])


def test_a_step_in_which_its_peer_started_again_is_left_out() -> None:
    before = [e for e in played(0) if e.at < 1_002.0]
    after = [e for e in played(0) if e.at >= 1_002.0]
    follower, recorder = Follower(), Recorder()
    for life, some in ((0, before), (1, after)):
        assert not recorder.take(follower.take(numbered(some, life), some[-1].at))
    assert not recorder.finish()
    assert recorder.left_out == ["step-0: peer a restarted"]
