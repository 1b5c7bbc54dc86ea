"""The report as people get it: opened in a browser, complete, and without a network."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.page.document import write
from bench.page.picture import told_by
from bench.page.svg import Scale

# Runs in the page: what lies outside its drawing, and what is drawn of which kind.
_LOOK = """(() => {
const outside = [], kinds = {};
for (const svg of document.querySelectorAll("svg")) {
  const room = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    if (box.left < room.left - 2 || box.right > room.right + 2 ||
        box.top < room.top - 4 || box.bottom > room.bottom + 4) outside.push(text.textContent);
  }
  for (const shape of svg.querySelectorAll("rect,path,line,circle")) {
    const box = shape.getBoundingClientRect();
    if (box.width + box.height > 0)
      for (const kind of shape.classList) kinds[kind] = (kinds[kind] || 0) + 1;
  }
}
return JSON.stringify({
  outside, kinds,
  headings: [...document.querySelectorAll("h2")].map(h => h.textContent),
  fetched: performance.getEntriesByType("resource").map(r => r.name),
  wide: document.documentElement.scrollWidth - innerWidth,
  smallest: Math.min(...[...document.querySelectorAll("text")].map(
    text => parseFloat(getComputedStyle(text).fontSize) * text.getCTM().a)),
});
})()"""


def run(plane: str, **changes: Any) -> dict[str, Any]:
    times = {"p50": 3.0, "p90": 9.0, "p99": 30.0, "max": 41.0, "times": 16}
    told: dict[str, Any] = {
        "plane": plane, "trace": "video", "status": "ok", "error": "", "rows": 128,
        "rows_expected": 128, "bytes_unique": 1_770_000_000, "bytes_moved": 2_400_000_000,
        "seconds": 3.1, "peak_memory_bytes": {"arena of host0": 1 << 30, "train-0": 30 << 20},
        "peak_total_bytes": 2 << 30, "peak_host_bytes": [1 << 30, 900 << 20], "steps": 1,
        "memory_limit_bytes": 3 << 30, "killed": None, "dedup": True, "columns": "needed",
        "hosts": 2, "prompts": 16, "samples": 8, "staleness": 0,
        "memory_curve": {
            "seconds": [-1.0, 0.0, 1.0, 3.0],
            "processes": {
                "arena of host0": [None, 1 << 28, 1 << 30, 1 << 30], "train-0": [1 << 24] * 4,
            },
            "hosts": [[1 << 28, 1 << 29, 1 << 30, 1 << 30], [1 << 28] * 4],
        },
        "workers": {
            "rollout-0": {"seconds": {"put": 1.0, "generate": 0.4}, "span": [0.0, 2.0]},
            "train-0": {"seconds": {"claim": 2.0, "check": 0.5}, "span": [0.0, 3.0]},
        },
        "latency_ms": {"rollout": {"put": times}, "train": {"claim": times}},
    }  # fmt: skip
    return {**told, **changes}


def killed() -> dict[str, Any]:
    """After so long that the curves of other runs are short beside it."""
    return run(
        "controller", status="oom", dedup=False, rows=0, seconds=48, latency_ms={}, workers={},
        killed={"host": 0, "processes": ["controller"], "seconds": 47.0},
        error="the kernel killed controller on host 0 <at its limit>",
    )  # fmt: skip


def case(plane: str, dedup: bool, prompts: int, smallest: int | None) -> dict[str, Any]:
    return {
        "plane": plane, "trace": "video", "dedup": dedup, "prompts": prompts, "status": "ok",
        "smallest_bytes": smallest, "most_bytes": 6 << 30, "runs": [],
    }  # fmt: skip


def report(**parts: Any) -> dict[str, Any]:
    machine = {
        "cores": 2, "cpu": "a processor", "memory_bytes": 24 << 30, "system": "Linux 6.1",
        "python": "3.11.2", "packages": {"numpy": "2.0.0"},
    }  # fmt: skip
    return {"machine": machine, "command": "python -m bench run --trace video", **parts}


def pulled(of_ceiling: float) -> dict[str, float]:
    return {
        "GBps": 2.5, "ceiling_GBps": 2.5 / of_ceiling, "of_ceiling": of_ceiling,
        "copies_per_byte": 1.0, "exchanges_per_batch": 12.3,
    }  # fmt: skip


def full() -> list[dict[str, Any]]:
    perf = {
        "ceiling": {}, "rounds": 5, "put": {"of_memcpy": 0.85, "GBps": 9.0},
        "pull": {"of_socket": 0.9, "GBps": 2.5}, "clients": {"1": 2e3, "4": 3e3},
        "shard": {"claim_ms_p50_at_10k": 1.0, "claim_ms_p50_at_1m": 1.1},
        "fields": {"1": 8.0, "32": 6.0},
        "transports": {
            "tcp": {"256x1MiB": pulled(0.9), "4096x16KiB": pulled(0.7)},
            "nixl": {"256x1MiB": pulled(1.2)},
            "ucx": {"status": "not run", "error": "ucxx is not installed <here>"},
        },
    }  # fmt: skip
    cases = [case("dataplane", True, n, 624 << 20) for n in (4, 8, 16)]
    cases += [case("controller", False, n, None) for n in (4, 8, 16)]
    return [report(runs=[run("dataplane"), killed()]), report(memory=cases), report(**perf)]


def look(page: Path, width: int = 900) -> dict[str, Any]:
    """Open the page in a browser, and tell what is to be seen. Without one the test fails, and the
    message names what installs it."""
    seen: dict[str, Any] = json.loads(told_by(page, _LOOK, width))
    return seen


@pytest.mark.needs("chromium")
def test_a_browser_shows_every_plot_with_nothing_cut_off_and_nothing_fetched(
    tmp_path: Path,
) -> None:
    page = tmp_path / "out" / "report.html"
    write(page, full())
    seen = look(page)
    assert seen["outside"] == [] and seen["fetched"] == [] and seen["wide"] <= 0
    assert seen["headings"] == [
        "Throughput", "Memory", "How little memory is enough", "Where the time goes", "Latency",
        "The hot path", "Transports", "Scaling", "Figures", "Commands and machine",
    ]  # fmt: skip
    assert seen["kinds"]["limit"] == 2  # a panel for each of the two runs
    assert seen["kinds"]["kill"] == 4  # a cross in the panel, and one instead of a bar
    assert seen["kinds"]["shade"] == 4  # two hosts in each panel
    on_a_phone = look(page, 500)
    assert on_a_phone["wide"] <= 0 and on_a_phone["outside"] == []
    assert on_a_phone["smallest"] >= 9  # pixels that a letter is high


@pytest.mark.needs("chromium")
def test_a_simulation_shows_its_cases_and_the_model_with_bands(tmp_path: Path) -> None:
    simulated = {
        "plane": "dataplane", "dedup": True, "trace": "image", "predicted_step_s": 1.1,
        "recorded_step_s": 1.0, "steps_s": [1.1, 1.2, 1.3],
    }  # fmt: skip
    stall = {"low": 1.0, "middle": 2.0, "high": 3.0}
    held = {"low": 1e9, "middle": 2e9, "high": 3e9}
    model = [
        {**simulated, "hosts": hosts, "stall_s": stall, "service_peak_bytes": held}
        for hosts in (8, 64)
    ]
    assumed = {"trace": "image", "groups_per_host": 2, "link_gbps": 200.0}
    told = {"accuracy": 0.9, "accuracy_of_recorded_time": 0.8, "assumed": assumed, "model": model}
    page = tmp_path / "sim.html"
    write(page, [report(cases=[{**simulated, "hosts": 8}], **told)])
    seen = look(page)
    assert seen["wide"] <= 0 and seen["outside"] == []
    assert {"What the model is worth", "Larger clusters, modelled"} <= set(seen["headings"])
    assert seen["kinds"]["shade"] == 2 and seen["kinds"]["dot"] == 3
    write(page, [report(cases=[{**simulated, "hosts": 8}], **told | {"model": model[:1]})])
    assert "Larger clusters" not in page.read_text()


def test_the_page_names_no_address_and_shows_errors_as_text(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, full())
    told = page.read_text()
    assert not re.search(r"https?://|<script|@import|url\(", told)
    assert "ucx was not run: ucxx is not installed &lt;here&gt;." in told
    assert "&lt;at its limit&gt;" in told and "<at its limit>" not in told
    assert told.count("python -m bench run --trace video") == 3


def test_only_runs_that_did_the_same_work_are_set_beside_each_other(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    small = run("dataplane", prompts=2, rows_expected=16, seconds=0.5, memory_limit_bytes=6 << 30)
    write(page, [report(runs=[small]), report(runs=[run("controller", seconds=50.0), killed()])])
    told = page.read_text()
    assert "as fast as" not in told and "nobody else finished" not in told
    assert "until the kernel kills it. " not in told and "until the kernel kills it.<" in told
    assert "video: 2 prompts × 8" in told and "video: 16 prompts × 8" in told
    alike = [run("dataplane", dedup=on, seconds=took) for on, took in ((True, 2.0), (False, 8.0))]
    write(page, [report(runs=[*alike, run("controller", dedup=False, seconds=5.0), killed()])])
    told = page.read_text()
    assert "dataplane, dedup on took 2.00 s, 2.5 × as fast as" in told
    assert "kills it, dataplane (dedup on) stays at 1 GiB at most and finishes." in told


def test_what_was_not_run_is_named_beside_what_was(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    absent = {**case("ray-driver", False, 4, None), "status": "not installed"}
    write(page, [report(memory=[case("dataplane", True, 4, 624 << 20), absent])])
    assert "No answer for ray-driver (not installed)." in page.read_text()
    write(page, [report(memory=[{**absent, "plane": "dataplane", "status": "not run"}])])
    assert "No answer for dataplane (not run)." in page.read_text()
    planes = {
        "dataplane": {"status": "ok", "error": ""},
        "ray-store": {"status": "error", "error": "it died\nafter a while"},
    }
    took = {"min": 0.1, "median": 0.2, "max": 0.3, "samples": 3}
    line = {"plane": "dataplane", "hosts": 1, "batch": "64 MiB", "operation": "put"}
    compared = {"rows": 256, "planes": planes, "not_run": {"packed": "it needs tensordict"}}
    for lines in ([{**line, "seconds": took}], []):
        write(page, [report(results=lines, **compared)])
        told = "ray-store (failed: it died); packed (it needs tensordict)."
        assert f"Not measured, or not to its end: {told}" in page.read_text()
        assert "<h2>The same batch through other planes</h2>" in page.read_text()


def test_every_machine_is_named_with_its_commands(tmp_path: Path) -> None:
    page, (runs, cases, perf) = tmp_path / "report.html", full()
    other = {**perf["machine"], "cores": 64, "packages": {"numpy": "2.5.0"}}
    write(page, [runs, cases, {**perf, "machine": other}])
    told = page.read_text()
    assert "2 cores" in told and "64 cores" in told and "numpy 2.0.0" in told
    assert told.index("numpy 2.0.0") < told.rindex("<pre>") < told.index("numpy 2.5.0")


def test_a_run_that_never_started_stretches_no_axis(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    waited = run("ray-store", status="error", error="no node", rows=0, seconds=None)
    write(page, [report(runs=[run("dataplane"), waited])], only=["memory"])
    assert page.read_text().count('class="panel') == 1


def test_one_figure_can_be_had_alone_for_a_picture(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, full(), only=["memory"])
    told = page.read_text()
    assert told.count("<section") == 1 and "<h2>Memory</h2>" in told
    assert "controller (dedup off) fills its host until the kernel kills it" in told


def test_a_report_without_a_single_finished_run_is_still_a_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    nothing = {"seconds": [], "processes": {}, "hosts": []}
    refused = run(
        "controller", status="not run", rows=0, seconds=None, memory_curve=nothing, workers={},
        latency_ms={}, error="no memory limit can be set here", peak_host_bytes=[],
    )  # fmt: skip
    write(page, [report(runs=[refused])])
    told = page.read_text()
    assert "not run" in told and "no memory limit can be set here" in told


@pytest.mark.needs("chromium")
def test_a_run_writes_the_page_beside_its_json_and_report_makes_it_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--trace", "math", "--planes", "controller", "--prompts", "2", "--json", str(path)]
    assert main(["run", *options]) == 0
    assert "<h2>Memory</h2>" in path.with_suffix(".html").read_text()
    again = tmp_path / "again.html"
    assert main(["report", str(path), "-o", str(again)]) == 0
    assert again.read_text() == path.with_suffix(".html").read_text()
    assert look(again)["outside"] == []


@pytest.mark.needs("chromium")
def test_a_picture_is_as_high_as_its_page(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(full()[0]))
    page, picture = tmp_path / "page.html", tmp_path / "docs" / "memory.png"
    options = ["report", str(tmp_path / "r.json"), "-o", str(page), "--only", "memory"]
    assert main([*options, "--png", str(picture)]) == 0
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) < 200_000
    high = int(told_by(page, "document.body.offsetHeight"))
    assert struct.unpack(">II", content[16:24]) == (900, high)


def test_without_a_browser_the_message_names_what_installs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "r.json").write_text(json.dumps(full()[0]))
    options = ["report", str(tmp_path / "r.json"), "-o", str(tmp_path / "page.html")]
    assert main([*options, "--png", str(tmp_path / "x.png")]) == 1
    assert "make system-packages" in capsys.readouterr().err


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    for content in ("{}", "[1]", "no JSON"):
        (tmp_path / "x.json").write_text(content)
        assert main(["report", str(tmp_path / "x.json"), "-o", str(page)]) == 2
    assert main(["report", str(tmp_path / "missing.json"), "-o", str(page)]) == 2
    assert not page.exists()
    assert "is no report of this bench" in capsys.readouterr().err
    (tmp_path / "cut.json").write_text('{"machine": {}, "command": "x", "runs": [{}]}')
    endless = {"train": {"claim": {"p50": float("inf"), "p90": 1, "p99": 1, "max": 1}}}
    (tmp_path / "odd.json").write_text(json.dumps(report(runs=[run("x", latency_ms=endless)])))
    for name in ("cut.json", "odd.json"):
        assert main(["report", str(tmp_path / name), "-o", str(page)]) == 2
        assert "no whole report" in capsys.readouterr().err and not page.exists()
    (tmp_path / "r.json").write_text(json.dumps(full()[0]))
    options = ["report", str(tmp_path / "r.json"), "-o", str(page), "--only", "smallest"]
    assert main(options) == 2 and not page.exists()
    assert "no figure smallest in these reports, but throughput, memory" in capsys.readouterr().err


def test_a_page_never_takes_the_place_of_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(full()[0]))
    before = path.read_text()
    for options in (["-o", str(path)], ["-o", str(tmp_path / "p.html"), "--png", str(path)]):
        assert main(["report", str(path), *options]) == 2
    assert path.read_text() == before
    assert "is one of the reports" in capsys.readouterr().err


def test_ticks_are_round_numbers_within_the_scale() -> None:
    assert Scale(0, 3.3, 0, 100).ticks(4) == [0, 1, 2, 3]
    assert Scale(-1.0, 4.8, 0, 100).ticks(6) == [-1, 0, 1, 2, 3, 4]
    assert Scale(0.5, 2000, 0, 100, log=True).ticks() == [1, 10, 100, 1000]
    assert Scale(0, 0.033, 0, 100).ticks(4) == pytest.approx([0, 0.01, 0.02, 0.03])
