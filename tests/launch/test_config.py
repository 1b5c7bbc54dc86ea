"""Settings: sizes, addresses, names, and the memory that an arena may take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dataplane.errors import InvalidConfig, TokenMissing
from dataplane.launch import config
from dataplane.launch.bulk_tls import find_bulk_tls
from dataplane.launch.config import PeerConfig
from dataplane.launch.transport import parse_transport

GOOD = PeerConfig("p", "a", None, (), 1 << 30, Path("/tmp"))


def changed(**values: object) -> PeerConfig:
    fields = {name: getattr(GOOD, name) for name in PeerConfig.__dataclass_fields__}
    return PeerConfig(**{**fields, **values})


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("1GB", 10**9), ("2g", 2 << 30), ("4096", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert config.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="8GiB"):
        config.parse_size(text)


def test_only_loopback_may_be_listened_at() -> None:
    for good in ("tcp://127.0.0.1:7101", "tcp://localhost:1", "tcp://[::1]:7101"):
        assert changed(listen=good, seeds=(good,)).listen == good
    for bad in ("tcp://0.0.0.0:7101", "tcp://10.0.0.1:1", "tcp://host-a:7101"):
        with pytest.raises(TokenMissing, match="cluster token"):
            changed(listen=bad)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a/b"},
        {"name": ""},
        {"name": "x" * 33},
        {"run": ""},
        {"run": "p\n"},
        {"seeds": ("tcp://a",)},
        {"listen": "127.0.0.1:7101"},
        {"listen": "tcp://127.0.0.1:70000"},
        {"arena_bytes": 1000},
    ],
)
def test_a_setting_of_the_wrong_form_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        changed(**wrong)


def test_the_default_arena_is_a_quarter_of_what_is_allowed() -> None:
    assert config.default_arena_bytes({}) == config.allowed_memory_bytes() // 4 > 0
    assert config.default_arena_bytes({"DATAPLANE_ARENA": "3MiB"}) == 3 << 20


@pytest.mark.parametrize("name", ["memory/memory.limit_in_bytes", "memory.max"])
def test_a_cgroups_limit_counts(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "4:cpu,memory:/job/step\n" if "/" in name else "0::/job/step\n"
    read = config._read
    own = Path("/proc/self/cgroup")
    monkeypatch.setattr(config, "_read", lambda path: lines if path == own else read(path))
    root = (tmp_path / name).parent
    (root / "job").mkdir(parents=True)
    (root / "job" / Path(name).name).write_text("2097152\n")
    (root / Path(name).name).write_text("max\n")
    assert config.allowed_memory_bytes(tmp_path) == 2 << 20


def test_a_duration_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="number of seconds"):
        config.parse_seconds("soon")


def test_bulk_tls_is_asked_for_by_one_variable() -> None:
    for text, asked in (("1", True), ("true", True), ("0", False), ("", False)):
        assert find_bulk_tls({"DATAPLANE_BULK_TLS": text}) is asked
    assert find_bulk_tls({}) is False
    with pytest.raises(InvalidConfig, match="DATAPLANE_BULK_TLS"):
        find_bulk_tls({"DATAPLANE_BULK_TLS": "yes please"})


def test_bulk_tls_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)  # as where it is not installed
    with pytest.raises(InvalidConfig, match=r"pip install 'dataplane\[tls\]'"):
        changed(bulk_tls=True)
    assert not changed().bulk_tls


def test_bulk_tls_and_a_required_engine_exclude_each_other() -> None:
    with pytest.raises(InvalidConfig, match="ucx moves bytes unencrypted"):
        changed(bulk_tls=True, transport=parse_transport("required:ucx"))
