"""The report of `python -m bench perf`, and that its ceilings measure what they say."""

from __future__ import annotations

import numpy as np

from bench.ceilings import Ceilings
from bench.perf import FEW_ROWS, MANY_ROWS, report_of

TIMES = ["memcpy_s", "socket_s", "round_trip_s", "put_s", "put_list_s", "pull_s"]
TIMES += [
    "claim_s",
    "claim_small_s",
    "claim_small_cold_s",
    "claim_backed_up_s",
    "fields_1_s",
    "fields_32_s",
]
TIMES += ["cycle_s", "cycle_backed_up_s", "clients_1", "clients_4", "bytes_per_row"]


def samples() -> dict[str, list[float]]:
    taken = {name: [1.0, 2.0, 4.0] for name in TIMES}
    return taken | {f"shard_{rows}_s": [1.0, 2.0, 4.0] for rows in (FEW_ROWS, MANY_ROWS)}


def test_the_report_has_exactly_the_keys_that_readers_rely_on() -> None:
    report = report_of(samples())
    assert {
        name: set(part) for name, part in report.items() if name not in ("ratios", "spread")
    } == {
        "ceiling": {"memcpy_GBps", "socket_GBps", "unix_rtt_us"},
        "put": {"GBps", "of_memcpy"},
        "pull": {"GBps", "of_socket"},
        "claim_local": {"ms_p50", "ms_p99"},
        "cycle": {"per_s"},
        "backed_up": {"claim_ms_p50", "cycle_per_s"},
        "shard": {"claim_ms_p50_at_10k", "claim_ms_p50_at_1m", "bytes_per_row"},
        "clients": {"1", "4"},
        "fields": {"1", "32"},
    }


def test_a_ratio_compares_what_was_measured_side_by_side() -> None:
    taken = samples() | {"memcpy_s": [1.0, 3.0, 9.0], "put_s": [2.0, 6.0, 18.0]}
    report = report_of(taken)
    assert report["put"]["of_memcpy"] == 0.5
    assert report["spread"]["put_s"] == {"min": 2.0, "max": 18.0, "samples": 3}


def test_the_ceilings_move_every_byte() -> None:
    block = np.arange(1 << 20, dtype=np.uint8).reshape(4, -1)
    with Ceilings(block) as ceilings:
        assert ceilings.memcpy_s() > 0 and (ceilings.copied == block).all()
        assert ceilings.socket_s() > 0 and (ceilings.copied == 1).all()
        assert 0 < ceilings.round_trip_s() < 1
