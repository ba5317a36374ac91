"""Ring attention: keys and values are sent around the ring of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function

from mpicoll.collectives import p2p
from mpicoll.collectives.repeated_messages import makes_progress
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.poller import poller
from mpicoll.engine.core.request import Request, waitall
from mpicoll.engine.world import as_communicator, resolve
from mpicoll.errors import ArgumentError, CommunicationError
from mpicoll.parallel.context_parallel.arguments import check_agreement, check_arguments
from mpicoll.parallel.context_parallel.attention_block import attend, attend_backward, get_accumulation_dtype
from mpicoll.parallel.context_parallel.sequence import Layout
from mpicoll.parallel.groups import communicator
from mpicoll.parallel.p2p.device_messages import connect_devices
from mpicoll.torch.no_compile import disable_compile

_PartialGradients: TypeAlias = tuple[slice, slice, list[Tensor]]
"""Heads and tokens of a block, and the gradients computed for them."""


@disable_compile
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: Layout = "contiguous",
    group: Any = None,
) -> Tensor:
    """Compute ``softmax(scale * query @ key.T) @ value`` over the tokens of all ranks; each rank passes its own.

    Keys and values are sent around the ring of ranks, while each rank computes with its current block (Liu et al.
    2023, Ring Attention); masked blocks are not computed. The backward sends them round again, together with their
    gradients. Only this rank's own tensors are kept between the two. On a CUDA device a block is computed by matrix
    products, with all its weights in memory, tokens^2 for each head. Each of P ranks sends, where n is the
    size of its `key` and `value` together: an all-gather of 168 bytes, which compares the arguments, then n(P-1) bytes
    in 2(P-1) messages; in the backward 2n(P-1) bytes in 4(P-1) messages. With half precision the gradients, which
    are sent in float32, take twice as much (3n(P-1) in all).

    Blocks are sent on a duplicate of the communicator, made at the first call and freed with it, so they never match
    messages of the user. Dropout and other masks are not supported. Under autocast it computes as without: in the dtype
    of its tensors, half precision with sums in float32.

    Args:
        query: (batch, heads, tokens, head_dim).
        key: (batch, kv_heads, tokens, head_dim); kv_heads divides heads, and consecutive query heads share one (GQA).
            Without `causal`, `key` and `value` may have another number of tokens than `query`.
        value: (batch, kv_heads, tokens, any head_dim).
        causal: a token attends to itself and to those before it in the full sequence.
        scale: a positive number; by default 1/sqrt(head_dim).
        layout: the positions of this rank's tokens, "contiguous" or "zigzag"; without `causal` it makes no difference.
        group: the ranks that share the sequence, by default the axis "context" of the grid in use.

    All ranks pass the same shapes, dtype and arguments, and each tensor requires grad on all ranks or on none.

    Returns:
        This rank's part, (batch, heads, tokens, head_dim of `value`), in the dtype of `query`.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors do not fit together; raised before any message leaves.
        ArgumentError: an argument is invalid (before any message leaves), ranks pass different arguments (on all
            ranks), or the gradient is differentiated again.
        CommunicationError: a rank has exited.

    Example:
        ::

            q, k, v = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(3))  # this rank's 6 tokens
            ring_attention(q, k, v, causal=True).sum().backward()
    """
    comm = communicator(group, "context")
    scale = check_arguments("ring_attention", comm, query, key, value, causal, scale, layout)
    if check_agreement("ring_attention", comm, (query, key, value), causal, scale, layout):
        connect_devices(comm, query.device)
    result: Tensor = _RingAttention.apply(query, key, value, _MaskPlan(comm, causal, scale, layout))
    return result


@dataclass(frozen=True)
class _MaskPlan:
    comm: Communicator
    causal: bool
    scale: float
    layout: Layout

    def find_visible_block(self, source: int, length: int) -> tuple[slice, slice, bool] | None:
        """Return which of this rank's `length` queries see which keys of rank `source`, and if the block is masked.

        None if the mask hides the whole block. The block is either unmasked, or the triangle of equal parts.
        """
        rank, everything = self.comm.rank, slice(None)
        if not self.causal or source == rank:
            # In both layouts a rank's own tokens are in the order of the sequence.
            return everything, everything, self.causal
        if self.layout == "contiguous":
            return (everything, everything, False) if source < rank else None
        # Of two ranks the lower one's chunks enclose those of the other.
        half = length // 2
        return (everything, slice(half), False) if source < rank else (slice(half, None), everything, False)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _MaskPlan) -> Tensor:
        comm = plan.comm
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        ring = RingExchange(comm, "forward")
        out = lse = query
        block: Sequence[Tensor] = (key, value)
        for step in range(comm.size):
            # The computation with this block overlaps with the exchange of the next one.
            moving = ring.shift(block) if step < comm.size - 1 else None
            seen = plan.find_visible_block((comm.rank - step) % comm.size, query.shape[2])
            if seen is not None:
                rows, columns, causal = seen
                k, v = (one[:, :, columns] for one in block)
                part, part_lse = attend(query[:, :, rows], k, v, causal, plan.scale)
                if step == 0:
                    out, lse = part.to(get_accumulation_dtype(query)), part_lse
                else:
                    _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            if moving is not None:
                block = moving()
        out = out.to(query.dtype)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_RingAttentionBackward.apply(grad, *ctx.saved_tensors, ctx.plan, ctx.needs_input_grad[:3]), None


class _RingAttentionBackward(Function):
    """The gradients of query, key and value.

    A separate Function, so that differentiating them raises instead of treating them as constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: _MaskPlan,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        comm = plan.comm
        grad = grad.contiguous()
        heads, share = key.shape[1], query.shape[1] // key.shape[1]
        grad_query, grad_key, grad_value = (
            torch.zeros_like(one, dtype=get_accumulation_dtype(one)) for one in (query, key, value)
        )
        # Of key and value: the indices of those that need a gradient, and the sums for this rank's block.
        wanted = [index for index in (0, 1) if needs[1 + index]]
        own = [(grad_key, grad_value)[index] for index in wanted]

        def compute(step: int, block: Sequence[Tensor], some: slice) -> _PartialGradients | None:
            """Add to the gradient of the queries, and return those of `some` heads of `block`, which was received in
            step `step`."""
            seen = plan.find_visible_block((comm.rank - step) % comm.size, query.shape[2])
            if seen is None:
                return None
            rows, columns, causal = seen
            many = slice(some.start * share, some.stop * share)
            q, g, o, log = (one[:, many, rows] for one in (query, grad, out, lse))
            k, v = (one[:, some, columns] for one in block)
            grad_q, *found = attend_backward(g, q, k, v, o, log, causal, plan.scale)
            grad_query[:, many, rows] += grad_q
            return some, columns, [found[index] for index in wanted]

        # The sums for a block begin at the first rank that receives it, follow one step behind it, and end at its
        # owner. While they return to the owner, a rank computes the deferred half of the heads of its own block.
        early = (heads + 1) // 2 if own and comm.size > 1 else heads
        ring = RingExchange(comm, "backward")
        block: Sequence[Tensor] = (key, value)
        sums: Sequence[Tensor] = ()
        for step in range(comm.size):
            moves = step < comm.size - 1
            outgoing = [*(block if moves else ()), *sums]
            moving = ring.shift(outgoing) if outgoing else None
            found = compute(step, block, slice(0, heads if step else early))
            arrived = moving() if moving is not None else []
            if step == 0:
                _add_gradients(own, found)
            else:
                sums = arrived[2 * moves :] if step > 1 else [torch.zeros_like(one) for one in own]
                _add_gradients(sums, found)
            block = arrived[:2] if moves else (key, value)
        if sums:
            moving = ring.shift(sums)
            if early < heads:
                _add_gradients(own, compute(0, block, slice(early, heads)))
            for total, one in zip(own, moving(), strict=True):
                total += one
        grads = zip((grad_query, grad_key, grad_value), (query, key, value), needs, strict=True)
        return tuple(total.to(one.dtype) if needed else None for total, one, needed in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArgumentError(
            "ring_attention: its gradient can't be differentiated again; ulysses_attention's can, under"
            " torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _add_gradients(sums: Sequence[Tensor], found: _PartialGradients | None) -> None:
    if found is not None:
        heads, columns, parts = found
        for total, part in zip(sums, parts, strict=True):
            total[:, heads, columns] += part


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention `part` to further keys into `out`. `lse` is the log of the sum of the weights of `out`."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


class RingExchange:
    """Exchange of tensors with the next and the previous rank of the ring, in buffers that are reused."""

    def __init__(self, comm: Communicator, phase: str) -> None:
        self._comm = _get_private_duplicate(comm)
        self._phase = phase
        # The same on all ranks; pending messages of an earlier call that failed have another tag.
        self._tag = core_of(self._comm).next_tag()
        self._made: list[Tensor] = []
        self._free: list[Tensor] = []

    def shift(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send contiguous `tensors` to the next rank and to receive the same from the previous rank.

        Returns:
            A function that waits for both and returns the received tensors. After it returns, those of `tensors` that
            were received themselves must not be used any more.
        """
        comm = self._comm
        arriving = [self._receive_buffer(one) for one in tensors]
        source, dest = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        requests: list[Request] = [p2p.irecv(None, source, self._tag, out=one, comm=comm) for one in arriving]
        requests += [p2p.isend(one.detach(), dest, self._tag, comm=comm) for one in tensors]
        for request in requests:
            if not makes_progress(request):
                poller.watch(request)

        def wait() -> list[Tensor]:
            try:
                waitall(requests)
            except CommunicationError as error:
                error.args = (f"ring_attention ({self._phase}): {error}",)
                raise
            self._free += [one for one in tensors if any(one is made for made in self._made)]
            return arriving

        return wait

    def _receive_buffer(self, tensor: Tensor) -> Tensor:
        for index, one in enumerate(self._free):
            if one.shape == tensor.shape and one.dtype == tensor.dtype:
                return self._free.pop(index)
        self._made.append(torch.empty_like(tensor))
        return self._made[-1]


def _get_private_duplicate(comm: Communicator) -> Communicator:
    """Return a duplicate of `comm` that carries no other messages; the first call is collective.

    Blocks are not sent by collectives, although those are separate from messages too: the thread that runs collectives
    in the background polls without sleeping, and would take the core from the computation.
    """
    if comm.size == 1:
        return comm
    # Not by Communicator.mpi, whose use permits the program to send messages there.
    own = core_of(comm).transport.mpi
    if own is not None:
        # Kept with MPI's communicators, and freed with them. The first duplicate corresponds to comm.mpi where a user
        # passes it, and carries the messages sent there; the second has no other user.
        return as_communicator(resolve(own).transport.mpi)
    if comm not in _THREAD_DUPLICATES:
        _THREAD_DUPLICATES[comm] = comm.group(range(comm.size))  # with nothing to free
    made: Communicator = _THREAD_DUPLICATES[comm]
    return made


_THREAD_DUPLICATES: WeakKeyDictionary[Communicator, Any] = WeakKeyDictionary()
