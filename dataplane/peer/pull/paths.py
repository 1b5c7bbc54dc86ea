"""Which transport brings values from each other peer, to the arena and to devices here, and why.

A transport is tried with every peer that is read from for the first time, on bytes that both know
(`sampling`), against the plain way that is always there: TCP between arenas, and between devices
the way through both of them. The plain way carries the values while that is not known, and where
the other one is slower, fails, or later breaks off; each is logged and stands in the stats. Where a
transport is required nothing else is used, and what does not work is an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from dataplane.errors import DataplaneError, TransportMissing, Unavailable
from dataplane.launch.values import TransportChoice
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.sampling import ROUNDS, Sampling, Trial
from dataplane.transport import registry
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import CUDA_IPC, DEVICE_ONLY, TCP
from dataplane.transport.seam import Remote
from dataplane.transport.tickets import new_identity
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

STAGED = "host arena"
"""The plain way from device to device: to the owner's host arena, and from there as all values."""
REQUIRED_S = 15.0
"""How long a first pull waits to know whether the transport that is required works."""
FIRST_S = 5.0
"""... and how long for devices where none is: the plain way takes room in both arenas."""
AGAIN_S = 120.0
"""After this the way that failed, in a trial or later, is tried again."""


@dataclass(slots=True)
class Path:
    """From one peer to this one. settled: else it is tried again, at `again_s`."""

    transport: str
    why: str
    trials: dict[str, Trial] = field(default_factory=dict)
    settled: bool = True
    again_s: float = math.inf

    def shown(self) -> dict[str, Any]:
        trials = {name: trial.shown() for name, trial in self.trials.items()}
        return {"transport": self.transport, "why": self.why, "tried": trials}


class Paths:
    """plain: the way that is always there. moves: what goes these ways, for the log."""

    def __init__(
        self, mesh: Mesh, sampling: Sampling, choice: TransportChoice, plain: str, moves: str
    ) -> None:
        self.mesh = mesh
        self.sampling = sampling
        self.choice = choice
        self.engine: BulkEngine | None = None
        self._plain = plain
        self._moves = moves
        self._paths: dict[Owner, Path] = {}
        self._trying: dict[Owner, asyncio.Task[None]] = {}
        self._remotes: dict[Owner, Remote] = {}
        mesh.others.on_away.append(self._gone)

    @property
    def required(self) -> bool:
        """Whether the plain way is none."""
        return bool(self.choice.required)

    async def _take(
        self, source: Remote, first_s: float, tried: Callable[[], Coroutine[Any, Any, Path]]
    ) -> str:
        """The way from a peer. first_s: how long to wait for it to be known. TransportMissing where
        the one that is required does not work."""
        owner = source.owner
        path = self._paths.get(owner)
        if path is None or self._now() >= path.again_s:
            self._remotes[owner] = source
            if owner not in self._trying:
                self._trying[owner] = self.mesh.spawn(self._try(owner, tried))
                self._trying[owner].add_done_callback(lambda _: self._trying.pop(owner, None))
            if path is None and first_s:
                await asyncio.wait({self._trying[owner]}, timeout=first_s)
            path = path or self._paths.get(owner)
            path = path or Path(self._plain, "trying it was not done in time")
        if self.required and path.transport == self._plain:
            raise TransportMissing(
                f"--transport {self.choice}: it does not bring {self._moves} of peer "
                f"{owner.peer!r}: {path.why}",
                transport=self.choice.required,
                peer=owner.peer,
            )
        return path.transport

    async def _try(self, owner: Owner, tried: Callable[[], Coroutine[Any, Any, Path]]) -> None:
        try:
            path = await tried()
        except DataplaneError as exc:
            path = Path(self._plain, f"it could not be tried: {exc.message}", settled=False)
        if owner in self._remotes:  # else it went meanwhile
            self._set(owner, path)

    def _set(self, owner: Owner, path: Path) -> None:
        self._paths[owner] = path
        if not path.settled:
            path.again_s = self._now() + AGAIN_S
        tell = log.info if path.transport != self._plain else log.warning
        peer, transport = self.mesh.others.name(owner.peer), path.transport
        says = "%s of peer %s at %s come over %s: %s"
        tell(says, self._moves, peer, owner.peer, transport, path.why)

    def failed(self, owner: Owner, transport: str, error: DataplaneError) -> str:
        """A read broke off: what to repeat it with."""
        path = self._paths.get(owner)
        if transport == self._plain or path is None or self.required:
            return transport
        if path.transport != self._plain:
            why = f"{transport} failed: {error.message}"
            self._set(owner, Path(self._plain, why, path.trials, settled=False))
        return self._plain

    def shown(self) -> dict[str, Any]:
        """By peer, what is used and why."""
        return {owner.peer: path.shown() for owner, path in self._paths.items()}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _gone(self, owner: Owner) -> None:
        self._paths.pop(owner, None)
        remote = self._remotes.pop(owner, None)
        if remote is not None and self.engine is not None:
            self.engine.forget(remote)


class ArenaPaths(Paths):
    """To the host arena."""

    def __init__(self, mesh: Mesh, sampling: Sampling, choice: TransportChoice) -> None:
        super().__init__(mesh, sampling, choice, TCP, "values")

    @property
    def own(self) -> str:
        """The engine that this peer's workers run beside TCP; `tcp`: none."""
        return self.engine.transport if self.engine is not None else TCP

    async def take(self, source: Remote) -> str:
        """The transport for a bulk read. TransportMissing."""
        if self.own == TCP:
            return TCP

        async def tried() -> Path:
            return (await self.tried(source))[0]

        return await self._take(source, REQUIRED_S if self.required else 0.0, tried)

    def stats(self) -> dict[str, Any]:
        """Requested, what runs, and what is used with each peer."""
        return {
            "requested": str(self.choice),
            "runs": self.own,
            "missing": self.engine.missing if self.engine is not None else "",
            "tls": self.engine is not None and bool(self.engine.fingerprint),
            "peers": self.shown(),
        }

    async def tried(self, source: Remote) -> tuple[Path, dict[str, Any]]:
        """Tries the ways from a peer anew: what would be chosen, and what it says of itself."""
        assert self.engine is not None
        sampled = await self.sampling.ask(source.owner.peer)
        about = {
            "version": sampled.version,
            "requested": sampled.requested,
            "runs": sampled.transport,
            "missing": sampled.missing,
            "tls": bool(source.fingerprint),
            "arena_bytes": sampled.arena_bytes,
        }
        both = self.own == sampled.transport != TCP
        names = [TCP, self.own] if both else [TCP]
        trials = await self.sampling.try_all(self.engine, source, sampled, names)
        return chosen(self.own, sampled.transport, trials, self.required), about


class DevicePaths(Paths):
    """To devices here. The transports that this peer's device workers run are tried in the order in
    which they are best: within a host the GPUs copy themselves, and need be compared with nothing.
    """

    def __init__(self, mesh: Mesh, sampling: Sampling, choice: TransportChoice) -> None:
        super().__init__(mesh, sampling, choice, STAGED, "values on devices")
        self.runs: list[str] = []
        """what the device workers here run, best first"""

    @property
    def required(self) -> bool:
        return self.choice.required in DEVICE_ONLY

    async def take(self, source: Remote, staged: Remote, number: int) -> str:
        """What brings values to the device of this number. staged: the worker for the owner's host
        arena. TransportMissing."""
        first_s = REQUIRED_S if self.required else FIRST_S
        return await self._take(source, first_s, lambda: self.tried(source, staged, number))

    async def tried(self, source: Remote, staged: Remote, number: int) -> Path:
        """Tries the ways anew: the first that works and is faster than the host arenas are."""
        assert self.engine is not None and self.sampling.engine is not None
        sampled = await self.sampling.ask(source.owner.peer, device=True)
        trials: dict[str, Trial] = {}
        for name in self.runs:
            free = name == CUDA_IPC or bool(self.choice.required)
            rounds = 1 if free else ROUNDS
            tried = await self.sampling.try_all(
                self.engine, source, sampled, [name], number, rounds
            )
            if not tried:
                return Path(STAGED, "one of the two has no room to try it", trials, settled=False)
            trials |= tried
            if tried[name].exact and free:
                return Path(name, f"{tried[name].GBps:.2f} GB/s, self-test passed", trials)
            if tried[name].exact:
                if STAGED not in trials:
                    # as fast as it is when the owner's host arena has them already
                    tcp = await self.sampling.try_all(self.sampling.engine, staged, sampled, [TCP])
                    trials[STAGED] = tcp.get(TCP, Trial())
                compared = (
                    f"{name} {tried[name].GBps:.2f} GB/s, by way of the host "
                    f"{trials[STAGED].GBps:.2f} GB/s at most"
                )
                if tried[name].GBps >= trials[STAGED].GBps:
                    return Path(name, compared, trials)
        return Path(STAGED, _why_not(trials), trials, settled=False)


def _why_not(trials: dict[str, Trial]) -> str:
    """Of each that was tried, why it is not used."""
    if not trials:
        return "this peer runs no transport that moves device memory between hosts"
    reasons = []
    for name, trial in trials.items():
        if name != STAGED:
            slow = f"{trial.GBps:.2f} GB/s is slower than by way of the host"
            reasons.append(f"{name}: {trial.error or slow}")
    return "; ".join(reasons)


def chosen(own: str, theirs: str, trials: dict[str, Trial], required: bool = False) -> Path:
    """The path that the trials speak for; one that is required may be slower than TCP."""
    if own == TCP:
        return Path(TCP, "this peer runs no other transport", trials)
    if theirs != own:
        return Path(TCP, f"this peer runs {own}, the other one {theirs}", trials)
    if not trials:
        why = "one of the two has no room to try it"
        return Path(own if required else TCP, why, settled=False)
    engine, tcp = trials[own], trials[TCP]
    if engine.error:
        return Path(TCP, f"{own} does not work: {engine.error}", trials, settled=False)
    compared = f"{own} {engine.GBps:.2f} GB/s, tcp {tcp.GBps:.2f} GB/s"
    if engine.GBps < tcp.GBps and not required:
        return Path(TCP, f"{own} is slower than tcp: {compared}", trials)
    return Path(own, compared, trials)


def candidates(choice: TransportChoice) -> list[str]:
    """Transports to start bulk workers with, best first. TransportMissing, without starting any."""
    if choice.required in registry.DEVICE_ONLY:
        return [TCP]
    if choice.required:
        if why := registry.missing(choice.required):
            raise TransportMissing(f"--transport {choice}: {why}", transport=choice.required)
        return [choice.required]
    names = [name for name in registry.names() if choice.allows(name)]
    return [*(name for name in names if not registry.missing(name)), TCP]


async def start_engine(
    choice: TransportChoice, made: Callable[..., BulkEngine], tls: bool = False
) -> BulkEngine:
    """The first engine whose workers start; TCP where TLS is wanted, which the others have not.

    TransportMissing, Unavailable.
    """
    if tls:
        return await _encrypted(choice, made)
    for name in candidates(choice):
        engine = made(transports=[name] if name != TCP else [])
        try:
            await engine.start()
        except Unavailable as exc:
            if name == TCP:
                raise
            why = exc.message
        else:
            if engine.transport == name:
                return engine
            why = engine.missing
            await engine.stop()
        if choice.required:
            raise TransportMissing(f"--transport {choice}: {why}", transport=name)
        log.warning("transport %s is not used: %s", name, why)
    raise AssertionError("tcp is always a candidate")


async def _encrypted(choice: TransportChoice, made: Callable[..., BulkEngine]) -> BulkEngine:
    engine = made(identity=new_identity())
    others = ", ".join(name for name in candidates(choice) if name != TCP)
    if others:
        engine.left_out = f"values move unencrypted over {others}, and --bulk-tls is set"
        log.warning("tcp with TLS alone is used: %s", engine.left_out)
    await engine.start()
    return engine
