"""Words of host memory that streams write, and for which streams wait."""

from __future__ import annotations

from mpicoll.buffers.cuda.driver import CurrentDevice, RelaxedCapture, find_device_address, find_word_operations
from mpicoll.buffers.cuda.pinned import register_host_memory
from mpicoll.buffers.cuda.streams import DeviceStreams
from mpicoll.buffers.dtypes import Array
from mpicoll.errors import DeviceError

_NO_FLAGS = 0
"""Of a write: after all earlier work, which is visible then to all devices and to the host. Of a wait: until the word
is at least the value, in cyclic order."""


class StreamWords:
    """Words of 32 bits in `memory` of the host, which other processes may have mapped too; see
    :class:`mpicoll.buffers.device.Words`. Raises DeviceError where the device can't access them."""

    def __init__(self, device: DeviceStreams, memory: Array) -> None:
        self._device = device
        self._memory = memory  # unmapped when it is unreferenced
        register_host_memory(device.index, memory)
        address = memory.ctypes.data
        try:
            with RelaxedCapture(), CurrentDevice(device.index):
                self._address = find_device_address(address)
            self._write, self._wait = find_word_operations()
        except OSError as error:
            raise DeviceError(f"streams of {device.name} can't write words of host memory: {error}") from error

    def write(self, offset: int, value: int) -> None:
        failed = self._write(self._device.submit().ptr, self._address + offset, value, _NO_FLAGS)
        if failed:
            raise self._explain(failed)

    def wait(self, offset: int, value: int) -> None:
        failed = self._wait(self._device.submit().ptr, self._address + offset, value, _NO_FLAGS)
        if failed:
            raise self._explain(failed)

    def _explain(self, failed: int) -> DeviceError:
        return DeviceError(f"CUDA's error {failed} for a word in host memory, on a stream of {self._device.name}")
