"""One body for every collective: call it as a row of choices describes, and check the result, the input and `out`.

`rows` gives for a collective the choices (dtype, library, op, algorithm, layout, out, form, shape, communicator, root,
counts) in which every two values of two axes that go together meet at least once; not their whole product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

import mpicoll
from support.data import (
    DTYPES,
    HALVES,
    LAYOUTS,
    LIBRARIES,
    NON_COMMUTATIVE,
    OPS,
    Expected,
    covering,
    dtype_of,
    expected,
    has,
    has_layout,
    laid,
    make_op,
    means,
    neutral,
    numbers,
    random,
    unwrap,
    wrap,
)
from support.ranks import Comms
from support.tiers import take_share

REDUCTIONS = ("allreduce", "reduce", "scan", "exscan", "reduce_scatter")
ROOTED = ("bcast", "reduce", "gather", "scatter")
COUNTED = ("gather", "scatter", "allgather", "reduce_scatter", "alltoall")
COLLECTIVES = (*REDUCTIONS, "bcast", "gather", "scatter", "allgather", "alltoall")

SCALARS = ("python", "scalar")
OUTS = ("none", "given", "strided", "inplace", "overlap")
FORMS = ("call", "background", "plan", "timed")
SHAPES = ((7,), (), (0,), (3, 0), (4, 3), (13, 2, 5), (1,))
MATRICES = ((2, 2), (3, 2, 2))


def algorithm_names(collective: str, *, native: bool) -> list[str | None]:
    """Return all algorithms that may be forced, and None, with some numbers of segments for segmented ones."""
    names: list[str | None] = [None, *(["native"] if native else [])]
    for name, algorithm in mpicoll.schedules.algorithms_of(collective).items():
        names += [name, f"{name}/2", f"{name}/3"] if algorithm.segmented else [name]
    return names


def serves(collective: str, name: str | None, op: str, dtype: str | None = None) -> bool:
    """Return True if the algorithm may be forced with `op` for every number of ranks and root."""
    if name is None:
        return True
    if name == "native":
        return dtype is None or native_serves(op, dtype)
    algorithm = mpicoll.schedules.get(collective, name.partition("/")[0])
    if op in NON_COMMUTATIVE and not algorithm.keeps_order(1 if collective in ROOTED else 0):
        return False
    return op != "user_matmul" or all(algorithm.slots(size)[0] == 1 for size in (1, 2, 3, 4, 5))


DEFECTS = {
    "Open MPI v5.": {"min max": "fd", "sum": "bBhH"},
    "Open MPI v4.": {"min max": "fdLQ", "sum": "bBhH"},
    "MPICH Version: 4.0": {"min max": "fdBHILQ"},
    "MPICH": {"min max": "fd"},
    "Intel(R) MPI": {"min max": "fd"},
}
"""By the beginning of a library's version: reductions that it may compute wrongly, and the dtypes. Whether it does
depends on its build and on the processor: some saturate sums of small integers, compare unsigned integers as signed
ones, or lose a NaN."""


@lru_cache(maxsize=1)
def known_defects() -> set[tuple[str, str]]:
    from mpi4py import MPI

    version = " ".join(MPI.Get_library_version().split())
    wrong = next((wrong for name, wrong in DEFECTS.items() if version.startswith(name)), {})
    return {(op, char) for ops, chars in wrong.items() for op in ops.split() for char in chars}


def native_serves(op: str, dtype: str) -> bool:
    """Return True if MPI's own reduction is right: if it has none of the defects that its version may have."""
    if op.startswith("user_"):
        return False
    if dtype == "bool":
        return True
    computed = {"premul_sum": "sum", "avg": "sum"}.get(op, op)
    work = np.dtype(np.float32) if dtype in HALVES else dtype_of(dtype).newbyteorder("=")
    if (computed, work.char) not in known_defects():
        return True
    return mpicoll.world()._core.transport.find_native_defect("allreduce", computed, work) is None


@lru_cache(maxsize=32)
def rows(collective: str, *, native: bool) -> list[dict[str, Any]]:
    axes: dict[str, Sequence[Any]] = {"dtype": ("float64", *(name for name in DTYPES if name != "float64"))}
    if collective in REDUCTIONS:
        ops = [op for op in OPS if (op, collective) not in {("avg", "scan"), ("avg", "exscan")}]
        axes["op"] = [op for op in ops if op != "user_matmul" or collective != "reduce_scatter"]
    axes["library"] = LIBRARIES
    axes["shape"] = (*SHAPES, *MATRICES)
    axes["layout"] = LAYOUTS
    axes["out"] = OUTS
    axes["form"] = FORMS
    axes["algorithm"] = algorithm_names(collective, native=native)
    axes["comm"] = ("world", "split", "group")
    if collective in ROOTED:
        axes["root"] = ("first", "last", "middle")
    if collective in COUNTED:
        axes["counts"] = ("none", "equal", "uneven", "zeros")
    return covering(axes, lambda row: allowed(collective, row))


def allowed(collective: str, row: dict[str, Any]) -> bool:
    """Return True if the choices made so far are compatible."""
    get = row.get
    op, library, shape, out = get("op"), get("library"), get("shape"), get("out", "none")
    return (
        _reducible(collective, op, library, shape, get("dtype"), get("algorithm"))
        and ("dtype" not in row or library is None or has(library, row["dtype"]))
        and _placed(collective, library, shape, get("layout", "contiguous"), out)
        and _divisible(collective, library, shape, out, get("counts", "none"), get("algorithm"))
    )


def _reducible(collective: str, op: Any, library: Any, shape: Any, dtype: Any, algorithm: Any) -> bool:
    if op is None:
        return True
    if op == "user_matmul" and (library not in (None, "numpy", "torch") or shape not in (None, *MATRICES)):
        return False
    if library == "python" and op == "user_affine" and dtype not in (None, "complex128"):
        return False
    # torch has no arithmetic for these
    if library == "torch" and op.startswith("user_") and dtype in ("uint16", "uint32", "uint64"):
        return False
    if algorithm == "native" and op.startswith("user_"):
        return False
    return (dtype is None or means(op, dtype)) and serves(collective, algorithm, op, dtype)


def _placed(collective: str, library: Any, shape: Any, layout: str, out: str) -> bool:
    if library in SCALARS and (shape not in (None, ()) or layout != "contiguous" or out != "none"):
        return False
    if library in SCALARS and collective in ("scatter", "alltoall", "reduce_scatter"):
        return False
    if library is not None and not has_layout(library, layout, (1,) if shape is None else shape):
        return False
    if shape == () and (layout not in ("contiguous", "readonly") or out in ("strided", "overlap")):
        return False
    if out in ("inplace", "overlap") and layout == "readonly":
        return False
    return out != "overlap" or layout == "contiguous"


def _divisible(collective: str, library: Any, shape: Any, out: str, counts: str, algorithm: Any) -> bool:
    if shape == () and collective in ("scatter", "alltoall", "reduce_scatter"):
        return False
    if counts in ("uneven", "zeros") and (shape in ((), *MATRICES[:0]) or library in SCALARS):
        return False
    if out == "inplace" and collective in ("gather", "allgather", "scatter", "reduce_scatter"):
        return False
    if collective == "alltoall":
        if out == "inplace" and counts in ("uneven", "zeros"):
            return False
        return algorithm not in ("bruck", "native") or counts == "none"
    return True


# --- what a collective takes and gives


@dataclass
class Call:
    """A row on a communicator of `size` ranks, for `rank`."""

    collective: str
    row: dict[str, Any]
    rank: int
    size: int

    @property
    def name(self) -> str:
        return str(self.row["dtype"])

    @property
    def op(self) -> str:
        return str(self.row.get("op", "sum"))

    @property
    def root(self) -> int:
        return {"first": 0, "last": self.size - 1, "middle": self.size // 2}[self.row.get("root", "first")]

    @property
    def receives(self) -> bool:
        return self.collective not in ("reduce", "gather") or self.rank == self.root

    def rows(self) -> list[int]:
        """Return the number of rows of every rank's block."""
        shape = self.row["shape"]
        base = shape[0] if shape else 1
        kind = self.row.get("counts", "none")
        if kind == "uneven":
            return [(2 * rank + base) % 5 for rank in range(self.size)]
        if kind == "zeros":
            return [0 if rank % 2 == 0 else base + 1 for rank in range(self.size)]
        return [base] * self.size

    def matrix(self) -> list[list[int]]:
        """Return the rows that each rank i sends to each rank j in an alltoall."""
        kind, base = self.row["counts"], self.row["shape"][0]
        if kind == "uneven":
            return [[(i + 2 * j + base) % 4 for j in range(self.size)] for i in range(self.size)]
        if kind == "zeros":
            return [[base if (i + j) % 2 else 0 for j in range(self.size)] for i in range(self.size)]
        return [[base] * self.size for _ in range(self.size)]

    def counts(self) -> Any:
        if self.row["counts"] == "none":
            return None
        if self.collective == "alltoall":
            matrix = self.matrix()
            return matrix[self.rank], [row[self.rank] for row in matrix]
        return self.rows()

    def options(self, out: Any) -> dict[str, Any]:
        """Return the keywords of the call for the operation and for the output."""
        options: dict[str, Any] = {}
        if self.collective in ROOTED:
            options["root"] = self.root
        if self.collective in COUNTED:
            options["counts"] = self.counts()
        if out is not None:
            options["out"] = out
        return options

    def input_shape(self, rank: int) -> tuple[int, ...]:
        shape = self.row["shape"]
        if self.collective in ("gather", "allgather") and shape:
            return (self.rows()[rank], *shape[1:])
        if self.collective == "reduce_scatter" or (self.collective == "scatter" and rank == self.root):
            return (sum(self.rows()), *shape[1:])
        if self.collective == "scatter":
            return (self.rows()[rank], *shape[1:])
        if self.collective == "alltoall":
            return (sum(self.matrix()[rank]), *shape[1:])
        return tuple(shape)

    def inputs(self, generation: object) -> list[np.ndarray]:
        """Return every rank's input."""
        return [
            numbers(
                random(self.collective, tuple(self.row.values()), generation, rank),
                self.name,
                self.input_shape(rank),
                self.op,
            )
            for rank in range(self.size)
        ]

    def expect(self, inputs: list[np.ndarray]) -> Expected | None:
        """Return the value that this rank must receive; None if it receives nothing."""
        if not self.receives:
            return None
        if self.collective in REDUCTIONS:
            return self._reduction(inputs)
        if self.collective == "bcast":
            return Expected(inputs[self.root])
        if self.collective in ("gather", "allgather"):
            return Expected(np.concatenate([np.atleast_1d(one) for one in inputs]))
        if self.collective == "scatter":
            start, stop = self._block(self.rows())
            return Expected(inputs[self.root][start:stop])
        parts = []
        for source in range(self.size):
            ends = [0, *accumulate(self.matrix()[source])]
            parts.append(inputs[source][ends[self.rank] : ends[self.rank + 1]])
        return Expected(np.concatenate(parts))

    def _reduction(self, inputs: list[np.ndarray]) -> Expected | None:
        if self.collective == "scan":
            return expected(self.op, inputs[: self.rank + 1], self.name)
        if self.collective == "exscan" and self.rank == 0:
            value = neutral(self.op, self.name)
            return None if value is None else Expected(np.full(inputs[0].shape, value, dtype_of(self.name)))
        if self.collective == "exscan":
            return expected(self.op, inputs[: self.rank], self.name)
        whole = expected(self.op, inputs, self.name)
        return whole.rows(*self._block(self.rows())) if self.collective == "reduce_scatter" else whole

    def _block(self, counts: list[int]) -> tuple[int, int]:
        ends = [0, *accumulate(counts)]
        return ends[self.rank], ends[self.rank + 1]


# --- carrying out


def exercise(collective: str, row: dict[str, Any], comms: Comms) -> None:
    """Run `row` on this rank and check the result, the input and `out`."""
    comm = comms[row["comm"]]
    if comm is None:
        return
    call = Call(collective, row, comm.rank, comm.size)
    try:
        Exercise(call, comm).run()
    except Exception as error:
        # with add_note this would be lost among the ranks' messages
        raise AssertionError(f"{collective} {row} on rank {comm.rank} of {comm.size}: {error!r}") from error


class Exercise:
    def __init__(self, call: Call, comm: mpicoll.Communicator) -> None:
        self.call = call
        self.row = call.row
        self.library = str(self.row["library"])
        self.comm = comm
        self.generation = 0
        self.view = np.empty(0)
        self.x: Any = None
        self.out: Any = None
        self.out_view: np.ndarray | None = None

    def run(self) -> None:
        self.arguments()
        form = self.row["form"]
        if form == "call":
            first = self.once(self.function(""))
            earlier = None
            if first is not None and self.out is None:
                earlier = unwrap(self.library, first, self.call.name, self.shape())
                kept = earlier.tobytes()
            self.renew()
            self.once(self.function(""))
            assert earlier is None or earlier.tobytes() == kept, "a later call wrote into an earlier result"
        elif form == "plan":
            self.plan()
        else:
            timeout = None if form == "background" else 25.0
            self.once(lambda *a, **k: self.request(timeout, *a, **k))

    def function(self, prefix: str, suffix: str = "") -> Any:
        return getattr(mpicoll, f"{prefix}{self.call.collective}{suffix}")

    def request(self, timeout: float | None, *args: Any, **options: Any) -> Any:
        request = self.function("i")(*args, **options)
        assert isinstance(request, mpicoll.Request)
        value = request.wait(timeout)
        assert request.test()
        assert request.wait() is value
        return value

    def plan(self) -> None:
        plan = self.function("", "_init")(*self.positional(), **self.options())
        for turn in range(3):
            self.renew(keep=True)
            if turn == 1:
                plan.start()
                result = plan.wait()
            else:
                result = plan()
            self.check(result)

    def once(self, function: Any) -> Any:
        result = function(*self.positional(), **self.options())
        self.check(result)
        return result

    def positional(self) -> tuple[Any, ...]:
        if self.call.collective not in REDUCTIONS:
            return (self.x,)
        return self.x, make_op(self.call.op, self.comm.rank, self.call.name)

    def options(self) -> dict[str, Any]:
        options = {"algorithm": self.row["algorithm"], **self.call.options(self.out)}
        if self.row["comm"] != "world":
            options["comm"] = self.comm
        return options

    def shape(self) -> tuple[int, ...]:
        want = self.want
        assert want is not None
        return want.value.shape

    def arguments(self) -> None:
        """Create the input, and `out` if the row has one."""
        inputs = self.call.inputs(self.generation)
        mine = inputs[self.comm.rank]
        self.want = self.call.expect(inputs)
        out = self.row["out"] if self.call.receives else "none"
        self.view = laid(mine, self.row["layout"])
        if out == "overlap":
            self._overlapping(mine)
        self.x = wrap(self.library, self.view)
        self.before = self.view.tobytes()
        if out == "inplace":
            self.out_view, self.out = self.view, self.x
        elif out in ("given", "strided"):
            shape = self.want.value.shape if self.want is not None else mine.shape
            garbage = numbers(random("garbage"), self.call.name, shape)
            self.out_view = laid(garbage, "strided" if out == "strided" else "contiguous")
            self.out = wrap(self.library, self.out_view)

    def _overlapping(self, mine: np.ndarray) -> None:
        """Create an `out` that begins within the input and ends one element behind it."""
        shape = self.want.value.shape if self.want is not None else mine.shape
        size = int(np.prod(shape))
        base = numbers(random("garbage"), self.call.name, (max(mine.size, size) + 1,))
        self.view = base[: mine.size].reshape(mine.shape)
        self.view[...] = mine
        self.out_view = base[base.size - size :].reshape(shape)
        self.out = wrap(self.library, self.out_view)

    def renew(self, *, keep: bool = False) -> None:
        """Write new values: to the same memory if `keep`, otherwise to new arrays."""
        self.generation += 1
        if not keep:
            self.out_view, self.out = None, None
            self.arguments()
            return
        if self.library in SCALARS:
            return
        inputs = self.call.inputs(self.generation)
        self.want = self.call.expect(inputs)
        readonly = not self.view.flags.writeable
        self.view.flags.writeable = True
        self.view[...] = inputs[self.comm.rank]
        self.view.flags.writeable = not readonly
        self.before = self.view.tobytes()

    def check(self, result: Any) -> None:
        want = self.want
        if want is None:
            assert result is None
            return
        if self.out_view is None:
            got = unwrap(self.library, result, self.call.name, want.value.shape)
        else:
            assert result is self.out, "out was given, and something else returned"
            got = self.out_view
        want.check(got)
        if self.row["out"] in ("none", "given", "strided"):
            assert self.view.tobytes() == self.before, "the input was changed"
            assert not np.may_share_memory(got, self.view), "the result lies in the input's memory"


def all_rows(collective: str, dtype: str | None = None) -> Iterator[dict[str, Any]]:
    native = mpicoll.world()._core.transport.native is not None
    for row in rows(collective, native=native):
        if dtype is None or row["dtype"] == dtype:
            yield row


def run_rows(collective: str, dtype: str | None = None) -> None:
    """Run all rows of a collective; the body of its test."""
    comms = Comms()
    for row in take_share(list(all_rows(collective, dtype)), mpicoll.world().size):
        exercise(collective, row, comms)
    comms.free()
