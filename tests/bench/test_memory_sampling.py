"""Memory is counted once, and where it belongs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.usage import Sampler, memfds, process_bytes

MIB = 1 << 20

# A process that has nothing but what it says: this one may hold the arenas of other tests, and its
# part of the libraries that it shares with other processes changes as those come and go.
_HOLDER = """
import mmap, os, sys
descriptor = os.memfd_create("test-arena")
os.ftruncate(descriptor, 64 << 20)
arena = mmap.mmap(descriptor, 64 << 20)
print("mapped", flush=True)
sys.stdin.readline()
arena[: 16 << 20] = bytes(16 << 20)
print("touched", flush=True)
sys.stdin.readline()
"""
_PRIVATE = """
import sys
print("mapped", flush=True)
sys.stdin.readline()
block = bytearray(b"1") * (64 << 20)
print("touched", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(code: str = _HOLDER) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "mapped\n"
        try:
            yield process
        finally:
            process.kill()


def touch(process: subprocess.Popen[str]) -> None:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "touched\n"


def test_private_memory_counts_for_its_process() -> None:
    with holder(_PRIVATE) as process:
        before = process_bytes(process.pid)
        touch(process)
        assert 60 * MIB < process_bytes(process.pid) - before < 80 * MIB


def test_an_arena_counts_its_touched_pages_once_and_not_for_processes() -> None:
    with holder() as process:
        sampler = Sampler(lambda: {"one": process.pid, "two": process.pid})
        sampler.sample()
        before = sampler.peak_bytes["one"]
        assert sampler.peak_bytes["arena of one"] == 0
        touch(process)
        sampler.sample()
        assert sampler.peak_bytes["arena of one"] == 16 * MIB
        assert "arena of two" not in sampler.peak_bytes
        assert sampler.peak_bytes["one"] - before < 8 * MIB
        assert list(memfds(process.pid).values()) == [16 * MIB]


def test_a_grandchild_counts_under_its_service() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_HOLDER!r}])"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as service:
        assert service.stdin and service.stdout
        assert service.stdout.readline() == "mapped\n"
        touch(service)
        sampler = Sampler(lambda: {"service": service.pid})
        sampler.sample()
        assert sampler.peak_bytes["arena of service"] == 16 * MIB
        service.stdin.close()  # the grandchild ends, and with it the service


def test_a_process_that_is_gone_weighs_nothing() -> None:
    unused = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert process_bytes(unused) == 0
    assert memfds(unused) == {}


def test_the_sampler_looks_at_least_once_and_stops() -> None:
    with Sampler(lambda: {"me": os.getpid()}) as sampler:
        pass
    assert sampler.curve(start=0.0)["seconds"]
    assert sampler.peak_bytes["me"] > 0


def test_a_curve_says_when_a_process_was_not_there() -> None:
    pids = {"first": os.getpid()}
    sampler = Sampler(lambda: pids)
    sampler.sample()
    pids["second"] = os.getpid()
    sampler.sample()
    curve = sampler.curve(start=0.0)
    assert len(curve["seconds"]) == 2 and curve["seconds"] == sorted(curve["seconds"])
    absent, present = curve["processes"]["second"]
    assert absent is None and present > 0
    assert all(curve["processes"]["first"])


def test_a_long_curve_is_thinned_and_never_longer_than_its_bound() -> None:
    sampler = Sampler(dict)
    for _ in range(5_000):
        sampler.sample()
    seconds = sampler.curve(start=0.0)["seconds"]
    assert 1_000 <= len(seconds) <= 2_000
