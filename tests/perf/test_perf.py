"""The report of `python -m bench perf`, and that its ceilings measure what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import __main__, cli
from dataplane.errors import PeerLost
from tests.perf.ceilings import Ceilings
from tests.perf.hot_path import FEW_ROWS, MANY_ROWS, report_of
from tests.processes import ending

TIMES = ["memcpy_s", "socket_s", "round_trip_s", "relayed_s", "put_s", "put_list_s", "pull_s"]
TIMES += [
    "claim_s",
    "claim_small_s",
    "claim_small_cold_s",
    "claim_backed_up_s",
    "fields_1_s",
    "fields_32_s",
]
TIMES += ["pull_owner_s", "cycle_s", "cycle_backed_up_s", "clients_1", "clients_4"]
TIMES += ["bytes_per_row", "life_s", "bare_client_s", "bare_peer_s"]


def samples() -> dict[str, list[float]]:
    taken = {name: [1.0, 2.0, 4.0] for name in TIMES}
    return taken | {f"shard_{rows}_s": [1.0, 2.0, 4.0] for rows in (FEW_ROWS, MANY_ROWS)}


def test_the_report_has_exactly_the_keys_that_readers_rely_on() -> None:
    report = report_of(samples())
    assert {
        name: set(part) for name, part in report.items() if name not in ("ratios", "spread")
    } == {
        "ceiling": {"memcpy_GBps", "socket_GBps", "unix_rtt_us", "relayed_us"},
        "put": {"GBps", "of_memcpy"},
        "pull": {"GBps", "of_socket"},
        "claim_local": {"ms_p50", "ms_p99"},
        "pull_owner": {"cpu_ms"},
        "bare_call": {"client_cpu_us", "peer_cpu_us"},
        "cycle": {"per_s"},
        "backed_up": {"claim_ms_p50", "cycle_per_s"},
        "shard": {"claim_ms_p50_at_10k", "claim_ms_p50_at_1m", "bytes_per_row"},
        "group_life": {"per_s", "cpu_ms"},
        "clients": {"1", "4"},
        "fields": {"1", "32"},
    }


def test_a_ratio_compares_what_was_measured_side_by_side() -> None:
    taken = samples() | {"memcpy_s": [1.0, 3.0, 9.0], "put_s": [2.0, 6.0, 18.0]}
    report = report_of(taken)
    assert report["put"]["of_memcpy"] == 0.5
    assert report["spread"]["put_s"] == {"min": 2.0, "max": 18.0, "samples": 3}


def test_every_figure_is_made_of_its_own_samples() -> None:
    """Each kind of sample has a value of its own, so that none stands for another."""
    names = [*TIMES, f"shard_{FEW_ROWS}_s", f"shard_{MANY_ROWS}_s"]
    one = {name: float(n) for n, name in enumerate(names, 2)}
    report = report_of({name: [value, value, value, 100.0] for name, value in one.items()})
    gigabytes, rtt = 256 * (1 << 20) / 1e9, one["round_trip_s"]
    assert report["ceiling"]["memcpy_GBps"] == gigabytes / one["memcpy_s"]
    assert report["ceiling"]["socket_GBps"] == gigabytes / one["socket_s"]
    assert report["ceiling"]["unix_rtt_us"] == rtt * 1e6
    assert report["ceiling"]["relayed_us"] == one["relayed_s"] * 1e6
    assert report["put"]["GBps"] == gigabytes / one["put_s"]
    assert report["pull"]["GBps"] == gigabytes / one["pull_s"]
    assert report["claim_local"]["ms_p50"] == one["claim_s"] * 1e3
    assert report["claim_local"]["ms_p99"] > 90e3
    assert report["cycle"]["per_s"] == 1 / one["cycle_s"]
    assert report["shard"] == {
        "claim_ms_p50_at_10k": one[f"shard_{FEW_ROWS}_s"] * 1e3,
        "claim_ms_p50_at_1m": one[f"shard_{MANY_ROWS}_s"] * 1e3,
        "bytes_per_row": one["bytes_per_row"],
    }
    life = one["life_s"]
    assert report["group_life"] == {"per_s": 1 / life, "cpu_ms": life * 1e3}
    assert report["clients"] == {"1": one["clients_1"], "4": one["clients_4"]}
    assert report["fields"]["32"] == gigabytes / 4 / one["fields_32_s"]
    assert report["ratios"] == pytest.approx(
        {
            "put_list_of_memcpy": one["memcpy_s"] / one["put_list_s"],
            "claim_round_trips": one["claim_s"] / rtt,
            "claim_1MiB_of_1KiB": one["claim_s"] / one["claim_small_s"],
            "claim_1MiB_of_cold_1KiB": one["claim_s"] / one["claim_small_cold_s"],
            "cycle_round_trips": one["cycle_s"] / rtt,
            "cycle_backed_up_relayed": one["cycle_backed_up_s"] / one["relayed_s"],
            "shard_1m_of_10k": one[f"shard_{MANY_ROWS}_s"] / one[f"shard_{FEW_ROWS}_s"],
            "clients_4_of_1": one["clients_4"] / one["clients_1"],
            "fields_32_of_1": one["fields_1_s"] / one["fields_32_s"],
        }
    )


def test_a_peer_that_ends_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> None:
        raise PeerLost("peer 'a' went away")

    monkeypatch.setattr("tests.perf.hot_path.measure", measured)
    assert cli.main(["perf", "--only", "hot-path"]) == 1
    assert "peer 'a' went away" in capsys.readouterr().out


def test_ctrl_c_ends_the_ceilings_without_a_word_or_a_leftover(tmp_path: Path) -> None:
    """A terminal sends it to the whole group, and so to the other ends as well."""
    program = """
import numpy as np, time
from tests.perf.ceilings import Ceilings
if __name__ == "__main__":
    with Ceilings(np.zeros((1, 64), np.uint8)):
        print("up", flush=True)
        time.sleep(60)
"""
    runner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    with ending(runner):
        assert runner.stdout and runner.stdout.readline() == "up\n"
        os.killpg(runner.pid, signal.SIGINT)
        _, told = runner.communicate(timeout=60)
    assert told.count("Traceback") == 1, told  # of the program above, which catches nothing
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_modules_are_loaded_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", stopped)
    assert __main__.main() == 130


def test_a_package_that_is_not_installed_is_named_with_what_brings_it() -> None:
    code = (
        "import runpy, sys; sys.modules['rich'] = None; runpy.run_module('bench', {}, '__main__')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.returncode == 2 and told.stdout == ""
    assert "the package 'rich' is not installed" in told.stderr
    assert "pip install -e '.[bench]'" in told.stderr and "Traceback" not in told.stderr


def test_the_ceilings_move_every_byte() -> None:
    block = np.arange(1 << 20, dtype=np.uint8).reshape(4, -1)
    with Ceilings(block) as ceilings:
        assert ceilings.memcpy_s() > 0 and (ceilings.copied == block).all()
        assert ceilings.socket_s() > 0 and (ceilings.copied == 1).all()
        assert 0 < ceilings.round_trip_s() < 1
        assert 0 < ceilings.relayed_s() < 1
