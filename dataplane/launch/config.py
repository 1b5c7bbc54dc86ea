"""What one peer is started with, from arguments and the DATAPLANE_* variables.

| variable | meaning | default |
|---|---|---|
| DATAPLANE_RUN | the run's name, which is its plane's | see `runs` |
| DATAPLANE_PEER | the peer to attach to | the only one on this host |
| DATAPLANE_SEEDS | addresses of all peers, with commas; `dns://…`; `none` | `discovery`, `dns` |
| DATAPLANE_ROSTER | `etcd://host:port,host:port`: where the roster is kept | the first seed |
| DATAPLANE_ARENA | host memory for rows: `8GiB`, `512MiB`, bytes | a quarter of what is allowed |
| DATAPLANE_LINGER | seconds an embedded peer stays after its last client | 5; 300 with rows |
| DATAPLANE_RUN_DIR | sockets, locks and logs | see `rundir` |
| DATAPLANE_TOKEN_FILE | the cluster token, see `token` | none: loopback only |
| DATAPLANE_SPILL | `DIR[:SIZE]`: where values go when the arena is full, see `spill` | none |
| DATAPLANE_TRANSPORT | `auto`, `required:NAME`, `off:NAME,NAME`, `off`, see `transport` | auto |
| DATAPLANE_BULK_TLS | `1`: bytes between hosts go through TLS, see `bulk_tls` | 0 |
| DATAPLANE_METRICS | `HOST:PORT`: where Prometheus reads the peer's metrics, see `metrics` | off |
| DATAPLANE_DEVICE_ARENA | GPU memory for rows, of each GPU: `2GiB`, see `device` | none |
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from dataplane.errors import InvalidConfig, TokenMissing
from dataplane.launch.bulk_tls import check_bulk_tls
from dataplane.launch.dns import SCHEME, seeds_of
from dataplane.launch.token import Token, read_token
from dataplane.launch.transport import AUTO, TransportChoice

if TYPE_CHECKING:
    from dataplane.launch.device import DeviceMemory
    from dataplane.launch.metrics import MetricsAddress
    from dataplane.launch.rundir import Starter
    from dataplane.launch.spill import Spill

EMBEDDED = "embedded"
"""The name of a peer that `connect()` started; see `embedded_name`."""

LINGER_S = 5.0
LINGER_UNREAD_S = 300.0

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})/?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Everything that one peer needs to know before it starts.

    listen: `tcp://host:port`, None where no other peer exists. seeds: addresses of all peers in the
    plane's order, () for this host alone. linger_s, linger_unread_s: how long the peer stays after
    its last client left, without and with unread rows; None: until it is stopped. starter: who
    started it by `connect()`. token: what
    peers prove to each other with; without one they meet on loopback only. roster: `host:port` of
    etcd's servers, (): the first seed keeps the roster. join: this peer is no
    seed, it is let into a plane that runs. spill: where values go that the arena has no room for,
    if anywhere. metrics: where they are shown, if anywhere. transport: what may carry values
    between hosts. bulk_tls: values move between hosts through TLS or not at
    all. device_arena: memory of devices for rows, if any.
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
    spill: Spill | None = None
    metrics: MetricsAddress | None = None
    transport: TransportChoice = AUTO
    bulk_tls: bool = False
    device_arena: DeviceMemory | None = None

    @property
    def arena_name(self) -> str:
        """What the arena is called in /proc: alike for all lives of one peer, and for no other."""
        place = xxhash.xxh3_64_hexdigest(os.fsencode(self.run_dir.resolve()))
        return f"dataplane-{self.run}-{self.name}-{place}"

    def __post_init__(self) -> None:
        check_run(self.run)
        check_peer_name(self.name)
        for seed in self.seeds:
            parse_address(seed)
        if self.listen is not None:
            check_listen(self.listen, self.token)
        self._check_own_seed()
        if self.bulk_tls:
            check_bulk_tls(self.transport)
        if self.arena_bytes < MIN_ARENA_BYTES:
            raise InvalidConfig(
                f"an arena of {self.arena_bytes} bytes is too small: give at least "
                f"{MIN_ARENA_BYTES >> 20}MiB (--arena or DATAPLANE_ARENA)",
                arena_bytes=self.arena_bytes,
                minimum=MIN_ARENA_BYTES,
            )
        if self.arena_bytes > (allowed := allowed_memory_bytes()):
            raise InvalidConfig(
                f"an arena of {self.arena_bytes} bytes is more than the {allowed} bytes of memory "
                "that this host or cgroup allows: give less (--arena or DATAPLANE_ARENA)",
                arena_bytes=self.arena_bytes,
                allowed_bytes=allowed,
            )

    def _check_own_seed(self) -> None:
        """The other peers reach this one at its seed, so one of the seeds must be its address."""
        seeds = ", ".join(self.seeds) or "none"
        if self.seeds and self.listen is None:
            raise InvalidConfig(
                f"which of the seeds ({seeds}) is this peer? Say so with --listen tcp://host:port"
            )
        is_seed = self.listen is None or _endpoint(self.listen) in map(_endpoint, self.seeds)
        if self.join and (is_seed or not self.seeds):
            raise InvalidConfig(
                f"a peer that joins is none of the seeds ({seeds}): give it the seeds of the plane "
                "that runs, and --listen with an address of its own"
            )
        if not is_seed and not self.join:
            raise InvalidConfig(
                f"{self.listen} is not one of the seeds ({seeds}): name every peer of the plane "
                "in --seeds, this one too, alike for all of them, or add this one to a plane that "
                "runs with --join",
                listen=self.listen,
                seeds=self.seeds,
            )


MIN_ARENA_BYTES = 1 << 20


def parse_size(text: str) -> int:
    """Bytes of `8GiB`, `8G` (both binary), `8GB` (decimal), `1.5GiB`, `4096`."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InvalidConfig(f"{text!r} is not a size: write 8GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * unit)


def parse_seconds(text: str) -> float:
    """A duration of zero or more seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidConfig(f"{text!r} is not a duration: write a number of seconds")
    return seconds


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise InvalidConfig(f"{address!r} is not an address: write tcp://host:port")
    return match[1].strip("[]"), int(match[2])


def _endpoint(address: str) -> tuple[str, int]:
    host, port = parse_address(address)
    return "127.0.0.1" if host.lower() == "localhost" else host.lower(), port


def parse_roster(text: str) -> tuple[str, ...]:
    """`host:port` of each server of `etcd://host:port,host:port`; nothing: ()."""
    servers = tuple(one.strip() for one in text.removeprefix("etcd://").split(",") if one.strip())
    if text and not (text.startswith("etcd://") and servers):
        raise InvalidConfig(f"{text!r} keeps no roster: write etcd://host:port,host:port")
    for server in servers:
        parse_address(f"tcp://{server}")
    return servers


def parse_seeds(text: str) -> tuple[str, ...]:
    """Comma-separated addresses in the plane's order; `none` or nothing: (). Those that
    `dns://NAME:PORT/COUNT` has, which may take time: SeedsMissing."""
    if text.strip().lower() == "none":
        return ()
    if text.strip().startswith(SCHEME):
        return seeds_of(text)
    seeds = tuple(seed.strip() for seed in text.split(",") if seed.strip())
    for seed in seeds:
        parse_address(seed)
    return seeds


def check_listen(address: str, token: Token | None) -> None:
    """TokenMissing where other machines could reach the address and peers prove nothing.

    InvalidConfig for an address that stands for all of a host's: nobody can be reached there.
    """
    host, _ = parse_address(address)
    if is_loopback(host):
        return
    if token is None:
        raise TokenMissing(
            f"{address} can be reached from other machines, so its peers need a cluster token: "
            "make one, dataplane token > F (or head -c 32 /dev/urandom | base64 > F; chmod 600 F), "
            "and start every peer with --token-file F or DATAPLANE_TOKEN_FILE=F. Slurm: put F in "
            "the home directory that all nodes share; Ray: copy F to every node and name it in "
            "runtime_env's env_vars; Kubernetes: mount a Secret with defaultMode 0400. Peers of "
            "one machine need none on tcp://127.0.0.1:port",
            address=address,
        )
    if host in ("0.0.0.0", "::"):
        raise InvalidConfig(
            f"other peers cannot reach {address}: listen on this host's own name or address, the "
            "one that the seeds have",
            address=address,
        )


def is_loopback(host: str) -> bool:
    """Whether the host is this machine's loopback; names other than localhost are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_peer_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"{name!r} cannot name a peer: use up to 32 letters, digits, '.', '_' and '-'"
        )


def embedded_name(listen: str | None) -> str:
    """`embedded`, and in a plane of several hosts what tells it from those of the others."""
    if listen is None:
        return EMBEDDED
    host, _ = parse_address(listen)
    plain = f"{EMBEDDED}-{host}"
    digest = xxhash.xxh3_64_hexdigest(host.encode())
    return plain if _NAME.fullmatch(plain) else f"{EMBEDDED}-{digest}"


def is_embedded(name: str) -> bool:
    """Whether a peer of this name was started by `connect()`."""
    return name == EMBEDDED or name.startswith(f"{EMBEDDED}-")


def check_run(name: str) -> str:
    """The name, if it can be one; InvalidConfig otherwise."""
    named = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= 200
    if not named:
        raise InvalidConfig(f"{name!r} cannot name a run: use 1 to 200 printable characters")
    return name


def embedded_lingers(environ: Mapping[str, str] = os.environ) -> tuple[float, float]:
    """Seconds that an embedded peer stays after its last client, without and with unread rows:
    DATAPLANE_LINGER for both, or the defaults."""
    given = environ.get("DATAPLANE_LINGER")
    return (parse_seconds(given),) * 2 if given else (LINGER_S, LINGER_UNREAD_S)


def find_token(environ: Mapping[str, str] = os.environ) -> Token | None:
    """The token in DATAPLANE_TOKEN_FILE; None where that is not set."""
    given = environ.get("DATAPLANE_TOKEN_FILE")
    return read_token(given) if given else None


def default_arena_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """DATAPLANE_ARENA, or a quarter of the memory that the cgroup or the host allows."""
    given = environ.get("DATAPLANE_ARENA")
    return parse_size(given) if given else allowed_memory_bytes() // 4


def allowed_memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The smallest of the host's memory and the limits of this process's cgroups (v1 or v2)."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> list[int]:
    limits = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # Limits of the ancestors hold too. In a container the path may be the host's: then only
        # the root of the mount is there.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            text = _read(folder / name).strip()
            if text.isdigit():
                limits.append(int(text))
            if folder == base:
                break
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
