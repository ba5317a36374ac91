"""Short forms of the methods of a process group, for programs that call these directly.

c10d passes lists of tensors and options. torch's own groups also accept a tensor and its root, op or timeout, by
position or by name. This module converts such calls, so that the methods of mpicoll's group only implement c10d's form.
(torch's ``Backend`` does this in C++, so a group that is a ``Backend`` does not need this module.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

F = TypeVar("F", bound=Callable[..., Any])

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
"""Names of short arguments, and the options that they set."""


@dataclass(frozen=True)
class _Form:
    """Arguments of a method: the data, then options of this type, or short arguments in this order.

    Each datum has all the names that torch uses for it, and the depth of lists that c10d passes (None: passed on
    unchanged).
    """

    options: Any
    data: tuple[tuple[str, int | None], ...]
    short: tuple[str, ...] = ()


_GATHER_DATA = (("output_tensors", 2), ("input_tensors input_tensor", 1))
_PAIR_DATA = (("output output_tensor", 0), ("input input_tensor", 0))
_COALESCED_DATA = (("outputs", 1), ("inputs", 1))
_SPLIT_DATA = (*_PAIR_DATA, ("output_split_sizes", None), ("input_split_sizes", None))
_SCATTER_DATA = (("outputTensor output", 0), ("inputTensor input", 0))

_FORMS = {
    "allreduce": _Form(AllreduceOptions, (("tensors tensor", 1),), ("op", "timeout")),
    "allreduce_coalesced": _Form(AllreduceCoalescedOptions, (("tensors", 1),)),
    "broadcast": _Form(BroadcastOptions, (("tensors tensor", 1),), ("root", "timeout")),
    "reduce": _Form(ReduceOptions, (("tensors tensor", 1),), ("root", "op", "timeout")),
    "allgather": _Form(AllgatherOptions, _GATHER_DATA, ("timeout",)),
    "allgather_coalesced": _Form(AllgatherOptions, (("output_lists", 2), ("input_list", 1))),
    "all_gather_single": _Form(AllgatherOptions, _PAIR_DATA),
    "all_gather_single_coalesced": _Form(AllgatherOptions, _COALESCED_DATA),
    "gather": _Form(GatherOptions, _GATHER_DATA, ("root", "timeout")),
    "scatter": _Form(ScatterOptions, (("output_tensors output_tensor", 1), ("input_tensors", 2)), ("root", "timeout")),
    "reduce_scatter": _Form(
        ReduceScatterOptions, (("output_tensors output", 1), ("input_tensors input", 2)), ("op", "timeout")
    ),
    "reduce_scatter_single": _Form(ReduceScatterOptions, _SCATTER_DATA),
    "reduce_scatter_single_coalesced": _Form(ReduceScatterOptions, _COALESCED_DATA),
    "alltoall": _Form(AllToAllOptions, (("output_tensors", 1), ("input_tensors", 1))),
    "all_to_all_single": _Form(AllToAllOptions, _SPLIT_DATA, ("timeout",)),
    "barrier": _Form(BarrierOptions, (), ("timeout",)),
}


def accept_short_forms(method: F) -> F:
    """Extend `method`, which implements c10d's form, by all the forms that torch's own groups accept."""
    form = _FORMS[method.__name__]
    options, count = form.options, len(form.data)

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if named or len(args) <= count or type(args[-1]) is not options:
            args = to_full_form(method.__name__, args, named)
        return method(self, *args)

    return call  # type: ignore[return-value]


def to_full_form(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that c10d would pass to the method `name`: the data, and options.

    None stands for an argument that is not given.

    Raises:
        TypeError: an argument is not one of the method's.
    """
    form = _FORMS[name]
    positional, keywords = list(args), {key: value for key, value in named.items() if value is not None}

    def take(names: str) -> Any:
        """Remove and return the next argument, which has one of these `names`."""
        value = positional.pop(0) if positional else None
        key = next((one for one in names.split() if one in keywords), None)
        return keywords.pop(key) if value is None and key is not None else value

    data = []
    for names, depth in form.data:
        value = take(names)
        if value is None and depth is not None:
            raise TypeError(f"{name}: {names.split()[0]} is missing; {_describe_arguments(form)}")
        data.append(() if value is None else _nest(value, depth))
    if (positional and type(positional[0]) is form.options) or "opts" in keywords:
        options = take("opts")
    else:
        options = form.options()
        for short in form.short:
            value = take(short)
            if value is not None:
                setattr(options, _FIELDS[short], value)
    wrong = [*(one for one in positional if one is not None), *keywords]
    if wrong or type(options) is not form.options:
        raise TypeError(
            f"{name}: {wrong[0] if wrong else options!r} is not an argument of this method; {_describe_arguments(form)}"
        )
    return (*data, options)


def _describe_arguments(form: _Form) -> str:
    data = ", ".join(names.split()[0] for names, _ in form.data)
    short = f", or {', '.join(form.short)}" if form.short else ""
    return f"the arguments are {data and data + ', and '}opts{short}"


def _nest(value: Any, depth: int | None) -> Any:
    """Nest `value` in lists up to this `depth`."""
    first, found = value, 0
    while depth is not None and not isinstance(first, torch.Tensor) and isinstance(first, Sequence):
        found += 1
        if not first:
            return value
        first = first[0]
    for _ in range((depth or 0) - found):
        value = [value]
    return value
