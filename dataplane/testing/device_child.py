"""The other process of `testing.devices`: it opens pools and copies in and out, as it is told."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import msgspec
import numpy as np

from dataplane.memory.device import Device, PoolHandle
from dataplane.memory.device_twin import TwinDevice
from dataplane.testing.devices import device_of, fetched, receive, send


class Told:
    """What it may be told to do."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[object] = []

    def write(
        self, handle: bytes, at: int, nbytes: int, value: int, times: int, hold: int
    ) -> bytes:
        pool = self._device.open(msgspec.msgpack.decode(handle, type=PoolHandle))
        source, event = np.full(nbytes, value, np.uint8), self._device.event()
        if hold and isinstance(self._device, TwinDevice):
            self._go_on = self._device.hold()
        for _ in range(times):
            self._device.copy(pool.address + at, source.ctypes.data, nbytes)
        event.record()
        self._kept += [pool, source, event]
        return event.raw

    def go_on(self) -> bytes:
        self._go_on()
        return b""

    def read(self, handle: bytes, at: int, nbytes: int) -> bytes:
        pool = self._device.open(msgspec.msgpack.decode(handle, type=PoolHandle))
        found = fetched(self._device, pool, at, nbytes).tobytes()
        pool.close()
        return found


def main(kind: str, identity: str) -> None:
    told = Told(device_of(kind, identity))
    # whatever else prints here must not get between the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    acts: dict[str, Callable[..., bytes]] = {
        "write": told.write,
        "go_on": told.go_on,
        "read": told.read,
    }
    while (asked := receive(sys.stdin.buffer)) is not None:
        name, arguments = asked
        failed, answer = "", b""
        try:
            answer = acts[name](*arguments)
        except Exception:
            failed = traceback.format_exc()
        send(answers, (failed, answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
