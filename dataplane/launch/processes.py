"""Processes of this host, from /proc: identity, parents, command line. Also the standard
descriptors of this process. Never signals or starts a process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_CHARACTERS = 60
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Variables that give a process its rank, by torchrun, Slurm and MPI."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this pid namespace. started: in clock ticks since the host's boot. state: its
    letter in /proc, which does not identify it."""

    pid: int
    parent: int
    started: int
    state: str = field(default="", compare=False)

    @property
    def identity(self) -> str:
        """A text that identifies this process and no later one with the same pid."""
        return f"{self.pid}-{self.started}"


def read(pid: int) -> Process | None:
    """Return the process with this pid, or None if it has exited or is not visible."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, and may have brackets in it.
    state, parent, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else Process(pid, int(parent), int(fields[17]), state)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. False where it is not visible."""
    process = read(pid)
    return process is not None and process.state in ("T", "t")


def how_to_continue(pid: int) -> str:
    """Return why a stopped process is silent, and what to do about it, as the end of a sentence."""
    return (
        "it is stopped, by SIGSTOP or a debugger. To continue it, run `kill -CONT "
        f"{pid}`, then connect again. To end it and lose its rows, run `kill -9 {pid}`"
    )


def this() -> Process:
    """This process; started is 0 if /proc is not mounted."""
    return read(os.getpid()) or Process(os.getpid(), os.getppid(), 0)


def ancestors(process: Process) -> Iterator[Process]:
    """The living ancestors of a process, its parent first."""
    above = read(process.parent)
    while above is not None:
        yield above
        above = read(above.parent)


def is_python(pid: int) -> bool:
    """Whether a Python interpreter runs in the process, whatever its command is called."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return program.startswith(("python", "pypy"))


def environ_has(pid: int, variable: str) -> bool:
    """Whether the process was started with this variable in its environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"\0{variable}=".encode() in b"\0" + environ


def command(pid: int) -> str:
    """The command line of a process for messages, in one line of at most 60 characters. A child
    that `multiprocessing` started has its parent's."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    words = [word for word in raw.decode(errors="replace").split("\0") if word]
    if words[-1:] == ["--multiprocessing-fork"] and (child := read(pid)) is not None:
        return command(child.parent)
    if words and "/" in words[0]:
        words[0] = words[0].rpartition("/")[2]
    line = " ".join(words)
    line = "".join(character if character.isprintable() else " " for character in line)
    return line if len(line) <= COMMAND_CHARACTERS else f"{line[: COMMAND_CHARACTERS - 1]}…"


@functools.lru_cache(maxsize=1)
def _own_command(pid: int) -> str:
    return command(pid)


def own_command() -> str:
    """The command line of this process."""
    return _own_command(os.getpid())


def own_rank(environ: Mapping[str, str]) -> int:
    """The rank that a launcher gave this process in its job, or -1."""
    for name in RANKS:
        text = environ.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) < 10:
            return int(text)
    return -1


def open_standard_descriptors() -> None:
    """Open /dev/null at each of the descriptors 0, 1 and 2 that is closed. Otherwise the next
    socket or file would get that number, and receive the process's output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
