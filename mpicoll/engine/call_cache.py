"""Cache of prepared calls: repeated calls reuse what was prepared for the first one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any, TypeAlias

import numpy as np

from mpicoll.buffers.buffer import Wrap
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import numpy_views
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.diagnostics.flight_recorder import Call, keepers
from mpicoll.engine.operation import Operation, Shared, Task, body_of, call_of, run, task
from mpicoll.engine.selection.catalogue import NATIVE, SharedMemoryAlgorithm
from mpicoll.engine.selection.selector import Choice, choose, forced

Again: TypeAlias = "Callable[[Array | None, Array | None], Array | None]"
"""Function that carries out a call on numpy's views of ``x`` and ``out``, and returns its result: ``out``, if that is
given."""

Kept: TypeAlias = "tuple[Again, Call, np.dtype[Any] | None, tuple[int, ...] | None]"
"""Cached call: the function that carries it out, its description, and the dtype and the shape of its result; None if it
has no result on this rank."""

_Found: TypeAlias = "tuple[tuple[Any, ...], Kept | bool | None, Any, Any, Wrap]"
"""Key of a call (empty: not cacheable), the cached value (None: none yet; True: it has been called; False: it is
prepared at each call), numpy's views of ``x`` and ``out``, and the function that converts a numpy result to the
caller's."""

_UNKNOWN: _Found = ((), None, None, None, None)

Prepare: TypeAlias = "Callable[[Any, Any], Operation]"
"""Function that returns the operation of ``x`` and ``out``."""

_BYTES = 16 * 1024
"""Bytes up to which two copies cost less than preparing an operation again."""

KEPT = 1024
"""Maximum number of cached calls per communicator."""

_IN_PLACE = ("allreduce", "reduce", "bcast", "scan", "exscan")
"""Collectives whose output may be their input."""


def repeated(comm: Communicator, what: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> Any:
    """Carry out ``prepare(x, out)``, and cache the prepared call for later calls on arrays of the same kind.

    `x` may be None, where `out` defines what is received. `what`, which begins with the name of the call, must contain
    all other inputs that `prepare` depends on.
    """
    key, known, array, into, finish = _find(comm, what, x, out)
    if type(known) is not tuple:
        return run(_prepared(comm, what[0], key, known, x, out, prepare))
    again, call, _, _ = known
    progress = comm.progress
    try:
        if progress.queue or progress.observer is not None or progress.lock.locked():
            value = progress.run(again, call, array, into)
        else:
            # progress.run, written out for the calls that are made most.
            with progress.lock:
                progress.thread = get_ident()
                progress.number = number = progress.number + 1
                progress.current = entry = (progress.group, number, call, monotonic(), None)
                try:
                    progress.match(call)
                    value = again(array, into)
                except BaseException as error:  # noqa: BLE001  raised again
                    raise progress.failed(entry, error)  # noqa: B904  it has its cause
                progress.current = None
                keepers.keep((entry, monotonic(), ""))
    except BaseException:
        # Late messages may still be written to its memory.
        comm.repeated.pop(key, None)
        raise
    if value is None or out is not None:
        return out
    return value if finish is None else finish(value)


def repeated_task(comm: Communicator, what: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> Task:
    """Return the cached call as a task, for calls whose result is written to `out`, or that have none on this rank."""
    key, known, array, into, _ = _find(comm, what, x, out)
    if type(known) is not tuple:
        made = task(_prepared(comm, what[0], key, known, x, out, prepare))
        made.call.name = what[0]
        return made
    again = known[0]

    def carry_out() -> None:
        try:
            again(array, into)
        except BaseException:
            comm.repeated.pop(key, None)
            raise

    return Task(carry_out, known[1])


def _find(comm: Communicator, what: tuple[Any, ...], x: Any, out: Any) -> _Found:
    """Return the cache entry of a call and numpy's views of its arrays."""
    array, into, wrap, finish = x, out, None, None
    if type(x) is not np.ndarray or (out is not None and type(out) is not np.ndarray):
        views = numpy_views(x, out)
        if views is None:
            return _UNKNOWN
        array, into, wrap, finish = views
    observer = comm.progress.observer
    if observer is not None and observer.thorough:
        return _UNKNOWN
    key = (*what, wrap, into.dtype, into.shape, None) if array is None else (*what, wrap, array.dtype, array.shape)
    rules = forced()
    if rules:
        key = (*key, rules)
    try:
        known = comm.repeated.get(key)
    except TypeError:
        # An unhashable value is not the name of an algorithm: `prepare` raises the error.
        return _UNKNOWN
    if into is not None and type(known) is tuple:
        _, _, dtype, shape = known
        if into.dtype != dtype or into.shape != shape or (not into.flags.carray and not _takes(into)):
            # Preparing the call raises the error for an invalid `out`.
            known = False
    return key, known, array, into, finish


def _takes(out: Array) -> bool:
    """Return True if the elements of `out`, which is not C-contiguous, can be written to individually."""
    return out.flags.writeable and 0 not in out.strides


def _prepared(
    comm: Communicator, name: str, key: tuple[Any, ...], known: Any, x: Any, out: Any, prepare: Prepare
) -> Operation:
    """Return the operation of a call that is not cached. It is cached from the second call on, so that calls whose
    sizes always differ are not prepared twice."""
    operation = prepare(x, out)
    if key and known is not False:
        if len(comm.repeated) >= KEPT:
            comm.repeated.clear()
        comm.repeated[key] = True if known is None else _kept(operation, name, x, out, prepare)
    return operation


def _kept(operation: Operation, name: str, x: Any, out: Any, prepare: Prepare) -> Kept | bool:
    """Return the value to cache for a call like `operation`: False if preparing it again is better, True if that is not
    known yet."""
    choice = choose(operation.problem, operation.algorithm)
    shared = isinstance(choice.algorithm, SharedMemoryAlgorithm)
    small = all(one is None or one.array.nbytes <= _BYTES for one in operation.buffers)
    native = choice.algorithm is None and choice.name == NATIVE and operation.direct is not None
    if not shared and not small and not native:
        return False
    if shared and not operation.comm.has_arena:
        return True  # the availability of shared memory is known after its first use
    views = numpy_views(x, out)
    assert views is not None
    own, into, wrap, _ = views
    own = None if own is None else np.empty(own.shape, own.dtype)
    value = None if own is not None or into is None else np.empty(into.shape, into.dtype)
    prepared = prepare(*(one if one is None or wrap is None else wrap(one) for one in (own, value)))
    if value is None:
        result = numpy_views(prepared.result(), None)
        value = None if result is None else result[0]
    call = call_of(operation, choice)
    again = _on_arrays(own, value, prepared, choice, call) if shared or not small else None
    if again is None:
        if not small:
            return False
        again = _by_copies(own, value, prepared, call)
    call.name = name
    return again, call, None if value is None else value.dtype, None if value is None else value.shape


def _by_copies(own: Array | None, value: Array | None, operation: Operation, call: Call) -> Again:
    """Return a function that runs the operation on private arrays, and copies between them and the caller's arrays."""
    body = body_of(operation, choose(operation.problem, operation.algorithm), bound=True, call=call)

    # Closures: this is the innermost function of the fast path, and attribute access is slower.
    def again(x: Array | None, out: Array | None) -> Array | None:
        if own is not None:
            own[...] = x
        elif value is not None:
            value[...] = out  # in a bcast also the root's input
        body()
        if value is None:
            return None
        if out is None:
            return value.copy()
        out[...] = value
        return out

    return again


def _on_arrays(
    own: Array | None, value: Array | None, operation: Operation, choice: Choice, call: Call
) -> Again | None:
    """Return a function that runs the operation on the caller's arrays, through shared memory or by MPI; None if that
    is impossible."""
    if operation.flat is None:
        return None
    flat = operation.flat()
    if not _lies_in(flat.source, own) or not _lies_in(flat.target, value):
        return None
    carry_out: Callable[[Any, Any], None]
    if isinstance(choice.algorithm, SharedMemoryAlgorithm):
        carry_out = Shared.of(operation, choice, flat, call=call)
    else:
        native = operation.comm.transport.native
        if operation.direct is None or native is None:
            return None
        carry_out = partial(operation.direct, native)
    read, write = _flattener(flat.source, own), _flattener(flat.target, value)
    in_place = operation.problem.collective in _IN_PLACE
    # Do not keep references to large arrays.
    shape, dtype = (None, None) if value is None else (value.shape, value.dtype)

    def again(x: Array | None, out: Array | None) -> Array | None:
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
            aside = np.empty(shape, dtype)
            carry_out(source, write(aside))
            out[...] = aside
        return out

    return again


def _lies_in(flat: Array | None, array: Array | None) -> bool:
    return flat is None or (array is not None and np.may_share_memory(flat, array))


def _flattener(flat: Array | None, like: Array | None) -> Callable[[Any], Any]:
    """Return a function that converts an array like `like` to one like `flat`, by a copy if it is not contiguous."""
    if flat is None or like is None:
        return lambda array: None
    if flat.dtype == like.dtype:
        return lambda array: array.ravel()
    dtype = flat.dtype
    return lambda array: array.ravel().view(dtype)
