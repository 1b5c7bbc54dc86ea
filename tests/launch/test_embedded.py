"""Attaching: the only peer, a named one, or one that is started by exactly one of many."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.errors import (
    ConnectError,
    InvalidConfig,
    PeerAmbiguous,
    PeerNotFound,
    SeedsMissing,
    TokenMissing,
)
from dataplane.launch import embedded, rundir, runs
from dataplane.version import __version__
from dataplane.wire.messages import HelloDone
from tests.launch import stand_in
from tests.processes import all_ending


@pytest.fixture
def folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plane whose embedded peer is a stand-in. Peers do not outlive the test."""
    monkeypatch.setattr(embedded, "command_line", stand_in.stand_in_command)
    folder = rundir.plane_dir("p")
    yield folder
    for peer in rundir.living_peers(folder):
        kill(peer)


def kill(peer: rundir.LivingPeer) -> None:
    """Kill a peer and wait until the kernel has let its lock go."""
    assert peer.card is not None
    handle = os.pidfd_open(peer.card.pid)
    os.kill(peer.card.pid, signal.SIGKILL)
    assert select.select([handle], [], [], 10)[0]
    os.close(handle)


def only(folder: Path) -> rundir.LivingPeer:
    (peer,) = rundir.living_peers(folder)
    return peer


def test_the_first_attach_starts_a_peer_and_the_second_finds_it(folder: Path) -> None:
    path = embedded.attach("p").socket
    first = only(folder)
    assert path == str(folder / "embedded.sock") and embedded.answers(Path(path))
    assert embedded.attach("p").socket == path
    assert only(folder) == first


def test_the_peer_has_its_own_session_and_is_nobodys_child(folder: Path) -> None:
    embedded.attach("p")
    card = only(folder).card
    assert card is not None
    assert os.getsid(card.pid) != os.getsid(0)
    stat = Path(f"/proc/{card.pid}/stat").read_text()
    assert int(stat.rpartition(")")[2].split()[1]) != os.getpid()
    assert Path(f"/proc/{card.pid}/cwd").readlink() == Path("/")


def test_one_peer_is_started_however_many_ask_at_once(folder: Path) -> None:
    command = [sys.executable, stand_in.__file__, "attach", "p"]
    asking = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    with all_ending(asking):
        answers = [process.communicate(timeout=60) for process in asking]
    assert answers == [(f"{folder}/embedded.sock\n", "")] * 6
    assert only(folder).name == "embedded"
    assert not list(folder.glob("*.old"))  # a second start would have put a log aside


def test_a_killed_peer_is_replaced_by_the_next_attach(folder: Path) -> None:
    embedded.attach("p")
    first = only(folder)
    kill(first)
    assert (folder / "embedded.sock").exists()
    embedded.attach("p")
    second = only(folder)
    assert first.card and second.card and second.card.pid != first.card.pid


def test_named_peers_are_attached_to_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, stand_in.__file__, "peer", str(folder)]
    with (
        subprocess.Popen([*command, "a"], stdout=subprocess.PIPE, text=True) as a,
        subprocess.Popen([*command, "b"], stdout=subprocess.PIPE, text=True) as b,
    ):
        try:
            for process in (a, b):
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
            assert embedded.attach("p", "b").socket == str(folder / "b.sock")
            with pytest.raises(PeerAmbiguous, match="a, b"):
                embedded.attach("p")
            with pytest.raises(PeerNotFound, match="running: a, b"):
                embedded.attach("p", "c")
            monkeypatch.setenv("DATAPLANE_PEER", "a")
            assert embedded.attach("p").socket == str(folder / "a.sock")
        finally:
            a.kill()
            b.kill()


def test_a_named_peer_is_never_started(folder: Path) -> None:
    with pytest.raises(PeerNotFound, match="dataplane peer --name a"):
        embedded.attach("p", "a")
    assert rundir.living_peers(folder) == []


def test_a_peer_that_cannot_start_is_reported_with_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "command_line", stand_in.broken_command)
    with pytest.raises(ConnectError, match="no luck today") as failure:
        embedded.attach("p")
    assert failure.value.details["log"] == str(folder / "embedded.log")
    monkeypatch.setattr(embedded, "command_line", stand_in.stand_in_command)
    embedded.attach("p")
    assert "no luck" in (folder / "embedded.log.old").read_text()


def test_a_program_that_is_not_there_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "command_line", lambda config: ["/no/such/program"])
    with pytest.raises(ConnectError, match="could not start a peer"):
        embedded.attach("p")


def test_a_starter_that_never_ends_is_not_waited_for_forever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.1)
    held = rundir.try_lock(folder / ".starting")
    assert held is not None
    with pytest.raises(ConnectError, match="embedded.log"):
        embedded.attach("p")
    os.close(held)


def test_a_job_of_several_hosts_gets_no_private_plane(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(SeedsMissing):
        embedded.attach("p")
    monkeypatch.setenv("DATAPLANE_SEEDS", "tcp://0.0.0.0:7101")
    with pytest.raises(TokenMissing):
        embedded.attach("p")
    monkeypatch.setenv("DATAPLANE_SEEDS", "tcp://192.0.2.7:7101")
    with pytest.raises(ConnectError, match="start this host's peer by hand"):
        embedded.attach("p")
    assert rundir.living_peers(folder) == []


def test_the_embedded_peers_command_carries_its_whole_configuration(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataplane import cli

    monkeypatch.setenv("DATAPLANE_SEEDS", "tcp://127.0.0.1:7101,tcp://192.0.2.7:7101")
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    config = embedded.embedded_config("p", os.environ)
    assert config.linger_s == 5.0 and config.linger_unread_s == 300.0
    for name in ("DATAPLANE_SEEDS", "DATAPLANE_ARENA"):
        monkeypatch.delenv(name)
    arguments = cli._parser().parse_args(embedded.command_line(config)[3:])
    assert cli.peer_config(arguments) == config
    monkeypatch.setenv("DATAPLANE_LINGER", "never")
    with pytest.raises(InvalidConfig):
        embedded.embedded_config("p", os.environ)


def test_an_embedded_peer_is_told_of_bulk_tls(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataplane import cli

    monkeypatch.setenv("DATAPLANE_BULK_TLS", "1")
    config = embedded.embedded_config("p", os.environ)
    monkeypatch.delenv("DATAPLANE_BULK_TLS")
    arguments = cli._parser().parse_args(embedded.command_line(config)[3:])
    assert config.bulk_tls and cli.peer_config(arguments) == config


def test_of_many_other_runs_the_latest_are_named(run_dir: Path) -> None:
    locks = [rundir.claim_name(rundir.plane_dir(f"r{n}"), "a") for n in range(5)]
    over = "launch-1-ffffffff"  # nobody can join it, though its peer has not left yet
    locks.append(rundir.claim_name(rundir.plane_dir(over), "embedded"))
    first, mine = rundir.living_runs()[0], runs.Run("launch-1-00000000", "launch")
    began = embedded.Attached(mine, first.peers[0], first, runs.this_process(), began=True)
    shown = ", ".join(rf"run 'r{n}' \(a, \S+ m?s old\)" for n in (4, 3, 2))
    level, line = began.line(HelloDone(0, (0, 0, 0)))
    assert level == logging.WARNING
    assert re.search(f"this host also has {shown} and 2 more: to share rows", line)
    for lock in locks:
        lock.release()


def test_a_run_whose_starter_is_still_connecting_is_not_called_left(run_dir: Path) -> None:
    other = rundir.Starter("another launch", "1:1", 4711, "python train.py")
    card = rundir.Card("embedded", 4712, "p", __version__, 0.0, starter=other)
    run = rundir.LivingRun("p", run_dir, [rundir.LivingPeer("embedded", run_dir / "s", card)])
    joined = embedded.Attached(runs.Run("p", "hand"), run.peers[0], run, runs.this_process())
    level, line = joined.line(HelloDone(0, (0, 0, 0)))
    assert "fresh" not in line and level == logging.INFO
    level, line = joined.line(HelloDone(0, (0, 0, 0), left_by="python train.py"))
    assert "started this run and has no clients left" in line and level == logging.WARNING


def test_looking_for_a_peer_of_whatever_run_leaves_no_folder_of_ones_own(run_dir: Path) -> None:
    lock = rundir.claim_name(rundir.plane_dir("r"), "a")
    mine = runs.Run("launch-1-00000000", "launch")
    assert embedded._run_of("a", mine, run_dir).name == "r"
    assert embedded._run_of("b", mine, run_dir) is mine
    assert [folder.name for folder in run_dir.iterdir()] == ["r"]
    lock.release()
