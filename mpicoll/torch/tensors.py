"""Tensors as the flat memory that the native operations take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from mpicoll.errors import DeviceError, DTypeError, ShapeError

Restore: TypeAlias = "Callable[[], None] | None"
"""What copies results to where the caller wants them; None if they are there already."""


def flat_input(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in C order: the tensor's own memory where that is possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def flat_output(operation: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Restore]:
    """Flat memory to be filled, and what moves it to `tensor`. Raises ShapeError if `tensor` can't be written to."""
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        return own.view(-1), None
    # The private name is the only one under which torch tells this; 1 means that elements are sure to share memory.
    if torch._debug_has_internal_overlap(own) == 1:
        raise ShapeError(f"{operation}: elements of an output share memory (an expanded tensor); pass a copy")
    filled = torch.empty(own.numel(), dtype=own.dtype)
    return filled, lambda: _copy(own, filled.view(own.shape))


def in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, Restore]:
    """A tensor to be changed in the place of `tensor`, and what moves its values there: `tensor` itself, unless it is
    lazily conjugated or negated."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor, None
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain, lambda: _copy(tensor.detach(), plain)


def joined_input(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all `tensors`, one after the other."""
    whole = _side_by_side(tensors)
    return torch.cat([flat_input(one) for one in tensors]) if whole is None else whole


def joined_output(operation: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Restore]:
    """Flat memory to be filled with the elements of all `tensors`, and what moves them there."""
    whole = _side_by_side(tensors)
    if whole is not None:
        return whole, None
    filled = torch.empty(sum(one.numel() for one in tensors), dtype=tensors[0].dtype)
    parts = filled.split([one.numel() for one in tensors])
    targets = [flat_output(operation, one) for one in tensors]

    def restore() -> None:
        for (target, back), part in zip(targets, parts, strict=True):
            _copy(target, part)
            if back is not None:
                back()

    return filled, restore


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view of `tensors`, if they lie in one piece of memory in this order, as chunks of a tensor do."""
    first = tensors[0].detach()
    storage = first.untyped_storage().data_ptr()
    end = first.data_ptr()
    for one in tensors:
        plain = one.is_contiguous() and not one.is_conj() and not one.is_neg()
        if not plain or one.data_ptr() != end or one.untyped_storage().data_ptr() != storage:
            return None
        end += one.nbytes
    return first.as_strided((sum(one.numel() for one in tensors),), (1,))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # A tensor made in inference mode takes writes in that mode only, which is a property of the thread.
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)


def check_plain(operation: str, *tensors: torch.Tensor) -> None:
    """Raise DTypeError or DeviceError unless all are dense tensors on the CPU."""
    for one in tensors:
        if one.layout is not torch.strided or one.is_quantized:
            kind = "quantized" if one.is_quantized else one.layout
            raise DTypeError(f"{operation}: takes dense tensors, got a {kind} one; pass to_dense() or dequantize()")
        if not one.is_cpu:
            raise DeviceError(
                f"{operation}: a tensor is on {one.device}; device memory is not supported yet: pass cpu()"
            )


def check_list(operation: str, name: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise ShapeError or DTypeError unless `tensors` are `size` plain tensors of one dtype."""
    if len(tensors) != size:
        raise ShapeError(f"{operation}: {name} must hold a tensor for each of the {size} ranks, got {len(tensors)}")
    check_plain(operation, *tensors)
    found = {one.dtype for one in tensors}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise DTypeError(f"{operation}: {name} mixes the dtypes {names}; pass tensors of one dtype")


def check_pair(operation: str, source: torch.Tensor, output: torch.Tensor) -> None:
    """Raise DTypeError or DeviceError unless input and output are plain tensors of one dtype."""
    check_plain(operation, source, output)
    if source.dtype != output.dtype:
        raise DTypeError(f"{operation}: the input is {source.dtype}, the output {output.dtype}; they must agree")


def check_numel(operation: str, what: str, got: int, wanted: int) -> None:
    """Raise ShapeError if a tensor has another number of elements than it must have."""
    if got != wanted:
        raise ShapeError(f"{operation}: {what} has {got} elements, but must have {wanted}")
