"""Tensors as the flat memory that the native operations take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch.autograd.graph import increment_version

from mpicoll.buffers.torch import describe_missing_memory, find_other_kind, has_memory, is_pending
from mpicoll.errors import DeviceError, DTypeError, ShapeError

Restore: TypeAlias = "Callable[[], None] | None"
"""Function that copies results to the caller's tensors, on any thread, and returns after the copy; None if no copy is
needed."""

_Extent: TypeAlias = "tuple[str, int, int]"


def on_internal_streams(*devices: torch.device) -> AbstractContextManager[None]:
    """Run torch's work on the CUDA `devices` on mpicoll's streams, and wait for it at the end of the block.

    Used for work on another thread than the caller's. Without devices it does nothing. On a thread of mpicoll torch's
    current stream is the default stream: work would be queued behind later work of the program, and a program that
    computes on another stream would not wait for it.
    """
    return _on_streams(devices) if devices else nullcontext()


@contextmanager
def _on_streams(devices: Sequence[torch.device]) -> Iterator[None]:
    from mpicoll.buffers.cuda.device import cuda_device

    with ExitStack() as stack:
        for one in devices:
            device = cuda_device(one.index)
            stack.enter_context(device.working())
            # torch may submit work at any time until the end.
            stack.callback(device.submit)
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(device.stream, one)))
        yield


def find_cuda_devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """Return the CUDA devices of `tensors`, each once."""
    return list(dict.fromkeys(one.device for one in tensors if one.is_cuda))


def view_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor as a vector of stride 1, which is a view of its memory.

    A tensor of one element or none is contiguous with any stride. ``view(-1)`` keeps that, and torch then rejects views
    as another dtype.
    """
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def flatten_input(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in C order, as a view of the tensor's memory if possible."""
    return view_flat(tensor.detach().resolve_conj().resolve_neg().contiguous())


def flatten_output(operation: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Restore]:
    """Return flat memory to be filled, and a function that copies it to `tensor` (None if it is the tensor's memory).

    Autograd takes `tensor` as written to, whose values a backward pass may need. Raises ShapeError if `tensor` can't be
    written to.
    """
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        increment_version(tensor)
        return view_flat(own), None
    if overlaps_itself(own):
        raise ShapeError(f"{operation}: elements of an output share memory (an expanded tensor); pass a copy")
    filled = torch.empty(own.numel(), dtype=own.dtype, device=own.device)
    return filled, lambda: copy_into(own, filled.view(own.shape))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements of a dense tensor share memory, as those of an expanded one."""
    # torch has only a private function for this; 1 means that they certainly do.
    return torch._debug_has_internal_overlap(tensor) == 1


def prepare_in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, Restore]:
    """Return a tensor to be changed instead of `tensor`, and a function that copies its values to `tensor`.

    The returned tensor is `tensor` itself, unless that is lazily conjugated or negated.
    """
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor, None
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain, lambda: copy_into(tensor.detach(), plain)


def protect_inputs(inputs: Sequence[torch.Tensor], outputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the `inputs` of operations that run in sequence, copied if an earlier operation would overwrite them.

    Operation i writes all ``outputs[i]``. An input that shares memory with an output of an earlier operation is copied
    before the first operation starts. Therefore a list may contain a tensor twice, or overlapping views: each operation
    reads the values from before the call, as with gloo. Different tensors may overlap on different ranks, since no
    message depends on it. The overlap test compares the first and the last byte of the tensors, so interleaved views
    may be copied unnecessarily.
    """
    extents = [_find_extent(one) for one in inputs]
    written = [[_find_extent(one) for one in several] for several in outputs]
    if not _have_overlap([[extent, *several] for extent, several in zip(extents, written, strict=True)]):
        return list(inputs)
    return [
        one.detach().clone() if any(_overlap(extent, other) for several in written[:i] for other in several) else one
        for i, (one, extent) in enumerate(zip(inputs, extents, strict=True))
    ]


def _have_overlap(operations: Sequence[Sequence[_Extent]]) -> bool:
    """Return True if memory of one operation overlaps memory of another. Sorts, as there may be thousands of them."""
    end, owner, device = 0, -1, ""
    for (where, first, last), number in sorted((one, i) for i, several in enumerate(operations) for one in several):
        if where != device or first >= end:
            end, owner, device = last, number, where
        elif first < last and number != owner:
            return True
        else:
            end = max(end, last)
    return False


def _find_extent(tensor: torch.Tensor) -> _Extent:
    """Return the device of `tensor`, the address of its first byte and the address after its last byte."""
    first = tensor.data_ptr()
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), first, first + (last + 1) * tensor.itemsize if tensor.numel() else first


def _overlap(one: _Extent, other: _Extent) -> bool:
    return one[0] == other[0] and max(one[1], other[1]) < min(one[2], other[2])


def join_inputs(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all `tensors`, concatenated."""
    whole = _view_adjacent(tensors)
    return torch.cat([flatten_input(one) for one in tensors]) if whole is None else whole


def join_outputs(operation: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Restore]:
    """Return flat memory for the elements of all `tensors`, and a function that copies it to them."""
    whole = _view_adjacent(tensors)
    if whole is not None:
        increment_version(list(tensors))
        return whole, None
    first = tensors[0]
    filled = torch.empty(sum(one.numel() for one in tensors), dtype=first.dtype, device=first.device)
    parts = filled.split([one.numel() for one in tensors])
    targets = [flatten_output(operation, one) for one in tensors]

    def restore() -> None:
        for (target, back), part in zip(targets, parts, strict=True):
            copy_into(target, part)
            if back is not None:
                back()

    return filled, restore


def _view_adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat view of `tensors` if they are adjacent in memory in this order, as chunks of a tensor are."""
    if not all(map(has_memory, tensors)):
        return None
    first = tensors[0].detach()
    storage = first.untyped_storage().data_ptr()
    end = first.data_ptr()
    for one in tensors:
        plain = one.is_contiguous() and not one.is_conj() and not one.is_neg()
        if not plain or one.data_ptr() != end or one.untyped_storage().data_ptr() != storage:
            return None
        end += one.nbytes
    return first.as_strided((sum(one.numel() for one in tensors),), (1,))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the values of `source` to `target`, on any thread; return when the copy is complete."""
    # No further synchronization: the operation has completed, and waited for the caller's stream before it started.
    with on_internal_streams(*find_cuda_devices([target])), torch.inference_mode(target.is_inference()):
        # A tensor created in inference mode can be written only in that mode, which is thread-local.
        target.copy_(source)


def divide_integers(tensor: torch.Tensor, divisor: int) -> None:
    """Divide the integer `tensor` in place, rounding towards zero, on any thread; return after the division."""
    with on_internal_streams(*find_cuda_devices([tensor])), torch.inference_mode(tensor.is_inference()):
        tensor.div_(divisor, rounding_mode="trunc")


def check_dense(operation: str, tensor: torch.Tensor, where: str = "") -> None:
    """Raise DTypeError unless `tensor` is dense. `where` is the end of the message."""
    kind = find_other_kind(tensor)
    if kind is not None:
        raise DTypeError(
            f"{operation}: pass dense tensors, got a {kind} one; call to_dense(), dequantize() or to_padded_tensor()"
            f"{where}"
        )


def check_plain(operation: str, *tensors: torch.Tensor) -> None:
    """Raise DTypeError or DeviceError unless all are dense tensors with memory, on the CPU or on one CUDA device."""
    for one in tensors:
        check_dense(operation, one)
        if not one.is_cpu and not one.is_cuda:
            raise DeviceError(
                f"{operation}: a tensor is on {one.device}; mpicoll supports the CPU and CUDA devices; pass cpu()"
            )
        if one.is_cpu != tensors[0].is_cpu or (one.is_cuda and one.device != tensors[0].device):
            raise DeviceError(
                f"{operation}: one tensor is on {tensors[0].device}, another on {one.device}; all tensors of a call"
                " must be on the same device"
            )
        if not has_memory(one) and not is_pending(one):
            raise DTypeError(f"{operation}: a tensor {describe_missing_memory(one)}")


def check_list(operation: str, name: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise ShapeError or DTypeError unless `tensors` are `size` plain tensors of one dtype."""
    if len(tensors) != size:
        raise ShapeError(f"{operation}: {name} must contain a tensor for each of the {size} ranks, got {len(tensors)}")
    check_plain(operation, *tensors)
    found = {one.dtype for one in tensors}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise DTypeError(f"{operation}: {name} has the dtypes {names}; pass tensors of one dtype")


def check_pair(operation: str, source: torch.Tensor, output: torch.Tensor) -> None:
    """Raise DTypeError or DeviceError unless input and output are plain tensors of one dtype."""
    check_plain(operation, source, output)
    if source.dtype != output.dtype:
        raise DTypeError(
            f"{operation}: the input is {source.dtype}, the output {output.dtype}; pass tensors of one dtype"
        )


def check_numel(operation: str, what: str, got: int, wanted: int) -> None:
    """Raise ShapeError if a tensor has another number of elements than it must have."""
    if got != wanted:
        raise ShapeError(f"{operation}: {what} has {got} elements, but must have {wanted}")
