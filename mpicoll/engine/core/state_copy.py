"""Copies of a program's state: taken, sent, and put back in place. For :func:`mpicoll.resilient`.

A state is anything that can be pickled: numbers, arrays, tensors, containers of them. What has ``state_dict`` and
``load_state_dict``, such as torch's modules and optimizers, is known by these; so torch need not be loaded here.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.buffers.dtypes import Array


@dataclass(slots=True)
class _Kept:
    """What ``load_state_dict`` takes."""

    state: Any


def taken(state: Any) -> Any:
    """A copy of `state` that shares nothing with it."""
    if _has_state_dict(state):
        return _Kept(copy.deepcopy(state.state_dict()))
    if type(state) is dict:
        return {key: taken(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(taken(value) for value in state)
    if hasattr(state, "detach"):
        return state.detach().clone()
    return copy.deepcopy(state)


def put_back(saved: Any, state: Any) -> Any:
    """`state` as it was when `saved` was taken of it, or of its like on another rank: changed in place where that can
    be, else a copy of `saved`."""
    if isinstance(saved, _Kept):
        # What it takes it may keep.
        state.load_state_dict(copy.deepcopy(saved.state))
        return state
    if type(saved) is dict:
        live = state if type(state) is dict else {}
        found = {key: put_back(value, live.get(key)) for key, value in saved.items()}
        live.clear()
        live.update(found)
        return live
    if type(saved) in (list, tuple):
        alike = type(state) is type(saved) and len(state) == len(saved)
        values = [put_back(value, state[i] if alike else None) for i, value in enumerate(saved)]
        if type(saved) is list and alike:
            state[:] = values
            return state
        return type(saved)(values)
    both = isinstance(saved, np.ndarray) and isinstance(state, np.ndarray)
    if both and saved.ndim and _alike(saved, state) and state.flags.writeable:
        np.copyto(state, saved)
        return state
    if hasattr(saved, "detach") and hasattr(state, "detach") and _alike(saved, state):
        state.detach().copy_(saved)
        return state
    return taken(saved)


def packed(saved: Any) -> Array:
    """The bytes of what was taken."""
    return np.frombuffer(pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def unpacked(data: Array) -> Any:
    """What was packed on another rank."""
    return pickle.loads(data.data)


def _has_state_dict(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _alike(saved: Any, state: Any) -> bool:
    return bool(state.shape == saved.shape and state.dtype == saved.dtype)
