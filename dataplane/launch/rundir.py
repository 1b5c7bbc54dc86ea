"""The run directory: sockets, locks and cards of the peers of this host and user.

`$DATAPLANE_RUN_DIR`, else `$XDG_RUNTIME_DIR/dataplane`, else `/tmp/dataplane-<uid>`; private to the
user. In it a folder for each run, and in that, for each peer, `<name>.lock` (held by flock while
the peer lives: that is what living means), `<name>.sock` and `<name>.json` (its card). What dead
peers left is removed by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from dataplane.errors import InvalidConfig, PeerNameTaken
from dataplane.launch import settings
from dataplane.launch.values import check_peer_name, check_run, private_dir
from dataplane.version import __version__

MAX_SOCKET_PATH_BYTES = 99
"""Linux takes 107; other systems 103."""

STARTING = ".starting"
"""The file whose lock one holds who starts a run's embedded peer."""

_NAME_BYTES = 32 + len(".sock")
_CLAIM_PATIENCE_S = 0.2


class Starter(msgspec.Struct, frozen=True):
    """Who started an embedded peer: its launch (a launcher's run, else the process group), the
    process, and the command that a person would know it by. fresh: to begin the run anew."""

    launch: str
    process: str
    pid: int
    command: str
    fresh: bool = False


class Card(msgspec.Struct, frozen=True):
    """What `<name>.json` says of a living peer. began_s: on the clock that all processes of a host
    share. starter: None for a peer that was started by hand."""

    name: str
    pid: int
    run: str
    version: str
    began_s: float
    address: str | None = None
    starter: Starter | None = None

    @property
    def age_s(self) -> float:
        return _host_clock_s() - self.began_s


_cards = msgspec.json.Decoder(Card)
_starters = msgspec.json.Decoder(Starter)


@dataclass(frozen=True, slots=True)
class LivingPeer:
    """A peer whose lock is held. `card` is None in the moments before it was written."""

    name: str
    socket: Path
    card: Card | None


def run_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The run directory, made if missing; InvalidConfig unless it is private to the user."""
    given: Path | None = settings.of_variable("run-dir", environ)
    runtime = environ.get("XDG_RUNTIME_DIR")
    if given is not None:
        path = given
    elif runtime and os.access(runtime, os.W_OK | os.X_OK):
        path = Path(runtime) / "dataplane"
    else:
        path = Path("/tmp") / f"dataplane-{os.getuid()}"
    return _private(path)


def plane_dir(plane: str, base: Path | None = None) -> Path:
    """The folder of a run in the run directory. Long or odd names become a hash of 12 digits."""
    check_run(plane)
    base = run_dir() if base is None else _private(base)
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(base)) - _NAME_BYTES - 2
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", plane) and len(plane) <= room
    folder = plane if plain else f"~{xxhash.xxh3_64_hexdigest(plane.encode())[:12]}"
    if len(folder) > room:
        raise InvalidConfig(
            f"the run directory {base} is too long for the path of a socket: set "
            f"DATAPLANE_RUN_DIR to one of at most {MAX_SOCKET_PATH_BYTES - _NAME_BYTES - 15} bytes"
        )
    return _private(base / folder)


def _private(path: Path) -> Path:
    return private_dir(path, "run", "DATAPLANE_RUN_DIR", parents=True)


@dataclass(frozen=True, slots=True)
class LivingRun:
    """A run with living peers on this host, by name."""

    name: str
    folder: Path
    peers: list[LivingPeer]

    @property
    def age_s(self) -> float:
        """Since the oldest of its peers began."""
        return max((peer.card.age_s for peer in self.peers if peer.card), default=0.0)

    @property
    def starter(self) -> Starter | None:
        """Who began it; None where that was done by hand."""
        cards = [peer.card for peer in self.peers if peer.card]
        return min(cards, key=lambda card: card.began_s).starter if cards else None


class PeerLock:
    """A peer's name, held until `release` or the end of the process."""

    def __init__(
        self, folder: Path, name: str, fd: int, run: str, starter: Starter | None = None
    ) -> None:
        self.folder, self.name = folder, name
        self._run, self._starter, self._began_s = run, starter, _host_clock_s()
        self.socket_path = folder / f"{name}.sock"
        self.card_path = folder / f"{name}.json"
        self._fd = fd
        _held.add(self)

    def __repr__(self) -> str:
        return f"<PeerLock {self.name} {'released' if self._fd < 0 else 'held'} in {self.folder}>"

    def write_card(self, address: str | None) -> None:
        """Tell other processes of this host who this peer is and where it listens."""
        draft = self.folder / f".{self.name}.json"
        who = self.name, os.getpid(), self._run, __version__, self._began_s
        draft.write_bytes(msgspec.json.encode(Card(*who, address, self._starter)))
        draft.replace(self.card_path)

    def release(self) -> None:
        """Remove the peer's files and give the name back."""
        if self._fd >= 0:
            _remove_files(self.folder, self.name)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# A forked child would keep its parent's name alive after the parent's death.
_held: weakref.WeakSet[PeerLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_let_go_in_child)


def claim_name(
    folder: Path, name: str, run: str | None = None, starter: Starter | None = None
) -> PeerLock:
    """Become the peer of this name, and remove what dead peers of the run left. run, starter: for
    its card; a folder has its run's name unless that is long or odd.

    Raises PeerNameTaken where a living process has it.
    """
    check_peer_name(name)
    deadline = time.monotonic() + _CLAIM_PATIENCE_S
    while (fd := try_lock(folder / f"{name}.lock")) is None:
        # Somebody who only asks who lives holds the lock for microseconds.
        if time.monotonic() > deadline:
            card = _read_card(folder, name)
            raise PeerNameTaken(
                f"a living peer{f' (pid {card.pid})' if card else ''} of this run is named "
                f"{name!r} on this host: stop it, or choose another --name or --run",
                name=name,
                pid=card.pid if card else None,
            )
        time.sleep(0.005)
    _remove_files(folder, name, lock=False)
    _sweep(folder, besides=name)
    lock = PeerLock(folder, name, fd, folder.name if run is None else run, starter)
    lock.write_card(None)
    return lock


def living_runs(base: Path | None = None) -> list[LivingRun]:
    """The runs of this user that have living peers on this host, the oldest first."""
    base = run_dir() if base is None else base
    runs = []
    for folder in base.iterdir():
        if folder.is_dir() and (peers := living_peers(folder)):
            cards = [peer.card for peer in peers if peer.card]
            runs.append(LivingRun(cards[0].run if cards else folder.name, folder, peers))
    return sorted(runs, key=lambda run: (-run.age_s, run.name))


def living_peers(folder: Path) -> list[LivingPeer]:
    """The peers of a run whose processes live, by name."""
    living = []
    for path in sorted(folder.glob("*.lock")):
        name = path.name.removesuffix(".lock")
        if not _is_free(path):
            living.append(LivingPeer(name, folder / f"{name}.sock", _read_card(folder, name)))
    return living


def remove(folder: Path) -> bool:
    """Remove the folder of a run without peers, unless somebody is about to start one there."""
    fd = try_lock(folder / STARTING)
    if fd is None:
        return False
    try:
        if living_peers(folder):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
    return not folder.exists()


def seen_again(folder: Path, peer: LivingPeer) -> LivingPeer:
    """A peer with its card, which it may have written since it was seen."""
    return replace(peer, card=_read_card(folder, peer.name) or peer.card)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the file's exclusive lock, or None where somebody else does."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder went with the last peer of its run
            _private(path.parent)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # Its last holder may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


def parse_starter(text: str) -> Starter:
    """What the command line of a peer says of its starter."""
    try:
        return _starters.decode(text)
    except msgspec.MsgspecError as exc:
        raise InvalidConfig(f"{text!r} is no starter: {exc}; only connect() says it") from exc


def _host_clock_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_free(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        # Shared, so that two that ask at once do not take each other for a peer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _sweep(folder: Path, besides: str) -> None:
    """Remove the files of every dead peer of the plane."""
    names = {path.stem for path in folder.glob("*.sock")} | {p.stem for p in folder.glob("*.lock")}
    for name in names - {besides}:
        fd = try_lock(folder / f"{name}.lock")
        if fd is not None:
            _remove_files(folder, name)
            os.close(fd)


def _remove_files(folder: Path, name: str, lock: bool = True) -> None:
    """Only for the holder of the name's lock."""
    leftovers = [f"{name}.sock", f"{name}.json", f".{name}.json"]
    for leftover in [*leftovers, f"{name}.lock"] if lock else leftovers:
        (folder / leftover).unlink(missing_ok=True)


def _read_card(folder: Path, name: str) -> Card | None:
    try:
        return _cards.decode((folder / f"{name}.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
