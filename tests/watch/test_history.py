"""What a watcher remembers, and what is shown of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dataplane.events.merge import Event
from dataplane.timeline.causes import SLOW, Cause
from dataplane.timeline.step import Step
from dataplane.timeline.why import explain
from dataplane.watch import terminal
from dataplane.watch.history import MAX_STEPS, History
from dataplane.watch.picture import BINS, STATES, picture
from dataplane.wire.events import Kind, Reason
from tests.watch.plane import HOSTILE, STEP_S, stats, step


def seen(events: list[Event], asked: float, **told: object) -> History:
    history = History("run")
    history.look(events, **{"stats": None, "asked": asked} | told)  # type: ignore[arg-type]
    return history


def end(events: list[Event]) -> float:
    return events[-1].at


def test_the_first_line_is_the_sentence_of_why() -> None:
    events = step("step-1", 1_000.0, slow_reward=12.0)
    view = seen(events, end(events)).view(end(events) + 1.5, 2.0)
    assert view.sentence == explain(Step(events, "step-1")).sentence
    assert view.age_s == 1.5
    (listed,) = view.steps
    assert (listed.cause, listed.healthy, listed.finished) == ("slow worker", False, True)


@pytest.mark.parametrize("before", [1, 3])
def test_a_step_of_the_same_name_is_the_one_that_began_last(before: int) -> None:
    """The clock of the peer that declared it first may have been ahead. Its last events may come
    after those of the next."""
    old = [
        msgspec.structs.replace(e, generation=before) if e.partition else e
        for e in step("step-1", 1_000.0)
    ]
    late = msgspec.structs.replace(old.pop(), at=2_001.0)
    many = max(e.number for e in old)
    last = [
        msgspec.structs.replace(e, generation=2 if e.partition else 0)
        for e in step("step-1", 2_000.0, many, slow_reward=12.0)
    ]
    sentence = explain(Step(last, "step-1")).sentence
    history = seen(old, end(old))
    history.look(sorted([*last, late], key=lambda e: e.at), None, end(last))
    assert history.view(end(last) + 1.5, 2.0).sentence.startswith(sentence)
    assert explain(Step(sorted([*old, *last, late], key=lambda e: e.at), "step-1")).sentence == (
        sentence
    )


def test_lanes_say_of_each_host_when_it_worked_and_when_it_waited() -> None:
    events = step("step-1", 1_000.0, reward_s=0.8, room_s=2.0, slow_link=100.0)
    shown = picture(events, "step-1")
    stages = [lane.stage for lane in shown.lanes]
    assert stages == sorted(stages, key=["", "reward", "train"].index)
    assert {(lane.stage, lane.host) for lane in shown.lanes} >= {("reward", "host-3")}
    assert all(
        len(lane.cells) == BINS and set(lane.cells) <= {*STATES, " "} for lane in shown.lanes
    )
    cells = {(lane.stage, lane.host): lane.cells for lane in shown.lanes}
    assert "f" in cells["", "host-0"] and "f" not in cells["", "host-1"]  # it waited for room
    assert cells["reward", "host-3"].lstrip()[0] == "r" and "w" in cells["reward", "host-3"]
    assert "m" in cells["train", "host-0"]
    assert ("", "room_open") in {(wait.stage, wait.reason) for wait in shown.waits}


def test_rows_on_their_way_are_counted_where_they_are() -> None:
    events = step("step-1", 1_000.0)
    middle = [e for e in events if e.at < 1_003.0]
    for some in (events, middle):
        shown = picture(some, "step-1")
        put = sum(e.rows for e in some if e.kind is Kind.PUT)
        reward = next(flow for flow in shown.flow if flow.stage == "reward")
        assert reward.ready + reward.leased + reward.acked == put
    reward, train = picture(events, "step-1").flow
    assert (reward.acked, train.acked) == (128, 128)
    assert 0.1 < reward.lease.p50 <= reward.lease.p90 <= reward.lease.p99 < 0.3


def test_rows_that_were_dropped_or_lost_are_not_on_their_way() -> None:
    """A step is shown though the events of its puts were lost with a peer."""

    def of(kind: Kind, at: float, group: str, rows: int = 2, **more: Any) -> Event:
        more |= {"partition": "step-1", "generation": 1, "group": group, "rows": rows}
        return Event(kind, at, "b", **more)

    reward: dict[str, Any] = {"stage": "reward"}
    events = [of(Kind.READY, float(nth), f"g{nth}", **reward) for nth in range(6)]
    for nth in range(3):
        events.append(of(Kind.LEASE_BEGIN, 10.0, f"g{nth}", **reward, lease=nth, worker="pid 7"))
    ends: dict[str, Any] = reward | {"lease": 0, "worker": "pid 7", "reason": Reason.ACK}
    events.append(of(Kind.LEASE_END, 11.0, "g0", **ends))
    events.append(of(Kind.DROP, 12.0, "g3", rows=1))
    events += [of(Kind.LOST, 13.0, f"g{nth}", by="c") for nth in (0, 1, 4)]
    (flow,) = picture(events, "step-1").flow
    assert (flow.ready, flow.leased, flow.acked) == (3, 2, 2)
    (flow,) = picture([*events, of(Kind.DROP, 14.0, "", rows=7, nbytes=9)], "step-1").flow
    assert (flow.ready, flow.leased, flow.acked) == (0, 0, 2)
    history = History("run")
    history.look(events, stats(2), 14.0)
    assert [one.partition for one in history.view(14.0, 2.0).steps] == ["step-1"]


def test_a_group_is_complete_with_its_last_row() -> None:
    """Each row is put alone, two seconds after the one before; one group still lacks its third."""
    events = list[Event]()
    for group, rows in (("g", 3), ("h", 2)):
        for row in range(rows):
            of = {"partition": "s", "group": group, "rows": 1, "generation": 1}
            at = 1.0 + 2.0 * row
            events.append(Event(Kind.PUT, at, "a", **of))  # type: ignore[arg-type]
            for stage in ("reward", "train"):
                later = at + 5.0 if stage == "train" else at
                events.append(Event(Kind.READY, later, "a", stage=stage, **of))  # type: ignore[arg-type]
    shown = picture(sorted(events, key=lambda e: e.at), "s")
    assert (shown.begun, shown.unready) == (2, 1)
    assert shown.complete.p50 == 4.0


def test_the_newest_step_lasts_until_now_even_if_nobody_waits() -> None:
    """Rows are ready for the trainer, which does not claim."""
    history = History("run")
    events = [e for e in step("s", 1_000.0) if e.stage != "train" or e.kind is Kind.READY]
    history.look(events, None, 1_300.0)
    assert "no worker had claimed from it" in history.view(1_300.0, 2.0).sentence


def test_the_slow_host_and_the_slow_link_stand_beside_their_peers() -> None:
    shown = picture(step("s", 1_000.0, slow_reward=8.0, slow_link=50.0, groups=32), "s")
    slowest = shown.paces[0]
    assert (slowest.stage, slowest.host) == ("reward", "host-3") and slowest.ratio < 0.2
    ratio = {link.source: link.ratio for link in shown.links}
    assert ratio["host-1"] < 0.05 < ratio["host-2"]
    assert [late.acked for late in shown.late] == sorted(
        (x.acked for x in shown.late), reverse=True
    )


def test_the_page_compares_hosts_as_the_sentence_does() -> None:
    events = step("s", 1_000.0, slow_reward=8.0, groups=32)
    (slow,) = [pace for pace in picture(events, "s").paces if pace.ratio < SLOW]
    assert f"reward on host host-3 ran at {slow.ratio:.1f} × the" in picture(events, "s").sentence
    ends = [e for e in events if (e.kind, e.host) == (Kind.LEASE_END, "host-3")]
    pull = {"peer": "host-3", "stage": "reward", "by": "host-0", "nbytes": 1 << 20}
    pulls = [Event(Kind.PULL, e.at, seconds=0.9 * e.seconds, **pull) for e in ends]  # type: ignore[arg-type]
    shown = picture(sorted([*events, *pulls], key=lambda e: e.at), "s")
    assert "reward on host" not in shown.sentence  # its bytes are late, it is not slow
    assert [pace for pace in shown.paces if pace.ratio < SLOW] == []


def test_a_group_may_be_called_0() -> None:
    events = step("s", 1_000.0, groups=4)
    as_number = [msgspec.structs.replace(e, group=0) if e.group == "g0" else e for e in events]
    shown, named = picture(as_number, "s"), picture(events, "s")
    assert (shown.begun, shown.unready, len(shown.late)) == (4, 0, 4)
    assert shown.complete == named.complete


def test_staleness_is_the_versions_between_put_and_ack() -> None:
    def note(kind: Kind, at: float, **more: object) -> Event:
        base = {"partition": "s", "generation": 1, "rows": 2, "stage": "train"}
        return Event(kind, at, "a", **base | more)  # type: ignore[arg-type]

    ack = {"seconds": 0.5, "reason": Reason.ACK}
    events = [
        note(Kind.PUT, 1.0, group="g", stage=""),
        note(Kind.ADVANCE, 2.0, version=1),
        note(Kind.PUT, 3.0, group="h", stage="", version=1),
        note(Kind.ADVANCE, 4.0, version=2),
        note(Kind.LEASE_BEGIN, 4.5, group="g"),
        note(Kind.LEASE_END, 5.0, group="g", **ack),
        note(Kind.LEASE_BEGIN, 5.5, group="h"),
        note(Kind.LEASE_END, 6.0, group="h", **ack),
    ]
    assert picture(events, "s").staleness == {1: 1, 2: 1}
    assert picture([events[0], *events[4:6]], "s").staleness is None  # nobody calls advance()


def test_events_that_are_told_twice_count_once() -> None:
    events = step("step-1", 1_000.0, slow_reward=12.0)
    whole = seen(events, end(events)).view(end(events), 2.0).picture
    history = History("run")
    for until in (1_001.0, 1_002.0, 1_004.0, end(events) + 1):
        since = history.since(until)
        history.look([e for e in events if since - 0.1 < e.at <= until], None, until)
    assert history.view(end(events) + 1, 2.0).picture == whole


def test_a_peer_that_misses_a_look_is_asked_again_for_what_happened_meanwhile() -> None:
    events = step("step-1", 1_000.0, slow_reward=12.0)
    whole = seen(events, end(events)).view(end(events), 2.0)
    history, looks = History("run"), (1_001.0, 1_002.0, 1_004.0, 1_006.0, end(events) + 1)
    for until in looks:
        since = history.since(until)
        told = [e for e in events if since - 0.1 < e.at <= until]
        if until in looks[1:4]:
            told = [e for e in told if e.peer != "host-0"]
            told.append(Event(Kind.MISSING, until, "host-0", reason=Reason.SILENT))
        history.look(told, None, until)
    view = history.view(end(events) + 1, 2.0)
    assert (view.trouble, view.picture) == ([], whole.picture)


def test_events_that_were_lost_while_a_peer_was_silent_are_noted_for_good() -> None:
    events = step("step-1", 1_000.0, slow_reward=12.0)
    history = History("run")
    history.look([e for e in events if e.at <= 1_002.0], None, 1_002.0)
    silent = Event(Kind.MISSING, 1_002.0, "host-0", reason=Reason.SILENT)
    for until in (1_004.0, 1_100.0):
        history.look([silent], None, until)
    assert history.since(1_100.0) > 1_004.0  # it has a limit
    for until in (1_102.0, 1_104.0):
        history.look([e for e in events if e.at > 1_005.0], None, until)
    view = history.view(1_104.0, 2.0)
    assert view.trouble == [
        "peer host-0 overwrote events of these steps before they could be fetched"
    ]
    assert "events of host-0 are missing" in view.sentence


def test_events_that_a_peer_overwrote_after_they_were_fetched_are_not_missing() -> None:
    events = step("step-1", 1_000.0)
    history = History("run")
    history.look(events[:60], None, events[59].at)
    number = max(e.number for e in events[:60] if e.peer == "host-0")
    first = next(e for e in events if (e.peer, e.number) == ("host-0", number - 1))
    gone = Event(Kind.MISSING, first.at, "host-0", reason=Reason.OVERWRITTEN, rows=number - 2)
    history.look([gone, *events[events.index(first) :]], None, end(events))
    view = history.view(end(events), 2.0)
    assert view.trouble == [] and "missing" not in view.sentence


def test_everything_that_is_remembered_has_a_limit() -> None:
    history, number = History("run", max_events=900), 0
    events = list[Event]()
    for nth in range(MAX_STEPS + 5):
        begin = 1_000.0 + STEP_S * nth
        events += step(f"step-{nth}", begin, number + len(events), groups=4)
        if nth % 10 == 4:
            history.look(events, stats(2), begin + STEP_S)
            number, events = number + len(events), []
    view = history.view(begin + STEP_S, 2.0)
    assert len(view.steps) == MAX_STEPS
    assert view.steps[-1].partition == f"step-{MAX_STEPS + 4}"
    assert history.picture_of(view.steps[0].number) is not None
    assert history.picture_of(1) is None


def test_a_step_whose_beginning_was_forgotten_says_so() -> None:
    events = step("step-1", 1_000.0, groups=64)
    history = History("run", max_events=len(events) - 20)
    history.look(events, None, end(events))
    assert "events of the watcher are missing" in history.view(end(events), 2.0).sentence


def test_a_peer_that_does_not_answer_is_named_and_so_is_a_plane() -> None:
    events = step("step-1", 1_000.0)
    silent = Event(Kind.MISSING, end(events), "host-3", reason=Reason.SILENT)
    told = stats(3)
    told["peers"]["tcp://10.0.0.9:7"] = {"address": "tcp://10.0.0.9:7", "error": "no answer"}
    history = seen([*events, silent], end(events), stats=told)
    view = history.view(end(events), 2.0)
    assert view.trouble == [
        "peer tcp://10.0.0.9:7 does not answer: no answer",
        "peer host-3 does not answer: its events are missing",
    ]
    history.failed("found no peer on this host")
    view = history.view(end(events) + 20, 2.0)
    assert view.trouble[0] == "found no peer on this host; the state shown is 20 s old"
    assert view.sentence.startswith("step-1 took")
    fresh = History("run")
    fresh.failed("found no peer on this host")
    assert fresh.view(0.0, 2.0).sentence == "found no peer on this host"


def test_a_peer_that_has_left_is_named_until_it_is_back() -> None:
    history = seen([], 1_000.0, stats=stats(3))
    assert history.view(1_000.0, 2.0).trouble == []
    history.look([], stats(2), 1_002.0)
    left = ["peer host-2 left the run or was declared lost 20 s ago"]
    assert history.view(1_022.0, 2.0).trouble == left
    history.look([], stats(3), 1_030.0)
    assert history.view(1_030.0, 2.0).trouble == []
    history.look([], stats(2), 1_032.0)
    history.look([], stats(2), 2_000.0)
    assert history.view(2_000.0, 2.0).trouble == []


def test_queues_arenas_and_stuck_calls_are_of_now() -> None:
    events = step("step-99", 1_000.0)
    view = seen(events, end(events), stats=stats(64)).view(end(events), 2.0)
    assert [(q.stage, q.ready, q.calls) for q in view.queues] == [
        ("reward", 64, 0),
        ("train", 64, 1),
    ]
    assert len(view.hosts) == 64 and view.hosts[0].holders[0].nbytes == 5 << 20
    assert view.stuck[0].why == "8 rows lack `reward`"


@pytest.mark.parametrize("hosts", [4, 64])
def test_a_view_of_many_hosts_is_small(hosts: int) -> None:
    events = step("step-99", 1_000.0, hosts=hosts, groups=4 * hosts)
    view = seen(events, end(events), stats=stats(hosts)).view(end(events), 2.0)
    assert len(msgspec.json.encode(view)) < 100_000


def test_a_terminal_carries_out_nothing_that_a_user_named() -> None:
    name = HOSTILE + "\x1b[2J\x07\r\n"
    events = step(name, 1_000.0, slow_reward=12.0)
    view = seen(events, end(events), stats=stats(4, name)).view(end(events), 2.0)
    plain = list(terminal.lines(view, 80, is_colour=False))
    assert all(line.isprintable() for line in plain)
    assert plain[0].startswith("step-1</script>")
    assert any(line.startswith("slow: reward on host-3") for line in plain)
    assert any("waited: " in line for line in plain)
    coloured = "\n".join(terminal.lines(view, 80, is_colour=True))
    assert "\x1b[2J" not in coloured and "\x1b[43m" in coloured


@pytest.mark.parametrize("many", range(0, 80, 9))
def test_any_beginning_or_end_of_a_step_has_a_picture(many: int) -> None:
    for events in (step("s", 1_000.0, slow_reward=5.0), step("s", 1_000.0, forgotten=True)):
        assert picture(events[:many], "s").cause in Cause
        assert picture(events[many:], "s").sentence
