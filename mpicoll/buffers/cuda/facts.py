"""Facts of the CUDA devices of this process, for reports."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicoll.buffers.cuda.device import count_devices, cuda_device
from mpicoll.errors import DeviceError


def list_facts() -> list[dict[str, Any]]:
    """Describe each CUDA device, in their order.

    index, name, identity (its name among all devices of all nodes), bus (of PCI), capability (such as "9.0"), memory
    (bytes), peers (devices whose memory it can reach), and the versions of CUDA that the driver and cupy's runtime are
    for (driver, runtime) and of cupy. Raises DeviceError where there is no driver, or no device.
    """
    versions = {
        "driver": _format_version(runtime.driverGetVersion()),
        "runtime": _format_version(runtime.runtimeGetVersion()),
        "cupy": str(cupy.__version__),
    }
    every = range(count_devices())
    if not every:
        raise DeviceError("CUDA can't be used here: there is no device")
    found = []
    for index in every:
        properties = runtime.getDeviceProperties(index)
        found.append(
            {
                "index": index,
                "name": cuda_device(index).model,
                "identity": cuda_device(index).identity,
                "bus": str(cupy.cuda.Device(index).pci_bus_id),
                "capability": f"{properties['major']}.{properties['minor']}",
                "memory": int(properties["totalGlobalMem"]),
                "peers": [one for one in every if one != index and runtime.deviceCanAccessPeer(index, one)],
                **versions,
            }
        )
    return found


def _format_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
