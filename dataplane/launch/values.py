"""The values of settings, and how each is parsed from its text.

Parsing never reads variables: `settings` knows which text is meant, and its source. A text that
cannot be parsed raises InvalidConfig, which says what is expected. `str` of a value is a text
that parses to the same value.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import InvalidConfig, TokenMissing, sized
from dataplane.gpu import registry
from dataplane.launch.dns import SCHEME, seeds_of
from dataplane.launch.token import Token

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})/?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


MIN_BYTES = 1 << 20
"""The smallest arena, of a host or of a device, and the smallest spill file."""


def parse_size(text: str) -> int:
    """Parse a size in bytes: `8GiB`, `8G` (both binary), `8GB` (decimal), `1.5GiB`, `4096`."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InvalidConfig(
            f"{text!r} is not a valid size: use a size such as 8GiB or 512MiB, or a number of bytes"
        )
    return int(float(match[1]) * unit)


def check_size(what: str, setting: str, **size: int) -> None:
    """Raise InvalidConfig for a size below `MIN_BYTES`, which is the one detail in `size`."""
    (nbytes,) = size.values()
    if nbytes < MIN_BYTES:
        raise InvalidConfig(
            f"{what} of {sized(nbytes)} is too small: use at least {MIN_BYTES >> 20}MiB{setting}",
            **size,
            minimum=MIN_BYTES,
        )


def parse_yes(text: str) -> bool:
    """Parse 1, true, yes, on; or 0, false, no, off."""
    word = text.strip().lower()
    if word not in (*_YES, *_NO):
        raise InvalidConfig(f"{text!r} is not valid: use 1 or 0")
    return word in _YES


def parse_seconds(text: str) -> float:
    """Parse a duration of zero or more seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidConfig(f"{text!r} is not a valid duration: use a number of seconds, 0 or more")
    return seconds


def parse_lost_after(text: str) -> float:
    """Parse a duration of 1 to 29 seconds. A call must be able to continue at the backup before
    its deadline."""
    seconds = parse_seconds(text)
    if not 1 <= seconds <= 29:
        raise InvalidConfig(
            f"{text!r} is out of range: use a value from 1 to 29 seconds, because a failover must "
            "finish before a call times out after 30 s"
        )
    return seconds


def parse_address(address: str) -> tuple[str, int]:
    """Parse host and port of `tcp://host:port`."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise InvalidConfig(f"{address!r} is not a valid address: use tcp://host:port")
    return match[1].strip("[]"), int(match[2])


def endpoint(address: str) -> tuple[str, int]:
    host, port = parse_address(address)
    return "127.0.0.1" if host.lower() == "localhost" else host.lower(), port


def parse_roster(text: str) -> tuple[str, ...]:
    """Parse `host:port` of each server of `etcd://host:port,host:port`; an empty text is ()."""
    servers = tuple(one.strip() for one in text.removeprefix("etcd://").split(",") if one.strip())
    if text and not (text.startswith("etcd://") and servers):
        raise InvalidConfig(
            f"{text!r} is not a valid roster service: use etcd://host:port,host:port"
        )
    for server in servers:
        parse_address(f"tcp://{server}")
    return servers


def parse_seeds(text: str) -> tuple[str, ...]:
    """Parse comma-separated addresses in order; `none` or an empty text is (). Resolves
    `dns://NAME:PORT/COUNT`, which may take time and raise SeedsMissing."""
    if text.strip().lower() == "none":
        return ()
    if text.strip().startswith(SCHEME):
        return seeds_of(text)
    seeds = tuple(seed.strip() for seed in text.split(",") if seed.strip())
    for seed in seeds:
        parse_address(seed)
    return seeds


def check_listen(address: str, token: Token | None) -> None:
    """Check an address to listen on. Raises TokenMissing if other machines could reach it and
    there is no token, and InvalidConfig for a wildcard address, to which peers cannot connect."""
    host, _ = parse_address(address)
    if is_loopback(host):
        return
    if token is None:
        raise TokenMissing(
            f"{address} can be reached from other machines, so the peers need a cluster token. "
            "Create one with `dataplane token > F`, copy F to every host with mode 0600, and start "
            "every peer with --token-file F or DATAPLANE_TOKEN_FILE=F. With Ray, set the variable "
            "in runtime_env's env_vars. On Kubernetes, mount F as a Secret with defaultMode 0400. "
            "If all peers run on one machine, use tcp://127.0.0.1:port, which needs no token",
            address=address,
        )
    if host in ("0.0.0.0", "::"):
        raise InvalidConfig(
            f"{address} is a wildcard address, to which other peers cannot connect: listen on "
            "this host's own name or address, as it appears in the seeds",
            address=address,
        )


def is_loopback(host: str) -> bool:
    """Whether the host is this machine's loopback address. Only the name localhost is
    recognised."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_peer_name(name: str) -> str:
    """Return a valid peer name. Raises InvalidConfig otherwise."""
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"{name!r} is not a valid peer name: use up to 32 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return name


def check_run(name: str) -> str:
    """Return a valid run name. Raises InvalidConfig otherwise."""
    named = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= 200
    if not named:
        raise InvalidConfig(
            f"{name!r} is not a valid run name: use 1 to 200 bytes of printable text"
        )
    return name


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


# the transport

_CHOICE = re.compile(r"auto|off|required:([a-z0-9_-]+)|off:([a-z0-9_-]+(?:,[a-z0-9_-]+)*)")


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Which transports are allowed. required: the only one. off: the excluded ones. only_tcp: only
    TCP."""

    required: str | None = None
    off: frozenset[str] = frozenset()
    only_tcp: bool = False

    def __str__(self) -> str:
        if self.required:
            return f"required:{self.required}"
        if self.only_tcp:
            return "off"
        return "off:" + ",".join(sorted(self.off)) if self.off else "auto"

    def allows(self, name: str) -> bool:
        if self.required:
            return name == self.required
        return not self.only_tcp and name not in self.off


AUTO = TransportChoice()


def parse_transport(text: str) -> TransportChoice:
    """Parse a transport setting. Raises InvalidConfig for any other form."""
    match = _CHOICE.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidConfig(
            f"{text!r} is not a valid transport setting: use auto, off, required:NAME or "
            "off:NAME,NAME, for example required:nixl"
        )
    required, off = match.groups()
    if match[0] == "off" or required == "tcp":
        return TransportChoice(only_tcp=True)
    return TransportChoice(required, frozenset(off.split(",")) if off else frozenset())


# the spill file

ARENAS = 4
"""Without a SIZE: this many times the arena."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Spill:
    """The spill directory. base: the DIR that was given. size_bytes: the disk space that one
    peer may use; 0: `ARENAS` times its arena."""

    base: Path
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.base}:{self.size_bytes}" if self.size_bytes else str(self.base)

    def file_bytes(self, arena_bytes: int) -> int:
        """Return the spill file's size for an arena of this size, in whole pages."""
        nbytes = self.size_bytes or ARENAS * arena_bytes
        return nbytes // _PAGE_BYTES * _PAGE_BYTES

    def folder(self) -> Path:
        """The directory of the peer's file, created if missing. Raises InvalidConfig unless it
        is private."""
        path = self.base / f"dataplane-spill-{os.getuid()}"
        return private_dir(path, "spill", "--spill or DATAPLANE_SPILL")


def parse_spill(text: str) -> Spill:
    """Parse `/scratch` or `/scratch:500GiB`. Raises InvalidConfig if no file can be created
    there."""
    given, colon, size = text.rpartition(":")
    size_bytes = parse_size(size) if colon else 0
    base = Path(given if colon else text).absolute()
    if not base.is_dir():
        raise InvalidConfig(
            f"the spill directory {base} does not exist: create it, or choose another directory",
            path=str(base),
        )
    if colon:
        check_size("a spill size", "", size_bytes=size_bytes)
    spill = Spill(base, size_bytes)
    spill.folder()
    return spill


# metrics


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """An address for HTTP. host: a name, an address, or `0.0.0.0` or `::` for all addresses of
    the host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_http(text: str, use: str = "metrics", example: str = "127.0.0.1:9464") -> HttpAddress:
    """Parse `127.0.0.1:9464` or `[::]:9464`. Raises InvalidConfig for anything else, with its use
    and an example."""
    try:
        return HttpAddress(*parse_address(f"tcp://{text}"))
    except InvalidConfig:
        raise InvalidConfig(
            f"{text!r} is not a valid {use} address: use HOST:PORT, for example {example}"
        ) from None


def check_visible(what: str, at: HttpAddress, token: Token | None) -> None:
    """Raise TokenMissing if other machines can reach the address and there is no cluster token.

    Only a plane with a token is meant to be seen by other machines.
    """
    if token is None and not is_loopback(at.host):
        raise TokenMissing(
            f"{what} at {at} would be readable from other machines, but there is no cluster "
            "token: pass --token-file F or set DATAPLANE_TOKEN_FILE=F, or use a loopback address "
            f"(127.0.0.1:{at.port}), which an SSH tunnel can reach",
            address=str(at),
        )


# memory of devices

MAX_DEVICES = 16
_DEVICES = re.compile(r"(?P<kind>[a-z0-9_-]+)(@(?P<numbers>\d{1,3}(,\d{1,3})*))?")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory on devices. nbytes: of each device. kind: of the devices. numbers: of the chosen
    ones; () for all that the peer sees."""

    nbytes: int
    kind: str = registry.CUDA
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        numbers = f"@{','.join(map(str, self.numbers))}" if self.numbers else ""
        return f"{self.kind}{numbers}:{self.nbytes}"


def parse_device_arena(text: str) -> DeviceMemory:
    """Parse `2GiB` (that much of each GPU that the peer sees) or `cuda@0,2:2GiB` (of these two
    only). Raises InvalidConfig for anything else, and for a kind of device that is not
    installed."""
    given, colon, size = text.rpartition(":")
    devices = _DEVICES.fullmatch(given if colon else registry.CUDA)
    if devices is None or (colon and devices["kind"] not in registry.names()):
        raise InvalidConfig(
            f"{text!r} is not a valid device arena: pass a size that applies to each GPU (2GiB), "
            "or name the GPUs as well (cuda@0,2:2GiB)"
        )
    numbers = tuple(int(number) for number in (devices["numbers"] or "").split(",") if number)
    if len(numbers) > MAX_DEVICES:
        raise InvalidConfig(
            f"the device arena {text!r} lists {len(numbers)} devices: list at most {MAX_DEVICES}"
        )
    if len(set(numbers)) < len(numbers):
        raise InvalidConfig(
            f"the device arena {text!r} lists a device twice: list each device once"
        )
    memory = DeviceMemory(parse_size(size), devices["kind"], numbers)
    check_size("a device arena", "", nbytes=memory.nbytes)
    return memory


def private_dir(path: Path, what: str, setting: str, *, parents: bool = False) -> Path:
    """The directory, created if missing. Raises InvalidConfig unless it is private to the user.
    The message names its purpose `what` and the `setting` that selects another one."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=parents)
        found = path.lstat()
    except OSError as exc:
        raise InvalidConfig(
            f"cannot create the {what} directory {path}: {exc.strerror}. Set {setting} to a "
            "directory that this user can write to",
            path=str(path),
        ) from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidConfig(
            f"{path} must be a directory that belongs to uid {os.getuid()} and that no other user "
            f"can access, but it has mode {stat.filemode(found.st_mode)} and owner uid "
            f"{found.st_uid}: remove it, run `chmod 700 {path}`, or set {setting} to another "
            "directory",
            path=str(path),
        )
    return path
