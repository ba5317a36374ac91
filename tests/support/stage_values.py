"""Values to send, and what makes two of them the same."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


class Pair(NamedTuple):
    left: Any
    right: Any


def same(one: Any, other: Any) -> bool:
    """Return True if two values have the same structure, types, dtypes, shapes, requires_grad and elements."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tensor(generator: random.Random, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A random tensor of a random dtype, sometimes strided, sometimes requiring grad."""
    dtype = generator.choice(DTYPES)
    if shape is None:
        shape = tuple(generator.choice((0, 1, 2, 3, 5)) for _ in range(generator.randrange(4)))
    seeded = torch.Generator().manual_seed(generator.randrange(2**31))
    made = (torch.rand(shape, generator=seeded) * 200 - 100).to(dtype if dtype is not torch.uint8 else torch.int64)
    made = made.to(dtype)
    if made.dim() > 1 and generator.random() < 0.3:
        made = made.transpose(0, 1)
    if dtype.is_floating_point and generator.random() < 0.4:
        made.requires_grad_()
    return made


def value(generator: random.Random, depth: int = 2) -> Any:
    """A random value: a tensor most of the time."""
    kind = generator.random()
    if depth == 0 or kind < 0.5:
        return tensor(generator)
    if kind < 0.6:
        return generator.choice([None, 3, 2.5, "text", True, b"bytes", torch.float32, -0.0, 1])
    children = [value(generator, depth - 1) for _ in range(generator.randrange(4))]
    if kind < 0.7:
        return children
    if kind < 0.8:
        return tuple(children)
    if kind < 0.9:
        return {generator.choice(["a", "b", 1, 2, (3, 4)]): one for one in children}
    return Pair(value(generator, depth - 1), children)
