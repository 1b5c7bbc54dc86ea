"""The run directory: sockets, locks and cards of the peers of this host and user.

It is `$DATAPLANE_RUN_DIR`, else `$XDG_RUNTIME_DIR/dataplane`, else `/tmp/dataplane-<uid>`, private
to the user. It has a folder for each run, with three files for each peer: `<name>.lock` (locked
with flock as long as the peer lives), `<name>.sock` and `<name>.json` (its card).

Other programs may remove these files: cleaners of /tmp, the logout that ends /run/user, `rm -r`.
A peer therefore also holds its name as an abstract socket, which is no file, and restores its
files (`PeerLock.restore`). It also locks the folder, which systemd-tmpfiles respects. A peer
that ends removes its folder, except a card and a log if rows or clients were lost. The next
start reads the card, and removes what is older than a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
"""The file that a process locks while it starts a run's embedded peer."""

_ENDED_BY = ".ended-by"
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 128
"""Connections that ask for the pid of a stopped peer and wait."""
MAX_PARTITIONS = 64
"""Names of partitions on a card: the latest ones."""
_NAME_BYTES = 32 + len(".sock")
_CLAIM_PATIENCE_S = 0.2
_LOOK_S = 0.02


class Starter(msgspec.Struct, frozen=True):
    """The process that started an embedded peer: its launch (a launcher's run, or the name of
    its unnamed run), the process, and its command for messages. fresh: started by
    connect(fresh=True). process, parent: pid and start time, which identify a process."""

    launch: str
    process: str
    pid: int
    command: str
    fresh: bool = False
    parent: str = ""


class Card(msgspec.Struct, frozen=True):
    """The contents of `<name>.json`.

    began_s: on the clock that all processes of a host share. starter: None for a peer that was
    started by hand. rows: in its shards when this was written. ended: why the peer ended; "" while
    it lives, or if it was killed. partitions: the latest that its clients declared, for messages to
    clients of other runs. before: the rows of the previous peer of this name, if it was killed or
    ended with rows or clients. before_s: the age of that when this peer began.
    """

    name: str
    pid: int
    run: str
    version: str
    began_s: float
    address: str | None = None
    starter: Starter | None = None
    rows: int = 0
    ended: str = ""
    partitions: list[str] = []
    before: Card | None = None
    before_s: float = 0.0

    @property
    def age_s(self) -> float:
        return _host_clock_s() - self.began_s


_cards = msgspec.json.Decoder(Card)
_starters = msgspec.json.Decoder(Starter)


@dataclass(frozen=True, slots=True)
class LivingPeer:
    """A peer whose lock is held. `card` is None in the moments before it is written."""

    name: str
    socket: Path
    card: Card | None


@dataclass(frozen=True, slots=True)
class DeadPeer:
    """A peer that has ended and left its card. age_s: seconds since the card was written."""

    card: Card
    folder: Path
    age_s: float


def run_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The run directory, created if missing. Raises InvalidConfig unless it is private to the
    user."""
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
    """The folder of a run in the run directory, created if missing."""
    base = run_dir() if base is None else _private(base)
    return _private(folder_of(plane, base))


def folder_of(plane: str, base: Path) -> Path:
    """The path of a run's folder. Long or odd names become a hash of 12 digits."""
    check_run(plane)
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(base)) - _NAME_BYTES - 2
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", plane) and len(plane) <= room
    folder = plane if plain else f"~{xxhash.xxh3_64_hexdigest(plane.encode())[:12]}"
    if len(folder) > room:
        raise InvalidConfig(
            f"the path of the run directory {base} is too long for a Unix socket: set "
            f"DATAPLANE_RUN_DIR to a path of at most {MAX_SOCKET_PATH_BYTES - _NAME_BYTES - 15} "
            "bytes"
        )
    return base / folder


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
        """The age of its oldest peer in seconds."""
        return max((peer.card.age_s for peer in self.peers if peer.card), default=0.0)

    @property
    def starter(self) -> Starter | None:
        """The process that started it, or None if it was started by hand."""
        cards = [peer.card for peer in self.peers if peer.card]
        return min(cards, key=lambda card: card.began_s).starter if cards else None


Find = Callable[[], tuple[str, LivingPeer]]
"""Returns the run of a command, and the peer that it asks. Raises PeerNotFound or PeerAmbiguous."""


class PeerLock:
    """A peer's name, held until `release` or the end of the process.

    Three things are held: the flock of `<name>.lock`, which shows other processes that the peer
    lives; the abstract socket `announced`, which no program can remove; and a shared flock of
    the folder.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        fd: int,
        run: str,
        starter: Starter | None = None,
        announced: socket.socket | None = None,
        before: DeadPeer | None = None,
    ) -> None:
        self.folder, self.name = folder, name
        self.socket_path = folder / f"{name}.sock"
        self.card_path = folder / f"{name}.json"
        self._card = Card(name, os.getpid(), run, __version__, _host_clock_s(), None, starter)
        if before is not None:
            card = msgspec.structs.replace(before.card, before=None)
            self._card = msgspec.structs.replace(self._card, before=card, before_s=before.age_s)
        self._fd, self._folder_fd = fd, _lock_folder(folder)
        self._announced = announced
        self._writing = threading.Lock()
        self.notes = 0
        """how often `note` was called"""
        _held.add(self)

    def write_card(self, address: str | None) -> None:
        """Write the card, which tells other processes of this host the peer's identity and
        address."""
        self._write(msgspec.structs.replace(self._card, address=address))

    def note(self, rows: int, partitions: Sequence[str], since: int | None = None) -> None:
        """Note how many rows the peer has, so that the next peer can report them if this one is
        killed, and which partitions its clients declared, the latest last. Any thread may call it.
        since: the value of `notes` when the rows were counted. A count that is older than the
        latest note changes nothing."""
        with self._writing:
            if since is not None and since != self.notes:
                return
            self.notes += 1
            card = msgspec.structs.replace(
                self._card, rows=rows, partitions=list(partitions)[-MAX_PARTITIONS:]
            )
            if card != self._card:
                self._write(card)

    def _write(self, card: Card) -> None:
        draft = self.folder / f".{self.name}.json"
        draft.write_bytes(msgspec.json.encode(card))
        draft.replace(self.card_path)
        self._card = card

    def restore(self) -> list[str]:
        """Restore the folder, the lock and the card if another program has removed them, and return
        their names.

        Raises OSError or InvalidConfig if that is not possible now, and PeerNameTaken if another
        living peer has the name.
        """
        self._hang_up()
        missing = []
        if not _is_at(self._folder_fd, self.folder):
            _private(self.folder.parent)
            _private(self.folder)
            missing.append(str(self.folder))
            os.close(self._folder_fd)
            self._folder_fd = _lock_folder(self.folder)
        lock_path = self.folder / f"{self.name}.lock"
        if not _is_at(self._fd, lock_path):
            if (fd := try_lock(lock_path)) is None:
                raise _taken(self.folder, self.name)
            missing.append(lock_path.name)
            os.close(self._fd)
            self._fd = fd
        with self._writing:
            if not self.card_path.exists():
                missing.append(self.card_path.name)
                self._write(self._card)
        return missing

    def _hang_up(self) -> None:
        """Close connections to the abstract socket, whose only purpose is to tell the pid."""
        with contextlib.suppress(OSError):
            while self._announced is not None:
                self._announced.accept()[0].close()

    def word(self) -> str:
        """The process that is ending this peer, as `write_ended_by` wrote it, or ""."""
        return _ended_by(self.folder, self.name)

    def release(self, ended: str = "") -> None:
        """Remove the peer's files and release its name. Its card is kept if `ended` says why it
        ended with rows or clients."""
        if self._fd >= 0:
            if ended:
                with contextlib.suppress(OSError):
                    self._write(msgspec.structs.replace(self._card, ended=ended))
            _remove_files(self.folder, self.name, card=not ended)
            self._close()

    def _close(self) -> None:
        for fd in (self._fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._folder_fd = -1
        if self._announced is not None:
            self._announced.close()
            self._announced = None


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
    its card, because a folder with a long or odd run name has a hash as its name.

    Raises PeerNameTaken if a living process has the name.
    """
    check_peer_name(name)
    deadline = time.monotonic() + _CLAIM_PATIENCE_S
    while (held := _try_name(folder, name)) is None:
        # A process that only checks who lives holds the lock for microseconds.
        if time.monotonic() > deadline:
            raise _taken(folder, name)
        time.sleep(0.005)
    fd, announced = held
    before = _dead_peer(folder, name)
    _remove_files(folder, name, lock=False)
    _sweep(folder, besides=name)
    run = folder.name if run is None else run
    lock = PeerLock(folder, name, fd, run, starter, announced, before)
    lock.write_card(None)
    return lock


def _try_name(folder: Path, name: str) -> tuple[int, socket.socket | None] | None:
    """Return the lock and the abstract socket of a name; None if a living peer holds one of
    them."""
    fd = try_lock(folder / f"{name}.lock")
    if fd is None:
        return None
    announced = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        announced.bind(_announced_at(folder, name))
        announced.listen(_BACKLOG)
    except OSError:
        announced.close()
        if holder(folder, name) is not None:
            os.close(fd)
            return None
        return fd, None  # another user took the name: abstract names have no owner
    return fd, announced


def _taken(folder: Path, name: str) -> PeerNameTaken:
    pid = holder(folder, name)
    return PeerNameTaken(
        f"this host already has a live peer named {name!r}{f' (pid {pid})' if pid else ''} in this "
        "run: stop it, or choose another --name or --run",
        name=name,
        pid=pid,
    )


def _announced_at(folder: Path, name: str) -> str:
    """Return the abstract socket of a peer's name. Containers that share a network but not the run
    directory get different ones."""
    try:
        mounts = os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        mounts = 0
    place = f"{mounts}-{folder.absolute()}-{name}"
    return f"\0dataplane-{os.getuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(place))}"


def holder(folder: Path, name: str) -> int | None:
    """The pid of the living peer of this name, even if its files are gone. 0 if its process is
    in another pid namespace, None if no such peer is found."""
    for path in (_announced_at(folder, name), str(folder / f"{name}.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(path)
            except BlockingIOError:  # the peer is stopped, so its queue is full
                if (pid := _listener(path)) is not None:
                    return pid
                continue
            except OSError:
                continue
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid == os.getuid():
            return int(pid)
    return None


def _listener(path: str) -> int | None:
    """The pid of this user's process that listens at a unix socket. It need not accept."""
    shown, inodes = path.replace("\0", "@"), set[str]()
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split(maxsplit=7)
        if fields[7:] == [shown]:
            inodes.add(f"socket:[{fields[6]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's process, or one that has exited
            is_ours = process.stat().st_uid == os.getuid()
            if is_ours and any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _ended_by(folder: Path, name: str) -> str:
    try:
        return (folder / f"{name}{_ENDED_BY}").read_text()
    except OSError:
        return ""


def write_ended_by(peer: LivingPeer, who: str) -> None:
    """Record which process is about to end a peer, for its log and its clients."""
    with contextlib.suppress(OSError):
        path = peer.socket.with_name(f"{peer.name}{_ENDED_BY}")
        path.touch(0o600)
        path.write_text(who)


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
    """The living peers of a run, by name."""
    living = []
    for path in _files(folder, ".lock"):
        name = path.name.removesuffix(".lock")
        # A shared lock: two processes that check at once do not take each other for a peer.
        if not _can_lock(path, os.O_RDWR | os.O_NOFOLLOW, fcntl.LOCK_SH):
            living.append(LivingPeer(name, folder / f"{name}.sock", read_card(folder, name)))
    return living


def dead_peers(folder: Path) -> list[DeadPeer]:
    """The peers of a run that have ended and left their cards, the latest first."""
    living = {peer.name for peer in living_peers(folder)}
    names = [path.stem for path in _files(folder, ".json") if path.stem not in living]
    dead = [one for name in names if (one := _dead_peer(folder, name)) is not None]
    return sorted(dead, key=lambda one: one.age_s)


def _dead_peer(folder: Path, name: str) -> DeadPeer | None:
    """Return the card of the last peer of this name, if none lives."""
    card = read_card(folder, name)
    if card is None:
        return None
    if not card.ended and (word := _ended_by(folder, name)):
        card = msgspec.structs.replace(card, ended=f"killed by {word}")
    try:
        age_s = max(0.0, time.time() - (folder / f"{name}.json").stat().st_mtime)
    except OSError:
        return None
    return DeadPeer(card, folder, age_s)


def abandoned(base: Path) -> list[Path]:
    """The folders of runs without peers, left by crashes, ended runs and earlier boots."""
    return [one for one in sorted(base.iterdir()) if one.is_dir() and not is_inhabited(one)]


def is_living(peer: LivingPeer) -> bool:
    """Whether a peer that was seen before still has its name."""
    return peer.name in [one.name for one in living_peers(peer.socket.parent)]


def remove(folder: Path) -> bool:
    """Remove the folder of a run without peers, unless another process is about to start one
    there."""
    fd = try_lock(folder / STARTING)
    if fd is None:
        return False
    try:
        if is_inhabited(folder):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
    return not folder.exists()


def is_inhabited(folder: Path) -> bool:
    """Whether a peer lives in this folder, even if its files there are gone."""
    until = time.monotonic() + _LOOK_S
    while not living_peers(folder):
        if _can_lock(folder, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX):
            return False
        if time.monotonic() > until:
            return True  # else the holder may be another check
        time.sleep(0.001)
    return True


def _lock_folder(folder: Path) -> int:
    """Return a descriptor that holds the folder's shared lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)  # `is_inhabited` has it for microseconds
    return fd


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def try_lock(path: Path) -> int | None:
    """Return a descriptor with the file's exclusive lock, or None if another process has it."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the run's last peer removed the folder
            _private(path.parent)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # Its last holder may have removed the file between our open and our lock.
        if _is_at(fd, path):
            return fd
        os.close(fd)


def parse_starter(text: str) -> Starter:
    """Parse the starter from the command line of a peer."""
    try:
        return _starters.decode(text)
    except msgspec.MsgspecError as exc:
        raise InvalidConfig(
            f"--starter {text!r} is not valid: {exc}. This option is "
            "for internal use by connect(): leave it out"
        ) from exc


def _host_clock_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _can_lock(path: Path, flags: int, how: int) -> bool:
    """Whether no process has a lock of the file or folder that excludes this one."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _sweep(folder: Path, besides: str) -> None:
    """Remove the files of every dead peer of the plane."""
    names = {path.stem for suffix in (".sock", ".lock") for path in _files(folder, suffix)}
    for name in names - {besides}:
        fd = try_lock(folder / f"{name}.lock")
        if fd is not None:
            _remove_files(folder, name)
            os.close(fd)


def _remove_files(folder: Path, name: str, *, lock: bool = True, card: bool = True) -> None:
    """Remove the files of a peer. Only for the holder of the name's lock."""
    leftovers = [f"{name}.sock", f".{name}.json", f"{name}{_ENDED_BY}"]
    leftovers += [f"{name}.json"] if card else []
    for leftover in [*leftovers, f"{name}.lock"] if lock else leftovers:
        (folder / leftover).unlink(missing_ok=True)


def _files(folder: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix, by name. A folder that its last peer has just removed has
    none."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except FileNotFoundError:
        return []


def read_card(folder: Path, name: str) -> Card | None:
    """Return the card of a peer. None if it has none that can be read."""
    try:
        return _cards.decode((folder / f"{name}.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
