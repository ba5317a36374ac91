"""Messages of tensors on a CUDA device between ranks of one node: the receiver copies them from the sender's device."""

from __future__ import annotations

import torch

from mpicoll.buffers.device import device_of
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.streams import record_events
from mpicoll.collectives.bcast import bcast
from mpicoll.collectives.message_buffers import may_be_announced
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.executors.peer_messages import Announced, announce
from mpicoll.torch.tensors import flatten_input
from mpicoll.transport.base import Memory


def connect_devices(comm: Communicator, device: torch.device) -> None:
    """Let ranks of `comm` on one node copy messages from each other's devices, if they can: their first collective on
    `device` tries it. Collective; all ranks pass a CUDA device."""
    devices = core_of(comm).devices
    if comm.size > 1 and (devices is None or not devices.has_exchanged):
        # On a duplicate: a communicator has one device on each rank, which the program's own first collective selects.
        with comm.duplicate() as own:
            bcast(torch.empty(1, device=device), 0, comm=own)


def announce_tensor(core: CommunicatorCore, dest: int, tag: int, tensor: torch.Tensor) -> Memory | None:
    """Return the announcement of a message of `tensor`, in C order, to rank `dest`; None if it passes through the
    host."""
    if tensor.is_cpu or not may_be_announced(core, tensor.nbytes):
        return None
    buffer = recognise("send", flatten_input(tensor))
    on = device_of(buffer.array)
    assert on is not None
    return announce(core, buffer, on, dest, tag)


def copy_announced(message: Announced, target: torch.Tensor) -> None:
    """Copy the message to `target`, which is contiguous. When it returns, all streams see the values."""
    buffer = recognise("recv", target)
    message.copy_to(buffer.array, record_events(buffer))
