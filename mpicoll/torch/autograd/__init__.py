"""Differentiable collectives on torch tensors, out of place: no input and no incoming gradient is ever changed.

Meaning of a gradient: every rank runs its own graph and calls ``backward`` on its own loss. The differentiated function
is the **sum of these losses over the ranks**: the gradient of a rank's tensor is the derivative of that sum. A loss
that all ranks compute identically therefore counts once per rank; divide it by the number of ranks if it should count
once. (torch.distributed.nn.functional uses the same definition.)

The rules that follow from it:

* The backward of a collective is a collective. **On every rank the tensor must require grad, or on none**, also where
  only its shape matters, as with :func:`broadcast` on a rank that receives. Ranks that disagree wait for each other.
* Every rank must run the backward, and its loss must depend on each result (add
  ``0 * result.sum()`` where it does not). ``torch.autograd.grad(loss, inputs)`` skips nodes that do not lead to one of
  `inputs`: all ranks must pass inputs that lead to the same collectives; on a rank that only receives, this is the
  tensor that it passed to the collective.
* autograd traverses a graph in the reverse order of the calls. If all ranks called the same operations in the
  same order, their backwards match as well, and the gradients of :func:`send` and :func:`recv` are sent in the reverse
  order. So make the calls on one thread per rank, and run the same ``backward`` calls on all ranks.
* All functions can be differentiated twice or more often. With ``create_graph=True`` every rank records the same
  collectives, even where its own loss is linear or constant and another's is not.
* ``backward`` and ``torch.autograd.grad`` take one gradient at a time: the transforms of torch.func (``grad``,
  ``vmap``), derivatives in forward mode and batches of gradients are not supported, and raise errors.
* Without a tensor that requires grad, or under ``torch.no_grad()``, they are plain collectives. Integers and bool have
  no gradient. Gradients of complex tensors follow torch's convention.

`group` is None (torch's default process group if that is mpicoll's, else mpicoll's world), a torch process group of
mpicoll, a Communicator or an mpi4py communicator. `src` and `dst` are global ranks where `group` is a torch process
group, as everywhere in torch, and otherwise ranks of the communicator. `op` is the name of a reduction, a
``premul_sum(factor)``, or a torch ReduceOp. Tensors may have any strides, and lie on the CPU or, on all ranks, on a
CUDA device, where a backward runs on the stream of its forward, as everywhere in torch. Wrong arguments raise kinds of
ArgumentError before any message is sent.
"""

from mpicoll.torch.autograd.collectives import (
    all_gather,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    scatter,
)
from mpicoll.torch.autograd.p2p import recv, send, sendrecv

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
    "sendrecv",
]
