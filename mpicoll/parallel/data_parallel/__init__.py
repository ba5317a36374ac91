"""Data parallel training without process groups, with Horovod's names.

:mod:`~mpicoll.parallel.data_parallel.optimizer`, :mod:`~mpicoll.parallel.data_parallel.reducer`
    an optimizer whose gradients are reduced during the backward pass
:mod:`~mpicoll.parallel.data_parallel.buckets`, :mod:`~mpicoll.parallel.data_parallel.exchange`
    gradients that are reduced in one message
:mod:`~mpicoll.parallel.data_parallel.compression`, :mod:`~mpicoll.parallel.data_parallel.power_sgd`
    gradients with fewer bytes
:mod:`~mpicoll.parallel.data_parallel.broadcast`, :mod:`~mpicoll.parallel.data_parallel.metrics`
    the same values on all ranks, and means of metrics
:mod:`~mpicoll.parallel.data_parallel.elastic`
    training that continues after the death of ranks
"""

from mpicoll.collectives.objects import bcast_object as broadcast_object
from mpicoll.parallel.data_parallel import elastic
from mpicoll.parallel.data_parallel.broadcast import broadcast_optimizer_state, broadcast_parameters
from mpicoll.parallel.data_parallel.compression import Compression
from mpicoll.parallel.data_parallel.metrics import metric_average
from mpicoll.parallel.data_parallel.optimizer import DistributedOptimizer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "metric_average",
]
