"""The halves of a backward: inputs on which little or nothing depends. Whole models are for test_engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

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


@pytest.mark.parametrize("used_beside", [False, True])
def test_an_output_that_depends_on_no_input(used_beside: bool) -> None:
    x, weight = leaf(1), Parameter(torch.tensor([5.0]))
    shared = weight.exp()  # saves its result, which both outputs need in their backwards
    outputs = [(shared * 3).sum(), (x * shared).sum() if used_beside else x.sum()]
    (came,), later = backward_input(outputs, [torch.tensor(1.0), torch.tensor(2.0)], [x], [weight])
    assert came is not None
    torch.testing.assert_close(came, 2 * shared.detach() if used_beside else torch.tensor([2.0]))
    assert weight.grad is None
    later()
    torch.testing.assert_close(weight.grad, (5 if used_beside else 3) * shared.detach())


def test_no_output_that_depends_on_an_input() -> None:
    weight = Parameter(torch.tensor([5.0]))
    came, later = backward_input([(weight * 2).sum()], [torch.tensor(1.0)], [leaf(3)], [weight])
    assert came == [None]
    later()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2]


class Model(nn.Module):
    def __init__(self, compute: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b, self.c = (Parameter(torch.linspace(1, 2, 4) * k) for k in (1, 2, 3))
        self.linear, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


MODELS = {
    # gradients that share memory, with each other or with that of the output
    "one gradient for two weights": lambda m, x: x + (m.a + m.b),
    "the gradient of the output": lambda m, x: x.sum(0) + m.a,
    # operations that join a weight with the input in several places, so that groups of weights overlap
    "a weight beside another": lambda m, x: (x + m.b) + (m.a + m.b),
    "a chain of pairs": lambda m, x: (x * (m.a + m.b)) * (m.b * m.c) + m.c * m.a,
    "a layer of a weight": lambda m, x: m.linear(x) + m.linear(m.a),
    "a layer in a layer": lambda m, x: m.linear(x * m.linear(x).mean(0)) + m.linear(m.a),
    "a layer between uses of another": lambda m, x: m.linear(m.second(torch.tanh(m.linear(x))).sin()),
    "a token of the kind of the input": lambda m, x: m.linear(torch.cat([(m.a + m.b).expand(1, 4), x + m.b])),
}


@pytest.mark.parametrize("compute", MODELS.values(), ids=MODELS)
def test_halves_give_the_gradients_of_the_whole(compute: Callable[[Model, Tensor], Tensor]) -> None:
    """Often, because torch's sets have another order each time."""
    for seed in range(12):
        torch.manual_seed(seed)
        model = Model(compute).double()
        weights = list(model.parameters())
        batches = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        grads = [torch.randn(model(x).shape, dtype=torch.float64) for x in batches]
        expected = [torch.zeros_like(one) for one in weights]
        for x, grad in zip(batches, grads, strict=True):
            for total, one in zip(
                expected, torch.autograd.grad(model(x), weights, grad, allow_unused=True), strict=True
            ):
                total += 0 if one is None else one

        sent, before = [], [grad.clone() for grad in grads]
        for x, grad in zip(batches, grads, strict=True):
            (input_grad,), later = backward_input([model(x)], [grad], [x], weights)
            assert input_grad is not None
            sent.append((input_grad, input_grad.clone()))
            later()
        for one, total in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.zeros_like(one) if one.grad is None else one.grad, total)
        for x, grad, (input_grad, then) in zip(batches, grads, sent, strict=True):
            torch.testing.assert_close(input_grad, then, rtol=0, atol=0)
            torch.testing.assert_close(input_grad, torch.autograd.grad(model(x), x, grad)[0])
        torch.testing.assert_close(grads, before, rtol=0, atol=0)


def test_hooks_follow_the_accumulation_of_the_second_half() -> None:
    model, calls = Model(lambda m, x: m.linear(m.second(m.linear(x)))), []
    for name, one in model.named_parameters():
        one.register_post_accumulate_grad_hook(lambda one, name=name: calls.append((name, one.grad is not None)))
    x = torch.ones(2, 4, requires_grad=True)
    _, later = backward_input([model(x)], [torch.ones(2, 4)], [x], list(model.parameters()))
    assert not calls
    later()
    used = ["linear.weight", "linear.bias", "second.weight", "second.bias"]
    assert sorted(calls) == sorted((name, True) for name in used)


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_the_second_half_frees_the_graph() -> None:
    model, x = Model(lambda m, x: m.linear(torch.tanh(m.linear(x)))), torch.ones(2, 4, requires_grad=True)
    kept = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor.detach())  # an output itself would refer to the graph, in a cycle
        kept.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        output = model(x)
    _, later = backward_input([output], [torch.ones(2, 4)], [x], list(model.parameters()))
    assert any(one() for one in kept)
    later()
    del later
    gc.collect()  # the import of torch's compiler leaves cycles that refer to its caller
    assert not any(one() for one in kept)
