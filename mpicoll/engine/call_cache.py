"""Calls that come again and again: what was prepared for the first ones serves the others."""

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
"""Carries out a call on numpy's views of ``x`` and ``out``, and returns its result: ``out``, if that is given."""

Kept: TypeAlias = "tuple[Again, Call, np.dtype[Any] | None, tuple[int, ...] | None]"
"""A call that is ready to be carried out again, what it is to others, and the dtype and the shape of its result; None
if it has none on this rank."""

_Found: TypeAlias = "tuple[tuple[Any, ...], Kept | bool | None, Any, Any, Wrap]"
"""The key of a call (empty: it is not to be kept), what is kept under it (None: nothing yet, True: it has been called,
False: it is prepared anew each time), numpy's views of ``x`` and ``out``, and what makes the caller's result of one of
numpy's."""

_UNKNOWN: _Found = ((), None, None, None, None)

Prepare: TypeAlias = "Callable[[Any, Any], Operation]"
"""Makes the operation of ``x`` and ``out``."""

_BYTES = 16 * 1024
"""Up to here, two copies cost less than to prepare an operation anew."""

KEPT = 1024
"""How many kinds of calls a communicator keeps."""

_IN_PLACE = ("allreduce", "reduce", "bcast", "scan", "exscan")
"""Collectives whose output may be their input."""


def repeated(comm: Communicator, what: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> Any:
    """Carry out ``prepare(x, out)``, and keep what was prepared for later calls on arrays of the same kind.

    `x` may be None, where `out` tells what arrives. `what`, which begins with the name of the call, must hold all else
    that `prepare` depends on.
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
        # Late messages may still find their way into its memory.
        comm.repeated.pop(key, None)
        raise
    if value is None or out is not None:
        return out
    return value if finish is None else finish(value)


def repeated_task(comm: Communicator, what: tuple[Any, ...], x: Any, out: Any, prepare: Prepare) -> Task:
    """The same as a task, for calls whose result goes to `out`, or that have none on this rank."""
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
    """What is known of calls such as this one."""
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
        # What can't be hashed is no name of an algorithm: `prepare` says so.
        return _UNKNOWN
    if into is not None and type(known) is tuple:
        _, _, dtype, shape = known
        if into.dtype != dtype or into.shape != shape or (not into.flags.carray and not _takes(into)):
            # What is wrong with `out`, if anything is, shows when the call is prepared.
            known = False
    return key, known, array, into, finish


def _takes(out: Array) -> bool:
    """Whether the elements of `out`, which is not plain, can be written to, each on its own."""
    return out.flags.writeable and 0 not in out.strides


def _prepared(
    comm: Communicator, name: str, key: tuple[Any, ...], known: Any, x: Any, out: Any, prepare: Prepare
) -> Operation:
    """The operation of a call of which nothing is kept. From the second one on something is, so that calls whose sizes
    always differ are not prepared twice."""
    operation = prepare(x, out)
    if key and known is not False:
        if len(comm.repeated) >= KEPT:
            comm.repeated.clear()
        comm.repeated[key] = True if known is None else _kept(operation, name, x, out, prepare)
    return operation


def _kept(operation: Operation, name: str, x: Any, out: Any, prepare: Prepare) -> Kept | bool:
    """What to keep of a call like `operation`. False: such are better prepared anew; True: that is not known yet."""
    choice = choose(operation.problem, operation.algorithm)
    shared = isinstance(choice.algorithm, SharedMemoryAlgorithm)
    small = all(one is None or one.array.nbytes <= _BYTES for one in operation.buffers)
    native = choice.algorithm is None and choice.name == NATIVE and operation.direct is not None
    if not shared and not small and not native:
        return False
    if shared and not operation.comm.has_arena:
        return True  # whether there is shared memory shows when it is first used
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
    """Prepared on arrays of its own, between which and the caller's it copies."""
    body = body_of(operation, choose(operation.problem, operation.algorithm), bound=True, call=call)

    # Closures: this is the innermost of the short path, and slots of an object take longer to reach.
    def again(x: Array | None, out: Array | None) -> Array | None:
        if own is not None:
            own[...] = x
        elif value is not None:
            value[...] = out  # which is the root's input as well, in a bcast
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
    """From the caller's arrays to the caller's arrays, through shared memory or by MPI."""
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
