"""Coordinates of ranks in a grid of named axes, and the groups of ranks along the axes.

:class:`ProcessTopology` is the arithmetic, :class:`PipelineParallelGrid` the groups; both have DeepSpeed's names. This
package knows the axes "pipe" (pipeline stages), "data", "context" (parts of the sequence) and "model" (tensor
parallelism), with the aliases "pp", "dp", "cp" and "tp", which are accepted wherever an axis is named. Other axes may
have any name.
"""

from mpicoll.parallel.topology.grid import PipelineParallelGrid
from mpicoll.parallel.topology.initialize import initialize_model_parallel
from mpicoll.parallel.topology.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "initialize_model_parallel",
]
