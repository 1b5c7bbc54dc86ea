"""Waiting without claiming, and what people are told of what a stage waits for.

`wait` asks the shard in turns; `why` asks it what is missing, for the message of a ClaimTimeout and
for what a call that waits says in the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from dataplane.errors import ClaimTimeout, DataplaneError, StaleEpoch, Unavailable
from dataplane.metadata.shard import reasons
from dataplane.peer.host import Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.notices import LAST_S, Telling, Why
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Claim, Request, StatsDone, Wait
from dataplane.wire.peering import Missing


def _wanted(body: Claim | Wait) -> str:
    """What a call waits for, in words."""
    if isinstance(body, Wait):
        if body.count:
            return f"{body.count} wanted"
        return f"and it waits until fewer than {body.below} are left"
    want = body.want
    if want.budget_tag is None:
        return f"{want.count} wanted" if want.count else ""
    return (
        f"and a budget of {want.budget:g} of `{want.budget_tag}` waits until the next one would "
        "not fit, or for the seal"
    )


class Waits:
    def __init__(self, host: Host, mesh: Mesh, router: Router, sessions: Iterable[Session]) -> None:
        self.host = host
        self.mesh = mesh
        self.router = router
        self.sessions = sessions

    async def wait(self, session: Session, request: Request, body: Wait) -> Body:
        """Until the shard says that it is so. ClaimTimeout, StreamEnd, PartitionGone."""
        look = self.looks(session, body)
        subject = reasons.Subject(
            "wait", body.partition, body.stage, (body.generation, body.unit, str(body.where))
        )
        what = f"wait for stage {body.stage!r} of partition {body.partition!r}"
        with Telling(self.host, what, subject, look):
            try:
                done: Body = await self.router.wait(body)
                return done
            except (ClaimTimeout, StaleEpoch, Unavailable) as exc:
                told, details = await look(LAST_S)
                raise ClaimTimeout(
                    f"waiting for stage {body.stage!r} of {body.partition!r}, which did not come "
                    f"within {body.timeout_ms / 1000:g} s: {told}",
                    **details,
                ) from exc

    # what is missing

    def looks(
        self,
        session: Session,
        body: Claim | Wait,
        claim: Callable[[], int] = lambda: 0,
        own: bool = True,
    ) -> Callable[[float], Awaitable[Why]]:
        """`why` of one call. claim: its number at the moment. own: who waits may be who could end
        it, and is told."""

        def look(limit_s: float) -> Awaitable[Why]:
            return self._why(session, body, claim(), own, limit_s)

        return look

    async def _why(
        self,
        session: Session,
        body: Claim | Wait,
        claim: int,
        own: bool,
        limit_s: float,
    ) -> Why:
        """ "509 of 512 groups ready; 3 lack `reward`, leased by pid 7 on host b for 90 s"."""
        partition, stage = body.partition, body.stage
        want = body.want if isinstance(body, Claim) else body
        asked = Missing(partition, body.generation, stage, want.unit, want.where, claim)
        facts = reasons.Facts(want.unit)
        try:
            answer: StatsDone = await self.router.ask(asked, timeout_s=limit_s)
            if answer.stats:
                facts = reasons.Facts(want.unit, **answer.stats)
        except DataplaneError:
            home = self.host.roster.home(partition)
            facts.silent = f"{self.mesh.others.name(home)} at {home}"
        said = reasons.reason(facts, stage, _wanted(body), session.label)
        others = (s for s in self.sessions if partition in s.partitions)
        alone = self.host.solo and all(other.pid == session.pid for other in others)
        own = own and reasons.only_own(facts, stage, session.label, alone)
        details = facts.details | {"only_own": own}
        return f"{said}; {reasons.OWN}" if own else said, details
