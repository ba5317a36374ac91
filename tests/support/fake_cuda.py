"""cupy for tests: the real one where it has a device, else the fake of ``tests/support/fakecuda``."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).with_name("fakecuda")

# Only for this import: the fake cupy is in the same folder, and nothing may find it before install().
sys.path.insert(0, str(FOLDER))
fakecuda = import_module("fakecuda")
sys.path.remove(str(FOLDER))


_hidden: dict[str, ModuleType] = {}
"""The fake's modules, and those that hold on to them, while tests see a machine without CUDA."""


def install() -> ModuleType:
    """cupy. From now on everything in this process finds it by ``import cupy``. The same each time."""
    _set_apart()
    try:
        cupy = import_module("cupy")
    except ImportError:
        cupy = None
    if cupy is not None and is_fake(cupy):
        return cupy
    if cupy is None or not cupy.cuda.is_available():
        _need_compiler()
        _take_out()
        sys.path.insert(0, str(FOLDER))
        sys.modules.update(_hidden)
        for name in filter(_ours, _hidden):
            _parent(name)[name.rpartition(".")[2]] = _hidden[name]
        cupy = import_module("cupy")
    return cupy


@cache
def _set_apart() -> None:
    """Exclude all present objects, mostly modules and tests, from garbage collection. Device memory is freed only when
    garbage is collected, so tests do that often, and most of the time would go to traversing these objects again."""
    gc.collect()
    gc.freeze()


def _need_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("the fake device compiles its kernels by g++, which isn't here")


def is_fake(cupy: ModuleType) -> bool:
    """Return True for the fake: its work is deferred until a thread waits for it, and :mod:`fakecuda` can be used."""
    return getattr(cupy, "is_fake", False)


def remove() -> None:
    """Undo :func:`install`, if that gave the fake."""
    fakecuda.streams.recover()
    fakecuda.streams.deselect_devices()
    if str(FOLDER) in sys.path:
        sys.path.remove(str(FOLDER))
        _hidden.update(_take_out())


def _take_out() -> dict[str, ModuleType]:
    """Forget cupy, and what holds on to it, so that they are looked for when somebody imports them next."""
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name) or name.split(".")[0] == "cupy"}
    for name in filter(_ours, taken):
        _parent(name).pop(name.rpartition(".")[2], None)
    return taken


def hide_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next import of cupy fail, as on a machine without it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in filter(_ours, list(sys.modules)):
        monkeypatch.delitem(sys.modules, name)


def _ours(name: str) -> bool:
    return name.startswith("mpicoll.buffers.cuda.")


def _parent(name: str) -> dict[str, object]:
    return vars(sys.modules[name.rpartition(".")[0]])


def environment(**variables: str) -> dict[str, str]:
    """Return `variables` and those with which a subprocess, or the ranks of a job, import the fake."""
    _need_compiler()
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **variables}
