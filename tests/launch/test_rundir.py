"""The run directory: who lives, who has a name, and what the dead leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dataplane.errors import InvalidConfig, PeerNameTaken
from dataplane.launch import rundir

STAND_IN = Path(__file__).with_name("stand_in.py")
Start = Callable[[Path, str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start stand-in peers that do not outlive the test."""
    with ExitStack() as stack:

        def start(folder: Path, name: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(STAND_IN), "peer", str(folder), name]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_living_peer_is_seen_and_its_name_is_taken(run_dir: Path, start: Start) -> None:
    folder = rundir.plane_dir("p")
    process = start(folder, "a")
    (peer,) = rundir.living_peers(folder)
    assert peer.name == "a" and peer.socket == folder / "a.sock"
    assert peer.card is not None and (peer.card.name, peer.card.pid) == ("a", process.pid)
    assert peer.card.run == "p" and peer.card.age_s >= 0 and peer.card.starter is None
    with pytest.raises(PeerNameTaken, match=f"pid {process.pid}"):
        rundir.claim_name(folder, "a")
    rundir.claim_name(folder, "b").release()


def test_a_peer_that_ends_in_order_leaves_nothing(run_dir: Path, start: Start) -> None:
    folder = rundir.plane_dir("p")
    process = start(folder, "a")
    process.terminate()
    assert process.wait() == 0
    assert files(folder) == []


def test_the_next_start_removes_what_killed_peers_left(run_dir: Path, start: Start) -> None:
    folder = rundir.plane_dir("p")
    for name in ("a", "b.2"):
        process = start(folder, name)
        process.kill()
        process.wait()
    living = start(folder, "c")
    assert files(folder) == ["c.json", "c.lock", "c.sock"]
    living.send_signal(signal.SIGKILL)
    living.wait()
    assert rundir.living_peers(folder) == []
    lock = rundir.claim_name(folder, "c")
    assert files(folder) == ["c.json", "c.lock"]
    lock.release()
    lock.release()
    assert files(folder) == []


def test_a_name_stays_taken_when_its_files_are_gone_and_they_come_back(run_dir: Path) -> None:
    folder = rundir.plane_dir("p")
    lock = rundir.claim_name(folder, "a")
    assert lock.restore() == []
    for sweep in (shutil.rmtree, lambda folder: (folder / "a.lock").unlink()):
        sweep(folder)
        with pytest.raises(PeerNameTaken, match=f"pid {os.getpid()}"):
            rundir.claim_name(rundir.plane_dir("p"), "a")
        assert rundir.holder(folder, "a") == os.getpid()
        assert "a.lock" in lock.restore() and lock.restore() == []
        (peer,) = rundir.living_peers(folder)
        assert peer.card is not None and peer.card.pid == os.getpid()
    assert rundir.is_inhabited(folder) and not rundir.remove(folder)
    lock.release()
    assert rundir.holder(folder, "a") is None
    assert rundir.abandoned(run_dir) == [folder] and rundir.remove(folder)


def test_a_peer_that_went_with_rows_leaves_a_card_that_says_so(run_dir: Path) -> None:
    folder = rundir.plane_dir("p")
    lock = rundir.claim_name(folder, "a")
    assert rundir.dead_peers(folder) == []
    lock.note(3, [])
    lock.release("ended by SIGTERM")
    (dead,) = rundir.dead_peers(folder)
    assert (dead.card.rows, dead.card.ended) == (3, "ended by SIGTERM") and dead.age_s < 60
    lock = rundir.claim_name(folder, "a")
    assert rundir.dead_peers(folder) == []
    lock.note(4, [])
    (peer,) = rundir.living_peers(folder)
    rundir.write_ended_by(peer, "`dataplane clean` (pid 7)")
    lock._close()  # as the kernel does when it is killed
    (dead,) = rundir.dead_peers(folder)
    assert (dead.card.rows, dead.card.ended) == (4, "killed by `dataplane clean` (pid 7)")


def test_a_card_that_could_not_be_written_is_written_by_the_next_note(run_dir: Path) -> None:
    """Also if the peer has the same rows by then: the next peer would report none of them."""
    folder = rundir.plane_dir("p")
    lock = rundir.claim_name(folder, "a")
    lock.note(0, [])
    (draft := folder / ".a.json").mkdir()
    with pytest.raises(IsADirectoryError):
        lock.note(3, ["step-1"])
    draft.rmdir()
    lock.note(3, ["step-1"])
    (peer,) = rundir.living_peers(folder)
    assert peer.card is not None and (peer.card.rows, peer.card.partitions) == (3, ["step-1"])
    lock.release()


def test_a_forked_child_does_not_keep_its_parents_name(run_dir: Path) -> None:
    folder = rundir.plane_dir("p")
    lock = rundir.claim_name(folder, "a")
    hold, release = os.pipe()
    child = os.fork()
    if not child:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    lock._close()  # as the kernel does when the parent dies
    rundir.claim_name(folder, "a").release()
    os.close(release)
    os.waitpid(child, 0)


def test_looking_does_not_get_in_the_way_of_starting(run_dir: Path) -> None:
    folder = rundir.plane_dir("p")
    script = f"""
from pathlib import Path
from dataplane.launch import rundir
print("looking", flush=True)
while True:
    rundir.living_peers(Path({str(folder)!r}))
"""
    (folder / "a.lock").touch()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as looker:
        try:
            assert looker.stdout is not None and looker.stdout.readline() == "looking\n"
            for _ in range(50):
                rundir.claim_name(folder, "a").release()
        finally:
            looker.kill()


def test_a_folder_that_goes_while_it_is_looked_at_has_no_peers(run_dir: Path) -> None:
    """A peer that leaves removes it while new clients look for a peer there."""
    folder, looked = rundir.plane_dir("p"), threading.Event()

    def come_and_go() -> None:
        while not looked.is_set():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            folder.rmdir()

    with ThreadPoolExecutor(1) as pool:
        goes = pool.submit(come_and_go)
        try:
            for _ in range(10_000):
                assert rundir.living_peers(folder) == []
                assert rundir.dead_peers(folder) == []
        finally:
            looked.set()
        goes.result()


def test_the_run_directory_is_private(run_dir: Path, tmp_path: Path) -> None:
    assert rundir.run_dir() == run_dir
    run_dir.chmod(0o755)
    with pytest.raises(InvalidConfig, match="chmod 700"):
        rundir.run_dir()
    run_dir.chmod(0o700)
    (tmp_path / "mine").mkdir(mode=0o700)
    (run_dir / "p").symlink_to(tmp_path / "mine")
    with pytest.raises(InvalidConfig, match="must be a directory"):
        rundir.plane_dir("p")
    (run_dir / "p").unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_run_directory_of_another_user_is_refused(run_dir: Path) -> None:
    (run_dir / "p").mkdir(mode=0o700)
    os.chown(run_dir / "p", 65534, 65534)
    with pytest.raises(InvalidConfig, match="and owner uid 65534"):
        rundir.plane_dir("p")


def test_where_the_run_directory_is(run_dir: Path) -> None:
    assert rundir.run_dir({"XDG_RUNTIME_DIR": str(run_dir)}) == run_dir / "dataplane"
    gone = {"XDG_RUNTIME_DIR": str(run_dir / "gone")}
    assert rundir.run_dir(gone) == Path(f"/tmp/dataplane-{os.getuid()}")


@pytest.mark.parametrize("plane", ["p", "x" * 200, "0-slurm-42", "../../etc", "ä/ö", "~a", "."])
def test_every_plane_has_a_folder_in_which_sockets_fit(run_dir: Path, plane: str) -> None:
    folder = rundir.plane_dir(plane)
    assert folder.parent == run_dir and folder.is_dir()
    socket = folder / f"{'n' * 32}.sock"
    assert len(os.fsencode(socket)) < 100
    assert rundir.plane_dir(plane) == folder


def test_a_run_directory_that_is_too_long_is_refused(run_dir: Path) -> None:
    deep = run_dir / ("d" * 60)
    with pytest.raises(InvalidConfig, match="too long"):
        rundir.plane_dir("p", deep)
