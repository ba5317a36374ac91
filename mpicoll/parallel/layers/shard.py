"""Conversion of a plain model to parallel layers, and the state_dict of the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mpicoll.errors import ArgumentError
from mpicoll.parallel.layers.base import gather_full, restore_shard_marks, to_full_tensor
from mpicoll.parallel.layers.embedding import VocabParallelEmbedding
from mpicoll.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpicoll.parallel.layers.norm import LayerNorm, RMSNorm
from mpicoll.parallel.shards import get_shard


def shard_(
    module: nn.Module,
    plan: Mapping[str, str | Mapping[str, Any]],
    group: Any = None,
    *,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Replace submodules of `module` by parallel layers with the same values, in place.

    Every rank passes the same module. No message is sent. A weight that several replaced submodules share stays shared.
    Make optimizers afterwards, because the parameters are new ones. Hooks of replaced submodules are lost.

    Args:
        module: the plain model.
        plan: maps patterns of names (as of ``named_modules``; ``*`` also matches dots; the first matching pattern
            counts) to the kind of layer:

            * ``"column"``: an nn.Linear becomes a ColumnParallelLinear;
            * ``"row"``: an nn.Linear becomes a RowParallelLinear with ``input_is_parallel=True``;
            * ``"vocab"``: an nn.Embedding becomes a VocabParallelEmbedding;
            * ``"norm"``: an nn.LayerNorm or nn.RMSNorm becomes mpicoll's;
            * a dict ``{"layer": one of these, ...}`` with further options of that layer.
        group: the tensor parallel group, by default the axis "model" of the grid in use.
        sequence_parallel: the default of this option for all of the layers.

    Returns:
        `module`.

    Raises:
        ArgumentError: a pattern matches nothing, a submodule has another class or other parameters than its kind
            needs, or a parameter is shared with a submodule that is not replaced; `module` is unchanged.
        ShapeError: the number of ranks does not divide an extent; `module` is unchanged.

    Example:
        ::

            model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
            shard_(model, {"0": "column", "2": "row"})
    """
    matches = _match_plan(module, plan)
    _check_shared(module, matches)
    made: dict[nn.Module, nn.Module] = {}
    shared: dict[Parameter, tuple[str, Parameter]] = {}
    for name, (plain, what) in matches.items():
        if plain in made:
            continue
        options = {"layer": what} if isinstance(what, str) else dict(what)
        layer = made[plain] = _convert(name, plain, options, sequence_parallel, group)
        for key, param in plain.named_parameters(recurse=False):
            first, cut = shared.setdefault(param, (name, getattr(layer, key)))
            if _get_shard_layout(cut) != _get_shard_layout(getattr(layer, key)):
                raise ArgumentError(
                    f"shard_: {first} and {name} share {key}, but it would be sharded in two ways; convert both to the"
                    " same kind"
                )
            setattr(layer, key, cut)
    for name, (plain, _) in matches.items():
        module.set_submodule(name, made[plain])
    return module


def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of the plain model, on every rank, with sharded parameters gathered.

    Collective over the ranks of the layers' groups; sends every weight, n(P-1)/P bytes. Parameters that fully_shard has
    sharded are gathered as well. Shared parameters stay shared; replicated ones are the module's own memory, as in
    ``state_dict()``.

    Example:
        ::

            model = shard_(nn.Sequential(nn.Linear(8, 24)), {"0": "column"})
            whole_state_dict(model)["0.weight"]  # (24, 8)
    """
    restore_shard_marks(module)
    joined: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shard = get_shard(value)
        if shard is None:
            return to_full_tensor(value.detach())
        if id(value) not in joined:
            joined[id(value)] = gather_full(value, shard.dim, shard.comm)
        return joined[id(value)]

    return {name: whole(value) for name, value in module.state_dict(keep_vars=True).items()}


_SOURCE_TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocab": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
}

_Matches: TypeAlias = "dict[str, tuple[nn.Module, str | Mapping[str, Any]]]"


def _match_plan(module: nn.Module, plan: Mapping[str, str | Mapping[str, Any]]) -> _Matches:
    """Return the submodules that `plan` names, each with the kind of its new layer."""
    named = dict(module.named_modules(remove_duplicate=False))
    del named[""]
    matches: _Matches = {}
    if not isinstance(plan, Mapping):
        raise ArgumentError(
            f"shard_: plan must be a dict of names and kinds, such as {{'0': 'column'}}, got a {type(plan).__name__}"
        )
    for pattern, what in plan.items():
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            raise ArgumentError(f"shard_: no submodule matches {pattern!r}; the submodules are {sorted(named)}")
        kind = what.get("layer") if isinstance(what, Mapping) else what
        if not isinstance(kind, str) or kind not in _SOURCE_TYPES:
            raise ArgumentError(f"shard_: {pattern!r} must become one of {sorted(_SOURCE_TYPES)}, got {what!r}")
        for name in fitting:
            # Subclasses may compute something else.
            if name not in matches and type(named[name]) not in _SOURCE_TYPES[kind]:
                wanted = " or ".join(one.__name__ for one in _SOURCE_TYPES[kind])
                raise ArgumentError(
                    f"shard_: {name!r}, which {pattern!r} matches, is a {type(named[name]).__name__}; {kind!r} needs a"
                    f" {wanted}"
                )
            others = sorted(dict(named[name].named_parameters(recurse=False)).keys() - {"weight", "bias"})
            if others:
                raise ArgumentError(
                    f"shard_: {name!r} has the parameters {others}, from which its own are computed, as by weight_norm"
                    " or pruning; make it a plain layer first, such as by torch.nn.utils.remove_weight_norm"
                )
            matches.setdefault(name, (named[name], what))
    return matches


def _check_shared(module: nn.Module, matches: _Matches) -> None:
    """Raise ArgumentError if a submodule that is not replaced shares a parameter with one that is."""
    replaced = {plain: name for name, (plain, _) in matches.items()}
    owner = {param: name for plain, name in replaced.items() for param in plain.parameters(recurse=False)}
    for name, other in module.named_modules(remove_duplicate=False):
        if other in replaced and name not in matches:
            raise ArgumentError(f"shard_: {replaced[other]!r} is the same module as {name!r}, which no pattern matches")
        for key, param in other.named_parameters(recurse=False):
            if other not in replaced and param in owner:
                raise ArgumentError(
                    f"shard_: {name!r} shares {key} with {owner[param]!r}, but no pattern matches it; convert both"
                )


def _convert(name: str, plain: nn.Module, options: dict[str, Any], sequence_parallel: bool, group: Any) -> nn.Module:
    options = {"sequence_parallel": sequence_parallel, **options}
    kind = options.pop("layer")
    try:
        if isinstance(plain, nn.Embedding):
            return VocabParallelEmbedding.from_embedding(plain, group=group, **options)
        if isinstance(plain, nn.LayerNorm):
            return LayerNorm.from_norm(plain, group=group, **options)
        if isinstance(plain, nn.RMSNorm):
            return RMSNorm.from_norm(plain, group=group, **options)
        assert isinstance(plain, nn.Linear)
        if kind == "column":
            return ColumnParallelLinear.from_linear(plain, group=group, **options)
        return RowParallelLinear.from_linear(plain, group=group, **{"input_is_parallel": True, **options})
    except TypeError as error:
        raise ArgumentError(f"shard_: {name!r} can't become {kind!r} with the options {options}: {error}") from error


def _get_shard_layout(param: Tensor) -> tuple[int | None, torch.Size]:
    shard = get_shard(param)
    return (None if shard is None else shard.dim), param.shape
