"""The public names, pinned: a change here is a change for every user."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from support.ranks import Ranks
from torch import nn
from torch.nn import functional

from mpicoll import parallel

NAMES = re.findall(
    r"\w+",
    """
    ColumnParallelLinear Compression DistributedOptimizer LayerNorm ParallelDropout PipeDataParallelTopology
    PipeModelDataParallelTopology PipeP2P PipelineEngine PipelineParallelGrid ProcessTopology RMSNorm RNGStatesTracker
    RowParallelLinear VocabParallelEmbedding all_gather_last_dim_from_tensor_parallel_region all_to_all all_to_all_hp2sp
    all_to_all_sp2hp average_gradients broadcast_object broadcast_optimizer_state broadcast_parameters checkpoint
    clip_grad_norm_ column_parallel_linear copy_to_tensor_model_parallel_region elastic gather
    gather_from_sequence_parallel_region gather_from_tensor_model_parallel_region gather_sequence get_rng_tracker
    initialize_model_parallel metric_average model_parallel_manual_seed p2p parameter_server pipeline position_ids
    reduce_from_tensor_model_parallel_region reduce_scatter_last_dim_to_tensor_parallel_region
    reduce_scatter_to_sequence_parallel_region ring_attention scatter_to_sequence_parallel_region
    scatter_to_tensor_model_parallel_region shard_ split split_sequence ulysses_attention use
    vocab_parallel_cross_entropy whole_state_dict
    """,
)

PIPELINE = re.findall(r"\w+", "Action PipelineEngine Timeline actions draw peak_activations register timeline verify")

P2P = ["can_send_recv", "init_process_groups", "irecv", "isend", "recv", "recv_obj", "send", "send_obj", "wait"]

ELASTIC = ["TorchState", "run"]

CHECKPOINT = ["load", "model_state", "optimizer_state", "save"]


def test_names() -> None:
    assert sorted(parallel.__all__) == sorted(NAMES)
    assert sorted(parallel.pipeline.__all__) == sorted(PIPELINE)
    assert set(P2P) <= set(dir(parallel.p2p))
    assert set(ELASTIC) <= set(dir(parallel.elastic))
    assert set(CHECKPOINT) <= set(dir(parallel.checkpoint))


def test_modules_are_attributes() -> None:
    """Without an import of each; they come with their first use."""
    for module in pkgutil.iter_modules(parallel.__path__):
        assert parallel.__getattr__(module.name).__name__ == f"mpicoll.parallel.{module.name}"


@pytest.mark.slow
def test_what_takes_long_to_import_comes_with_its_use() -> None:
    """torch's compiler, which its pipelines bring, and its checkpoints."""
    program = (
        "import sys, mpicoll.parallel as parallel\n"
        "assert not {'torch._dynamo', 'torch.distributed.checkpoint'} & set(sys.modules)\n"
        "assert 'checkpoint' in dir(parallel)\n"
        "assert parallel.checkpoint.save\n"
        "try: parallel.chekpoint\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "module 'mpicoll.parallel' has no attribute 'chekpoint'\n", done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_is(name: str) -> None:
    text = inspect.getdoc(getattr(parallel, name))
    assert text
    assert not text.startswith(f"{name}(")  # what a dataclass gets that has no docstring of its own


@pytest.mark.parametrize(
    "name",
    [
        "DistributedOptimizer",
        "PipeP2P",
        "PipelineEngine",
        "PipelineParallelGrid",
        "ProcessTopology",
        "RNGStatesTracker",
    ],
)
def test_methods_say_what_they_do(name: str) -> None:
    for method, value in vars(getattr(parallel, name)).items():
        if not method.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            assert value.__doc__, f"{name}.{method}"


MODULES = ["checkpoint", "elastic", "p2p", "parameter_server", "pipeline"]

NATIVE = ["broadcast_object"]
"""Functions of mpicoll under another name."""


@pytest.mark.parametrize("name", sorted({*NAMES} - {*MODULES, *NATIVE}))
def test_every_name_has_an_example_that_runs(some: Ranks, name: str) -> None:
    text = inspect.getdoc(getattr(parallel, name)) or ""
    code = dedent(text.partition("Example:\n    ::\n")[2])
    assert code.strip()

    names = {name: getattr(parallel, name) for name in parallel.__all__}

    def body() -> None:
        exec(code, {**names, "torch": torch, "nn": nn, "functional": functional})

    some(body)


def test_functions_take_a_group() -> None:
    """What needs ranks can be told which, and nothing that is global decides it."""
    for name in NAMES:
        if re.search("region|sequence|attention|all_to_all|_linear|entropy|Linear$|Embedding$|Norm$|gradients$", name):
            assert "group" in inspect.signature(getattr(parallel, name)).parameters, name
