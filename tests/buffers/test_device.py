"""Device memory as the CUDA array interface describes it, and what is said where it can't be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import fake_cuda

from mpicoll.buffers.device import DeviceMemory, describe
from mpicoll.buffers.recognise import recognise
from mpicoll.errors import DeviceError, DTypeError


class Device:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (0x1000, False),
            "version": 3,
            **changes,
        }


def test_description() -> None:
    assert describe(Device()) == DeviceMemory(0x1000, (2, 3), np.dtype("f4"), None, False, None)
    full = describe(Device(strides=(4, 8), stream=7, data=(5, True), typestr="|b1"))
    assert full == DeviceMemory(5, (2, 3), np.dtype(bool), (4, 8), True, 7)


@pytest.mark.parametrize(
    "changes",
    [{"shape": 3}, {"typestr": "nonsense"}, {"data": 5}, {"data": (None, False)}, {"strides": ("a",)}],
    ids=["shape", "typestr", "data", "pointer", "strides"],
)
def test_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(DTypeError, match="Device: malformed __cuda_array_interface__"):
        describe(Device(**changes))


@pytest.mark.parametrize("missing", ["shape", "typestr", "data"])
def test_incomplete(missing: str) -> None:
    x = Device()
    del x.__cuda_array_interface__[missing]
    with pytest.raises(DTypeError, match=f"malformed.*{missing}"):
        describe(x)


def test_mask() -> None:
    with pytest.raises(DTypeError, match=r"Device.*mask.*fill"):
        describe(Device(mask=Device()))


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.hide_cupy(monkeypatch)


def test_what_lacks_without_cupy(no_cupy: None) -> None:
    message = r'op: out is a Device of shape \(2, 3\) and dtype float32 .*pip install "mpicoll\[cuda13\]".*copy it'
    with pytest.raises(DeviceError, match=message):
        recognise("op", Device(), "out")


def test_malformed_whether_there_is_cupy_or_not(no_cupy: None) -> None:
    with pytest.raises(DTypeError, match="malformed __cuda_array_interface__"):
        recognise("op", Device(data=5))
