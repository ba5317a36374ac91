"""Creation, filling and copying of arrays on CUDA devices for bench and tune: torch tensors or cupy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from mpicoll.cli.bench.team import Team
from mpicoll.errors import ArgumentError, SetupError

LibraryName: TypeAlias = Literal["torch", "cupy"]


class Arrays(Protocol):
    """An array library on the device that this process uses. Its operations are ordered on the current stream."""

    def zeros(self, count: int, dtype: str) -> Any: ...

    def fill(self, array: Any, values: Any) -> None:
        """Write `values`, a numpy array, converted to the dtype of `array`."""

    def on_host(self, array: Any, dtype: str) -> Any:
        """Copy the elements to a numpy array, converted to `dtype`."""

    def copy(self, target: Any, source: Any) -> None: ...

    def synchronize(self) -> None:
        """Wait until all work on the current stream has completed."""


class _Torch:
    def __init__(self) -> None:
        self._torch = import_module("torch")

    def zeros(self, count: int, dtype: str) -> Any:
        return self._torch.zeros(count, dtype=getattr(self._torch, dtype), device="cuda")

    def fill(self, array: Any, values: Any) -> None:
        array.copy_(self._torch.from_numpy(values))

    def on_host(self, array: Any, dtype: str) -> Any:
        return array.to(getattr(self._torch, dtype)).cpu().numpy()

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def synchronize(self) -> None:
        self._torch.cuda.current_stream().synchronize()


class _Cupy:
    def __init__(self) -> None:
        self._cupy = import_module("cupy")

    def zeros(self, count: int, dtype: str) -> Any:
        return self._cupy.zeros(count, dtype)

    def fill(self, array: Any, values: Any) -> None:
        self._cupy.copyto(array, self._cupy.array(values.astype(array.dtype)))

    def on_host(self, array: Any, dtype: str) -> Any:
        return self._cupy.asnumpy(array).astype(dtype)

    def copy(self, target: Any, source: Any) -> None:
        self._cupy.copyto(target, source)

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


def arrays(library: LibraryName) -> Arrays:
    """Return the operations of `library`."""
    return _Torch() if library == "torch" else _Cupy()


def select_library(
    command: str, where: str | None, library: LibraryName | None, dtypes: Sequence[str]
) -> LibraryName | None:
    """Return the library of the arrays to be measured, from ``--device`` (`where`) and ``--array`` (`library`); None
    for arrays on the host. Raise ArgumentError if the options contradict each other."""
    if where != "cuda":
        if library is not None:
            raise ArgumentError(f"{command}: --array is for arrays on a device; add --device cuda")
        return None
    library = library or ("torch" if _torch_has_cuda() else "cupy")
    if library == "cupy" and "bfloat16" in dtypes:
        raise ArgumentError(f"{command}: cupy's arrays of bfloat16 are not measured; add --array torch")
    return library


def give(team: Team, library: LibraryName | None) -> None:
    """Select the device of each rank, if a `library` of device arrays is given. Raise SetupError on all ranks if one
    of them has no device."""
    if library is None:
        return
    failure = ""
    try:
        _require(library)
        _use(team.comm.local_rank)
    except SetupError as error:
        failure = str(error)
    for rank, one in enumerate(team.all(failure)):
        if one:
            raise SetupError(f"{one} (rank {rank} of {team.size})")


def _require(library: LibraryName) -> None:
    # mpicoll accesses devices through cupy, for tensors as well.
    count = _count()
    if library == "torch" and not _torch_has_cuda():
        raise SetupError("--device cuda: torch is not installed, or not for CUDA; add --array cupy")
    if count == 0:
        raise SetupError("--device cuda: there is no CUDA device")


def _torch_has_cuda() -> bool:
    return find_spec("torch") is not None and bool(import_module("torch").cuda.is_available())


def _count() -> int:
    try:
        runtime = import_module("cupy").cuda.runtime
    except ImportError as error:
        raise SetupError(
            f"--device cuda: cupy can't be imported ({error}); install it: pip install 'mpicoll[cuda13]'"
        ) from error
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise SetupError(f"--device cuda: there is no CUDA device: {error}") from error


def _use(local_rank: int) -> None:
    """Select the device with index `local_rank` modulo the number of devices of this node."""
    index = local_rank % _count()
    import_module("cupy").cuda.Device(index).use()
    if _torch_has_cuda():
        import_module("torch").cuda.set_device(index)


def facts() -> dict[str, Any]:
    """Return the name of this process' device, and the versions of cupy and CUDA."""
    cupy = import_module("cupy")
    runtime = cupy.cuda.runtime
    return {
        "device": runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
        "devices_of_this_node": _count(),
        "cupy": cupy.__version__,
        "cuda_runtime": runtime.runtimeGetVersion(),
        "cuda_driver": runtime.driverGetVersion(),
    }


def add_synchronization(call: Callable[[], Any], library: LibraryName) -> Callable[[], Any]:
    """Wrap `call` so that it then waits for the work it has submitted to the current stream."""
    synchronize = arrays(library).synchronize

    def run() -> Any:
        value = call()
        synchronize()
        return value

    return run


def copying(library: LibraryName, nbytes: int) -> tuple[Callable[[], None], Any]:
    """Return a function that copies `nbytes` on the device, and the target of the copy."""
    made = arrays(library)
    source, target = made.zeros(nbytes, "uint8"), made.zeros(nbytes, "uint8")
    # Reading memory that was never written might be free of cost.
    made.fill(source, np.full(nbytes, 1, np.uint8))

    def run() -> None:
        made.copy(target, source)

    return add_synchronization(run, library), target
