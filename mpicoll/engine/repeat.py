"""Calls that come again and again: what was prepared for the first one serves the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import numpy as np

from mpicoll.buffers.buffer import numpy_views
from mpicoll.buffers.dtypes import Array
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.operation import Operation, Shared, Unshared, body_of, call_of, run
from mpicoll.engine.record import Call, keepers
from mpicoll.engine.select import NATIVE, Choice, Method, choose, forced

Ready: TypeAlias = "tuple[Callable[[Array, Any], Any], Callable[[Array, Any], bool]]"
"""What carries out a call ``(x, out)`` and returns its result, and whether it can do so for these."""

Kept: TypeAlias = "tuple[Callable[[Array, Any], Any], Callable[[Array, Any], bool], Call]"
"""The same, and what the call is to others."""

_BYTES = 16 * 1024
"""Up to here, two copies cost less than to prepare an operation anew."""

KEPT = 1024
"""How many kinds of calls a communicator keeps."""

_IN_PLACE = ("allreduce", "reduce", "bcast")
"""Collectives whose output may be their input."""


def repeated(
    comm: Communicator, what: tuple[Any, ...], x: Any, out: Any, prepare: Callable[[Any, Any], Operation]
) -> Any:
    """Carry out ``prepare(x, out)``, and keep what was prepared for later calls on arrays of the same kind.

    `what` must hold all else that `prepare` depends on.
    """
    if type(x) is np.ndarray:
        return _repeated(comm, (*what, x.dtype, x.shape), x, out, prepare)
    views = numpy_views(x, out)
    if views is None:
        return run(prepare(x, out))
    array, into, back = views
    value = _repeated(comm, (*what, array.dtype, array.shape), array, into, prepare)
    return None if value is None else back(value)


def _repeated(
    comm: Communicator, key: tuple[Any, ...], x: Array, out: Any, prepare: Callable[[Array, Any], Operation]
) -> Any:
    progress = comm.progress
    fresh = forced() or (progress.observer is not None and progress.observer.thorough)
    try:
        known = None if fresh else comm.repeated.get(key)
    except TypeError:
        # What can't be hashed is no name of an algorithm: `prepare` says so.
        known = None
    if known is not None and known[1](x, out):
        again, _, call = known
        try:
            if progress.queue or progress.observer is not None:
                return progress.run(again, call, x, out)
            # progress.run, written out for the calls that are made most.
            with progress.lock:
                progress.number = number = progress.number + 1
                progress.current = entry = (progress.group, number, call, monotonic(), None)
                try:
                    value = again(x, out)
                except BaseException as error:  # noqa: BLE001  raised again
                    raise progress.failed(entry, error)  # noqa: B904  it has its cause
                progress.current = None
                keepers.keep((entry, monotonic(), ""))
                return value
        except Unshared:
            comm.repeated.clear()
        except BaseException:
            # Late messages may still find their way into its memory.
            comm.repeated.pop(key, None)
            raise
    operation = prepare(x, out)
    if known is None and not fresh:
        kept = _kept(operation, x, prepare)
        if kept is not None:
            if len(comm.repeated) >= KEPT:
                comm.repeated.clear()
            comm.repeated[key] = kept
    return run(operation)


def _kept(operation: Operation, x: Array, prepare: Callable[[Array, Any], Operation]) -> Kept | None:
    """What to keep of a call like `operation`; None if such are better prepared anew."""
    choice = choose(operation.problem, operation.algorithm)
    shared = isinstance(choice.algorithm, Method)
    small = operation.problem.nbytes is not None and operation.problem.nbytes <= _BYTES
    native = choice.algorithm is None and choice.name == NATIVE and operation.direct is not None
    if not shared and not small and not native:
        return None
    own = np.empty(x.shape, x.dtype)
    prepared = prepare(own, None)
    ready = _by_copies(own, prepared) if small and not shared else _on_arrays(own, prepared, choice)
    return None if ready is None else (*ready, call_of(operation, choice))


def _by_copies(own: Array, operation: Operation) -> Ready:
    """Prepared on arrays of its own, between which and the caller's it copies."""
    body = body_of(operation, choose(operation.problem, operation.algorithm), bound=True)
    value = operation.result()

    # Closures: this is the innermost of the short path, and slots of an object take longer to reach.
    def again(x: Array, out: Any) -> Any:
        own[...] = x
        body()
        if out is None:
            return None if value is None else value.copy()
        out[...] = value
        return out

    return again, _like(value)


def _like(value: Any) -> Callable[[Array, Any], bool]:
    """Whether a result like `value` can go to ``out``."""
    if value is None:
        return lambda x, out: out is None
    dtype, shape = value.dtype, value.shape

    def fits(x: Array, out: Any) -> bool:
        if out is None:
            return True
        return type(out) is np.ndarray and out.dtype == dtype and out.shape == shape and bool(out.flags.carray)

    return fits


def _on_arrays(own: Array, operation: Operation, choice: Choice) -> Ready | None:
    """From the caller's arrays to the caller's arrays, through shared memory or by MPI."""
    assert operation.flat is not None
    flat, value = operation.flat(), operation.result()
    if not _lies_in(flat.source, own) or not _lies_in(flat.target, value):
        return None
    carry_out: Callable[[Any, Any], None]
    if isinstance(choice.algorithm, Method):
        carry_out = Shared.of(operation, choice, flat)
    else:
        native = operation.comm.transport.native
        if operation.direct is None or native is None:
            return None
        carry_out = partial(operation.direct, native)
    read, write = _flattener(flat.source, own), _flattener(flat.target, value)
    in_place, like = operation.problem.collective in _IN_PLACE, _like(value)
    # What is large must not be kept.
    shape, dtype = (None, None) if value is None else (value.shape, value.dtype)

    def again(x: Array, out: Any) -> Any:
        if out is None and shape is not None:
            out = np.empty(shape, dtype)
        source = read(x)
        carry_out(source, source if out is x and source is not None else write(out))
        return out

    def fits(x: Array, out: Any) -> bool:
        if not x.flags.c_contiguous or not like(x, out):
            return False
        return out is None or (out is x and in_place) or not np.may_share_memory(out, x)

    return again, fits


def _lies_in(flat: Array | None, array: Array) -> bool:
    return flat is None or np.may_share_memory(flat, array)


def _flattener(flat: Array | None, like: Any) -> Callable[[Any], Any]:
    """What makes of an array like `like` one like `flat`."""
    if flat is None:
        return lambda array: None
    if flat.dtype == like.dtype:
        return lambda array: array.reshape(-1)
    dtype = flat.dtype
    return lambda array: array.reshape(-1).view(dtype)
