"""`python -m bench compare` with this project's own plane, and what it says of planes not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cli import main
from bench.planes import PLANES
from bench.planes.transfer_queue import TransferQueueEndpoint
from bench.usage import between, cpu_seconds
from tests import leaks
from tests.perf.compare import batch
from tests.perf.compare.ends import NAMES, job
from tests.perf.compare.measure import Report, Settings, describe, measure, ratios
from tests.perf.compare.tree import SINGLE_BYTES, Tree
from tests.perf.compare.worker import Command, perform

MIB = 1 << 20


def silent(done: int, whole: int) -> None:
    """No progress bar."""


def test_a_batch_has_the_size_that_was_asked_for_and_is_ragged() -> None:
    columns = batch.batch(4 * MIB, seed=0, rows=64)
    assert batch.size_of(columns) == pytest.approx(4 * MIB, rel=0.05)
    assert {len(values) for values in columns.values()} == {64}
    for name in batch.RAGGED:
        assert len({value.shape for value in columns[name]}) > 10
    for name in batch.DENSE:
        assert len({value.shape for value in columns[name]}) == 1


def test_transfer_queue_is_given_a_single_row_dense_and_several_ragged(tmp_path: Path) -> None:
    """A jagged tensor of one row takes it twice as long to put."""
    pytest.importorskip("tensordict")
    endpoint = object.__new__(TransferQueueEndpoint)  # without the cluster that it attaches to
    for rows in (1, 3):
        endpoint.job = job("dataplane", 1, rows, MIB, str(tmp_path), 0)
        form = endpoint.form(batch.batch(MIB, seed=0, rows=rows))
        assert [form[name].is_nested for name in batch.FIELDS] == [
            rows > 1 and name in batch.RAGGED for name in batch.FIELDS
        ]


def test_reading_depends_on_every_byte() -> None:
    whole = np.arange(1003, dtype=np.uint8)
    for at in (0, 500, 1002):
        other = whole.copy()
        other[at] ^= 1
        assert batch.read([other]) != batch.read([whole])


def test_a_digest_knows_a_changed_value_but_not_the_order_of_rows() -> None:
    columns = batch.batch(MIB, seed=1, rows=8)
    turned = {name: values[::-1] for name, values in columns.items()}
    assert batch.digest(turned) == batch.digest(columns)
    swapped = dict(columns) | {"reward": columns["reward"][::-1]}
    assert batch.digest(swapped) != batch.digest(columns)


@pytest.mark.parametrize("hosts", [1, 2])
def test_dataplane_carries_the_batch_and_single_rows(hosts: int) -> None:
    settings = Settings(
        planes=("dataplane",),
        sizes=(MIB,),
        hosts=(hosts,),
        rows=16,
        rounds=1,
        repeats=2,
        singles=10,
    )
    kept: list[Report] = []
    report = measure(settings, silent, kept.append)
    assert report["planes"]["dataplane"]["error"] == ""
    assert kept == [report]
    found = {(line["batch"], line["operation"]): line for line in report["results"]}
    assert found.keys() == {
        ("1 MiB", "floor"),
        ("1 MiB", "put"),
        ("1 MiB", "handle"),
        ("1 MiB", "read"),
        ("1 row", "put"),
        ("1 row", "cycle"),
    }
    read = found["1 MiB", "read"]
    assert read["hosts"] == hosts
    assert found["1 MiB", "floor"]["floors"] == 1
    assert read["GBps"] == pytest.approx(read["bytes"] / 1e9 / read["seconds"]["median"])
    assert found["1 row", "cycle"]["seconds"]["samples"] == 2 * 10
    assert not leaks.children()


def test_a_plane_that_is_not_installed_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANES["ray-store"], "packages", ("no-such-package", "numpy"))
    told = describe("ray-store")
    assert told["status"] == "not installed"
    assert told["error"] == "missing packages: no-such-package"
    assert told["versions"]["no-such-package"] is None


def test_the_command_writes_every_plane_whether_it_is_installed_or_not(tmp_path: Path) -> None:
    file = tmp_path / "out" / "compare.json"
    few = ["--rounds", "1", "--repeats", "1", "--singles", "2", "--rows", "4"]
    absent = [name for name in NAMES if PLANES[name].missing()]
    planes = ",".join(["dataplane", *absent])
    small = ["--sizes", "1MiB", "--hosts", "1", "--planes", planes]
    assert main(["compare", *small, *few, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert told["planes"]["dataplane"]["status"] == "ok"
    assert [told["planes"][name]["status"] for name in absent] == ["not installed"] * len(absent)
    assert told["machine"]["cores"] >= 1
    assert told["command"].startswith("python -m bench compare")


@pytest.mark.parametrize("nbytes", [MIB, SINGLE_BYTES], ids=["batch", "single"])
def test_content_that_differs_ends_the_planes_part_as_an_error(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Tree.ask
    loaded = 0

    def lying(tree: Tree, role: str, do: str, **details: Any) -> dict[str, Any]:
        nonlocal loaded
        said = ask(tree, role, do, **details)
        loaded = details["nbytes"] if do == "load" else loaded
        return said | {"digest": "0"} if (do, loaded) == ("check", nbytes) else said

    monkeypatch.setattr(Tree, "ask", lying)
    settings = Settings(planes=("dataplane",), sizes=(MIB,), hosts=(1,), rows=4, rounds=1)
    kept: list[Report] = []
    report = measure(settings, silent, kept.append)
    assert report["planes"]["dataplane"]["status"] == "error"
    assert "WrongContent" in report["planes"]["dataplane"]["error"]
    assert report["results"] == []
    assert not leaks.children()


def test_a_ratio_says_how_many_times_quicker_dataplane_is() -> None:
    def line(plane: str, operation: str, seconds: float, name: str = "1 row") -> dict[str, object]:
        took = {"median": seconds}
        return {
            "plane": plane,
            "hosts": 1,
            "batch": name,
            "operation": operation,
            "seconds": took,
        }

    lines = [
        line("dataplane", "put", 1.0),
        line("dataplane", "cycle", 1.0),
        line("other", "put", 3.0),
        line("other", "cycle", 5.0),
        line("other", "read", 5.0, "64 MiB"),
    ]
    assert ratios(lines) == {
        "1 row, put, 1 host: of other": 3.0,
        "1 row, cycle, 1 host: of other": 5.0,
        "1 row, put+get, 1 host: of other": 4.0,
    }


def test_processor_time_of_a_child_that_has_ended_counts_for_its_parent() -> None:
    work = "import time; [0 for _ in iter(lambda: time.process_time() < 0.3, False)]"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    command = [sys.executable, "-u", "-c", f"{code}; print('over'); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin and parent.stdout
        assert parent.stdout.readline() == "over\n"
        spent = cpu_seconds({"peer": parent.pid})
        parent.stdin.write("\n")
    assert between({"peer": 0.1}, spent) == {"peer": pytest.approx(spent["peer"] - 0.1)}
    assert spent["peer"] > 0.2


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(ValueError, match="no command 'dance'"):
        perform(None, Command(do="dance"), [])  # type: ignore[arg-type]
