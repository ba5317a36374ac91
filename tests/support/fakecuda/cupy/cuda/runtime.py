# ruff: noqa: N802, N803, N815, N816, PLC0414
"""``cupy.cuda.runtime``: the CUDA runtime's functions by cupy's names."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fakecuda import errors, memory, streams, transfers
from fakecuda.errors import CUDARuntimeError as CUDARuntimeError

is_hip = False
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)
memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
streamDefault, streamNonBlocking = range(2)
streamLegacy, streamPerThread = 1, 2
eventDefault, eventBlockingSync, eventDisableTiming, eventInterprocess = 0, 1, 2, 4
hostAllocDefault, hostAllocPortable, hostAllocMapped, hostAllocWriteCombined = 0, 1, 2, 4
cudaIpcMemLazyEnablePeerAccess = 1
cudaCpuDeviceId, cudaInvalidDeviceId = -1, -2
errorInvalidValue = cudaErrorInvalidValue = errors.INVALID_VALUE
errorMemoryAllocation = cudaErrorMemoryAllocation = errors.MEMORY_ALLOCATION
cudaErrorInvalidPitchValue = errors.INVALID_PITCH
errorPeerAccessAlreadyEnabled = cudaErrorPeerAccessAlreadyEnabled = errors.PEER_ENABLED
cudaErrorPeerAccessNotEnabled = errors.PEER_NOT_ENABLED
cudaErrorNotReady = errors.NOT_READY
errorInvalidResourceHandle = cudaErrorInvalidResourceHandle = errors.INVALID_HANDLE
cudaErrorHostMemoryAlreadyRegistered = errors.HOST_REGISTERED
cudaErrorHostMemoryNotRegistered = errors.HOST_NOT_REGISTERED
cudaErrorStreamCaptureUnsupported = errors.CAPTURE_UNSUPPORTED
cudaErrorStreamCaptureImplicit = errors.CAPTURE_IMPLICIT
streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)

MOST_BLOCKS, MOST_THREADS = 2**31 - 1, 1024

_LONGEST_PITCH = 2**31 - 1


def driverGetVersion() -> int:
    return 12090


def runtimeGetVersion() -> int:
    return 12080


# Devices


def getDevice() -> int:
    return streams.device()


def setDevice(device: int) -> None:
    streams.use_device(device)


def getDeviceCount() -> int:
    count = len(memory.visible())
    if not count:
        raise CUDARuntimeError(errors.NO_DEVICE)
    return count


def getDeviceProperties(device: int) -> dict[str, object]:
    streams.check_device(device)
    return {
        "name": b"Fake CUDA device",
        "uuid": memory.uuid(device),
        "totalGlobalMem": 1 << 34,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 4,
        "maxThreadsPerBlock": 1024,
        "warpSize": 32,
        "integrated": 0,
        "canMapHostMemory": 1,
        "unifiedAddressing": 1,
        "managedMemory": 1,
        "asyncEngineCount": 3,
        "concurrentKernels": 1,
        "canUseHostPointerForRegisteredMem": 1,
        "pciBusID": memory.visible()[device] + 1,
        "pciDeviceID": 0,
        "pciDomainID": 0,
    }


def deviceGetPCIBusId(device: int) -> str:
    streams.check_device(device)
    return f"0000:{memory.visible()[device] + 1:02X}:00.0"


def deviceSynchronize() -> None:
    streams.wait_for_device(streams.device())


def deviceCanAccessPeer(device: int, peerDevice: int) -> int:
    streams.check_device(device)
    streams.check_device(peerDevice)
    return int(device != peerDevice and memory.can_reach(device, peerDevice))


def deviceEnablePeerAccess(peerDevice: int) -> None:
    pair = streams.device(), peerDevice
    streams.make_context()
    if not deviceCanAccessPeer(*pair):
        raise CUDARuntimeError(errors.PEER_UNSUPPORTED)
    if pair in memory.peers:
        raise CUDARuntimeError(errors.PEER_ENABLED)
    memory.peers.add(pair)


def deviceDisablePeerAccess(peerDevice: int) -> None:
    pair = streams.device(), peerDevice
    if pair not in memory.peers:
        raise CUDARuntimeError(errors.PEER_NOT_ENABLED)
    memory.peers.discard(pair)


def memGetInfo() -> tuple[int, int]:
    return 1 << 34, 1 << 34


# Memory


def _unsafe() -> None:
    streams.make_context()
    streams.not_while_capturing()


@dataclass(frozen=True)
class PointerAttributes:
    device: int
    devicePointer: int
    hostPointer: int
    type: int = -1


def malloc(size: int) -> int:
    _unsafe()
    return memory.allocate(size, streams.device())


def mallocAsync(size: int, stream: int) -> int:
    _unsafe()
    return memory.allocate(size, streams.stream_at(stream).device, ipc=False)


def free(ptr: int) -> None:
    if ptr:
        _unsafe()
        transfers.free(ptr)


def freeAsync(ptr: int, stream: int) -> None:
    streams.stream_at(stream).give(lambda: memory.release(ptr))


def hostAlloc(size: int, flags: int) -> int:
    _unsafe()
    return memory.allocate_host(size)


def freeHost(ptr: int) -> None:
    _unsafe()
    transfers.free_host(ptr)


def hostRegister(ptr: int, size: int, flags: int) -> None:
    _unsafe()
    if os.environ.get("FAKECUDA_REGISTER") == "0":
        raise CUDARuntimeError(errors.NOT_SUPPORTED)
    memory.register(ptr, size)


def hostUnregister(ptr: int) -> None:
    _unsafe()
    memory.unregister(ptr)


def pointerGetAttributes(ptr: int) -> PointerAttributes:
    streams.check_context(streams.device())
    allocation = memory.find(ptr)
    if allocation:
        return PointerAttributes(allocation.device, ptr, 0, memoryTypeDevice)
    if memory.pinned(ptr):
        return PointerAttributes(streams.device(), ptr, ptr, memoryTypeHost)
    return PointerAttributes(cudaInvalidDeviceId, 0, ptr, memoryTypeUnregistered)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    transfers.copy_now(dst, src, kind, size)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    transfers.copy(streams.stream_at(stream), dst, src, kind, size)


def memcpy2DAsync(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    if max(dpitch, spitch) > _LONGEST_PITCH:
        raise CUDARuntimeError(errors.INVALID_PITCH, f"{dpitch} and {spitch} bytes")
    if width > min(dpitch, spitch):
        raise CUDARuntimeError(errors.INVALID_VALUE, f"width {width}, pitches {dpitch} and {spitch}")
    transfers.copy(streams.stream_at(stream), dst, src, kind, width, height, (dpitch, spitch))


def memset(ptr: int, value: int, size: int) -> None:
    transfers.fill(streams.stream_at(0), ptr, value, size)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    transfers.fill(streams.stream_at(stream), ptr, value, size)


def ipcGetMemHandle(devPtr: int) -> bytes:
    _unsafe()
    return memory.export(devPtr)


def ipcOpenMemHandle(handle: bytes, flags: int = cudaIpcMemLazyEnablePeerAccess) -> int:
    _unsafe()
    return memory.open_export(handle, streams.device())


def ipcCloseMemHandle(devPtr: int) -> None:
    _unsafe()
    # The device may still use it.
    transfers.wait_unless_running()
    memory.close_export(devPtr)


# Streams and events


def streamCreateWithFlags(flags: int) -> int:
    return streams.Stream(streams.device(), blocking=flags != streamNonBlocking).ptr


def streamCreateWithPriority(flags: int, priority: int) -> int:
    return streamCreateWithFlags(flags)


def streamDestroy(stream: int) -> None:
    streams.destroy(streams.stream_at(stream))


def streamSynchronize(stream: int) -> None:
    streams.stream_at(stream).wait()


def streamQuery(stream: int) -> int:
    return streams.stream_at(stream).query()


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    streams.event_at(event).hold_back(streams.stream_at(stream))


def launchHostFunc(stream: int, callback: object, arg: object) -> None:
    streams.stream_at(stream).give(lambda: callback(arg) and None)  # type: ignore[operator]


def streamBeginCapture(stream: int, mode: int = streamCaptureModeRelaxed) -> None:
    streams.begin_capture(streams.stream_at(stream), mode)


def streamIsCapturing(stream: int) -> bool:
    found = streams.stream_at(stream)
    streams.check_context(found.device)
    if found.legacy and streams.capture_beside(found):
        raise CUDARuntimeError(errors.CAPTURE_IMPLICIT)
    return found.capture is not None


def eventCreateWithFlags(flags: int) -> int:
    return streams.create_event()


def eventCreate() -> int:
    return eventCreateWithFlags(eventDefault)


def eventDestroy(event: int) -> None:
    streams.destroy_event(event)


def eventRecord(event: int, stream: int) -> None:
    streams.event_at(event).record(streams.stream_at(stream))


def eventQuery(event: int) -> int:
    found = streams.event_at(event)
    if not streams.is_lost(found.device):
        _unsafe()
    return found.query()


def eventSynchronize(event: int) -> None:
    _unsafe()
    streams.event_at(event).wait()
