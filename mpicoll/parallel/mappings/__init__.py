"""Megatron's pairs of differentiable collectives at the borders of a model-parallel region.

All ranks of the group compute the **same** loss, and it counts once. (In :mod:`mpicoll.torch.autograd`, every rank
has a separate loss and their sum is differentiated.) In such a computation a tensor is

* **replicated**: the same on all ranks, as is its gradient;
* **sharded**: each rank has a part of it along one dimension, in the order of ranks, and that part of its gradient;
* **partial**: each rank has its own tensor of full shape, such as a summand of a replicated tensor, or a copy that
  only this rank's computation uses; its gradient belongs to this rank alone.

Every function maps a tensor from one of these states to another, and its backward maps the gradient back:

================================================  ==========  ==========  ==============  ==============
function                                          in          out         forward         backward
================================================  ==========  ==========  ==============  ==============
copy_to_tensor_model_parallel_region              replicated  partial     nothing         all-reduce
reduce_from_tensor_model_parallel_region          partial     replicated  all-reduce      nothing
scatter_to_tensor_model_parallel_region           replicated  sharded     own part        all-gather
gather_from_tensor_model_parallel_region          sharded     replicated  all-gather      own part
all_gather_last_dim_from_tensor_parallel_region   sharded     partial     all-gather      reduce-scatter
reduce_scatter_last_dim_to_tensor_parallel_region partial     sharded     reduce-scatter  all-gather
scatter_to_sequence_parallel_region               replicated  sharded     own part        all-gather
gather_from_sequence_parallel_region              sharded     partial     all-gather      reduce-scatter
… with tensor_parallel_output_grad=False          sharded     replicated  all-gather      own part
reduce_scatter_to_sequence_parallel_region        partial     sharded     reduce-scatter  all-gather
all_to_all, all_to_all_sp2hp, all_to_all_hp2sp    sharded     sharded     all-to-all      all-to-all
split, along any dimension                        replicated  sharded     own part        all-gather
gather, along any dimension                       sharded     replicated  all-gather      own part
================================================  ==========  ==========  ==============  ==============

A tensor in the wrong state gives wrong gradients and no error: the result of ``copy_to`` must reach the loss through
``reduce_from`` or a similar function, and a replicated tensor must not be passed to ``reduce_from``, which would count
it once per rank.

Rules for all of them:

* Every rank of the group calls the same functions in the same order, on one thread. The backward is a collective too:
  **on every rank the tensor must require grad, or on none**, and the loss must depend on each result on all ranks
  (add ``0 * result.sum()`` where it does not); otherwise some ranks wait for the others. With ``create_graph=True``
  this also holds for the gradients: the computations between the functions must have the same kind of derivative on
  all ranks, not a constant one on one rank and a variable one on another.
* Higher-order derivatives are supported. Without a tensor that requires grad, or under ``torch.no_grad()``, they
  are plain collectives. Any dtype; integers and bool have no gradient; halves are summed in float32 and rounded once.
* They work out of place: neither `x` nor an incoming gradient is ever changed. A result has separate memory, which
  the caller may change, with two exceptions. Where the forward does nothing, in ``copy_to``, the result shares the
  memory of `x`; if it has a gradient, torch raises RuntimeError when it is changed in place, or when `x` is and the
  result used. A group of one rank returns `x` itself.
* torch.compile does not compile them: the compiled code has a graph break at each.
* Tensors are on the CPU or, on all ranks, on a CUDA device; any strides, negative `dim` and extents of zero are fine.

`group` is a process group of mpicoll, a 1-D DeviceMesh, a Communicator or an mpi4py communicator; by default the axis
"model" of the grid in use (:mod:`mpicoll.parallel.groups`). Wrong arguments raise kinds of ArgumentError before any
message leaves: DTypeError where `x` is not a tensor, ShapeError where a dimension is missing or does not divide.

P is the size of the group. The bytes that a rank sends are those of the ring, which no algorithm undercuts; inside one
machine, where ranks share memory, nothing is sent.
"""

from mpicoll.parallel.mappings.dimension import gather, split
from mpicoll.parallel.mappings.exchange import all_to_all, all_to_all_hp2sp, all_to_all_sp2hp
from mpicoll.parallel.mappings.sequence_regions import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from mpicoll.parallel.mappings.tensor_regions import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split",
]
