"""The planes that the bench can drive. A new one is one file and one line here."""

from __future__ import annotations

from bench.planes.base import Plane
from bench.planes.controller import ControllerPlane
from bench.planes.dataplane_plane import DataplanePlane
from bench.planes.ray_store import RayStorePlane
from bench.planes.transfer_queue import TransferQueuePlane

PLANES: dict[str, type[Plane]] = {
    "dataplane": DataplanePlane,
    "controller": ControllerPlane,
    "controller-stream": ControllerPlane,
    "ray-store": RayStorePlane,
    "transfer_queue": TransferQueuePlane,
}
