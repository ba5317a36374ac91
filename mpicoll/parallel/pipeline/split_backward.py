"""Backward of one part of a model: whole, or split into the gradient of its input and, later, those of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

Grads = Sequence[Tensor | None]
"""Gradients of the outputs of a part; None for outputs on which nothing depends."""


def backward(outputs: Sequence[Tensor], grads: Grads, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Add the gradients of all weights to their ``.grad``, and return those of `inputs`, which are leaves."""
    wanted = [(one, grad) for one, grad in zip(outputs, grads, strict=True) if grad is not None]
    if wanted:
        torch.autograd.backward([one for one, _ in wanted], [grad for _, grad in wanted])
    input_grads = [one.grad for one in inputs]
    for one in inputs:
        one.grad = None
    return input_grads


def backward_input(
    outputs: Sequence[Tensor], grads: Grads, inputs: Sequence[Tensor], weights: Sequence[Parameter]
) -> tuple[list[Tensor | None], Callable[[], object]]:
    """Return the gradients of `inputs`, and a function that adds those of `weights` to their ``.grad``.

    `outputs` must not share memory with other tensors (see :func:`copy_views`). An operation whose backward is one
    Python function, such as a layer of :mod:`mpicoll.parallel.layers`, runs it in both halves, with its collectives:
    correct, but without gain. The second half does all the work for outputs that depend on none of the inputs.
    """
    if not inputs:
        return [], partial(backward, outputs, grads, ())
    accumulators = {_get_accumulator(one) for one in inputs}
    reached: set[Any] = set()
    joined: list[tuple[Tensor, Tensor]] = []
    apart: list[tuple[Tensor, Tensor]] = []  # torch's halves would leave them out
    for one, grad in zip(outputs, grads, strict=True):
        if grad is not None:
            leaves = _find_leaf_nodes(one)
            reached |= leaves
            (apart if accumulators.isdisjoint(leaves) else joined).append((one, grad))
    finish = partial(backward, [one for one, _ in apart], [grad for _, grad in apart], ())
    if not joined:
        return [None] * len(inputs), finish
    # Imported here because it imports torch's compiler, which takes a second and which other schedules don't need.
    from torch.distributed.pipelining._backward import stage_backward_input

    weights = [one for one in weights if one.requires_grad]
    # Some versions of torch refuse inputs on which nothing depends.
    used = [one for one in inputs if _get_accumulator(one) in reached]
    given = [one for one, _ in joined], [grad for _, grad in joined]
    used_grads, parts = stage_backward_input(*given, used, iter(weights))
    for one in used:
        one.grad = None
    groups = _merge_groups(parts)
    order = {_get_accumulator(one): number for number, one in enumerate(weights)}
    # Ranks whose operations are collective must run them in one order; that of sets differs from process to process.
    groups.sort(key=lambda group: min(order[node] for node in group[0]))
    by_input = {id(one): grad for one, grad in zip(used, used_grads, strict=True)}
    return [by_input.get(id(one)) for one in inputs], partial(_backward_weights, groups, finish)


def copy_views(value: Any) -> Any:
    """Return `value` with copies of tensors that are views or leaves.

    :func:`backward_input` detaches outputs from their graph in place. torch forbids that for a view, and it would
    change an input that is passed on.
    """
    return tree_map_only(Tensor, lambda one: one.clone() if one.is_leaf or one._is_view() else one, value)  # noqa: SLF001


def _merge_groups(parts: Sequence[dict[str, Any]]) -> list[tuple[set[Any], dict[Any, Grads]]]:
    """Return torch's groups so that none shares a weight or an operation with another.

    A group is the nodes that accumulate the gradients of some weights, and the operations that join these weights with
    what depends on an input, each with the gradients of its outputs. torch merges only some of those that overlap, and
    a weight in two of them would get a gradient from each.
    """
    groups: list[tuple[set[Any], dict[Any, Grads]]] = []
    for part in parts:
        # Hooks of torch refer to `part`, and must not keep the graph.
        nodes, operations = set(part["params"]), dict(zip(part.pop("intermediates"), part["grads"], strict=True))
        apart = []
        for other in groups:
            if nodes.isdisjoint(other[0]) and operations.keys().isdisjoint(other[1]):
                apart.append(other)
            else:
                nodes |= other[0]
                operations |= other[1]
        groups = [*apart, (nodes, operations)]
    return groups


def _backward_weights(groups: Sequence[tuple[set[Any], Mapping[Any, Grads]]], finish: Callable[[], object]) -> None:
    """Add the gradients of the weights of `groups` to their ``.grad``, then call `finish`, which may free the graph.

    torch's own ``stage_backward_weight`` stores a gradient without a copy if there is none, also one that other tensors
    share, and calls no hooks that follow the accumulation.
    """
    # The way from one operation to a weight may lead through another one, whose gradients are complete already.
    for _, operations in groups:
        for node, grads in operations.items():
            node.register_prehook(partial(_replace, tuple(grads)))
    for nodes, operations in groups:
        edges = [(GradientEdge(node, i), one) for node, grads in operations.items() for i, one in enumerate(grads)]
        wanted = [(edge, grad) for edge, grad in edges if grad is not None]
        if wanted:
            # What lies between two operations of this group may belong to another one, which needs it too. The graph
            # is freed with the last reference to `groups`.
            torch.autograd.backward(
                [edge for edge, _ in wanted],
                [grad for _, grad in wanted],
                retain_graph=True,
                inputs=[node.variable for node in nodes],
            )
    finish()


def _replace(grads: Grads, computed: Grads) -> Grads:
    return grads


def _find_leaf_nodes(output: Tensor) -> set[Any]:
    """Return the nodes of the graph of `output` that accumulate the gradient of a leaf."""
    seen: set[Any] = set()
    queue = [output.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    return {node for node in seen if hasattr(node, "variable")}


def _get_accumulator(leaf: Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
