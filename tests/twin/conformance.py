"""What every device must do: subclass `DeviceConformance`, and override its fixture `device`.

Two processes take part: this one owns a pool, a child opens it, as a client does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import DeviceMissing, ProtocolError
from dataplane.gpu import registry
from dataplane.gpu.device import Device, Pool, PoolHandle

MIB = 1 << 20
U1 = np.dtype(np.uint8)
PATIENCE_S = 30.0


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for something that is bound to happen."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.001)


class Child:
    """Another process of this host, as a client is one; leaving the context kills it."""

    def __init__(self, device: Device) -> None:
        command = [sys.executable, "-m", "tests.twin.conformance"]
        self.process = subprocess.Popen(
            [*command, device.kind, device.identity],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def write(self, handle: PoolHandle, at: int, nbytes: int, value: int, times: int = 1) -> None:
        """Asks its stream to fill bytes of the pool."""
        self.ask("write", msgspec.msgpack.encode(handle), at, nbytes, value, times)

    def finish(self) -> None:
        """Until it is done with what it was asked for."""
        self.ask("finish")

    def read(self, handle: PoolHandle, at: int, nbytes: int) -> bytes:
        """Bytes of the pool, as it sees them."""
        return self.ask("read", msgspec.msgpack.encode(handle), at, nbytes)

    def ask(self, name: str, *arguments: object) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None
        send(self.process.stdin, (name, arguments))
        failed, answer = msgspec.convert(receive(self.process.stdout), tuple[str, bytes])
        assert not failed, failed
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def send(stream: IO[bytes], what: object) -> None:
    body = msgspec.msgpack.encode(what)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """None at the end."""
    head = stream.read(4)
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little"))) if head else None


class DeviceConformance:
    """Override the fixture `device`."""

    @pytest.fixture
    def device(self) -> Device:
        raise NotImplementedError

    def test_what_one_process_writes_another_reads(self, device: Device) -> None:
        pool = device.allocate(MIB)
        with Child(device) as child:
            child.write(pool.handle, 64, 4096, value=5)
            child.finish()
            assert (fetched(device, pool, 64, 4096) == 5).all()
            nine = np.full(64, 9, np.uint8)
            device.copy(pool.address, nine.ctypes.data, 64)
            assert fetched(device, pool, 0, 64).tobytes() == child.read(pool.handle, 0, 64)
        pool.close()

    def test_an_event_that_was_never_recorded_is_done(self, device: Device) -> None:
        event = device.event()
        assert event.done()
        event.close()
        event.close()

    def test_copies_that_are_carried_out_are_there_and_can_be_given_up(
        self, device: Device
    ) -> None:
        pool = device.allocate(64 * MIB)
        ones, out = np.ones(64 * MIB, np.uint8), np.zeros(64 * MIB, np.uint8)
        there = (pool.address, ones.ctypes.data, ones.nbytes, 0)
        device.carry_out([there, (out.ctypes.data, pool.address, out.nbytes, 0)])
        assert out.all()

        def give_up() -> None:
            raise TimeoutError

        half = 32 * MIB  # on the device: what comes from pageable memory is there when it is asked
        within = (pool.address, pool.address + half, half, 0)
        with pytest.raises(TimeoutError):
            device.carry_out([within] * 100, give_up)
        assert device.finish(PATIENCE_S)
        pool.close()

    def test_views_are_made_of_the_pool_and_of_nothing_else(self, device: Device) -> None:
        pool = device.allocate(MIB)
        kept = _Kept()
        view = pool.array(MIB - 64, U1, (64,), kept)
        assert view is not None
        for offset, nbytes in ((MIB - 63, 64), (-1, 1), (0, -1), (MIB + 1, 0)):
            with pytest.raises(ProtocolError, match="outside the device arena"):
                pool.array(offset, U1, (nbytes,))
        del view
        pool.close()

    def test_another_device_s_handle_is_refused(self, device: Device) -> None:
        pool = device.allocate(MIB)
        with pytest.raises(DeviceMissing, match="handle belongs to"):
            device.open(msgspec.structs.replace(pool.handle, device="another"))
        pool.close()

    def test_host_memory_is_pinned_and_copied_both_ways(self, device: Device) -> None:
        pool = device.allocate(MIB)
        host = np.frombuffer(bytearray(2 * MIB), np.uint8)
        host[:MIB] = 7
        device.pin_host(host.ctypes.data, host.nbytes)
        event = device.event()
        device.copy(pool.address, host.ctypes.data, MIB)
        device.copy(host.ctypes.data + MIB, pool.address, MIB)
        event.record()
        eventually(event.done)
        assert (host[MIB:] == 7).all()
        device.unpin_host(host.ctypes.data)
        with pytest.raises(DeviceMissing):
            device.unpin_host(host.ctypes.data)
        pool.close()


class _Kept:
    """Something that a view keeps."""


def fetched(device: Device, pool: Pool, offset: int, nbytes: int) -> np.ndarray:
    """Bytes of a pool in host memory."""
    out = np.zeros(nbytes, np.uint8)
    device.carry_out([(out.ctypes.data, pool.address + offset, nbytes, 0)])
    return out


class Told:
    """What a child may be told to do."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[object] = []

    def write(self, handle: bytes, at: int, nbytes: int, value: int, times: int) -> bytes:
        pool = self._device.open(msgspec.msgpack.decode(handle, type=PoolHandle))
        source = np.full(nbytes, value, np.uint8)
        for _ in range(times):
            self._device.copy(pool.address + at, source.ctypes.data, nbytes)
        self._kept += [pool, source]
        return b""

    def finish(self) -> bytes:
        assert self._device.finish(PATIENCE_S)
        return b""

    def read(self, handle: bytes, at: int, nbytes: int) -> bytes:
        pool = self._device.open(msgspec.msgpack.decode(handle, type=PoolHandle))
        found = fetched(self._device, pool, at, nbytes).tobytes()
        pool.close()
        return found


def main(kind: str, identity: str) -> None:
    """The child."""
    told = Told(registry.load(kind).of(identity))
    # whatever else prints here must not get between the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    acts: dict[str, Callable[..., bytes]] = {
        "write": told.write,
        "finish": told.finish,
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
