"""Settings: one table, how each is said and read, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

import dataplane
from dataplane import cli
from dataplane.client.session import opening
from dataplane.errors import InvalidConfig, TokenMissing
from dataplane.launch import embedded, ending, rundir, settings, values
from dataplane.launch.settings import PeerConfig
from dataplane.launch.values import parse_transport

GOOD = PeerConfig("p", "a", None, (), 1 << 30, Path("/tmp"))


def changed(**values: object) -> PeerConfig:
    fields = {name: getattr(GOOD, name) for name in PeerConfig.__dataclass_fields__}
    return PeerConfig(**{**fields, **values})


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("1GB", 10**9), ("2g", 2 << 30), ("4096", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert values.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="8GiB"):
        values.parse_size(text)


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


def test_the_default_arena_is_a_quarter_of_what_is_allowed(run_dir: Path) -> None:
    default = embedded.peer_config({}, {}).arena_bytes
    assert default == values.allowed_memory_bytes() // 4 > 0
    assert embedded.peer_config({}, {"DATAPLANE_ARENA": "3MiB"}).arena_bytes == 3 << 20


@pytest.mark.parametrize("name", ["memory/memory.limit_in_bytes", "memory.max"])
def test_a_cgroups_limit_counts(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "4:cpu,memory:/job/step\n" if "/" in name else "0::/job/step\n"
    read = values._read
    own = Path("/proc/self/cgroup")
    monkeypatch.setattr(values, "_read", lambda path: lines if path == own else read(path))
    root = (tmp_path / name).parent
    (root / "job").mkdir(parents=True)
    (root / "job" / Path(name).name).write_text("2097152\n")
    (root / Path(name).name).write_text("max\n")
    assert values.allowed_memory_bytes(tmp_path) == 2 << 20


def test_a_duration_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="number of seconds"):
        values.parse_seconds("soon")


def test_a_switch_is_on_or_off() -> None:
    for text, asked in (("1", True), ("true", True), ("0", False), ("off", False), ("", None)):
        assert settings.of_variable("bulk-tls", {"DATAPLANE_BULK_TLS": text}) is asked
    with pytest.raises(
        InvalidConfig, match="DATAPLANE_BULK_TLS: 'yes please' is not valid: use 1 or 0"
    ):
        settings.of_variable("bulk-tls", {"DATAPLANE_BULK_TLS": "yes please"})


def test_bulk_tls_and_a_required_engine_exclude_each_other() -> None:
    with pytest.raises(InvalidConfig, match="nixl cannot encrypt values"):
        changed(bulk_tls=True, transport=parse_transport("required:nixl"))


# the table

TEXTS = {
    "run": "grpo",
    "peer": "a",
    "devices": "off",
    "tracebacks": "full",
    "progress": "off",
    "run-dir": "/tmp",
    "name": "b",
    "listen": "tcp://127.0.0.1:7102",
    "seeds": "tcp://127.0.0.1:7101,tcp://127.0.0.1:7102",
    "join": "0",
    "roster": "etcd://127.0.0.1:2379,127.0.0.1:2380",
    "lost-after": "12",
    "token-file": "FILE",
    "arena": "64MiB",
    "spill": "/tmp:16MiB",
    "device-arena": "cuda@0,2:4MiB",
    "transport": "off:nixl,shelf",
    "bulk-tls": "1",
    "metrics": "[::1]:9464",
    "linger": "7",
    "linger-unread": "70",
}
"""one that is not the default, of each"""
WRONG = {
    "run": "a\nb",
    "peer": "a/b",
    "devices": "maybe",
    "tracebacks": "long",
    "progress": "perhaps",
    "seeds": "host-a",
    "roster": "zookeeper://here",
    "lost-after": "30",
    "token-file": "/nowhere/token",
    "arena": "lots",
    "spill": "/nowhere:1GiB",
    "device-arena": "gpu:2GiB",
    "transport": "pigeon",
    "bulk-tls": "yes please",
    "metrics": "9464",
    "linger": "never",
    "linger-unread": "-1",
}


@pytest.fixture
def environ(tmp_path: Path, run_dir: Path) -> dict[str, str]:
    """A variable for each setting that has one."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("x" * 32)
    texts = {**TEXTS, "token-file": str(token), "run-dir": str(run_dir)}
    return {one.env: texts[one.name] for one in settings.TABLE if one.variable}


def same(one: PeerConfig, other: PeerConfig) -> bool:
    return [str(getattr(one, field)) for field in PeerConfig.__dataclass_fields__] == [
        str(getattr(other, field)) for field in PeerConfig.__dataclass_fields__
    ]


def test_every_setting_reaches_a_peer_that_connect_starts(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = embedded.embedded_config("grpo", environ)
    for setting in settings.OF_PEERS:
        if setting.variable:
            left = PeerConfig.__dataclass_fields__[setting.field].default
            assert getattr(config, setting.field) != left, setting.name
    arguments = cli._parser().parse_args(embedded.command_line(config)[3:])
    assert same(cli.peer_config(arguments), config)
    monkeypatch.setattr("os.environ", dict(environ) | {"DATAPLANE_ARENA": "1MiB", "HOME": "/"})
    assert set(embedded._environment()) & set(environ) <= {"DATAPLANE_RUN_DIR"}


def test_what_is_said_by_hand_wins_over_a_variable(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    said = ["--arena", "32MiB", "--spill", "none", "--no-bulk-tls", "--metrics", "none"]
    said += ["--transport", "required:nixl", "--seeds", "none", "--run", "mine"]
    config = cli.peer_config(cli._parser().parse_args(["peer", *said]))
    assert (config.arena_bytes, config.spill, config.bulk_tls) == (32 << 20, None, False)
    assert (config.metrics, config.seeds, config.run) == (None, (), "mine")
    assert str(config.transport) == "required:nixl"


def test_a_peer_by_hand_stays_whatever_the_variable_for_embedded_ones_says(
    environ: dict[str, str], run_dir: Path
) -> None:
    lingers = {name: text for name, text in environ.items() if "LINGER" in name}
    by_hand = embedded.peer_config({}, lingers)
    assert len(lingers) == 2 and by_hand.linger_s is by_hand.linger_unread_s is None
    assert embedded.peer_config(settings.by_hand({"linger": "3"}), lingers).linger_unread_s == 3.0
    ours = embedded.embedded_config("grpo", lingers)
    assert (ours.linger_s, ours.linger_unread_s) == (7.0, 70.0)
    ours = embedded.embedded_config("grpo", {"DATAPLANE_LINGER": "7"})
    assert (ours.linger_s, ours.linger_unread_s) == (7.0, 7.0)
    ours = embedded.embedded_config("grpo", {})
    assert (ours.linger_s, ours.linger_unread_s) == (5.0, 300.0)


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_cannot_be_read_names_the_variable_and_what_is_expected(name: str) -> None:
    env = settings.SETTINGS[name].env
    with pytest.raises(InvalidConfig, match=f"{env}: ") as failure:
        settings.of_variable(name, {env: WRONG[name]})
    assert failure.value.details["setting"] == env
    assert failure.value.details["value"] == WRONG[name]
    with pytest.raises(InvalidConfig, match=f"--{name}: "):
        settings.value(name, settings.by_hand({name: WRONG[name]}))


def test_every_setting_that_can_be_wrong_is_tried() -> None:
    never_wrong = {"run-dir", "name", "listen", "join"}  # or have no variable
    assert set(WRONG) | never_wrong == set(settings.SETTINGS) == set(TEXTS)


@pytest.mark.parametrize(("name", "near"), [("ARNEA", "ARENA"), ("SEED", "SEEDS"), ("PLANE", "")])
def test_an_unknown_variable_is_told_with_the_nearest_known_one(name: str, near: str) -> None:
    said = settings.unknown({f"DATAPLANE_{name}": "1", "DATAPLANE_ARENA": "1GiB"})
    meant = f"did you mean DATAPLANE_{near}?" if near else "see docs/settings.md"
    assert said == f"DATAPLANE_{name} is not a setting: {meant}"


def test_what_kubernetes_sets_for_a_service_is_none_of_ours() -> None:
    of_a_service = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_PEERS", "PORT"]
    of_a_service += ["PORT_7101_TCP", "PORT_7101_TCP_ADDR", "A_SERVICE_HOST", "A_PORT_7101_TCP"]
    assert settings.unknown({f"DATAPLANE_{name}": "1" for name in of_a_service}) == ""


def test_connect_warns_of_unknown_variables_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DATAPLANE_ARENA", "32MiB")
    monkeypatch.setenv("DATAPLANE_LINGERS", "1")
    opening._warn_of_unknown.cache_clear()
    for _ in range(2):
        with dataplane.connect(run="p") as plane:
            pid = plane.stats()["pid"]
    assert caplog.text.count("DATAPLANE_LINGERS is not a setting: did you mean") == 1
    opening._warn_of_unknown.cache_clear()
    (run,) = rundir.living_runs()
    assert run.peers[0].card is not None and run.peers[0].card.pid == pid
    ending.end(run.peers[0], "the test")


def test_the_page_in_docs_is_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/settings.md").read_text()
    lines = ["| variable, option | value | meaning | default |", "|---|---|---|---|"]
    for one in settings.TABLE:
        names = [f"`{one.env}`"] * one.variable + [f"`{one.flag}`"] * one.option
        form = f"`{one.form}`" if one.form else "1 or 0"
        only = " (peers of `connect()` and Ray)" if one.of == "peers of connect()" else ""
        lines.append(f"| {', '.join(names)} | {form} | {one.help}{only} | {one.default} |")
    table = "\n".join(lines) + "\n"
    assert table in page, f"docs/settings.md lacks this table:\n{table}"
