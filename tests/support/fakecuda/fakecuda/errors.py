"""CUDA's errors, by their numbers."""

from __future__ import annotations

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INITIALIZATION = 3
INVALID_CONFIGURATION = 9
INVALID_PITCH = 12
INVALID_COPY = 21
NO_DEVICE = 100
INVALID_DEVICE = 101
UNINITIALIZED = 201
ALREADY_MAPPED = 208
MAPPING = 205
PEER_UNSUPPORTED = 217
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
LAUNCH_TIMEOUT = 702
PEER_ENABLED = 704
PEER_NOT_ENABLED = 705
HOST_REGISTERED = 712
MISALIGNED = 716
HOST_NOT_REGISTERED = 713
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_UNMATCHED = 903
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907

_WORDS = {
    INVALID_VALUE: "cudaErrorInvalidValue: invalid argument",
    MEMORY_ALLOCATION: "cudaErrorMemoryAllocation: out of memory",
    INITIALIZATION: "cudaErrorInitializationError: initialization error",
    INVALID_CONFIGURATION: "cudaErrorInvalidConfiguration: invalid configuration argument",
    INVALID_PITCH: "cudaErrorInvalidPitchValue: invalid pitch argument",
    INVALID_COPY: "cudaErrorInvalidMemcpyDirection: invalid copy direction for memcpy",
    NO_DEVICE: "cudaErrorNoDevice: no CUDA-capable device is detected",
    INVALID_DEVICE: "cudaErrorInvalidDevice: invalid device ordinal",
    UNINITIALIZED: "cudaErrorDeviceUninitialized: invalid device context",
    ALREADY_MAPPED: "cudaErrorAlreadyMapped: resource already mapped",
    MAPPING: "cudaErrorMapBufferObjectFailed: mapping of buffer object failed",
    PEER_UNSUPPORTED: "cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices",
    INVALID_HANDLE: "cudaErrorInvalidResourceHandle: invalid resource handle",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    LAUNCH_TIMEOUT: "cudaErrorLaunchTimeout: the launch timed out and was terminated",
    PEER_ENABLED: "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled",
    PEER_NOT_ENABLED: "cudaErrorPeerAccessNotEnabled: peer access has not been enabled",
    HOST_REGISTERED: "cudaErrorHostMemoryAlreadyRegistered: part or all of the requested memory range is already"
    " mapped",
    HOST_NOT_REGISTERED: "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered memory region",
    MISALIGNED: "cudaErrorMisalignedAddress: misaligned address",
    NOT_PERMITTED: "cudaErrorNotPermitted: operation not permitted",
    NOT_SUPPORTED: "cudaErrorNotSupported: operation not supported",
    CAPTURE_UNSUPPORTED: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    CAPTURE_INVALIDATED: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    CAPTURE_UNMATCHED: "cudaErrorStreamCaptureUnmatched: the capture was not initiated in this stream",
    CAPTURE_ISOLATION: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    CAPTURE_IMPLICIT: "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on a capturing"
    " blocking stream",
    CAPTURED_EVENT: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
}


class CUDARuntimeError(RuntimeError):
    """As cupy raises it; `status` is CUDA's number. What went wrong in the fake is told behind CUDA's words."""

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        self.detail = detail
        super().__init__(_WORDS[status] + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[int, str]]:
        return type(self), (self.status, self.detail)
