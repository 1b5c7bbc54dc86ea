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

import msgspec
import pytest
from msgspec.structs import replace

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
    with pytest.raises(InvalidConfig, match="is not a valid run name"):
        runs.find_run(wrong, {})


def test_a_command_that_is_typed_again_is_another_run(typed: Command) -> None:
    names = {said(typed(*python(WHICH))) for _ in range(3)}
    assert len(names) == 3 and all(map(runs.is_unnamed, names))


@pytest.mark.parametrize(
    "script",
    [
        "{}; {}",
        "{} & {} & wait",
        "({}); {}",
        "{} | cat; exec {}",
        "nohup {} 2>/dev/null; timeout 60 {}",
        "setsid -w {}; {}",
    ],
)
def test_lines_of_a_script_are_runs_of_their_own(typed: Command, script: str) -> None:
    """Whatever their process group, session and parent are."""
    line = f'{sys.executable} -c "$1"'
    shell = typed("bash", "-c", script.format(line, line), "bash", WHICH)
    names = {said(shell), said(shell)}
    assert len(names) == 2 and all(map(runs.is_unnamed, names))


def test_lines_of_a_batch_script_are_runs_of_their_own(typed: Command) -> None:
    """Slurm starts the script, and no step for its lines."""
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "a1", "SLURM_STEP_ID": "4294967291"}
    line = f'{sys.executable} -c "$1"'
    shell = typed("bash", "-c", f"{line}; {line}", "bash", WHICH, **slurm)
    assert said(shell) != said(shell)


def test_what_a_connected_process_starts_is_of_its_run_while_it_lives(typed: Command) -> None:
    parent = typed(*python(f"{WHICH}\ninput()"))
    name = said(parent)
    child = {**os.environ, "DATAPLANE_RUN": name}  # as `connect()` sets it
    assert runs.find_run(None, child) == runs.Run(name, "variable")
    lock = rundir.claim_name(rundir.plane_dir(name), "embedded", name)
    parent.communicate("\n")
    assert runs.has_ended(name)
    # Its peer lives, and so does another process of it.
    assert runs.find_run(None, child) == runs.Run(name, "variable")
    lock.release()
    own = runs.find_run(None, child)
    assert own.unnamed and (own.said_by, own.over) == ("launch", name) and own.name != name
    launched = runs.find_run(None, {**child, "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0"})
    assert (launched.name, launched.over) == ("slurm-42.0", name)


def test_an_unnamed_run_has_ended_when_the_process_that_it_is_called_by_has(
    typed: Command,
) -> None:
    process = typed(*python(f"{WHICH}\ninput()"))
    name = said(process)
    assert not runs.has_ended(name)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert runs.has_ended(name)  # its parent has not waited for it yet
    process.wait()
    assert runs.has_ended(name)
    assert not runs.has_ended("grpo")


def test_a_pid_that_is_another_processes_now_is_another_run(typed: Command) -> None:
    process = typed(*python(f"{WHICH}\ninput()"))
    name = said(process)
    head, _, digest = name.rpartition("-")
    assert runs.has_ended(f"{head}-{int(digest, 16) ^ 1:08x}")
    assert not runs.has_ended(name)


AGENT = """
    import os, subprocess, sys
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
    code = sys.argv[1]
    print(__import__("dataplane.launch.runs").launch.runs.find_run().name, flush=True)
    for _ in range(2):
        command = [sys.executable, "-c", code]
        subprocess.run(command, env=environ, start_new_session=True)
"""
"""starts ranks as torchrun does"""


def test_the_ranks_of_a_torchrun_without_an_id_are_one_run_and_those_of_the_next_another(
    typed: Command,
) -> None:
    loader = f"import subprocess, sys; {WHICH}; subprocess.run([sys.executable, '-c', {WHICH!r}])"
    agent = f'{sys.executable} -c "$1" "$2"'
    shell = typed("bash", "-c", f"{agent}; {agent}", "bash", textwrap.dedent(AGENT), loader)
    first, second = {said(shell) for _ in range(5)}, {said(shell) for _ in range(5)}
    assert len(first) == len(second) == 1 and first != second


def test_a_launch_is_a_process_and_what_descends_from_it(typed: Command) -> None:
    me = runs.this_process()
    code = """
        import sys
        from dataplane.launch import rundir, runs
        starter = rundir.parse_starter(sys.argv[1])
        print(runs.is_of_launch(starter), runs.is_of_launch(runs.this_process()))
    """
    line = msgspec.json.encode(me).decode()
    command = [*python(code), line]
    assert said(typed(*command)) == "True True"
    assert said(typed("bash", "-c", '"$@"; exit', "bash", *command)) == "True True"
    child = typed(*python("input()"))
    other = replace(me, launch="launch-1-00000000", process=f"{child.pid}-1", pid=child.pid)
    assert not runs.is_of_launch(other)
    launched = replace(other, launch="slurm-42.0")
    assert (
        said(
            typed(
                *python(code),
                msgspec.json.encode(launched).decode(),
                SLURM_JOB_ID="42",
                SLURM_STEP_ID="0",
            )
        )
        == "True True"
    )
