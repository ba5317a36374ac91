"""Every collective of torch.distributed with random values, against an oracle that each rank computes for itself.

`ROWS` holds choices (dtype, operation, shape, layout, group, way of waiting, face, mode of autograd, root, sizes) in
which every two values of two axes that go together meet at least once; not their whole product.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as stock
from support.data import (
    COMPLEX,
    FLOATS,
    HALVES,
    INTEGERS,
    Expected,
    covering,
    dtype_of,
    expected,
    numbers,
    random,
    wrap,
)
from support.process_group import BACKEND, barrier_has_timeout, operations
from support.tiers import take_share
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

import mpicoll
import mpicoll.torch as dropin

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("default_group"),
    # torch 2.13 has new names for some collectives; the old ones are tested as well
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
REDUCIBLE = ("bool", *INTEGERS, *HALVES, *FLOATS, *COMPLEX)
OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "prod": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
    "premul_sum": None,
}
"""torch's operations by the oracle's names. That of premul_sum holds a factor and is made for each call."""

AVERAGED = ("int8", "uint8", "int16", "int32", "int64")
"""Integers whose mean torch's face rounds towards zero."""

SHAPES = ((7,), (), (0,), (4, 3), (3, 0, 2), (2, 3, 4, 5), (1,), (20_001,))
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "channels_last", "chunks")


def means(op: str, name: str) -> bool:
    """Whether torch's `op` has a meaning for the dtype `name`."""
    if name == "bool":
        return op not in ("avg", "premul_sum")
    if name in INTEGERS:
        return op != "avg" or name in AVERAGED
    if name in COMPLEX:
        return op in ("sum", "avg", "premul_sum")
    return name in (*HALVES, *FLOATS) and op not in ("band", "bor", "bxor")


def factor(rank: int, name: str) -> float:
    return rank + 2 if name in INTEGERS else 0.5 * (rank + 1)


def make_op(op: str, rank: int, name: str) -> Any:
    """What a caller of rank `rank` passes as ``op``."""
    if op != "premul_sum":
        return OPS[op]
    number = factor(rank, name)
    # torch takes either; a number has to be a float
    return stock._make_nccl_premul_sum(float(number) if rank % 2 else torch.tensor(number))


def reduction(op: str, operands: Sequence[np.ndarray], name: str) -> Expected:
    """The reduction of one operand for each rank, as torch means it."""
    if name == "bool":
        op = {"sum": "lor", "prod": "land"}.get(op, op)
    if op == "premul_sum":
        op = "sum"
        wide = dtype_of(name) if name in INTEGERS else np.complex128 if name in COMPLEX else np.float64
        operands = [one.astype(wide) * np.asarray(factor(rank, name), wide) for rank, one in enumerate(operands)]
    if op == "avg" and name in AVERAGED:
        total = expected("sum", operands, name).value
        count = total.dtype.type(len(operands))
        return Expected((total - np.fmod(total, count)) // count)
    return expected(op, operands, name)


# --- tensors


def values(what: object, name: str, shape: tuple[int, ...], op: str = "sum") -> np.ndarray:
    """The same random values on every rank; the bytes where numpy doesn't have the dtype."""
    rng = random(what)
    return rng.integers(0, 256, shape, np.uint8) if name in FLOAT8 else numbers(rng, name, shape, op)


def tensor_of(name: str, array: np.ndarray) -> torch.Tensor:
    array = array.copy()
    return torch.from_numpy(array).view(getattr(torch, name)) if name in FLOAT8 else wrap("torch", array)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The values, where bfloat16 and float8 are exact in another dtype."""
    plain = tensor.detach().contiguous()
    if str(plain.dtype).removeprefix("torch.") in FLOAT8:
        plain = plain.view(torch.uint8)
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()


def bits(tensor: torch.Tensor) -> bytes:
    return array_of(tensor).tobytes()


class Laid:
    """A tensor within a larger piece of memory, none of which outside of the tensor may change."""

    def __init__(self, whole: torch.Tensor, region: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.whole, self.region = whole, region
        self.tensor = region(whole)

    def keep(self) -> None:
        self.before = self.whole.clone()

    def check_all(self) -> None:
        assert bits(self.before) == bits(self.whole), "an input has changed"

    def check_outside(self) -> None:
        with torch.inference_mode(self.whole.is_inference()), torch.no_grad():
            self.region(self.before).copy_(self.tensor)
        assert bits(self.before) == bits(self.whole), "memory beside an output has changed"


def lay(content: torch.Tensor, layout: str) -> Laid:
    """A copy of `content` that lies in memory as `layout` says."""
    shape = content.shape
    if layout == "transposed":
        made = Laid(content.transpose(0, -1).contiguous(), lambda whole: whole.transpose(0, -1))
    elif layout == "channels_last":
        made = Laid(content.contiguous(memory_format=torch.channels_last), lambda whole: whole)
    elif layout == "strided":
        whole = torch.cat([content, content, content[..., :1]], dim=-1) if content.numel() else content.clone()
        made = Laid(whole, lambda whole: whole[..., 1::2] if shape.numel() else whole)
    elif layout in ("offset", "chunks"):
        flat = content.reshape(-1)
        made = Laid(
            torch.cat([flat[:3], flat, flat[:3]]), lambda whole: whole[min(3, len(flat)) :][: len(flat)].view(shape)
        )
    else:
        made = Laid(content.clone(), lambda whole: whole)
    with torch.no_grad():
        made.tensor.copy_(content)
    return made


# --- a row of choices


@dataclass
class Case:
    """A call on this rank: what it is given, and what it must fill."""

    operation: str
    row: dict[str, Any]
    group: Any
    rank: int = 0
    size: int = 0
    inputs: list[Laid] = field(default_factory=list)
    outputs: list[tuple[Laid, Expected]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.size = stock.get_rank(self.group), stock.get_world_size(self.group)

    @property
    def name(self) -> str:
        return str(self.row["dtype"])

    @property
    def op(self) -> str:
        return str(self.row.get("op", "sum"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.row["shape"])

    @property
    def root(self) -> int:
        return self.size - 1 if self.row["root"] in ("last", "last of group") else 0

    def root_as(self, name: str) -> dict[str, int]:
        """The root as a keyword: `name` for a global rank, or that of the group."""
        if self.row["root"] == "last of group":
            return {f"group_{name}": self.root}
        return {name: stock.get_process_group_ranks(self.group)[self.root]}

    def rows(self, number: int = 0) -> list[int]:
        """Rows of every rank's block."""
        base = self.shape[0] if self.shape else 1
        if self.row["sizes"] == "uneven":
            return [(2 * rank + base + number) % 5 for rank in range(self.size)]
        if self.row["sizes"] == "zeros":
            return [0 if rank % 2 == 0 else base + 1 for rank in range(self.size)]
        return [base] * self.size

    def matrix(self) -> list[list[int]]:
        """The rows that go from i to j."""
        base = self.shape[0] if self.shape else 1
        if self.row["sizes"] == "uneven":
            return [[(i + 2 * j + base) % 4 for j in range(self.size)] for i in range(self.size)]
        if self.row["sizes"] == "zeros":
            return [[base if (i + j) % 2 else 0 for j in range(self.size)] for i in range(self.size)]
        return [[base] * self.size for _ in range(self.size)]

    def shape_of(self, rows: int) -> tuple[int, ...]:
        return (rows, *self.shape[1:]) if self.shape or self.row["sizes"] != "even" else ()

    # what is passed

    def values(self, shape: tuple[int, ...], *what: object) -> np.ndarray:
        return values((self.operation, *self.row.values(), *what), self.name, shape, self.op)

    def everyone(self, shape: tuple[int, ...], *what: object) -> list[np.ndarray]:
        """Values of the same shape for each rank."""
        return [self.values(shape, rank, *what) for rank in range(self.size)]

    def reduced(self, operands: Sequence[np.ndarray]) -> Expected:
        return reduction(self.op, operands, self.name)

    def reduce_op(self) -> Any:
        return make_op(self.op, self.rank, self.name)

    def _lay(self, content: Sequence[np.ndarray], *, is_output: bool) -> list[Laid]:
        tensors = [tensor_of(self.name, one) for one in content]
        layout = self.row["layout"]
        if layout == "chunks" and len(tensors) > 1:
            ends = [0, *accumulate(one.numel() for one in tensors)]
            whole = torch.cat([one.reshape(-1) for one in tensors])
            laid = [
                Laid(whole, lambda whole, i=i: whole[ends[i] : ends[i + 1]].view(tensors[i].shape))
                for i in range(len(tensors))
            ]
        else:
            laid = [lay(one, layout if fits(layout, one.shape) else "contiguous") for one in tensors]
        mode = self.row["mode"]
        if mode == "no_grad" or (mode == "grad" and not is_output):
            for one in laid:
                one.tensor.requires_grad_(one.tensor.is_floating_point() and self.name not in FLOAT8)
        return laid

    def give(self, *content: np.ndarray) -> list[torch.Tensor]:
        """Inputs, which must not change."""
        laid = self._lay(content, is_output=False)
        self.inputs += laid
        return [one.tensor for one in laid]

    def fill(self, *wanted: Expected, content: Sequence[np.ndarray] = ()) -> list[torch.Tensor]:
        """Outputs, with garbage or `content` in them."""
        garbage = content or [self.values(one.value.shape, "garbage") for one in wanted]
        laid = self._lay(garbage, is_output=True)
        self.outputs += zip(laid, wanted, strict=True)
        return [one.tensor for one in laid]

    # what is called

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        if self.row["mode"] == "inference":
            return torch.inference_mode()
        return torch.no_grad() if self.row["mode"] == "no_grad" else contextlib.nullcontext()

    def call(self, *args: Any, **options: Any) -> None:
        face = dropin if self.row["face"] == "drop-in" else stock
        self.launch(
            lambda async_op: getattr(face, self.operation)(*args, group=self.group, async_op=async_op, **options)
        )

    def launch(self, function: Callable[[bool], Any]) -> None:
        for one in (*self.inputs, *(laid for laid, _ in self.outputs)):
            one.keep()
        way = self.row["way"]
        work = function(way != "sync")
        if way == "sync":
            assert work is None
        elif way == "wait":
            assert work.wait() is not False
        elif way == "future":
            (work.get_future() if hasattr(work, "get_future") else work).wait()
        else:
            del work
            # operations of a group complete in their order
            stock.barrier(self.group)

    def check(self) -> None:
        for one in self.inputs:
            one.check_all()
        for number, (_, want) in enumerate(self.outputs):
            got = array_of(self.outputs[number][0].tensor)
            assert got.shape == want.value.shape
            want.check(got, f"output {number}")
        for laid in [laid for laid, _ in self.outputs]:
            if not any(laid.whole is other.whole for other, _ in self.outputs if other is not laid):
                laid.check_outside()


def fits(layout: str, shape: Sequence[int]) -> bool:
    least = {"transposed": 2, "strided": 1, "channels_last": 4}.get(layout, 0)
    return len(shape) == 4 if layout == "channels_last" else len(shape) >= least


@lru_cache(maxsize=2)
def rows_of(kind: str) -> list[dict[str, Any]]:
    axes: dict[str, Sequence[Any]] = {"dtype": REDUCIBLE if kind == "reduce" else (*REDUCIBLE, *FLOAT8)}
    if kind == "reduce":
        axes["op"] = tuple(OPS)
    axes["shape"] = SHAPES
    axes["layout"] = LAYOUTS
    axes["group"] = ("world", "part", "reversed", "one")
    axes["way"] = ("sync", "wait", "future", "drop")
    axes["face"] = ("stock", "drop-in")
    axes["mode"] = ("plain", "grad", "no_grad", "inference")
    axes["root"] = ("first", "last", "last of group")
    axes["sizes"] = ("even", "uneven", "zeros")
    axes["stack"] = (False, True)

    def allowed(row: dict[str, Any]) -> bool:
        if "op" in row and "dtype" in row and not means(row["op"], row["dtype"]):
            return False
        if "shape" in row and "layout" in row and not fits(row["layout"], row["shape"]):
            return False
        return not (row.get("shape") == (20_001,) and row.get("dtype") == "complex128")

    return covering(axes, allowed)


# --- the collectives


def broadcast(case: Case) -> None:
    everyone = case.everyone(case.shape)
    (tensor,) = case.fill(Expected(everyone[case.root]), content=[everyone[case.rank]])
    case.call(tensor, **case.root_as("src"))


def all_reduce(case: Case) -> None:
    everyone = case.everyone(case.shape)
    (tensor,) = case.fill(case.reduced(everyone), content=[everyone[case.rank]])
    case.call(tensor, case.reduce_op())


def all_reduce_coalesced(case: Case) -> None:
    parts = [case.everyone(case.shape_of(rows), number) for number, rows in enumerate(case.rows())]
    parts.append(case.everyone((3,), "last"))
    tensors = case.fill(*map(case.reduced, parts), content=[part[case.rank] for part in parts])
    case.call(tensors, case.reduce_op())


def reduce_(case: Case) -> None:
    everyone = case.everyone(case.shape)
    if case.rank == case.root:
        (tensor,) = case.fill(case.reduced(everyone), content=[everyone[case.rank]])
    else:
        (tensor,) = case.give(everyone[case.rank])
    case.call(tensor, op=case.reduce_op(), **case.root_as("dst"))


def gather(case: Case) -> None:
    everyone = case.everyone(case.shape)
    (tensor,) = case.give(everyone[case.rank])
    outputs = case.fill(*map(Expected, everyone)) if case.rank == case.root else None
    case.call(tensor, outputs, **case.root_as("dst"))


def scatter(case: Case) -> None:
    parts = case.everyone(case.shape)
    (output,) = case.fill(Expected(parts[case.rank]))
    case.call(output, case.give(*parts) if case.rank == case.root else None, **case.root_as("src"))


def all_gather(case: Case) -> None:
    everyone = [case.values(case.shape_of(rows), rank) for rank, rows in enumerate(case.rows())]
    outputs = case.fill(*map(Expected, everyone))
    case.call(outputs, *case.give(everyone[case.rank]))


def all_gather_coalesced(case: Case) -> None:
    everyone = [[case.values(case.shape, rank), case.values((3,), rank, "second")] for rank in range(case.size)]
    outputs = [case.fill(*map(Expected, of)) for of in everyone]
    case.call(outputs, case.give(*everyone[case.rank]))


def _whole(case: Case, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The blocks as one array: in a new dimension, or in the first one."""
    return np.stack(blocks) if case.row["stack"] or not case.shape else np.concatenate(blocks)


def all_gather_into_tensor(case: Case) -> None:
    everyone = case.everyone(case.shape)
    (output,) = case.fill(Expected(_whole(case, everyone)))
    case.call(output, *case.give(everyone[case.rank]))


def reduce_scatter(case: Case) -> None:
    parts = [case.everyone(case.shape_of(rows), number) for number, rows in enumerate(case.rows())]
    (output,) = case.fill(case.reduced(parts[case.rank]))
    case.call(output, case.give(*(part[case.rank] for part in parts)), case.reduce_op())


def reduce_scatter_tensor(case: Case) -> None:
    parts = [case.everyone(case.shape, number) for number in range(case.size)]
    (output,) = case.fill(case.reduced(parts[case.rank]))
    case.call(output, *case.give(_whole(case, [part[case.rank] for part in parts])), case.reduce_op())


def all_to_all(case: Case) -> None:
    matrix = case.matrix()
    blocks = [[case.values(case.shape_of(rows), i, j) for j, rows in enumerate(line)] for i, line in enumerate(matrix)]
    outputs = case.fill(*(Expected(line[case.rank]) for line in blocks))
    case.call(outputs, case.give(*blocks[case.rank]))


def all_to_all_single(case: Case) -> None:
    matrix = case.matrix()
    blocks = [
        [case.values((rows, *case.shape[1:]), i, j) for j, rows in enumerate(line)] for i, line in enumerate(matrix)
    ]
    (output,) = case.fill(Expected(np.concatenate([line[case.rank] for line in blocks])))
    (tensor,) = case.give(np.concatenate(blocks[case.rank]))
    if case.row["sizes"] == "even":
        case.call(output, tensor)
    else:
        case.call(output, tensor, [line[case.rank] for line in matrix], matrix[case.rank])


def coalesced_all_reduce(case: Case) -> None:
    parts = [case.everyone(case.shape), case.everyone((5,), "second")]
    tensors = case.fill(*map(case.reduced, parts), content=[part[case.rank] for part in parts])
    face = dropin if case.row["face"] == "drop-in" else stock
    case.launch(
        _together(case, [lambda one=one: face.all_reduce(one, case.reduce_op(), case.group) for one in tensors])
    )


def coalesced_all_gather(case: Case) -> None:
    everyone = [case.everyone(case.shape), case.everyone((5,), "second")]
    outputs = case.fill(*(Expected(np.stack(one)) for one in everyone))
    inputs = case.give(*(one[case.rank] for one in everyone))
    face = dropin if case.row["face"] == "drop-in" else stock
    pairs = zip(outputs, inputs, strict=True)
    case.launch(_together(case, [lambda pair=pair: face.all_gather_single(*pair, case.group) for pair in pairs]))


def coalesced_reduce_scatter(case: Case) -> None:
    shapes = (case.shape, (5,))
    parts = [[case.everyone(shape, i, j) for j in range(case.size)] for i, shape in enumerate(shapes)]
    outputs = case.fill(*(case.reduced(part[case.rank]) for part in parts))
    inputs = case.give(*(np.stack([one[case.rank] for one in part]) for part in parts))
    face = dropin if case.row["face"] == "drop-in" else stock
    op = case.reduce_op()
    pairs = zip(outputs, inputs, strict=True)
    case.launch(
        _together(case, [lambda pair=pair: face.reduce_scatter_single(*pair, op, case.group) for pair in pairs])
    )


def _together(case: Case, calls: Sequence[Callable[[], Any]]) -> Callable[[bool], Any]:
    def run(async_op: bool) -> Any:
        with _coalescing_manager(case.group, async_ops=async_op) as manager:
            for one in calls:
                one()
        return manager if async_op else None

    return run


MOVES = {
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "all_gather": all_gather,
    "all_gather_coalesced": all_gather_coalesced,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_single": all_gather_into_tensor,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "coalesced_all_gather": coalesced_all_gather,
}
REDUCTIONS = {
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "reduce": reduce_,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter_single": reduce_scatter_tensor,
    "coalesced_all_reduce": coalesced_all_reduce,
    "coalesced_reduce_scatter": coalesced_reduce_scatter,
}


def exercise(operation: str, body: Callable[[Case], None], row: dict[str, Any], group: Any) -> None:
    """Carry out `row` on this rank, and look at everything that may be wrong."""
    if group is stock.GroupMember.NON_GROUP_MEMBER:
        return
    case = Case(operation, row, group)
    try:
        with case.mode():
            body(case)
            case.check()
    except Exception as error:
        # with add_note this would be lost among the ranks' messages
        raise AssertionError(f"{operation} {row} on rank {case.rank} of {case.size}: {error!r}") from error


@pytest.mark.every_size
@pytest.mark.parametrize("operation", MOVES)
def test_moves(operation: str, groups: dict[str, Any]) -> None:
    for row in take_share(rows_of("move"), stock.get_world_size()):
        exercise(operation, MOVES[operation], row, groups[row["group"]])


@pytest.mark.every_size
@pytest.mark.parametrize("operation", REDUCTIONS)
def test_reductions(operation: str, groups: dict[str, Any]) -> None:
    for row in take_share(rows_of("reduce"), stock.get_world_size()):
        exercise(operation, REDUCTIONS[operation], row, groups[row["group"]])


# --- every operation on every dtype


@pytest.mark.parametrize("face", ["stock", "drop-in"])
def test_every_operation_on_every_dtype(face: str) -> None:
    """Those that have no meaning are refused before any message leaves."""
    all_reduce = (dropin if face == "drop-in" else stock).all_reduce
    rank, size = stock.get_rank(), stock.get_world_size()
    for name in (*REDUCIBLE, *FLOAT8):
        for op in OPS:
            everyone = [values((name, op, other), name, (11,), op) for other in range(size)]
            tensor = tensor_of(name, everyone[rank])
            if means(op, name):
                all_reduce(tensor, make_op(op, rank, name))
                reduction(op, everyone, name).check(array_of(tensor), (name, op))
                continue
            # c10d itself refuses complex numbers, without a word on the rank
            words = "complex" if name in COMPLEX else rf"all_?reduce.*{op}.*{name}.*rank {rank}"
            with pytest.raises(ValueError if name in COMPLEX else mpicoll.DTypeError, match=words):
                all_reduce(tensor, make_op(op, rank, name))
            np.testing.assert_array_equal(array_of(tensor), everyone[rank])
    _still_works()


def _still_works() -> None:
    """Nothing is left over of what came before."""
    tensor = torch.tensor([stock.get_rank() + 1])
    stock.all_reduce(tensor)
    size = stock.get_world_size()
    assert tensor.item() == size * (size + 1) // 2


def test_half_precision_is_added_in_float32() -> None:
    """Rounded at each step, 1 + 2**-11 + 2**-11 would stay 1."""
    size = stock.get_world_size()
    for dtype, small in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        tensor = torch.tensor([1.0 if stock.get_rank() == 0 else small] * 3, dtype=dtype)
        stock.all_reduce(tensor)
        want = torch.tensor([1.0 + small * (size - 1)] * 3).to(dtype)
        assert torch.equal(tensor, want)


# --- what ranks may choose


@pytest.mark.parametrize("face", ["stock", "drop-in"])
def test_other_algorithms(face: str, groups: dict[str, Any]) -> None:
    """Chosen for a block of calls, native ones included."""
    dist = dropin if face == "drop-in" else stock
    chosen = {
        "allreduce": "ring",
        "bcast": "chain/2",
        "allgather": "bruck",
        "reduce_scatter": "pairwise",
        "alltoall": "bruck",
    }
    for group in (groups["world"], groups["reversed"]):
        rank, size = stock.get_rank(group), stock.get_world_size(group)
        for async_op in (False, True):
            reduced, cast = torch.full((9,), rank + 1.0), torch.arange(9) + rank
            gathered, scattered, exchanged = torch.zeros(2 * size), torch.zeros(2), torch.zeros(2 * size)
            mine = torch.arange(2.0 * size) + 100 * rank
            with mpicoll.algorithms(**chosen):
                works = [
                    dist.all_reduce(reduced, group=group, async_op=async_op),
                    dist.broadcast(cast, group=group, async_op=async_op, group_src=size - 1),
                    dist.all_gather_single(gathered, mine[:2], group, async_op),
                    dist.reduce_scatter_single(scattered, mine, group=group, async_op=async_op),
                    dist.all_to_all_single(exchanged, mine, group=group, async_op=async_op),
                    dist.barrier(group, async_op),
                ]
            for work in works:
                assert work.wait() if async_op else work is None
            everyone = torch.stack([torch.arange(2.0 * size) + 100 * other for other in range(size)])
            assert torch.equal(reduced, torch.full((9,), size * (size + 1) / 2))
            assert torch.equal(cast, torch.arange(9) + size - 1)
            assert torch.equal(gathered, everyone[:, :2].flatten())
            assert torch.equal(scattered, everyone.sum(0)[2 * rank : 2 * rank + 2])
            assert torch.equal(exchanged, everyone[:, 2 * rank : 2 * rank + 2].flatten())


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
def test_coalescing_of_anything(async_ops: bool) -> None:
    """With a device, what torch does not know how to coalesce goes through as well."""
    rank, size = stock.get_rank(), stock.get_world_size()
    received, cast, reduced = torch.zeros(3), torch.full((2,), float(rank)), torch.tensor([rank + 1.0])
    with _coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
        stock.irecv(received, (rank - 1) % size)
        stock.isend(torch.full((3,), float(rank)), (rank + 1) % size)
        stock.broadcast(cast, size - 1, async_op=True)
        stock.all_reduce(reduced)
    if async_ops:
        manager.wait()
    assert received.tolist() == [(rank - 1) % size] * 3
    assert cast.tolist() == [size - 1] * 2
    assert reduced.item() == size * (size + 1) / 2


by_dispatcher = pytest.mark.skipif(BACKEND, reason="torch passes copies of negated tensors to all backends")


def _negated(value: float) -> torch.Tensor:
    """What torch remembers as the negative of something without having carried it out."""
    made = torch._neg_view(torch.full((4,), -value))
    assert made.is_neg()
    return made


@pytest.mark.parametrize("dist", [stock, dropin], ids=["stock", "drop-in"])
@by_dispatcher
def test_lazy_negation(dist: Any) -> None:
    rank, size = stock.get_rank(), stock.get_world_size()
    everyone = torch.arange(1.0, size + 1)
    output = torch._neg_view(torch.zeros(4 * size))
    dist.all_gather_single(output, _negated(rank + 1.0))
    assert torch.equal(output.resolve_neg(), everyone.repeat_interleave(4))
    outputs = [_negated(0.0) for _ in range(size)]
    dist.all_gather(outputs, _negated(rank + 1.0))
    assert [one[3].item() for one in outputs] == everyone.tolist()
    output = torch._neg_view(torch.zeros(1))
    dist.reduce_scatter_single(output, _negated(rank + 1.0)[:1].expand(size))
    assert output.item() == everyone.sum()


@pytest.mark.parametrize("dist", [stock, dropin], ids=["stock", "drop-in"])
@by_dispatcher
def test_lazy_negation_in_place(dist: Any) -> None:
    rank, size = stock.get_rank(), stock.get_world_size()
    tensor = _negated(rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 4
    tensor = _negated(rank + 1.0)
    dist.broadcast(tensor, size - 1)
    assert tensor.tolist() == [size] * 4
    received = _negated(0.0)
    send = dist.isend(_negated(rank + 1.0), (rank + 1) % size)
    dist.irecv(received, (rank - 1) % size).wait()
    send.wait()
    assert received.tolist() == [(rank - 1) % size + 1] * 4
    total = torch.full((2,), complex(rank, -1)).conj()
    dist.reduce(total, 0)
    wanted = complex(size * (size - 1) / 2, size) if rank == 0 else complex(rank, 1)
    assert total.tolist() == [wanted] * 2


# --- tensors of one element, or of none, which are contiguous with any stride


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("face", ["stock", "drop-in"])
def test_the_stride_of_an_only_element(face: str, count: int, dtype: torch.dtype) -> None:
    dist = dropin if face == "drop-in" else stock
    rank, size = stock.get_rank(), stock.get_world_size()

    def make(value: int) -> torch.Tensor:
        made = torch.full((9,), value, dtype=dtype)[1::4][:count]
        assert made.stride() == (4,)
        return made

    def give() -> torch.Tensor:
        return make(rank + 1)

    def check(got: torch.Tensor, value: int) -> None:
        assert got.tolist() == [value] * got.numel()

    total = size * (size + 1) // 2
    for turn in range(3):  # later ones are repeated calls
        for root in {0, size - 1}:
            tensor = give()
            dist.broadcast(tensor, root)
            check(tensor, root + 1)
            tensor = give()
            dist.reduce(tensor, root)
            check(tensor, total if rank == root else rank + 1)
            outputs = [make(0) for _ in range(size)]
            dist.gather(give(), outputs if rank == root else None, dst=root)
            for other, output in enumerate(outputs):
                check(output, other + 1 if rank == root else 0)
            output = make(0)
            dist.scatter(output, [make(other + 1) for other in range(size)] if rank == root else None, src=root)
            check(output, rank + 1)
        tensor = give()
        dist.all_reduce(tensor)
        check(tensor, total)
        output = torch.zeros(size * count, dtype=dtype)
        dist.all_gather_single(output, give())
        assert output.tolist() == [other + 1 for other in range(size)] * count
        output = make(0)
        dist.reduce_scatter_single(output, torch.full((size * count,), rank + 1, dtype=dtype))
        check(output, total)
        outputs = [make(0) for _ in range(size)]
        dist.all_to_all(outputs, [give() for _ in range(size)])
        for other, output in enumerate(outputs):
            check(output, other + 1)
        output = make(0)
        send = dist.isend(give(), (rank + 1) % size, tag=turn)
        dist.irecv(output, (rank - 1) % size, tag=turn).wait()
        send.wait()
        check(output, (rank - 1) % size + 1)


# --- outputs that a backward pass needs


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("face", ["stock", "drop-in"])
def test_autograd_notices_outputs(face: str, async_op: bool) -> None:
    dist = dropin if face == "drop-in" else stock
    size = stock.get_world_size()
    x, whole, part, parts = torch.ones(4), torch.zeros(4 * size), torch.zeros(4), [torch.zeros(4) for _ in range(size)]
    for _ in range(3):  # later ones are repeated calls
        for outputs, call in (
            ([whole], lambda: dist.all_gather_single(whole, x, async_op=async_op)),
            (parts, lambda: dist.all_gather(parts, x, async_op=async_op)),
            ([part], lambda: dist.reduce_scatter_single(part, torch.ones(4 * size), async_op=async_op)),
            ([whole], lambda: dist.all_to_all_single(whole, torch.ones(4 * size), async_op=async_op)),
        ):
            before = [one._version for one in outputs]
            work = call()
            if async_op:
                work.wait()
            assert all(one._version > version for one, version in zip(outputs, before, strict=True))


# --- inference mode


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("face", ["stock", "drop-in"])
def test_tensors_of_inference_mode_outside_of_it(way: str, face: str) -> None:
    dist = dropin if face == "drop-in" else stock
    rank, size = stock.get_rank(), stock.get_world_size()

    def make() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [torch.full((2, 3), rank + 1.0), torch.full((3, 2), rank + 1.0).t()]

    total = size * (size + 1) / 2
    for tensor in make():
        work = dist.all_reduce(tensor, async_op=way == "async")
        assert work is None or work.wait()
        assert tensor.is_inference()
        assert torch.equal(tensor.clone(), torch.full((2, 3), total))
    for tensor in make():
        outputs = [make()[1] for _ in range(size)]
        work = dist.all_gather(outputs, tensor, async_op=way == "async")
        assert work is None or work.wait()
        for other, output in enumerate(outputs):
            assert torch.equal(output.clone(), torch.full((2, 3), other + 1.0))


# --- barrier


@pytest.mark.parametrize("name", ["world", "part", "reversed", "one"])
@pytest.mark.parametrize(
    "way",
    [
        *("plain", "async", "drop-in"),
        *(pytest.param(way, marks=barrier_has_timeout) for way in ("timeout", "drop-in timeout")),
    ],
)
def test_barrier_waits_for_the_last(name: str, way: str, groups: dict[str, Any]) -> None:
    group = groups[name]
    if group is stock.GroupMember.NON_GROUP_MEMBER:
        return
    time.sleep(0.02 * stock.get_rank(group))
    came = time.monotonic()
    dist = dropin if way.startswith("drop-in") else stock
    if way == "async":
        assert dist.barrier(group, async_op=True).wait()
    else:
        options = {"timeout": timedelta(seconds=20)} if way.endswith("timeout") else {}
        assert dist.barrier(group, **options) is None
    left = torch.tensor(time.monotonic(), dtype=torch.float64)
    last = torch.tensor(came, dtype=torch.float64)
    # the ranks share a machine, and with it the clock
    stock.all_reduce(last, ReduceOp.MAX, group)
    assert left >= last


@barrier_has_timeout
def test_barrier_is_given_up_after_its_timeout() -> None:
    """The barrier itself stays pending, and completes once everybody has called it."""
    if stock.get_world_size() < 2:
        pytest.skip("needs two ranks")
    # the ranks come together first, so that the last one is late by its own pause alone
    stock.barrier()
    if stock.get_rank() == stock.get_world_size() - 1:
        time.sleep(0.6)
        stock.barrier()
    else:
        with pytest.raises(mpicoll.Timeout, match=r"barrier"):
            stock.barrier(timeout=timedelta(seconds=0.05))
    _still_works()


def test_monitored_barrier(groups: dict[str, Any]) -> None:
    for group in groups.values():
        if group is not stock.GroupMember.NON_GROUP_MEMBER:
            stock.monitored_barrier(group, timeout=timedelta(seconds=20))


# --- objects


def _object(rank: int) -> dict[str, Any]:
    """Of another size on each rank."""
    return {"rank": rank, "text": "x" * 1000 * rank, "tensor": torch.arange(rank), "set": frozenset(range(rank))}


def _same(one: Any, other: Any) -> bool:
    return (
        one.keys() == other.keys()
        and torch.equal(one["tensor"], other["tensor"])
        and all(one[key] == other[key] for key in one if key != "tensor")
    )


@pytest.mark.parametrize("name", ["world", "part", "reversed", "one"])
@pytest.mark.parametrize("dist", [stock, dropin], ids=["stock", "drop-in"])
def test_objects(name: str, dist: Any, groups: dict[str, Any]) -> None:
    group = groups[name]
    if group is stock.GroupMember.NON_GROUP_MEMBER:
        return
    rank, size = stock.get_rank(group), stock.get_world_size(group)
    last = stock.get_process_group_ranks(group)[-1]
    everyone = [_object(other) for other in range(size)]

    found: list[Any] = [None] * size
    dist.all_gather_object(found, _object(rank), group)
    assert all(map(_same, found, everyone))

    found = [None] * size if rank == size - 1 else None
    dist.gather_object(_object(rank), found, last, group)
    assert found is None or all(map(_same, found, everyone))

    found = list(map(_object, range(size))) if rank == size - 1 else [None] * size
    dist.broadcast_object_list(found, group=group, group_src=size - 1)
    assert all(map(_same, found, everyone))

    found = [None]
    dist.scatter_object_list(found, everyone if rank == size - 1 else None, last, group)
    assert _same(found[0], everyone[rank])


# --- sparse tensors


SPARSE = {
    "matrix": ((5, 4), 2),
    "rows of a matrix": ((6, 3), 1),
    "cube": ((3, 4, 2), 3),
    "hybrid": ((3, 4, 2, 2), 2),
    "empty": ((4, 0, 3), 2),
}
"""Shape, and how many dimensions of it are sparse."""


def _sparse(what: object, rank: int, shape: tuple[int, ...], sparse_dims: int, dtype: torch.dtype) -> torch.Tensor:
    """With as many entries as only this rank has, some of them twice; rank 0 has none."""
    rng = random(what, rank)
    entries = 0 if 0 in shape else 3 * rank
    indices = [torch.from_numpy(rng.integers(0, extent, entries)) for extent in shape[:sparse_dims]]
    content = torch.from_numpy(rng.integers(-8, 8, (entries, *shape[sparse_dims:])))
    if dtype.is_floating_point:
        content = content / 4
    whole = torch.stack(indices)
    return torch.sparse_coo_tensor(whole, content.to(dtype), shape, check_invariants=True)


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_all_reduce(kind: str, op: str, way: str, groups: dict[str, Any]) -> None:
    shape, sparse_dims = SPARSE[kind]
    for name, dtype in itertools.product(
        ("world", "part", "reversed", "one"),
        (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64),
    ):
        group = groups[name]
        if group is stock.GroupMember.NON_GROUP_MEMBER or (op == "avg" and not dtype.is_floating_point):
            continue
        rank, size = stock.get_rank(group), stock.get_world_size(group)
        everyone = [_sparse((kind, dtype), other, shape, sparse_dims, dtype) for other in range(size)]
        tensor = everyone[rank].clone()
        work = stock.all_reduce(tensor, OPS[op], group, async_op=way == "async")
        assert work is None or work.wait()
        # all numbers are small multiples of 1/4, so that sums are exact in every dtype
        want = reduce(torch.add, [one.to_dense().double() for one in everyone])
        assert tensor.dtype is dtype
        assert (tensor.sparse_dim(), tensor.dense_dim()) == (sparse_dims, len(shape) - sparse_dims)
        assert torch.equal(tensor.to_dense(), (want / size if op == "avg" else want).to(dtype))


# --- errors


class Wrong(NamedTuple):
    """A call that can't be right: what it raises, and what the message says besides the rank."""

    call: Callable[[Any, int, int], Any]
    """Of the face, this rank and the number of ranks."""
    error: type[Exception]
    words: str
    ranks: int = 1
    """How many it takes to be wrong."""


def _ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


def _meta(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="meta")


def _expanded(*shape: int) -> torch.Tensor:
    return torch.ones(1).expand(shape)


ASYNC = {"async_op": True}
PROC_NULL = int(mpicoll.PROC_NULL)

WRONG = {
    "all_reduce meta": Wrong(lambda d, r, p: d.all_reduce(_meta(3)), mpicoll.DeviceError, "all_?reduce"),
    "all_reduce expanded": Wrong(lambda d, r, p: d.all_reduce(_expanded(3)), mpicoll.ShapeError, "all_?reduce"),
    "all_reduce async": Wrong(lambda d, r, p: d.all_reduce(_expanded(3), **ASYNC), mpicoll.ShapeError, "all_?reduce"),
    "all_reduce no tensor": Wrong(lambda d, r, p: d.all_reduce([1.0]), TypeError, ""),
    "all_reduce op": Wrong(lambda d, r, p: d.all_reduce(_ones(3), "sum"), TypeError, ""),
    "all_reduce float8": Wrong(
        lambda d, r, p: d.all_reduce(_ones(3).to(torch.float8_e4m3fn)), mpicoll.DTypeError, "all_?reduce.*float8_e4m3fn"
    ),
    "broadcast meta": Wrong(lambda d, r, p: d.broadcast(_meta(3), 0), mpicoll.DeviceError, "broadcast|bcast"),
    "broadcast expanded": Wrong(lambda d, r, p: d.broadcast(_expanded(3), 0), mpicoll.ShapeError, "broadcast|bcast"),
    "broadcast root": Wrong(
        lambda d, r, p: d.broadcast(_ones(3), p), mpicoll.RankError, "broadcast: src must be a rank"
    ),
    "broadcast negative root": Wrong(
        lambda d, r, p: d.broadcast(_ones(3), -1), mpicoll.RankError, "broadcast: src.*-1"
    ),
    "broadcast async root": Wrong(
        lambda d, r, p: d.broadcast(_ones(3), p, **ASYNC), mpicoll.RankError, "broadcast: src must be a rank"
    ),
    "broadcast sparse": Wrong(
        lambda d, r, p: d.broadcast(_ones(3).to_sparse(), 0), mpicoll.DTypeError, "broadcast|bcast"
    ),
    "reduce root": Wrong(lambda d, r, p: d.reduce(_ones(3), p), mpicoll.RankError, "reduce: dst must be a rank"),
    "reduce expanded": Wrong(lambda d, r, p: d.reduce(_expanded(3), r), mpicoll.ShapeError, "reduce"),
    "gather root": Wrong(lambda d, r, p: d.gather(_ones(3), None, p), mpicoll.RankError, "gather: dst must be a rank"),
    "gather list": Wrong(
        lambda d, r, p: d.gather(_ones(3), [_ones(3)] * (p + 1), r), mpicoll.ShapeError, "gather: the output list"
    ),
    "gather sizes": Wrong(
        lambda d, r, p: d.gather(_ones(3), [_ones(3)] * (p - 1) + [_ones(4)], r), mpicoll.ShapeError, "gather.*4.*3"
    ),
    "gather dtypes": Wrong(lambda d, r, p: d.gather(_ones(3), [_ones(3).long()] * p, r), ValueError, ""),
    "scatter list": Wrong(
        lambda d, r, p: d.scatter(_ones(3), [_ones(3)] * (p + 1), r), mpicoll.ShapeError, "scatter: the input list"
    ),
    "scatter sizes": Wrong(
        lambda d, r, p: d.scatter(_ones(3), [_ones(3)] * (p - 1) + [_ones(2)], r), mpicoll.ShapeError, "scatter.*2.*3"
    ),
    "scatter expanded": Wrong(
        lambda d, r, p: d.scatter(_expanded(3), [_ones(3)] * p, r), mpicoll.ShapeError, "scatter"
    ),
    "scatter root": Wrong(
        lambda d, r, p: d.scatter(_ones(3), None, p), mpicoll.RankError, "scatter: src must be a rank"
    ),
    "all_gather list": Wrong(
        lambda d, r, p: d.all_gather([_ones(3)] * (p + 1), _ones(3)), mpicoll.ShapeError, "all_gather: the output list"
    ),
    "all_gather async list": Wrong(
        lambda d, r, p: d.all_gather([], _ones(3), **ASYNC), mpicoll.ShapeError, "all_gather: the output list"
    ),
    "all_gather sizes": Wrong(
        lambda d, r, p: d.all_gather([_ones(3)] * p, _ones(2)), mpicoll.ShapeError, "all_gather.*2.*3"
    ),
    "all_gather dtypes": Wrong(lambda d, r, p: d.all_gather([_ones(3).int()] * p, _ones(3)), ValueError, ""),
    "all_gather expanded": Wrong(
        lambda d, r, p: d.all_gather([_expanded(3)] * p, _ones(3)), mpicoll.ShapeError, "all_gather"
    ),
    "all_gather meta": Wrong(
        lambda d, r, p: d.all_gather([_meta(3)] * p, _ones(3)), mpicoll.DeviceError, "all_?gather"
    ),
    "all_gather sparse": Wrong(
        lambda d, r, p: d.all_gather([_ones(3)] * p, _ones(3).to_sparse()), mpicoll.DTypeError, "all_?gather"
    ),
    "all_gather_single size": Wrong(
        lambda d, r, p: d.all_gather_single(_ones(3 * p + 1), _ones(3)), mpicoll.ShapeError, "all_gather_single.*output"
    ),
    "all_gather_single dtypes": Wrong(
        lambda d, r, p: d.all_gather_single(_ones(3 * p).int(), _ones(3)),
        mpicoll.DTypeError,
        "all_gather_single.*float32.*int32",
    ),
    "all_gather_single expanded": Wrong(
        lambda d, r, p: d.all_gather_single(_expanded(3 * p), _ones(3)), mpicoll.ShapeError, "all_gather_single"
    ),
    "all_gather_single meta": Wrong(
        lambda d, r, p: d.all_gather_single(_meta(3 * p), _ones(3)), mpicoll.DeviceError, "all_?gather"
    ),
    "reduce_scatter list": Wrong(
        lambda d, r, p: d.reduce_scatter(_ones(3), [_ones(3)] * (p + 1)),
        mpicoll.ShapeError,
        "reduce_scatter: the input list",
    ),
    "reduce_scatter size": Wrong(
        lambda d, r, p: d.reduce_scatter(_ones(2), [_ones(3)] * p), mpicoll.ShapeError, "reduce_scatter: the output"
    ),
    "reduce_scatter expanded": Wrong(
        lambda d, r, p: d.reduce_scatter(_expanded(3), [_ones(3)] * p), mpicoll.ShapeError, "reduce_scatter"
    ),
    "reduce_scatter_single size": Wrong(
        lambda d, r, p: d.reduce_scatter_single(_ones(3), _ones(3 * p + 1)),
        mpicoll.ShapeError,
        "reduce_scatter_single: the input",
    ),
    "reduce_scatter_single dtypes": Wrong(
        lambda d, r, p: d.reduce_scatter_single(_ones(3), _ones(3 * p).half()),
        mpicoll.DTypeError,
        "reduce_scatter_single.*float16.*float32",
    ),
    "reduce_scatter_single op": Wrong(
        lambda d, r, p: d.reduce_scatter_single(_ones(3), _ones(3 * p), ReduceOp.BAND),
        mpicoll.DTypeError,
        "reduce_scatter.*band.*float32",
    ),
    "all_to_all lists": Wrong(
        lambda d, r, p: d.all_to_all([_ones(3)] * p, [_ones(3)] * (p + 1)),
        mpicoll.ShapeError,
        "all_to_all: the input list",
    ),
    "all_to_all expanded": Wrong(
        lambda d, r, p: d.all_to_all([_expanded(3)] * p, [_ones(3)] * p), mpicoll.ShapeError, "all_?to_?all"
    ),
    "all_to_all_single size": Wrong(
        lambda d, r, p: d.all_to_all_single(_ones(2 * p), _ones(3 * p)),
        mpicoll.ShapeError,
        "all_to_all_single: the output",
    ),
    "all_to_all_single rows": Wrong(
        lambda d, r, p: d.all_to_all_single(_ones(p + 1), _ones(p + 1)),
        mpicoll.ShapeError,
        "all_to_all_single.*divided evenly",
        ranks=2,
    ),
    "all_to_all_single sum of splits": Wrong(
        lambda d, r, p: d.all_to_all_single(_ones(2 * p), _ones(2 * p), [2] * p, [2] * (p - 1) + [1]),
        mpicoll.ShapeError,
        "all_to_all_single: input_split_sizes",
    ),
    "all_to_all_single number of splits": Wrong(
        lambda d, r, p: d.all_to_all_single(_ones(2 * p), _ones(2 * p), [*([2] * p), 0], [2] * p),
        mpicoll.ShapeError,
        "all_to_all_single: output_split_sizes",
    ),
    "all_to_all_single negative split": Wrong(
        lambda d, r, p: d.all_to_all_single(_ones(2), _ones(2), [3, -1, *([0] * (p - 2))], [2] + [0] * (p - 1)),
        mpicoll.ShapeError,
        "all_to_all_single: output_split_sizes.*>= 0",
        ranks=2,
    ),
    "isend rank": Wrong(lambda d, r, p: d.isend(_ones(3), p), mpicoll.RankError, r"send: dst .*got \d+ \(rank"),
    "isend to MPI's nobody": Wrong(lambda d, r, p: d.isend(_ones(3), PROC_NULL), mpicoll.RankError, "dst.*-"),
    "irecv from MPI's nobody": Wrong(lambda d, r, p: d.irecv(_ones(3), PROC_NULL), mpicoll.RankError, "src.*-"),
    "irecv rank": Wrong(lambda d, r, p: d.irecv(_ones(3), p), mpicoll.RankError, r"recv: src .*got \d+ \(rank"),
    "isend tag": Wrong(lambda d, r, p: d.isend(_ones(3), 0, tag=-3), mpicoll.RankError, "isend: tag.*-3"),
    "irecv expanded": Wrong(lambda d, r, p: d.irecv(_expanded(3), 0), mpicoll.ShapeError, "irecv"),
    "irecv meta": Wrong(lambda d, r, p: d.irecv(_meta(3), 0), mpicoll.DeviceError, "recv.*meta"),
}


BY_DISPATCHER = {
    "all_reduce meta",
    "broadcast meta",
    "broadcast sparse",
    "all_gather sparse",
    "all_gather_single meta",
    "irecv meta",
}
"""What torch's dispatcher does nothing for, or refuses with errors of its own, before it calls a backend."""


@pytest.mark.parametrize("dist", [stock, dropin], ids=["stock", "drop-in"])
@pytest.mark.parametrize("name", WRONG)
def test_errors_come_before_messages(name: str, dist: Any) -> None:
    """All ranks are wrong, twice, and then the last one alone."""
    wrong = WRONG[name]
    rank, size = stock.get_rank(), stock.get_world_size()
    if size < wrong.ranks:
        pytest.skip("right for one rank")
    if BACKEND and name in BY_DISPATCHER:
        pytest.skip("torch's dispatcher looks at the tensors first")
    for _ in range(2):
        with pytest.raises(wrong.error) as caught:
            wrong.call(dist, rank, size)
        assert re.search(wrong.words, str(caught.value), re.DOTALL), caught.value
        if issubclass(wrong.error, mpicoll.ArgumentError):
            assert f"rank {rank}" in str(caught.value)
    if rank == size - 1:
        with pytest.raises(wrong.error):
            wrong.call(dist, rank, size)
    _still_works()


def test_what_is_forced_for_a_moment_is_not_remembered() -> None:
    fast_path = operations().get_fast_path()
    t = torch.ones(4321)
    with mpicoll.algorithms(allreduce="ring", barrier="dissemination"):
        stock.all_reduce(t)
        stock.barrier()
    assert t[0].item() == stock.get_world_size()
    assert fast_path.all_reduce(t, stock.ReduceOp.SUM)
    assert fast_path.barrier()
