"""What `CudaDevice` asks of the driver, over one that only takes notes: no GPU takes part."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import DeviceMissing, ProtocolError
from dataplane.gpu import cuda
from dataplane.gpu.cuda import CudaDevice


class Runtime:
    """Stands for `cupy.cuda.runtime` with two GPUs; notes (current GPU, call, arguments)."""

    class CUDARuntimeError(RuntimeError):
        status = 801

    deviceSynchronize: Callable[[], None]
    hostRegister: Callable[..., None]

    def __init__(self) -> None:
        self.current, self.asked = 0, list[tuple[Any, ...]]()
        self.access, self.status = True, 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.asked.append((self.current, name, *arguments))
            return 4096 * len(self.asked)

        return call

    def getDeviceCount(self) -> int:
        return 2

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, number: int) -> None:
        self.current = number

    def deviceGetPCIBusId(self, number: int) -> str:
        return f"0000:{number:02d}:00.0"

    def deviceCanAccessPeer(self, number: int, other: int) -> bool:
        return self.access and number != other

    def ipcGetMemHandle(self, address: int) -> bytes:
        return b"memory"

    def pointerGetAttributes(self, address: int) -> SimpleNamespace:
        self.asked.append((self.current, "pointerGetAttributes", address))
        return SimpleNamespace(device=1)

    def eventQuery(self, number: int) -> int:
        return self.status


class Driver:
    """Stands for libcuda: the capture mode of the one thread that there is."""

    def __init__(self) -> None:
        self.mode = 0

    def cuThreadExchangeStreamCaptureMode(self, given: Any) -> int:
        box = given._obj
        box.value, self.mode = self.mode, box.value
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    return runtime


def test_a_gpu_that_this_process_does_not_see_is_named(runtime: Runtime) -> None:
    assert CudaDevice.numbered(1).identity == "0000:01:00.0"
    with pytest.raises(DeviceMissing, match="there is no GPU 2: this process sees 2 GPUs"):
        CudaDevice.numbered(2)


def test_every_call_is_made_with_its_own_gpu_current_and_leaves_the_caller_s(
    runtime: Runtime,
) -> None:
    device = CudaDevice(1)
    pool = device.allocate(8192)
    device.copy(pool.address, 64, 128, stream=7)
    device.copy(pool.address, 64, 0)
    device.pin_host(1 << 20, 4096, read_only=True)
    device.unpin_host(1 << 20)
    pool.close()
    address = 4096
    assert runtime.asked == [
        (1, "malloc", 2 << 20),
        (1, "memcpyAsync", address, 64, 128, 4, 7),
        (1, "hostRegister", 1 << 20, 4096, 8 | 1),
        (1, "hostUnregister", 1 << 20),
        (1, "free", address),
    ]
    assert runtime.current == 0


def test_copies_that_go_together_make_their_gpu_current_once_and_wait_for_their_streams_alone(
    runtime: Runtime,
) -> None:
    made_current, looks = list[int](), list[int]()
    runtime.setDevice = lambda number: made_current.append(number)  # type: ignore[method-assign]

    def look() -> None:
        looks.append(1)
        runtime.status = 0 if len(looks) == 3 else 600

    runtime.status = 600
    CudaDevice(1).carry_out([(1, 2, 64, 7), (3, 4, 0, 7), (5, 6, 64, 8)], look)
    names = [name for _, name, *_ in runtime.asked]
    assert names.count("memcpyAsync") == names.count("eventRecord") == 2 and len(looks) == 3
    assert names.count("eventCreateWithFlags") == names.count("eventDestroy") == 2
    assert made_current == [1, 0]


def test_no_gpu_is_made_current_again_that_this_process_does_not_use(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_in_use", lambda number: False)
    CudaDevice(1).allocate(8192)
    assert runtime.current == 1


class Held:
    """An array of another library."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (4,),
            "typestr": "<f4",
            "data": (address, False),
            "strides": None,
            "stream": 5,
        }


def test_where_an_array_lies_is_asked_of_a_gpu_that_this_process_uses(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = CudaDevice(1).locate(Held(4096))
    assert located is not None
    assert (located.address, located.shape, located.stream) == (4096, (4,), 5)
    assert runtime.asked == [(1, "pointerGetAttributes", 4096)] and runtime.current == 0
    assert CudaDevice(0).locate(Held(4096)) is None
    runtime.asked.clear()
    monkeypatch.setattr(cuda, "_in_use", lambda number: False)
    assert CudaDevice(1).locate(Held(4096)) is None and not runtime.asked


def test_a_pool_of_another_gpu_is_mapped_for_this_one_where_they_have_access(
    runtime: Runtime,
) -> None:
    handle = CudaDevice(0).allocate(8192).handle
    reader = CudaDevice(1)
    reached = reader.reach(handle)
    opened = runtime.asked[-1]
    assert opened == (1, "ipcOpenMemHandle", b"memory")
    reader.close()
    assert runtime.asked[-1] == (1, "ipcCloseMemHandle", 4096 * 2) and not reached.address
    runtime.access = False
    with pytest.raises(DeviceMissing, match="cannot access the memory of GPU"):
        reader.reach(handle)
    with pytest.raises(DeviceMissing, match="the memory handle belongs to GPU"):
        reader.open(handle)
    with pytest.raises(DeviceMissing, match="can map the memory of other CUDA GPUs"):
        CudaDevice(0).reach(handle)


def test_an_event_says_whether_it_is_done_and_what_else_is_wrong(runtime: Runtime) -> None:
    event = CudaDevice(0).event()
    event.record(3)
    assert runtime.asked[-1][1:] == ("eventRecord", 4096, 3) and event.done()
    runtime.status = 600
    assert not event.done()
    runtime.status = 700
    with pytest.raises(DeviceMissing, match="700"):
        event.done()


def test_graphs_that_other_threads_capture_are_left_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, modes = Driver(), list[int]()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)

    def refused() -> None:
        modes.append(driver.mode)
        raise Runtime.CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    runtime.deviceSynchronize = refused
    device = CudaDevice(0)
    with pytest.raises(DeviceMissing):
        device.finish(1.0)
    assert (modes, driver.mode) == ([1], 0)
    monkeypatch.setattr(Runtime.CUDARuntimeError, "status", 900)
    assert not device.finish(1.0), "it may be asked again when the graph is there"
    driver.mode = 2
    device.copy(4096, 64, 128)
    assert driver.mode == 2


def test_views_are_as_the_array_interface_of_cuda_describes_them(runtime: Runtime) -> None:
    pool = CudaDevice(0).allocate(8192)
    view = pool.array(64, np.dtype(np.float32), (4, 4)).__cuda_array_interface__
    assert (view["typestr"], view["shape"], view["data"]) == (
        "<f4",
        (4, 4),
        (pool.address + 64, False),
    )
    with pytest.raises(ProtocolError):
        pool.array(8000, np.dtype(np.uint8), (500,))


def test_what_the_driver_refuses_is_said_as_missing(runtime: Runtime) -> None:
    def refuse(*arguments: Any) -> None:
        raise Runtime.CUDARuntimeError("cudaErrorNotSupported: operation not supported")

    runtime.hostRegister = refuse
    with pytest.raises(DeviceMissing, match="GPU 0: CUDA reported cudaErrorNotSupported"):
        CudaDevice(0).pin_host(0, 4096, read_only=True)
