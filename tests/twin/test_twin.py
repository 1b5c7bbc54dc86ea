"""The device seam over its twin in host memory, which also can be made slow."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from dataplane.errors import DeviceMissing, ProtocolError
from dataplane.gpu import registry
from dataplane.gpu.device import Device
from dataplane_twin import TwinDevice
from tests.twin.conformance import MIB, Child, DeviceConformance, eventually, fetched


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    device = TwinDevice()
    yield device
    device.close()


class TestTwin(DeviceConformance):
    @pytest.fixture
    def device(self, device: TwinDevice) -> Device:
        return device


def test_a_kind_is_found_by_its_entry_point_and_one_that_is_not_installed_is_named() -> None:
    assert registry.load("twin") is TwinDevice
    with pytest.raises(DeviceMissing, match=r"kind 'post' \(supported: cuda, twin\)"):
        registry.load("post")


def test_a_copy_is_not_there_before_its_event_is_done(device: TwinDevice) -> None:
    pool = device.allocate(MIB)
    slow, ones = device.stream(), np.ones(MIB, np.uint8)
    go_on = device.hold(slow)
    event = device.event()
    device.copy(pool.address, ones.ctypes.data, MIB, slow)
    event.record(slow)
    assert not event.done() and not fetched(device, pool, 0, MIB).any()
    go_on()
    eventually(event.done)
    assert fetched(device, pool, 0, MIB).all()


def test_a_pool_of_a_process_that_is_gone_cannot_be_opened(device: TwinDevice) -> None:
    handle = device.allocate(4096).handle
    with Child(device) as child:
        raw = msgspec.msgpack.encode((child.process.pid, 1, 1))
    with pytest.raises(DeviceMissing, match="no longer exports"):
        device.open(msgspec.structs.replace(handle, raw=raw))


def test_handles_that_are_none_and_streams_that_are_none_are_refused(device: TwinDevice) -> None:
    handle = device.allocate(4096).handle
    with pytest.raises(ProtocolError, match="not a valid handle"):
        device.open(msgspec.structs.replace(handle, raw=b"\x00"))
    with pytest.raises(DeviceMissing, match="no stream"):
        device.copy(0, 0, 1, stream=99_999)


def test_its_arrays_are_found_on_it_and_nowhere_else(device: TwinDevice) -> None:
    array = device.array(np.arange(6, dtype=np.int16).reshape(2, 3), device.stream())
    found = device.locate(array)
    assert found is not None and (found.address, found.shape) == (array.address, (2, 3))
    assert (found.nbytes, found.stream) == (12, array.stream)
    assert device.locate(np.zeros(3)) is None
    other = TwinDevice("twin:1")
    assert other.locate(array) is None
    other.close()


def test_an_array_of_another_process_object_is_behind_its_own_stream(device: TwinDevice) -> None:
    again = TwinDevice(device.identity)
    slow = device.stream()
    go_on = device.hold(slow)
    found = again.locate(device.array(np.ones(4, np.uint8), slow))
    assert found is not None
    mark = again.event()
    mark.record(found.stream)
    assert not mark.done()
    go_on()
    eventually(mark.done)
    again.close()


def test_a_view_of_a_pool_is_an_array_of_the_device(device: TwinDevice) -> None:
    pool = device.allocate(MIB)
    source = np.arange(12, dtype=np.float32)
    device.copy(pool.address + 64, source.ctypes.data, source.nbytes)
    view = pool.array(64, source.dtype, (3, 4))
    assert np.array_equal(view.get(), source.reshape(3, 4)) and view.address == pool.address + 64
    with pytest.raises(ProtocolError, match="outside the device arena"):
        pool.array(MIB - 8, source.dtype, (3,))


def test_finishing_waits_for_every_stream_and_no_longer_than_it_may(device: TwinDevice) -> None:
    assert device.finish(10.0)
    go_on = device.hold(device.stream())
    assert not device.finish(0.05)
    go_on()
    assert device.finish(10.0)
