"""What a user installs: wheels built here, in an environment that had nothing before.

`make test-wheels`; it says how long an installation and the README's first screen take.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = (ROOT, *sorted((ROOT / "packages").iterdir()))
LIMIT_S = 600
TORCH = "torch==2.13.0"

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("build", "twine"))),
        reason="build and twine are not installed: make test-wheels",
    ),
    pytest.mark.timeout(2 * LIMIT_S),
]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**own, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist() -> Iterator[Path]:
    """All distributions, as wheels and sources."""
    with TemporaryDirectory(prefix="dp-dist-") as folder:
        for project in PROJECTS:
            run(sys.executable, "-m", "build", "--outdir", folder, project, cwd=Path(folder))
        yield Path(folder)


@pytest.fixture(scope="module")
def empty() -> Iterator[Path]:
    """A folder with an environment that nothing is installed in."""
    with TemporaryDirectory(prefix="dp-") as folder:  # paths of sockets are short
        venv.create(Path(folder) / "venv", with_pip=True)
        yield Path(folder)


def installed(empty: Path, *what: str | Path) -> Path:
    python = empty / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *what, cwd=empty)
    return python


def test_the_wheels_have_what_they_are_to_have_and_nothing_else(dist: Path) -> None:
    assert run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)
    assert sorted(file.suffix for file in dist.iterdir()) == [".gz"] * 3 + [".whl"] * 3
    for wheel, package in (
        ("dataplane_rl-*", "dataplane"),
        ("dataplane_transfer_queue-*", "dataplane_transfer_queue"),
        ("dataplane_as_transfer_queue-*", "transfer_queue"),
    ):
        (found,) = dist.glob(f"{wheel}.whl")
        with zipfile.ZipFile(found) as file:
            names = file.namelist()
        assert f"{package}/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        roots = {name.split("/")[0] for name in names}
        assert {root for root in roots if not root.endswith(".dist-info")} == {package}


def test_the_readmes_first_screen_runs_in_an_environment_that_was_empty(
    dist: Path, empty: Path
) -> None:
    (wheel,) = dist.glob("dataplane_rl-*.whl")
    python = installed(empty, wheel, TORCH)
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    told = run(python, "-c", block, cwd=empty, DATAPLANE_RUN_DIR=str(empty), DATAPLANE_LINGER="1")
    rewards = "tensor([ 6., 15.,  3., 10.], dtype=torch.float64)"
    assert told.splitlines() == [f"torch.Size([4, 5]) {rewards}"] * 2
    assert run(empty / "venv/bin/dataplane", "--version", cwd=empty).startswith("dataplane ")


def test_code_that_nobody_edited_finds_the_module_transfer_queue(dist: Path, empty: Path) -> None:
    wheels = list(dist.glob("*.whl"))
    python = installed(empty, *wheels, TORCH)
    script = """
import transfer_queue as tq
import torch
from importlib import resources
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.metadata import KVBatchMeta

tq.init(OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml")))
meta = tq.kv_batch_put(["a", "b"], "train", TensorDict({"x": torch.arange(2)}, 2))
assert isinstance(meta, KVBatchMeta)
print(tq.__file__, tq.kv_batch_get(["b", "a"], "train")["x"].tolist())
tq.close()
"""
    told = run(python, "-c", script, cwd=empty, DATAPLANE_RUN_DIR=str(empty), DATAPLANE_LINGER="1")
    file, values = told.split(maxsplit=1)
    assert file.startswith(str(empty)) and values.strip() == "[1, 0]"
