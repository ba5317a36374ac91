"""The halves of a backward: inputs on which little or nothing depends. Whole models are for test_engine."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from mpicoll.errors import ArgumentError
from mpicoll.parallel.pipeline.split_backward import backward_input


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_an_input_on_which_nothing_depends() -> None:
    x, idle, weight = leaf(1, 2), leaf(3), Parameter(torch.tensor([5.0, 7.0]))
    output = (x * weight).sum()
    came, later = backward_input([output], [torch.tensor(2.0)], [idle, x], [weight])
    assert came[0] is None
    assert came[1] is not None
    assert came[1].tolist() == [10, 14]
    assert weight.grad is None
    later()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 4]
    assert x.grad is idle.grad is None


def test_no_input_on_which_anything_depends() -> None:
    other = leaf(1, 2)
    came, later = backward_input([other.sum() * 3], [torch.tensor(1.0)], [leaf(3), leaf(4)], [])
    assert came == [None, None]
    later()


def test_weights_that_no_input_leads_to() -> None:
    weight = Parameter(torch.tensor([5.0]))
    with pytest.raises(ArgumentError, match="the backward can't be split"):
        backward_input([(weight * 2).sum()], [torch.tensor(1.0)], [leaf(3)], [weight])
