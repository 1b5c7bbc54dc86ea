"""Permits to open groups, as a producer holds them."""

from __future__ import annotations

import logging
from types import TracebackType

from dataplane.client.aio.driver import Run
from dataplane.client.core import Handle
from dataplane.client.operations.admission import Admitting
from dataplane.errors import DataplaneError

log = logging.getLogger(__name__)


class Admission(Admitting):
    """`part.admit(…)`: waits when its `with` begins, and gives back at its end what no group was
    opened with. `n` groups may be opened, `version` is the trainer's."""

    def __init__(
        self,
        run: Run,
        handle: Handle,
        n: int,
        max_lag: int,
        per_version: int,
        timeout: float | None,
    ) -> None:
        super().__init__(handle, n, max_lag, per_version, timeout)
        self._run = run

    async def __aenter__(self) -> Admission:
        await self._run(self._admit())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._run(self._give_back())
        except DataplaneError as failure:
            # The peer gives them back with the session, if it has not heard this.
            log.warning("%r were not given back: %s", self, failure)
