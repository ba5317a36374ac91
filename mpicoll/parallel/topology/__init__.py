"""Where a rank is in a grid of named axes, and the groups of ranks along them."""

from mpicoll.parallel.topology.grid import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    initialize_model_parallel,
)

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "initialize_model_parallel",
]
