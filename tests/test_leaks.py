"""The look at what tests leave behind finds what is left on purpose, of every kind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.end_to_end import conftest

ROOT = Path(__file__).parents[1]
LEAKS = """
    import os, socket, subprocess, sys, threading, time
    import pytest
    from tests import leaks
    from tests.conftest import no_launcher, nothing_is_left, run_dir

    leaks.PATIENCE_S = 0.2
    kept = []

    def test_socket():
        kept.append(socket.socket())

    def test_memfd():
        os.memfd_create("dataplane-x")

    def test_pipe():
        os.pipe()

    def test_file(tmp_path):
        kept.append(open(tmp_path / "x", "w"))

    def test_thread():
        threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

    def test_child():
        kept.append(subprocess.Popen(["sleep", "60"]))

    def test_zombie():
        os.posix_spawn("/bin/true", ["true"], {})

    def test_shared_memory():
        path = f"/dev/shm/dataplane-{os.getpid()}"
        kept.append(path)
        with open(path, "w"):
            pass

    def test_detached_process(run_dir):
        code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3).pid)"
        kept.append(int(subprocess.check_output([sys.executable, "-c", code])))

    def test_nothing(run_dir):
        with socket.socket():
            subprocess.run(["true"], check=True)

    def test_end():
        for one in kept:
            if isinstance(one, subprocess.Popen):
                one.kill()
                one.wait()
            elif isinstance(one, str):
                os.unlink(one)
            elif isinstance(one, int):  # `run_dir` has killed it
                command = f"/proc/{one}/cmdline"
                while os.path.exists(command) and open(command).read():
                    time.sleep(0.01)
"""
EXPECTED = {
    "test_socket": "socket:",
    "test_memfd": "memfd:dataplane-x",
    "test_pipe": "pipe:",
    "test_file": "/x",
    "test_thread": "thread forgotten",
    "test_child": "(sleep 60)",
    "test_zombie": "nobody waited for it",
    "test_shared_memory": "/dev/shm/dataplane-",
    "test_detached_process": "left running: process",
}


def test_every_kind_of_leak_is_told_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "test_leaking.py").write_text(textwrap.dedent(LEAKS))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    told = {
        line.split("::")[1].split()[0]: line
        for line in done.stdout.splitlines()
        if line.startswith("ERROR ")
    }
    assert told.keys() == EXPECTED.keys(), done.stdout
    assert " failed" not in done.stdout, done.stdout
    for test, what in EXPECTED.items():
        assert what in done.stdout, f"{test}: {done.stdout}"


def test_what_a_slow_collection_leaves_to_the_next_is_no_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected = list[float]()

    def slowly() -> None:
        time.sleep(leaks.PATIENCE_S)
        collected.append(time.monotonic())

    monkeypatch.setattr(leaks, "PATIENCE_S", 0.2)
    monkeypatch.setattr(gc, "collect", slowly)
    assert not leaks.settled(lambda: [] if len(collected) > 1 else ["a plane"])


def test_a_peer_that_hangs_as_it_is_told_to_end_fails_its_test_and_says_where(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.END_S", 0.2)
    hangs = """
        import signal, time

        def hang():
            print("runs", flush=True)
            time.sleep(60)

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        hang()
    """
    cluster = conftest.Cluster(run_dir)
    cluster.spawn("a", [sys.executable, "-c", textwrap.dedent(hangs)])
    conftest.until(lambda: "runs" in cluster.log("a"), "it runs")
    with pytest.raises(AssertionError, match=r"had not ended (?s:.*) in hang"):
        cluster.stop()
