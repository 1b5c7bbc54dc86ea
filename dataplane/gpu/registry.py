"""The kinds of devices: CUDA's GPUs, and those that other packages bring.

A package publishes its subclass of `Device` under the entry point group `dataplane.devices`. The
entry point's name is the kind, which a peer names to its clients with each pool. Tests bring a kind
that is host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.errors import DeviceMissing
from dataplane.gpu.device import Device, PoolHandle

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

GROUP = "dataplane.devices"
CUDA = "cuda"


def names() -> list[str]:
    """The kinds that are installed."""
    return [CUDA, *sorted({entry.name for entry in _installed()} - {CUDA})]


def load(kind: str) -> type[Device]:
    """Return the class of a kind. DeviceMissing if no installed package has it, or its package
    cannot be imported."""
    if kind == CUDA:
        from dataplane.gpu.cuda import CudaDevice

        return CudaDevice
    for entry in _installed().select(name=kind):
        try:
            found = entry.load()
        except Exception as exc:  # other people's code runs, and may raise anything
            raise DeviceMissing(
                f"cannot load the device plug-in for {kind!r} ({entry.value}): "
                f"{type(exc).__name__}: {exc}; reinstall the package that provides it"
            ) from exc
        if not (isinstance(found, type) and issubclass(found, Device)):
            raise DeviceMissing(
                f"devices of kind {kind!r}: {entry.value} is not a subclass of Device"
            )
        return found
    raise DeviceMissing(
        f"no installed package supports devices of kind {kind!r} (installed: "
        f"{', '.join(names())}); install the packages that the peer has"
    )


def device_of(handle: PoolHandle) -> Device:
    """The device of a pool as this process has it. DeviceMissing where it does not."""
    return load(handle.kind).of(handle.device)


def _installed() -> EntryPoints:
    from importlib.metadata import entry_points  # 15 ms, and few processes have such devices

    return entry_points(group=GROUP)
