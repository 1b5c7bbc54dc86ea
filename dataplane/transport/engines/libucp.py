"""UCX's C library, as far as one-sided reads need it: ctypes over the handles of ucxx or ucx-py.

Neither binds registered memory, remote keys and `get` (ucxx binds none of them), and neither
closes an endpoint by force unless it knows that it failed. Runs in a bulk worker. All calls of
one `UcpWorker` come from one thread. Names and layouts are those of ucp.h 1.11 and later.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_ssize_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from dataplane.errors import TransferFailed, Unavailable

PENDING = 1  # UCS_INPROGRESS
_LAST_ERROR = -100
_BUSY = -15  # UCS_ERR_BUSY
_PEER_ERRORS = 1  # UCP_ERR_HANDLING_MODE_PEER
_CUDA_MEMORY = 1  # UCS_MEMORY_TYPE_CUDA
_FORCE = 1  # UCP_EP_CLOSE_FLAG_FORCE
_OnError = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


SETTINGS = {
    # slower than ours wherever it was measured, and its listeners take anybody
    "UCX_TLS": "^tcp",
    # error handling would silently leave out shared memory (7 → 0.7 GB/s); with this both stay
    "UCX_POSIX_ERROR_HANDLING": "y",
    # without NVLink, reads between GPUs are off unless asked for (0.5 against 49 GB/s reported)
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # it warns of variables that it does not know: of another release's, for one
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # it logs to standard output, which is not ours to write to
    "UCX_LOG_FILE": "stderr",
}
"""How UCX is set up in a bulk worker, whoever loads it; settings of the user's come first."""


def settle(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set UCX's variables. Call this before UCX is loaded, because it reads them once."""
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)


class _MapParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),  # 1: address, 2: length, 16: memory_type
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]


class _EndpointParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),  # 1: address, 2: err_mode, 4: the error callback
        ("address", c_char_p),
        ("err_mode", c_int),
        ("on_error", _OnError),
        ("on_error_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", c_void_p),
        ("sockaddr_length", c_uint32),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", c_void_p),
        ("local_sockaddr_length", c_uint32),
    ]


class _RequestParams(ctypes.Structure):
    _fields_ = [
        ("op_attr_mask", c_uint32),  # 16: flags, 256: memh
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]


class _Lane(ctypes.Structure):
    _fields_ = [("transport", c_char_p), ("device", c_char_p)]


class _EndpointAttributes(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),  # 8: lanes
        ("name", c_char * 32),
        ("local_sockaddr", c_uint64 * 16),
        ("remote_sockaddr", c_uint64 * 16),
        ("lanes", POINTER(_Lane)),
        ("lane_count", c_uint),
        ("lane_bytes", c_size_t),
        ("user_data", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # ucs_status_t is one byte
    "ucp_mem_map": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int8, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (c_int8, [c_void_p, c_char_p, c_void_p]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (c_int8, [c_void_p, c_void_p]),
    "ucp_worker_arm": (c_int8, [c_void_p]),
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_ep_create": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_ep_query": (c_int8, [c_void_p, c_void_p]),
    "ucp_ep_close_nbx": (c_ssize_t, [c_void_p, c_void_p]),
    "ucp_get_nbx": (
        c_ssize_t,
        [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p],
    ),
    "ucp_request_check_status": (c_int8, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}


_BRIEF = "ucp_get_nbx", "ucp_request_check_status", "ucp_request_free"
"""Called for every piece and over in less than it takes to give the interpreter's lock back."""


def _library() -> ctypes.CDLL:
    """The copy that ucxx or ucx-py has loaded already; OSError where none is."""
    library = ctypes.CDLL("libucp.so.0")
    keeping_the_lock = ctypes.PyDLL("libucp.so.0")
    for name in _BRIEF:
        setattr(library, name, getattr(keeping_the_lock, name))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class UcpWorker:
    """A UCP worker, the region registered with its context, and the operations on both.

    context, worker: `ucp_context_h` and `ucp_worker_h`, owned and kept alive by the caller.
    """

    def __init__(self, context: int, worker: int) -> None:
        self._library = _library()
        self._text = ctypes.CDLL("libucs.so.0").ucs_status_string
        self._text.restype, self._text.argtypes = c_char_p, [c_int8]
        self._progress = self._library.ucp_worker_progress
        self._check_status = self._library.ucp_request_check_status
        self._context = context
        self._worker = worker
        self._on_error = _OnError(lambda arg, endpoint, status: None)
        self._memory: list[c_void_p] = []
        self._closing: list[int] = []
        descriptor = c_int()
        self._checked(
            self._library.ucp_worker_get_efd(worker, byref(descriptor)), "get its event descriptor"
        )
        self.event_fd = descriptor.value
        """Readable when there is something to `progress`, once `arm` has said so."""

    def address(self) -> bytes:
        """The address that another worker needs to `connect`."""
        address, length = c_void_p(), c_size_t()
        status = self._library.ucp_worker_get_address(self._worker, byref(address), byref(length))
        self._checked(status, "get its address")
        try:
            return ctypes.string_at(address, length.value)
        finally:
            self._library.ucp_worker_release_address(self._worker, address)

    def register(self, address: int, nbytes: int, on_gpu: bool = False) -> bytes:
        """Register memory, once, for reads from and into it. Return its packed remote key."""
        params = _MapParams(
            field_mask=19 if on_gpu else 3,
            address=address,
            length=nbytes,
            memory_type=_CUDA_MEMORY,
        )
        memh = c_void_p()
        status = self._library.ucp_mem_map(self._context, byref(params), byref(memh))
        self._checked(status, f"register {nbytes} bytes")
        self._memory.append(memh)
        packed, length = c_void_p(), c_size_t()
        status = self._library.ucp_rkey_pack(self._context, memh, byref(packed), byref(length))
        self._checked(status, "pack a remote key")
        try:
            return ctypes.string_at(packed, length.value)
        finally:
            self._library.ucp_rkey_buffer_release(packed)

    def connect(self, address: bytes, packed_key: bytes, into: int = 0) -> UcpLine:
        """Open an endpoint, with error handling, to read the memory of the key into the memory
        that was registered here first, or as number `into` after it. Raises Unavailable if no
        lane leads there."""
        params = _EndpointParams(
            field_mask=7, address=address, err_mode=_PEER_ERRORS, on_error=self._on_error
        )
        endpoint, key = c_void_p(), c_void_p()
        status = self._library.ucp_ep_create(self._worker, byref(params), byref(endpoint))
        if status:
            raise Unavailable(
                f"UCX cannot connect to the other peer: {self.text(status)}; check which "
                "transports UCX_TLS allows",
                status=status,
            )
        status = self._library.ucp_ep_rkey_unpack(endpoint, packed_key, byref(key))
        if status:
            self.close_endpoint(endpoint.value or 0)
        self._checked(status, "unpack a remote key")
        return UcpLine(self, self._library, endpoint.value or 0, key, self._memory[into])

    def progress(self) -> bool:
        """Make some progress. Return False if there was nothing to do."""
        return bool(self._progress(self._worker))

    def arm(self) -> bool:
        """Return True if `event_fd` will signal, or False if there is work to progress first."""
        status = self._library.ucp_worker_arm(self._worker)
        if status != _BUSY:
            self._checked(status, "arm its event descriptor")
        return bool(status == 0)

    def status(self, request: int) -> int:
        """PENDING, or the final status: 0 for success. A finished request is freed."""
        status: int = self._check_status(request)
        if status != PENDING:
            self._library.ucp_request_free(request)
        return status

    def text(self, status: int) -> str:
        told: bytes = self._text(status)
        return told.decode()

    def close_endpoint(self, endpoint: int) -> None:
        """Close an endpoint by force: every request on it ends within the next `progress`, and
        writes no more."""
        params = _RequestParams(op_attr_mask=16, flags=_FORCE)
        request = self._library.ucp_ep_close_nbx(endpoint, byref(params))
        if request > 0 or request < _LAST_ERROR:
            self._closing.append(request)
        # an end point takes its last steps when others progress
        self._closing = [one for one in self._closing if self.status(one) == PENDING]

    def _checked(self, status: int, what: str) -> None:
        if status:
            raise TransferFailed(
                f"UCX cannot {what}: {self.text(status)}. Check UCX_TLS "
                "and the peer's log, then repeat the call",
                status=status,
            )


class UcpLine:
    """An endpoint to another worker, and the key of the region there."""

    def __init__(
        self,
        worker: UcpWorker,
        library: ctypes.CDLL,
        endpoint: int,
        key: c_void_p,
        memh: c_void_p,
    ) -> None:
        self._worker = worker
        self._library = library
        self._endpoint = endpoint
        self._key = key
        self._get = library.ucp_get_nbx
        self.lanes = self._lanes()
        """The transports and devices that it uses, as UCX calls them: `posix/memory`."""
        self.in_memory = bool(self.lanes) and all(lane.endswith("/memory") for lane in self.lanes)
        """Whether the bytes go through shared memory only."""
        self._params = _RequestParams(op_attr_mask=256, memh=memh)
        self._by = byref(self._params)

    def get(self, address: int, nbytes: int, remote_address: int) -> int:
        """Start to read into registered memory. Return the request, 0 if it is done. Raises
        TransferFailed."""
        request: int = self._get(
            self._endpoint, address, nbytes, remote_address, self._key, self._by
        )
        if _LAST_ERROR <= request < 0:
            told = self._worker.text(request)
            raise TransferFailed(f"a UCX read failed: {told}. Repeat the call", status=request)
        return request

    def _lanes(self) -> tuple[str, ...]:
        room = (_Lane * 16)()
        attributes = _EndpointAttributes(
            field_mask=8, lanes=room, lane_count=16, lane_bytes=ctypes.sizeof(_Lane)
        )
        if self._library.ucp_ep_query(self._endpoint, byref(attributes)):
            return ()
        lanes = (room[at] for at in range(attributes.lane_count))
        return tuple(
            sorted({f"{lane.transport.decode()}/{lane.device.decode()}" for lane in lanes})
        )

    def close(self) -> None:
        """Close by force, see `UcpWorker.close_endpoint`."""
        self._library.ucp_rkey_destroy(self._key)
        self._worker.close_endpoint(self._endpoint)
