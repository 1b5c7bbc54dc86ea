"""Nothing that arrives becomes code: no pickle, marshal, eval or exec is in reach.

Once by reading the source, once by watching real peers, bulk workers and a client at work.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane
from tests.end_to_end.conftest import PLANE, Cluster

PACKAGE = Path(dataplane.__file__).parent
ADAPTERS = Path(__file__).parents[2] / "packages"
AUDITED = Path(__file__).parent / "audited"

MODULES = {
    *("pickle", "_pickle", "pickletools", "copyreg", "shelve", "dbm", "marshal", "dill"),
    *("cloudpickle", "joblib", "yaml", "code", "codeop", "runpy", "imp"),
}
"""What makes objects or code out of bytes."""
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"import_module", "system", "popen", "FunctionType", "CodeType"}
ARGUMENTS = {"allow_pickle", "shell"}


def suspicious(source: str) -> Iterator[str]:
    """What a module does that could turn data into code, in words."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"import {n.name}" for n in names if n.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                found = {module.split(".")[0]} & MODULES or {n.name for n in names} & ATTRIBUTES
                yield from (f"from {module} import {name}" for name in found)
            case ast.Name(id=name) if name in CALLS:
                yield name
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield f".{name}"
            case ast.keyword(arg=str(name)) if name in ARGUMENTS:
                yield f"{name}="


def test_no_module_of_the_packages_can_turn_data_into_code() -> None:
    sources = [*sorted(PACKAGE.rglob("*.py")), *sorted(ADAPTERS.rglob("*.py"))]
    assert len(sources) > 100
    found = {
        str(path): names for path in sources if (names := sorted(suspicious(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "import pickle"),
        ("import os, marshal as m", "import marshal"),
        ("from yaml import load", "from yaml import yaml"),
        ("x = eval", "eval"),
        ("numpy.load(f, allow_pickle=True)", "allow_pickle="),
        ("importlib.import_module(name)", ".import_module"),
        ("from os import system", "from os import system"),
    ],
)
def test_the_reading_notices(source: str, found: str) -> None:
    assert list(suspicious(source)) == [found]


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every interpreter that is started from here on reports to this file."""
    report = tmp_path / "audit"
    report.touch()
    paths = [str(AUDITED), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("AUDIT_FILE", str(report))
    return report


def reported(audit: Path) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """The command lines of those that report, and what they did."""
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    started = [line["argv"] for line in lines if line["what"] == "started"]
    return started, [line for line in lines if line["what"] != "started"]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle; pickle.loads(b'K\\x01.')",
        "import marshal; marshal.loads(marshal.dumps(1))",
        "eval('1')",
        "exec('x = 1')",
        "compile('1', '', 'eval')",
    ],
)
def test_the_watch_notices(audit: Path, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
    started, found = reported(audit)
    assert len(started) == 1 and found


EVERYTHING = """
import asyncio
import numpy as np
import dataplane
from dataplane import aio

value = {"a": [1, None, 2.5, (3, "x")], b"k": np.arange(600.0), "t": np.float16(2)}
a, b = (dataplane.connect(name, run="PLANE") for name in "ab")
for round, (here, there) in enumerate(((a, b), (b, a))):
    part = here.partition(f"p{round}", {"s": ["x"], "t": ["x", "y"]}, group_size=2, free="drop")
    keys = [f"k{i}" for i in range(8)]
    ref = part.put(
        {"x": [np.full(3000 + i, i) for i in range(8)], "o": [value] * 8, "t": ["text"] * 8},
        key=keys, group=["g%d" % (i // 2) for i in range(8)], tags={"v": list(range(8))},
    )
    other = there.partition(f"p{round}")
    other.put({"y": np.ones((8, 4))}, key=keys)
    other.tag(keys[:1], {"v": 9}, expect={"v": 0})
    part.seal()
    got = other.get(keys=keys)
    assert got["o"][0]["a"] == [1, None, 2.5, (3, "x")] and len(there.get(ref)["x"][7]) == 3007
    other.get(keys=keys, fields=["x", "t"]).arrow()
    assert len(other.get(where=dataplane.tag("v") >= 7)) == 2
    with other.claim("s", groups=1, where=dataplane.tag("v") > 4, timeout=20) as batch:
        assert len(batch["x"]) == 2
        batch.release()
    for batch in other.stream("s", rows=4):
        batch.add(z=[1] * len(batch))
    other.wait("t", groups=4)
    batch = part.claim("t", rows=2, timeout=20)
    batch.drop()
    other.reset("s")
    part.rows(), part.stats(), there.stats()
    try:
        part.get(keys=["nobody"])
    except dataplane.RowsGone as error:
        repr(error)
    part.drop()

async def again():
    async with await aio.connect("a", run="PLANE") as plane:
        part = await plane.partition("q", {"s": ["x"]})
        await part.put({"x": [np.zeros(2000)]})
        batch = await part.claim("s", rows=1)
        await batch.ack()
        await part.drop()

asyncio.run(again())
a.close(), b.close()
print("done")
"""


def test_peers_workers_and_clients_turn_no_data_into_code(audit: Path, cluster: Cluster) -> None:
    cluster.start("a", "b")
    worker = cluster.worker(EVERYTHING.replace("PLANE", PLANE))
    said, _ = worker.communicate(timeout=90)
    assert said.strip() == "done"
    cluster.stop()
    started, found = reported(audit)
    roles = [" ".join(argv) for argv in started]
    assert sum("dataplane peer" in role for role in roles) == 2
    assert sum("dataplane.transport.worker" in role for role in roles) == 2
    assert sum(role.startswith("-c") for role in roles) == 1
    assert found == []
