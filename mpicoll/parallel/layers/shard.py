"""Parallel layers in place of the plain ones of a model, and the state_dict of the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mpicoll.errors import ArgumentError
from mpicoll.parallel.shards import shard_of

if TYPE_CHECKING:
    pass
from mpicoll.parallel.layers.base import gather_full, restore_shard_marks, to_full_tensor
from mpicoll.parallel.layers.embedding import VocabParallelEmbedding
from mpicoll.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpicoll.parallel.layers.norm import LayerNorm, RMSNorm


def shard_(
    module: nn.Module,
    plan: Mapping[str, str | Mapping[str, Any]],
    group: Any = None,
    *,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Replace submodules of `module` by parallel layers with the same values, in place; returns `module`.

    `plan` maps patterns of names (as of ``named_modules``; ``*`` matches dots, too; the first pattern that fits counts)
    to what the submodules become:

    * ``"column"``: an nn.Linear becomes a ColumnParallelLinear;
    * ``"row"``: an nn.Linear becomes a RowParallelLinear with ``input_is_parallel=True``;
    * ``"vocab"``: an nn.Embedding becomes a VocabParallelEmbedding;
    * ``"norm"``: an nn.LayerNorm or nn.RMSNorm becomes ours;
    * a dict ``{"layer": one of these, ...}`` with further options of that layer.

    `sequence_parallel` is the default for all of them. Every rank passes the same module, and no message is sent. A
    weight that two of the submodules share stays shared. Make optimizers afterwards: parameters are new ones. Hooks of
    what is replaced are not taken over.

    Raises ArgumentError, with `module` unchanged, for a pattern that fits nothing, a submodule of another class than
    named above, and a parameter that is shared with what is not replaced; ShapeError for what does not divide.
    """
    chosen = _match_plan(module, plan)
    _check_shared(module, chosen)
    made: dict[nn.Module, nn.Module] = {}
    cuts: dict[Parameter, tuple[str, Parameter]] = {}
    for name, (plain, what) in chosen.items():
        if plain in made:
            continue
        options = {"layer": what} if isinstance(what, str) else dict(what)
        layer = made[plain] = _convert(name, plain, options, sequence_parallel, group)
        for key, param in plain.named_parameters(recurse=False):
            first, cut = cuts.setdefault(param, (name, getattr(layer, key)))
            if _shard_layout(cut) != _shard_layout(getattr(layer, key)):
                raise ArgumentError(
                    f"shard_: {first} and {name} share their {key}, but it would be cut in two ways; convert them alike"
                )
            setattr(layer, key, cut)
    for name, (plain, _) in chosen.items():
        module.set_submodule(name, made[plain])
    return module


def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state_dict of the plain model: what parallel layers have cut is joined, on every rank. Collective over the
    ranks of the layers' groups; sends every weight, n(P-1)/P bytes. What fully_shard has cut besides is joined as well.

    Parameters that are shared stay so; what is not cut is the module's own memory, as in ``state_dict()``.
    """
    restore_shard_marks(module)
    joined: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shard = shard_of(value)
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
    """The submodules that `plan` names, and what they become."""
    named = dict(module.named_modules(remove_duplicate=False))
    del named[""]
    chosen: _Matches = {}
    for pattern, what in plan.items():
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            raise ArgumentError(f"shard_: no submodule fits {pattern!r}; there are {sorted(named)}")
        kind = what if isinstance(what, str) else what.get("layer")
        if kind not in _SOURCE_TYPES:
            raise ArgumentError(f"shard_: {pattern!r} must become one of {sorted(_SOURCE_TYPES)}, got {what!r}")
        for name in fitting:
            # Subclasses may compute something else.
            if name not in chosen and type(named[name]) not in _SOURCE_TYPES[kind]:
                wanted = " or ".join(one.__name__ for one in _SOURCE_TYPES[kind])
                raise ArgumentError(
                    f"shard_: {name!r}, which {pattern!r} fits, is a {type(named[name]).__name__}; {kind!r} needs a"
                    f" {wanted}"
                )
            chosen.setdefault(name, (named[name], what))
    return chosen


def _check_shared(module: nn.Module, chosen: _Matches) -> None:
    """Raise if a parameter of what is replaced belongs to something else as well."""
    replaced = {plain: name for name, (plain, _) in chosen.items()}
    owner = {param: name for plain, name in replaced.items() for param in plain.parameters(recurse=False)}
    for name, other in module.named_modules(remove_duplicate=False):
        if other in replaced and name not in chosen:
            raise ArgumentError(f"shard_: {replaced[other]!r} is the same module as {name!r}, which no pattern fits")
        for key, param in other.named_parameters(recurse=False):
            if other not in replaced and param in owner:
                raise ArgumentError(
                    f"shard_: {name!r} shares its {key} with {owner[param]!r}, but no pattern fits it; convert both"
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


def _shard_layout(param: Tensor) -> tuple[int | None, torch.Size]:
    shard = shard_of(param)
    return (None if shard is None else shard.dim), param.shape
