"""The cluster token: where it may lie, what may be in it, and that it is never shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane import cli
from dataplane.errors import InvalidConfig, TokenMissing
from dataplane.launch import embedded, settings, token
from dataplane.launch.settings import PeerConfig
from dataplane.launch.token import read_token

SECRET = "correct-horse-battery-staple-and-more"
OUTSIDE = "tcp://192.0.2.1:7101"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def configured(file: Path | None, listen: str = OUTSIDE) -> PeerConfig:
    found = read_token(file) if file else None
    return PeerConfig("p", "a", listen, (listen,), 1 << 20, Path("/tmp"), token=found)


def test_the_command_makes_a_token_that_only_its_user_can_read(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        with open(tmp_path / name, "wb") as out:
            subprocess.run([sys.executable, "-m", "dataplane", "token"], stdout=out, check=True)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        made.append(read_token(tmp_path / name).key("p", "role"))
    assert made[0] != made[1]


def test_keys_differ_by_token_plane_and_role(file: Path) -> None:
    one = read_token(file)
    keys = {one.key(plane, role) for plane in ("p", "q") for role in ("x", "y")}
    file.write_text(SECRET + "!")
    keys.add(read_token(file).key("p", "x"))
    assert len(keys) == 5 and all(len(key) == 32 for key in keys)
    file.write_text(f"  {SECRET}\n\n")
    assert read_token(file).key("p", "x") == one.key("p", "x")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_touch_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(InvalidConfig, match="but it has mode .*chmod 600"):
        read_token(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 65534, 65534)
    with pytest.raises(InvalidConfig, match="and owner uid 65534"):
        read_token(file)


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 31 + b" \n", b"x" * 5000])
def test_a_token_of_the_wrong_length_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(InvalidConfig, match="must be 32 to 4096"):
        read_token(file)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "directory").mkdir(0o700)
    for other in ("pipe", "directory"):
        with pytest.raises(InvalidConfig, match="readable only by its owner"):
            read_token(tmp_path / other)
    with pytest.raises(InvalidConfig, match="cannot read the token file"):
        read_token(tmp_path / "missing")


def test_a_secret_mounted_behind_a_link_is_read(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    assert read_token(tmp_path / "link").key("p", "x") == read_token(file).key("p", "x")


def test_the_secret_is_in_no_repr(file: Path) -> None:
    shown = repr(configured(file))
    assert str(file) in shown and SECRET not in shown


def test_an_embedded_peers_command_names_the_file_and_not_the_token(
    file: Path, run_dir: Path
) -> None:
    environ = {"DATAPLANE_TOKEN_FILE": str(file), "DATAPLANE_ARENA": "1MiB"}
    command = embedded.command_line(embedded.embedded_config("p", environ))
    assert command[command.index("--token-file") + 1] == str(file)
    assert not any(SECRET in part for part in command)
    found = cli.peer_config(cli._parser().parse_args(command[3:])).token
    assert found is not None and found.key("p", "x") == read_token(file).key("p", "x")


def test_without_a_token_a_peer_listens_on_loopback_only(file: Path) -> None:
    for address in (OUTSIDE, "tcp://host-a:7101", "tcp://0.0.0.0:7101"):
        with pytest.raises(TokenMissing, match=r"dataplane token > F.*Ray.*Kubernetes"):
            configured(None, address)
    assert configured(None, "tcp://127.0.0.1:7101").token is None
    assert configured(file).listen == OUTSIDE


def test_an_address_that_nobody_can_dial_is_refused_with_a_token_too(file: Path) -> None:
    for address in ("tcp://0.0.0.0:7101", "tcp://[::]:7101"):
        with pytest.raises(InvalidConfig, match="own name or address"):
            configured(file, address)


def test_the_variable_names_the_file(file: Path) -> None:
    assert settings.of_variable("token-file", {}) is None
    found = settings.of_variable("token-file", {"DATAPLANE_TOKEN_FILE": str(file)})
    assert found is not None and found.path == file
    assert token.MIN_TOKEN_BYTES == 32
