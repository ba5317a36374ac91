"""explain: the algorithm that a call would use, and the reason."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll import schedules
from mpicoll.buffers.device import device_of
from mpicoll.buffers.ops import OpLike
from mpicoll.buffers.recognise import recognise
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import make_selection_query
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.threads import count_threads
from mpicoll.engine.learning import explain_learning
from mpicoll.engine.selection.catalogue import IPC, NCCL, SharedMemoryAlgorithm
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import Choice, choose, is_decided, unsupported_reasons
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import AlgorithmError

_LARGE = 256 * 1024
"""Bytes from which on several threads may work on an array, as in ``csrc/workers.h``."""

_MESSAGES = ("send", "recv", "isend", "irecv", "sendrecv")

_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")


def explain(
    collective: str,
    nbytes: int,
    *,
    op: OpLike = "sum",
    dtype: Any = "float32",
    root: int = 0,
    algorithm: str | None = None,
    like: Any = None,
    comm: CommLike = None,
) -> Choice:
    """Return the algorithm that a call of `collective` would use, the reason, and why other algorithms can't be used.

    Printing the result shows all of this. Sends nothing.

    Args:
        collective: the name of the collective, such as ``"allreduce"``, or of a message, such as ``"send"``.
        nbytes: bytes of the vector, or of all blocks together for gather, scatter, allgather, reduce_scatter and
            alltoall.
        op: the reduction, for collectives that reduce.
        dtype: numpy's dtype of the array, for collectives that reduce.
        root: the root of the call; of a message, the other rank.
        algorithm: the `algorithm` argument of the call.
        like: an array on the device of the data, whose contents don't matter; None is the host. The capabilities of the
            ranks on the device are known after their first collective on it, and assumed until then.
        comm: the communicator; None is :func:`mpicoll.world`.

    Raises:
        AlgorithmError: `collective` is unknown or no algorithm supports the call.
        ArgumentError: `nbytes` is no number from 0 on.
        DTypeError: `op` is not defined for `dtype`.

    Example:
        >>> choice = mpicoll.explain("allreduce", 1024, algorithm="ring")
        >>> print(choice)
        ring: forced by the argument
    """
    communicator = resolve(comm)
    nbytes = arguments.check_nbytes("explain", nbytes)
    if collective in _MESSAGES:
        return _explain_message(communicator, collective, nbytes, root, like)
    query = make_call_query(collective, nbytes, op, dtype, root, algorithm, communicator, like)
    choice = choose(query, algorithm)
    if algorithm is None and like is None and not is_decided(query):
        choice = explain_learning(communicator, query) or choice
    reads = choice.algorithm in (SharedMemoryAlgorithm("cma"), SharedMemoryAlgorithm("shm_or_cma"))
    if reads and communicator.cma_failed_reason is not None:
        refusal = f"the data takes the path of shm_pipelined, because {communicator.cma_failed_reason}"
        choice = choice._replace(reason=f"{choice.reason}; {refusal}")
    if isinstance(choice.algorithm, SharedMemoryAlgorithm) and nbytes >= _LARGE and like is None:
        threads = count_threads(communicator.transport)
        if threads > 1:
            choice = choice._replace(reason=f"{choice.reason}; in up to {threads} threads of this rank")
    tried = communicator.devices is not None and query.device is not None and query.device.models is not None
    if choice.name in (IPC, NCCL) and tried:
        assert communicator.devices is not None
        order = communicator.devices.describe_order(has_kernel=query.has_kernel, native=choice.name == NCCL)
        choice = choice._replace(reason=f"{choice.reason}; {order}")
    if communicator.size == 1:
        return choice  # with one rank the other algorithms are irrelevant
    refused = (f"not {name}: {why}" for name, why in unsupported_reasons(query).items() if why is not None)
    return choice._replace(refused=tuple(refused))


def _explain_message(communicator: CommunicatorCore, name: str, nbytes: int, other: int, like: Any) -> Choice:
    """Return the way of a message between this rank and the rank `other`."""
    other = arguments.check_rank("explain", "root", other, communicator)
    device = None if like is None else device_of(recognise("explain", like, "like").array)
    if device is None:
        return Choice("host", None, 1, f"{name} of memory of the host")
    # Not at module level: only data on a device needs the methods for it.
    from mpicoll.engine.executors import peer_messages, staging

    if staging.sends_device_memory(communicator.checks.calls):
        return Choice("direct", None, 1, "the MPI library sends memory of devices")
    sender = peer_messages.find_sender(communicator, device, other)
    if nbytes < staging.MIN_ANNOUNCED_BYTES:
        reason = f"it has fewer than {staging.MIN_ANNOUNCED_BYTES} bytes"
    elif sender is not None:
        least = sender.get_min_bytes(communicator.members[other])
        if nbytes < least:
            return Choice("staged", None, 1, f"both ranks use one device, and it has fewer than {least} bytes")
        return Choice("ipc", None, 1, "the receiver copies it from memory of the sender, if there is enough for it")
    elif other == communicator.rank:
        reason = "the other rank is on this rank itself"
    elif communicator.devices is None:
        reason = "the ranks have not tried yet to open each other's memory: their first collective on the device does"
    else:
        reason = communicator.devices.describe_messages()
    return Choice("staged", None, 1, reason)


def make_call_query(
    collective: str,
    nbytes: int,
    op: OpLike,
    dtype: Any,
    root: int,
    algorithm: str | None,
    communicator: CommunicatorCore,
    like: Any = None,
) -> SelectionQuery:
    """Return the selection query of such a call. Raises the errors of :func:`explain`."""
    if collective not in schedules.collectives():
        raise AlgorithmError(f"explain: no collective {collective!r}; there are {', '.join(schedules.collectives())}")
    root = arguments.check_rank("explain", "root", root, communicator)
    if collective in ("scan", "exscan"):
        arguments.reject_average(collective, op)
    value = np.empty(1, dtype)
    sample = (value, np.zeros(1, int)) if op in ("minloc", "maxloc") else value
    buffer, reduction = (
        arguments.recognise_operand(collective, sample, op) if collective in _REDUCTIONS else (None, None)
    )
    return make_selection_query(
        collective,
        communicator,
        algorithm,
        nbytes=nbytes,
        count=nbytes if buffer is None else nbytes // buffer.array.itemsize,
        array=None if like is None else recognise("explain", like, "like").array,
        root=root,
        reduction=reduction,
    )
