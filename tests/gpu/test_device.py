"""The device seam over CUDA, and a device arena on it."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from dataplane.gpu.cuda import CudaDevice
from dataplane.gpu.device import Device
from dataplane.gpu.host_memory import HostMemory
from dataplane.memory.admission import Admission
from tests.twin.conformance import MIB, Child, DeviceConformance

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.close()


class TestCuda(DeviceConformance):
    @pytest.fixture
    def device(self, device: CudaDevice) -> Device:
        return device


def test_a_client_killed_in_the_middle_of_its_copies_leaves_the_pool_exact(
    device: CudaDevice,
) -> None:
    memory = HostMemory(MIB, (1.0, 0.0, 0.0))
    arena = memory.add_device(device, 256 * MIB)
    with Child(device) as child:
        granted = arena.space.reserve(1, Admission.OPEN, [np.array([64 * MIB], np.uint64)])[1]
        at, nbytes = granted[0].tolist()
        child.write(arena.handle, at - MIB, nbytes, value=1, times=100)
    memory.forget(1)
    assert memory.device_figures()[0]["free_bytes"] == 256 * MIB


def test_torch_and_cupy_see_the_bytes_of_a_view_without_a_copy(device: CudaDevice) -> None:
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    pool = device.allocate(MIB)
    source = np.arange(256, dtype=np.float32)
    device.carry_out([(pool.address + 512, source.ctypes.data, source.nbytes, 0)])
    of_cupy = cupy.asarray(pool.array(512, source.dtype, (16, 16)))
    of_torch = torch.as_tensor(pool.array(512, source.dtype, (16, 16)), device="cuda")
    assert of_cupy.data.ptr == of_torch.data_ptr() == pool.address + 512
    assert np.array_equal(of_cupy.get(), source.reshape(16, 16))
    assert np.array_equal(of_torch.cpu().numpy(), source.reshape(16, 16))
    del of_cupy, of_torch
    pool.close()


def test_arrays_of_torch_and_cupy_are_located_on_their_streams(device: CudaDevice) -> None:
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    tensor = torch.arange(12, dtype=torch.bfloat16, device="cuda:0").reshape(3, 4)
    found = device.locate(tensor)
    assert found is not None and found.address == tensor.data_ptr()
    assert (found.dtype, found.shape) == (np.dtype(ml_dtypes.bfloat16), (3, 4))
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        turned = device.locate(tensor.T)
        assert turned is not None and turned.shape == (4, 3)
        assert turned.address != tensor.data_ptr()
        assert stream is None or turned.stream == stream.cuda_stream
    array = cupy.arange(12, dtype=cupy.int64)
    plain = device.locate(array)
    assert plain is not None and (plain.address, plain.shape) == (array.data.ptr, (12,))
    assert device.locate(tensor.cpu()) is None and device.locate(np.zeros(3)) is None
    assert device.finish(1.0)
