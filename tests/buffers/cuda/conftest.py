"""The device of the tests of this folder: a real one, or the fake, on which work that nobody waits for is not done."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support import fake_cuda


@pytest.fixture
def on(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda.device import cuda_device

    return cuda_device(0)


@pytest.fixture
def lazy(cuda: ModuleType) -> Iterator[None]:
    """For tests of what only the fake lets us see."""
    if not fake_cuda.is_fake(cuda) or os.environ.get("FAKECUDA_EAGER_RANDOM"):
        pytest.skip("on a real device work is done at once, or not, as it happens")
    # To free memory is to wait for its device.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _no_stream_is_left_current(cuda: ModuleType) -> Iterator[None]:
    before = cuda.cuda.get_current_stream().ptr
    yield
    assert cuda.cuda.get_current_stream().ptr == before
