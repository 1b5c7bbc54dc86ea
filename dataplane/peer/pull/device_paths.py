"""Which transport brings values from devices of each other peer to a device here, and why.

Before the first value of a peer is brought, the transports that this peer's device workers run are
tried on bytes that both know, in the order in which they are best: within a host the GPUs copy
themselves. Between hosts one must be faster than the way through both host arenas. What none of
them brings comes that way, which the log and the stats say. Where a transport is required that
moves device memory alone, nothing else is used, and what does not work is an error.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from dataplane.errors import DataplaneError, TransportMissing
from dataplane.launch.values import TransportChoice
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.device_sampling import DeviceSampling
from dataplane.peer.pull.paths import FAILURES, REQUIRED_S, RETRY_S
from dataplane.peer.pull.sampling import ROUNDS, TRY_S, Sampling, Trial
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import CUDA_IPC, DEVICE_ONLY, TCP
from dataplane.transport.seam import Remote
from dataplane.wire.messages import Done
from dataplane.wire.sampling import Sample, Sampled
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

STAGED = "host arena"
"""The way that is always there: to the owner's host arena, and from there as all values."""
FIRST_S = 5.0
"""How long a first read waits to know how the owner's devices are read; longer where it must."""


@dataclass(slots=True)
class DevicePath:
    """From devices of one peer to those of this one. again_s: when it is to be tried again."""

    transport: str
    why: str
    trials: dict[str, Trial] = field(default_factory=dict)
    again_s: float | None = None
    failures: int = 0

    def shown(self) -> dict[str, Any]:
        trials = {name: trial.shown() for name, trial in self.trials.items()}
        return {"transport": self.transport, "why": self.why, "tried": trials}


class DevicePaths:
    def __init__(
        self, mesh: Mesh, sampling: DeviceSampling, host: Sampling, choice: TransportChoice
    ) -> None:
        """host: tries the same bytes by way of the host."""
        self.mesh, self.sampling, self.host, self.choice = mesh, sampling, host, choice
        self.engine: BulkEngine | None = None
        self.runs: list[str] = []
        """what the device workers here run, best first"""
        self._paths: dict[Owner, DevicePath] = {}
        self._trying: dict[Owner, asyncio.Task[None]] = {}
        self._waits_s: dict[Owner, float] = {}

    @property
    def requires(self) -> bool:
        """Whether the way through the host is none."""
        return self.choice.required in DEVICE_ONLY

    async def take(self, source: Remote, staged: Remote, number: int) -> str:
        """What brings the values to the device of this number, or STAGED. TransportMissing where
        the one that is required does not work."""
        owner = source.owner
        path = self._paths.get(owner)
        if path is None or (path.again_s is not None and self._now() >= path.again_s):
            task = self._try_soon(source, staged, number)
            if path is None:
                await asyncio.wait({task}, timeout=REQUIRED_S if self.requires else FIRST_S)
                late = DevicePath(STAGED, "trying it was not done in time")
                path = self._paths.get(owner, late)
        if self.requires and path.transport == STAGED:
            raise TransportMissing(
                f"--transport {self.choice}: it does not work between devices here and those of "
                f"peer {owner.peer!r}: {path.why}",
                transport=self.choice.required,
                peer=owner.peer,
            )
        return path.transport

    def worked(self, owner: Owner) -> None:
        if path := self._paths.get(owner):
            path.failures = 0

    def failed(self, owner: Owner, error: DataplaneError) -> None:
        """A read broke off. What does not work at all is left at once, else after a few times."""
        path = self._paths.get(owner)
        log.warning("a read from a device of %s failed: %s", owner.peer, error.message)
        if path is None or path.transport == STAGED:
            return
        path.failures += 1
        if isinstance(error, TransportMissing) or path.failures >= FAILURES:
            why = f"{path.transport} failed {path.failures} times: {error.message}"
            self._set(owner, DevicePath(STAGED, why, path.trials))

    def gone(self, owner: Owner) -> None:
        self._paths.pop(owner, None)
        self._waits_s.pop(owner, None)

    def stats(self) -> dict[str, Any]:
        """By peer, what is used and why."""
        return {owner.peer: path.shown() for owner, path in self._paths.items()}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _try_soon(self, source: Remote, staged: Remote, number: int) -> asyncio.Task[None]:
        owner = source.owner
        if owner not in self._trying:
            task = self.mesh.spawn(self._try(source, staged, number))
            self._trying[owner] = task
            task.add_done_callback(lambda _: self._trying.pop(owner, None))
        return self._trying[owner]

    async def _try(self, source: Remote, staged: Remote, number: int) -> None:
        try:
            path = await self.tried(source, staged, number)
        except DataplaneError as exc:
            path = DevicePath(STAGED, f"it could not be tried: {exc.message}")
        self._set(source.owner, path)

    def _set(self, owner: Owner, path: DevicePath) -> None:
        self._paths[owner] = path
        if path.transport == STAGED:
            wait_s = self._waits_s.get(owner, RETRY_S[0])
            self._waits_s[owner] = min(2 * wait_s, RETRY_S[1])
            path.again_s = self._now() + wait_s
        tell = log.warning if path.transport == STAGED else log.info
        name = self.mesh.others.name(owner.peer)
        tell(
            "values on devices of peer %s at %s come over %s: %s",
            name,
            owner.peer,
            path.transport,
            path.why,
        )

    async def tried(self, source: Remote, staged: Remote, number: int) -> DevicePath:
        """Tries the ways anew: what would be chosen."""
        peer = source.owner.peer
        try:
            sampled: Sampled = await self.mesh.call(peer, Sample(device=True), timeout_s=TRY_S)
            return await self._tried(source, staged, sampled, number)
        finally:
            await self._done(peer)

    async def _done(self, peer: str) -> None:
        try:
            reply = await self.mesh.call(peer, Sample(done=True, device=True), timeout_s=TRY_S)
            assert isinstance(reply, Done)
        except DataplaneError as exc:
            log.debug("%s was not told that its sample is free: %s", peer, exc.message)

    async def _tried(
        self, source: Remote, staged: Remote, sampled: Sampled, number: int
    ) -> DevicePath:
        """The first that works and is faster than the host arenas are."""
        engine = self.engine
        assert engine is not None
        trials: dict[str, Trial] = {}
        for name in self.runs:
            trial = {name: Trial()}
            free = name == CUDA_IPC or bool(self.choice.required)
            rounds = 1 if free else ROUNDS
            if not await self.sampling.try_all(engine, source, sampled, number, trial, rounds):
                return DevicePath(STAGED, "one of the two has no room to try it", trials)
            trials |= trial
            if trial[name].exact and free:
                return DevicePath(name, f"{trial[name].GBps:.2f} GB/s, self-test passed", trials)
            if trial[name].exact:
                if STAGED not in trials:
                    # as fast as it is when the owner's host arena has them already
                    tcp = await self.host.try_all(staged, sampled, [TCP])
                    trials[STAGED] = tcp.get(TCP, Trial())
                compared = (
                    f"{name} {trial[name].GBps:.2f} GB/s, by way of the host "
                    f"{trials[STAGED].GBps:.2f} GB/s at most"
                )
                if trial[name].GBps >= trials[STAGED].GBps:
                    return DevicePath(name, compared, trials)
        return DevicePath(STAGED, _why_not(trials), trials)


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
