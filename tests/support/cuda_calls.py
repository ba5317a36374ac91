"""Counts of what a device is used for, on the fake one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from support import fake_cuda


def count_cuda_calls(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the counts, from now on, of the calls of CUDA's runtime, of its driver and of kernels, by their names."""
    from mpicoll.buffers.cuda import driver

    if not fake_cuda.is_fake(cuda):
        pytest.skip("the calls of cupy itself can't be counted")
    counts: Counter[str] = Counter()

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return call

    runtime = cuda.cuda.runtime
    for name, function in list(vars(runtime).items()):
        if callable(function) and name[0].islower() and not isinstance(function, type):
            monkeypatch.setattr(runtime, name, count(name, function))
    monkeypatch.setattr(cuda.RawKernel, "__call__", count("kernel", cuda.RawKernel.__call__))
    real = driver.libcuda()

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return count(name, getattr(real, name))

    monkeypatch.setattr(driver, "libcuda", Driver)
    return counts


def count_announcements(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Return the counts, from now on, of messages that are announced (True), and of those for which there is no
    memory."""
    from mpicoll.engine.executors.peer_messages import PeerMessages

    counts: Counter[bool] = Counter()
    send = PeerMessages.send

    def counted(messages: Any, *arguments: Any) -> Any:
        announcement = send(messages, *arguments)
        counts[announcement is not None] += 1
        return announcement

    monkeypatch.setattr(PeerMessages, "send", counted)
    return counts
