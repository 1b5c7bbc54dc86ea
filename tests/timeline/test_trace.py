"""A trace for Perfetto: its tracks, slices, arrows and counters."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

pytest.importorskip("perfetto", reason="needs perfetto: pip install 'dataplane-rl[trace]'")

from dataplane.events.merge import Event
from dataplane.timeline.trace import encode
from dataplane.wire.events import Kind, Reason
from tests.timeline.steps import STEP, Steps
from tests.timeline.traces import Read, read


def traced(events: list[Event], *names: str, unix_s: float | None = None) -> Read:
    return read(encode(events, names or [STEP], unix_s))


def test_each_host_is_a_process_with_threads_for_puts_stages_links_and_the_peer() -> None:
    found = traced(Steps(hosts=3).play())
    assert [track.process.process_name for track in found.processes.values()] == [
        *("host a", "host b", "host c")
    ]
    assert found.threads["a"] == [
        *("put rollout a", "ready reward", "ready train", "reward: reward a0", "train: trainer"),
        *("link from b", "link from c", "peer"),
    ]
    assert found.threads["c"] == ["put rollout c", "reward: reward c0"]


def test_a_worker_waits_and_works_in_turns_on_one_thread() -> None:
    found = traced(Steps().play())
    train = [one for one in found.slices if one.track == "train: trainer" and not one.parent]
    assert {one.category for one in train} == {"claim_wait", "lease"}
    assert {one.name for one in train} == {"claim_wait: no_rows", STEP}
    acks = [one for one in found.slices if one.category == "lease_end"]
    assert len(acks) == 32
    for ack in acks:
        assert ack.name == "ack"
        assert ack.parent is not None
        assert ack.parent.category == "lease"
        assert ack.parent.begin <= ack.begin <= (ack.parent.end or 0)


def test_arrows_lead_from_put_to_ready_to_claim_to_ack_and_on_to_the_next_stage() -> None:
    found = traced(Steps(groups=4, batch=2).play())
    assert not found.unended
    assert len(found.arrows) == 8
    stories = [[(one.category, one.track) for one in path] for path in found.arrows.values()]
    for host in "abcd":
        assert [
            ("put", f"put rollout {host}"),
            ("ready", "ready reward"),
        ] in [story[:2] for story in stories]
    assert {tuple(category for category, _ in story) for story in stories} == {
        ("put", "ready", "lease", "lease_end"),
        ("lease", "ready", "lease", "lease_end"),
    }
    for path in found.arrows.values():
        groups = {one.about["group"] for one in path if "group" in one.about}
        assert len(groups) == 1
        assert [one.begin for one in path] == sorted(one.begin for one in path)


def test_a_group_that_came_back_is_followed_to_its_second_holder() -> None:
    def note(kind: Kind, at: float, **more: object) -> Event:
        of = {"partition": STEP, "generation": 1, "group": "g", "rows": 2, "peer": "a"}
        of |= {"stage": "train", "host": "a"}
        return Event(kind, at, **of | more)  # type: ignore[arg-type]

    events = [
        note(Kind.PUT, 1.0, worker="w", stage=""),
        note(Kind.READY, 1.1, worker="w"),
        note(Kind.LEASE_BEGIN, 1.2, worker="first", lease=1),
        note(Kind.LEASE_END, 1.3, worker="first", lease=1, reason=Reason.DIED),
        note(Kind.LEASE_BEGIN, 1.4, worker="second", lease=2),
        note(Kind.LEASE_END, 1.5, worker="second", lease=2, reason=Reason.ACK),
    ]
    found = traced(events)
    (path,) = found.arrows.values()
    assert [one.name for one in path] == ["put", "ready", STEP, "died", STEP, "ack"]
    assert not found.unended
    assert found.counters["", "train: rows ready"] == [
        *((1_100_000_000, 2), (1_200_000_000, 0), (1_300_000_000, 2), (1_400_000_000, 0))
    ]


def test_arrows_of_a_plan_pass_through_its_own_lease_beside_those_of_its_ranks() -> None:
    def note(kind: Kind, at: float, **more: object) -> Event:
        of = {"partition": STEP, "generation": 1, "rows": 2, "stage": "train"}
        return Event(kind, at, "a", **of | more)  # type: ignore[arg-type]

    ack = {"reason": Reason.ACK}
    events = [
        note(Kind.PUT, 1.0, group="g", worker="w", host="a", stage=""),
        note(Kind.READY, 1.1, group="g", worker="w"),
        note(Kind.LEASE_BEGIN, 1.2, group="g", lease=1),
        note(Kind.LEASE_BEGIN, 1.3, worker="rank 0", host="a", lease=2, rows=0),
        note(Kind.LEASE_BEGIN, 1.4, worker="rank 1", host="b", lease=3, rows=0),
        note(Kind.LEASE_END, 1.8, worker="rank 0", host="a", lease=2, rows=0, **ack),
        note(Kind.LEASE_END, 1.9, worker="rank 1", host="b", lease=3, rows=0, **ack),
        note(Kind.LEASE_END, 2.0, group="g", lease=1, **ack),
    ]
    found = traced(events)
    assert found.threads["a"] == ["put w", "ready train", "train: plan", "train: rank 0"]
    assert found.threads["b"] == ["train: rank 1"]
    assert list(found.processes) == ["a", "b"]
    (path,) = found.arrows.values()
    assert [one.name for one in path] == ["put", "ready", STEP, "ack"]
    assert not found.unended
    assert [value for _, value in found.counters["", "train: rows ready"]] == [2, 0]


def test_the_step_is_above_all_hosts_with_the_sentence() -> None:
    found = traced(Steps(slow_reward=12.0).play())
    (step,) = found.of("step")
    assert step.name == STEP
    assert "reward on host d ran at 0.08 × the speed of the other reward workers" in str(
        step.about["why"]
    )
    assert step.end is not None


def test_rows_ready_are_counted_and_end_at_none() -> None:
    found = traced(Steps(slow_reward=12.0).play())
    assert {name for _, name in found.counters} == {"reward: rows ready", "train: rows ready"}
    for values in found.counters.values():
        assert all(value >= 0 for _, value in values)
        assert max(value for _, value in values) >= 8
        assert values[-1][1] == 0


def test_dropped_rows_are_not_ready_any_more() -> None:
    events = [
        Event(Kind.READY, 1.0, "a", partition=STEP, stage="train", group="g", rows=3),
        Event(Kind.READY, 2.0, "a", partition=STEP, stage="train", group="h", rows=3),
        Event(Kind.DROP, 3.0, "a", partition=STEP, group="g", rows=3),
        Event(Kind.DROP, 4.0, "a", partition=STEP, rows=3, nbytes=100),
    ]
    values = traced(events).counters["", "train: rows ready"]
    assert [value for _, value in values] == [3, 6, 3, 0]


def test_rows_ready_are_not_shown_where_events_are_missing() -> None:
    events = Steps().play()
    gone = Event(Kind.MISSING, events[-1].at, "b", reason=Reason.SILENT)
    found = traced([*events, gone])
    assert not found.counters
    assert found.of("step")[0].about["not_shown"] == "rows ready: events of b are missing"
    assert "It did not answer" in found.processes["b"].description
    without = [event for event in events if event.kind is not Kind.READY]
    (step,) = traced(without).of("step")
    assert "do not show all rows" in str(step.about["not_shown"])


def test_the_arena_of_each_host_and_the_versions_between_begin_and_ack_are_counted() -> None:
    events = Steps(groups=4, batch=2).play()
    begin, end = events[0].at, events[-1].at
    told = [
        event if event.kind is not Kind.PUT else msgspec.structs.replace(event, version=1)
        for event in events
    ]
    told += [
        Event(Kind.ARENA, begin - 60, "b", nbytes=500),
        Event(Kind.ARENA, begin - 50, "b", nbytes=1_000),
        Event(Kind.ARENA, begin + 1, "b", nbytes=2_000),
        Event(Kind.ADVANCE, begin, "a", partition=STEP, generation=1, version=2),
        Event(Kind.ADVANCE, end - 0.1, "a", partition=STEP, generation=1, version=4),
    ]
    found = traced(sorted(told, key=lambda event: event.at))
    assert [value for _, value in found.counters["b", "arena"]] == [1_000, 2_000]
    assert [value for _, value in found.counters["", f"{STEP}: version"]] == [1, 2, 4]
    assert [value for _, value in found.counters["", f"{STEP}: lag"]] == [1, 1, 3, 3]


def test_offsets_of_clocks_and_their_uncertainty_are_written_down() -> None:
    events = [
        event
        if event.peer == "a"
        else msgspec.structs.replace(event, offset=-0.25, uncertain=0.002)
        for event in Steps(slow_link=10.0, room_s=1.0).play()
    ]
    far = [
        Event(Kind.STALL, events[5].at, "c", offset=0.5, uncertain=0.001),
        Event(Kind.STALL, events[9].at, "c", offset=0.5, uncertain=0.003),
    ]
    found = traced(sorted([*events, *far], key=lambda event: event.at))
    assert "0.500000 s ahead of the clock" in found.processes["c"].description
    assert "an error of at most 3 ms" in found.processes["c"].description
    assert found.processes["a"].description == "All times in this trace are on this host's clock."
    clocks = {one.track: one.about for one in found.of("clock")}
    assert clocks["c"] == {"offset_s": 0.5, "uncertain_s": 0.003}
    assert clocks["a"] == {"offset_s": 0.0, "uncertain_s": 0.0}


def test_what_goes_on_does_not_end() -> None:
    events = Steps(forgotten=True).play()
    now = events[-1].at
    held = Event(
        Kind.LEASE_BEGIN, now, "a", partition=STEP, generation=1, stage="reward", rows=8,
        worker="reward d0", host="d", lease=15, seconds=60.0, going_on=True,
    )  # fmt: skip
    found = traced([*events, held])
    unended = [one for one in found.slices if one.end is None]
    assert {(one.category, one.track) for one in unended} >= {
        ("claim_wait", "train: trainer"),
        ("step", "steps"),
    }
    (lease,) = [one for one in unended if one.about.get("lease") == 15]
    assert lease.category == "lease"


def test_a_lease_ends_with_its_partition() -> None:
    """Its holder is not told before it acks, and no event says that the lease ended."""
    of: dict[str, Any] = {"peer": "a", "partition": STEP, "generation": 1}
    lease = of | {"stage": "reward", "worker": "pid 7", "host": "a", "lease": 1}
    events = [
        Event(Kind.PUT, 1.0, **of, group="g", rows=2),
        Event(Kind.LEASE_BEGIN, 2.0, **lease, group="g", rows=2),
        Event(Kind.DROP, 3.0, **of, rows=2, nbytes=64),
    ]
    found = traced(events)
    (held,) = found.of("lease")
    (dropped,) = found.of("drop")
    assert held.end == dropped.begin
    (open_yet,) = traced(events[:2]).of("lease")
    assert open_yet.end is None


def test_what_overlaps_on_a_thread_has_threads_of_its_own() -> None:
    pulls = [
        Event(Kind.PULL, 10.0 + n, "a", seconds=2.5, by="b", nbytes=1, transport="tcp")
        for n in range(6)
    ]
    put = Event(Kind.PUT, 9.0, "a", partition=STEP, group="g", rows=1, worker="w", host="a")
    end = msgspec.structs.replace(put, at=20.0)
    found = traced([put, *pulls, end])
    assert found.threads["a"] == ["put w", *("link from b", "link from b (2)", "link from b (3)")]
    assert all(one.parent is None for one in found.slices)


def test_what_a_stream_does_one_after_another_stays_on_one_thread() -> None:
    """It claims the next batch with the ack of the last one, and the ack takes a moment longer."""
    events = list[Event]()

    def note(kind: Kind, at: float, **more: object) -> None:
        of = {"partition": STEP, "stage": "train", "worker": "w", "host": "a", "rows": 1}
        events.append(Event(kind, at, "a", **of | more))  # type: ignore[arg-type]

    for n in range(4):
        begin = 10.0 + 2 * n
        note(Kind.LEASE_BEGIN, begin, group=n, lease=n)
        note(Kind.CLAIM_WAIT, begin + 0.0001, seconds=0.5, reason=Reason.NO_ROWS)
        note(Kind.LEASE_END, begin + 1.51, group=n, lease=n, reason=Reason.ACK)
    note(Kind.LEASE_BEGIN, 17.49, group=9, lease=9)
    note(Kind.LEASE_END, 18.0, group=9, lease=9, reason=Reason.ACK)
    found = traced([*events, Event(Kind.PUT, 9.0, "a", partition=STEP, worker="w", host="a")])
    assert found.threads["a"] == ["put w", "train: w"]
    train = [one for one in found.slices if one.track == "train: w" and one.parent is None]
    assert [one.category for one in train] == [*(4 * ["claim_wait", "lease"]), "lease"]
    assert train[-1].about["overlap_s"] == pytest.approx(0.02)
    assert train[-1].begin == train[-2].end


@pytest.mark.parametrize("before", [1, 3])
def test_only_the_steps_that_were_asked_for_are_written_each_as_it_is_now(before: int) -> None:
    """The clock of the peer that declared it first may have been ahead."""
    old = [
        msgspec.structs.replace(e, generation=before) if e.partition else e
        for e in Steps(seed=1, begin=1_000.0).play()
    ]
    last = [msgspec.structs.replace(e, generation=2) for e in Steps(begin=2_000.0).play()]
    other = [
        msgspec.structs.replace(e, partition="other") if e.partition else e
        for e in Steps(begin=3_000.0).play()
    ]
    found = traced([*old, *last, *other])
    assert min(one.begin for one in found.slices) == 2_000_000_000_000
    assert max(one.begin for one in found.slices) < 3_000_000_000_000
    assert len(found.of("put")) == 16
    both = traced([*old, *last, *other], STEP, "other")
    assert [one.name for one in both.of("step")] == [STEP, "other"]


def test_times_before_the_asked_host_started_are_not_negative() -> None:
    events = Steps(begin=-500.0).play()
    found = traced(events, unix_s=1.7e9)
    assert min(one.begin for one in found.slices) == 0
    (snapshot,) = found.snapshots
    ahead = snapshot[1] - snapshot[6]
    assert ahead == pytest.approx((1.7e9 - 500) * 1e9, abs=1e6)


@pytest.mark.parametrize("seed", range(6))
def test_any_part_of_the_events_is_a_sound_trace(seed: int) -> None:
    any_of = random.Random(seed)
    stalls, more = Steps(seed, stall_s=5.0, room_s=1.0).play(), Steps(seed, forgotten=True).play()
    for events in (stalls, more):
        cut = any_of.randrange(len(events))
        some = [event for event in events if any_of.random() < 0.7]
        for part in (events[:cut], events[cut:], some):
            found = traced(part)
            assert all(len(path) > 1 for path in found.arrows.values())
            assert all(value >= 0 for values in found.counters.values() for _, value in values)
    assert traced([]).slices == []
