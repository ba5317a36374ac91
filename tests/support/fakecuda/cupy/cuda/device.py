"""``cupy.cuda.device``."""

from __future__ import annotations

import threading
from typing import Any

from fakecuda import streams

from cupy.cuda import runtime

_before = threading.local()


class Device:
    def __init__(self, device: int | Device | None = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Any:
        stack = _before.__dict__.setdefault("stack", [])
        stack.append(runtime.getDevice())
        if stack[-1] != self.id:
            runtime.setDevice(self.id)
        return self

    def __exit__(self, *args: object) -> None:
        runtime.setDevice(_before.stack.pop())

    def use(self) -> Device:
        runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        with streams.on_device(self.id):
            runtime.deviceSynchronize()

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def mem_info(self) -> tuple[int, int]:
        return runtime.memGetInfo()

    @property
    def pci_bus_id(self) -> str:
        return runtime.deviceGetPCIBusId(self.id)


def get_device_id() -> int:
    return runtime.getDevice()
