"""What one peer is started with, from arguments and the DATAPLANE_* variables.

| variable | meaning | default |
|---|---|---|
| DATAPLANE_PLANE | the plane's name | uid and job id, see `discovery` |
| DATAPLANE_PEER | the peer to attach to | the only one on this host |
| DATAPLANE_SEEDS | addresses of all peers, comma-separated; `none`: this host alone | `discovery` |
| DATAPLANE_ARENA | host memory for rows: `8GiB`, `512MiB`, bytes | a quarter of what is allowed |
| DATAPLANE_LINGER | seconds an embedded peer stays after its last client | 5; 300 with rows |
| DATAPLANE_RUN_DIR | sockets, locks and logs | see `rundir` |
| DATAPLANE_SPILL, DATAPLANE_TOKEN_FILE | reserved; refused, not ignored | |
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import InvalidConfig, ListenRefused

EMBEDDED = "embedded"
"""The name of a peer that `connect()` started."""

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
    its last client left, without and with unread rows; None: until it is stopped.
    """

    plane: str
    name: str
    listen: str | None
    seeds: tuple[str, ...]
    arena_bytes: int
    run_dir: Path
    linger_s: float | None = None
    linger_unread_s: float | None = None
    embedded: bool = False

    def __post_init__(self) -> None:
        check_plane(self.plane)
        check_peer_name(self.name)
        for seed in self.seeds:
            parse_address(seed)
        if self.listen is not None:
            check_listen(self.listen)
        self._check_own_seed()
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
        if self.listen is not None and _endpoint(self.listen) not in map(_endpoint, self.seeds):
            raise InvalidConfig(
                f"{self.listen} is not one of the seeds ({seeds}): name every peer of the plane "
                "in --seeds, this one too, alike for all of them",
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


def parse_seeds(text: str) -> tuple[str, ...]:
    """Comma-separated addresses in the plane's order; `none` or nothing: ()."""
    if text.strip().lower() == "none":
        return ()
    seeds = tuple(seed.strip() for seed in text.split(",") if seed.strip())
    for seed in seeds:
        parse_address(seed)
    return seeds


def check_listen(address: str) -> None:
    """ListenRefused unless the address is loopback: peers do not authenticate each other yet."""
    host, _ = parse_address(address)
    if not is_loopback(host):
        raise ListenRefused(
            f"{address} can be reached from other machines, and peers cannot authenticate each "
            "other without a cluster token, which this version does not have: listen on "
            "tcp://127.0.0.1:port",
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


def check_plane(plane: str) -> None:
    named = isinstance(plane, str) and plane.isprintable() and 0 < len(plane.encode()) <= 200
    if not named:
        raise InvalidConfig(f"{plane!r} cannot name a plane: use 1 to 200 printable characters")


def refuse_reserved(environ: Mapping[str, str] = os.environ) -> None:
    """Settings that promise what this version does not do are refused."""
    for name, what in (("DATAPLANE_SPILL", "spilling"), ("DATAPLANE_TOKEN_FILE", "tokens")):
        if environ.get(name):
            raise InvalidConfig(f"{name} is set, but this version has no {what} yet: unset it")


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
