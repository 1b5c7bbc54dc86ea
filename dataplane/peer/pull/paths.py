"""Which transport a pull from each other peer takes, and why.

With every peer that it reads from for the first time, this one tries its engine against TCP on
bytes that both know. Under `auto` TCP carries the values until that is done, and where the engine
fails, is slower, or later breaks off again and again; each is logged and stands in the stats.
Small reads always take TCP then: another engine needs an exchange more for each.
Where a transport is required nothing else is used, and what does not work is an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataplane.errors import DataplaneError, TransportMissing, Unavailable
from dataplane.launch.values import TransportChoice
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.sampling import Sampling, Trial
from dataplane.transport import registry
from dataplane.transport.bulk_frames import SMALL_LANE_BYTES
from dataplane.transport.engine import BulkEngine
from dataplane.transport.identity import new_identity
from dataplane.transport.registry import TCP
from dataplane.transport.seam import Remote
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

REQUIRED_S = 15.0
"""How long a first pull waits to know whether the transport that is required works."""
FAILURES = 3
"""In a row, before `auto` goes back to TCP with a peer."""
RETRY_S = (10.0, 600.0)
"""Before a trial that failed is made again: at first, and at most after many."""


@dataclass(slots=True)
class Path:
    """From one peer to this one."""

    transport: str
    why: str
    trials: dict[str, Trial] = field(default_factory=dict)
    settled: bool = True
    """else it is tried again, see RETRY_S"""
    failures: int = 0

    def shown(self) -> dict[str, Any]:
        trials = {name: trial.shown() for name, trial in self.trials.items()}
        return {"transport": self.transport, "why": self.why, "tried": trials}


class Paths:
    def __init__(self, mesh: Mesh, sampling: Sampling, choice: TransportChoice) -> None:
        self.mesh = mesh
        self.sampling = sampling
        self.choice = choice
        self.engine: BulkEngine | None = None
        self._paths: dict[Owner, Path] = {}
        self._trying: dict[Owner, asyncio.Task[Any]] = {}
        self._remotes: dict[Owner, Remote] = {}
        self._waiting: set[Owner] = set()
        self._waits_s: dict[Owner, float] = {}
        self._one_at_a_time = asyncio.Lock()
        mesh.others.on_away.append(self._gone)

    @property
    def own(self) -> str:
        """The engine that this peer's workers run beside TCP; `tcp`: none."""
        return self.engine.transport if self.engine is not None else TCP

    async def take(self, source: Remote, nbytes: int) -> str:
        """The transport for a pull. TransportMissing where the one that is required fails."""
        if self.own == TCP or (nbytes <= SMALL_LANE_BYTES and not self.choice.required):
            return TCP
        path = self._paths.get(source.owner)
        if path is None:
            task = self._try_soon(source)
            if not self.choice.required:
                return TCP
            await asyncio.wait({task}, timeout=REQUIRED_S)
            path = self._paths.get(source.owner) or Path(TCP, "trying it was not done in time")
        elif not path.settled and source.owner not in self._waiting:
            self._wait_and_try(source)
        if self.choice.required and path.transport == TCP:
            raise TransportMissing(
                f"--transport {self.choice}: it does not work with peer {source.owner.peer!r}: "
                f"{path.why}",
                transport=self.choice.required,
                peer=source.owner.peer,
            )
        return path.transport

    def worked(self, owner: Owner, transport: str) -> None:
        """A read came to its end."""
        path = self._paths.get(owner)
        if path is not None and path.transport == transport:
            path.failures = 0

    def failed(self, owner: Owner, transport: str, error: DataplaneError) -> str:
        """A read broke off: what to repeat it with."""
        path = self._paths.get(owner)
        if transport == TCP or path is None or self.choice.required:
            return transport
        path.failures += 1
        log.warning("a read from %s over %s failed: %s", owner.peer, transport, error.message)
        if path.failures >= FAILURES and path.transport != TCP:
            why = f"{transport} failed {FAILURES} times: {error.message}"
            self._set(owner, Path(TCP, why, settled=False))
        return TCP

    def stats(self) -> dict[str, Any]:
        """Requested, what runs, and what is used with each peer."""
        return {
            "requested": str(self.choice),
            "runs": self.own,
            "missing": self.engine.missing if self.engine is not None else "",
            "tls": self.engine is not None and bool(self.engine.fingerprint),
            "peers": {owner.peer: path.shown() for owner, path in self._paths.items()},
        }

    async def tried(self, source: Remote) -> tuple[Path, dict[str, Any]]:
        """Tries the ways from a peer anew: what would be chosen, and what it says of itself."""
        async with self._one_at_a_time:
            try:
                return await self._tried(source)
            finally:
                await self.sampling.done(source.owner.peer)

    async def _tried(self, source: Remote) -> tuple[Path, dict[str, Any]]:
        sampled, skew_s = await self.sampling.ask(source.owner.peer)
        about = {
            "version": sampled.version,
            "requested": sampled.requested,
            "runs": sampled.transport,
            "missing": sampled.missing,
            "tls": bool(source.fingerprint),
            "arena_bytes": sampled.arena_bytes,
            "clock_ahead_s": round(skew_s, 6),
        }
        both = self.own == sampled.transport != TCP
        names = [TCP, self.own] if both else [TCP]
        trials = await self.sampling.try_all(source, sampled, names)
        path = chosen(self.own, sampled.transport, trials, bool(self.choice.required))
        return path, about

    def _wait_and_try(self, source: Remote) -> None:
        owner = source.owner
        wait_s = self._waits_s.get(owner, RETRY_S[0])
        self._waits_s[owner] = min(2 * wait_s, RETRY_S[1])
        self._waiting.add(owner)

        def again() -> None:
            self._waiting.discard(owner)
            if owner in self._paths:
                self._try_soon(source)

        asyncio.get_running_loop().call_later(wait_s, again)

    def _try_soon(self, source: Remote) -> asyncio.Task[Any]:
        owner = source.owner
        if owner not in self._trying:
            self._remotes[owner] = source
            self._trying[owner] = self.mesh.spawn(self._try(source))
            self._trying[owner].add_done_callback(lambda _: self._trying.pop(owner, None))
        return self._trying[owner]

    async def _try(self, source: Remote) -> None:
        try:
            path, _ = await self.tried(source)
        except DataplaneError as exc:
            path = Path(TCP, f"it could not be tried: {exc.message}", settled=False)
        self._set(source.owner, path)

    def _set(self, owner: Owner, path: Path) -> None:
        self._paths[owner] = path
        peer = self.mesh.others.name(owner.peer)
        tell = log.info if path.transport != TCP else log.warning
        tell("values of peer %s at %s come over %s: %s", peer, owner.peer, path.transport, path.why)

    def _gone(self, owner: Owner) -> None:
        self._paths.pop(owner, None)
        self._waits_s.pop(owner, None)
        remote = self._remotes.pop(owner, None)
        if remote is not None and self.engine is not None:
            self.engine.forget(remote)


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
        engine = made(transport=name)
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
    engine = made(transport=TCP, identity=new_identity())
    others = ", ".join(name for name in candidates(choice) if name != TCP)
    if others:
        engine.left_out = f"values move unencrypted over {others}, and --bulk-tls is set"
        log.warning("tcp with TLS alone is used: %s", engine.left_out)
    await engine.start()
    return engine
