"""Runs never mix: what a launch begins, joins, leaves behind, and what is told of it."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dataplane
from dataplane import DeadlineExceeded
from dataplane.client.session import opening
from dataplane.launch import ending, rundir
from tests.end_to_end.conftest import PLANE, Cluster, free_addresses, line, until

PUT = """
import dataplane, logging, os, sys
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
words = dict(word.split("=") for word in sys.argv[1:])
plane = dataplane.connect(run=words.get("run"), fresh="fresh" in words)
part = plane.partition("step-0", {"train": ["x"]}, groups=1, group_size=2)
if "leave" not in words:
    part.put({"x": [1, 2]}, group=["g", "g"])
print(plane.name, os.environ["DATAPLANE_RUN"], len(part.rows()), flush=True)
sys.stdin.readline()
for batch in part.stream("train", rows=2):
    print("read", list(batch["x"]), flush=True)
plane.close()
"""
"""one step: puts a group, waits for a line, and reads it"""
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start a step as an interactive shell does, in a process group of its own. of: the run of the
    connected process that it is started by. No peer of these runs outlives the test."""
    monkeypatch.setenv("DATAPLANE_ARENA", "32MiB")
    with ExitStack() as stack:

        def launch(*words: str, of: str = "") -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", PUT, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
                env=os.environ | ({"DATAPLANE_RUN": of} if of else {}),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield launch
    for run in rundir.living_runs(run_dir):
        for peer in run.peers:
            ending.end(peer, "the test")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dataplane", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def living() -> dict[str, int]:
    """The pids of the runs' peers."""
    runs = rundir.living_runs()
    return {run.name: peer.card.pid for run in runs for peer in run.peers if peer.card}


def test_two_launches_at_once_never_meet(launch: Launch) -> None:
    steps = [launch(), launch()]
    said = [(line(step), line(step)) for step in steps]
    for began, rows in said:
        assert began.startswith("started run 'launch-") and rows.endswith(" 2")
    names = {rows.split()[0] for _, rows in said}
    assert len(names) == 2 and names == set(living())
    assert all(rows.split()[0] == rows.split()[1] for _, rows in said)  # for what they start
    for step in steps:
        assert "read [1, 2]" in step.communicate("\n")[0]
    until(lambda: not living(), "both peers left")


SEED = """
import dataplane, logging, os, sys
logging.basicConfig(level="WARNING", stream=sys.stdout, format="warning %(message)s")
plane = dataplane.connect()
part = plane.partition("step-0", {"train": ["x"]}, groups=9, group_size=1)
part.put({"x": [int(sys.argv[1])]}, group=[sys.argv[1]])
batch = part.claim("train", groups=1, timeout=20)
line = f"{sys.argv[1]} trains on {int(batch['x'][0])} of {plane.name}\\n"
os.write(1, line.encode())  # several experiments write at once
batch.ack()
if "leave" in sys.argv:
    part.put({"x": [0]}, group=["left"])
"""
"""one experiment of a sweep, which trains on the first row there is, and seals nothing"""


SRUN = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("script", "slurm"),
    [
        ("seed 1 leave; seed 2 leave; seed 3", {}),
        ("seed 1 leave & seed 2 leave & seed 3 & wait", {}),
        ("seed 1 leave; sleep 6; seed 2; (seed 3)", {"SLURM_JOB_ID": "42"}),
        ("seed 1 leave; seed 2; seed 3", SRUN),
    ],
)
def test_experiments_of_one_script_never_train_on_each_others_rows(
    launch: Launch, run_dir: Path, script: str, slurm: dict[str, str]
) -> None:
    function = 'seed() { "$PYTHON" -c "$SEED" "$@"; }; '
    environ = os.environ | slurm | {"PYTHON": sys.executable, "SEED": SEED}
    command = ["bash", "-c", function + script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as shell:
        lines = shell.communicate()[0].splitlines()
    seeds = [one.split() for one in lines if "trains on" in one]
    assert {(one[0], one[3]) for one in seeds} == {("1", "1"), ("2", "2"), ("3", "3")}
    assert len({one[5] for one in seeds}) == 3
    until(lambda: not living(), "all peers left")
    if "&" not in script:  # whoever comes after a run with rows hears of it, and whoever does not
        told = [one for one in lines if one.startswith("warning")]
        assert "ended" in told[0] and "with 1 row: to pass rows from" in told[0]


def test_a_script_runs_the_same_step_twice(launch: Launch, run_dir: Path) -> None:
    script = f"{sys.executable} -c '{PUT}' < /dev/null && {sys.executable} -c '{PUT}' < /dev/null"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        said = shell.communicate()[0]
    assert said.count("read [1, 2]") == 2 and said.count("started run") == 2
    until(lambda: list(run_dir.iterdir()) == [], "nothing is left of it")


DRIVER = """
import multiprocessing, os, subprocess, sys
import dataplane

def work(number):
    import logging
    logging.basicConfig(level="WARNING", stream=sys.stdout, format="warning %(message)s")
    with dataplane.connect() as plane:
        part = plane.partition("step-0", {"train": ["x"]})
        part.put({"x": [number]}, key=[number])
        print("met", plane.name, flush=True)
        print("rows", sorted(part.rows().keys), flush=True)
        multiprocessing.Event  # the module is there in both kinds of children
        sys.stdin.readline()

if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(int(sys.argv[2]))
    else:
        plane = dataplane.connect() if "connected" in sys.argv else None
        spawn = multiprocessing.get_context(sys.argv[1])
        first = spawn.Process(target=work, args=(1,))
        first.start()
        first.join()
        command = ["bash", "-c", '"$@"; exit', "bash", sys.executable, __file__, "worker", "2"]
        subprocess.run(command)
"""
"""starts one worker by multiprocessing, and one as a program of a shell"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_what_a_connected_process_starts_shares_its_run(
    launch: Launch, tmp_path: Path, method: str
) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), method, "connected"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    lines = done.stdout.splitlines()
    assert len({one for one in lines if one.startswith("met")}) == 1
    assert [one for one in lines if one.startswith("rows")] == ["rows [1]", "rows [1, 2]"]
    assert not [one for one in lines if one.startswith("warning started")]


def test_workers_of_a_process_that_has_not_connected_are_told_that_they_are_alone(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), "spawn"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    lines = done.stdout.splitlines()
    assert len({one for one in lines if one.startswith("met")}) == 2
    assert [one for one in lines if one.startswith("rows")] == ["rows [1]", "rows [2]"]
    told = [one for one in lines if one.startswith("warning started")]
    assert "which started this process, has not connected. This process uses its own run" in told[0]
    assert "call connect() in the common parent before it starts the processes" in told[0]


def test_processes_that_one_program_started_and_that_do_not_meet_are_told(launch: Launch) -> None:
    """Here it is the program that runs this test, which has not connected."""
    first = launch()
    line(first)
    name = line(first).split()[0]
    said = line(launch())
    assert f"(pid {os.getpid()}) also started, is in run {name!r}" in said
    assert "or give all of them the same run name with connect(run=…)" in said


@pytest.mark.usefixtures("launch")
def test_who_comes_as_the_last_client_leaves_begins_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the peer has not read yet that all clients are gone."""
    connected, stages = threading.Event(), {"train": ["x"]}
    opened = opening._connected

    def connecting(path: str, limit_s: float) -> socket.socket:
        sock = opened(path, limit_s)
        connected.set()
        return sock

    first = dataplane.connect()
    part = first.partition("step-0", stages, groups=1, group_size=2)
    part.put({"x": [1, 2]}, group=["g", "g"])
    assert [list(batch["x"]) for batch in part.stream("train", rows=2)] == [[1, 2]]
    pid = living()[first.name]
    monkeypatch.setattr(opening, "_connected", connecting)
    with ThreadPoolExecutor(1) as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            first.close()
            second = pool.submit(dataplane.connect)
            assert connected.wait(10)
        finally:
            os.kill(pid, signal.SIGCONT)
        with second.result(30) as plane:
            assert plane.name == first.name and living()[plane.name] != pid
            again = plane.partition("step-0", stages, groups=1, group_size=2)
            again.put({"x": [1, 2]}, group=["g", "g"])
            assert len(again.rows()) == 2


def test_processes_of_one_launch_meet(launch: Launch) -> None:
    first = launch()
    began, name = line(first), line(first).split()[0]
    second = launch("leave=1", of=name)
    assert line(second).startswith(f"joined run {name!r}, started by `")
    assert line(second).split() == [name, name, "2"] and began.startswith(f"started run {name!r}")
    assert "read [1, 2]" in first.communicate("\n")[0] + second.communicate("\n")[0]


def test_what_a_killed_launch_left_is_gone_soon_and_looking_does_not_keep_it(
    launch: Launch,
) -> None:
    step = launch()
    line(step)
    name = line(step).split()[0]
    assert name in living()
    step.kill()
    step.communicate()

    def gone() -> bool:
        command("status")
        return name not in living()

    until(gone, "its peer left", 30)


def test_an_unnamed_run_lives_as_long_as_one_of_its_processes(launch: Launch) -> None:
    first = launch()
    line(first)
    name = line(first).split()[0]
    member = launch("leave=1", of=name)
    line(member)
    assert line(member).split() == [name, name, "2"]
    first.kill()
    first.communicate()
    again = launch("leave=1", of=name)  # its parent is gone, the run is not
    line(again)
    assert line(again).split() == [name, name, "2"]
    for process in (member, again):
        process.kill()
        process.communicate()
    until(lambda: name not in living(), "its peer left", 30)
    own = launch("leave=1", of=name)
    said = line(own)
    assert f"DATAPLANE_RUN={name} refers to an unnamed run whose processes have exited" in said
    told = line(own).split()
    assert told[0] == told[1] != name and told[2] == "0"


def test_a_name_that_is_launched_again_joins_and_says_what_is_there(launch: Launch) -> None:
    step = launch("run=grpo")
    assert line(step).startswith("started run 'grpo': peer 'embedded', pid ")
    assert line(step).endswith(" 2")
    joined = line(launch("run=grpo", "leave=1"))
    assert joined.startswith("joined run 'grpo', started by `python")
    assert "no client" not in joined and "fresh" not in joined  # it would end it under the other


def test_rows_that_nobody_is_there_for_are_told_to_whoever_joins(launch: Launch) -> None:
    step = launch("run=grpo")
    line(step)
    line(step)
    step.kill()
    step.communicate()
    again = launch("run=grpo", "leave=1")
    said = line(again)
    assert said.startswith("joined run 'grpo', started by `python") and " s ago: " in said
    assert "the run has 2 rows but no clients: the last client on this host (`python" in said
    assert "call connect(fresh=True)" in said
    assert line(again).endswith(" 2")


def test_fresh_ends_what_another_launch_left_and_once(launch: Launch) -> None:
    old = launch("run=grpo")
    line(old)
    line(old)
    old.kill()
    old.communicate()
    before = living()["grpo"]
    first = launch("run=grpo", "fresh=1")
    assert line(first).startswith("run 'grpo': ended, started ")
    assert line(first).startswith("started run 'grpo'") and line(first).endswith(" 2")
    after = living()["grpo"]
    assert after != before
    # A process that it had started would be of its launch. This one is not, and it lives.
    second = launch("run=grpo", "fresh=1", "leave=1")
    second.communicate("\n")
    assert second.returncode == 1 and living()["grpo"] == after


def test_fresh_ends_no_run_under_its_clients_unless_it_is_forced(
    launch: Launch, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = launch("run=grpo")
    line(step)
    line(step)
    with pytest.raises(dataplane.RunInUse, match=r"run 'grpo' has 1 client: `python") as refused:
        dataplane.connect(run="grpo", fresh=True)
    (client,) = refused.value.details["clients"]
    assert client["pid"] == step.pid and client["command"].startswith("python -c")
    assert client["age_s"] >= 0 and f"(pid {step.pid}, " in refused.value.message
    assert 'connect(fresh="force")' in refused.value.message
    for wrong, told in {"yes": "'yes'", 1: "1", 0.0: "0.0"}.items():
        with pytest.raises(dataplane.InvalidCall, match=f"fresh={told}: expected False, True or"):
            dataplane.connect(run="grpo", fresh=wrong)  # type: ignore[arg-type]

    with dataplane.connect(run="grpo", fresh="force") as plane:
        assert "step-0" not in plane.partitions()
        who = f'(pid {os.getpid()}) with connect(fresh="force"), with 2 rows and 1 client'
        assert who in (run_dir / "grpo" / "embedded.log.old").read_text()
        assert "run 'grpo': ended, started " in caplog.text and f"(pid {step.pid}, " in caplog.text
        assert "starts empty" not in caplog.text  # as it was asked to
        told = step.communicate("\n")[0]
        assert not told.startswith("read") and "rejected a one-way message" not in told
    assert step.returncode == 1


def test_a_client_hears_who_ended_its_peer(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    with dataplane.connect(run="grpo") as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": [1]})
        said = command("clean", "--force", "--run", "grpo").stdout
        assert said.startswith("ended run 'grpo'") and "although" in said
        for _ in range(2):
            with pytest.raises(
                dataplane.PeerEnded,
                match=r"was ended by `.*clean --force.*` \(pid .* Its rows are lost: call data",
            ):
                part.put({"x": [1]})


def test_a_killed_peer_says_what_is_gone_and_where_its_log_is(
    run_dir: Path, launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    with dataplane.connect(run="grpo") as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": [1, 2, 3]})
        card = run_dir / "grpo" / "embedded.json"
        until(lambda: json.loads(card.read_text())["rows"] == 3, "its card says what it has")
        os.kill(living()["grpo"], signal.SIGKILL)
        with pytest.raises(dataplane.PeerLost) as lost:
            part.put({"x": [1]})
        assert "the only peer of its run, so all rows of the run are gone" in lost.value.message
        assert lost.value.details["log"] == str(run_dir / "grpo" / "embedded.log")
        assert "embedded.log (or " in lost.value.message
    with dataplane.connect(run="grpo"):
        said = caplog.records[-1]
        assert said.levelname == "WARNING"
        assert "the run starts empty: its last peer 'embedded'" in said.getMessage()
        assert re.search(
            r"was killed. It had 3 rows \S+ m?s ago. See its log, .*embedded.log.old", caplog.text
        )
    until(lambda: not (run_dir / "grpo").exists(), "its peer left, and nothing with it", 30)


@pytest.mark.parametrize("after", ["the first put", "a put into an emptied run"])
def test_a_peer_that_is_killed_right_after_a_put_leaves_word_of_its_rows(
    run_dir: Path, launch: Launch, caplog: pytest.LogCaptureFixture, after: str
) -> None:
    with dataplane.connect(run="grpo") as plane:
        part = plane.partition("p", {"s": ["x"]})
        if after != "the first put":
            card = run_dir / "grpo" / "embedded.json"
            part.put({"x": [0]})
            until(
                lambda: json.loads(card.read_text())["rows"] == 1, "its card says that it has one"
            )
            part.claim("s", rows=1).ack()
            until(
                lambda: json.loads(card.read_text())["rows"] == 0, "its card says that it is gone"
            )
        part.put({"x": [1, 2, 3]})
        os.kill(living()["grpo"], signal.SIGKILL)
    with dataplane.connect(run="grpo"):
        assert "the run starts empty: its last peer 'embedded'" in caplog.text
        assert re.search(r"was killed. It had 3 rows \S+ m?s ago", caplog.text)


def test_a_disk_that_takes_long_to_write_the_card_stops_no_other_call(
    run_dir: Path, launch: Launch
) -> None:
    """The writer waits until somebody reads its draft. The put is confirmed after that."""
    with dataplane.connect(run="grpo") as plane, ThreadPoolExecutor(1) as pool:
        part = plane.partition("p", {"s": ["x"]})
        card = run_dir / "grpo" / "embedded.json"
        until(lambda: json.loads(card.read_text())["partitions"] == ["p"], "it is on the card")
        os.mkfifo(draft := card.with_name(".embedded.json"))
        putting = pool.submit(part.put, {"x": [1, 2, 3]})
        until(lambda: plane.stats()["partitions"]["p"]["rows"] == 3, "the peer has the rows", 2.0)
        assert not putting.done()
        with draft.open("rb") as written:
            assert json.load(written)["rows"] == 3
        assert len(putting.result()) == 3
        card.unlink()  # the draft took its place
        until(card.is_file, "the peer has restored its card")


def test_a_put_that_waits_for_the_disk_in_vain_blames_the_disk(
    run_dir: Path, launch: Launch
) -> None:
    """This peer has no backup that could be late."""
    with dataplane.connect(run="grpo") as plane:
        part = plane.partition("p", {"s": ["x"]})
        card = run_dir / "grpo" / "embedded.json"
        until(lambda: json.loads(card.read_text())["partitions"] == ["p"], "it is on the card")
        os.mkfifo(draft := card.with_name(".embedded.json"))
        with pytest.raises(DeadlineExceeded, match="the disk may be slow") as caught:
            part.put({"x": [1, 2, 3]}, timeout=1)
        assert str(card) in str(caught.value)
        assert "backup" not in str(caught.value)
        with draft.open("rb") as written:
            assert json.load(written)["rows"] == 3
        card.unlink()  # the draft took its place
        assert plane.stats()["partitions"]["p"]["rows"] == 3


def test_who_says_fresh_twice_begins_twice(launch: Launch) -> None:
    """As a cell of a notebook does that is run again: its own clients are no obstacle."""
    planes = []
    for _ in range(2):
        plane = dataplane.connect(run="cell", fresh=True)
        planes.append(plane)
        plane.partition("p", {"s": ["x"]}).put({"x": [1]}, key=["k"])
        assert len(plane.partition("p").rows()) == 1
    for plane in planes:
        plane.close()
    with pytest.raises(dataplane.InvalidCall, match="leave out one of the two"):
        dataplane.connect("a", run="cell", fresh=True)


ON_A_HOST = """
import os, sys
host, root = sys.argv[1:3]
os.environ["DATAPLANE_RUN_DIR"] = f"{root}/{host}"
from dataplane.launch import discovery
discovery._is_this_host = lambda address: address == host  # one of two on this machine
import dataplane
try:
    plane = dataplane.connect(run="grpo", fresh="fresh" in sys.argv)
except dataplane.DataplaneError as exc:
    print(type(exc).__name__, exc, flush=True)
    sys.exit()
part = plane.partition("step-0", {"train": ["x"]})
print(sorted(part.rows().keys), flush=True)
for key in sys.stdin:
    if key.strip() == "rows":
        print(sorted(part.rows().keys), flush=True)
    else:
        part.put({"x": [1]}, key=[key.strip()])
        print("put", flush=True)
"""
"""a process of a launch on one of two hosts: says what rows there are, puts, and says again"""


def test_fresh_begins_a_run_anew_on_all_its_hosts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    ports = [address.rpartition(":")[2] for address in free_addresses(2)]
    pairs = zip(hosts, ports, strict=True)
    seeds = ",".join(f"tcp://{host}:{port}" for host, port in pairs)
    monkeypatch.setenv("DATAPLANE_SEEDS", seeds)
    monkeypatch.setenv("DATAPLANE_ARENA", "32MiB")
    with ExitStack() as stack:

        def step(host: str, job: int | None, *words: str) -> subprocess.Popen[str]:
            """A task of a Slurm job's first step."""
            slurm = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"} if job else {}
            process = subprocess.Popen(
                [sys.executable, "-c", ON_A_HOST, host, str(run_dir), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **slurm},
                process_group=0,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def end() -> None:
            for host in hosts:
                if (run_dir / host).exists():
                    for run in rundir.living_runs(run_dir / host):
                        for peer in run.peers:
                            ending.end(peer, "the test")

        def say(process: subprocess.Popen[str], text: str) -> str:
            assert process.stdin is not None
            process.stdin.write(text + "\n")
            process.stdin.flush()
            return line(process)

        stack.callback(end)
        old = [step(host, 1) for host in hosts]
        assert [line(one) for one in old] == ["[]", "[]"]
        for one, key in zip(old, ("old-a", "old-b"), strict=True):
            say(one, key)
        assert say(old[0], "rows") == "['old-a', 'old-b']"
        for one in old:
            one.kill()

        first = step(hosts[0], 2, "fresh")  # waits for the peer of the other, which is not the old
        second = step(hosts[1], 2, "fresh")
        assert line(first) == "[]" and line(second) == "[]"
        say(first, "new")
        assert say(second, "rows") == "['new']"
        assert line(step(hosts[1], 2, "fresh")) == "['new']"  # once a launch
        assert "InvalidCall" in (told := line(step(hosts[0], None, "fresh")))
        assert "set DATAPLANE_RUN to a new name for each launch" in told


def test_ranks_of_mpirun_are_of_one_run(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a process group of its own, as mpirun gives it."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-vm-1297@1")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    first = launch()
    assert line(first).startswith("started run 'openmpi-prterun-vm-1297@1'")
    assert line(first).endswith(" 2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    second = launch("leave=1")
    assert line(second).startswith("joined run 'openmpi-prterun-vm-1297@1'")
    assert line(second).endswith(" 2")


def test_peers_by_hand_are_met_by_name_and_never_by_chance(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DATAPLANE_ARENA", "32MiB")
    caplog.set_level(logging.INFO, "dataplane")
    cluster.start("a")  # of run `test`
    with dataplane.connect() as own:
        assert own.name != "test" and own.peer == "embedded"
        (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert "this host also has run 'test' (a, " in warning and "connect(run=…)" in warning
        with dataplane.connect("a") as by_hand:
            assert by_hand.name == "test"
        assert "joined run 'test', started by hand" in caplog.text
        with pytest.raises(dataplane.PeerNotFound):
            dataplane.connect("a", run="other")
    with pytest.raises(dataplane.InvalidCall, match="was started by hand"):
        dataplane.connect(run="test", fresh=True)
    until(lambda: set(living()) == {"test"}, "the run of its own ended")


def test_connecting_before_ray_is_initialised_says_what_it_is(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DATAPLANE_ARENA", "32MiB")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with dataplane.connect():
        assert "Ray is not initialised yet, so this process uses its own run" in caplog.text


def test_clean_names_what_it_ends_and_leaves_what_somebody_needs(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_LINGER", "60")
    used, left = launch("run=used"), launch("run=left")
    for step in (used, left):
        line(step)
        line(step)
    left.kill()
    left.communicate()
    assert "read [1, 2]" in used.communicate("\n")[0]
    said = command("clean").stdout.splitlines()
    assert len(said) == 2
    assert any(one.startswith("ended run 'used'") for one in said)
    assert any(one.startswith("kept run 'left'") and "2 in 'step-0'" in one for one in said)
    assert set(living()) == {"left"}
    assert "ended run 'left'" in command("clean", "--force", "--run", "left").stdout
    assert not living()


def test_clean_leaves_a_peer_whose_values_belong_to_rows_that_another_one_knows(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as plane:
        plane.partition("p", {"train": ["x"]}).put({"x": [np.zeros(10_000)]})
    said = command("clean", "--run", PLANE).stdout.splitlines()
    assert len(said) == 2 and all(one.startswith(f"kept run {PLANE!r}") for one in said)
    assert all("its run has unread rows" in one and "1 in 'p'" in one for one in said)
    with cluster.connect("b") as plane:
        plane.partition("p").claim("train", rows=1).ack()
    said = command("clean", "--run", PLANE).stdout.splitlines()
    assert len(said) == 2 and all(one.startswith(f"ended run {PLANE!r}") for one in said)


def test_status_shows_all_runs_and_who_began_them(launch: Launch, cluster: Cluster) -> None:
    cluster.start("a")
    step = launch()
    line(step)
    name = line(step).split()[0]
    told = json.loads(command("status", "--json").stdout)["runs"]
    assert {run["run"]: run["named"] for run in told} == {"test": True, name: False}
    by = next(run["begun_by"] for run in told if run["run"] == name)
    assert by["pid"] == step.pid and "python" in by["command"]
    assert f"run {name} (unnamed), started " in command("status").stdout
    only = json.loads(command("status", "--json", "--peer", "a").stdout)["runs"]
    assert [run["run"] for run in only] == ["test"]
    assert "run 'nobody'" in command("status", "--run", "nobody").stderr


def test_a_command_asks_the_run_that_the_variable_names(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [launch("run=one"), launch("run=two", "leave=")]
    for step in steps:
        line(step)
        line(step)
    monkeypatch.delenv("DATAPLANE_RUN", raising=False)
    for words in (["rows", "step-0"], ["why"], ["probe"]):
        assert "choose a run with --run or DATAPLANE_RUN" in command(*words).stderr
    monkeypatch.setenv("DATAPLANE_RUN", "one")
    assert "step-0: sealed, 2 rows" in command("rows", "step-0").stdout
    assert command("why").stdout.startswith("step-0 ")
    assert command("probe").stdout.startswith("peer embedded: dataplane ")  # it has no address
    assert "step-0: open, 0 rows" in command("rows", "step-0", "--run", "two").stdout
    monkeypatch.setenv("DATAPLANE_RUN", "three")
    refused = command("rows", "step-0").stderr
    assert "no peer of run 'three' (named by DATAPLANE_RUN)" in refused and "one: embed" in refused


def test_peers_of_several_hosts_need_a_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_SEEDS", "tcp://127.0.0.1:7101,tcp://127.0.0.1:7102")
    with pytest.raises(dataplane.RunMissing, match="a name that is the same on every host and new"):
        dataplane.connect()


def test_a_killed_peer_is_replaced_within_its_run(launch: Launch) -> None:
    step = launch()
    line(step)
    name = line(step).split()[0]
    os.kill(living()[name], signal.SIGKILL)
    again = launch(of=name)
    assert line(again).startswith(f"started run {name!r}") and line(again).split()[0] == name


def test_a_run_whose_name_is_near_another_ones_says_so(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dataplane.connect(run="grpo-math"):
        with dataplane.connect(run="grpo-maths"):
            pass
        (said,) = [
            one.message for one in caplog.records if "which has a similar name" in one.message
        ]
        assert ("started run 'grpo-maths'") in said and (
            "to join that run instead, call connect(run='grpo-math')"
        ) in said
        caplog.clear()
        with dataplane.connect(run="grpo-math-2"), dataplane.connect(run="grpo-math-3"):
            pass
        assert "connect(run='grpo-math-2')" not in caplog.text
