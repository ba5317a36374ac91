"""Model parallelism with the names of Megatron-LM and DeepSpeed: models that are divided among ranks.

:mod:`~mpicoll.parallel.topology`
    ranks in a grid of pipeline x data x context x tensor parallel groups
:mod:`~mpicoll.parallel.mappings`
    autograd functions between replicated tensors, shards and partial sums
:mod:`~mpicoll.parallel.layers`, :mod:`~mpicoll.parallel.cross_entropy`, :mod:`~mpicoll.parallel.random`
    tensor and sequence parallel layers, the loss of a sharded vocabulary, and dropout
:mod:`~mpicoll.parallel.p2p`
    messages between pipeline stages
:mod:`~mpicoll.parallel.pipeline`
    pipeline schedules as data, and the engine that runs them
:mod:`~mpicoll.parallel.context_parallel`
    attention over a sharded sequence
:mod:`~mpicoll.parallel.parameter_server`
    models whose weights and optimizer are on server ranks, which also works without torch
:mod:`~mpicoll.parallel.gradients`, :mod:`~mpicoll.parallel.checkpoint`
    averaging and clipping; saving at one layout and loading at another
:mod:`~mpicoll.parallel.data_parallel`
    data parallel training without process groups, with Horovod's names

There are no global groups: functions that need ranks take ``group=``. The default is the axis of the grid that
:func:`use` (or :func:`initialize_model_parallel`) has put in use, and without a grid all ranks.

Gradients follow Megatron's convention: all ranks of a tensor parallel group compute the same loss, which counts once.

Example:
    ::

        with initialize_model_parallel(tensor_model_parallel_size=1) as grid:
            layer = ColumnParallelLinear(8, 24)  # on the axis "model" of the grid
            print(grid.get_data_parallel_world_size(), layer(torch.ones(2, 8)).shape)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll.parallel import checkpoint, p2p, parameter_server, pipeline
    from mpicoll.parallel.context_parallel import (
        gather_sequence,
        position_ids,
        ring_attention,
        split_sequence,
        ulysses_attention,
    )
    from mpicoll.parallel.cross_entropy import vocab_parallel_cross_entropy
    from mpicoll.parallel.data_parallel import (
        Compression,
        DistributedOptimizer,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        elastic,
        metric_average,
    )
    from mpicoll.parallel.gradients import average_gradients, clip_grad_norm_
    from mpicoll.parallel.groups import use
    from mpicoll.parallel.layers import (
        ColumnParallelLinear,
        LayerNorm,
        RMSNorm,
        RowParallelLinear,
        VocabParallelEmbedding,
        column_parallel_linear,
        shard_,
        whole_state_dict,
    )
    from mpicoll.parallel.mappings import (
        all_gather_last_dim_from_tensor_parallel_region,
        all_to_all,
        all_to_all_hp2sp,
        all_to_all_sp2hp,
        copy_to_tensor_model_parallel_region,
        gather,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_last_dim_to_tensor_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
        split,
    )
    from mpicoll.parallel.p2p import PipeP2P
    from mpicoll.parallel.pipeline import PipelineEngine
    from mpicoll.parallel.random import (
        ParallelDropout,
        RNGStatesTracker,
        get_rng_tracker,
        model_parallel_manual_seed,
    )
    from mpicoll.parallel.topology import (
        PipeDataParallelTopology,
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
        ProcessTopology,
        initialize_model_parallel,
    )

__all__ = [
    "ColumnParallelLinear",
    "Compression",
    "DistributedOptimizer",
    "LayerNorm",
    "ParallelDropout",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipeP2P",
    "PipelineEngine",
    "PipelineParallelGrid",
    "ProcessTopology",
    "RMSNorm",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "average_gradients",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "clip_grad_norm_",
    "column_parallel_linear",
    "copy_to_tensor_model_parallel_region",
    "elastic",
    "gather",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_sequence",
    "get_rng_tracker",
    "initialize_model_parallel",
    "metric_average",
    "model_parallel_manual_seed",
    "p2p",
    "parameter_server",
    "pipeline",
    "position_ids",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "ring_attention",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "shard_",
    "split",
    "split_sequence",
    "ulysses_attention",
    "use",
    "vocab_parallel_cross_entropy",
    "whole_state_dict",
]


_MODULES = {
    "context_parallel": (
        "gather_sequence",
        "position_ids",
        "ring_attention",
        "split_sequence",
        "ulysses_attention",
    ),
    "cross_entropy": ("vocab_parallel_cross_entropy",),
    "data_parallel": (
        "Compression",
        "DistributedOptimizer",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "elastic",
        "metric_average",
    ),
    "gradients": (
        "average_gradients",
        "clip_grad_norm_",
    ),
    "groups": ("use",),
    "layers": (
        "ColumnParallelLinear",
        "LayerNorm",
        "RMSNorm",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "column_parallel_linear",
        "shard_",
        "whole_state_dict",
    ),
    "mappings": (
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
    ),
    "p2p": ("PipeP2P",),
    "pipeline": ("PipelineEngine",),
    "random": (
        "ParallelDropout",
        "RNGStatesTracker",
        "get_rng_tracker",
        "model_parallel_manual_seed",
    ),
    "topology": (
        "PipeDataParallelTopology",
        "PipelineParallelGrid",
        "PipeModelDataParallelTopology",
        "ProcessTopology",
        "initialize_model_parallel",
    ),
}
"""The names that each module defines."""

_SUBMODULES = (*_MODULES, "checkpoint", "parameter_server", "shards")

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Most of them import torch, which the parameter server does without; torch's checkpoints take more than a second to
    # import, and most programs keep none by them.
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
