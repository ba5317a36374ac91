"""Blocking calls, and the cache of what was bound for the first ones, for later calls on arrays of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpicoll.buffers.buffer import DEVICE_LIBRARIES, Wrap
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import bind_empty, numpy_views
from mpicoll.collectives.arguments import check_timeout
from mpicoll.engine import dispatch
from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.message_progress import enable_progress
from mpicoll.engine.core.operation import Operation, Prepare
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.dispatch import Task
from mpicoll.engine.executors.native import IN_PLACE, bind_native
from mpicoll.engine.executors.shared_memory import SharedMemoryCollective
from mpicoll.engine.learning import describe_learning, get_final_choice, is_learnable
from mpicoll.engine.selection.catalogue import NATIVE, SharedMemoryAlgorithm
from mpicoll.engine.selection.selector import Choice, choose, get_forced_rules
from mpicoll.extension import F, make_function
from mpicoll.transport.base import Native

if TYPE_CHECKING:
    from mpicoll._shm import BegunCall, Collective, NativeCall
    from mpicoll.collectives.device_call import DeviceArguments

BoundCall: TypeAlias = "Callable[[Array | None, Array | None], Array | None]"
"""Function that carries out a call on numpy's views of ``x`` and ``out``, and returns its result: ``out``, if that is
given."""

CachedCall: TypeAlias = "tuple[BoundCall, Call, np.dtype[Any] | None, tuple[int, ...] | None]"
"""The function that carries out a call, its description, and the dtype and the shape of its result; None if it has no
result on this rank."""

_CacheEntry: TypeAlias = "tuple[tuple[Any, ...], CachedCall | bool | None, Any, Any, Wrap]"
"""Key of a call (empty: not cacheable), the cached value (None: none yet; True: it has been called; False: it is
prepared at each call), numpy's views of ``x`` and ``out``, and the function that converts a numpy result to the
caller's."""

_UNKNOWN: _CacheEntry = ((), None, None, None, None)


UNCACHED: list[Any] = []
"""Part of the key of calls that are not cached: it can't be hashed."""

_MAX_COPIED_BYTES = 16 * 1024
"""Bytes up to which two copies cost less than preparing an operation again."""

MISSING: Any = object()
"""Value that :attr:`OperationQueue.run_repeated` returns for a call that :func:`call` has to carry out."""


def repeats(name: str, *key: str, given: Any = None) -> Callable[[F], F]:
    """Return a decorator of the public function of a blocking collective. The extension carries out calls like earlier
    ones before the function is called.

    Args:
        name: the name of the collective, and `key`: the parameters that follow it in the key that is passed to
            :func:`call`.
        given: the input of a function without a parameter ``x``.
    """
    return lambda function: make_function(function, name, key, given)


def begins(name: str, *key: str, given: Any = None) -> Callable[[F], F]:
    """Return a decorator of the public function of a nonblocking collective. The extension begins calls like earlier
    ones, of this or the blocking function, before the function is called. The arguments are those of :func:`repeats`.
    """
    return lambda function: make_function(function, name, key, given, begins=True)


def start(comm: CommunicatorCore, key: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> Request:
    """Start ``prepare(x=x, out=out)`` and return its request. It is cached as in :func:`call`."""
    request: Request = comm.queue.begin_repeated(MISSING, x, out, *key)
    if request is not MISSING:
        return request
    operation = prepare(x=x, out=out)
    if comm.queue.calls is not None and _find_device_arguments(comm, key, x, out) is None:
        full_key, cached, *_ = _find_entry(comm, key, x, out)
        if type(cached) is not tuple:
            _cache(operation, key, full_key, cached, x, out, prepare)
        # A blocking call may have been cached before.
        _enable_begun_calls(comm.queue)
    return dispatch.start(operation)


def _enable_begun_calls(queue: OperationQueue) -> None:
    """Have the extension begin nonblocking calls that are like earlier ones."""
    if queue.calls is not None and queue.calls.wrap is None and enable_progress():
        queue.calls.wrap = _make_request


def _make_request(begun: BegunCall) -> Request:
    return Request(begun, begun.wait)


def call(
    comm: CommunicatorCore, key: tuple[Any, ...], x: Any, out: Any, timeout: float | None, prepare: Prepare
) -> Any:
    """Carry out ``prepare(x=x, out=out)`` and return its result; with a `timeout`, in the background, waiting for at
    most as many seconds.

    What was bound to the algorithm is cached for later calls on arrays of the same kind. `key`, which begins with the
    name of the call, must contain all other inputs that `prepare` depends on, or UNCACHED.
    """
    if timeout is not None:
        bound = check_timeout(comm, key[0], timeout)
        return dispatch.start(prepare(x=x, out=out)).wait(bound)
    value = comm.queue.run_repeated(MISSING, x, out, *key)
    if value is not MISSING:
        return value
    arguments = _find_device_arguments(comm, key, x, out)
    if arguments is not None:
        return arguments.call(comm, key[0], x, out, prepare)
    full_key, cached, array, into, finish = _find_entry(comm, key, x, out)
    if type(cached) is not tuple:
        operation = prepare(x=x, out=out)
        cached = _cache(operation, key, full_key, cached, x, out, prepare)
        if type(cached) is not tuple:
            return dispatch.run(operation)
    bound_call, description, _, _ = cached
    try:
        value = comm.queue.run(bound_call, description, array, into)
    except BaseException:
        # Late messages may still be written to its memory.
        comm.call_cache.pop(full_key, None)
        raise
    if value is None or out is not None:
        return out
    return value if finish is None else finish(value)


def make_task(comm: CommunicatorCore, key: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> Task:
    """Return a task that carries out the call, for calls whose result is written to `out`, or that have none on this
    rank. It is cached as in :func:`call`."""
    arguments = _find_device_arguments(comm, key, x, out)
    if arguments is not None:
        return arguments.make_task(comm, key[0], x, out, prepare)
    full_key, cached, array, into, _ = _find_entry(comm, key, x, out)
    if type(cached) is not tuple:
        operation = prepare(x=x, out=out)
        cached = _cache(operation, key, full_key, cached, x, out, prepare)
        if type(cached) is not tuple:
            task = dispatch.make_task(operation)
            task.call.name = key[0]
            return task
    _enable_begun_calls(comm.queue)
    bound_call = cached[0]

    def run() -> None:
        try:
            bound_call(array, into)
        except BaseException:
            comm.call_cache.pop(full_key, None)
            raise

    task = Task(run, cached[1])
    task.begin = partial(comm.queue.begin_repeated, None, x, out, *key)
    return task


def _find_device_arguments(comm: CommunicatorCore, key: tuple[Any, ...], x: Any, out: Any) -> DeviceArguments | None:
    """Return the arrays of a call on a device, if they may be cached."""
    if type(out if x is None else x) not in DEVICE_LIBRARIES:
        return None
    # Not at module level: only arrays on a device need it.
    from mpicoll.collectives.device_call import find_arguments

    return find_arguments(comm, key, x, out)


def _find_entry(comm: CommunicatorCore, key: tuple[Any, ...], x: Any, out: Any) -> _CacheEntry:
    """Return the cache entry of a call and numpy's views of its arrays."""
    array, into, wrap, finish = x, out, None, None
    if type(x) is not np.ndarray or (out is not None and type(out) is not np.ndarray):
        views = numpy_views(x, out)
        if views is None:
            return _UNKNOWN
        array, into, wrap, finish = views
    observer = comm.queue.observer
    if observer is not None and observer.needs_every_operation:
        return _UNKNOWN
    key = (*key, wrap, into.dtype, into.shape, None) if array is None else (*key, wrap, array.dtype, array.shape)
    rules = get_forced_rules()
    if rules:
        key = (*key, rules)
    try:
        cached = comm.call_cache.get(key)
    except TypeError:
        # Not to be cached; or an invalid argument, for which `prepare` raises the error.
        return _UNKNOWN
    if into is not None and type(cached) is tuple:
        _, _, dtype, shape = cached
        if into.dtype != dtype or into.shape != shape or (not into.flags.carray and not _is_writable(into)):
            # Preparing the call raises the error for an invalid `out`.
            cached = False
    return key, cached, array, into, finish


def _is_writable(out: Array) -> bool:
    """Return True if the elements of `out`, which is not C-contiguous, can be written to individually."""
    return out.flags.writeable and 0 not in out.strides


def _cache(
    operation: Operation,
    key: tuple[Any, ...],
    full_key: tuple[Any, ...],
    cached: Any,
    x: Any,
    out: Any,
    prepare: Prepare,
) -> CachedCall | bool:
    """Bind the call that is described by `operation`, and cache it, from the second call on: calls whose sizes always
    differ are not prepared twice. Return the cached value."""
    if not full_key or cached is False:
        return False
    value = True if cached is None else _bind(operation, key, x, out, prepare)
    operation.comm.cache_call(full_key, value)
    return value


def _bind(operation: Operation, key: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> CachedCall | bool:
    """Return the value to cache for a call like `operation`: False if preparing it again is better, True if that is not
    known yet."""
    choice = get_final_choice(operation) if is_learnable(operation) else choose(operation.query, operation.algorithm)
    if choice is None:
        return True  # until the trials have ended
    native = operation.comm.transport.native
    description = _describe(operation, choice)
    small = all(one is None or one.array.nbytes <= _MAX_COPIED_BYTES for one in operation.buffers)
    views = numpy_views(operation.result(), None)
    value = None if views is None else views[0]
    bound_call: BoundCall | None = None
    if isinstance(choice.algorithm, SharedMemoryAlgorithm):
        if not operation.comm.has_arena:
            return True  # the availability of shared memory is known after its first use
        arrays = operation.arrays.for_shared_memory()
        if _is_movable(arrays, x):
            collective = SharedMemoryCollective.of(operation, choice, arrays, call=description)
            bound_call = _bind_without_copies(arrays, x, value, collective)
            _add_repeated(operation, key, x, collective.find_compiled(), description)
    elif _is_movable(operation.arrays, x):
        carrier = _bind_local(operation)
        if carrier is None and choice.name == NATIVE and native is not None:
            if not description.signature:
                description.sign()
            carrier = _bind_native(operation, native)
            if not small:
                bound_call = _bind_without_copies(operation.arrays, x, value, operation.arrays.native_call(native))
        _add_repeated(operation, key, x, carrier, description)
    if bound_call is None:
        if not small:
            return False
        bound_call = _bind_with_copies(x, out, prepare, description, choice)
    description.name = key[0]
    return bound_call, description, None if value is None else value.dtype, None if value is None else value.shape


def _describe(operation: Operation, choice: Choice) -> Call:
    """Return the description of `operation` by an algorithm, which is not compared if it was learned."""
    description = operation.describe(choice.name)
    return describe_learning(description) if is_learnable(operation) else description


def _add_repeated(
    operation: Operation,
    key: tuple[Any, ...],
    x: Any,
    carrier: Collective | NativeCall | None,
    description: Call,
) -> None:
    """Have later calls on arrays like `x` carried out by `carrier`, without Python code, if that can be done."""
    result = operation.result()
    make_result = bind_empty(result)
    if carrier is None or get_forced_rules() or (result is not None and make_result is None):
        return
    in_place = operation.arrays.collective in IN_PLACE
    operation.comm.queue.add_call(key, x, result, make_result, carrier, description, in_place=in_place)


def _bind_native(operation: Operation, native: Native) -> NativeCall | None:
    """Return what carries out the MPI library's collective in the extension; None if only Python can do that."""
    if operation.comm.queue.calls is None:
        return None
    source, target = operation.arrays.source, operation.arrays.target
    some = target if source is None else source
    dtype = np.dtype(np.uint8) if some is None else some.dtype
    return bind_native(operation.arrays, native, dtype, has_input=source is not None, has_output=target is not None)


def _bind_local(operation: Operation) -> NativeCall | None:
    """Return what carries out a collective of one rank in the extension, which is a copy of the input whatever the
    algorithm; None if that is not all."""
    arrays = operation.arrays
    if operation.comm.size > 1 or operation.comm.queue.calls is None or arrays.collective == "exscan":
        return None
    from mpicoll._shm import NativeCall

    if arrays.source is None or arrays.target is None:
        return NativeCall(None, (), None, None, None, None, False)
    if arrays.source.nbytes != arrays.target.nbytes:
        return None
    return NativeCall(None, (), None, None, None, None, True)


def _is_movable(arrays: CollectiveArrays, x: Any) -> bool:
    """Return True if the collective may be carried out on other arrays of the caller like `arrays`."""
    return arrays.unconverted and (arrays.source is None or x is not None)


def _bind_without_copies(
    arrays: CollectiveArrays, x: Any, value: Array | None, carry_out: Callable[[Any, Any], None]
) -> BoundCall:
    """Return a function that calls `carry_out` on the caller's arrays, flat and of the dtype of `arrays`."""
    read, write = _make_flattener(arrays.source, x), _make_flattener(arrays.target, value)
    in_place = arrays.collective in IN_PLACE
    # Do not keep references to large arrays.
    shape, dtype = (None, None) if value is None else (value.shape, value.dtype)

    def bound_call(x: Array | None, out: Array | None) -> Array | None:
        source = read(x)
        if shape is None:
            carry_out(source, None)
            return None
        if out is None:
            out = np.empty(shape, dtype)
            carry_out(source, write(out))
            return out
        contiguous = out.flags.carray
        if out is x and in_place and contiguous:
            carry_out(source, write(out) if source is None else source)
            return out
        if source is not None and np.may_share_memory(source, out):
            source = source.copy()
        if contiguous:
            carry_out(source, write(out))
        else:
            contiguous_out = np.empty(shape, dtype)
            carry_out(source, write(contiguous_out))
            out[...] = contiguous_out
        return out

    return bound_call


def _make_flattener(flat: Array | None, like: Any) -> Callable[[Any], Any]:
    """Return a function that converts an array like `like` to one like `flat`, by a copy if it is not contiguous, or
    not aligned."""
    views = None if flat is None else numpy_views(like, None)
    if flat is None or views is None:
        return lambda array: None
    assert views[0] is not None
    if flat.dtype == views[0].dtype:
        return _flatten
    dtype = flat.dtype
    return lambda array: array.ravel().view(dtype)


def _flatten(array: Array) -> Array:
    flat = array.ravel()
    # See `is_plain`.
    return flat if flat.flags.aligned else flat.copy()


def _bind_with_copies(x: Any, out: Any, prepare: Prepare, description: Call, choice: Choice) -> BoundCall:
    """Return a function that carries out the call on private arrays, and copies between them and the caller's."""
    views = numpy_views(x, out)
    assert views is not None
    private, into, wrap, _ = views
    private = None if private is None else np.empty(private.shape, private.dtype)
    value = None if private is not None or into is None else np.empty(into.shape, into.dtype)
    given, result_array = (one if one is None or wrap is None else wrap(one) for one in (private, value))
    operation = prepare(x=given, out=result_array)
    if value is None:
        result = numpy_views(operation.result(), None)
        value = None if result is None else result[0]
    run = dispatch.bind(operation, choice, call=description, fixed=True)

    # A closure: this is the innermost function of the fast path, and attribute access is slower.
    def bound_call(x: Array | None, out: Array | None) -> Array | None:
        if private is not None:
            private[...] = x
        elif value is not None:
            value[...] = out  # in a bcast also the root's input
        run()
        if value is None:
            return None
        if out is None:
            return value.copy()
        out[...] = value
        return out

    return bound_call
