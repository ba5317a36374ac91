"""Functions that torch.compile must not trace: it would compile communication as a part of the model."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def disable_compile(function: _F) -> _F:
    """Exclude `function` from torch.compile, which then makes a graph break around its calls.

    Sets the same attributes as ``torch.compiler.disable``, which would import the whole compiler.
    """
    marked: Any = function
    frames = torch._C._dynamo.eval_frame
    never = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(marked.__code__, never)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "it communicates with other ranks"
    return function


def disable_compile_in(*modules: ModuleType) -> None:
    """Exclude all functions and methods that are defined in `modules`."""
    for module in modules:
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type))):
            for value in vars(holder).values():
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    disable_compile(value)
