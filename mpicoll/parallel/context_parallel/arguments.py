"""Validation of the arguments of attention, on this rank and among ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from mpicoll.parallel.context_parallel.sequence import LAYOUTS, Layout, check_chunks, check_layout
from mpicoll.parallel.groups import describe_rank

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_arguments(
    operation: str, comm: Communicator, query: Any, key: Any, value: Any, causal: Any, scale: Any, layout: Any
) -> float:
    """Check that the arguments of this rank are valid and fit together, and return the scale."""
    where = describe_rank(comm)
    check_layout(operation, layout, comm)
    if not isinstance(causal, bool):
        raise ArgumentError(f"{operation}: causal must be True or False, got {causal!r} {where}")
    _check_tensors(operation, query, key, value, where)
    _check_shapes(operation, query, key, value, causal, where)
    check_chunks(operation, query, 2, "query", layout, comm)
    check_chunks(operation, key, 2, "key", layout, comm)
    if scale is None:
        return float(query.shape[3] ** -0.5)
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise ArgumentError(f"{operation}: scale must be a positive number or None, got {scale!r} {where}")
    return float(scale)


def _check_tensors(operation: str, query: Any, key: Any, value: Any, where: str) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{operation}: {name} must be a tensor, got {type(tensor).__name__} {where}")
        if not (tensor.is_cpu or tensor.is_cuda) or tensor.device != query.device:
            raise DeviceError(
                f"{operation}: {name} is on {tensor.device}, query on {query.device}; query, key and value must be on"
                f" the CPU or on one CUDA device {where}"
            )
        if tensor.dtype not in _DTYPES or tensor.dtype != query.dtype:
            raise DTypeError(
                f"{operation}: query, key and value must be of one dtype among {', '.join(map(str, _DTYPES))};"
                f" {name} is {tensor.dtype}, query is {query.dtype} {where}"
            )
        if tensor.dim() != 4:
            raise ShapeError(
                f"{operation}: {name} must be of 4 dimensions, (batch, heads, tokens, head_dim), got shape"
                f" {tuple(tensor.shape)} {where}"
            )


def _check_shapes(operation: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, where: str) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ShapeError(f"{operation}: the batches (dim 0) differ: {shapes} {where}")
    if key.shape[1] != value.shape[1] or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ShapeError(
            f"{operation}: key and value must have equally many heads (dim 1), which divide those of query, got"
            f" {shapes} {where}"
        )
    if key.shape[2] != value.shape[2] or (causal and query.shape[2] != key.shape[2]):
        raise ShapeError(
            f"{operation}: key and value must have equally many tokens (dim 2), and with causal query the same number,"
            f" got {shapes} {where}"
        )
    if key.shape[3] != query.shape[3] or key.shape[3] == 0:
        raise ShapeError(f"{operation}: query and key must have the same head_dim (dim 3), got {shapes} {where}")


def check_agreement(
    operation: str,
    comm: Communicator,
    tensors: Sequence[Tensor],
    causal: bool,
    scale: float,
    layout: Layout,
) -> bool:
    """Raise ArgumentError on all ranks if their arguments differ. Return True if tensors are on CUDA devices, on all
    ranks.

    Otherwise blocks of different sizes would match, or a rank would wait in a backward that another rank does not run.
    """
    if comm.size == 1:
        return False
    recorded = [one.requires_grad and torch.is_grad_enabled() for one in tensors]
    (bits,) = struct.unpack("q", struct.pack("d", scale))
    mine = [
        _OPERATIONS.index(operation),
        *(extent for one in tensors for extent in one.shape),
        _DTYPES.index(tensors[0].dtype),
        *recorded,
        causal,
        LAYOUTS.index(layout),
        bits,
    ]
    found = allgather(np.array([[tensors[0].is_cuda, *mine]]), comm=comm)
    everyone = found[:, 1:]
    differs = (everyone != everyone[0]).any(axis=1)
    if differs.any():
        other = int(differs.argmax())
        raise ArgumentError(
            f"{operation}: the arguments differ: rank 0 passed {_describe(everyone[0].tolist())}, but rank {other}"
            f" {_describe(everyone[other].tolist())} {describe_rank(comm)}"
        )
    return bool(found[:, 0].all())


_OPERATIONS = ("ring_attention", "ulysses_attention")


def _describe(passed: list[int]) -> str:
    """Describe arguments as :func:`check_agreement` encodes them."""
    operation, *extents, dtype, grad_query, grad_key, grad_value, causal, layout, bits = passed
    (scale,) = struct.unpack("d", struct.pack("q", bits))
    names = ("query", "key", "value")
    tensors = ", ".join(
        f"{name} {tuple(extents[4 * index : 4 * index + 4])}{' that requires grad' if recorded else ''}"
        for index, (name, recorded) in enumerate(zip(names, (grad_query, grad_key, grad_value), strict=True))
    )
    return (
        f"to {_OPERATIONS[operation]} {tensors}, {_DTYPES[dtype]}, causal={bool(causal)}, scale={scale:g},"
        f" layout={LAYOUTS[layout]!r}"
    )
