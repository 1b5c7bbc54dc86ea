"""The planes that are compared. A new one is one file and one line here."""

from __future__ import annotations

from bench.compare.courier import Contender
from bench.compare.dataplane_courier import Dataplane
from bench.compare.ray_courier import RayStore
from bench.compare.transfer_queue_courier import TransferQueue

CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender for contender in (Dataplane, TransferQueue, RayStore)
}
