"""all_reduce of sparse tensors, which embeddings with sparse gradients need."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import torch

from mpicoll.buffers.torch import cuda_device
from mpicoll.collectives import allgather
from mpicoll.collectives.arguments import adds_rank_to_errors
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.dispatch import Task, make_task
from mpicoll.errors import DTypeError
from mpicoll.torch.c10d_collectives import convert_reduce_op
from mpicoll.torch.tensors import find_cuda_devices, on_internal_streams


@adds_rank_to_errors
def all_reduce(comm: CommunicatorCore, tensor: torch.Tensor, op: Any) -> Task:
    """Reduce sparse COO tensors of one shape elementwise, in place; ``tensor`` receives the coalesced result.

    `op` is SUM or AVG; half types are accumulated in float32. The number of entries may differ between ranks. There are
    two exchanges: an allgather of the numbers of entries, then an allgather of the entries. Raises DTypeError for other
    ops and layouts.
    """
    if tensor.layout is not torch.sparse_coo:
        raise DTypeError(f"all_reduce: {tensor.layout} tensors can't be reduced; pass to_dense() or to_sparse_coo()")
    name = convert_reduce_op("all_reduce", op, tensor.dtype)
    if name not in ("sum", "avg") or (name == "avg" and not (tensor.is_floating_point() or tensor.is_complex())):
        raise DTypeError(f"all_reduce: op {op} is not supported for sparse tensors of {tensor.dtype}; use SUM or AVG")
    own = tensor.detach()
    devices = find_cuda_devices([own])
    for one in devices:
        cuda_device("all_reduce", one, "the tensor")  # raises before the exchange if the tensor can't be used
    streams = [torch.cuda.current_stream(one) for one in devices]
    produced = [one.record_event() for one in streams]
    # The algorithms of the exchanges are selected when they run, perhaps on another thread, but with this context.
    context = copy_context()

    def run() -> None:
        with on_internal_streams(*devices):
            for event in produced:
                event.wait()
            exchange()
            # The result's memory was allocated on this thread's stream and is used on the caller's.
            result = tensor.detach()
            for one in streams:
                result._indices().record_stream(one)
                result._values().record_stream(one)

    def exchange() -> None:
        mine = own.coalesce()
        entries = torch.tensor([mine._nnz()])
        everyone = torch.empty(comm.size, dtype=torch.int64)
        make_task(allgather.prepare(comm, entries, None, everyone, None))()
        counts = everyone.tolist()
        indices = mine.indices().t().contiguous()
        values = mine.values().contiguous()
        all_indices = indices.new_empty((sum(counts), *indices.shape[1:]))
        all_values = values.new_empty((sum(counts), *values.shape[1:]))
        make_task(allgather.prepare(comm, indices, counts, all_indices, None))()
        make_task(allgather.prepare(comm, values, counts, all_values, None))()
        half = own.dtype in (torch.float16, torch.bfloat16)
        wide = all_values.float() if half else all_values
        total = torch.sparse_coo_tensor(all_indices.t(), wide, own.shape, check_invariants=False).coalesce()
        if name == "avg":
            total = total / comm.size
        # Into the tensor itself: a detached tensor has separate indices and values.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(total.to(own.dtype))

    dtype = str(tensor.dtype).removeprefix("torch.")
    call = Call("all_reduce", None, f"sparse {dtype}", tuple(tensor.shape), op=str(name), algorithm="allgather")
    return Task(lambda: context.run(run), call)
