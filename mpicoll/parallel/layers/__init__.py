"""Layers whose weights are spread over the ranks of a tensor parallel group, and norms for sequence parallelism.

What goes in and comes out of each layer, for activations of shape ``(sequence, batch, hidden)``:

======================  =============================================  ==============================================
layer                   replicated activations                         ``sequence_parallel=True``
======================  =============================================  ==============================================
ColumnParallelLinear    whole in, a part of the features out           a part of the sequence in, all of it, but a part
                                                                       of the features, out
RowParallelLinear       a part of the features in, whole out           a part of the features in, a part of the
                                                                       sequence out
VocabParallelEmbedding  ids in, whole out                              ids in, a part of the sequence out
LayerNorm, RMSNorm      whole in, whole out                            a part of the sequence in, the same out
======================  =============================================  ==============================================

The sequence is always axis 0, and parts are equal and in the order of ranks. Every rank calls the same layers in the
same order, and they must agree on what requires grad: the backward of one layer is a collective.

Gradients are those of one loss that all ranks of the group compute alike, counted once. They are whole when
``backward`` returns: nothing is left to do for the parameters that all ranks hold, such as a norm's weight. Optimizers
that treat each element by itself (SGD, Adam, ...) then do what they do with the plain layers; those that look at whole
matrices or all parameters at once (LBFGS, Adafactor, Muon) would see parts only, and are not for these layers.

That parts are of equal size on all ranks, and of one dtype, is not checked, as it would take another message: where
they are not, a rank may get an error of the communication, or numbers that mean nothing.

Parameters start as those of the plain layers of torch.nn would: every rank draws the whole weight from torch's default
generator, which must be in the same state on all ranks of the group (``torch.manual_seed``), and keeps its part. So the
model is the same for any number of ranks, and for a moment each rank has one whole weight in memory.
"""

from mpicoll.parallel.layers.embedding import VocabParallelEmbedding
from mpicoll.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel_linear
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
