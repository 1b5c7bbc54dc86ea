"""One run: a plane, its clients and its faults, all drawn from one seed, and what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dataplane.errors import DataplaneError
from dataplane.metadata.roster.authority import Authority, hosts_of
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables import answers
from dataplane.metadata.tables.keys import keys_in
from dataplane.peer.membership.authority import KeeperRole
from dataplane.peer.requests import outgoing_changes
from dataplane.wire.tables import Definition, Owner
from tests.simulation.auditor import Auditor
from tests.simulation.cluster import ARENA_BYTES, Cluster, described
from tests.simulation.droppers import Dropper
from tests.simulation.faults import Faults
from tests.simulation.invariants import Watch, left_behind, permitted, unnamed
from tests.simulation.ledger import LARGE, RARE, SMALL, Ledger
from tests.simulation.line import Client
from tests.simulation.loop import VirtualLoop
from tests.simulation.roles import (
    Consumer,
    Filler,
    Patient,
    Producer,
    Rank,
    Role,
    Sealer,
    Trickler,
    Watcher,
)
from tests.simulation.taggers import Tagger

STAGES = {"reward": ["x"], "train": ["x", "reward"]}
LARGE_GROUP_ROWS = 24
LOOK_EVERY = 250
"""Steps from one look at all invariants to the next."""
ENDS_S = 240.0
"""How long after the last fault everything must have come to its end."""
SETTLES_S = 10.0
"""How long after the last fault two planes are one again."""
TIDY_S = 30.0
PASSES_S = 6.5
"""Stops and cuts that last no longer than this, all together, lose nobody."""
MAX_STEPS = 3_000_000


class _Bugs(logging.Handler):
    """Whatever a peer calls a bug of its own."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    violations: list[str]
    story: list[str]
    steps: int
    virtual_s: float
    trace: int
    """equal runs have equal ones"""


class Run:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.droppers = random.Random(f"droppers of {seed}")
        """by itself: seeds without one go as they went before there were any"""
        self.planned = random.Random(f"plans of {seed}").random() < 0.3
        """whether those who train take plans, as ranks"""
        self.newcomers = random.Random(f"newcomers of {seed}")
        self.window = random.Random(f"changes of {seed}").choice((2, 4, 1_024))
        """how many changes of a partition a peer may have above its floor"""
        self.loop = VirtualLoop()
        rng = self.rng
        self.cluster = Cluster(self.loop, random.Random(rng.random()), rng.choice((3, 3, 4, 4, 5)))
        self.violations: list[str] = []
        free: Any = rng.choice(("acked", "drop"))
        small = Definition(STAGES, 4, None, free, self._replicas())
        large = Definition({"train": ["x"]}, LARGE_GROUP_ROWS, None, "drop", self._replicas())
        self.patient = random.Random(f"patient of {seed}")
        rare = Definition({"train": ["x"]}, 4, None, free, self.patient.choice((1, 2)))
        self.small, self.large, self.rare = self.ledgers = (
            Ledger(SMALL, small, self.violations),
            Ledger(LARGE, large, self.violations),
            Ledger(RARE, rare, self.violations),
        )
        if free == "drop":  # nothing goes before the end, and one peer may have all of it
            self.cluster.arena_bytes += ARENA_BYTES // 2
        self.cluster.on_extinct += [ledger.extinct for ledger in self.ledgers]
        self.cluster.gone = self.small.gone
        self.watch = Watch(self.cluster)
        self.faults = Faults(self.cluster, random.Random(rng.random()), rng.random() < 0.5)
        self.forked = False
        """there were two planes"""
        self.roles: list[Role] = []
        self.taggers: list[Tagger] = []

    def play(self) -> Outcome:
        bugs = _Bugs(self.violations)
        logging.getLogger("dataplane").addHandler(bugs)
        gc.disable()
        try:
            with self.cluster.installed(), self._observed():
                script = self.loop.start_on(self.loop.world, self._script())
                self._until(script)
                if not script.done():
                    self._say_who_waits()
                elif script.exception() is not None:
                    self.wrong(f"the script failed: {script.exception()!r}")
                trace = self.rng.getrandbits(16) ^ self.cluster.rng.getrandbits(48)
                virtual_s = self.loop.now - 1000
                found = [*dict.fromkeys([*self.violations, *self.loop.failures])]
                self.loop.end()
        finally:
            logging.getLogger("dataplane").removeHandler(bugs)
            gc.enable()
            self.cluster.close()
        return Outcome(self.seed, found, self.faults.story, self.loop.steps, virtual_s, trace)

    def _until(self, script: asyncio.Task[None]) -> None:
        while not script.done() and self.loop.steps < MAX_STEPS and not self.violations:
            for _ in range(LOOK_EVERY):
                if not self.loop.step():
                    return
            for wrong in self.watch.look():
                self.wrong(wrong)

    def _say_who_waits(self) -> None:
        if not self.violations:
            self.wrong(f"nothing goes on at {self.loop.now - 1000:.1f} s")
        self.faults.story += [repr(role) for role in self.roles if not role.done]
        self.faults.story += [repr(described(peer)) for peer in self.cluster.peers]

    # what is looked at on the way

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        """The authority's decisions, and what stores report as lost."""
        remove, lost, relocate = Authority._remove, Store.lost, Store.relocate
        moved, astray = Authority._with_shards_at, Authority._is_stray
        opened = KeeperRole.open
        strays: set[Owner] = set()
        run = self

        def removing(authority: Authority, address: str, ended: bool = False) -> None:
            roster = authority.roster
            left = address in roster.leaving and not len(roster.shards_of(address))
            left = left and authority._is_clear(address)
            owner = next((o for o in roster.owners if o.peer == address), Owner(address, 0))
            mine = roster.shards_of(address)
            in_sync = bool(roster.in_sync[mine].all())
            run.faults.note(
                f"{address[-4:]} has left"
                if left
                else f"{address[-4:]} is removed, {'' if in_sync else 'not '}in sync"
            )
            if not left and run.cluster.is_alive(owner) and run.faults.stalled_s(60.0) < PASSES_S:
                run.wrong(f"{address[-4:]} lives, is not cut off for long, and is called lost")
            if not left:  # who leaves in order takes nothing along
                hosts = {one for one in roster.owners if one.peer in roster.hosts} - {owner}
                stay = {one for one in roster.owners if one.peer not in roster.leaving} - {owner}
                for ledger in run.ledgers:
                    name = ledger.partition
                    alone = roster.home(name) == address
                    alone = alone and not roster.in_sync[roster.bucket(name)]
                    now, known = run.loop.now, run.cluster.known
                    died = run.cluster.died.get(owner, now)
                    ledger.spares &= stay
                    ledger.removed(known, owner, in_sync, alone, hosts, now, died)
            remove(authority, address, ended)

        def moving(authority: Authority, address: str, backup: str) -> Any:
            roster = authority.roster
            able = {
                roster.members[at] for at in hosts_of(roster, authority._keeper)
            } - roster.leaving
            for ledger in run.ledgers:
                if roster.home(ledger.partition) == address:
                    ledger.handed_over, ledger.successor = run.loop.now, backup
                    ledger.spares = {o for o in roster.owners if o.peer in able - {backup}}
            return moved(authority, address, backup)

        async def opening(role: KeeperRole, roster: Roster, ask: bool) -> None:
            """A keeper that begins and was not told of the newest roster, as who knows it is
            stopped or cut off, makes another plane: with who was called lost before and has not
            heard so, or with who starts as well."""
            await opened(role, roster, ask)
            authority = role._authority
            assert authority is not None
            told = [*authority.reported.values(), authority.roster]
            known = [place.peer.host.roster.epoch for place in run.cluster.places if place.peer]
            if not all(any(one.follows(epoch) for one in told) for epoch in known):
                run._forked(f"{role.host.name} keeps an older roster than others know")

        def straying(authority: Authority, peer: Owner, epoch: tuple[int, int]) -> bool:
            """A keeper that began again reached none who knew the roster before, as all others had
            died, were stopped or cut off. Then there are two planes, and one gives way: who comes
            back is outvoted, or brings its own to those that followed the keeper."""
            away = astray(authority, peer, epoch)
            gives_way = authority._followers or not authority.is_behind
            if away and gives_way and peer not in strays:
                strays.add(peer)
                run._forked(f"{peer.peer[-4:]} comes back from another plane")
            return away

        def losing(store: Store, owner: Owner) -> int:
            before = keys_in(store.rows.keys)
            rows = lost(store, owner)
            gone = [key for key in before if key not in store.index]
            for ledger in run.ledgers:
                ledger.reported(b"".join(gone))
            return rows

        def relocating(store: Store, old: Owner, chunks: Any, new: Owner, *to: Any) -> Any:
            for ledger in run.ledgers:
                ledger.moved(store, old, new)
            return relocate(store, old, chunks, new, *to)

        with (
            mock.patch.object(answers, "MAX_CHANGES_ABOVE_FLOOR", self.window),
            mock.patch.object(outgoing_changes, "MAX_CHANGES_ABOVE_FLOOR", self.window),
            mock.patch.object(Authority, "_remove", removing),
            mock.patch.object(Authority, "_with_shards_at", moving),
            mock.patch.object(Authority, "_is_stray", straying),
            mock.patch.object(KeeperRole, "open", opening),
            mock.patch.object(Store, "lost", losing),
            mock.patch.object(Store, "relocate", relocating),
        ):
            yield

    # what happens

    async def _script(self) -> None:
        for place in self.cluster.places:
            self.cluster.start(place)
        await asyncio.sleep(3.0)
        for _ in range(self.newcomers.choice((0, 0, 1, 2))):
            self.cluster.join()  # before the clients, so that some of them are there
            await asyncio.sleep(self.newcomers.uniform(0.5, 3.0))
        self._people()
        if self.rng.random() < 0.9:
            await self.faults.run(self.rng.uniform(5.0, 25.0))
        if self.forked:
            await asyncio.sleep(SETTLES_S)
            self._consume_again()
        end = self.loop.now + ENDS_S
        while not all(role.done for role in self.roles):
            if self.loop.now > end:
                self.wrong(f"not at its end {ENDS_S:g} s after the last fault")
                self._say_who_waits()
                return
            await asyncio.sleep(0.5)
        for ledger in self.ledgers:
            ledger.check_delivered()
        for tagger in self.taggers[:1]:
            await tagger.look()
        await self._role(Auditor, "auditor", self.large, starts=False).look()
        for stalled in self.cluster.stalled:
            self.wrong(stalled)
        await self._tidy()

    def _people(self) -> None:
        self._people_of_small()
        self._people_of_large()
        self._people_of_rare()

    def _people_of_small(self) -> None:
        small = self.small
        producers = [self._role(Producer, f"p{i}", small) for i in range(self.rng.choice((2, 3)))]
        for stage in STAGES:
            planned = self.planned and stage == "train"
            many = self.rng.choice((1, 2, 3))
            for i in range(many):
                consumer = self._role(Rank if planned else Consumer, f"{stage}{i}", small)
                consumer.stage = stage
                if planned:
                    consumer.rank, consumer.ranks = i, many
        for i in range(self.rng.choice((0, 1, 2))):
            self.taggers.append(self._role(Tagger, f"tagger{i}", small))
        if self.droppers.random() < 0.4:
            self._role(Dropper, "dropper", small, self.droppers).producers = producers
        self._sealed(small, producers)

    def _people_of_large(self) -> None:
        large, choose = self.large, self.rng.choice
        fillers = [self._role(Filler, f"f{i}", large) for i in range(choose((1, 2)))]
        for i in range(choose((1, 2))):
            self._role(Consumer, f"reader{i}", large)
        if self.droppers.random() < 0.2:
            self._role(Dropper, "cleaner", large, self.droppers).producers = fillers
        self._sealed(large, fillers)

    def _people_of_rare(self) -> None:
        rare, rng = self.rare, self.patient
        tricklers = [self._role(Trickler, "trickler", rare, rng)]
        for i in range(rng.choice((2, 3, 4))):
            self._role(Patient, f"patient{i}", rare, rng)
        self._role(Watcher, "watcher", rare, rng)
        self._sealed(rare, tricklers, rng).drops = rng.random() < 0.5

    def _sealed(
        self, ledger: Ledger, producers: list[Role], rng: random.Random | None = None
    ) -> Sealer:
        others = [role for role in self.roles if role.ledger is ledger]
        sealer: Sealer = self._role(Sealer, f"sealer of {ledger.partition}", ledger, rng)
        sealer.producers, sealer.others = producers, others
        return sealer

    def _replicas(self) -> Any:
        return self.rng.choice((1, 2))

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def _role(
        self,
        kind: type[Any],
        name: str,
        ledger: Ledger,
        rng: random.Random | None = None,
        starts: bool = True,
    ) -> Any:
        rng = rng or self.rng
        client = Client(self.cluster, rng.choice(self.cluster.places), name)
        role = kind(client, ledger, random.Random(rng.random()))
        self.roles.append(role)
        if starts:
            self.loop.start_on(client.machine, role.run())
        return role

    def _forked(self, how: str) -> None:
        """What one of two planes has and answers will be gone, or is."""
        self.faults.note(how)
        self.forked = True
        for ledger in self.ledgers:
            ledger.extinct()

    def _consume_again(self) -> None:
        """Who was told that it has had everything, or that this is sealed, perhaps by the plane
        that gave way."""
        for role in self.roles:
            if isinstance(role, Consumer | Sealer) and role.done:
                role.done = False
                self.loop.start_on(role.client.machine, role.run())

    async def _tidy(self) -> None:
        """Everybody leaves and the partitions are dropped: nothing may be left of it anywhere."""
        for role in self.roles:
            role.client.close()
        await self._until_none(lambda: unnamed(self.cluster.peers))
        await self._until_none(lambda: permitted(self.cluster.peers))
        for ledger in self.ledgers:
            await self._role(Auditor, f"who drops {ledger.partition}", ledger, starts=False).drop()
        await self._until_none(lambda: [w for p in self.cluster.peers for w in left_behind(p)])

    async def _until_none(self, wrong: Callable[[], list[str]]) -> None:
        """What is not right within a while stays wrong."""
        end = self.loop.now + TIDY_S
        while found := wrong():
            if self.loop.now > end:
                self.violations += found
                return
            await asyncio.sleep(0.5)


def play(seed: int) -> Outcome:
    try:
        return Run(seed).play()
    except DataplaneError as exc:
        return Outcome(seed, [f"the run itself failed: {exc!r}"], [], 0, 0.0, 0)
