"""The report as people get it: opened in a browser, complete, and without a network."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.page.document import pictures, write
from bench.page.drawing import DARK, LIGHT, apart
from bench.page.runs import figures
from tests.bench.browser import Browser, chromium

# Runs in the page: what lies outside the page, on other words of its drawing, or is too small.
_LOOK = """(() => {
const outside = [], over = [], wide = document.documentElement.scrollWidth - innerWidth;
let smallest = 99;
for (const svg of document.querySelectorAll("svg")) {
  const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim());
  const boxes = texts.map(text => text.getBoundingClientRect());
  texts.forEach((text, n) => {
    const box = boxes[n];
    smallest = Math.min(smallest, parseFloat(getComputedStyle(text).fontSize) * text.getCTM().a);
    if (box.left < -1 || box.right > innerWidth + 1) outside.push(text.textContent);
    boxes.slice(0, n).forEach((other, k) => {
      const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (across > 2 && down > 4) over.push([texts[k].textContent, text.textContent]);
    });
  });
}
const css = (name, of) => getComputedStyle(of || document.body)[name];
return {
  outside, over, wide, smallest, ink: css("color"), paper: css("backgroundColor"),
  headings: [...document.querySelectorAll("h2")].map(h => h.textContent),
  letters: css("fill", document.querySelector("svg text")),
};
})()"""


def run(plane: str, **changes: Any) -> dict[str, Any]:
    times = {"p50": 3.0, "p90": 9.0, "p99": 30.0, "max": 41.0, "times": 16}
    told: dict[str, Any] = {
        "plane": plane, "trace": "video", "status": "ok", "error": "", "rows": 128,
        "rows_expected": 128, "bytes_unique": 1_770_000_000,
        "seconds": 3.1, "peak_memory_bytes": {"arena of host0": 1 << 30, "train-0": 30 << 20},
        "peak_host_bytes": [1 << 30, 900 << 20], "steps": 1,
        "step_seconds": [3.0], "trainers": 2, "seed": 0, "pace": 0.0,
        "memory_limit_bytes": 3 << 30, "killed": None, "dedup": True,
        "hosts": 2, "prompts": 16, "samples": 8, "staleness": 0, "link": None, "apart": False,
        "phased": False, "recorded_step_seconds": 30.0, "arena_bytes": 1 << 30,
        "busiest_link": None,
        "memory_curve": {
            "seconds": [-1.0, 0.0, 1.0, 3.0],
            "processes": {
                "arena of host0": [None, 1 << 28, 1 << 30, 1 << 30], "train-0": [1 << 24] * 4,
            },
            "hosts": [[1 << 28, 1 << 29, 1 << 30, 1 << 30], [1 << 28] * 4],
        },
        "workers": {
            "rollout-0": {"cpu_seconds": {"put": 1.0, "generate": 0.4}},
            "train-0": {"cpu_seconds": {"claim": 2.0, "check": 0.5}},
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


def report(**parts: Any) -> dict[str, Any]:
    machine = {
        "cores": 2, "cpu": "a processor", "memory_bytes": 24 << 30, "system": "Linux 6.1",
        "python": "3.11.2", "packages": {"numpy": "2.0.0"}, "date": "2026-11-01",
        "commit": "0123456789",
    }  # fmt: skip
    return {"machine": machine, "command": "python -m bench run --trace video", **parts}


def full() -> list[dict[str, Any]]:
    return [report(runs=[run("dataplane"), killed()]), report(runs=[run("ray-store")])]


def over_hosts(trace: str = "math", a_host: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """A plane that stays flat and one that does not, on 2, 4 and 8 hosts with links."""
    runs = []
    for plane, grows in (("dataplane", 0.0), ("controller", 1.0)):
        for hosts in (2, 4, 8):
            took = 0.5 + grows * hosts
            runs.append(
                run(
                    plane, trace=trace, hosts=hosts, prompts=a_host * hosts, trainers=hosts,
                    rows_expected=8 * a_host * hosts, rows=8 * a_host * hosts, steps=3,
                    bytes_unique=hosts * 10**8, step_seconds=[3 * took, took, took + 0.2],
                    seconds=5 * took + 0.2, memory_limit_bytes=None, link="400mbit",
                    busiest_link={
                        "host": 0, "bytes": int(3e8 * (1 + grows * hosts)),
                        "busy_share": 0.1 + 0.1 * grows * hosts,
                    },
                )
            )  # fmt: skip
    return [{**told, **changes} for told in runs]


def first() -> dict[str, Any]:
    twice = [*over_hosts("video", 1), *over_hosts("video", 1, dedup=False)]
    runs = [*over_hosts(), *twice, run("dataplane"), killed()]
    return report(runs=runs, headline=["It is 16 × as fast.", "One was <killed>.", "We lose once."])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of whatever the bench can measure."""
    page = tmp_path_factory.mktemp("page") / "out" / "report.html"
    write(page, [first(), *full()[1:]])
    return page


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_every_picture_legibly_and_fetches_nothing(
    everything: Path, browser: Browser, width: int, dark: bool
) -> None:
    browser.open(everything, width, dark)
    seen = browser.tell(_LOOK)
    assert browser.fetched == [] and browser.errors == []
    assert seen["wide"] <= 0 and seen["outside"] == [] and seen["over"] == []
    assert seen["smallest"] >= 10  # pixels that a letter is high
    ink, paper, soft = (rgb((DARK if dark else LIGHT)[n]) for n in ("ink", "paper", "soft"))
    assert (seen["ink"], seen["paper"], seen["letters"]) == (ink, paper, soft)
    assert seen["headings"] == [
        "Step time over hosts", "Memory under the limit", "Share of a step",
        "Figures", "Commands and machine",
    ]  # fmt: skip


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*bytes.fromhex(colour[1:]))


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [part / 255 for part in bytes.fromhex(colour[1:])]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_whatever_is_written_in_a_colour_can_be_read_on_its_paper(theme: dict[str, str]) -> None:
    assert len(set(theme.values())) == len(theme)  # by which the page knows them
    for name in ("ink", "soft", "bad"):
        assert contrast(theme[name], theme["paper"]) >= 4.5, name
    planes = ("dataplane", "controller", "controller-stream", "ray-store")
    for plane in (*planes, "transfer_queue", "other"):
        assert contrast(theme[plane], theme["paper"]) >= 3.5, plane  # in bold, and as lines


def test_the_page_opens_with_the_headline_and_the_same_work_over_hosts(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, [first()])
    told = page.read_text()
    order = [
        "<li>It is 16 × as fast.</li>", "<li>One was &lt;killed&gt;.</li>", 'id="hosts"',
        'id="memory"', "<h2>Figures</h2>",
    ]  # fmt: skip
    places = [told.index(part) for part in order]
    assert places == sorted(places)
    hosts = section(told, "hosts")
    assert captions(hosts) == [
        "math, 2 prompts a host, 400 Mbit/s links, every stage on every host",
        "video, 1 prompt a host, 400 Mbit/s links, every stage on every host",
    ]  # fmt: skip
    assert {"0.6 s", "8.6 s", "2", "4", "8", "seconds"} <= set(texts(hosts))
    assert "<td>8.60 (8.50–8.70)</td>" in told and "<td>2.70</td><td>90</td>" in told


def section(page: str, name: str) -> str:
    (found,) = re.findall(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    return str(found)


def captions(part: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", part)


def texts(part: str) -> list[str]:
    return re.findall("<text[^>]*>(.*?)</text>", part)


def test_a_single_step_is_called_cold_and_who_died_is_crossed_out(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    runs = over_hosts(dedup=False)
    cold = [{**r, "step_seconds": r["step_seconds"][:1], "steps": 1} for r in runs[:4]]
    died = {**runs[5], "status": "oom", "step_seconds": [], "seconds": None, "rows": 3}
    write(page, [report(runs=[*cold, died])])
    told = texts(section(page.read_text(), "hosts"))
    assert "1.5 s cold" in told and "7.5 s cold" in told and "✕ killed" in told
    assert "<td>7.50</td>" in page.read_text()


def test_who_ran_on_one_number_of_hosts_only_has_no_line_over_hosts(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    alone = {**over_hosts(dedup=False)[3], "step_seconds": [75.0]}
    write(page, [report(runs=[*over_hosts(), alone])])
    told = page.read_text()
    assert "dedup off" not in section(told, "hosts") and "<td>75.00</td>" in told


def test_a_curve_ends_where_its_process_was_killed(tmp_path: Path) -> None:
    """What the sampler sees afterwards is what the kernel left."""
    from bench.page.runs import _curve

    died = killed()
    died["memory_curve"]["hosts"][0] = [1 << 28, 1 << 29, 3 << 30, 1 << 28]
    assert _curve(died, died["memory_curve"]["hosts"][0])[-1] == (1.0, 3.0)


def test_runs_without_links_are_set_beside_each_other_over_hosts(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, [report(runs=over_hosts(busiest_link=None, link=None))])
    told = page.read_text()
    assert captions(section(told, "hosts")) == [
        "math, 2 prompts a host, no link limit, every stage on every host"
    ]


def test_the_page_names_no_address_and_shows_errors_as_text(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, full())
    told = page.read_text()
    assert not re.search(r"https?://|<script|@import|url\((?!#)", told)
    assert "&lt;at its limit&gt;" in told and "<at its limit>" not in told
    assert told.count("python -m bench run --trace video") == 2


def test_only_runs_that_did_the_same_work_are_set_beside_each_other(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    small = run("dataplane", prompts=2, rows_expected=16, seconds=0.5, memory_limit_bytes=6 << 30)
    write(page, [report(runs=[small]), report(runs=[run("controller", seconds=50.0), killed()])])
    told = page.read_text()
    assert captions(section(told, "memory")) == [
        "video, 2 hosts, 2 prompts × 8, no link limit, every stage on every host, 6 GiB a host",
        "video, 2 hosts, 16 prompts × 8, no link limit, every stage on every host, 3 GiB a host",
    ]
    write(page, [report(runs=[*over_hosts()[:1], *over_hosts(link=None)[3:4]])])
    assert 'id="hosts"' not in page.read_text()


def test_every_machine_is_named_with_its_commands(tmp_path: Path) -> None:
    page, (one, another) = tmp_path / "report.html", full()
    other = {**another["machine"], "cores": 64, "packages": {"numpy": "2.5.0"}}
    write(page, [one, {**another, "machine": other}])
    told = page.read_text()
    assert "2 cores" in told and "64 cores" in told and "numpy 2.0.0" in told
    assert told.rindex("numpy 2.0.0") < told.rindex("<pre>") < told.rindex("numpy 2.5.0")


def test_a_run_that_never_started_stretches_no_axis(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    waited = run("ray-store", status="error", error="no node", rows=0, seconds=None)
    write(page, [report(runs=[run("dataplane"), waited])])
    assert section(page.read_text(), "memory").count("<figure>") == 1


def test_a_killed_run_is_named_under_the_memory_it_was_killed_for(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, full())
    told = section(page.read_text(), "memory")
    assert "<h2>Memory under the limit</h2>" in told
    assert {"controller", "dedup off", "✕ killed at 47.0 s", "at most 1 GiB"} <= set(texts(told))


def test_a_report_without_a_single_finished_run_is_still_a_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    nothing: dict[str, Any] = {"seconds": [], "processes": {}, "hosts": []}
    refused = run(
        "controller", status="not run", rows=0, seconds=None, memory_curve=nothing, workers={},
        latency_ms={}, error="cannot set a memory limit on this machine", peak_host_bytes=[],
    )  # fmt: skip
    write(page, [report(runs=[refused])])
    told = page.read_text()
    assert "not run" in told and "cannot set a memory limit on this machine" in told


@pytest.mark.needs("chromium")
def test_a_run_writes_the_page_beside_its_json_and_report_makes_it_again(
    tmp_path: Path, browser: Browser
) -> None:
    path = tmp_path / "r.json"
    options = ["--trace", "math", "--planes", "controller", "--prompts", "2", "--json", str(path)]
    assert main(["run", *options]) == 0
    assert "<h2>Memory</h2>" in path.with_suffix(".html").read_text()
    again = tmp_path / "again.html"
    assert main(["report", str(path), "-o", str(again)]) == 0
    assert again.read_text() == path.with_suffix(".html").read_text()
    browser.open(again, 390)
    seen = browser.tell(_LOOK)
    assert seen["wide"] <= 0 and seen["over"] == [] and browser.errors == []


def test_pictures_are_drawn_light_and_dark_and_alike_each_time(tmp_path: Path) -> None:
    found = [figure for figure in figures([first()]) if figure.name in ("memory", "share")]
    made = pictures(tmp_path, found)
    names = ("memory", "share", "share-2", "share-3")
    assert sorted(path.name for path in made) == sorted(
        f"{name}-{theme}.svg" for name in names for theme in ("light", "dark")
    )
    before = {path: path.read_text() for path in made}
    for path, drawn in before.items():
        assert ElementTree.fromstring(drawn).tag.endswith("svg") and len(drawn) < 150_000
        assert (DARK if "dark" in path.name else LIGHT)["dataplane"] in drawn
        assert "<text" not in drawn  # letters alike on any machine
    pictures(tmp_path, found)
    assert before == {path: path.read_text() for path in made}


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    model = json.dumps(report(model=[]))  # of `sim`: nothing of it can be drawn
    for content in ("{}", "[1]", "no JSON", model):
        (tmp_path / "x.json").write_text(content)
        assert main(["report", str(tmp_path / "x.json"), "-o", str(page)]) == 2
    assert main(["report", str(tmp_path / "missing.json"), "-o", str(page)]) == 2
    assert not page.exists()
    assert (
        "x.json has no runs, so it is not a report of `headline`, `links` or `run`"
        in capsys.readouterr().err
    )
    (tmp_path / "cut.json").write_text('{"machine": {}, "command": "x", "runs": [{}]}')
    assert main(["report", str(tmp_path / "cut.json"), "-o", str(page)]) == 2
    assert "not a complete report" in capsys.readouterr().err and not page.exists()


def test_a_page_never_takes_the_place_of_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(full()[0]))
    before = path.read_text()
    assert main(["report", str(path), "-o", str(path)]) == 2
    assert path.read_text() == before
    assert "is one of the reports" in capsys.readouterr().err


def test_names_of_lines_never_lie_on_each_other() -> None:
    assert apart([90, 50, 10], [20, 20, 20], 100) == [90, 50, 10]
    for wanted in ([50.0, 50.0, 50.0], [3.0, 2.0, 1.0], [99.0, 98.0, 2.0], [100.0, 100.0, 99.0]):
        found = apart(wanted, [20, 30, 20], 100)
        assert found[0] - found[1] >= 25 and found[1] - found[2] >= 25
        assert found[2] >= 0 - 4 and found[0] <= 100
        assert all(math.isfinite(place) for place in found)
