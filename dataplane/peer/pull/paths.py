"""Which transport copies values from each peer, to the arena and to pools here, and why.

The first transport that both peers run is used, in the order of preference. Before it carries
values from a peer, its content is checked once. The plain path, which always exists, carries values
until the result is known, and after the transport failed: TCP between arenas, and for pools a copy
through both arenas. Each outcome is logged and shown in the stats. If the settings require a
transport, no other is used, and its failure is an error. `dataplane probe` measures all of them.

The check copies bytes that both peers know. The owner keeps some in its arena or in its first
pool, like cached copies, so they are evicted when space is needed. The reader copies them into
space of its own, as it copies values, compares every byte, and frees them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, TransportMissing, Unavailable
from dataplane.launch.values import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Bytes
from dataplane.memory.space import PULLER, Space
from dataplane.peer.host import Caller, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.room.admission import Room
from dataplane.peer.room.pools import Pools
from dataplane.transport import registry
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import POOLS_ONLY, TCP
from dataplane.transport.seam import Remote
from dataplane.transport.tickets import new_identity
from dataplane.wire.messages import Body
from dataplane.wire.packed import U8, Array
from dataplane.wire.peering import Sample, Sampled
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

REQUIRED_S = 15.0
"""How long a first pull waits for the check of a required transport."""
AGAIN_S = 120.0
"""A transport that did not work is checked again after this time."""
ARENA, POOL = 0, 1
"""Memories that hold samples: the host arena, and the first pool."""
SAMPLE_BYTES = 4 << 20
SMALL_BYTES = 64
ROUNDS = 3
"""Rounds of a measurement. A check has one."""
REPEATS = 8
"""How many reads of a sample run at once for a rate. One read would mostly measure latency."""
TRY_S = 5.0
KNOWN = 1 << 60
"""The incarnation under which samples are cached as copies; no process has it."""


@dataclass(slots=True)
class Trial:
    """The result of one transport: the best of a few rounds. error: why it does not work."""

    GBps: float = 0.0
    latency_us: float = float("inf")
    error: str = ""

    def note(self, latency_s: float, nbytes: int, seconds: float) -> None:
        """Note a round whose bytes arrived unchanged."""
        self.latency_us = min(self.latency_us, latency_s * 1e6)
        self.GBps = max(self.GBps, nbytes / seconds / 1e9)

    def shown(self) -> dict[str, Any]:
        if self.error:
            return {"exact": False, "error": self.error}
        latency_us = round(self.latency_us, 1)
        return {"exact": True, "GBps": round(self.GBps, 3), "latency_us": latency_us}


@dataclass(slots=True)
class Path:
    """The path from one peer to this one. again_s: when to check the transports again."""

    transport: str
    why: str
    trials: dict[str, Trial] = field(default_factory=dict)
    again_s: float = math.inf

    def shown(self) -> dict[str, Any]:
        trials = {name: trial.shown() for name, trial in self.trials.items()}
        return {"transport": self.transport, "why": self.why, "tried": trials}


class Paths:
    """The paths into one kind of memory here."""

    def __init__(self, sampling: Sampling, plain: str, moves: str, required: bool = False) -> None:
        """plain: the path that always exists. moves: what is copied, for the log. required: the
        settings require a transport for it, so the plain path may not be used."""
        self.sampling, self.mesh, self.choice = sampling, sampling.mesh, sampling.choice
        self.engine: BulkEngine | None = None
        self.runs: list[str] = []
        """the transports that the worker here runs, the preferred one first"""
        self.plain, self.required = plain, required
        self._moves = moves
        self._paths: dict[Owner, Path] = {}
        self._checks: dict[Owner, asyncio.Task[None]] = {}

    def use(self, engine: BulkEngine, runs: list[str]) -> None:
        """Set the engine that copies the bytes from now on."""
        self.engine, self.runs = engine, runs

    async def take(self, source: Remote, number: int = ARENA, first_s: float = 0.0) -> str:
        """Return the transport that copies values to the memory of this number.

        first_s: how long to wait for the first check. Raises TransportMissing if a required
        transport does not work.
        """
        if not self.runs:
            return self.plain
        owner = source.owner
        path = self._paths.get(owner)
        if path is None or self._now() >= path.again_s:
            if owner not in self._checks:
                self._checks[owner] = self.mesh.spawn(self._check(source, number))
                self._checks[owner].add_done_callback(lambda _: self._checks.pop(owner, None))
            first_s = REQUIRED_S if self.required else first_s
            if path is None and first_s:
                await asyncio.wait({self._checks[owner]}, timeout=first_s)
            path = path or self._paths.get(owner)
            path = path or Path(self.plain, "the transport test did not finish in time")
        if self.required and path.transport == self.plain:
            raise TransportMissing(
                f"--transport {self.choice} cannot fetch {self._moves} from peer "
                f"{owner.peer!r}: {path.why}. Fix the cause, or choose another --transport",
                transport=self.choice.required,
                peer=owner.peer,
            )
        return path.transport

    async def _check(self, source: Remote, number: int) -> None:
        try:
            path = await self.tried(source, number)
        except DataplaneError as exc:
            path = Path(self.plain, f"the transport test failed: {exc.message}")
        if self.sampling.host.roster.has(source.owner):  # else the process was lost
            self._set(source.owner, path)

    async def tried(self, source: Remote, number: int = ARENA, measures: bool = False) -> Path:
        """Test the transports from a peer. Return the first that works. measures: test all of
        them, and TCP, for their rates."""
        assert self.engine is not None
        sampled = await self.sampling.ask(source.owner.peer, number != ARENA)
        names = [name for name in self.runs if number != ARENA or name == sampled.transport]
        plain = [TCP] if measures and number == ARENA else []
        rounds = ROUNDS if measures else 1
        trials: dict[str, Trial] = {}
        for name in [*names, *plain]:
            way = self.engine, source, name, number
            trial = await self.sampling.tried(sampled, *way, rounds)
            if trial is None:
                here = self.runs[0] if self.required else self.plain
                why = "one of the two peers has no arena space for the test"
                return Path(here, why, trials)
            trials[name] = trial
            if not (trial.error or measures):
                break
        for name in names:
            if name in trials and not trials[name].error:
                return Path(name, "self-test passed", trials)
        why = "; ".join(f"{name} does not work: {trials[name].error}" for name in names)
        if not names and self.runs:
            why = f"this peer runs {self.runs[0]}, but the other peer runs {sampled.transport}"
        return Path(self.plain, why or "this peer runs no other transport", trials)

    def _set(self, owner: Owner, path: Path) -> None:
        known, self._paths[owner] = self._paths.get(owner), path
        if path.transport == self.plain:
            path.again_s = self._now() + AGAIN_S
        if known is not None and known.why == path.why:
            return
        tell = log.info if path.transport != self.plain else log.warning
        peer, transport = self.mesh.others.name(owner.peer), path.transport
        says = "peer %s at %s: reading %s over %s: %s"
        tell(says, peer, owner.peer, self._moves, transport, path.why)

    def failed(self, owner: Owner, transport: str, error: DataplaneError) -> str:
        """Note that a read failed. Return the transport for its retry."""
        path = self._paths.get(owner)
        if transport == self.plain or path is None or self.required:
            return transport
        if path.transport != self.plain:
            self._set(owner, Path(self.plain, f"{transport} failed: {error.message}", path.trials))
        return self.plain

    def shown(self) -> dict[str, Any]:
        """The path of each peer, and why it is used."""
        return {owner.peer: path.shown() for owner, path in self._paths.items()}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member."""
        self._paths.pop(owner, None)
        if self.engine is not None:
            self.engine.forget(owner)


def candidates(choice: TransportChoice) -> list[str]:
    """Transports to start bulk workers with, best first. Raises TransportMissing before any is
    started."""
    if choice.required in POOLS_ONLY:
        return [TCP]
    if choice.required:
        if why := registry.missing(choice.required):
            raise TransportMissing(
                f"--transport {choice} is not available: {why}. Install what is missing, or choose "
                "another --transport",
                transport=choice.required,
            )
        return [choice.required]
    names = [name for name in registry.names() if choice.allows(name)]
    return [*(name for name in names if not registry.missing(name)), TCP]


async def start_engine(
    choice: TransportChoice, made: Callable[..., BulkEngine], tls: bool = False
) -> BulkEngine:
    """Return the first engine whose workers start, or TCP if TLS is wanted, which other engines
    lack. Raises TransportMissing or Unavailable."""
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
            raise TransportMissing(f"--transport {choice} is not available: {why}", transport=name)
        log.warning("not using transport %s: %s", name, why)
    raise AssertionError("tcp is always a candidate")


async def _encrypted(choice: TransportChoice, made: Callable[..., BulkEngine]) -> BulkEngine:
    engine = made(identity=new_identity())
    others = ", ".join(name for name in candidates(choice) if name != TCP)
    if others:
        engine.left_out = f"--bulk-tls is set, and {others} cannot encrypt values"
        log.warning("transport: using only tcp, because %s", engine.left_out)
    await engine.start()
    return engine


class Sampling:
    """Tests of transports. Memories have numbers: 0 is the host arena, 1 the first pool."""

    def __init__(
        self, host: Host, mesh: Mesh, room: Room, pools: Pools, choice: TransportChoice
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.pools = pools
        self.choice = choice
        self.engine: BulkEngine | None = None
        self._seed = secrets.randbits(31)
        self._writing = asyncio.Lock()
        self._trying = asyncio.Lock()

    def _spaces(self) -> list[Space]:
        return [self.host.space, *self.pools.spaces]

    def _size_bytes(self, number: int) -> int:
        """Return the size of a sample: a small part of that memory, or 0 if there is no such
        memory."""
        spaces = self._spaces()
        if number >= len(spaces):
            return 0
        return min(SAMPLE_BYTES, spaces[number].size_bytes // 64 & ~0xFFF)

    # the owner

    async def sample_here(self, caller: Caller, body: Sample) -> Body:
        number, engine = POOL if body.pool else ARENA, self.engine
        nbytes = self._size_bytes(number)
        async with self._writing:
            known = (await self._known(number, nbytes))[0]
        return Sampled(
            chunk=int(known),
            nbytes=nbytes if known else 0,
            seed=self._seed,
            transport=engine.transport if engine else TCP,
        )

    async def _known(self, number: int, nbytes: int) -> Array:
        """Return the chunk of the sample as one number; 0 if there is no space for it now."""
        if not nbytes:
            return np.zeros(1, U8)
        copies, name = self._spaces()[number].copies, np.ones(1, U8)
        found = copies.lookup(KNOWN, name)
        extents = None if found[0] else self._reserved(number, nbytes)
        if extents is not None:

            async def write(dest: Bytes) -> None:
                await self._write(number, dest.item(), pattern(self._seed, nbytes))

            sizes = np.array([nbytes], U8)
            found = await self.room.write(sizes, extents, write, Admission.PULL)
            copies.insert(KNOWN, name, found)
        return found

    def _reserved(self, number: int, nbytes: int) -> Array | None:
        """Reserve space for a sample. Return its extents, or None if there is no space now."""
        if number == ARENA and self.room.waiting(Admission.PULL):
            return None
        sizes = [np.array([nbytes], U8)]
        count, extents = self._spaces()[number].reserve(PULLER, Admission.PULL, sizes)
        return extents if count else None

    async def _write(self, number: int, dest: int, data: npt.NDArray[np.uint8]) -> None:
        if number:
            await self.pools.write_at(number, dest, data)
        else:
            self.host.arena.view[dest : dest + len(data)] = data.data

    async def _read(self, number: int, dest: int, into: npt.NDArray[np.uint8]) -> None:
        if number:
            await self.pools.read_at(number, dest, into)
        else:
            into[:] = np.frombuffer(self.host.arena.view[dest : dest + len(into)], np.uint8)

    # the reader

    async def ask(self, address: str, pool: bool) -> Sampled:
        """Ask a peer for its test sample and the transports that it runs."""
        sampled: Sampled = await self.mesh.call(address, Sample(pool), timeout_s=TRY_S)
        return sampled

    async def tried(
        self,
        sampled: Sampled,
        engine: BulkEngine,
        source: Remote,
        transport: str,
        number: int,
        rounds: int,
    ) -> Trial | None:
        """Test one transport for this many rounds, to the memory of this number, and never during
        another test. Return None if there is no space for it."""
        nbytes = min(sampled.nbytes, self._size_bytes(number))
        expected, found = pattern(sampled.seed, nbytes), np.empty(nbytes, np.uint8)
        trial = Trial()
        async with self._trying:
            extents = self._reserved(number, nbytes) if nbytes else None
            if extents is None:
                return None
            dest = int(extents["offset"][0])

            async def timed(nbytes: int, times: int) -> float:
                """Return the seconds that reading this many bytes of the sample takes, with
                several reads at once."""
                copies = np.zeros(times, COPY)
                copies["chunk"], copies["nbytes"], copies["dest"] = sampled.chunk, nbytes, dest
                began = time.perf_counter()
                outcome = await engine.read(source, copies, TRY_S, transport)
                if outcome.gone.any():
                    raise Unavailable(
                        "the test sample was freed before it was read, so the test will be repeated"
                    )
                return time.perf_counter() - began

            try:
                for _ in range(rounds):
                    await self._write(number, dest, np.zeros(nbytes, np.uint8))
                    small_s, whole_s = await timed(SMALL_BYTES, 1), await timed(nbytes, REPEATS)
                    await self._read(number, dest, found)
                    if not np.array_equal(found, expected):
                        trial.error = "the received bytes differ from the bytes that were sent"
                        log.error(
                            "transport %s: test read from peer %s failed: %s",
                            transport,
                            source.owner.peer,
                            trial.error,
                        )
                        break
                    trial.note(small_s, REPEATS * nbytes, whole_s)
            except DataplaneError as exc:
                trial.error = exc.message
            finally:
                self.host.space.give_back(PULLER, extents)
        return trial


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of a sample; see `Sampled`."""
    index = np.arange(nbytes, dtype=np.uint32)
    mixed = index * np.uint32(167) + np.uint32(seed)
    mixed ^= index >> np.uint32(8)
    mixed ^= index >> np.uint32(16)
    return mixed.astype(np.uint8)
