"""Context parallelism: exact attention over a sequence that is cut among ranks.

Each rank holds its part of the tokens, the same number on every rank. Everything but attention works on tokens one by
one, and needs no other rank; attention is :func:`ring_attention`, or :func:`ulysses_attention`.

**Layouts.** ``"contiguous"``: rank i of P has the i-th of P consecutive parts. With a causal mask rank 0 then has next
to nothing to do and the last rank attends to everything. ``"zigzag"`` balances that: the sequence is cut into 2P
chunks, and rank i has chunks i and 2P-1-i, in this order; so each rank computes half of what it would without a mask.
:func:`split_sequence` takes a rank's part of a whole sequence, :func:`position_ids` tells where its tokens stand.

**Gradients.** Each rank computes the loss of its own tokens, and what is differentiated is the **sum of the ranks'
losses**, as in :mod:`mpicoll.torch.autograd` and unlike in the rest of :mod:`mpicoll.parallel`. So after ``backward``
each rank holds what its own tokens contribute to the gradients of the parameters: add them over the context group, in
one with that over the data group. For the mean over all tokens divide by their number in the whole sequence. Every
rank must run the backward, and its loss must depend on each result.

Tensors lie on the CPU or, on all ranks, on a CUDA device, in float64, float32, bfloat16 or float16. With half
precision, results and gradients are accumulated in float32 over the ranks' parts, and rounded at the end.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from mpicoll.collectives import p2p
from mpicoll.collectives.allgather import allgather
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.poller import poller
from mpicoll.engine.request import waitall
from mpicoll.engine.world import resolve
from mpicoll.errors import ArgumentError, CommunicationError, DeviceError, DTypeError, ShapeError
from mpicoll.parallel.groups import communicator
from mpicoll.torch.autograd import all_gather_single, all_to_all_single
from mpicoll.torch.no_compile import eager

__all__ = ["Layout", "gather_sequence", "position_ids", "ring_attention", "split_sequence", "ulysses_attention"]

Layout: TypeAlias = Literal["contiguous", "zigzag"]

_LAYOUTS = ("contiguous", "zigzag")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_Found: TypeAlias = tuple[slice, slice, list[Tensor]]
"""Heads and tokens of a block, and what was found for them."""


@eager
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
    """``softmax(scale * query @ key.T) @ value`` over the tokens of all ranks, of which each passes its own.

    `query` is (batch, heads, tokens, head_dim), and `key` and `value` are (batch, kv_heads, tokens, head_dim), where
    kv_heads divides heads: consecutive query heads share one (GQA). `value` may have another head_dim. All ranks pass
    the same shapes, dtype and arguments, and each tensor must require grad on all ranks or on none. Without `causal`,
    `key` and `value` may have another number of tokens than `query`, and `layout` does not matter. `scale`,
    a positive number, is 1/sqrt(head_dim) by default. Returns this rank's part, (batch, heads, tokens, head_dim of
    `value`), in the dtype of `query`.

    Keys and values travel round the ring of ranks, while each rank computes with those that it has (Liu et al. 2023,
    Ring Attention); what the mask hides is not computed. In the backward they go round again, and their gradients with
    them. Only what lies on this rank is kept in between. On a CUDA device a block is computed by matrix products, with
    all its weights in memory meanwhile, tokens^2 for each head. Of P ranks each sends, where n is the size of its `key`
    and `value` together: an all-gather of 160 bytes, in which they compare their arguments, then n(P-1) bytes in 2(P-1)
    messages; and 2n(P-1) bytes in 4(P-1) messages in the backward, where with half precision the gradients,
    which travel in float32, take twice as much (3n(P-1) in all).

    Blocks travel on a duplicate of the communicator, made at the first call and freed with it, so they meet none of the
    user's messages. The gradient can't be differentiated again, which raises ArgumentError. Dropout and other masks are
    not to be had.

    Raises ShapeError, DTypeError, DeviceError, ArgumentError before any message leaves, and ArgumentError on all ranks
    alike where they disagree; CommunicationError if a rank has gone.
    """
    comm = communicator(group, "context")
    scale = _checked("ring_attention", comm, query, key, value, causal, scale, layout)
    _agree("ring_attention", comm, (query, key, value), causal, scale, layout)
    result: Tensor = _Ring.apply(query, key, value, _Plan(comm, causal, scale, layout))
    return result


@eager
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: Layout = "contiguous",
    group: Any = None,
) -> Tensor:
    """:func:`ring_attention` by another way: each rank computes some of the heads, over the whole sequence.

    An all-to-all brings each rank all tokens of its share of heads, torch's own scaled_dot_product_attention computes,
    and another one brings the results back (Jacobs et al. 2023, DeepSpeed-Ulysses). The number of ranks must divide
    both heads and kv_heads. Arguments, result, errors and gradients as for :func:`ring_attention`, but it can be
    differentiated as often as torch's can. Each of P ranks sends (P-1)/P of its `query`, `key`, `value` and result, and
    in the backward of their gradients; with as many kv_heads as heads that is 2/P and 1/P of what the ring sends, but
    nothing is computed meanwhile, and a rank has the whole sequence of its heads in memory.
    """
    comm = communicator(group, "context")
    scale = _checked("ulysses_attention", comm, query, key, value, causal, scale, layout)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.shape[1] % comm.size:
            raise ShapeError(
                f"ulysses_attention: the {tensor.shape[1]} heads of {name} (dim 1 of shape {tuple(tensor.shape)}) can't"
                f" be divided among {comm.size} ranks; take ring_attention {_where(comm)}"
            )
    _agree("ulysses_attention", comm, (query, key, value), causal, scale, layout)
    q, k, v = (_heads_from_tokens(one, layout, comm) for one in (query, key, value))
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return _tokens_from_heads(result, layout, comm)


@eager
def split_sequence(x: Tensor, dim: int, *, layout: Layout = "contiguous", group: Any = None) -> Tensor:
    """This rank's part of the whole sequence `x`, whose tokens lie along `dim`: a copy. No messages.

    The gradient of `x` is that of this rank's losses, zero at the tokens of other ranks: like a parameter's, it must be
    added over the group if `x` was computed alike on all of them. Raises ShapeError where the tokens can't be divided
    among P ranks, or with zigzag into 2P chunks; ArgumentError for an unknown layout.
    """
    comm = communicator(group, "context")
    _check_layout("split_sequence", layout, comm)
    dim = _checked_dim("split_sequence", x, dim, comm)
    chunks = comm.size * _chunks(layout)
    if x.shape[dim] % chunks:
        raise ShapeError(
            f"split_sequence: the {x.shape[dim]} tokens along dim {dim} of shape {tuple(x.shape)} can't be divided into"
            f" {chunks} equal parts, {_chunks(layout)} for each of {comm.size} ranks (layout {layout}); pad them"
            f" {_where(comm)}"
        )
    return x.index_select(dim, _positions(x.shape[dim] // comm.size, layout, comm.rank, comm.size, x.device))


@eager
def gather_sequence(x: Tensor, dim: int, *, layout: Layout = "contiguous", group: Any = None) -> Tensor:
    """The whole sequence in its order, on every rank; the opposite of :func:`split_sequence`.

    Every rank passes its part `x`, all of one shape and dtype, with its tokens along `dim`. The gradient of `x` is that
    of the sum of all ranks' losses: where all compute the same loss from the whole, count it on one rank only, or
    divide it by the number of ranks. Can be differentiated any number of times. Costs an all-gather, and in the
    backward a reduce-scatter. Raises ShapeError, ArgumentError before any message leaves.
    """
    comm = communicator(group, "context")
    _check_layout("gather_sequence", layout, comm)
    dim = _checked_dim("gather_sequence", x, dim, comm)
    _check_chunks("gather_sequence", x, dim, "x", layout, comm)
    return _ordered(all_gather_single(x, dim, comm), dim, layout, comm)


@eager
def position_ids(
    length: int, *, layout: Layout = "contiguous", group: Any = None, device: torch.device | str | None = None
) -> Tensor:
    """Where the `length` tokens that this rank holds stand in the whole sequence: int64, of shape (length,).

    `length` is that of the part, such as ``x.shape[dim]`` after :func:`split_sequence`. No messages. Raises ShapeError
    for a negative length and, with zigzag, an odd one; ArgumentError for an unknown layout.
    """
    comm = communicator(group, "context")
    _check_layout("position_ids", layout, comm)
    if length < 0 or length % _chunks(layout):
        raise ShapeError(
            f"position_ids: length, that of a rank's part, must be 0 or more, and even with zigzag;"
            f" got {length} ({layout}) {_where(comm)}"
        )
    return _positions(length, layout, comm.rank, comm.size, device)


# --- the ring


@dataclass(frozen=True)
class _Plan:
    comm: Communicator
    causal: bool
    scale: float
    layout: Layout

    def seen(self, source: int, length: int) -> tuple[slice, slice, bool] | None:
        """Which of this rank's `length` queries see which keys of rank `source`, and whether the mask is among them;
        None if the mask hides all. Each of the queries sees each of the keys, or it is the triangle of equal parts."""
        rank, everything = self.comm.rank, slice(None)
        if not self.causal or source == rank:
            # In both layouts a rank's own tokens are in the order of the sequence.
            return everything, everything, self.causal
        if self.layout == "contiguous":
            return (everything, everything, False) if source < rank else None
        # Of two ranks the lower one's chunks enclose those of the other.
        half = length // 2
        return (everything, slice(half), False) if source < rank else (slice(half, None), everything, False)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        comm = plan.comm
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        ring = Neighbours(comm, "forward")
        out = lse = query
        block: Sequence[Tensor] = (key, value)
        for step in range(comm.size):
            # What is computed now hides the exchange of what is computed next.
            moving = ring.pass_on(block) if step < comm.size - 1 else None
            seen = plan.seen((comm.rank - step) % comm.size, query.shape[2])
            if seen is not None:
                rows, columns, causal = seen
                k, v = (one[:, :, columns] for one in block)
                part, part_lse = attend(query[:, :, rows], k, v, causal, plan.scale)
                if step == 0:
                    out, lse = part.to(_precise(query)), part_lse
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
        return *_RingBackward.apply(grad, *ctx.saved_tensors, ctx.plan, ctx.needs_input_grad[:3]), None


class _RingBackward(Function):
    """The gradients of query, key and value. A function of its own, so that differentiating them is an error, and not
    as if they were constants."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: _Plan,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        comm = plan.comm
        grad = grad.contiguous()
        heads, share = key.shape[1], query.shape[1] // key.shape[1]
        by_query, by_key, by_value = (torch.zeros_like(one, dtype=_precise(one)) for one in (query, key, value))
        # Of keys and values: what needs a gradient, and the sums for this rank's own.
        wanted = [index for index in (0, 1) if needs[1 + index]]
        own = [(by_key, by_value)[index] for index in wanted]

        def compute(step: int, block: Sequence[Tensor], some: slice) -> _Found | None:
            """Add to the gradient of the queries, and find those of `some` heads of `block`, which has gone `step`
            steps."""
            seen = plan.seen((comm.rank - step) % comm.size, query.shape[2])
            if seen is None:
                return None
            rows, columns, causal = seen
            many = slice(some.start * share, some.stop * share)
            q, g, o, log = (one[:, many, rows] for one in (query, grad, out, lse))
            k, v = (one[:, some, columns] for one in block)
            by_q, *found = attend_backward(g, q, k, v, o, log, causal, plan.scale)
            by_query[:, many, rows] += by_q
            return some, columns, [found[index] for index in wanted]

        # The sums for a block begin at the first rank that it comes to, follow one step behind it, and end at its
        # owner. While they come home, a rank computes the half of its own block's heads that it has left for then.
        early = (heads + 1) // 2 if own and comm.size > 1 else heads
        ring = Neighbours(comm, "backward")
        block: Sequence[Tensor] = (key, value)
        sums: Sequence[Tensor] = ()
        for step in range(comm.size):
            moves = step < comm.size - 1
            travelling = [*(block if moves else ()), *sums]
            moving = ring.pass_on(travelling) if travelling else None
            found = compute(step, block, slice(0, heads if step else early))
            arrived = moving() if moving is not None else []
            if step == 0:
                _add(own, found)
            else:
                sums = arrived[2 * moves :] if step > 1 else [torch.zeros_like(one) for one in own]
                _add(sums, found)
            block = arrived[:2] if moves else (key, value)
        if sums:
            moving = ring.pass_on(sums)
            if early < heads:
                _add(own, compute(0, block, slice(early, heads)))
            for total, one in zip(own, moving(), strict=True):
                total += one
        grads = zip((by_query, by_key, by_value), (query, key, value), needs, strict=True)
        return tuple(total.to(one.dtype) if needed else None for total, one, needed in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArgumentError(
            "ring_attention: its gradient can't be differentiated again; ulysses_attention's can, under"
            " torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _add(sums: Sequence[Tensor], found: _Found | None) -> None:
    if found is not None:
        heads, columns, parts = found
        for total, part in zip(sums, parts, strict=True):
            total[:, heads, columns] += part


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Make `out`, the attention to some keys, with `lse` the log of the sum of their weights, that to `part`'s too."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _precise(x: Tensor) -> torch.dtype:
    """In which dtype parts of the kind of `x` are added up."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Neighbours:
    """Passes tensors on to the next rank of the ring, for those of the rank before, in memory that it uses again."""

    def __init__(self, comm: Communicator, phase: str) -> None:
        self._comm = _private(comm)
        self._phase = phase
        # The same on all ranks; what a call that failed has left under way has another one.
        self._tag = self._comm.next_tag()
        self._made: list[Tensor] = []
        self._free: list[Tensor] = []

    def pass_on(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send contiguous `tensors`, and to receive the like. What is returned waits for both, and gives what
        has arrived; those of `tensors` that had arrived themselves are then not to be used any more."""
        comm = self._comm
        arriving = [self._like(one) for one in tensors]
        source, dest = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        requests = [p2p.irecv(None, source, self._tag, out=one, comm=comm) for one in arriving]
        requests += [p2p.isend(one.detach(), dest, self._tag, comm=comm) for one in tensors]
        for request in requests:
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

    def _like(self, tensor: Tensor) -> Tensor:
        for index, one in enumerate(self._free):
            if one.shape == tensor.shape and one.dtype == tensor.dtype:
                return self._free.pop(index)
        self._made.append(torch.empty_like(tensor))
        return self._made[-1]


def _private(comm: Communicator) -> Communicator:
    """A duplicate of `comm` on which no other messages travel; collective when it is asked for first.

    Blocks don't go with the collectives, although those are apart from messages too: the thread that carries out
    collectives in the background waits eagerly, and takes the core from the computation.
    """
    if comm.size == 1:
        return comm
    # Not by Communicator.mpi, which says that the program may send messages there.
    own = comm.transport.mpi
    if own is not None:
        # Kept with MPI's communicators, and freed with them. The first duplicate is what comm.mpi means where a user
        # passes it, and carries the messages sent there; the second is nobody else's.
        return resolve(resolve(own).transport.mpi)
    if comm not in _OF_THREADS:
        _OF_THREADS[comm] = comm.group(range(comm.size))  # with nothing to free
    made: Communicator = _OF_THREADS[comm]
    return made


_OF_THREADS: WeakKeyDictionary[Communicator, Any] = WeakKeyDictionary()


# --- one block of keys


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of `query` to the keys given, and for each query the log of the sum of its weights, which is float32
    for half precision."""
    if _fits_fused(query, key, value):
        out, lse = _FUSED(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    return attend_plainly(query, key, value, causal, scale)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients of queries, keys and values, where `out` and `lse` are those over all
    keys that there are."""
    if _fits_fused(query, key, value):
        by_query, by_key, by_value = _FUSED_BACKWARD(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
        return by_query, by_key, by_value
    return attend_backward_plainly(grad, query, key, value, out, lse, causal, scale)


_FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FUSED_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def _fits_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's fused kernels can take it. They end the process where there is nothing to compute."""
    return (
        query.is_cpu
        and _FUSED is not None
        and _FUSED_BACKWARD is not None
        and key.shape[3] == value.shape[3]
        and query.numel() > 0
        and key.numel() > 0
    )


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """:func:`attend` by matrix products, with all weights in memory."""
    q, k, v = (_grouped(one, key.shape[1]) for one in (query, key, value))
    scores = _scores(q, k, query.shape[1] // key.shape[1], causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v
    return out.view(*query.shape[:3], value.shape[3]), lse.view(query.shape[:3])


def attend_backward_plainly(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attend_backward` by matrix products."""
    q, k, v, g, o = (_grouped(one, key.shape[1]) for one in (query, key, value, grad, out))
    weights = (
        _scores(q, k, query.shape[1] // key.shape[1], causal, scale) - lse.reshape(q.shape[:3]).unsqueeze(-1)
    ).exp()
    by_scores = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
    return (by_scores @ k).view(query.shape), by_scores.mT @ q, weights.mT @ g


def _grouped(x: Tensor, heads: int) -> Tensor:
    """`x` in the dtype to compute in, the rows of all heads that share one of `heads` below each other."""
    return x.to(_precise(x)).reshape(x.shape[0], heads, x.shape[1] // heads * x.shape[2], x.shape[3])


def _scores(query: Tensor, key: Tensor, share: int, causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if causal:
        hidden = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).triu(1)
        scores.masked_fill_(hidden.repeat(share, 1), -math.inf)
    return scores


# --- the sequence


def _chunks(layout: Layout) -> int:
    """Of how many stretches of the sequence a rank's part consists."""
    return 2 if layout == "zigzag" else 1


def _positions(length: int, layout: Layout, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """Where the `length` tokens of `rank` stand in the sequence."""
    chunk = length // _chunks(layout)
    starts = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)
    return torch.cat([torch.arange(i * chunk, (i + 1) * chunk, device=device) for i in starts])


def _ordered(x: Tensor, dim: int, layout: Layout, comm: Communicator) -> Tensor:
    """The tokens of all ranks' parts, which lie along `dim` in the order of ranks, in the order of the sequence."""
    if layout == "contiguous":
        return x
    places = [_positions(x.shape[dim] // comm.size, layout, rank, comm.size, x.device) for rank in range(comm.size)]
    return x.index_select(dim, torch.cat(places).argsort())


def _heads_from_tokens(x: Tensor, layout: Layout, comm: Communicator) -> Tensor:
    """All tokens of this rank's share of heads, from all heads of its share of tokens."""
    received = all_to_all_single(torch.cat(x.chunk(comm.size, 1)), group=comm)
    return _ordered(torch.cat(received.chunk(comm.size), 2), 2, layout, comm)


def _tokens_from_heads(x: Tensor, layout: Layout, comm: Communicator) -> Tensor:
    """The opposite of :func:`_heads_from_tokens`."""
    length = x.shape[2] // comm.size
    parts = [x.index_select(2, _positions(length, layout, rank, comm.size, x.device)) for rank in range(comm.size)]
    received = all_to_all_single(torch.cat(parts), group=comm)
    return torch.cat(received.chunk(comm.size), 1)


# --- arguments


def _checked(
    operation: str, comm: Communicator, query: Any, key: Any, value: Any, causal: Any, scale: Any, layout: Any
) -> float:
    """Raise unless the arguments fit together; the scale."""
    where = _where(comm)
    _check_layout(operation, layout, comm)
    if not isinstance(causal, bool):
        raise ArgumentError(f"{operation}: causal must be True or False, got {causal!r} {where}")
    _check_tensors(operation, query, key, value, where)
    _check_shapes(operation, query, key, value, causal, where)
    _check_chunks(operation, query, 2, "query", layout, comm)
    _check_chunks(operation, key, 2, "key", layout, comm)
    if scale is None:
        return float(query.shape[3] ** -0.5)
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise ArgumentError(f"{operation}: scale must be a positive number or None, got {scale!r} {where}")
    return float(scale)


def _check_tensors(operation: str, query: Any, key: Any, value: Any, where: str) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{operation}: {name} must be a tensor, got {type(tensor).__name__} {where}")
        if not (tensor.is_cpu or tensor.is_cuda) or tensor.device != query.device:
            raise DeviceError(
                f"{operation}: {name} is on {tensor.device}, query on {query.device}; query, key and value must be on"
                f" the CPU or on one CUDA device {where}"
            )
        if tensor.dtype not in _DTYPES or tensor.dtype != query.dtype:
            raise DTypeError(
                f"{operation}: query, key and value must be of one dtype among {', '.join(map(str, _DTYPES))};"
                f" {name} is {tensor.dtype}, query is {query.dtype} {where}"
            )
        if tensor.dim() != 4:
            raise ShapeError(
                f"{operation}: {name} must be of 4 dimensions, (batch, heads, tokens, head_dim), got shape"
                f" {tuple(tensor.shape)} {where}"
            )


def _check_shapes(operation: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, where: str) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ShapeError(f"{operation}: the batches (dim 0) differ: {shapes} {where}")
    if key.shape[1] != value.shape[1] or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ShapeError(
            f"{operation}: key and value must have equally many heads (dim 1), which divide those of query, got"
            f" {shapes} {where}"
        )
    if key.shape[2] != value.shape[2] or (causal and query.shape[2] != key.shape[2]):
        raise ShapeError(
            f"{operation}: key and value must have equally many tokens (dim 2), and with causal so must query, got"
            f" {shapes} {where}"
        )
    if key.shape[3] != query.shape[3] or key.shape[3] == 0:
        raise ShapeError(f"{operation}: query and key must have the same head_dim (dim 3), got {shapes} {where}")


def _agree(
    operation: str,
    comm: Communicator,
    tensors: Sequence[Tensor],
    causal: bool,
    scale: float,
    layout: Layout,
) -> None:
    """Raise ArgumentError on all ranks unless they have passed the same; else blocks of other sizes would meet, or a
    rank would wait in a backward that another does not run."""
    if comm.size == 1:
        return
    recorded = [one.requires_grad and torch.is_grad_enabled() for one in tensors]
    (bits,) = struct.unpack("q", struct.pack("d", scale))
    mine = [
        _OPERATIONS.index(operation),
        *(extent for one in tensors for extent in one.shape),
        _DTYPES.index(tensors[0].dtype),
        *recorded,
        causal,
        _LAYOUTS.index(layout),
        bits,
    ]
    everyone = allgather(np.array([mine]), comm=comm)
    differs = (everyone != everyone[0]).any(axis=1)
    if differs.any():
        other = int(differs.argmax())
        raise ArgumentError(
            f"{operation}: the ranks disagree: rank 0 passed {_described(everyone[0].tolist())}, but rank {other}"
            f" {_described(everyone[other].tolist())} {_where(comm)}"
        )


_OPERATIONS = ("ring_attention", "ulysses_attention")


def _described(passed: list[int]) -> str:
    """In words what :func:`_agree` exchanges."""
    operation, *extents, dtype, by_query, by_key, by_value, causal, layout, bits = passed
    (scale,) = struct.unpack("d", struct.pack("q", bits))
    names = ("query", "key", "value")
    tensors = ", ".join(
        f"{name} {tuple(extents[4 * index : 4 * index + 4])}{' that requires grad' if recorded else ''}"
        for index, (name, recorded) in enumerate(zip(names, (by_query, by_key, by_value), strict=True))
    )
    return (
        f"to {_OPERATIONS[operation]} {tensors}, {_DTYPES[dtype]}, causal={bool(causal)}, scale={scale:g},"
        f" layout={_LAYOUTS[layout]!r}"
    )


def _check_layout(operation: str, layout: Any, comm: Communicator) -> None:
    if layout not in _LAYOUTS:
        raise ArgumentError(f"{operation}: layout must be one of {_LAYOUTS}, got {layout!r} {_where(comm)}")


def _check_chunks(operation: str, x: Tensor, dim: int, name: str, layout: Layout, comm: Communicator) -> None:
    if x.shape[dim] % _chunks(layout):
        raise ShapeError(
            f"{operation}: with zigzag each rank has two chunks of equal length, but {name} has {x.shape[dim]} tokens"
            f" (dim {dim} of shape {tuple(x.shape)}) {_where(comm)}"
        )


def _checked_dim(operation: str, x: Any, dim: int, comm: Communicator) -> int:
    """`dim`, counted from the front."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"{operation}: a tensor is needed, got {type(x).__name__} {_where(comm)}")
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{operation}: dim {dim} is no axis of a tensor of shape {tuple(x.shape)} {_where(comm)}")
    return dim % x.dim()


def _where(comm: Communicator) -> str:
    return f"(rank {comm.rank} of {comm.size})"
