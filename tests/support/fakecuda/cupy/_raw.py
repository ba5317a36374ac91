"""``cupy.RawKernel``."""

from __future__ import annotations

from fakecuda import errors, kernels, memory, streams

from cupy.cuda import runtime
from cupy.cuda.stream import get_current_stream


class RawKernel:
    """A kernel whose arguments are integers of 64 bits. Those that are addresses of device memory point there."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self.code, self.name, self.__name__ = code, name, name
        if options or backend != "nvrtc":
            raise NotImplementedError("the fake compiles by g++, without options")

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[int, ...], *, shared_mem: int = 0
    ) -> None:
        if len(grid) != 1 or len(block) != 1 or shared_mem or any(type(one) is not int for one in args):
            raise NotImplementedError("the fake has one dimension of threads, and integers of Python as arguments")
        if not 0 < grid[0] <= runtime.MOST_BLOCKS or not 0 < block[0] <= runtime.MOST_THREADS:
            raise runtime.CUDARuntimeError(errors.INVALID_CONFIGURATION, f"{grid[0]} blocks of {block[0]} threads")
        function = kernels.load(self.code, self.name, len(args))

        def work() -> None:
            kernels.call(function, grid[0], block[0], [_translated(one) for one in args])

        streams.launch(streams.stream_at(get_current_stream().ptr), work)


def _translated(number: int) -> int:
    """A number for a kernel; the working address, if it is the address of device memory."""
    return memory.working(number, 1) if memory.of_devices(number) else number
