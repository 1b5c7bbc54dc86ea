"""What a running peer shows, as Prometheus reads it."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.conftest import free_addresses


def free_address() -> str:
    """A loopback HOST:PORT that was free a moment ago."""
    return free_addresses(1)[0].removeprefix("tcp://")


def page(address: str, path: str) -> tuple[int, str]:
    """Status and text of one page; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()
    except OSError:
        return 0, ""


@dataclass(frozen=True)
class Scrape:
    """values: by the sample's name and its labels, sorted. kinds, labels: by family."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]
    kinds: dict[str, str]
    helps: dict[str, str]

    def value(self, name: str, **labels: str) -> float:
        return self.values[name, tuple(sorted(labels.items()))]

    @property
    def samples(self) -> set[str]:
        """Every name that a query may use, of families without samples too."""
        named = {name for name, _ in self.values}
        counters = {name for name, kind in self.kinds.items() if kind == "counter"}
        gauges = {name for name, kind in self.kinds.items() if kind == "gauge"}
        return named | gauges | {f"{name}_total" for name in counters}


def scrape(address: str) -> Scrape:
    """All metrics of one peer."""
    status, text = page(address, "/metrics")
    assert status == 200, (status, text)
    families = list(text_string_to_metric_families(text))
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    kinds = {family.name: family.type for family in families}
    return Scrape(values, kinds, {family.name: family.documentation for family in families})
