"""Calls that come again and again: what was prepared for the first ones serves the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpicoll.buffers.buffer import Wrap, numpy_views
from mpicoll.buffers.dtypes import Array
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.operation import Operation, Shared, Unshared, body_of, call_of, run
from mpicoll.engine.record import Call, keepers
from mpicoll.engine.select import NATIVE, Choice, Method, choose, forced

Again: TypeAlias = "Callable[[Array | None, Array | None], Array | None]"
"""Carries out a call on numpy's views of ``x`` and ``out``, and returns its result: ``out``, if that is given."""


class Kept(NamedTuple):
    """A call that is ready to be carried out again, the dtype and the shape of its result, if it has one on this rank,
    and what it is to others."""

    again: Again
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    call: Call


_BYTES = 16 * 1024
"""Up to here, two copies cost less than to prepare an operation anew."""

KEPT = 1024
"""How many kinds of calls a communicator keeps."""

_IN_PLACE = ("allreduce", "reduce", "bcast", "scan", "exscan")
"""Collectives whose output may be their input."""


def repeated(
    comm: Communicator, what: tuple[Any, ...], x: Any, out: Any, prepare: Callable[[Any, Any], Operation]
) -> Any:
    """Carry out ``prepare(x, out)``, and keep what was prepared for later calls on arrays of the same kind.

    `x` may be None, where `out` tells what arrives. `what` must hold all else that `prepare` depends on.
    """
    array, into, wrap, finish = x, out, None, None
    if type(x) is not np.ndarray or (out is not None and type(out) is not np.ndarray):
        views = numpy_views(x, out)
        if views is None:
            return run(prepare(x, out))
        array, into, wrap, finish = views
    key = (*what, wrap, into.dtype, into.shape, None) if array is None else (*what, wrap, array.dtype, array.shape)
    rules = forced()
    if rules:
        key = (*key, rules)
    progress = comm.progress
    thorough = progress.observer is not None and progress.observer.thorough
    try:
        known = None if thorough else comm.repeated.get(key)
    except TypeError:
        # What can't be hashed is no name of an algorithm: `prepare` says so.
        return run(prepare(x, out))
    if type(known) is Kept and (into is None or _fits(into, known)):
        again, _, _, call = known
        try:
            if progress.queue or progress.observer is not None:
                value = progress.run(again, call, array, into)
            else:
                # progress.run, written out for the calls that are made most.
                with progress.lock:
                    progress.number = number = progress.number + 1
                    progress.current = entry = (progress.group, number, call, monotonic(), None)
                    try:
                        value = again(array, into)
                    except BaseException as error:  # noqa: BLE001  raised again
                        raise progress.failed(entry, error)  # noqa: B904  it has its cause
                    progress.current = None
                    keepers.keep((entry, monotonic(), ""))
            if value is None or out is not None:
                return out
            return value if finish is None else finish(value)
        except Unshared:
            comm.repeated.clear()
            known = False
        except BaseException:
            # Late messages may still find their way into its memory.
            comm.repeated.pop(key, None)
            raise
    operation = prepare(x, out)
    if not thorough and type(known) is not Kept and known is not False:
        _note(comm, key, known, lambda: _kept(operation, array, into, wrap, prepare))
    return run(operation)


def _note(comm: Communicator, key: tuple[Any, ...], known: bool | None, keep: Callable[[], Kept | None]) -> None:
    """Remember a call that was made: what is kept of it from the second one on, so that those whose sizes always differ
    are not prepared twice; False if such are better prepared anew."""
    if known is None and len(comm.repeated) >= KEPT:
        comm.repeated.clear()
    comm.repeated[key] = True if known is None else keep() or False


def _fits(out: Array, kept: Kept) -> bool:
    """Whether the result can go to `out`."""
    if out.dtype != kept.dtype or out.shape != kept.shape:
        return False
    flags = out.flags
    # What else may be wrong with it shows when the call is prepared.
    return flags.writeable and (flags.c_contiguous or 0 not in out.strides)


def _kept(
    operation: Operation, x: Array | None, out: Array | None, wrap: Wrap, prepare: Callable[[Any, Any], Operation]
) -> Kept | None:
    """What to keep of a call like `operation`; None if such are better prepared anew."""
    choice = choose(operation.problem, operation.algorithm)
    shared = isinstance(choice.algorithm, Method)
    small = all(one is None or one.array.nbytes <= _BYTES for one in operation.buffers)
    native = choice.algorithm is None and choice.name == NATIVE and operation.direct is not None
    if not shared and not small and not native:
        return None
    own = None if x is None else np.empty(x.shape, x.dtype)
    into = np.empty(out.shape, out.dtype) if x is None and out is not None else None
    prepared = prepare(*(one if one is None or wrap is None else wrap(one) for one in (own, into)))
    value = prepared.result() if into is None else into
    if wrap is not None and into is None and value is not None:
        views = numpy_views(value, None)
        assert views is not None
        value = views[0]
    again = _on_arrays(own, value, prepared, choice) if shared or not small else None
    if again is None:
        if not small:
            return None
        again = _by_copies(own, value, prepared)
    dtype, shape = (None, None) if value is None else (value.dtype, value.shape)
    return Kept(again, dtype, shape, call_of(operation, choice))


def _by_copies(own: Array | None, value: Array | None, operation: Operation) -> Again:
    """Prepared on arrays of its own, between which and the caller's it copies."""
    body = body_of(operation, choose(operation.problem, operation.algorithm), bound=True)

    # Closures: this is the innermost of the short path, and slots of an object take longer to reach.
    def again(x: Array | None, out: Array | None) -> Array | None:
        if own is not None:
            own[...] = x
        body()
        if value is None:
            return None
        if out is None:
            return value.copy()
        out[...] = value
        return out

    return again


def _on_arrays(own: Array | None, value: Array | None, operation: Operation, choice: Choice) -> Again | None:
    """From the caller's arrays to the caller's arrays, through shared memory or by MPI."""
    if operation.flat is None:
        return None
    flat = operation.flat()
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
    in_place = operation.problem.collective in _IN_PLACE
    # What is large must not be kept.
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
    """What makes of an array like `like` one like `flat`, by a copy if it is not contiguous."""
    if flat is None or like is None:
        return lambda array: None
    if flat.dtype == like.dtype:
        return lambda array: array.ravel()
    dtype = flat.dtype
    return lambda array: array.ravel().view(dtype)
