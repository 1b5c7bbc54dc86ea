"""CUDA memory through cupy: plain cudaMalloc allocations and IPC handles.

Only plain cudaMalloc memory has a handle that other processes can open. The handle stands for the
whole allocation, and memory of cupy's or torch's pools may be part of a larger one, so neither is
used. Processes can open each other's handles only in one PID namespace. cupy is imported on first
use of a device.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np

from dataplane.errors import DeviceMissing, ValueCorrupt, counted
from dataplane.gpu.device import Copy, Device, Event, Located, Pool, PoolHandle, check_inside
from dataplane.wire.arrays import dtype_name, dtype_of, is_torch

_DLPACK_CUDA = 2
_BLOCK_BYTES = 2 << 20
"""A handle exports a whole block of the driver. Smaller allocations would share a block."""
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault
_SUCCESS, _NOT_READY = 0, 600
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for the copies of every GPU, not of one alone
_READ_ONLY = 8  # cudaHostRegisterReadOnly: without it read-only mappings are refused
_EVENT_FLAGS = 2  # cudaEventDisableTiming
_CAPTURE_UNSUPPORTED = 900  # cudaErrorStreamCaptureUnsupported
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaDevice(Device):
    """A GPU, addressed by its index in this process."""

    kind = "cuda"

    def __init__(self, number: int = 0) -> None:
        self._runtime = _runtime()
        self.number = number
        self._made: WeakSet[Pool | Event] = WeakSet()
        # Without making the GPU current, which would take memory of a GPU that may not be used.
        with self._cuda_errors():
            self.identity: str = self._runtime.deviceGetPCIBusId(number)

    @classmethod
    def count(cls) -> int:
        """Return how many GPUs this process sees; 0 without a driver. Raise DeviceMissing without
        cupy."""
        runtime = _runtime()
        try:
            return int(runtime.getDeviceCount())
        except runtime.CUDARuntimeError:
            return 0

    @classmethod
    def numbered(cls, number: int) -> CudaDevice:
        count = cls.count()
        if number >= count:
            raise DeviceMissing(
                f"there is no GPU {number}: this process sees {counted(count, 'GPU')}; check "
                "nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
        return cls(number)

    @classmethod
    def of(cls, identity: str) -> CudaDevice:
        for number in range(cls.count()):
            device = cls(number)
            if device.identity == identity:
                return device
        raise DeviceMissing(
            f"this process does not see GPU {identity}: check CUDA_VISIBLE_DEVICES",
            device=identity,
        )

    @classmethod
    def is_used(cls, identity: str, current: int | None, required: bool) -> bool:
        if current is None and not required:
            return False  # opening a pool would start CUDA, which takes GPU memory
        if not cls.count():
            raise DeviceMissing(
                "this process sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
        return cls(current or 0).identity == identity

    @classmethod
    def may_hold(cls, value: object) -> bool:
        if isinstance(value, np.ndarray):
            return False
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return bool(value.device.type == "cuda")
        if hasattr(value, "__array_interface__"):
            return False
        if hasattr(value, "__cuda_array_interface__"):
            return True
        return hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _DLPACK_CUDA

    def __repr__(self) -> str:
        return f"<CudaDevice {self.number} {self.identity}>"

    def allocate(self, nbytes: int) -> Pool:
        with self._current():
            address = self._runtime.malloc(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
            try:
                raw = bytes(self._runtime.ipcGetMemHandle(address))
            except BaseException:
                self._runtime.free(address)
                raise
        handle = PoolHandle(self.kind, self.identity, raw, 0, nbytes)
        return _CudaPool(self, address, handle, own=True)

    def open(self, handle: PoolHandle) -> Pool:
        if handle.kind != self.kind or handle.device != self.identity:
            raise DeviceMissing(
                f"the memory handle belongs to GPU {handle.device}, but this process uses GPU "
                f"{self.identity}: check CUDA_VISIBLE_DEVICES"
            )
        return self._opened(handle)

    def reach(self, handle: PoolHandle) -> Pool:
        """Map the memory of another GPU, over NVLink or PCIe. CUDA_VISIBLE_DEVICES may hide that
        GPU from this process."""
        if handle.kind != self.kind or handle.device == self.identity:
            raise DeviceMissing(
                f"GPU {self.identity} can map the memory of other CUDA GPUs, but this memory is on "
                f"{handle.kind} device {handle.device}"
            )
        try:
            other: int | None = CudaDevice.of(handle.device).number
        except DeviceMissing:
            other = None  # only opening its memory shows whether it works
        if other is not None:
            with self._cuda_errors():
                if not self._runtime.deviceCanAccessPeer(self.number, other):
                    raise DeviceMissing(
                        f"GPU {self.identity} cannot access the memory of GPU {handle.device} "
                        "directly"
                    )
        return self._opened(handle)

    def _opened(self, handle: PoolHandle) -> Pool:
        with self._current():
            base = self._runtime.ipcOpenMemHandle(handle.raw)
        return _CudaPool(self, base + handle.offset, handle, own=False)

    def bring(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        import cupy

        with self._current():
            made = cupy.empty(shape, np.dtype(_typestr(dtype)))
            stream = cupy.cuda.get_current_stream()
            self._runtime.memcpyAsync(
                made.data.ptr, address, made.nbytes, _COPY_BY_ADDRESS, stream.ptr
            )
            stream.synchronize()
        return made

    def event(self) -> Event:
        with self._current():
            return _CudaEvent(self, self._runtime.eventCreateWithFlags(_EVENT_FLAGS))

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        if nbytes:
            with self._current():
                self._runtime.memcpyAsync(target, source, nbytes, _COPY_BY_ADDRESS, stream)

    def carry_out(self, copies: Iterable[Copy], look: Callable[[], object] = lambda: None) -> None:
        with self._current():  # current once, for all copies
            super().carry_out(copies, look)

    def locate(self, value: object) -> Located | None:
        if is_torch(value):
            return self._of_torch(value, sys.modules["torch"])
        if hasattr(value, "__cuda_array_interface__"):
            return self._of_interface(value)
        if hasattr(value, "__dlpack_device__"):
            kind, number = value.__dlpack_device__()
            if (int(kind), int(number)) == (_DLPACK_CUDA, self.number):
                import cupy

                with self._current():
                    return self._of_interface(cupy.from_dlpack(value))
        return None

    def _of_torch(self, value: Any, torch: Any) -> Located | None:
        if value.device.type != "cuda" or value.device.index != self.number:
            return None
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            return None
        dtype = _of_dtype(value.dtype)
        if dtype is None:
            return None
        if value.is_conj() or value.is_neg() or not value.is_contiguous():
            value = value.detach().resolve_conj().resolve_neg().contiguous()
        stream = torch.cuda.current_stream(self.number).cuda_stream
        return Located(value.data_ptr(), dtype, tuple(value.shape), stream, value)

    def _of_interface(self, value: Any) -> Located | None:
        """Locate an array of cupy, jax or numba. If it is not contiguous, cupy copies it."""
        told = value.__cuda_array_interface__
        address = int(told["data"][0])
        dtype = np.dtype(told["typestr"])
        if dtype_name(dtype) is None or (address and self.number != self._of_address(address)):
            return None
        if told.get("strides") is not None:
            import cupy

            with self._current():  # cupy copies on the current GPU, on cupy's stream there
                value = cupy.ascontiguousarray(cupy.asarray(value))
                told = value.__cuda_array_interface__
            address = int(told["data"][0])
        return Located(address, dtype, tuple(told["shape"]), told.get("stream") or 0, value)

    def _of_address(self, address: int) -> int:
        """Return the number of the GPU that has this address; -1 if no GPU has it, or if this
        process does not use this GPU."""
        if not _in_use(self.number):
            return -1  # none of its memory is mapped here
        with self._current():  # this call creates a context on the current GPU
            return int(self._runtime.pointerGetAttributes(address).device)

    def finish(self, timeout_s: float) -> bool:
        """As in `Device`. Also False while a graph is captured on this GPU, because CUDA cannot
        wait then."""
        with self._current():
            try:
                self._runtime.deviceSynchronize()
            except self._runtime.CUDARuntimeError as exc:
                if exc.status != _CAPTURE_UNSUPPORTED:
                    raise
                return False
        return True

    def bind(self) -> None:
        with self._cuda_errors():
            self._runtime.setDevice(self.number)

    def pin_host(self, address: int, nbytes: int, read_only: bool = False) -> None:
        with self._current():
            flags = _PORTABLE | (_READ_ONLY if read_only else 0)
            self._runtime.hostRegister(address, nbytes, flags)

    def unpin_host(self, address: int) -> None:
        with self._current():
            self._runtime.hostUnregister(address)

    def close(self) -> None:
        for made in list(self._made):
            made.close()

    @contextmanager
    def _cuda_errors(self) -> Iterator[None]:
        """Raise DeviceMissing for a CUDA error."""
        try:
            yield
        except self._runtime.CUDARuntimeError as exc:
            raise DeviceMissing(
                f"GPU {self.number}: CUDA reported {exc}. Check nvidia-smi and dmesg for GPU "
                "errors",
                device=self.number,
            ) from exc

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make this GPU current in the thread, and restore the previous one afterwards if this
        process uses it. In a new thread, the previous one is the first GPU, which the process may
        not use."""
        outer, _entered.device = getattr(_entered, "device", None), self
        if outer is self:
            yield
            return
        try:
            with self._cuda_errors(), _apart_from_captures():
                before = self._runtime.getDevice()
                try:
                    if before != self.number:
                        self._runtime.setDevice(self.number)
                    yield
                finally:
                    if before != self.number and _in_use(before):
                        self._runtime.setDevice(before)
        finally:
            _entered.device = outer


class CudaView:
    """Bytes of a pool for `cupy.asarray` and `torch.as_tensor`. Their arrays keep the pin alive."""

    def __init__(
        self, pool: _CudaPool, address: int, typestr: str, shape: tuple[int, ...], keep: object
    ) -> None:
        self._kept = pool, keep
        self.shape = shape
        # torch rejects read-only arrays
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "stream": None,
        }


class _CudaPool(Pool):
    def __init__(self, device: CudaDevice, address: int, handle: PoolHandle, own: bool) -> None:
        self._device = device
        self._own = own
        device._made.add(self)
        self.address, self.nbytes, self.handle = address, handle.nbytes, handle

    def array(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], keep: object = None
    ) -> Any:
        check_inside(self, offset, dtype.itemsize * math.prod(shape))
        return CudaView(self, self.address + offset, _typestr(dtype), shape, keep)

    def close(self) -> None:
        address, self.address = self.address, 0
        if not address:
            return
        with self._device._current():
            if self._own:
                self._device._runtime.free(address)
            else:
                self._device._runtime.ipcCloseMemHandle(address - self.handle.offset)


class _CudaEvent(Event):
    def __init__(self, device: CudaDevice, number: int) -> None:
        self._device = device
        self.number = number
        device._made.add(self)

    def record(self, stream: int = 0) -> None:
        with self._device._current():
            self._device._runtime.eventRecord(self.number, stream)

    def done(self) -> bool:
        with self._device._current():
            status = self._device._runtime.eventQuery(self.number)
        if status not in (_SUCCESS, _NOT_READY):
            raise DeviceMissing(
                f"GPU {self._device.number}: a CUDA event query failed with CUDA error {status}, "
                "so this process can no longer use the GPU: check nvidia-smi and dmesg for GPU "
                "errors, then restart the process",
                status=status,
            )
        return bool(status == _SUCCESS)

    def close(self) -> None:
        number, self.number = self.number, 0
        if number:
            with self._device._current():
                self._device._runtime.eventDestroy(number)


_entered = threading.local()
"""`device`: the GPU that a call of this module has made current in this thread."""


def current_gpu() -> int | None:
    """Return the index of the GPU that is current for torch or cupy in this thread; None if neither
    uses a GPU. Does not initialise CUDA."""
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    if hasattr(cupy, "cuda"):
        try:
            return int(cupy.cuda.runtime.getDevice())
        except cupy.cuda.runtime.CUDARuntimeError:
            return None
    return None


@functools.cache
def _of_dtype(dtype: object) -> np.dtype[Any] | None:
    """Return numpy's form of a torch dtype; None if the plane cannot store it."""
    try:
        return dtype_of(str(dtype).removeprefix("torch."))
    except ValueCorrupt:
        return None


def _typestr(dtype: np.dtype[Any]) -> str:
    """Return the array interface's name of a dtype: for dtypes that it does not have, unsigned
    integers of the same width."""
    plain = dtype.isbuiltin == 1 and dtype.kind in "biufc"
    return dtype.str if plain else f"<u{dtype.itemsize}"


@contextmanager
def _apart_from_captures() -> Iterator[None]:
    """Keep CUDA graphs intact that other threads are capturing. In the default capture mode, a
    query of an event ends every capture of the process."""
    driver = _driver()
    mode = ctypes.c_int(_THREAD_LOCAL)
    said = driver is not None and not driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        if driver is not None and said:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _in_use(number: int) -> bool:
    """Return whether this process has a context on that GPU; True if the driver does not say.
    `setDevice` creates a missing context, which takes hundreds of MB of the GPU. In processes that
    work with another GPU, that would be the first one."""
    driver = _driver()
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(number)):
        return True
    told = ctypes.byref(flags), ctypes.byref(active)
    return bool(driver.cuDevicePrimaryCtxGetState(device, *told) or active.value)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except ImportError as exc:
        raise DeviceMissing(
            f"GPU memory needs cupy, which cannot be imported ({exc}): run pip install "
            "cupy-cuda13x (cupy-cuda12x for CUDA 12)"
        ) from exc
    return runtime
