"""Tensor parallel layers, whose weights are sharded over the ranks of a group, and norms for sequence parallelism.

Inputs and outputs of each layer, for activations of shape ``(sequence, batch, hidden)``:

======================  =============================================  ==============================================
layer                   replicated activations                         ``sequence_parallel=True``
======================  =============================================  ==============================================
ColumnParallelLinear    full input, output sharded by feature          input sharded by sequence, output of the full
                                                                       sequence sharded by feature
RowParallelLinear       input sharded by feature, full output          input sharded by feature, output sharded by
                                                                       sequence
VocabParallelEmbedding  ids in, full output                            ids in, output sharded by sequence
LayerNorm, RMSNorm      full input, full output                        input and output sharded by sequence
======================  =============================================  ==============================================

The sequence is always axis 0. Shards are of equal size and in rank order. Every rank calls the same layers in the same
order, and the same tensors require grad on all ranks, because the backward of a layer is a collective.

Gradients are those of one loss, which all ranks of the group compute and which counts once. They are complete when
``backward`` returns: replicated parameters, such as the weight of a norm, need no further reduction. Optimizers that
treat each element separately (SGD, Adam, ...) give the same result as with the plain layers. Optimizers that use whole
matrices or all parameters at once (LBFGS, Adafactor, Muon) would see shards only, and must not be used.

Equal shard sizes and dtypes are not checked, because the check would cost another message: where they differ, a rank
may get a communication error or wrong values.

Parameters start as those of the plain layers of torch.nn: every rank draws the full weight from torch's default
generator, which must be in the same state on all ranks of the group (``torch.manual_seed``), and keeps its shard. So
the model is the same for any number of ranks, and each rank holds one full weight for a moment.

Example:
    A model of one process becomes tensor parallel, with the same values::

        model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
        shard_(model, {"0": "column", "2": "row"})
"""

from mpicoll.parallel.layers.embedding import VocabParallelEmbedding
from mpicoll.parallel.layers.functional import column_parallel_linear
from mpicoll.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpicoll.parallel.layers.norm import LayerNorm, RMSNorm
from mpicoll.parallel.layers.shard import shard_, whole_state_dict

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "column_parallel_linear",
    "shard_",
    "whole_state_dict",
]
