"""exchange_halo: fill the outer layers of an array with those of the neighbours on a grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from mpicoll.buffers.device import Device, device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.streams import record_events
from mpicoll.collectives.arguments import (
    ArrayT,
    adds_rank_to_errors,
    resolve_output,
)
from mpicoll.collectives.call import repeats
from mpicoll.collectives.neighbours import NeighbourOperation, get_topology
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.core.request import Request
from mpicoll.engine.core.topology import CartesianTopology, list_integers
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.executors.neighbour_exchange import NeighbourExchange
from mpicoll.engine.executors.neighbour_memory import Round, SharedExchange, find_box, may_share
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import CommunicatorError, ShapeError


@repeats("exchange_halo", "width", "axes", "corners")
def exchange_halo(
    x: ArrayT,
    width: int | Sequence[int] = 1,
    *,
    axes: Sequence[int] | None = None,
    corners: bool = True,
    out: Any = None,
    comm: CommLike = None,
    timeout: float | None = None,
) -> ArrayT:
    """Fill the halo of an array, its outer layers, with the adjacent inner layers of the neighbours on a grid.

    Along each axis that is divided among the ranks, the first `width` layers become the last inner layers of the rank
    before this one, and the last `width` layers the first inner ones of the rank behind. Beyond a border of the grid
    the halo is not changed. The layers may have any strides.

    Args:
        x: this rank's part of the whole array, with its halo; of any dtype of fixed size. Neighbours must have the same
            extents along all axes except the one that divides them.
        width: the number of layers at both ends; or one number for each dimension of the grid, where 0 exchanges
            nothing.
        axes: the axis of `x` that each dimension of the grid divides; None takes the first ones.
        corners: False does not fill the parts of the halo that belong to diagonal neighbours, which a stencil without
            diagonals does not read; all messages are exchanged at the same time then.
        out: an array for the result, such as `x` itself; None creates one.
        comm: a communicator that ``cart`` has created.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        An array of `x`'s library, shape and dtype: `x` with the halo filled; `out` if given.

    Raises:
        DTypeError, ShapeError: an argument is invalid; no message has been sent.
        CommunicatorError: the ranks of `comm` form no grid.
        MismatchError, TruncationError: neighbours have other extents, or pass other arguments.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> ring = mpicoll.world().cart([1], periods=True)  # on one rank
        >>> mpicoll.exchange_halo(np.array([0, 1, 2, 3, 0]), comm=ring)
        array([3, 1, 2, 3, 1])
    """
    operation = _prepare(resolve(comm), "exchange_halo", x, width, axes, corners, out)
    result: ArrayT = operation.wait(timeout, ("exchange_halo", width, axes, corners), x)
    return result


def iexchange_halo(
    x: ArrayT,
    width: int | Sequence[int] = 1,
    *,
    axes: Sequence[int] | None = None,
    corners: bool = True,
    out: Any = None,
    comm: CommLike = None,
) -> Request[ArrayT]:
    """Start :func:`exchange_halo` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed. With ``out=x``, what lies
        deeper than the layers that are sent may be read and changed, and all inner layers may be read.

    Example:
        >>> ring = mpicoll.world().cart([1], periods=True)  # on one rank
        >>> mpicoll.iexchange_halo(np.array([0, 1, 2, 3, 0]), comm=ring).wait()
        array([3, 1, 2, 3, 1])
    """
    return _prepare(resolve(comm), "exchange_halo", x, width, axes, corners, out).start()


@adds_rank_to_errors
def _prepare(
    comm: CommunicatorCore, name: str, x: Any, width: Any, axes: Any, corners: bool, out: Any
) -> NeighbourOperation:
    grid = get_topology(comm, name)
    if not isinstance(grid, CartesianTopology):
        raise CommunicatorError(f"{name}: the ranks of {comm.name} form no grid; pass a communicator of cart()")
    buffer = recognise(name, x)
    shape = buffer.array.shape
    divided = _check_axes(name, axes, len(grid.dims), len(shape))
    widths = _check_widths(name, width, grid, divided, shape)
    output = resolve_output(name, out, buffer, shape)
    device = device_of(output.array)
    after = () if device is None else record_events(buffer, output)
    rounds = _Rounds(comm, name, grid, divided, widths, output.array)
    call = Call(
        f"{name}(width={list(widths)}, axes={list(divided)}, corners={bool(corners)})",
        dtype=buffer.dtype.text,
        memory="" if device is None else device.kind,
    )
    shared = None
    if device is None and may_share(comm):
        nbytes = output.array.nbytes
        shared = SharedExchange(comm, name, rounds.list_boxes(corners=corners), nbytes, nbytes, call, in_place=True)

    def run() -> None:
        tag = comm.next_tag()
        carrier = None if shared is None else shared.find_carrier()
        if carrier is not None:
            if not output.same_memory(buffer):
                np.copyto(output.array, buffer.array)
            whole = np.ascontiguousarray(output.array)
            as_bytes = whole.reshape(-1).view(np.uint8)
            carrier.carry_out(as_bytes, as_bytes)
            if whole is not output.array:
                np.copyto(output.array, whole.reshape(shape))
            return
        with nullcontext() if device is None else device.working(after):
            if not output.same_memory(buffer):
                np.copyto(output.array, buffer.array)
            rounds.run(tag, device, corners=corners)

    return NeighbourOperation(comm, call, run, output, shared)


def _check_axes(name: str, axes: Any, dimensions: int, ndim: int) -> tuple[int, ...]:
    """Return the axis of each dimension of the grid."""
    given = range(dimensions) if axes is None else list_integers(axes)
    if given is None or len(given) != dimensions or not all(-ndim <= axis < ndim for axis in given):
        what = "None" if axes is None else repr(axes)
        raise ShapeError(
            f"{name}: axes must be {dimensions} axes of x, one for each dimension of the grid, got {what} for an array"
            f" of {ndim} dimensions"
        )
    found = tuple(axis % ndim for axis in given)
    if len(set(found)) < len(found):
        raise ShapeError(f"{name}: axes must be distinct, got {axes!r}")
    return found


def _check_widths(
    name: str, width: Any, grid: CartesianTopology, axes: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the width of each dimension of the grid; each inner part must have all layers that a neighbour gets."""
    found = list_integers((width,) * len(axes))
    if found is None:
        found = list_integers(width)
    if found is None or len(found) != len(axes) or min(found, default=0) < 0:
        raise ShapeError(
            f"{name}: width must be a number >= 0, or one for each of {len(axes)} dimensions, got {width!r}"
        )
    for layers, axis, extent, periodic in zip(found, axes, grid.dims, grid.periods, strict=True):
        if shape[axis] < 3 * layers and (periodic or extent > 1):
            raise ShapeError(
                f"{name}: x of shape {tuple(shape)} has {shape[axis]} layers along axis {axis}; a halo of width"
                f" {layers} needs {3 * layers} or more"
            )
    return found


class _Rounds:
    """The layers that are exchanged along each dimension of a grid."""

    def __init__(
        self,
        comm: CommunicatorCore,
        name: str,
        grid: CartesianTopology,
        axes: Sequence[int],
        widths: Sequence[int],
        array: Array,
    ) -> None:
        self._comm = comm
        self._name = name
        self._grid = grid
        self._axes = axes
        self._widths = widths
        self._array = array

    def run(self, tag: int, device: Device | None, *, corners: bool) -> None:
        """Exchange all layers: with `corners`, along one axis after the other, so that a rank passes on what it has
        received along the axes before."""
        for together in self._list_rounds(corners=corners):
            self._exchange(together, tag, device, inner=not corners)

    def list_boxes(self, *, corners: bool) -> list[Round]:
        """Return the boxes of all layers in an array in C order, round by round."""
        whole = np.empty(self._array.shape, self._array.dtype)
        rounds: list[Round] = []
        for together in self._list_rounds(corners=corners):
            sends, recvs = self._list_layers(whole, together, inner=not corners)
            rounds.append(
                (
                    [(peer, find_box(layers, whole)) for peer, layers in sends],
                    [(peer, find_box(layers, whole)) for peer, layers in recvs],
                )
            )
        return rounds

    def _list_rounds(self, *, corners: bool) -> list[list[int]]:
        """Return the dimensions of each round."""
        dimensions = [at for at, width in enumerate(self._widths) if width]
        return [[at] for at in dimensions] if corners else [dimensions]

    def _list_layers(
        self, array: Array, dimensions: Sequence[int], *, inner: bool
    ) -> tuple[list[tuple[int, Array]], list[tuple[int, Array]]]:
        """Return the layers of `array` that are sent to, and received from, each neighbour."""
        sends: list[tuple[int, Array]] = []
        recvs: list[tuple[int, Array]] = []
        for at in dimensions:
            before, behind = self._grid.shift(at, 1)
            width, extent = self._widths[at], array.shape[self._axes[at]]
            for peer, begin in ((before, width), (behind, extent - 2 * width)):
                if peer is not PROC_NULL:
                    sends.append((peer, self._select(array, at, begin, inner=inner)))
            # What the rank behind sends to this one, the rank before it, comes first where both are the same.
            for peer, begin in ((behind, extent - width), (before, 0)):
                if peer is not PROC_NULL:
                    recvs.append((peer, self._select(array, at, begin, inner=inner)))
        return sends, recvs

    def _exchange(self, dimensions: Sequence[int], tag: int, device: Device | None, *, inner: bool) -> None:
        outgoing, incoming = self._list_layers(self._array, dimensions, inner=inner)
        sends: list[tuple[int, Array]] = []
        for peer, layers in outgoing:
            face = _Face(layers, device)
            face.load()
            sends.append((peer, face.as_bytes))
        faces = [_Face(layers, device) for _, layers in incoming]
        recvs = [(peer, face.as_bytes) for (peer, _), face in zip(incoming, faces, strict=True)]
        if device is not None:
            device.synchronize()
        NeighbourExchange(self._comm, self._name, sends, recvs).run(tag)
        for face in faces:
            face.store()
        if device is not None:
            device.synchronize()

    def _select(self, array: Array, at: int, begin: int, *, inner: bool) -> Array:
        """Return the layers of `array` from `begin` on along dimension `at` of the grid; with `inner`, without the halo
        of the others."""
        places: list[Any] = [slice(None)] * array.ndim
        if inner:
            for axis, width in zip(self._axes, self._widths, strict=True):
                places[axis] = slice(width, array.shape[axis] - width)
        places[self._axes[at]] = slice(begin, begin + self._widths[at])
        layers: Array = array[(*places, ...)]
        return layers


class _Face:
    """Layers as a message: their memory itself, if it is contiguous memory of the host, otherwise a copy."""

    __slots__ = ("_layers", "_packed", "as_bytes")

    def __init__(self, layers: Array, device: Device | None) -> None:
        self._layers = layers
        self._packed: Array | None = None
        if device is not None:
            self.as_bytes: Array = device.allocate_pinned(layers.nbytes)
            self._packed = self.as_bytes.view(layers.dtype).reshape(layers.shape)
        else:
            memory = layers
            if not layers.flags.c_contiguous:
                memory = self._packed = np.empty(layers.shape, layers.dtype)
            self.as_bytes = memory.reshape(-1).view(np.uint8)

    def load(self) -> None:
        """Copy the layers to the message, if necessary."""
        if self._packed is not None:
            np.copyto(self._packed, self._layers)

    def store(self) -> None:
        """Copy the message to the layers, if necessary."""
        if self._packed is not None:
            np.copyto(self._layers, self._packed)
