"""Arrays on CUDA devices, as bench makes, fills and looks at them: torch's tensors or cupy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from mpicoll.errors import SetupError

Library: TypeAlias = Literal["torch", "cupy"]


class Arrays(Protocol):
    """An array library on the device that this process uses. What it does is work of the current stream."""

    def zeros(self, count: int, dtype: str) -> Any: ...

    def fill(self, array: Any, values: Any) -> None:
        """Write `values`, of numpy, converted to its dtype."""

    def on_host(self, array: Any, dtype: str) -> Any:
        """A numpy array of the elements, converted to `dtype`."""

    def copy(self, target: Any, source: Any) -> None: ...

    def synchronize(self) -> None:
        """Return when the current stream has done all."""


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


def arrays(library: Library) -> Arrays:
    """Those of `library`."""
    return _Torch() if library == "torch" else _Cupy()


def default() -> Library:
    """torch, if it can make arrays on a device, else cupy."""
    return "torch" if find_spec("torch") is not None and import_module("torch").cuda.is_available() else "cupy"


def require(library: Library) -> None:
    """Raise SetupError unless there is a device, and `library` and cupy can reach it."""
    # mpicoll reaches devices by cupy, whatever the arrays are.
    count = _count()
    if library == "torch" and (find_spec("torch") is None or not import_module("torch").cuda.is_available()):
        raise SetupError("bench --device cuda: torch is not installed, or not for CUDA; add --array cupy")
    if count == 0:
        raise SetupError("bench --device cuda: there is no CUDA device")


def _count() -> int:
    try:
        runtime = import_module("cupy").cuda.runtime
    except ImportError as error:
        raise SetupError(
            f"bench --device cuda: cupy can't be imported ({error}); install it: pip install 'mpicoll[cuda13]'"
        ) from error
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise SetupError(f"bench --device cuda: there is no CUDA device: {error}") from error


def use(local_rank: int) -> None:
    """Make one of the devices this process' own: its `local_rank`-th, or one that it shares, where there are fewer."""
    index = local_rank % _count()
    import_module("cupy").cuda.Device(index).use()
    if find_spec("torch") is not None and import_module("torch").cuda.is_available():
        import_module("torch").cuda.set_device(index)


def facts() -> dict[str, Any]:
    """What there is to tell of this process' device."""
    cupy = import_module("cupy")
    runtime = cupy.cuda.runtime
    return {
        "device": runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
        "devices_of_this_node": _count(),
        "cupy": cupy.__version__,
        "cuda_runtime": runtime.runtimeGetVersion(),
        "cuda_driver": runtime.driverGetVersion(),
    }


def synchronised(call: Callable[[], Any], library: Library) -> Callable[[], Any]:
    """`call`, and the wait for what it has given the current stream to do."""
    synchronize = arrays(library).synchronize

    def run() -> Any:
        value = call()
        synchronize()
        return value

    return run


def copying(library: Library, nbytes: int) -> tuple[Callable[[], None], Any]:
    """What copies `nbytes` on the device, and where to."""
    made = arrays(library)
    source, target = made.zeros(nbytes, "uint8"), made.zeros(nbytes, "uint8")
    # Memory that was never written to might be had for nothing.
    made.fill(source, np.full(nbytes, 1, np.uint8))

    def run() -> None:
        made.copy(target, source)

    return synchronised(run, library), target
