"""Copies of a program's state: saved, sent, and restored in place. Used by :func:`mpicoll.resilient`.

A state is any object that can be pickled: numbers, arrays, tensors, containers of them. Objects with ``state_dict`` and
``load_state_dict``, such as torch's modules and optimizers, are detected by these methods; so torch need not be loaded
here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class _StateDict:
    """Argument for ``load_state_dict``."""

    state: Any


def take_snapshot(state: Any) -> Any:
    """Return a copy of `state` that shares no memory with it."""
    if _has_state_dict(state):
        return _StateDict(copy.deepcopy(state.state_dict()))
    if type(state) is dict:
        return {key: take_snapshot(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(take_snapshot(value) for value in state)
    if hasattr(state, "detach"):
        return state.detach().clone()
    return copy.deepcopy(state)


def restore(saved: Any, state: Any) -> Any:
    """Restore `state` to `saved`, a snapshot of it or of its counterpart on another rank. Return `state`, changed
    in place where possible, otherwise a copy of `saved`. Parameters have no gradients then."""
    if isinstance(saved, _StateDict):
        # load_state_dict may keep references to its argument.
        state.load_state_dict(copy.deepcopy(saved.state))
        _drop_gradients(_list_parameters(state))
        return state
    if type(saved) is dict:
        live = state if type(state) is dict else {}
        restored = {key: restore(value, live.get(key)) for key, value in saved.items()}
        live.clear()
        live.update(restored)
        return live
    if type(saved) in (list, tuple):
        same_length = type(state) is type(saved) and len(state) == len(saved)
        values = [restore(value, state[i] if same_length else None) for i, value in enumerate(saved)]
        if type(saved) is list and same_length:
            state[:] = values
            return state
        return type(saved)(values)
    both = isinstance(saved, np.ndarray) and isinstance(state, np.ndarray)
    if both and saved.ndim and _is_compatible(saved, state) and state.flags.writeable:
        np.copyto(state, saved)
        return state
    if hasattr(saved, "detach") and hasattr(state, "detach") and _is_compatible(saved, state):
        state.detach().copy_(saved)
        _drop_gradients([state])
        return state
    return take_snapshot(saved)


def _has_state_dict(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _list_parameters(state: Any) -> list[Any]:
    """Return the parameters of a module or of an optimizer of torch; none of another object."""
    if hasattr(state, "param_groups"):
        return [one for group in state.param_groups for one in group["params"]]
    return list(state.parameters()) if hasattr(state, "named_parameters") else []


def _drop_gradients(parameters: Iterable[Any]) -> None:
    """Drop what a step that was abandoned has left: the next backward pass would add to it."""
    for one in parameters:
        if getattr(one, "requires_grad", False):
            one.grad = None


def _is_compatible(saved: Any, state: Any) -> bool:
    return bool(state.shape == saved.shape and state.dtype == saved.dtype)
