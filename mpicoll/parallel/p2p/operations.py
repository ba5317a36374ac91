"""Pending operations on the lines between two stages, and the values that they receive."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mpicoll.engine.executors.peer_messages import Announced
from mpicoll.engine.executors.staging import ANNOUNCEMENT_BYTES, MIN_ANNOUNCED_BYTES
from mpicoll.errors import CommunicationError, DeviceError, RankFailed
from mpicoll.parallel.p2p.device_messages import copy_announced
from mpicoll.parallel.p2p.message_format import (
    HostCopy,
    MessageLayout,
    MessagePart,
    PendingMessage,
    Spec,
    TensorSpec,
    ValuePattern,
    allocate_host_buffer,
    as_bytes,
    copy_from_host,
    describe_spec,
    unflatten,
)
from mpicoll.torch.tensors import flatten_output
from mpicoll.transport.base import Memory

if TYPE_CHECKING:
    from mpicoll._shm import LineEnd

_LINE_FORMS = ("", " by a send_forward form", " by a send_backward form")
"""Descriptions of the calls that send on the lines of a channel, by number of the line."""


NO_BYTES = np.empty(0, np.uint8)


class PendingSend:
    """A value being sent. `spec` is its structure; of an object, the number of its bytes."""

    __slots__ = ("acknowledged", "error", "key", "moving", "name", "peer", "reported", "spec", "sync", "value")

    def __init__(self, name: str, peer: Peer, key: int, spec: Spec | int, *, sync: bool) -> None:
        self.name = name
        self.peer = peer
        self.key = key
        self.spec = spec
        self.sync = sync
        self.acknowledged = not sync
        self.moving: list[PendingMessage] = []
        self.value = None
        self.error: Exception | None = None
        self.reported = False

    def has_ended(self) -> bool:
        """Return True if it has completed or failed."""
        if self.error is not None:
            return True
        if not self.acknowledged:
            return False
        try:
            return pop_completed(self.moving)
        except CommunicationError as error:
            self.error = self.peer.explain(self, error)
            return True

    def __str__(self) -> str:
        return f"{self.name} of {_describe_sent(self.spec)} to {self.peer.name}{_format_channel(self.key)}"


class PendingRecv:
    """A receive. `into` is the tensor to fill; `shape` and `dtype` are those expected of the value.

    ``stream`` is torch's current stream of the calling thread, if CUDA is initialized there: tensors are made for it.
    """

    __slots__ = (
        "_ended",
        "arrival",
        "dtype",
        "error",
        "into",
        "key",
        "name",
        "objects",
        "peer",
        "reported",
        "shape",
        "stream",
        "value",
    )

    def __init__(
        self,
        name: str,
        peer: Peer,
        key: int,
        *,
        into: torch.Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        objects: bool = False,
    ) -> None:
        self.name = name
        self.peer = peer
        self.key = key
        self.into = into
        self.shape = shape
        self.dtype = dtype
        self.objects = objects
        self.stream = _get_current_stream(into)
        self.arrival: IncomingValue | None = None
        self.value: Any = None
        self.error: Exception | None = None
        self.reported = False
        self._ended = False

    def has_ended(self) -> bool:
        """Return True if its value is complete, or it has failed."""
        if self._ended or self.error is not None:
            return True
        arrival = self.arrival
        if arrival is None or not arrival.complete:
            return False
        try:
            if not pop_completed(arrival.moving):
                return False
            with self.on_stream():
                self.value = arrival.value(self.into)
        except CommunicationError as error:
            self.error = self.peer.explain(self, error)
        except DeviceError as error:
            self.error = CommunicationError(
                f"{self.peer.this_stage}: {self}: the received value can't be copied to the device: {error}"
            )
            self.error.__cause__ = error
        except Exception as error:  # noqa: BLE001  raised by the wait for this receive
            self.error = CommunicationError(
                f"{self.peer.this_stage}: {self}: the received value can't be unpickled ({type(error).__name__}:"
                f" {error})"
            )
            self.error.__cause__ = error
        if self.error is not None:
            arrival.discard()
        self._ended = True
        self.arrival = None
        return True

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the stream is torch's current one, on any thread."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @property
    def place(self) -> torch.device | None:
        """The CUDA device of the stream, or None."""
        return None if self.stream is None else self.stream.device

    def is_mismatch(self, arrival: IncomingValue) -> bool:
        """Return True if the arriving value does not match the expected one."""
        if self.objects or arrival.layout is None:
            return self.objects != (arrival.layout is None)
        if self.shape is None:
            return False
        spec = arrival.layout.spec
        return not (isinstance(spec, TensorSpec) and spec.shape == self.shape and self.dtype in (None, spec.dtype))

    @property
    def expected(self) -> str:
        """Description of the expected value."""
        if self.objects:
            return "an object, sent by send_obj"
        if self.shape is None:
            return f"tensors, sent{_LINE_FORMS[self.key & 3] or ' by send or isend'}"
        dtype = "a tensor of shape" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.shape}"

    def __str__(self) -> str:
        return f"{self.name} from {self.peer.name}{_format_channel(self.key)}"


PendingOperation: TypeAlias = "PendingSend | PendingRecv"


class IncomingValue:
    """A value being received. `layout` is None for an object. `find_announced` returns the message that received bytes
    announce, or None."""

    __slots__ = (
        "_announcements",
        "_direct",
        "_find_announced",
        "_packed",
        "_restore",
        "_staged",
        "_tensors",
        "complete",
        "layout",
        "moving",
        "receiving",
        "sync",
    )

    def __init__(
        self, layout: MessageLayout | None, *, sync: bool, find_announced: Callable[[Memory], Announced | None]
    ) -> None:
        self.layout = layout
        self._find_announced = find_announced
        # Of the tensors whose messages lie in memory of the sender: their indices, and the announcements.
        self._announcements: dict[int, Memory] = {}
        self.sync = sync
        self.receiving: PendingRecv | None = None
        self.moving: list[PendingMessage] = []
        self.complete = False
        self._direct = False
        self._restore: Callable[[], None] | None = None
        self._tensors: dict[int, torch.Tensor] = {}
        self._staged: list[tuple[Memory, tuple[MessagePart, ...]]] = []
        self._packed: Memory = NO_BYTES

    def receive_into(self, name: str, into: torch.Tensor) -> None:
        """Receive the tensor directly into `into`, which is on the CPU. No message of it has been received yet."""
        if into.is_contiguous() and not into.is_conj() and not into.is_neg():
            self._tensors[0] = into
        else:
            self._tensors[0], self._restore = flatten_output(name, into)
        self._direct = True

    def keep(self, place: int, tensor: torch.Tensor) -> None:
        """Have tensor number `place` of the value be `tensor`, which was made for it and receives a message."""
        self._tensors[place] = tensor

    def next_buffer(self, nbytes: int) -> Memory | None:
        """Return the buffer for the next message, of `nbytes`; None if another size is expected."""
        if self.layout is None:
            self._packed = np.empty(nbytes, np.uint8)
            self.complete = True
            return self._packed
        messages, leaves = self.layout.messages, self.layout.leaves
        expected, parts = messages[len(self.moving)]
        alone = parts[0].index if len(parts) == 1 else None
        announced = nbytes == ANNOUNCEMENT_BYTES and expected >= MIN_ANNOUNCED_BYTES and alone is not None
        if nbytes != expected and not announced:
            return None
        self.complete = len(self.moving) + 1 == len(messages)
        if announced and alone is not None:
            self._announcements[alone] = np.empty(nbytes, np.uint8)
            return self._announcements[alone]
        if alone is not None and (self._direct or leaves[alone].device == "cpu"):
            if alone not in self._tensors:
                self._tensors[alone] = leaves[alone].empty()
            return as_bytes(self._tensors[alone])
        there = any(leaves[part.index].device != "cpu" for part in parts)
        place = self.receiving.place if there and self.receiving is not None else None
        try:
            staged = allocate_host_buffer("recv", nbytes, place)
        except DeviceError:  # the copy raises it when the value is taken
            staged = allocate_host_buffer("recv", nbytes, None)
        self._staged.append((staged, parts))
        return staged

    def discard(self) -> bool:
        """Give memory back to the sender in which messages of this value lie, which no receive takes. Return False,
        before that has been done, while messages of it arrive."""
        if not self.complete:
            return False
        with suppress(CommunicationError):
            if not pop_completed(self.moving):
                return False
            while self._announcements:
                message = self._find_announced(self._announcements.popitem()[1])
                if message is not None:
                    message.drop()
        return True

    def value(self, into: torch.Tensor | None) -> Any:
        """Return the received value; `into`, filled with it, if that is given."""
        if self.layout is None:
            return pickle.loads(self._packed.data)
        if into is not None:
            self._store(into)
            return into
        leaves = self.layout.leaves
        self._unpack()
        tensors = [self._tensors[index] for index in range(len(leaves))]
        for leaf, tensor in zip(leaves, tensors, strict=True):
            if leaf.requires_grad:
                tensor.requires_grad_()
        return unflatten(self.layout.spec, iter(tensors))

    def _unpack(self) -> None:
        """Make the tensors that were received in shared or staged messages."""
        assert self.layout is not None
        leaves = self.layout.leaves
        if any(leaf.device != "cpu" for leaf in leaves) and not torch.cuda.is_available():
            raise CommunicationError(
                "the received value was on a CUDA device, but CUDA is not available in this process; send it from the"
                " CPU (.cpu()), or receive into a tensor"
            )
        places: list[HostCopy] = []
        for staged, parts in self._staged:
            for number, start, stop in parts:
                self._tensors[number] = leaves[number].empty()
                places.append((self._tensors[number], staged[start:stop]))
        for number in list(self._announcements):
            self._tensors[number] = leaves[number].empty()
            self._copy_announced(number, self._tensors[number])
        copy_from_host(places)

    def _copy_announced(self, number: int, target: torch.Tensor) -> None:
        """Copy tensor `number` from memory of the sender to `target`, which is contiguous."""
        message = self._find_announced(self._announcements.pop(number))
        if message is None:
            raise CommunicationError("a message of an unexpected size was received in place of a tensor")
        copy_announced(message, target)

    def _store(self, into: torch.Tensor) -> None:
        if self._announcements:
            if not self._direct:
                self._tensors[0], self._restore = flatten_output("recv", into)
            self._copy_announced(0, self._tensors[0])
        elif not self._direct:
            flat, self._restore = flatten_output("recv", into)
            copy_from_host([(flat, self._staged[0][0] if self._staged else as_bytes(self._tensors[0]))])
        if self._restore is not None:
            self._restore()
        elif not into.is_inference():
            # Autograd must notice that it was written to.
            torch.autograd.graph.increment_version(into)


def _get_current_stream(into: torch.Tensor | None) -> Any:
    if into is not None and into.is_cuda:
        return torch.cuda.current_stream(into.device)
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


class RepeatedMessages(NamedTuple):
    """The means to pass values like the previous one of a line in the extension: their `pattern`, for each message the
    end of the line, and the number of the tensor that the message is."""

    pattern: ValuePattern
    ends: tuple[LineEnd, ...]
    places: tuple[int, ...]


class Outbox:
    """The sending end of a line on this stage. `repeated` is None if the extension can't pass values like the previous
    one."""

    __slots__ = ("layout", "number", "repeated", "unacknowledged")

    def __init__(self) -> None:
        self.repeated: RepeatedMessages | None = None
        self.layout: MessageLayout | None = None
        self.number = 0
        self.unacknowledged: deque[PendingSend] = deque()


class Inbox:
    """The receiving end of a line on this stage: receives without a value, or values without a receive. `repeated` is
    as in :class:`Outbox`."""

    __slots__ = ("arrived", "arriving", "broken", "layout", "number", "repeated", "waiting")

    def __init__(self) -> None:
        self.repeated: RepeatedMessages | None = None
        self.layout: MessageLayout | None = None
        self.number = 0
        self.waiting: deque[PendingRecv] = deque()
        self.arrived: deque[IncomingValue] = deque()
        self.arriving: IncomingValue | None = None
        self.broken: str | None = None


class Peer:
    """Another stage.

    `num_needed` counts the messages needed from it: messages are received only while it is positive.
    """

    def __init__(self, stage: int, name: str, this_stage: str) -> None:
        self.stage = stage
        self.name = name
        self.this_stage = this_stage
        self.num_needed = 0
        self.closed = False
        self.failure: CommunicationError | None = None
        self.reading: tuple[PendingMessage, Memory, Callable[[Memory], None]] | None = None
        self.inboxes: dict[int, Inbox] = {}
        self.outboxes: dict[int, Outbox] = {}

    def get_inbox(self, key: int) -> Inbox:
        found = self.inboxes.get(key)
        if found is None:
            found = self.inboxes[key] = Inbox()
        return found

    def get_outbox(self, key: int) -> Outbox:
        found = self.outboxes.get(key)
        if found is None:
            found = self.outboxes[key] = Outbox()
        return found

    def explain(self, operation: PendingOperation, error: CommunicationError) -> CommunicationError:
        """Return an error of the type of `error` that names `operation`."""
        return wrap_error(f"{self.this_stage}: {operation}: {error}", error)

    def describe_unreceived(self) -> Iterator[str]:
        """Yield descriptions of values that arrived and were not received."""
        for key, inbox in self.inboxes.items():
            for one in inbox.arrived:
                what = "an object" if one.layout is None else describe_spec(one.layout.spec)
                yield f"{what}{_LINE_FORMS[key & 3]}{_format_channel(key)}"


def pop_completed(moving: list[PendingMessage]) -> bool:
    """Remove completed messages from the end of the list, and return True if it is empty."""
    while moving:
        if not moving[-1].test():
            return False
        moving.pop()
    return True


def wrap_error(text: str, error: CommunicationError) -> CommunicationError:
    """Return an error of the type of `error` with the message `text`, and `error` as its cause."""
    other = RankFailed(text, error.ranks) if isinstance(error, RankFailed) else type(error)(text)
    other.__cause__ = error
    return other


def _describe_sent(spec: Spec | int) -> str:
    return f"an object of {spec} bytes" if isinstance(spec, int) else describe_spec(spec)


def _format_channel(key: int) -> str:
    return f", channel {key >> 2}" if key >> 2 else ""
