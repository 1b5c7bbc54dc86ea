"""Seeds that one DNS name has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dataplane.errors import InvalidConfig, SeedsMissing
from dataplane.launch.dns import addresses_of, seeds_of
from dataplane.launch.values import parse_seeds


def answers(*sets: set[str]) -> Callable[[str], set[str]]:
    """A resolver that says one after the other, and the last one from then on."""
    left = list(sets)
    return lambda name: left.pop(0) if len(left) > 1 else left[0]


def test_a_name_of_this_machine_is_asked_for() -> None:
    assert addresses_of("localhost") == {"127.0.0.1"}
    assert parse_seeds("dns://localhost:7101/1") == ("tcp://127.0.0.1:7101",)


def test_hosts_that_start_late_are_waited_for_and_all_have_one_order() -> None:
    late = answers(set(), {"10.0.0.10"}, {"10.0.0.10", "10.0.0.9"})
    early = answers({"10.0.0.9", "10.0.0.10"})
    for resolve in (late, early):
        seeds = seeds_of("dns://svc:7101/2", resolve, pause_s=0)
        assert seeds == ("tcp://10.0.0.9:7101", "tcp://10.0.0.10:7101")


def test_addresses_of_version_6_are_bracketed() -> None:
    assert seeds_of("dns://svc:7101/1", answers({"fd00::1"})) == ("tcp://[fd00::1]:7101",)


@pytest.mark.parametrize("found", [set(), {"10.0.0.1", "10.0.0.2"}])
def test_too_few_or_too_many_addresses_are_an_error_in_time(found: set[str]) -> None:
    with pytest.raises(
        SeedsMissing, match=rf"svc still resolved to {len(found)} address"
    ) as raised:
        seeds_of("dns://svc:7101/1", answers(found), wait_s=0)
    assert raised.value.details["expected"] == 1


@pytest.mark.parametrize("text", ["dns://svc", "dns://svc:7101", "dns://svc:0/2", "dns://svc:1/0"])
def test_a_setting_without_a_port_or_a_count_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="dns://NAME:PORT/COUNT"):
        parse_seeds(text)
