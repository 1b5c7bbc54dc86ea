"""Which run a process belongs to: what is said, variables, launchers, and the launch itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dataplane.errors import InvalidConfig
from dataplane.launch import rundir, runs

WHICH = (
    "import os; from dataplane.launch import runs; "
    "os.write(1, runs.find_run().name.encode() + b'\\n')"
)
"""says to which run it belongs, in one write: several processes may say it at once"""
Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def typed(run_dir: Path) -> Iterator[Command]:
    """Start a command as an interactive shell does: in a process group of its own."""
    with ExitStack() as stack:

        def typed(*command: str, group: int = 0, **environ: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=group,
                env={**os.environ, **environ},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield typed


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_what_is_said_wins_over_a_variable_and_that_over_a_launcher() -> None:
    environ = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0"}
    assert runs.find_run(None, environ) == runs.Run("slurm-42.0", "launcher")
    environ |= {"DATAPLANE_RUN": "mine"}
    assert runs.find_run(None, environ) == runs.Run("mine", "variable")
    assert runs.find_run("this", environ) == runs.Run("this", "hand")
    assert runs.run_of_peer(None, environ) == "mine"
    assert runs.run_of_peer(None, {}) == "default"
    assert runs.run_of_peer("this", {}) == "this"
    assert runs.find_run(None, {}).unnamed


@pytest.mark.parametrize("wrong", ["", "a\nb", "x" * 300, 5])
def test_what_cannot_name_a_run_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot name a run"):
        runs.find_run(wrong, {})


def test_a_command_that_is_typed_again_is_another_run(typed: Command) -> None:
    names = {said(typed(*python(WHICH))) for _ in range(3)}
    assert len(names) == 3 and all(map(runs.is_unnamed, names))


def test_what_one_command_starts_is_one_run(typed: Command) -> None:
    script = (
        f'{sys.executable} -c "$1"; {sys.executable} -c "$1" & wait; exec {sys.executable} -c "$1"'
    )
    shell = typed("sh", "-c", script, "sh", WHICH)
    first, second, third = (said(shell) for _ in range(3))
    assert first == second == third


@pytest.mark.parametrize("wrapper", [["nohup"], ["timeout", "60"], ["env", "X=1"], ["nice"]])
def test_commands_that_wrap_another_begin_one_run(typed: Command, wrapper: list[str]) -> None:
    twice = f"import subprocess, sys; {WHICH}; subprocess.run([sys.executable, '-c', {WHICH!r}])"
    process = typed(*wrapper, sys.executable, "-c", twice)
    assert said(process) == said(process)


def test_setsid_begins_a_run_of_its_own(typed: Command) -> None:
    shell = typed(
        "sh", "-c", f'{sys.executable} -c "$1"; setsid -w {sys.executable} -c "$1"', "sh", WHICH
    )
    assert said(shell) != said(shell)


def test_a_fork_is_of_its_parents_run(typed: Command) -> None:
    process = typed(*python(f"import os\nos.fork()\n{WHICH}\nos.getpid()"))
    assert said(process) == said(process)


def test_when_its_leader_has_ended_a_group_still_is_one_run(typed: Command) -> None:
    shell = typed(
        "sh",
        "-c",
        f'{sys.executable} -c "$1" & {sys.executable} -c "$1" &',
        "sh",
        """
import os, select, sys
from dataplane.launch import runs
leader = os.pidfd_open(os.getpgrp())
select.select([leader], [], [])
while os.path.exists(f"/proc/{os.getpgrp()}"):
    pass
print(runs.find_run().name, flush=True)
""",
    )
    shell.wait()
    assert said(shell) == said(shell)


def test_who_comes_after_the_leader_joins_who_came_before(typed: Command) -> None:
    leader = typed(*python(f"{WHICH}\ninput()"))
    name = said(leader)
    lock = rundir.claim_name(rundir.plane_dir(name), "embedded", name)
    # A member that outlives it, as what a script leaves running does.
    member = typed(*python(f"input()\n{WHICH}"), group=leader.pid)
    leader.communicate("\n")
    assert not runs.has_ended(name)
    assert member.communicate("\n")[0].strip() == name
    assert runs.has_ended(name)
    lock.release()


def test_a_launch_ends_with_the_last_of_its_processes(typed: Command) -> None:
    process = typed(*python(f"{WHICH}\ninput()"))
    name = said(process)
    assert not runs.has_ended(name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert runs.has_ended(name)
    assert not runs.has_ended("grpo")


def test_a_pid_that_is_another_processes_now_is_another_launch(typed: Command) -> None:
    process = typed(*python(f"{WHICH}\ninput()"))
    name = said(process)
    head, _, digest = name.rpartition("-")
    assert runs.has_ended(f"{head}-{int(digest, 16) ^ 1:08x}")
    assert not runs.has_ended(name)


def test_the_ranks_of_torchrun_are_one_run_though_each_has_a_session(typed: Command) -> None:
    agent = """
        import os, subprocess, sys
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
        code = sys.argv[1]
        print(__import__("dataplane.launch.runs").launch.runs.find_run().name, flush=True)
        for _ in range(2):
            command = [sys.executable, "-c", code]
            subprocess.run(command, env=environ, start_new_session=True)
    """
    loader = f"import subprocess, sys; {WHICH}; subprocess.run([sys.executable, '-c', {WHICH!r}])"
    process = typed(*python(agent), loader)
    assert len({said(process) for _ in range(5)}) == 1
