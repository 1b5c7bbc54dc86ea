"""What is published comes from one report: pictures, tables and sentences of README and docs."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench import measured
from bench.cli import main
from bench.page import document
from bench.publish import KEPT, ROOT, blocks, filled, publish, trimmed
from tests.bench.test_page import killed, over_hosts, report, run

PAGES = ("README.md", "docs/performance.md", "docs/choosing.md")


@pytest.fixture
def told() -> dict[str, Any]:
    memory = [run("dataplane", step_seconds=[3.0]), killed()]
    return report(runs=[*over_hosts(), *memory], headline=["One.", "Two.", "Three.", "Four."])


def test_a_table_has_each_job_once_with_medians_and_ranges(told: dict[str, Any]) -> None:
    made = blocks(told)
    head, _, *lines = made["steps"].splitlines()
    assert head == "| steady step | dataplane | a controller with barriers |"
    assert lines[-1] == (
        "| math, 8 hosts, 16 prompts × 8, 400 Mbit/s links, every stage on every host "
        "| 0.60 s (0.50–0.70); link 10% | 8.60 s (8.50–8.70); link 90% |"
    )
    assert len(lines) == 3
    assert (
        made["headline"] == "- One.\n- Two.\n- Three.\n- Four.\n" and made["sentence"] == "One.\n"
    )
    assert "2026-11-01, commit 0123456789" in made["made"] and "Python 3.11.2" in made["made"]


def test_publishing_fills_the_blocks_of_the_pages_and_keeps_the_report(
    told: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    for name in PAGES:
        (tmp_path / name).write_text("a\n<!-- bench: sentence -->\nold\n<!-- bench: end -->\nb\n")
    written = publish(tmp_path, told)
    for name in PAGES:
        page = (tmp_path / name).read_text()
        assert page == "a\n<!-- bench: sentence -->\nOne.\n<!-- bench: end -->\nb\n"
    assert {path.suffix for path in written} == {".json", ".svg", ".md"}
    kept = json.loads((tmp_path / KEPT).read_text())
    assert blocks(kept) == blocks(told) and trimmed(kept) == kept


def test_a_block_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!-- bench: weather -->\n<!-- bench: end -->", {"headline": ""})


def test_what_is_no_report_of_the_headline_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "perf.json").write_text(json.dumps(report(ceiling={})))
    assert main(["publish", str(tmp_path / "perf.json")]) == 2
    assert "is not a report of `headline`" in capsys.readouterr().err


def test_readme_docs_and_pictures_are_those_of_the_report_that_is_kept(tmp_path: Path) -> None:
    """`python -m bench publish REPORT` makes them again."""
    kept = document.load(ROOT / KEPT)
    made = blocks(kept)
    for name in PAGES:
        page = (ROOT / name).read_text()
        assert "<!-- bench: " in page and filled(page, made) == page, name
    if kept["machine"]["packages"]["matplotlib"] != version("matplotlib"):
        return  # another version draws other letters
    for name in PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for path in publish(tmp_path, kept):
        if path.suffix != ".md":
            relative = path.relative_to(tmp_path)
            assert path.read_bytes() == (ROOT / relative).read_bytes(), relative


MACHINE = {"date": "2026-11-01", "commit": "0123456789", "cores": 2}
PERF = {
    "put": {"of_memcpy": 0.861},
    "pull": {"of_socket": 1.26},
    "shard": {
        "claim_ms_p50_at_10k": 0.5,
        "claim_ms_p50_at_1m": 0.55,
        "bytes_per_row": 80.6,
    },
    "cycle": {"per_s": 2_000.0},
    "backed_up": {"cycle_per_s": 800.0},
    "group_life": {"per_s": 1_234.0},
    "transports": {},
    "machine": MACHINE,
    "command": "python -m bench perf",
}
COMPARE = {
    "results": [
        {
            "plane": plane,
            "hosts": hosts,
            "batch": "1 row",
            "operation": of,
            "seconds": {"median": s},
        }
        for plane, hosts, of, s in (
            ("dataplane", 1, "put", 0.0004),
            ("dataplane", 1, "cycle", 0.0005),
            ("dataplane", 2, "cycle", 0.5),
            ("ray-store", 1, "put", 0.5),
        )
    ],
    "ratios": {
        f"{which}: of {plane}": ratio
        for which in (
            "1 row, put+get, 1 host",
            "512 MiB, put, 1 host",
            "512 MiB, read, 1 host",
            "512 MiB, read, 2 hosts",
        )
        for plane, ratio in (("transfer_queue", 8.44), ("ray-store", 0.774))
    },
    "planes": {},
    "machine": MACHINE,
    "command": "python -m bench compare",
}


def test_the_figures_of_one_or_two_hosts_come_from_perf_and_compare(told: dict[str, Any]) -> None:
    kept = {"perf": measured.trimmed("perf", PERF), "compare": measured.trimmed("compare", COMPARE)}
    made = blocks(told | kept)
    lines = made["limits"].splitlines()
    assert lines[2] == "| put of 256 × 1 MiB | 0.86 × memcpy's rate |"
    assert "| claim at 1 million live rows | 1.1 × the time at 10 thousand |" in lines
    assert "| put, claim and ack of one row | 0.50 ms; with a backup 1.25 ms |" in lines
    assert (
        "| one row of nine short fields, from one process to another | 0.90 ms; 8.4 × "
        "TransferQueue's rate, **0.77 ×** that of Ray's store |"
    ) in lines
    assert made["measured"] == (
        "`python -m bench perf` on 2026-11-01, commit 0123456789 and `python -m bench compare` on "
        "2026-11-01, commit 0123456789.\n"
    )
    assert "transports" not in kept["perf"] and "planes" not in kept["compare"]


def test_a_report_that_lacks_what_is_shown_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    perf = tmp_path / "perf.json"
    perf.write_text(json.dumps({name: PERF[name] for name in ("put", "machine", "command")}))
    assert main(["publish", str(ROOT / KEPT), "--perf", str(perf)]) == 2
    assert "has no 'pull'" in capsys.readouterr().err


def full(plane: str, seconds: float, **changes: Any) -> dict[str, Any]:
    step = {"prompts": 64, "recorded_seconds": 20.0, "link_bits_per_second": 100e9}
    return run(plane, full_step={**step, "link_seconds": seconds}, **changes)


def test_what_a_step_saves_is_told_beside_the_better_plane_on_the_most_hosts_all_finished_on() -> (
    None
):
    runs = [
        *(full("dataplane", 0.1 * hosts, apart=True, hosts=hosts) for hosts in (2, 6, 8)),
        *(full("controller-stream", 0.2 * hosts, apart=True, hosts=hosts) for hosts in (2, 6)),
        *(full("controller", 0.3 * hosts, apart=True, hosts=hosts) for hosts in (2, 6, 8)),
        full("controller-stream", 0.0, apart=True, hosts=8, status="oom"),
    ]
    told = report(runs=runs, headline=["One."])
    assert blocks(told)["savings"].splitlines()[2:] == [
        "| video, 64 prompts, 6 hosts, rollout apart | 20 s | 0.60 s | 1.20 s | 1.80 s "
        "| 0.60 s, 3.0% |"
    ]


def test_the_calculator_of_choosing_agrees_with_the_report_that_is_kept() -> None:
    kept = document.load(ROOT / KEPT)
    page = (ROOT / "docs/choosing.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(program, names)
    shown = re.search(r"gigabytes=([\d.]+), hosts=(\d), gbit=(\d+)", program)
    assert shown
    found = []
    for each in kept["runs"]:
        step = each["full_step"]
        if not step or not each["apart"] or each["plane"] == "controller":  # it has barriers
            continue
        hosts = each["hosts"] // 2  # that read
        scale = step["prompts"] / each["prompts"] / len(each["step_seconds"]) / 1e9
        gigabytes = each["bytes_unique"] * scale
        busy = names["link_seconds"](gigabytes, hosts, 100)
        if each["plane"] == "dataplane":
            pulled = sum(each["pulled_bytes"])
            ratio = pulled * scale / hosts * 8 / 100 / busy["dataplane"]
            most = 1.15  # few groups cross twice
        else:
            ratio, most = step["link_seconds"] / busy["controller"], 1.05
        # What a stage adds on the trainer's host crosses no link: a part of text rows.
        least = 0.99 if each["trace"] == "video" else 0.8
        assert least < ratio < most, (each["trace"], each["plane"], each["hosts"], ratio)
        if each["trace"] == "video" and each["hosts"] == 6:
            found.append(round(gigabytes, 1))
    assert set(found) == {float(shown[1])}
