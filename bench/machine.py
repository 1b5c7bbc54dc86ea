"""The machine on which figures were measured. Ratios travel between machines, absolute figures
do not."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "msgspec", "pyzmq", "uvloop", "xxhash", "matplotlib")


def describe() -> dict[str, Any]:
    """The date, the commit, cores, memory and versions, as a plain dict."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model[1] if model else platform.processor(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: version(name) for name in _PACKAGES},
    }


def commit() -> str:
    """The commit of this checkout, with `+` if files changed since; "" without git."""
    if shutil.which("git") is None:
        return ""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return said.stdout.strip()


def memory_bytes() -> int:
    """The memory of the host, or the limit of a memory cgroup of this process if that is lower."""
    # Here: workers that ask nothing start faster.
    from dataplane.launch.values import allowed_memory_bytes

    return allowed_memory_bytes()


def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
