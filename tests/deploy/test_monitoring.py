"""The files that Prometheus and Grafana are given: every metric in them is one that peers show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deploy.promtool import promtool
from tests.end_to_end.hosts import running
from tests.end_to_end.scrape import Scrape, free_address, scrape

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NAMES = re.compile(r"\b(?:dataplane|process)_[a-z_]+\b")


@pytest.fixture(scope="module")
def shown() -> Iterator[Scrape]:
    """What a peer of two shows after rows went from one to the other."""
    address = free_address()
    with (
        running("a", "b", metrics={"b": address}) as cluster,
        cluster.connect("a") as here,
        cluster.connect("b") as there,
    ):
        part = here.partition("p", stages={"s": ["x"]})
        part.put({"x": np.zeros((2, 100_000), np.uint8)})
        there.partition("p").claim("s", rows=2, timeout=30).ack()
        yield scrape(address)


def rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="make test-deploy brings it")
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana/dataplane.json").read_text())
    return loaded


def queries() -> list[str]:
    return [t["expr"] for p in dashboard()["panels"] for t in p.get("targets", [])]


def test_every_metric_that_is_named_is_shown_by_a_running_peer(shown: Scrape) -> None:
    files = [*DEPLOY.glob("prometheus/*.yml"), *DEPLOY.glob("grafana/*.json")]
    assert len(files) == 3
    for file in files:
        named = set(NAMES.findall(file.read_text()))
        assert named, file
        assert named <= shown.samples, (file, sorted(named - shown.samples))


def test_every_label_that_a_query_selects_or_groups_by_is_there(shown: Scrape) -> None:
    labels: dict[str, set[str]] = {}
    for name, pairs in shown.values:
        labels.setdefault(name, {"instance", "job"}).update(label for label, _ in pairs)
    for query in queries():
        for name, selector in re.findall(r"(dataplane_[a-z_]+)\{([^}]*)\}", query):
            used = set(re.findall(r"([a-z_]+)\s*=", selector))
            assert used <= labels.get(name, used), (query, name)


def test_the_alerts_that_were_asked_for_are_there_and_described() -> None:
    observe = (ROOT / "docs/observe.md").read_text()
    names = {rule["alert"] for rule in rules()}
    assert {
        "DataplaneArenaNearlyFull",
        "DataplaneBackPressure",
        "DataplaneLeasesExpire",
        "DataplaneRosterChanges",
        "DataplaneRowsLost",
    } <= names
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert f"### {rule['alert']}\n" in observe, rule["alert"]
        assert rule["annotations"]["runbook"].endswith(f"#{rule['alert'].lower()}")


def test_prometheus_takes_the_rules_and_the_scrape_configuration(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", DEPLOY / "prometheus/alerts.yml")
    promtool("check", "config", DEPLOY / "prometheus/scrape.yml")


def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, with Grafana's variables filled in."""
    plain = [q.replace("$__rate_interval", "1m").replace("$", "") for q in queries()]
    recorded = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(plain)]
    path = tmp_path / "panels.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    promtool("check", "rules", path)


def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    """Prometheus evaluates the rules over made-up series."""
    size, used = "1000+0x30", "950+0x30"
    series = {
        'dataplane_arena_size_bytes{instance="a", job="dataplane"}': size,
        'dataplane_arena_used_bytes{instance="a", job="dataplane"}': used,
        'dataplane_arena_granted_bytes{instance="a", job="dataplane"}': "0+0x30",
        'dataplane_cached_bytes{instance="a", job="dataplane"}': "0+0x30",
        'dataplane_arena_size_bytes{instance="b", job="dataplane"}': size,
        'dataplane_arena_used_bytes{instance="b", job="dataplane"}': used,
        'dataplane_arena_granted_bytes{instance="b", job="dataplane"}': "0+0x30",
        'dataplane_cached_bytes{instance="b", job="dataplane"}': "500+0x30",
        'dataplane_lost_rows_total{instance="a", job="dataplane"}': "0+0x5 4+0x25",
        'dataplane_roster_epoch{instance="a", job="dataplane"}': "3+0x30",
        'dataplane_leases_expired_total{instance="a", job="dataplane"}': "0+1x30",
        'dataplane_backpressure_waiting{instance="a", class="open"}': "2+0x30",
        'dataplane_backpressure_waiting{instance="b", class="open"}': "0+0x30",
    }
    firing = {
        "DataplaneArenaNearlyFull": ["a"],
        "DataplaneBackPressure": ["a"],
        "DataplaneLeasesExpire": ["a"],
        "DataplaneRosterChanges": [],
    }
    labels = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    checks: list[dict[str, object]] = []
    for alert, instances in firing.items():
        more = {"class": "open"} if alert == "DataplaneBackPressure" else {}
        if alert == "DataplaneArenaNearlyFull":
            more = {"job": "dataplane"}
        expected = [{"severity": labels[alert], "instance": i, **more} for i in instances]
        # annotations are not compared: only which alerts fire, and for whom
        checks.append({"expr": f'ALERTS{{alertname="{alert}", alertstate="firing"}}'})
        checks[-1] |= {
            "eval_time": "20m",
            "exp_samples": [{"labels": _alert(alert, one), "value": 1} for one in expected],
        }
    lost = {"severity": labels["DataplaneRowsLost"]}
    checks.append(
        {
            "expr": 'ALERTS{alertname="DataplaneRowsLost", alertstate="firing"}',
            "eval_time": "8m",
            "exp_samples": [{"labels": _alert("DataplaneRowsLost", lost), "value": 1}],
        }
    )
    test = {
        "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": checks,
            }
        ],
    }
    path = tmp_path / "fire.yml"
    path.write_text(json.dumps(test))
    promtool("test", "rules", path)


def _alert(name: str, labels: dict[str, str]) -> str:
    pairs = {"alertname": name, "alertstate": "firing", **labels}
    return "ALERTS{" + ", ".join(f'{k}="{v}"' for k, v in pairs.items()) + "}"
