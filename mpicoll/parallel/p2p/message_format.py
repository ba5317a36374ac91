"""Format of values as messages between pipeline stages, and two transports of these messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, device_of
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.torch import as_array, cuda_device
from mpicoll.collectives.bcast import ibcast
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.request import Request
from mpicoll.engine.executors.peer_messages import Announced, find_announced
from mpicoll.errors import CommunicatorError, DTypeError, Timeout
from mpicoll.parallel.p2p.device_messages import announce_tensor
from mpicoll.torch.tensors import check_plain, flatten_input, view_flat
from mpicoll.transport.base import Envelope, Memory

if TYPE_CHECKING:
    from mpicoll._shm import LineEnd

_MAX_SHARED_BYTES = 1 << 14
"""Bytes up to which the tensors of one value share a message: copying them is cheaper than a message each."""

_MAX_MESSAGES = 8
"""Number of tensors on the CPU up to which none share a message: the extension passes messages of single tensors only,
each of which costs some microseconds, while a message from Python costs about a hundred."""

_ALIGNMENT = 64
"""Alignment in bytes of the tensors of a shared message."""


class TensorSpec(NamedTuple):
    """Properties of a tensor that a receiver needs.

    `device` is a device type, ``cpu`` or ``cuda``: each rank uses its own device of that type.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    device: str = "cpu"

    def __str__(self) -> str:
        place = "" if self.device == "cpu" else f" on {self.device}"
        grad = " that requires grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}{place}{grad}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor with these properties, on this process's current device of the type."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Container(NamedTuple):
    """A tuple, list, dict or namedtuple. `meta` is the pickled keys of a dict, the pickled class of a namedtuple."""

    kind: str
    meta: bytes
    children: tuple[Any, ...]


Spec: TypeAlias = "TensorSpec | Container | bytes | None"
"""The structure of a value. ``bytes`` are a pickled plain value. Values of equal specs differ in elements only."""


def flatten(operation: str, value: Any, tensors: list[torch.Tensor]) -> Spec:
    """Return the structure of `value`, and append its tensors to `tensors`.

    Raises:
        DTypeError: a tensor is not dense, or an object can't be pickled.
        DeviceError: a tensor is neither on the CPU nor on a CUDA device.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        check_plain(operation, value)
        wrapper: bool = is_traceable_wrapper_subclass(value)
        if wrapper:
            raise DTypeError(f"{operation}: pass plain tensors, got a {kind.__name__}; call to_local()")
        tensors.append(value)
        return TensorSpec(value.dtype, tuple(value.shape), value.requires_grad, value.device.type)
    if value is None:
        return None
    if kind is tuple or kind is list:
        return Container(kind.__name__, b"", tuple(flatten(operation, one, tensors) for one in value))
    if kind is dict:
        children = tuple(flatten(operation, one, tensors) for one in value.values())
        return Container("dict", _pickle(operation, tuple(value)), children)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        children = tuple(flatten(operation, one, tensors) for one in value)
        return Container("namedtuple", _pickle(operation, kind), children)
    return _pickle(operation, value)


def unflatten(spec: Spec, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the value of structure `spec` that holds `tensors`."""
    if isinstance(spec, TensorSpec):
        return next(tensors)
    if spec is None:
        return None
    if isinstance(spec, bytes):
        return pickle.loads(spec)
    children = [unflatten(one, tensors) for one in spec.children]
    if spec.kind == "list":
        return children
    if spec.kind == "dict":
        return dict(zip(pickle.loads(spec.meta), children, strict=True))
    if spec.kind == "namedtuple":
        return pickle.loads(spec.meta)(*children)
    return tuple(children)


class _Group(NamedTuple):
    """A tuple or a list of patterns."""

    kind: type
    children: tuple[Any, ...]


class _Plain(NamedTuple):
    """An int, a string, a bool or None."""

    value: Any


_TENSOR = torch.Tensor


class ValuePattern:
    """Values of one spec, made of tuples, lists, tensors, and plain values, which are the same in all of them. Raises
    ValueError for another spec."""

    def __init__(self, spec: Spec) -> None:
        self._root = _make_pattern(spec)

    def find_tensors(self, value: Any) -> list[torch.Tensor] | None:
        """Return the tensors in `value`, of any shape; None if it has another structure."""
        tensors: list[torch.Tensor] = []
        return tensors if _find_tensors(self._root, value, tensors) else None

    def make_value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value that holds `tensors`."""
        return _make_value(self._root, iter(tensors))


def _make_pattern(spec: Spec) -> Any:
    if isinstance(spec, TensorSpec):
        return _TENSOR
    if spec is None:
        return _Plain(None)
    if isinstance(spec, bytes):
        plain = pickle.loads(spec)
        if type(plain) not in (int, str, bool):
            raise ValueError(
                f"a {type(plain).__name__} may be changed, or equal a value that is pickled in another way"
            )
        return _Plain(plain)
    if spec.kind not in ("tuple", "list"):
        raise ValueError(f"a {spec.kind} has more than its values")
    return _Group(tuple if spec.kind == "tuple" else list, tuple(map(_make_pattern, spec.children)))


def _find_tensors(pattern: Any, value: Any, tensors: list[torch.Tensor]) -> bool:
    kind = value.__class__
    if pattern is _TENSOR:
        if kind is not _TENSOR:
            return False
        tensors.append(value)
        return True
    if pattern.__class__ is _Plain:
        own = pattern.value
        return value is own or (kind is own.__class__ and bool(value == own))
    children = pattern.children
    if kind is not pattern.kind or len(value) != len(children):
        return False
    for child, one in zip(children, value, strict=True):  # noqa: SIM110  a generator takes twice as long
        if not _find_tensors(child, one, tensors):
            return False
    return True


def _make_value(pattern: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if pattern is _TENSOR:
        return next(tensors)
    if pattern.__class__ is _Plain:
        return pattern.value
    return pattern.kind([_make_value(child, tensors) for child in pattern.children])


def describe_spec(spec: Spec) -> str:
    """Describe `spec` for an error message."""
    if isinstance(spec, TensorSpec):
        return str(spec)
    if spec is None:
        return "None"
    try:
        return _describe_container_spec(spec)
    except Exception:  # noqa: BLE001  an error message must not be lost because a value can't be shown
        return "a value that can't be unpickled or shown"


def _describe_container_spec(spec: Container | bytes) -> str:
    if isinstance(spec, bytes):
        text = repr(pickle.loads(spec))
        return text if len(text) <= 40 else f"{text[:37]}..."
    children = [describe_spec(one) for one in spec.children]
    if spec.kind == "dict":
        return f"{{{', '.join(f'{key!r}: {one}' for key, one in zip(pickle.loads(spec.meta), children, strict=True))}}}"
    if spec.kind == "namedtuple":
        return f"{pickle.loads(spec.meta).__name__}({', '.join(children)})"
    whole = ", ".join(children)
    return f"[{whole}]" if spec.kind == "list" else f"({whole})"


def pickle_message(operation: str, value: Any) -> Memory:
    """Return `value`, pickled, as a message. Raise DTypeError if it can't be pickled."""
    return np.frombuffer(_pickle(operation, value), np.uint8)


def _pickle(operation: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DTypeError(
            f"{operation}: a {type(value).__name__} can't be pickled, so it can't be sent: {error}"
        ) from error


def as_bytes(tensor: torch.Tensor) -> Memory:
    """Return the bytes of `tensor`, which is on the CPU, in C order: its own memory where possible."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    own = tensor.detach() if plain else flatten_input(tensor)
    return as_array(view_flat(own).view(torch.uint8))


HostCopy: TypeAlias = tuple[torch.Tensor, Memory]
"""A tensor, and the host memory of its bytes."""


def copy_to_host(places: Sequence[HostCopy]) -> None:
    """Copy tensors, in C order, to host memory. Waits for pending work of the current streams on them."""
    _copy("send", [(flatten_input(one), place) for one, place in places], down=True)


def copy_from_host(places: Sequence[HostCopy]) -> None:
    """Copy host memory to contiguous tensors. When it returns, all streams see their values."""
    _copy("recv", places, down=False)


def _copy(operation: str, places: Sequence[HostCopy], *, down: bool) -> None:
    by_device: dict[Device, list[tuple[Buffer, Memory]]] = {}
    for tensor, place in places:
        if tensor.is_cpu:
            own = as_bytes(tensor)
            np.copyto(*((place, own) if down else (own, place)))
        elif tensor.numel():
            buffer = recognise(operation, tensor)
            on = device_of(buffer.array)
            assert on is not None
            by_device.setdefault(on, []).append((buffer, place))
    for on, several in by_device.items():
        last = several[-1][0]
        # The event of the last buffer follows all earlier work of the stream on any of them.
        with on.working([last.library.record_event(last)]):
            for buffer, place in several:
                there = buffer.array.reshape(-1).view(np.uint8)
                np.copyto(*((place, there) if down else (there, place)))


def allocate_host_buffer(operation: str, nbytes: int, place: torch.device | None) -> Memory:
    """Return host memory for copies to and from the device `place`. Raise DeviceError if that device can't be used."""
    if place is None or place.type == "cpu":
        return np.empty(nbytes, np.uint8)
    return cuda_device(operation, place, "a tensor").allocate_pinned(nbytes)


class MessagePart(NamedTuple):
    """The position of tensor number `index` in a message."""

    index: int
    start: int
    stop: int


class MessageLayout:
    """The messages of the tensors of a spec: large tensors alone, small ones together unless they are few and on the
    CPU. At least one message.

    ``messages`` holds for each its size in bytes and its parts; a message of a single part is the memory of that
    tensor. All messages are in host memory: tensors on a device are copied, all of a value at once, unless their
    messages are announced.
    """

    __slots__ = ("leaves", "messages", "spec")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.leaves: list[TensorSpec] = list(_iterate_leaves(spec))
        small = [index for index, leaf in enumerate(self.leaves) if leaf.nbytes <= _MAX_SHARED_BYTES]
        if len(small) <= _MAX_MESSAGES and all(self.leaves[index].device == "cpu" for index in small):
            small = []
        together: list[MessagePart] = []
        end = 0
        for index in small:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + self.leaves[index].nbytes
            together.append(MessagePart(index, start, end))
        alone = sorted({*range(len(self.leaves))}.difference(small))
        self.messages: list[tuple[int, tuple[MessagePart, ...]]] = []
        self.messages += [
            (self.leaves[index].nbytes, (MessagePart(index, 0, self.leaves[index].nbytes),)) for index in alone
        ]
        if together or not alone:
            self.messages.append((end, tuple(together)))

    def pack(self, tensors: Sequence[torch.Tensor], announce: Callable[[torch.Tensor], Memory | None]) -> list[Memory]:
        """Return the messages of `tensors`. `announce` returns what is sent in place of a large tensor on a device, or
        None if its bytes are sent."""
        messages = []
        copied: list[HostCopy] = []
        for nbytes, parts in self.messages:
            several = [tensors[part.index] for part in parts]
            if len(several) == 1 and several[0].is_cpu:
                messages.append(as_bytes(several[0]))
            elif len(several) == 1 and (announcement := announce(several[0])) is not None:
                messages.append(announcement)
            else:
                packed = allocate_host_buffer(
                    "send", nbytes, next((one.device for one in several if one.is_cuda), None)
                )
                copied += [(one, packed[start:stop]) for one, (_, start, stop) in zip(several, parts, strict=True)]
                messages.append(packed)
        copy_to_host(copied)
        return messages


def _iterate_leaves(spec: Spec) -> Iterator[TensorSpec]:
    if isinstance(spec, TensorSpec):
        yield spec
    elif isinstance(spec, Container):
        for one in spec.children:
            yield from _iterate_leaves(one)


class PendingMessage(Protocol):
    """A message being sent or received."""

    def test(self) -> Any:
        """Return a true value once it has arrived, or its memory may be changed. Raise the error of the transfer."""


class MessageTransport(Protocol):
    """Transport of messages of bytes between stages.

    Messages from one stage to another arrive in the order in which they were sent, whatever their tags. `peers` are the
    reachable stages; `comm` is the communicator of the messages, or None.
    """

    peers: list[int]
    comm: Communicator | None

    def isend(self, data: Memory, dest: int, tag: int) -> PendingMessage: ...
    def irecv(self, data: Memory, source: int, tag: int) -> PendingMessage:
        """Receive the message that :meth:`iprobe` has found."""

    def iprobe(self, source: int, tag: None) -> Envelope | None:
        """Return the envelope of the first message from `source` that was not received yet, or None."""

    def announce(self, tensor: torch.Tensor, dest: int) -> Memory | None:
        """Return what is sent in place of a tensor on a device, for a receiver that copies it from there; None if its
        bytes are to be sent."""

    def find_announced(self, data: Memory) -> Announced | None:
        """Return the message that is announced by the received bytes `data`; None if they are the message."""

    def bind_end(
        self, peer: int, spec: TensorSpec, sync_tags: tuple[int, ...], plain_tags: tuple[int, ...], acknowledgement: int
    ) -> LineEnd | None:
        """Return the end of a line to and from `peer`, for tensors of `spec`; None if only Python can pass them.

        `sync_tags` are the tags of values that are acknowledged by a message of the tag `acknowledgement`, `plain_tags`
        those of others, by sequence number. An `acknowledgement` of -1 states that `spec` is not the first message of
        its value.
        """

    def check(self, peer: int) -> None:
        """Raise RankFailed if the process of `peer` has exited."""

    def free(self) -> None: ...


class SendRecvTransport:
    """Point-to-point messages on a private duplicate of the communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.duplicate()
        transport = core_of(self.comm).transport
        self.peers = [peer for peer in range(comm.size) if peer != comm.rank]
        self.isend = transport.isend
        self.irecv = transport.irecv
        self.iprobe = transport.iprobe
        self._probe = transport.probe
        self._bind_end = transport.bind_line_end

    def announce(self, tensor: torch.Tensor, dest: int) -> Memory | None:
        # The tag is needed by probe alone, which is not called for these messages.
        return announce_tensor(core_of(self.comm), dest, 0, tensor)

    def find_announced(self, data: Memory) -> Announced | None:
        return find_announced(core_of(self.comm).registry, data)

    def bind_end(self, peer: int, spec: TensorSpec, *tags: Any) -> LineEnd | None:
        return self._bind_end(peer, spec.empty(), spec.nbytes, *tags)

    def check(self, peer: int) -> None:
        with suppress(Timeout):
            self._probe(peer, None, 0.0)

    def free(self) -> None:
        self.comm.free()


class BroadcastTransport:
    """Broadcasts on communicators of two ranks, one for each direction between adjacent stages.

    Each message is two broadcasts: its tag and size, then its bytes. The first is joined when a message of the other
    stage is needed, and waits in the background. Messages are counted as those of the communicator of all stages.
    """

    comm = None

    def __init__(self, comm: Communicator) -> None:
        transport = core_of(comm).transport
        if not transport.background:
            raise CommunicatorError(
                "init_process_groups: send_recv=False needs MPI_THREAD_MULTIPLE, which this MPI library does not"
                " provide, since broadcasts wait in the background; use send_recv=True"
            )
        self._traffic = transport.traffic
        self._out: dict[int, Communicator] = {}
        self._in: dict[int, Communicator] = {}
        self._next: dict[int, tuple[Memory, Request]] = {}
        self._pairs: list[Communicator] = []
        # All stages make the pairs in one order: in different orders they could wait for each other in a ring.
        for first in range(comm.size if comm.size > 2 else comm.size - 1):
            second = (first + 1) % comm.size
            for source, dest in ((first, second), (second, first)):
                pair = comm.group([source, dest])
                if pair is not None:
                    self._pairs.append(pair)
                    (self._out if pair.rank == 0 else self._in)[dest if pair.rank == 0 else source] = pair
        self.peers = sorted(self._out)

    def isend(self, data: Memory, dest: int, tag: int) -> PendingMessage:
        if self._traffic is not None:
            next(self._traffic.sends[dest, tag])
        comm = self._out[dest]
        head = np.array([tag, data.size])
        requests = [ibcast(head, 0, out=head, comm=comm)]
        if data.size:
            requests.append(ibcast(data, 0, out=data if data.flags.writeable else None, comm=comm))
        return _PendingBroadcast(requests)

    def irecv(self, data: Memory, source: int, tag: int) -> PendingMessage:
        del self._next[source]
        requests = [ibcast(data, 0, out=data, comm=self._in[source])] if data.size else []
        return _PendingBroadcast(requests, None if self._traffic is None else self._traffic.receives[source, tag])

    def iprobe(self, source: int, tag: None) -> Envelope | None:
        if source not in self._next:
            head = np.empty(2, np.int64)
            self._next[source] = head, ibcast(head, 0, out=head, comm=self._in[source])
        head, request = self._next[source]
        if not request.test():
            return None
        request.wait()
        return Envelope(source, int(head[0]), int(head[1]))

    def announce(self, tensor: torch.Tensor, dest: int) -> None:
        """Return None: broadcasts have a path of their own on devices."""

    def find_announced(self, data: Memory) -> None:
        """Return None: nothing is announced."""

    def bind_end(self, *args: Any) -> None:
        """Return None: values are broadcast in Python."""

    def check(self, peer: int) -> None:
        """Do nothing: a broadcast itself fails if its other rank has exited."""

    def free(self) -> None:
        for pair in self._pairs:
            pair.free()


class _PendingBroadcast:
    """A message being sent or received; `arrivals` counts it when it has arrived."""

    def __init__(self, requests: list[Request], arrivals: Iterator[int] | None = None) -> None:
        self._requests = requests
        self._arrivals = arrivals

    def test(self) -> bool:
        for one in self._requests:
            if not one.test():
                return False
            one.wait()
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            next(arrivals)
        return True
