"""Tasks of a benchmark: a collective of a size and a dtype, its input data, and the expected results.

Each rank's input repeats a random pattern specific to the rank, whose length is a prime, so that a misplaced block is
detected, while the expected result can be computed from the patterns alone. The oracle is plain numpy: float64 or
complex128 for floating point, integers modulo their dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

import mpicoll
from mpicoll.cli.bench import device_arrays
from mpicoll.errors import SetupError
from mpicoll.ufuncs import UFUNCS

Wide: TypeAlias = npt.NDArray[Any]
"""float64, complex128 or int64."""

Part: TypeAlias = tuple[int, int, int, Wide, Wide]
"""A stretch of an array: start, number of elements, offset in the pattern, pattern, and absolute tolerance."""

ArrayKind: TypeAlias = Literal["numpy", "torch", "registered numpy", "registered torch", "cuda torch", "cuda cupy"]

COLLECTIVES = (
    "allreduce",
    "reduce",
    "bcast",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "scan",
    "exscan",
    "barrier",
)

MESSAGES = ("send", "isend", "sendrecv", "torch_send", "torch_isend", "dropin_send", "batch", "pipeline")
"""Messages between two ranks, by the names of MPI and torch: ``dropin_send`` is send of :mod:`mpicoll.torch`, ``batch``
is batch_isend_irecv, ``pipeline`` is send of :class:`mpicoll.parallel.p2p.PipeP2P`."""

AT_ONCE = ("sendrecv", "batch")
"""Messages in both directions at once. All others go forth and back."""

RING_CASES = ("neighbor_alltoall", "neighbor_allgather", "exchange_halo", "put", "get", "accumulate")
"""Calls in which each rank communicates with the next ones of a ring."""

DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")

_LAYERS = 6
"""Layers of an array whose halo is exchanged, with that."""

_OF_BLOCKS = ("allgather", "reduce_scatter", "gather", "scatter", "alltoall")

OPS = ("sum", "avg", "prod", "min", "max")

_PERIOD = 65_521

_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "complex64": 2.0**-23}
"""Machine epsilon by dtype; 2**-52 for dtypes that are not listed."""

_PIECE = 1 << 20
"""Elements that are compared at once, which bounds the memory of a comparison."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`size` bytes, rounded to whole elements and equal blocks, of a collective among `ranks`. Of RING_CASES it is the
    bytes for each neighbour."""

    collective: str
    size: int
    dtype: str
    op: str
    ranks: int

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def rows(self) -> int:
        """Number of elements of the vector, or of one block."""
        if self.collective == "barrier":
            return 0
        return max(1, self.size // self.itemsize // (self.ranks if self.collective in _OF_BLOCKS else 1))

    @property
    def nbytes(self) -> int:
        """Bytes as the library counts them: of the vector, or of all blocks of one buffer."""
        return self.rows * self.itemsize * (self.ranks if self.collective in _OF_BLOCKS else 1)

    def find_partner(self, rank: int) -> int | None:
        """Return the rank with which `rank` exchanges messages; None for the last one of an odd number."""
        return rank ^ 1 if rank ^ 1 < self.ranks else None

    @property
    def in_place(self) -> bool:
        """True if input and output are one array, as with the peers."""
        return self.collective in ("bcast", "exchange_halo")

    def operand_size(self, rank: int) -> int:
        """Return the number of elements that `rank` passes."""
        whole = self.collective in ("reduce_scatter", "alltoall") or (self.collective == "scatter" and rank == 0)
        if self.collective in RING_CASES:
            return self.rows * {"neighbor_alltoall": 2, "exchange_halo": _LAYERS}.get(self.collective, 1)
        return self.rows * (self.ranks if whole else 1)

    def result_size(self, rank: int) -> int:
        """Return the number of elements that `rank` receives; 0 if it receives nothing."""
        if self.collective in ("reduce", "gather") and rank != 0:
            return 0
        if self.collective in MESSAGES and self.find_partner(rank) is None:
            return 0
        if self.collective in RING_CASES:
            return (
                self.operand_size(rank) if self.in_place else self.rows * (1 + self.collective.startswith("neighbor"))
            )
        return self.rows * (self.ranks if self.collective in ("allgather", "gather", "alltoall") else 1)

    def busbw(self, seconds: float) -> float:
        """Return the bytes per second on the busiest link, as nccl-tests define it."""
        return self.nbytes / seconds * bus_factor(self.collective, self.ranks)

    def check(self, rank: int, got: Any) -> str | None:
        """Return a description of the errors in the result `got` of `rank`; None if it is correct."""
        return self._compare(got, self._parts(rank), self.result_size(rank))

    def check_operand(self, rank: int, x: Any) -> str | None:
        """Return a description of an illegal change of the input `x` of `rank`; None if it is unchanged."""
        parts = [(0, self.operand_size(rank), 0, self.pattern(rank), np.zeros(1))]
        fault = None if self.in_place else self._compare(x, parts, self.operand_size(rank))
        return fault and f"its input has changed: {fault}"

    def _compare(self, got: Any, parts: Iterable[Part], count: int) -> str | None:
        wrong, worst = 0, ""
        for start, expected, slack in _pieces(parts):
            part = wide(got[start : start + expected.size])
            with np.errstate(invalid="ignore"):  # infinities may be right
                off = np.abs(part - expected)
            bad = ~((part == expected) | (off <= slack))
            if bad.any():
                if not wrong:
                    first = int(bad.argmax())
                    worst = (
                        f"element {start + first} is {part[first]}, expected {expected[first]}"
                        f" (off by {off[first]:.3g}, allowed {np.broadcast_to(slack, off.shape)[first]:.3g})"
                    )
                wrong += int(bad.sum())
        return f"{wrong} of {count} elements are wrong; {worst}" if wrong else None

    def _parts(self, rank: int) -> Iterator[Part]:
        """Yield the parts of the expected result of `rank`."""
        rows = self.rows
        if self.collective in REDUCTIONS:
            if self.result_size(rank):
                values, slack = self._reduce_patterns(rank)
                yield 0, rows, rank * rows if self.collective == "reduce_scatter" else 0, values, slack
        elif self.collective in MESSAGES:
            partner = self.find_partner(rank)
            if partner is not None:
                yield 0, rows, 0, self.pattern(partner), np.zeros(1)
        elif self.collective in RING_CASES:
            yield from self._parts_of_ring(rank)
        elif self.collective in ("bcast", "scatter"):
            yield 0, rows, rank * rows if self.collective == "scatter" else 0, self.pattern(0), np.zeros(1)
        elif self.result_size(rank):
            for source in range(self.ranks if rows else 0):
                offset = rank * rows if self.collective == "alltoall" else 0
                yield source * rows, rows, offset, self.pattern(source), np.zeros(1)

    def _parts_of_ring(self, rank: int) -> Iterator[Part]:
        rows, exact = self.rows, np.zeros(1)
        left, right = self.pattern((rank - 1) % self.ranks), self.pattern((rank + 1) % self.ranks)
        if self.collective == "exchange_halo":
            yield 0, rows, (_LAYERS - 2) * rows, left, exact
            yield rows, (_LAYERS - 2) * rows, rows, self.pattern(rank), exact
            yield (_LAYERS - 1) * rows, rows, rows, right, exact
        elif self.collective.startswith("neighbor"):
            yield 0, rows, rows if self.collective == "neighbor_alltoall" else 0, left, exact
            yield rows, rows, 0, right, exact
        else:
            yield 0, rows, 0, right if self.collective == "get" else left, exact

    def _reduce_patterns(self, rank: int) -> tuple[Wide, Wide]:
        """Return the reduction of the patterns, and its tolerance: some roundings of the sum of magnitudes."""
        ranks = {"scan": range(rank + 1), "exscan": range(rank)}.get(self.collective, range(self.ranks))
        patterns = np.array([self.pattern(one) for one in ranks])
        ufunc = UFUNCS["sum" if self.op == "avg" else self.op]
        if not len(patterns):
            return np.full(1, self._neutral()), np.zeros(1)
        with np.errstate(over="ignore"):
            value, magnitude = ufunc.reduce(patterns), ufunc.reduce(np.abs(patterns))
        if value.dtype == np.int64:
            return value.astype(self.dtype).astype(np.int64), np.zeros(1)
        if self.op == "avg":
            value, magnitude = value / self.ranks, magnitude / self.ranks
        exact = self.op in ("min", "max")
        return value, np.zeros(1) if exact else 4 * (self.ranks + 1) * _EPSILON.get(self.dtype, 2.0**-52) * magnitude

    def _neutral(self) -> Any:
        if self.op in ("sum", "prod"):
            return self.op == "prod"
        sign = 1 if self.op == "min" else -1
        if "int" not in self.dtype:
            return sign * np.inf
        limits = np.iinfo(self.dtype)
        return np.array(limits.max if sign > 0 else limits.min).astype(np.int64)

    def pattern(self, rank: int) -> Wide:
        """Return the pattern that the input of `rank` repeats."""
        return _pattern(self.dtype, self.op == "prod", rank)


def _pieces(parts: Iterable[Part]) -> Iterator[tuple[int, Wide, Wide]]:
    """Split `parts` into pieces of bounded size; yield the start, the values and the tolerance of each."""
    for start, count, offset, values, slack in parts:
        for begin in range(0, count, _PIECE):
            where, many = offset + begin, min(_PIECE, count - begin)
            yield start + begin, tile(values, where, many), tile(slack, where, many)


@lru_cache(maxsize=64)
def _pattern(dtype: str, positive: bool, rank: int) -> Wide:
    rng = np.random.default_rng([20_250_101, rank])
    if "int" in dtype:
        return rng.integers(0, 100, _PERIOD)

    def real() -> Wide:
        return rng.uniform(0.5, 1.5, _PERIOD) if positive else rng.standard_normal(_PERIOD)

    if dtype.startswith("complex"):
        return (real() + 1j * real()).astype(dtype).astype(np.complex128)
    if dtype == "bfloat16":
        # Truncate the bits that bfloat16 does not store.
        return (real().astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return real().astype(dtype).astype(np.float64)


def tile(pattern: Wide, offset: int, count: int) -> Wide:
    """Return `count` elements of the infinite repetition of `pattern`, starting at `offset`."""
    return np.resize(np.roll(pattern, -(offset % pattern.size)), count)


def bus_factor(collective: str, ranks: int) -> float:
    """Return the factor by which nccl-tests multiply bytes per second, for comparison with the speed of a link."""
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    if collective in MESSAGES:
        return 1.0 if collective in AT_ONCE else 2.0
    return (ranks - 1) / ranks if collective in _OF_BLOCKS else 1.0


def wide(array: Any) -> Wide:
    """Copy an array or tensor of any dtype to a numpy array of the oracle's dtype."""
    if isinstance(array, np.ndarray):
        return array.astype(_wide_dtype(array.dtype.name))
    name = str(array.dtype).removeprefix("torch.")
    library: device_arrays.LibraryName = "cupy" if hasattr(array.dtype, "kind") else "torch"
    copied: Wide = device_arrays.arrays(library).on_host(array, _wide_dtype(name))
    return copied


def _wide_dtype(name: str) -> str:
    return "complex128" if name.startswith("complex") else "int64" if "int" in name else "float64"


_ZERO = np.zeros(1, np.uint8)


class Case:
    """The arrays of one rank for a workload. `out` is None where the rank receives nothing. Registered arrays are
    created collectively; CUDA arrays lie on the device of this process."""

    def __init__(self, workload: Workload, rank: int, kind: ArrayKind) -> None:
        self.workload = workload
        self.rank = rank
        self.kind = kind
        self.x = self._array(workload.operand_size(rank))
        # The creation of registered memory is collective, so a rank that receives nothing takes part as well.
        made = self.x if workload.in_place else self._array(workload.result_size(rank))
        self.out = made if workload.result_size(rank) else None
        passes_data = rank == 0 or workload.collective not in ("bcast", "scatter")
        self._input = _get_bytes(self.x) if passes_data and self.on_device is None else None
        self.reset()

    def reset(self) -> None:
        """Fill the input with its pattern and the output with zeros."""
        if self.out is not None:
            self._fill(self.out, np.zeros(self.workload.result_size(self.rank)))
        if self.workload.collective != "bcast" or self.rank == 0:
            self._fill(self.x, tile(self.workload.pattern(self.rank), 0, self.workload.operand_size(self.rank)))

    def rewrite(self) -> None:
        """Write the input in place, without a change. Does nothing on ranks that pass none."""
        if self._input is not None:
            np.bitwise_or(self._input, _ZERO, out=self._input)

    @property
    def on_device(self) -> device_arrays.LibraryName | None:
        """The library of the arrays on a device; None for arrays on the host."""
        where, _, library = self.kind.partition(" ")
        return cast("device_arrays.LibraryName", library) if where == "cuda" else None

    def _array(self, count: int) -> Any:
        if self.on_device is not None:
            return device_arrays.arrays(self.on_device).zeros(count, self.workload.dtype)
        like: Literal["numpy", "torch"] = "torch" if self.kind.endswith("torch") else "numpy"
        dtype: Any
        if like == "torch":
            import torch

            dtype = getattr(torch, self.workload.dtype)
        else:
            dtype = np.dtype(_bfloat16() if self.workload.dtype == "bfloat16" else self.workload.dtype)
        if self.kind != like:
            return mpicoll.empty((count,), dtype, like=like)
        return import_module(like).zeros(count, dtype=dtype)

    def _fill(self, array: Any, values: Wide) -> None:
        if isinstance(array, np.ndarray):
            array[:] = values
        elif self.on_device is not None:
            device_arrays.arrays(self.on_device).fill(array, values)
        else:
            import torch

            array.copy_(torch.from_numpy(values))


def _get_bytes(array: Any) -> npt.NDArray[np.uint8]:
    """Return a view of the bytes of a host array or tensor."""
    if not isinstance(array, np.ndarray):
        array = array.view(import_module("torch").uint8).numpy()
    bytes_of: npt.NDArray[np.uint8] = array.view(np.uint8)
    return bytes_of


def _bfloat16() -> Any:
    try:
        return import_module("ml_dtypes").bfloat16
    except ImportError as error:
        raise SetupError(
            "numpy has no bfloat16 without ml_dtypes; add --like torch, or `pip install ml_dtypes`"
        ) from error
