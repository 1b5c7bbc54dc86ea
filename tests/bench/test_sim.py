"""The simulator: its clockwork by hand, its designs by what must hold, one small run to the end."""

from __future__ import annotations

import json
from dataclasses import replace as replace_place
from pathlib import Path

import pytest
import simpy
from msgspec.structs import replace

from bench.cli import _parser, main
from bench.pace import ideal_seconds
from bench.planes.base import Job
from bench.sim.central import Central
from bench.sim.command import _FULL, accuracy, in_turn
from bench.sim.decentral import Decentral
from bench.sim.fit import Seen, fit, least_squares, priced, simulate
from bench.sim.model import Costs, Design, Model, Outcome, Place, Plan, Price, Work
from bench.sim.share import Loop, Shared

PER_BYTE = Price(once=1e-3, text_byte=1e-9, media_byte=1e-9)
ONE_MACHINE = Place(cores=2, one_machine=True)
CLUSTER = Place(cores=1, one_machine=False, link_bytes_s=25e9, round_trip_s=5e-5, copiers=8)


def costs(price: Price = PER_BYTE, operation: float = 1e-3, byte: float = 1e-9) -> Costs:
    stage = {"claim": price, "read": price, "add": price}
    return Costs(
        activities={
            "rollout": {"generate": price, "digest": price, "put": price},
            "reward": stage,
            "reference": stage,
            "train": {"claim": price, "check": price},
        },
        operation=operation,
        message=0.0,
        byte=byte,
        page=0.0,
        watch=0.0,
        end=0.0,
    )


def job(**changes: object) -> Job:
    settings = {
        "plane": "dataplane",
        "trace": "image",
        "prompts": 8,
        "seed": 3,
        "hosts": 4,
        "trainers": 4,
        "steps": 2,
        "pace": 100.0,
    }
    return Job(**(settings | changes))  # type: ignore[arg-type]


def run(told: Job, design: type[Design], place: Place, prices: Costs) -> Outcome:
    return Model(Plan(told), prices, place, design).run()


def finished(
    shared: Shared | Loop, env: simpy.Environment, jobs: list[tuple[float, float]]
) -> list[float]:
    """When jobs of (start, amount) are done."""
    ends = [0.0] * len(jobs)

    def one(number: int, start: float, amount: float):  # type: ignore[no-untyped-def]
        yield env.timeout(start)
        yield shared.use(amount)
        ends[number] = env.now

    for number, (start, amount) in enumerate(jobs):
        env.process(one(number, start, amount))
    env.run()
    return ends


def test_who_uses_a_pool_at_the_same_time_shares_it() -> None:
    env = simpy.Environment()
    ends = finished(Shared(env, 2.0, 1.0), env, [(0, 1.0), (0, 1.0), (0, 1.0), (1, 0.5)])
    # Three on two cores run at 2/3 until second 1, then four at 1/2 until the first three are done.
    assert ends == pytest.approx([5 / 3, 5 / 3, 5 / 3, 11 / 6])


def test_a_lone_user_gets_no_more_than_one_core_and_a_rival_takes_its_part() -> None:
    env = simpy.Environment()
    assert finished(Shared(env, 2.0, 1.0), env, [(0, 3.0)]) == [3.0]
    env = simpy.Environment()
    assert finished(Shared(env, 1.0, 1.0, rivals=1.0), env, [(0, 3.0)]) == [6.0]


def test_a_user_that_finds_no_idle_core_waits_for_the_kernel_to_look() -> None:
    env = simpy.Environment()
    cores = Shared(env, 1.0, 1.0, late=0.5)
    assert finished(cores, env, [(0, 1.0), (0.75, 1.0), (3, 1.0)]) == [1.0, 2.25, 4.0]


def test_a_loop_does_one_thing_after_the_other_on_cores_that_others_use_too() -> None:
    env = simpy.Environment()
    assert finished(Loop(env, Shared(env, 2.0, 1.0)), env, [(0, 1.0), (0, 0.5), (2, 1.0)]) == [
        1.0,
        1.5,
        3.0,
    ]
    env = simpy.Environment()
    cores = Shared(env, 1.0, 1.0)
    cores.use(10.0)
    # Two wait for the loop, and it still gets no more than half of the core.
    assert finished(Loop(env, cores), env, [(0, 1.0), (0, 1.0)]) == pytest.approx([2.0, 4.0])


def test_a_crowded_link_loses_speed() -> None:
    env = simpy.Environment()
    link = Shared(env, 10.0, 10.0, crowd=2, crowded=0.5)
    # Three at 5/3 a second each; nobody is done before the others.
    assert finished(link, env, [(0, 10.0)] * 3) == pytest.approx([6.0] * 3)


def test_prices_are_found_again_and_never_negative() -> None:
    columns = [[1, 10.0], [2, 10.0], [3, 70.0], [4, 20.0]]
    wanted = [3 * a + 0.5 * b for a, b in columns]
    assert least_squares(columns, wanted) == pytest.approx([3.0, 0.5])
    assert min(least_squares([[1, 2.0], [2, 1.0]], [1.0, -1.0])) >= 0


def test_between_hosts_a_put_a_claim_and_a_finish_are_messages_to_the_primary_and_its_backup() -> (
    None
):
    free = costs(Price(), 0.0, 0.0)
    alone = run(job(hosts=1, trainers=1), Decentral, ONE_MACHINE, free)
    assert alone.messages == 0
    dear = replace(free, message=0.02)
    assert run(job(hosts=1, trainers=1), Decentral, ONE_MACHINE, dear).step_s == alone.step_s
    two = run(job(hosts=2, trainers=2), Decentral, ONE_MACHINE, free)
    told = job(hosts=2, trainers=2)
    records = 4 * told.prompts * told.steps  # a put and three finishes
    # Each record and its confirmation; half of the workers are at the primary, others ask it too.
    assert 2 * records < two.messages < 7 * records
    assert run(told, Decentral, ONE_MACHINE, dear).step_s > two.step_s + 0.1


def test_a_controller_copies_the_same_bytes_wherever_its_workers_are() -> None:
    """Also those of its own host: a fit to runs of one host finds what a byte costs."""
    alone = run(job(hosts=1, trainers=1), Central, ONE_MACHINE, costs())
    four = run(job(hosts=4, trainers=4), Central, ONE_MACHINE, costs())
    assert 0 < alone.copied_bytes == pytest.approx(four.copied_bytes)


def test_which_hosts_serve_a_step_is_drawn_and_the_one_that_keeps_the_roster_serves_none() -> None:
    told = job(steps=40, prompts=4)
    drawn = [
        Decentral(Model(Plan(told), costs(), CLUSTER, Decentral, seed))._serving for seed in (0, 1)
    ]
    assert drawn[0] != drawn[1]
    assert {host for serving in drawn[0] for host in serving} == {1, 2, 3}
    assert all(primary != backup for primary, backup in drawn[0])


def test_runs_of_two_kinds_take_turns_over_the_whole() -> None:
    assert in_turn("abcd", "xy") == ["a", "x", "b", "c", "y", "d"]
    assert in_turn("", "xy") == ["x", "y"]


def test_a_run_in_the_place_of_the_model_says_how_well_a_model_can_do() -> None:
    """Of a median over noisy runs not even another run is an exact prediction."""
    case = {"plane": "dataplane", "recorded_step_s": 1.0, "others_cores": [0.0]}
    case |= {"predicted_step_s": 1.1, "median_step_s": 1.2, "steps_s": [1.1, 1.2, 1.3]}
    told = accuracy([{**case, "plane": plane} for plane in ("dataplane", "controller")], 2)
    assert told["skill"] == pytest.approx(0.5)
    # 1.1 against 1.25, 1.2 against 1.2 and 1.3 against 1.15, of transfers of 0.6 s in all.
    assert told["repeat_skill"] == pytest.approx(1 - 0.3 / 0.6)
    assert accuracy([case | {"steps_s": [1.2]}], 2)["repeat_skill"] is None


def as_run(told: Job, prices: Costs, place: Place, watch: float = 0.0) -> Seen:
    """What a run of a controller would have told, had it gone as the model says at this place."""
    outcome = run(told, Central, place, prices)
    seconds = outcome.step_ends[-1]
    controller = outcome.operations * prices.operation
    ended = prices.end * sum(told.crowd().values())
    machine = (place.rivals + watch) * seconds + controller + ended
    return Seen(
        told,
        {
            "plane": "controller",
            "step_ends": outcome.step_ends,
            "seconds": seconds,
            "latency_ms": {},
            "workers": {"controller": {"cpu_seconds": {"controller": controller}}},
            "cpu_seconds": {"runner": watch * seconds, "machine": machine},
            "cpu_counted_seconds": seconds,
        },
    )


def test_strangers_the_end_of_workers_and_late_threads_are_found_again() -> None:
    """Strangers want the cores that they got."""
    dear = replace(costs(Price(), operation=0.01, byte=0.0), end=0.02)
    busy = replace_place(ONE_MACHINE, cores=1, rivals=1.5, late_s=2e-3)
    told = [job(plane="controller", hosts=n, trainers=n, prompts=6) for n in (1, 2, 3)]
    found, place = fit({"controller": [as_run(each, dear, busy) for each in told]}, 1)
    assert place.rivals == pytest.approx(1.5)
    assert found["controller"].end == pytest.approx(0.02)
    assert found["controller"].operation == pytest.approx(0.01)
    assert place.late_s == 2e-3


def test_the_runner_takes_as_much_of_the_cores_whatever_it_watches() -> None:
    free, dear = costs(Price(), 0.0, 0.0), costs(Price(once=0.02), 0.0, 0.0)
    few = [job(plane="controller", hosts=hosts, trainers=hosts) for hosts in (1, 2, 2)]
    seen = [as_run(each, free, ONE_MACHINE, watch=0.5) for each in few]
    assert priced(seen, ONE_MACHINE).watch == pytest.approx(0.5)
    for hosts in (1, 8):
        told = job(plane="controller", hosts=hosts, trainers=hosts)
        watched = simulate(told, replace(dear, watch=0.5), ONE_MACHINE).step_s
        beside = replace_place(ONE_MACHINE, cores=1.5)
        assert watched == run(told, Central, beside, dear).step_s


def test_workers_that_end_take_processor_time_from_those_that_still_work() -> None:
    """Only in the last step: all work on until then."""
    steps = [
        run(job(), Central, ONE_MACHINE, replace(costs(), end=end)).step_ends for end in (0.0, 0.1)
    ]
    assert steps[0][0] == steps[1][0]
    assert steps[0][1] < steps[1][1]


def test_a_peer_touches_pages_only_where_its_arena_is_fuller_than_before() -> None:
    small, large = (
        run(job(trace=trace, steps=4, hosts=1, trainers=1), Decentral, ONE_MACHINE, costs())
        for trace in ("search", "image")
    )
    assert small.touched_bytes == 0
    assert 0 < large.touched_bytes < large.peak_bytes[0] + (64 << 20)


def test_a_price_is_of_a_time_its_rows_and_its_bytes() -> None:
    price = Price(once=1.0, row=0.1, text_byte=0.01, media_byte=0.001)
    assert price.of(Work(rows=2, text_bytes=3, media_bytes=4)) == pytest.approx(1.234)


@pytest.mark.parametrize("trace", ["image", "math_open", "search"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_planes_that_cost_nothing_take_the_recorded_time(trace: str, staleness: int) -> None:
    told = job(trace=trace, staleness=staleness)
    took = run(told, Decentral, ONE_MACHINE, costs(Price(), 0.0, 0.0)).step_ends[-1]
    # A free reward worker takes several groups at once here, and one at a time there.
    assert took == pytest.approx(ideal_seconds(told), rel=0.1)


@pytest.mark.parametrize("design", [Decentral, Central])
@pytest.mark.parametrize("trace", ["image", "math_open", "search"])
def test_the_same_job_takes_the_same_time_and_every_group_is_claimed(
    design: type[Design], trace: str
) -> None:
    told = job(trace=trace)
    one, other = (run(told, design, ONE_MACHINE, costs()) for _ in range(2))
    assert one.step_ends == other.step_ends and one.claim_s == other.claim_s
    plan = Plan(told)
    most = sum(len(plan.stage_of(s, 0) + plan.stage_of(s, 1)) for s in ("reward", "reference"))
    trained = len(plan.stage_of("train", 0) + plan.stage_of("train", 1))
    if told.task.survive is None:
        assert trained == len(told.generate())
    assert trained <= len(one.claim_s) <= most + trained


def test_fewer_cores_make_a_step_longer() -> None:
    slow = costs(Price(text_byte=1e-8, media_byte=1e-8))
    two, one = (
        run(job(), Decentral, Place(cores=cores, one_machine=True), slow).step_s for cores in (2, 1)
    )
    assert one > two


def test_a_claim_touches_its_own_peer_the_primary_the_backup_and_owners_at_any_size() -> None:
    for hosts in (1, 4, 32):
        told = job(hosts=hosts, trainers=hosts, prompts=2 * hosts, steps=1)
        peers = run(told, Decentral, CLUSTER, costs()).peers
        assert max(peers) <= min(3 + 64 // told.samples, hosts)
        assert sum(peers.values()) <= 3 * told.prompts


def test_a_controller_holds_the_whole_batch_and_a_peer_its_share() -> None:
    small, large = (job(hosts=n, trainers=n, prompts=2 * n, steps=1) for n in (4, 16))
    central = [run(told, Central, CLUSTER, costs()).peak_bytes[0] for told in (small, large)]
    for told, held in zip((small, large), central, strict=True):
        plan = Plan(told)
        batch = sum(plan.work_of("written", prompt).nbytes for prompt in told.generate())
        assert batch <= held <= 1.1 * batch
    peers = run(large, Decentral, CLUSTER, costs()).peak_bytes
    assert max(peers) < central[1] / 2
    repeated = run(job(dedup=False, steps=1), Central, CLUSTER, costs()).peak_bytes[0]
    assert repeated > 4 * central[0]


def test_the_model_asks_for_no_links_of_this_machine() -> None:
    assert not hasattr(_parser().parse_args(["sim", "--link", "100"]), "link")


def test_a_quick_simulation_reports_what_it_fitted_checked_and_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sim.json"
    assert main(["sim", "--quick", "--hosts", "2,8", "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    assert told["quick"] and {case["plane"] for case in told["cases"]} == {
        "dataplane",
        "controller",
    }
    assert all(c["predicted_step_s"] >= 0.9 * c["recorded_step_s"] for c in told["cases"])
    errors = sum(abs(c["predicted_step_s"] - c["median_step_s"]) for c in told["cases"])
    naive = sum(abs(c["recorded_step_s"] - c["median_step_s"]) for c in told["cases"])
    assert told["skill"] == pytest.approx(1 - errors / naive)
    assert [result["hosts"] for result in told["model"]] == [2, 2, 2, 8, 8, 8]
    assert all(result["model"] for result in told["model"])
    shown = capsys.readouterr().out
    said = " ".join(shown.split())
    assert "a model, not a measurement" in said
    assert f"Skill on transfers: {told['skill']:.2f}" in said
    assert "links of 200 Gbit/s, round trips of 50 µs, 8 cores per host" in said
    assert "more than 16 hosts send at once keeps 70% of its rate (90% to 40% in the band)" in said
    assert "Every worker and service has a core." in said


def test_what_is_judged_was_not_fitted_on() -> None:
    """Neither its trace nor its number of hosts."""
    traces, hosts, _ = (set(column) for column in zip(*_FULL.fits, strict=True))
    for trace, number, _ in _FULL.checks:
        assert trace not in traces and number not in hosts
