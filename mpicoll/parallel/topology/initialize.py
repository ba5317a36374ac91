"""Creation of the usual grid: pipeline, data, context and tensor parallelism."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpicoll.errors import ShapeError
from mpicoll.parallel import groups
from mpicoll.parallel.topology.process_topology import ProcessTopology
from mpicoll.torch import groups as torch_groups

if TYPE_CHECKING:
    pass
from mpicoll.parallel.topology.grid import PipelineParallelGrid


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    *,
    group: Any = None,
) -> PipelineParallelGrid:
    """Make a grid of pipe x data x context x model over the ranks of `group`, and put it in use for this thread.

    Neighbouring ranks, which are mostly on one node, share layers (tensor parallelism); the data axis has the remaining
    factor. Collective over `group` (see :class:`PipelineParallelGrid`). As a context manager, ``with
    initialize_model_parallel(...) as grid:``, it puts the previous grid in use again at the end, and frees this one
    unless the block raised.

    Args:
        tensor_model_parallel_size: the number of ranks that share each layer.
        pipeline_model_parallel_size: the number of pipeline stages.
        context_parallel_size: the number of parts of each sequence.
        group: the ranks, by default all.

    Raises:
        ShapeError: the product of the sizes does not divide the number of ranks, or a size is below 1.

    Example:
        ::

            with initialize_model_parallel() as grid:  # data parallelism only
                print(grid.get_data_parallel_world_size())
    """
    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    comm = torch_groups.communicator(group)
    parts = math.prod(sizes.values())
    if any(size < 1 for size in sizes.values()) or comm.size % parts:
        named = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ShapeError(
            f"initialize_model_parallel: sizes must be at least 1, and their product must divide the {comm.size} ranks,"
            f" got {named} (rank {comm.rank} of {comm.size})"
        )
    topology = ProcessTopology(
        ["pipe", "data", "context", "model"],
        [
            pipeline_model_parallel_size,
            comm.size // parts,
            context_parallel_size,
            tensor_model_parallel_size,
        ],
    )
    grid = PipelineParallelGrid(topology, group)
    grid.before = groups.get_current_grid()
    groups.use(grid)
    return grid
