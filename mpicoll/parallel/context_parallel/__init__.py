"""Context parallelism: exact attention over a sequence that is sharded among ranks.

Each rank holds its part of the tokens, the same number on every rank. All operations except attention treat each token
separately and need no other rank. Attention is :func:`ring_attention` or :func:`ulysses_attention`.

**Layouts.** ``"contiguous"``: rank i of P holds the i-th of P consecutive parts. With a causal mask, rank 0 then has
almost nothing to compute, and the last rank attends to everything. ``"zigzag"`` balances the work: the sequence is cut
into 2P chunks, and rank i holds chunks i and 2P-1-i, in this order, so each rank computes half as much as without a
mask. :func:`split_sequence` takes a rank's part of a full sequence; :func:`position_ids` returns the positions of its
tokens.

**Gradients.** Each rank computes the loss of its own tokens. The function that is differentiated is the **sum of the
ranks' losses**, as in :mod:`mpicoll.torch.autograd` and unlike the rest of :mod:`mpicoll.parallel`. So after
``backward`` each rank holds the contribution of its own tokens to the gradients of the parameters: sum them over the
context group, together with the sum over the data group. For the mean over all tokens, divide by the number of tokens
of the full sequence. Every rank must run the backward, and its loss must depend on each result.

Tensors are on the CPU or, on all ranks, on a CUDA device, in float64, float32, bfloat16 or float16. With half
precision, results and gradients are accumulated in float32 over the ranks' parts and rounded at the end.
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
