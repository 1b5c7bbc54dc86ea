"""Every setting, in one table: its variable, its option, its default, and its help.

A setting `arena` is DATAPLANE_ARENA in the environment, `--arena` of `dataplane peer`, and `arena=`
in programs that start peers. An argument takes precedence over a variable, and `none` cancels a
variable. A peer gets its settings on its command line, however it is started. A peer that
`connect()` or Ray starts reads no variable of dataplane, so it runs with what was read once.

docs/settings.md has this table (tests/launch/test_settings.py).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from dataplane.errors import InvalidConfig, sized
from dataplane.launch import values
from dataplane.launch.token import Token, read_token
from dataplane.launch.values import (
    AUTO,
    DeviceMemory,
    HttpAddress,
    Spill,
    TransportChoice,
)

if TYPE_CHECKING:
    from dataplane.launch.rundir import Starter

LOST_AFTER_S = 20.0
LINGER_S = 5.0
LINGER_UNREAD_S = 300.0

Read = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. form: the form of its text. default: in words. help: its meaning. read: parses a
    text; raises InvalidConfig. text: the inverse of read. of: "connect()", "every peer", or
    "peers of connect()", whose variable does not apply to peers started by hand. as_field: its
    field of `PeerConfig`, if that has another name. variable, option: whether it has one."""

    name: str
    form: str
    default: str
    help: str
    read: Read
    of: str = "every peer"
    as_field: str = ""
    text: Callable[[Any], str] = str
    variable: bool = True
    option: bool = True

    @property
    def env(self) -> str:
        return "DATAPLANE_" + self.name.replace("-", "_").upper()

    @property
    def field(self) -> str:
        return self.as_field or self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off: an option without a value."""
        return self.read is values.parse_yes


def _one_of(*words: str) -> Read:
    def read(text: str) -> str:
        if text not in words:
            allowed = f"{', '.join(words[:-1])} or {words[-1]}"
            raise InvalidConfig(f"{text!r} is not valid: use {allowed}")
        return text

    return read


TABLE = (
    # which run, which peer
    Setting(
        "run",
        "NAME",
        "the launcher's id, else an unnamed run; for a peer started by hand: `default`",
        "the run to join; runs never share rows",
        values.check_run,
        of="connect() and every peer",
    ),
    Setting(
        "peer",
        "NAME",
        "the run's only peer on this host; `connect()` starts one if there is none",
        "the peer on this host to attach to; `connect()` does not start it",
        values.check_peer_name,
        of="connect()",
        option=False,
    ),
    Setting(
        "devices",
        "auto, required or off",
        "auto",
        "whether clients map GPU memory to avoid a copy",
        _one_of("auto", "required", "off"),
        of="connect()",
        option=False,
    ),
    Setting(
        "tracebacks",
        "short or full",
        "short: tracebacks end at the public call",
        "whether tracebacks of dataplane errors show internal frames",
        _one_of("short", "full"),
        of="connect()",
        option=False,
    ),
    Setting(
        "progress",
        "",
        "on",
        "whether long calls show a progress bar when standard error is a terminal",
        values.parse_yes,
        of="connect() and every peer",
        option=False,
    ),
    Setting(
        "run-dir",
        "DIR",
        "`$XDG_RUNTIME_DIR/dataplane`, else `/tmp/dataplane-UID`",
        "directory for sockets, locks and logs of this host's peers",
        lambda text: Path(text).absolute(),
        of="connect() and every peer",
    ),
    # a peer among others
    Setting(
        "name",
        "NAME",
        "a",
        "the peer's name, unique in its run",
        values.check_peer_name,
        variable=False,
    ),
    Setting(
        "listen",
        "tcp://HOST:PORT",
        "the seed that is an address of this host",
        "address at which other peers reach this peer",
        lambda text: values.parse_address(text) and text.strip(),
        variable=False,
    ),
    Setting(
        "seeds",
        "tcp://HOST:PORT,… or dns://NAME:PORT/COUNT",
        "the launcher's hosts, else this host alone",
        "addresses of all founding peers, in the same order on every host; `none` for this host "
        "alone; with dns://, the peer waits up to 300 s until NAME resolves to COUNT addresses",
        values.parse_seeds,
        text=lambda seeds: ",".join(seeds) or "none",
    ),
    Setting(
        "join",
        "",
        "off",
        "join a plane without being one of its seeds",
        values.parse_yes,
        variable=False,
    ),
    Setting(
        "roster",
        "etcd://HOST:PORT,…",
        "the first peer in the seed list",
        "etcd servers that keep the roster",
        values.parse_roster,
        text=lambda servers: "etcd://" + ",".join(servers),
    ),
    Setting(
        "lost-after",
        "SECONDS",
        "20",
        "seconds of silence after which the roster keeper declares a peer lost whose host "
        "responds; under 30; only the keeper's value counts",
        values.parse_lost_after,
        as_field="lost_after_s",
        text=lambda seconds: f"{seconds:g}",
    ),
    Setting(
        "token-file",
        "FILE",
        "none, which allows only loopback",
        "file with the secret that all peers of the run share",
        read_token,
        as_field="token",
        text=lambda token: str(token.path),
    ),
    # memory
    Setting(
        "arena",
        "SIZE",
        "a quarter of the memory that the host or cgroup allows",
        "memory for rows: 8GiB, 512MiB, or a number of bytes",
        values.parse_size,
        as_field="arena_bytes",
    ),
    Setting(
        "spill",
        "DIR[:SIZE]",
        "none; for SIZE: four times the arena",
        "directory for values that do not fit in the arena",
        values.parse_spill,
    ),
    Setting(
        "device-arena",
        "[cuda@N,…:]SIZE",
        "none",
        "GPU memory for rows, on every GPU visible to the peer or on those listed",
        values.parse_device_arena,
    ),
    # between hosts
    Setting(
        "transport",
        "auto, required:NAME, off:NAME,… or off",
        "auto",
        "which transports may carry values between hosts",
        values.parse_transport,
    ),
    Setting(
        "bulk-tls",
        "",
        "off",
        "encrypt values between hosts with TLS",
        values.parse_yes,
    ),
    Setting(
        "metrics",
        "HOST:PORT",
        "none",
        "address at which the peer serves metrics to Prometheus",
        values.parse_http,
    ),
    # life
    Setting(
        "linger",
        "SECONDS",
        "5, or 300 while rows are unread; for a peer started by hand: forever",
        "seconds that the peer runs after its last client disconnects",
        values.parse_seconds,
        of="peers of connect()",
        as_field="linger_s",
    ),
    Setting(
        "linger-unread",
        "SECONDS",
        "the value of linger if it is given, else 300",
        "like linger, but while rows are unread",
        values.parse_seconds,
        of="peers of connect()",
        as_field="linger_unread_s",
    ),
)

SETTINGS = {setting.name: setting for setting in TABLE}
OF_PEERS = [setting for setting in TABLE if setting.option]
"""The options of `dataplane peer`, also used by other starters of peers."""


@dataclass(frozen=True, slots=True)
class SettingText:
    """A text and its source: `--arena`, `arena=` or `DATAPLANE_ARENA`."""

    text: str
    where: str


def by_hand(texts: Mapping[str, str | None], where: str = "--{}") -> dict[str, SettingText]:
    """The settings given as arguments, without those that are None. where: the form of their
    source."""
    return {n: SettingText(text, where.format(n)) for n, text in texts.items() if text is not None}


def settings_in(environ: Mapping[str, str], *, by_hand: bool = False) -> dict[str, SettingText]:
    """The settings given as variables. by_hand: for a peer that is started by hand."""
    return {
        one.name: SettingText(text, one.env)
        for one in TABLE
        if one.variable
        and not (by_hand and one.of == "peers of connect()")
        and (text := environ.get(one.env))
    }


def value(name: str, said: Mapping[str, SettingText]) -> Any:
    """Return the value of a setting, or None if it is not given or is `none`. InvalidConfig names
    the text, its source, and the expected form."""
    one, setting = said.get(name), SETTINGS[name]
    if one is None or (one.text.strip().lower() == "none" and setting.form != "NAME"):
        return None
    try:
        return setting.read(one.text)
    except InvalidConfig as exc:
        details = {"setting": one.where, "value": one.text, **exc.details}
        raise InvalidConfig(f"{one.where}: {exc.message}", **details) from exc


def of_variable(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """The value of a setting from its variable, or None if that is not set."""
    return value(name, settings_in(environ))


def unknown(environ: Mapping[str, str] = os.environ) -> str:
    """Return a message about variables that look like settings but are none; "" if there are none.
    Kubernetes sets variables of its own for a Service named dataplane."""
    known = [setting.env.removeprefix(_PREFIX) for setting in TABLE if setting.variable]
    told = []
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or _OF_A_SERVICE.search(variable):
            continue
        if (name := variable.removeprefix(_PREFIX)) not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {_PREFIX}{near[0]}?" if near else "see docs/settings.md"
            told.append(f"{variable} is not a setting: {meant}")
    return " ".join(told)


_PREFIX = "DATAPLANE_"
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP))?(_|$)")


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Everything that one peer needs to know before it starts, in the terms of the table.

    seeds is () for this host alone, and roster is () for the first seed. linger_s is None for
    ever. starter: the process that started it by `connect()`.
    """

    run: str
    name: str
    listen: str | None
    seeds: tuple[str, ...]
    arena_bytes: int
    run_dir: Path
    linger_s: float | None = None
    linger_unread_s: float | None = None
    starter: Starter | None = None
    token: Token | None = None
    join: bool = False
    roster: tuple[str, ...] = ()
    lost_after_s: float = LOST_AFTER_S
    spill: Spill | None = None
    metrics: HttpAddress | None = None
    transport: TransportChoice = AUTO
    bulk_tls: bool = False
    device_arena: DeviceMemory | None = None

    @property
    def launch(self) -> str:
        """The launch of a run that was started again. Peers of an earlier launch do not belong
        to it."""
        return self.starter.launch if self.starter is not None and self.starter.fresh else ""

    @property
    def arena_name(self) -> str:
        """The arena's name in /proc: the same for all incarnations of one peer, and different
        for other peers."""
        place = xxhash.xxh3_64_hexdigest(os.fsencode(self.run_dir.resolve()))
        return f"dataplane-{self.run}-{self.name}-{place}"

    def arguments(self) -> list[str]:
        """The arguments of `dataplane peer` for this configuration."""
        said: list[str] = []
        for setting in OF_PEERS:
            found = getattr(self, setting.field)
            if setting.is_switch:
                said += [setting.flag] if found else []
            elif found not in (None, ()) or setting.name == "seeds":
                said += [setting.flag, setting.text(found)]
        if self.starter is not None:
            said += ["--starter", msgspec.json.encode(self.starter).decode()]
        return said

    def __post_init__(self) -> None:
        values.check_run(self.run)
        values.check_peer_name(self.name)
        for seed in self.seeds:
            values.parse_address(seed)
        if self.listen is not None:
            values.check_listen(self.listen, self.token)
        if self.metrics is not None:
            values.check_visible("metrics", self.metrics, self.token)
        self._check_own_seed()
        if self.bulk_tls:
            self._check_bulk_tls()
        where = " (--arena or DATAPLANE_ARENA)"
        values.check_size("an arena", where, arena_bytes=self.arena_bytes)
        if self.arena_bytes > (allowed := values.allowed_memory_bytes()):
            raise InvalidConfig(
                f"an arena of {sized(self.arena_bytes)} exceeds the {sized(allowed)} of memory "
                "that this host or cgroup allows: use a smaller arena (--arena or "
                "DATAPLANE_ARENA)",
                arena_bytes=self.arena_bytes,
                allowed_bytes=allowed,
            )

    def _check_bulk_tls(self) -> None:
        """Raise InvalidConfig if the other settings rule out TLS."""
        if self.transport.required:
            raise InvalidConfig(
                f"transport {self.transport.required} cannot encrypt values, so it cannot "
                "be used with TLS: choose another --transport (DATAPLANE_TRANSPORT), or "
                "turn TLS off (remove --bulk-tls or unset DATAPLANE_BULK_TLS)",
                transport=self.transport.required,
            )

    def _check_own_seed(self) -> None:
        """Raise InvalidConfig unless one of the seeds is this peer's address, where other peers
        reach it."""
        seeds = ", ".join(self.seeds) or "none"
        if self.seeds and self.listen is None:
            raise InvalidConfig(
                f"cannot tell which of the seeds ({seeds}) is this peer's address: pass the "
                "address with --listen tcp://host:port"
            )
        own = None if self.listen is None else values.endpoint(self.listen)
        is_seed = own is None or own in map(values.endpoint, self.seeds)
        if self.join and not self.seeds:
            raise InvalidConfig(
                "--join needs the addresses of the run's peers: pass the run's seeds with --seeds"
            )
        if self.join and is_seed:
            raise InvalidConfig(
                f"--join adds a peer that is not a seed, but this peer's address {self.listen} is "
                f"one of the seeds ({seeds}): leave out --join, or pass another address with "
                "--listen"
            )
        if not is_seed and not self.join:
            raise InvalidConfig(
                f"this peer's address {self.listen} is not one of the seeds ({seeds}): start all "
                "peers with the same --seeds, including this address, or pass --join to add this "
                "peer while the run is up",
                listen=self.listen,
                seeds=self.seeds,
            )
