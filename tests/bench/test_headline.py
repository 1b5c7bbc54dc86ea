"""The three sentences of the first screen, from runs alone."""

from __future__ import annotations

from typing import Any

from bench.headline import sentences

GIB = 1 << 30


def run(plane: str, trace: str, hosts: int, steps: list[float], **told: Any) -> dict[str, Any]:
    return {
        "plane": plane, "trace": trace, "hosts": hosts, "step_seconds": steps, "status": "ok",
        "dedup": True, "link": "400mbit", "memory_limit_bytes": None, "computed_link": None,
        "prompts": hosts, "error": "", "peak_host_bytes": [],
        "busiest_link": {"host": 0, "bytes": 4e9 if plane == "controller" else 1e9,
                         "busy_share": 0.99 if plane == "controller" else 0.5},
    } | told  # fmt: skip


EIGHT = [
    run("dataplane", "video", 8, [9.0, 2.0, 3.0]),
    run("controller", "video", 8, [9.0, 20.0, 30.0]),
    run("dataplane", "math", 8, [9.0, 1.0]),
    run("controller", "math", 8, [9.0, 4.0]),
]


def test_steady_steps_are_compared_and_the_full_link_is_named() -> None:
    bottleneck, lost = sentences(EIGHT)
    assert "8 hosts with links of 400mbit" in bottleneck
    assert "a video step takes 2.5 s through dataplane and 25 s through a controller" in bottleneck
    assert "(10.0 × as fast)" in bottleneck and "(4.0 × as fast)" in bottleneck
    assert "carried 4.0 GB and was full 99% of the time" in bottleneck
    assert "dataplane's busiest 1.0 GB and 50%" in bottleneck
    assert lost == "In no job of this set was the controller faster."


def test_where_we_lose_is_said_with_its_figures() -> None:
    slow = run("dataplane", "math", 2, [1.0, 0.4], link=None, busiest_link=None)
    fast = run("controller", "math", 2, [1.0, 0.1], link=None, busiest_link=None)
    lost = sentences([*EIGHT, slow, fast])[-1]
    assert lost == (
        "Where we lose: a step of math on 2 hosts with no limit on links takes 0.4 s through "
        "dataplane and 0.1 s through a controller (4.0 × as slow)."
    )


def test_who_died_under_the_limit_and_who_did_not() -> None:
    limit: dict[str, Any] = {"memory_limit_bytes": 3 * GIB, "prompts": 16, "link": None}
    killed = run("controller", "video", 2, [], dedup=False, status="oom", **limit)
    lived = run("controller", "video", 2, [1.0], peak_host_bytes=[2 * GIB, GIB], **limit)
    ours = run("dataplane", "video", 2, [1.0], peak_host_bytes=[GIB, GIB], **limit)
    memory = sentences([killed, lived, ours])[0]
    assert memory == (
        "Under 3 GiB a host, with 16 video prompts: the controller without dedup was killed by the "
        "kernel, the controller with dedup needed 2 GiB, dataplane with dedup needed 1 GiB."
    )
    unmeasured = [{**r, "status": "not run", "error": "no cgroup"} for r in (killed, lived, ours)]
    assert sentences(unmeasured)[0] == "Memory was not measured: no cgroup."


def test_without_links_what_one_would_take_is_called_computed() -> None:
    loopback = [
        {**r, "link": None, "busiest_link": None,
         "computed_link": {"rate": "390mbit", "seconds": 12.0, "host": 0, "bytes": 1}}
        for r in EIGHT
    ]  # fmt: skip
    bottleneck = sentences(loopback)[0]
    assert "computed" in bottleneck and "12 s at 390mbit" in bottleneck


def test_a_run_that_failed_is_compared_with_nothing() -> None:
    died = [{**r, "status": "error"} if r["plane"] == "controller" else r for r in EIGHT]
    assert sentences(died) == ["In no job of this set was the controller faster."]
