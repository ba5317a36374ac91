"""A fake of CUDA for machines without one: all of its hazards, none of its speed.

:mod:`fakecuda.memory` is device memory, :mod:`fakecuda.streams` its streams and events, :mod:`fakecuda.transfers` the
copies, :mod:`fakecuda.kernels` kernels in C++, :mod:`fakecuda.driver` a stand-in for libcuda. The package ``cupy``
beside this one has cupy's names for them. Here is what another library needs that has its own arrays.

Read from the environment whenever it matters: ``FAKECUDA_DEVICES`` (how many there are, 1), ``CUDA_VISIBLE_DEVICES``,
``FAKECUDA_PEERS=0`` (devices can't reach each other's memory), ``FAKECUDA_REGISTER=0`` (host memory can't be
registered), ``FAKECUDA_OPEN_ONCE=1``, ``FAKECUDA_AWARE=1`` (the host may touch device memory),
``FAKECUDA_ATS=1`` and ``FAKECUDA_EAGER_RANDOM=SEED`` (see the modules), ``FAKECUDA_NCCL_TIMEOUT`` (seconds, 20).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fakecuda import kernels, memory, streams, transfers
from fakecuda.errors import CUDARuntimeError
from fakecuda.memory import find, working_view

__all__ = [
    "CUDARuntimeError",
    "allocate",
    "delay",
    "enqueue",
    "find",
    "free",
    "get_device",
    "kernels",
    "pending",
    "set_device",
    "synchronize",
    "working_view",
]


def allocate(nbytes: int, device: int) -> int:
    """The address of new device memory, poisoned. It is free()'s to give back."""
    streams.check_device(device)
    return memory.allocate(nbytes, device)


def free(address: int) -> None:
    """Give memory of :func:`allocate` back; waits for all work of its device, as cudaFree does."""
    transfers.free(address)


def enqueue(stream: int, function: Callable[[], Any], *devices: int) -> None:
    """A kernel: `function` runs when somebody waits for it, and finds its memory by :func:`working_view`. `devices` are
    those of its arrays. The stream must be one of the current device."""
    streams.launch(streams.stream_at(stream), function, devices)


def synchronize(stream: int) -> None:
    """cudaStreamSynchronize."""
    streams.stream_at(stream).wait()


def pending(stream: int) -> int:
    """Return the number of pending pieces of work of the stream."""
    found = streams.stream_at(stream)
    return found.given - found.done


def get_device() -> int:
    """This thread's current device."""
    return streams.device()


def set_device(device: int) -> None:
    streams.use_device(device)


class Delay:
    """A kernel that does nothing. `ran` tells whether somebody has waited for it."""

    def __init__(self) -> None:
        self.ran = False

    def __call__(self) -> None:
        self.ran = True


def delay(stream: int | Any) -> Delay:
    """Give the stream (its pointer, or cupy's object) a kernel that only notes that it ran."""
    made = Delay()
    streams.stream_at(getattr(stream, "ptr", stream)).give(made)
    return made
