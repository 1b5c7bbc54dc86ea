"""The image's Dockerfile: hadolint's opinion, and what the manifests rely on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.scrape import free_address

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/container/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    split = (line.partition(" ") for line in text.splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in split]


def last_stage() -> list[tuple[str, str]]:
    every = instructions()
    starts = [n for n, (name, _) in enumerate(every) if name == "FROM"]
    return every[starts[-1] :]


def test_hadolint_has_nothing_against_it() -> None:
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("hadolint is not here: make test-deploy brings it")
    done = subprocess.run(
        [tool, "--failure-threshold", "style", DOCKERFILE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_both_variants_have_all_stages() -> None:
    stages = {rest.split(" AS ")[1] for name, rest in instructions() if " AS " in rest}
    for variant in ("cpu", "cuda"):
        assert {f"build-{variant}", f"runtime-{variant}"} <= stages


def test_it_runs_as_a_user_without_a_shell_that_owns_the_run_directory() -> None:
    stage = last_stage()
    users = [rest for name, rest in stage if name == "USER"]
    assert users == ["10001:10001"], "a number: Kubernetes' runAsNonRoot looks at it"
    (made,) = [rest for name, rest in stage if name == "RUN"]
    assert "--uid 10001" in made and "/usr/sbin/nologin" in made
    assert "-m 0700 -o dataplane -g dataplane /run/dataplane" in made
    assert stage.index(("USER", users[0])) > stage.index(("RUN", made))
    assert stage[-2:] == [("ENTRYPOINT", '["dataplane"]'), ("CMD", '["peer"]')]


def test_what_it_copies_is_there_and_is_let_through() -> None:
    ignore = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists() and f"!{source}" in ignore


READ_ONLY = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=0700 run "$DATAPLANE_RUN_DIR"
for mounted in $(findmnt --list --noheadings --output TARGET); do
    test "$mounted" = "$DATAPLANE_RUN_DIR" && continue
    mount -o remount,bind,ro "$mounted" 2>/dev/null || true
done
! touch "$NEIGHBOUR" 2>/dev/null
cd /
exec "$@"
"""
WORKER = """
import sys, urllib.request, dataplane
with dataplane.connect(run="p") as plane:
    part = plane.partition("x", stages={"s": ["v"]})
    part.put({"v": [[1, 2], [3]]})
    with part.claim("s", rows=2, timeout=30) as batch:
        print([value.tolist() for value in batch["v"]])
    print(urllib.request.urlopen(f"http://{sys.argv[1]}/readyz", timeout=30).status)
"""


def test_a_peer_writes_to_its_run_directory_alone(run_dir: Path, tmp_path: Path) -> None:
    """As in a container with a read-only root: everything else is mounted so."""
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    tools = all(shutil.which(tool) for tool in ("unshare", "findmnt", "mount"))
    if not tools or subprocess.run([*unshare, "true"], check=False, timeout=60).returncode:
        pytest.skip("mount namespaces are not allowed here")
    address = free_address()
    environment = {
        "DATAPLANE_METRICS": address,
        "DATAPLANE_ARENA": "64MiB",
        "DATAPLANE_LINGER": "3",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
        "NEIGHBOUR": str(tmp_path / "written"),
    }
    done = subprocess.run(
        [*unshare, "bash", "-c", READ_ONLY, "bash", sys.executable, "-c", WORKER, address],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout == "[[1, 2], [3]]\n200\n", done.stdout + done.stderr
