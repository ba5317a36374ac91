"""An embedding whose rows are sharded over the ranks of a tensor parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.groups import communicator, describe_rank
from mpicoll.parallel.layers.base import InitMethod, ParallelModule, copy_local_block, divide_extent, gather_full
from mpicoll.parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mpicoll.parallel.mappings.arguments import check_tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class VocabParallelEmbedding(ParallelModule):
    """An embedding whose rows are sharded: each rank holds ``num_embeddings / P`` of them.

    The input is an integer tensor of ids in ``[0, num_embeddings)``, the same on all ranks. The output has the shape
    ``(*ids.shape, embedding_dim)``; with `sequence_parallel` it is this rank's part of axis 0. Sends 2n(P-1)/P bytes
    per rank for an output of n bytes in the forward; with `sequence_parallel` n(P-1)/P in forward and backward.

    Args:
        num_embeddings: the number of rows of all ranks together.
        embedding_dim: the length of a row.
        padding_idx: as of torch.nn.Embedding.
        sequence_parallel: return this rank's part of axis 0.
        init_method: a function that fills the full weight in place; by default the values of torch.nn.Embedding.
        group: the tensor parallel group, by default the axis "model" of the grid in use.
        device: as of torch.nn.Embedding.
        dtype: as of torch.nn.Embedding.

    Raises:
        ShapeError: the number of ranks does not divide `num_embeddings`, or with `sequence_parallel` axis 0 of the ids.
        ArgumentError: `padding_idx` is out of range.
        IndexError: an id is out of range.
        DTypeError: the input is not a tensor.

    Example:
        ::

            embedding = VocabParallelEmbedding(12, 8)
            embedding(torch.arange(5))  # (5, 8), the same on all ranks
    """

    _shard_dims: ClassVar = {"weight": 0}

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = None,
        group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        self.group, self.comm = group, communicator(group)
        share = divide_extent(type(self).__name__, "num_embeddings", num_embeddings, self.comm)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(
                f"VocabParallelEmbedding: padding_idx {padding_idx} is not in [-{num_embeddings}, {num_embeddings})"
                f" {describe_rank(self.comm)}"
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.start = self.comm.rank * share
        self.stop = self.start + share
        self.init_method = init_method
        self.weight = copy_local_block(self._make_plain(device, dtype), 0, self.comm)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: Any = None, **options: Any) -> Self:
        """Make a layer with the values, dtype and device of `embedding`.

        Args:
            embedding: the plain layer, the same on every rank.
            group: the tensor parallel group, by default the axis "model" of the grid in use.
            options: further keyword arguments of the constructor.

        Raises:
            ArgumentError: `embedding` has max_norm, scale_grad_by_freq or sparse, which are not supported here.
        """
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, name):
                raise ArgumentError(f"VocabParallelEmbedding: an Embedding with {name} can't be sharded")
        whole = embedding.weight
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            padding_idx=embedding.padding_idx,
            group=group,
            device=torch.device("meta"),
            dtype=whole.dtype,
            **options,
        )
        layer.weight = copy_local_block(whole, 0, layer.comm)
        return layer.train(embedding.training)

    def to_embedding(self) -> nn.Embedding:
        """Return the plain layer with the full weight, on every rank. Collective: sends n(P-1)/P of the weight."""
        embedding = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        embedding.weight = Parameter(gather_full(self.weight, 0, self.comm), self.weight.requires_grad)
        return embedding.train(self.training)

    def reset_parameters(self) -> None:
        """Draw values as the constructor does, for example after ``to_empty``. All ranks of the group must call it."""
        with torch.no_grad():
            self.weight.copy_(copy_local_block(self._make_plain(self.weight.device, self.weight.dtype), 0, self.comm))

    def _make_plain(self, device: Any, dtype: Any) -> Tensor:
        """Return the full weight with its initial values."""
        plain = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device=device, dtype=dtype)
        if self.init_method is not None:
            with torch.no_grad():
                self.init_method(plain.weight)
        return plain.weight

    def forward(self, ids: Tensor) -> Tensor:
        comm = self.comm
        check_tensor("VocabParallelEmbedding", ids, comm)
        if self.sequence_parallel and (ids.dim() == 0 or ids.shape[0] % comm.size):
            raise ShapeError(
                f"VocabParallelEmbedding: the sequence, axis 0 of ids of shape {tuple(ids.shape)}, can't be divided"
                f" equally among {comm.size} ranks {describe_rank(self.comm)}"
            )
        if comm.size == 1:
            return self._look_up(ids, ids, self.padding_idx)
        padding = self.padding_idx
        local = padding - self.start if padding is not None and self.start <= padding < self.stop else None
        # An id of another rank reads row 0, which is then masked; an id of no rank stays out of range and raises.
        elsewhere = ((ids >= 0) & (ids < self.start)) | ((ids >= self.stop) & (ids < self.num_embeddings))
        rows = self._look_up((ids - self.start).masked_fill(elsewhere, 0), ids, local)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(rows, comm)
        return reduce_from_tensor_model_parallel_region(rows, comm)

    def _look_up(self, local: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        try:
            return functional.embedding(local, self.weight, padding_idx)
        except IndexError as error:
            raise IndexError(
                f"VocabParallelEmbedding: ids must be in [0, {self.num_embeddings}), got some in"
                f" [{int(ids.min())}, {int(ids.max())}] {describe_rank(self.comm)}"
            ) from error

    def extra_repr(self) -> str:
        return ", ".join(
            [
                f"{self.num_embeddings}, {self.embedding_dim}",
                *([] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]),
                *(["sequence_parallel=True"] if self.sequence_parallel else []),
                f"rank {self.comm.rank} of {self.comm.size}",
            ]
        )
