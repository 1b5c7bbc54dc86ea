"""Code that is loaded by name: kinds of devices, and the modules that a client and a peer need.

A package publishes its subclass of `Device` under the entry point group `dataplane.devices`. The
entry point's name is the kind, which a peer sends to its clients with each pool. Tests add a kind
whose devices are host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from dataplane import plugins
from dataplane.errors import DeviceMissing, InvalidCall
from dataplane.gpu.device import Device, PoolHandle

if TYPE_CHECKING:
    from dataplane.gpu.client.pools import OpenPools
    from dataplane.gpu.peer import DevicePools

GROUP = "dataplane.devices"
CUDA = "cuda"

Mode = Literal["auto", "required", "off"]


class Wish(NamedTuple):
    """How a client wants to use its peer's device arenas. gpu: the number of the GPU that is
    current in the thread that connects; None if torch and cupy use none there."""

    mode: Mode = "auto"
    gpu: int | None = None


AUTO = Wish()


def wish_of(mode: Any) -> Wish:
    """Return the wish of the thread that connects. mode: None for "auto". Raise InvalidCall for an
    unknown mode."""
    mode = mode or "auto"
    if mode not in get_args(Mode):
        raise InvalidCall(f"devices={mode!r:.40}: expected 'auto', 'required' or 'off'")
    from dataplane.gpu.cuda import current_gpu

    return Wish(mode, current_gpu())


def client_pools(wish: Wish, offered: bool) -> OpenPools | None:
    """Return the device arenas of a client session. None if it will open none. offered: whether its
    peer has any."""
    if wish.mode != "required" and (wish.mode == "off" or not offered):
        return None
    pools: OpenPools = client_module("pools").OpenPools(wish)
    return pools


def peer_pools(wanted: Any) -> DevicePools | None:
    """Return the pools of a peer with device arenas; None if it has none. wanted: the memory of
    each device (`DeviceMemory`), or None. Raise DeviceMissing if there is no device."""
    if wanted is None:
        return None
    pools: DevicePools = plugins.own("dataplane.gpu.peer:DevicePools")(wanted)
    return pools


def client_module(name: str) -> Any:
    """Return a module of `dataplane.gpu.client`, which needs the client and is loaded on use."""
    return plugins.own(f"dataplane.gpu.client.{name}")


def names() -> list[str]:
    """Return the kinds of devices that installed packages support."""
    return [CUDA, *sorted({entry.name for entry in plugins.installed(GROUP)} - {CUDA})]


def load(kind: str) -> type[Device]:
    """Return the class of a kind. Raise DeviceMissing if no installed package supports it, or if
    its package cannot be imported."""
    if kind == CUDA:
        from dataplane.gpu.cuda import CudaDevice

        return CudaDevice
    for entry in plugins.installed(GROUP).select(name=kind):
        return plugins.load(entry, Device, f"the device plug-in for {kind!r}", DeviceMissing)
    raise DeviceMissing(
        f"no installed package supports devices of kind {kind!r} (supported: "
        f"{', '.join(names())}): install the package that the peer uses for these "
        "devices"
    )


def device_of(handle: PoolHandle) -> Device:
    """Return the device of a pool. Raise DeviceMissing if this process does not have it."""
    return load(handle.kind).of(handle.device)
