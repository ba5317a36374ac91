"""Repeated calls on arrays of a device: what was bound for one call serves arrays of the same kind at other addresses.

Nothing here keeps memory of the caller: what is bound works on addresses, and the arrays live as long as a call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.buffers.buffer import DEVICE_LIBRARIES, DeviceKind, DeviceLibrary
from mpicoll.buffers.device import Device, DeviceArray, StreamEvent, view
from mpicoll.engine import dispatch
from mpicoll.engine.core.arrays import CollectiveArrays, do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation, Prepare
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.dispatch import Task
from mpicoll.engine.executors.shared_memory import SharedMemoryCollective
from mpicoll.engine.executors.stream_order import Completion, StreamOrder, complete_or_defer
from mpicoll.engine.selection.selector import get_forced_rules

_MAX_VIEWS = 64
"""Maximum number of addresses whose views a call keeps: those of the arrays that a program uses in turn."""


class _Views:
    """Arrays like `array` at other addresses, without owners."""

    __slots__ = ("_device", "_dtype", "_known", "_shape", "nbytes")

    def __init__(self, array: DeviceArray) -> None:
        self._device = array.on
        self._shape = array.shape
        self._dtype = array.dtype
        self._known: dict[int, DeviceArray] = {}
        self.nbytes = array.nbytes

    def at(self, address: int) -> DeviceArray:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= _MAX_VIEWS:
                self._known.clear()
            found = self._known[address] = view(self._device, address, self._shape, self._dtype)
        return found


class DeviceCall:
    """A call that was bound on a device, for memory at any addresses: `source` and `target`, 0 for what it lacks.

    `make_result` makes an array for the result; None if the call has none on this rank. `call` describes the call;
    `order` is that of the streams, if the host does not wait for it.
    """

    __slots__ = ("_collective", "_device", "_order", "_sources", "_targets", "call", "make_result")

    def __init__(
        self,
        device: Device,
        arrays: CollectiveArrays,
        collective: SharedMemoryCollective,
        call: Call,
        make_result: Callable[[], Any] | None,
        order: StreamOrder | None,
    ) -> None:
        self._device = device
        self._order = order
        self._collective = collective
        self._sources = _Views(arrays.source) if isinstance(arrays.source, DeviceArray) else None
        self._targets = _Views(arrays.target) if isinstance(arrays.target, DeviceArray) else None
        self.call = call
        self.make_result = make_result

    def overlap(self, source: int, target: int) -> bool:
        """Return True if input and output share some of their memory, but are not the same."""
        if self._sources is None or self._targets is None or source == target:
            return False
        return source < target + self._targets.nbytes and target < source + self._sources.nbytes

    def record(self, stream: int) -> StreamEvent | None:
        """Record an event on the caller's stream, in the caller's thread, for :meth:`run`; None if it is captured."""
        return self._device.record_caller(stream)

    def run(self, source: int, target: int, event: StreamEvent, kept: Any = None) -> Completion | None:
        """Carry out the call in queue order, on memory that may be touched when `event` is done. Return the completion
        of a call for which the host does not wait; it keeps `kept`."""
        device, order = self._device, self._order
        given = None if self._sources is None else self._sources.at(source)
        out = None if self._targets is None else self._targets.at(target)
        completion = None
        if order is None:
            with device.working((event,)):
                self._collective(given, out, do_nothing, device.synchronize)
        else:
            completion = order.carry_out((event,), self._collective, given, out, kept=kept)
        device.reuse_event(event)
        return completion


class DeviceArguments:
    """The arrays of a call on a device: their addresses `source` and `target` (0: there is none), their `library` and
    the `index` of their device. `cached` is what is cached under `key` for calls on arrays of these kinds: None for the
    first one, True for the second, False if each call is prepared again."""

    __slots__ = ("cached", "index", "key", "library", "source", "target")

    def __init__(
        self,
        key: tuple[Any, ...],
        cached: DeviceCall | bool | None,
        library: DeviceLibrary,
        index: int,
        source: int,
        target: int,
    ) -> None:
        self.key = key
        self.cached = cached
        self.library = library
        self.index = index
        self.source = source
        self.target = target

    def call(self, comm: CommunicatorCore, name: str, x: Any, out: Any, prepare: Prepare) -> Any:
        """Carry out the call `name` on these arrays, and return its result."""
        cached = self.cached
        if type(cached) is DeviceCall:
            value, target = out, self.target
            if out is None and cached.make_result is not None:
                value = cached.make_result()
                target = _find_address(self.library, value)
            stream = self.library.current_stream(self.index)
            event = cached.record(stream)
            if event is not None:
                try:
                    completion = comm.queue.run(cached.run, cached.call, self.source, target, event)
                except BaseException:
                    comm.call_cache.pop(self.key, None)
                    raise
                if completion is not None:
                    completion.block_stream(stream)
                return value
        operation = prepare(x=x, out=out)
        value = dispatch.run(operation)
        _cache(operation, self, name, value)
        return value

    def make_task(self, comm: CommunicatorCore, name: str, x: Any, out: Any, prepare: Prepare) -> Task:
        """Return the task of such a call, whose result is written to `out`, or which has none on this rank."""
        cached = self.cached
        event = None
        if type(cached) is DeviceCall:
            event = cached.record(self.library.current_stream(self.index))
        if type(cached) is not DeviceCall or event is None:
            operation = prepare(x=x, out=out)
            task = dispatch.make_task(operation)
            task.call.name = name
            _cache(operation, self, name, out)
            return task
        bound, source, target = cached, self.source, self.target

        def run(kept: tuple[Any, Any] = (x, out)) -> None:
            try:
                completion = bound.run(source, target, event, kept)
            except BaseException:
                comm.call_cache.pop(self.key, None)
                raise
            if completion is not None:
                complete_or_defer(completion)

        return Task(run, cached.call)


def find_arguments(comm: CommunicatorCore, key: tuple[Any, ...], x: Any, out: Any) -> DeviceArguments | None:
    """Return the arrays of a call; None if they are not contiguous memory of one device, or nothing may be cached."""
    observer = comm.queue.observer
    if observer is not None and observer.needs_every_operation:
        return None
    given, taken = _find_place(x), _find_place(out)
    if given is None or taken is None:
        return None
    (kind, source), (into, target) = given, taken
    some = kind or into
    assert some is not None
    library, index, *_ = some
    if kind is not None and into is not None and (kind[0] is not into[0] or kind[1] != into[1]):
        return None
    whole = (*key, kind, into, source == target, get_forced_rules())
    try:
        cached = comm.call_cache.get(whole)
    except TypeError:
        return None
    if type(cached) is DeviceCall and cached.overlap(source, target):
        cached = False
    return DeviceArguments(whole, cached, library, index, source, target)


def _find_place(array: Any) -> tuple[DeviceKind | None, int] | None:
    """Return the kind and the address of an array on a device, or that there is no array; None for all others."""
    if array is None:
        return None, 0
    library = DEVICE_LIBRARIES.get(type(array))
    return None if library is None else library.find_place(array)


def _cache(operation: Operation, arguments: DeviceArguments, name: str, value: Any) -> None:
    """Bind the call described by `operation`, with the result `value`, and cache it, from the second call on: calls
    whose sizes always differ are not bound."""
    if arguments.cached is False:
        return
    bound = True if arguments.cached is None else _bind(operation, arguments, name, value)
    operation.comm.cache_call(arguments.key, bound)


def _bind(operation: Operation, arguments: DeviceArguments, name: str, value: Any) -> DeviceCall | bool:
    """Return what is bound for calls like `operation`: False if each has to be prepared, True if that is not known
    yet."""
    device, library = operation.on, arguments.library
    description = operation.describe("")
    # Ranks that prepare the call sign it without the algorithm, and compare rows by themselves.
    if device is None or description.arrivals:
        return False
    bound = dispatch.bind_repeated_on_device(operation, device)
    if isinstance(bound, bool):
        return bound
    choice, arrays, collective, order = bound
    target = 0 if value is None else _find_address(library, value)
    if not (_lies_at(arrays.source, arguments.source) and _lies_at(arrays.target, target)):
        return False
    description.sign()
    description.algorithm = choice.name
    description.name = name
    place = None if value is None or arguments.target else library.find_place(value)
    make_result = None if place is None else library.bind_empty(place[0])
    return DeviceCall(device, arrays, collective, description, make_result, order)


def _find_address(library: DeviceLibrary, array: Any) -> int:
    place = library.find_place(array)
    return 0 if place is None else place[1]


def _lies_at(array: Any, address: int) -> bool:
    """Return True if there is no array, or it begins at that address, and is the caller's memory."""
    return array is None or (isinstance(array, DeviceArray) and array.address == address)
