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

from mpicoll.parallel.context_parallel.ring import ring_attention
from mpicoll.parallel.context_parallel.sequence import Layout, gather_sequence, position_ids, split_sequence
from mpicoll.parallel.context_parallel.ulysses import ulysses_attention

__all__ = [
    "Layout",
    "gather_sequence",
    "position_ids",
    "ring_attention",
    "split_sequence",
    "ulysses_attention",
]
