"""connect(): embedded peers that start once, outlive their starters and leave; forks; status."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import cli
from dataplane.client.session.opening import join, visit
from dataplane.launch import embedded, rundir
from tests.end_to_end.conftest import PLANE, Cluster, line, peer_command, until
from tests.processes import all_ending, ending

LOCK, START = "embedded.lock", rundir.STARTING

ATTACH = """
    import dataplane, os, sys, time
    plane = dataplane.connect()
    part = plane.partition("p", {"s": ["x"]}, free="drop")
    print(plane.stats()["pid"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the peers of this test's plane are; none of them outlives it."""
    monkeypatch.setenv("DATAPLANE_RUN", PLANE)
    monkeypatch.setenv("DATAPLANE_ARENA", "32MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "30")
    folder = rundir.plane_dir(PLANE)
    with all_ending(_started):
        yield folder
    _started.clear()
    for plane in run_dir.iterdir():
        for peer in rundir.living_peers(plane):
            assert peer.card is not None
            end(peer.card.pid, signal.SIGKILL)


def end(pid: int, number: signal.Signals) -> None:
    """Signal a process and wait until the kernel says that it is gone."""
    handle = os.pidfd_open(pid)
    os.kill(pid, number)
    assert select.select([handle], [], [], 15)[0], f"{pid} did not end"
    os.close(handle)


def gone(pid: int) -> bool:
    return (
        not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    )


_started: list[subprocess.Popen[str]] = []
"""by `python`, in this test"""


def python(code: str, *, own_group: bool = False) -> subprocess.Popen[str]:
    """A process that runs this code; `folder` ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
    )
    _started.append(process)
    return process


def test_twenty_processes_at_once_start_one_peer(folder: Path) -> None:
    asking = [python(ATTACH) for _ in range(20)]
    try:
        assert len({line(process) for process in asking}) == 1
        assert [peer.name for peer in rundir.living_peers(folder)] == ["embedded"]
        assert not list(folder.glob("*.old"))
    finally:
        for process in asking:
            process.communicate("")


def test_an_embedded_peer_survives_ctrl_c_and_the_death_of_its_starter(folder: Path) -> None:
    starter = python(ATTACH, own_group=True)
    pid = int(line(starter))
    with dataplane.connect() as plane:
        part = plane.partition("p")
        part.put({"x": [7]}, key=["k"])
        os.killpg(starter.pid, signal.SIGINT)
        starter.wait(15)
        starter.communicate()
        assert not gone(pid) and plane.stats()["pid"] == pid
        second = python(ATTACH, own_group=True)
        assert int(line(second)) == pid
        os.killpg(second.pid, signal.SIGKILL)
        second.communicate()
        assert list(part.get(keys=["k"])["x"]) == [7] and plane.stats()["pid"] == pid


def test_an_embedded_peer_lingers_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_LINGER", "3")
    with dataplane.connect() as plane:
        pid = plane.stats()["pid"]
    with dataplane.connect() as plane:
        assert plane.stats()["pid"] == pid
    until(lambda: gone(pid), "the peer left")
    assert rundir.living_peers(folder) == []
    assert not folder.exists()


def test_a_peer_that_is_not_to_linger_waits_for_whoever_started_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_LINGER", "0")
    with dataplane.connect() as plane:
        pid = plane.stats()["pid"]
    until(lambda: gone(pid), "the peer left")


def test_unread_rows_keep_an_embedded_peer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPLANE_LINGER")
    command = peer_command("embedded", PLANE, "--linger", "0.2", "--linger-unread", "30")
    with ending(subprocess.Popen(command, stderr=subprocess.DEVNULL)) as peer:
        until(lambda: (folder / "embedded.sock").exists(), "the peer is up")
        with dataplane.connect() as plane:
            part = plane.partition("p", {"s": ["x"]})
            part.put({"x": [1]})
            part.seal()
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1 or peer.poll() is not None, "a second passed")
        assert peer.poll() is None
        with dataplane.connect() as plane:
            assert [list(b["x"]) for b in plane.partition("p").stream("s", rows=1)] == [[1]]
        assert peer.wait(10) == 0


def test_after_everything_was_killed_nothing_is_left(folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    workers = [python(ATTACH) for _ in range(3)]
    (pid,) = {int(line(worker)) for worker in workers}
    for worker in workers:
        worker.kill()
        worker.communicate()
    end(pid, signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) <= before
    assert (folder / "embedded.sock").exists()
    with dataplane.connect() as plane:
        assert plane.stats()["pid"] != pid and plane.stats()["arena"]["used_bytes"] == 0
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert [n for n in names if n.endswith((".sock", ".lock", ".json"))] == [
        "embedded.json",
        "embedded.lock",
        "embedded.sock",
    ]


def test_two_planes_on_one_host_never_mix(folder: Path) -> None:
    with dataplane.connect(run="one") as one, dataplane.connect(run="two") as two:
        assert one.stats()["pid"] != two.stats()["pid"]
        ref = one.partition("p", free="drop").put({"x": [1]}, key=["k"])
        assert len(two.partition("p", free="drop").rows()) == 0
        with pytest.raises(dataplane.InvalidCall, match="belongs to run 'one'"):
            two.get(ref)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_a_job_of_several_hosts_gets_no_private_plane(
    folder: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dataplane.SeedsMissing, match="DATAPLANE_SEEDS=tcp://"):
        dataplane.connect()
    assert rundir.living_peers(folder) == []
    monkeypatch.setenv("DATAPLANE_SEEDS", "none")
    with dataplane.connect() as plane:
        assert plane.name == PLANE


def test_a_ray_job_with_its_head_elsewhere_would_join_it_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    # Without any network the head cannot be reached, with one it is no loopback address.
    with pytest.raises(dataplane.ConnectError, match=r"192\.0\.2\.7, the first|cluster token"):
        dataplane.connect()


def test_a_host_that_no_seed_names_needs_a_peer_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_SEEDS", "tcp://192.0.2.77:7101")
    with pytest.raises(
        dataplane.ConnectError, match=r"192\.0\.2\.77.*start this host's peer by hand"
    ):
        dataplane.connect()


def test_a_process_without_standard_descriptors_connects(folder: Path, tmp_path: Path) -> None:
    """As a daemon is, and what some launchers start. What it prints goes into no socket of ours."""
    told = tmp_path / "told"
    code = f"""
        import os
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        import dataplane
        told = open({str(told)!r}, "w")
        try:
            with dataplane.connect() as plane:
                os.write(1, b"printed")
                plane.partition("p", {{"s": ["x"]}}).put({{"x": [1]}})
                os.write(2, b"printed")
                told.write(f"{{len(plane.partition('p').rows())}} rows")
        except BaseException as exc:
            told.write(repr(exc))
        told.close()
    """
    process = python(code)
    process.communicate(timeout=60)
    assert told.read_text() == "1 rows"


def test_a_peer_ends_when_told_whatever_signals_its_starter_blocks(folder: Path) -> None:
    code = """
        import signal
        both = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            signal.signal(number, signal.SIG_IGN)
    """
    starter = python(textwrap.dedent(code) + textwrap.dedent(ATTACH))
    pid = int(line(starter))
    starter.communicate("")
    end(pid, signal.SIGINT)


def test_the_look_at_other_hosts_on_connecting_is_over_when_it_is_answered(
    cluster: Cluster,
) -> None:
    """Else the peer would remember all that it ever answered to this client."""
    cluster.start("a", "b")
    for name in ("a", "b"):
        with cluster.connect(name) as plane:
            assert not plane._session.unanswered


def test_several_named_peers_stand_side_by_side(cluster: Cluster) -> None:
    cluster.start("a", "b", "c")
    with pytest.raises(
        dataplane.PeerAmbiguous, match=r"\(a, b, c\): choose one with connect\('a'\)"
    ):
        dataplane.connect(run=PLANE)
    with pytest.raises(dataplane.PeerNotFound, match="running: a, b, c"):
        dataplane.connect("d", run=PLANE)
    planes = [cluster.connect(name) for name in "abc"]
    assert [plane.peer for plane in planes] == list("abc")
    assert len({plane.stats()["pid"] for plane in planes}) == 3
    assert sum(plane.stats()["shards"] for plane in planes) == 4096
    for plane in planes:
        plane.close()


def test_the_first_client_of_a_peer_that_starts_again_is_told_what_is_gone(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dataplane")
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": [1, 2, 3]})
        card = cluster.run_dir / PLANE / "a.json"
        until(lambda: json.loads(card.read_text())["rows"] == 3, "its card says what it has")
        pid = cluster.peers["a"].pid
        cluster.restart("a")
        with pytest.raises(dataplane.PeerLost, match="Start the peer again, then call dataplane.c"):
            part.put({"x": [1]})
    caplog.clear()
    gone = f"the run starts empty: its last peer 'a' (pid {pid}) was killed. It had 3 rows"
    with cluster.connect("a"):
        (said,) = [one for one in caplog.records if "joined run" in one.getMessage()]
        assert said.levelname == "WARNING" and gone in said.getMessage()
        caplog.clear()
        cluster.connect("a").close()
        assert "joined run" in caplog.text and "starts empty" not in caplog.text


def test_so_is_that_of_a_host_whose_run_goes_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dataplane")
    cluster.start("a", "b")
    with cluster.connect("a") as plane, cluster.connect("b") as there:
        plane.partition("p", {"s": ["x"]})
        there.partition("p").put({"x": [np.zeros(5000)]})
        cluster.restart("b")
        caplog.clear()
        cluster.connect("b").close()
        assert "this host starts empty: its last peer 'b'" in caplog.text
        assert "was killed. part.lost() lists rows that were lost" in caplog.text
        caplog.clear()
        cluster.connect("a").close()
        assert "starts empty" not in caplog.text


# files that others remove


def swept(folder: Path) -> None:
    """What is left where a cleaner removes files by their age."""
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("sweep", [shutil.rmtree, swept, lambda folder: (folder / LOCK).unlink()])
def test_a_run_whose_files_are_removed_is_still_one_run(
    folder: Path, sweep: Callable[[Path], None]
) -> None:
    """A named run would be split in two, silently: whoever comes meanwhile waits for its peer."""
    with dataplane.connect() as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        part.put({"x": [7]}, key=["k"])
        before = {path.name for path in folder.iterdir()}
        sweep(folder)
        with dataplane.connect() as other:
            assert other.stats()["pid"] == plane.stats()["pid"]
            assert list(other.partition("p").get(keys=["k"])["x"]) == [7]

        def restored() -> bool:
            return folder.exists() and before <= {path.name for path in folder.iterdir()} | {START}

        until(restored, "its files are back", 60)
        (peer,) = rundir.living_peers(folder)
        assert peer.card is not None and peer.card.pid == plane.stats()["pid"]
        log = (folder / "embedded.log").read_text()
        assert "restored its deleted runtime files" in log and "embedded.lock" in log


def test_a_stopped_peer_whose_files_are_removed_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataplane.connect() as plane:
        monkeypatch.setattr(embedded, "START_TIMEOUT_S", 1.0)
        pid = plane.stats()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            shutil.rmtree(folder)
            for _ in range(200):  # others have asked whether it lives; it answers nobody
                assert rundir.holder(folder, "embedded") == pid
            with pytest.raises(
                dataplane.ConnectError, match=rf"\(pid {pid}\) is alive, but its files in"
            ):
                dataplane.connect()
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: bool(rundir.living_peers(folder)), "its files are back", 10)


def test_a_new_client_is_told_that_the_peer_is_stopped_or_starved(folder: Path) -> None:
    def opened(limit_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        return sock

    with dataplane.connect() as plane:
        pid, path = plane.stats()["pid"], str(folder / "embedded.sock")
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                dataplane.ConnectError, match=rf"\(pid {pid}\) .* 0.2 s: .* `kill -CONT {pid}`"
            ):
                join(opened, limit_s=0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
    path = str(folder / "silent.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(
            dataplane.ConnectError, match=rf"\(pid {os.getpid()}\) .* starved of processor time"
        ):
            join(opened, limit_s=0.2)


def test_a_full_queue_of_a_stopped_peer_names_the_process_and_how_to_continue_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataplane.connect() as plane:
        pid, path = plane.stats()["pid"], str(folder / "embedded.sock")
        (peer,) = rundir.living_peers(folder)
        monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.5)
        monkeypatch.setattr("dataplane.client.session.opening._VISIT_S", 0.5)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(BlockingIOError):
                while True:  # what was closed stays in the queue
                    with socket.socket(socket.AF_UNIX) as one:
                        one.setblocking(False)
                        one.connect(path)
            for call in (dataplane.connect, lambda: visit(peer)):
                with pytest.raises(dataplane.ConnectError, match=f"`kill -CONT {pid}`") as failed:
                    call()
                assert failed.value.details["pid"] == pid
        finally:
            os.kill(pid, signal.SIGCONT)
        assert plane.stats()["pid"] == pid


def test_clean_waits_for_a_peer_that_restores_its_files(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inhabited, goes_on = rundir.is_inhabited, False

    def seen(one: Path) -> bool:
        found = inhabited(one)
        if found and goes_on:
            os.kill(pid, signal.SIGCONT)
        return found

    with dataplane.connect() as plane:
        pid = plane.stats()["pid"]
        os.kill(pid, signal.SIGSTOP)
        (folder / LOCK).unlink()
        monkeypatch.setattr(rundir, "is_inhabited", seen)
        with monkeypatch.context() as patch:
            patch.setattr("dataplane.launch.ending.RESTORE_S", 0.2)
            assert cli.main(["clean", "--force"]) == 1
        said = capsys.readouterr().out
        assert f"could not end run {folder.name!r}: its peer (pid {pid}) is alive, but its" in said
        goes_on = True
        assert cli.main(["clean", "--force"]) == 0
        assert f"ended run {folder.name!r}" in capsys.readouterr().out
        assert not rundir.living_peers(folder) and rundir.holder(folder, "embedded") is None


@pytest.mark.parametrize("empty", [False, True], ids=["removed", "an empty one in its place"])
def test_clean_names_a_stopped_peer_whose_folder_is_gone(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    with dataplane.connect() as plane:
        pid, run = plane.stats()["pid"], folder.name
        os.kill(pid, signal.SIGSTOP)
        try:
            shutil.rmtree(folder)
            if empty:
                folder.mkdir(mode=0o700)
            monkeypatch.setattr("dataplane.launch.ending.RESTORE_S", 0.2)
            assert cli.main(["clean", "--force", "--run", run]) == 1
            assert f"its peer (pid {pid}) is alive" in (told := capsys.readouterr().out)
            assert "removed the files" not in told and not gone(pid)
        finally:
            os.kill(pid, signal.SIGCONT)
        monkeypatch.setattr("dataplane.launch.ending.RESTORE_S", 20.0)
        assert cli.main(["clean", "--force", "--run", run]) == 0
        assert f"ended run {run!r}" in capsys.readouterr().out and gone(pid)


def test_clean_ends_a_peer_whose_card_is_gone_or_says_that_it_did_not(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataplane.connect() as plane:
        pid = plane.stats()["pid"]
        os.kill(pid, signal.SIGSTOP)  # it puts nothing back
        (folder / "embedded.json").unlink()
        # As from another container, where the kernel shows no pid.
        with monkeypatch.context() as patch:
            patch.setattr(rundir, "holder", lambda folder, name: 0)
            assert cli.main(["clean", "--force"]) == 1
            assert "could not end run" in (told := capsys.readouterr().out)
            assert "in another container" in told and not gone(pid)
        monkeypatch.setattr("dataplane.launch.ending.END_S", 1.0)
        assert cli.main(["clean", "--force"]) == 0
        assert "ended run" in capsys.readouterr().out and gone(pid)


def test_clean_never_ends_the_process_that_has_the_pid_of_a_card(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A card of another pid namespace has a number that is somebody else's here."""
    with dataplane.connect() as plane, subprocess.Popen(["sleep", "60"]) as innocent:
        pid = plane.stats()["pid"]
        card = json.loads((folder / "embedded.json").read_text())
        (folder / "embedded.json").write_text(json.dumps(card | {"pid": innocent.pid}))
        try:
            assert cli.main(["clean", "--force"]) == 0
            assert innocent.poll() is None and gone(pid)
        finally:
            innocent.kill()


# forks


def in_a_fork(work: object) -> str:
    """What `work()` says in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = work()  # type: ignore[operator]
        except BaseException as exc:
            said = f"{type(exc).__name__}: {exc}"
        os.write(writer, str(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_must_connect_anew_and_its_parent_goes_on(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        part.put({"x": np.full((1, 9000), 7)}, key=["k"])
        batch = part.claim("s", rows=1, timeout=5)
        view = batch["x"][0]
        said = in_a_fork(lambda: part.put({"x": [1]}))
        assert said.startswith("ClientClosed") and "dataplane.connect() in the child" in said
        assert in_a_fork(lambda: int(view.sum())) == str(7 * 9000)
        assert in_a_fork(lambda: batch.ack()).startswith("ClientClosed")

        def anew() -> int:
            with cluster.connect("a") as own:
                return len(own.partition("p").rows())

        assert in_a_fork(anew) == "1"
        assert plane.stats()["arena"]["pinned_bytes"] == view.nbytes
        assert batch.state == "leased" and (view == 7).all()
        batch.ack()
        until(lambda: plane.stats()["clients"] == 1, "the children's sessions ended", 5)


# dataplane status


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dataplane", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_status_shows_peers_shards_partitions_and_bytes(cluster: Cluster) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as plane:
        part = plane.partition("step-1", {"s": ["x"]})
        part.put({"x": np.zeros((4, 1 << 16), np.uint8)})
        seen = json.loads(status("--run", PLANE, "--json").stdout)["runs"][0]
        assert set(seen["peers"]) == {"a", "b"}
        a = seen["peers"]["a"]
        parts = [peer["partitions"].get("step-1", {}) for peer in seen["peers"].values()]
        assert sum(part.get("rows", 0) for part in parts) == 4
        assert a["arena"]["used_bytes"] == 4 << 16
        assert a["shards"] + seen["peers"]["b"]["shards"] == 4096
        shown = status("--run", PLANE).stdout
        for text in ("partition step-1", "4 rows", "256 KiB", "host a "):
            assert text in shown
        assert plane.stats()["clients"] == 1


def test_status_shows_the_others_soon_where_a_peer_is_stopped(cluster: Cluster) -> None:
    """It took 20 s to give it up, and did so twice."""
    cluster.start("a")
    cluster.start("b")
    cluster.peers["a"].send_signal(signal.SIGSTOP)
    try:
        shown = status("--run", PLANE).stdout
    finally:
        cluster.peers["a"].send_signal(signal.SIGCONT)
    assert "peer a does not answer" in shown and "it is stopped, by" in shown and "host b" in shown


def test_status_without_a_peer_says_so_and_starts_none(folder: Path) -> None:
    done = status()
    assert done.returncode == 2 and "found no runs of this user on this host" in done.stderr
    assert rundir.living_peers(folder) == []


def test_names_of_planes_and_settings_that_are_none_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (5, "a\nb", "x" * 300):
        with pytest.raises(dataplane.InvalidConfig, match="is not a valid run name"):
            dataplane.connect(run=wrong)  # type: ignore[arg-type]
    for variable, value, says in (
        ("ARENA", "lots", "8GiB"),
        ("LINGER", "never", "number of seconds"),
        ("SEEDS", "here", "use tcp://host:port"),
        ("SPILL", "/nowhere:1GiB", "create it"),
        ("TOKEN_FILE", "/nowhere/token", "cannot read the token file"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"DATAPLANE_{variable}", value)
            with pytest.raises(dataplane.InvalidConfig, match=says):
                dataplane.connect()
    assert rundir.living_peers(folder) == []
