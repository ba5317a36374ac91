"""Wrong arguments: the documented class, a message that helps, and a communicator that still works."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.data import COMPLEX, FLOATS, HALVES, INTEGERS, dtype_of
from support.exercise import COLLECTIVES, COUNTED, REDUCTIONS, ROOTED, native_serves
from support.ranks import Ranks

import mpicoll


def _forms(collective: str) -> list[Callable[..., Any]]:
    return [getattr(mpicoll, name) for name in (collective, f"i{collective}", f"{collective}_init")]


def refused(kind: type[Exception], *words: object, collective: str, call: Callable[[], Any]) -> None:
    """`call` raises `kind`; the message holds `words`, the operation and the rank; nothing was sent."""
    world = mpicoll.world()
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, mpicoll.ArgumentError)
    for word in (collective, f"rank {world.rank}", *words):
        assert str(word) in message, (word, message)
    assert mpicoll.allreduce(world.rank) == sum(range(world.size))


def _block() -> Any:
    """Something that every collective takes: it divides into equal blocks."""
    return np.zeros((2 * mpicoll.world().size, 3))


def _result_shape(collective: str) -> tuple[int, ...]:
    size = mpicoll.world().size
    if collective in ("gather", "allgather"):
        return (2 * size * size, 3)
    return (2, 3) if collective in ("scatter", "reduce_scatter") else (2 * size, 3)


def _options(collective: str) -> dict[str, Any]:
    # every rank is the root in its own call: errors are raised before it matters that the ranks disagree
    return {"root": mpicoll.world().rank} if collective in ROOTED else {}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_wrong_out(some: Ranks, collective: str) -> None:
    def body() -> None:
        x, shape, options = _block(), _result_shape(collective), _options(collective)
        for function in _forms(collective):
            wrong = np.zeros((*shape[:-1], 4))
            refused(
                mpicoll.ShapeError,
                shape,
                wrong.shape,
                "out",
                collective=collective,
                call=lambda f=function, o=wrong: f(x, out=o, **options),
            )
            refused(
                mpicoll.DTypeError,
                "float32",
                "float64",
                "out",
                collective=collective,
                call=lambda f=function: f(x, out=np.zeros(shape, np.float32), **options),
            )
            fixed = np.zeros(shape)
            fixed.flags.writeable = False
            refused(
                mpicoll.ShapeError,
                "out",
                "read-only",
                collective=collective,
                call=lambda f=function, o=fixed: f(x, out=o, **options),
            )
            refused(
                mpicoll.ShapeError,
                "out",
                "share memory",
                collective=collective,
                call=lambda f=function: f(x, out=torch.zeros(1, dtype=torch.float64).expand(shape), **options),
            )
            refused(
                mpicoll.DTypeError,
                "out",
                "list",
                collective=collective,
                call=lambda f=function: f(x, out=[1.0], **options),
            )

    some(body)


def test_out_that_is_a_number(some: Ranks) -> None:
    def body() -> None:
        for out in (1.5, np.float64(1.5)):
            refused(
                mpicoll.DTypeError,
                "out",
                "1.5",
                collective="allreduce",
                call=lambda o=out: mpicoll.allreduce(1.0, out=o),
            )

    some(body)


@pytest.mark.parametrize("collective", ["reduce", "gather"])
def test_out_on_a_rank_that_gets_nothing(some_more: Ranks, collective: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        root = (world.rank + 1) % world.size
        for function in _forms(collective):
            refused(
                mpicoll.ShapeError,
                "out",
                f"rank {root}",
                collective=collective,
                call=lambda f=function: f(np.zeros(2), root=root, out=np.zeros(2)),
            )

    some_more(body)


_INTEGER = ("sum", "prod", "premul_sum", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor")
_REAL = ("sum", "prod", "avg", "premul_sum", "min", "max")
MEANINGS: dict[str, tuple[str, ...]] = {
    "bool": ("min", "max", "band", "bor", "bxor", "land", "lor", "lxor"),
    **dict.fromkeys(INTEGERS, _INTEGER),
    **dict.fromkeys((*HALVES, *FLOATS), _REAL),
    **dict.fromkeys(COMPLEX, ("sum", "prod", "avg", "premul_sum")),
    **dict.fromkeys(("M8[s]", "S3", "float8"), ()),
}
ALL_OPS = ("sum", "prod", "avg", "premul_sum", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor")


def _array(dtype: str, rows: int) -> Any:
    if dtype == "float8":
        return torch.zeros(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return np.zeros(rows, dtype_of(dtype))


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_op_without_meaning(some: Ranks, collective: str) -> None:
    """The whole table: what is in it works, what is not is refused by name."""

    def body() -> None:
        size = mpicoll.world().size
        for dtype, meanings in MEANINGS.items():
            x = _array(dtype, 2 * size)
            for op in ALL_OPS:
                function = mpicoll.premul_sum(1) if op == "premul_sum" else op
                if op in meanings and not (op == "avg" and collective in ("scan", "exscan")):
                    assert getattr(mpicoll, collective)(x, function) is not None or collective == "reduce"
                else:
                    with pytest.raises(mpicoll.DTypeError) as caught:
                        getattr(mpicoll, collective)(x, function)
                    message = str(caught.value)
                    assert collective in message
                    assert op in message
                    assert "float8" in message or dtype in message or op == "avg" or x.dtype.name in message

    some(body)


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_locations_without_meaning(some: Ranks, collective: str) -> None:
    def body() -> None:
        size = mpicoll.world().size
        function = getattr(mpicoll, collective)
        floats, index = np.zeros(size), np.zeros(size, int)
        for op in ("minloc", "maxloc"):
            for x in (floats, [floats, index], (floats,), (floats, index, index)):
                refused(
                    mpicoll.DTypeError, op[3:], "pair", collective=collective, call=lambda x=x, o=op: function(x, o)
                )
            for name in ("bool", *COMPLEX):
                values = np.zeros(size, name)
                refused(
                    mpicoll.DTypeError,
                    op,
                    name,
                    collective=collective,
                    call=lambda v=values, o=op: function((v, index), o),
                )
            refused(
                mpicoll.DTypeError,
                op,
                "integer",
                "float64",
                collective=collective,
                call=lambda o=op: function((floats, floats), o),
            )
            refused(
                mpicoll.ShapeError,
                floats.shape,
                (size + 1,),
                collective=collective,
                call=lambda o=op: function((floats, np.zeros(size + 1, int)), o),
            )

    some(body)


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_unknown_op(some: Ranks, collective: str) -> None:
    def body() -> None:
        for function in _forms(collective):
            for op in ("add", "SUM", 3, None, ["sum"]):
                refused(
                    mpicoll.DTypeError,
                    "sum, ",
                    repr(op),
                    collective=collective,
                    call=lambda f=function, o=op: f(_block(), o),
                )

    some(body)


def test_factor_that_the_dtype_does_not_hold(some: Ranks) -> None:
    def body() -> None:
        for dtype, factor in (("int32", 0.5), ("uint8", -1), ("int8", 1000), ("float32", 1j)):
            refused(
                mpicoll.DTypeError,
                repr(factor),
                dtype,
                collective="allreduce",
                call=lambda d=dtype, f=factor: mpicoll.allreduce(np.ones(2, d), mpicoll.premul_sum(f)),
            )

    some(body)


def test_function_that_returns_something_else(some_more: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        wrong = {"(6,)": lambda a, b: np.concatenate([a, b]), "int64": lambda a, b: (a + b).astype(int)}
        if world.rank < 2:
            part = world.group([0, 1])
            assert part is not None
            for word, function in wrong.items():
                # master_worker: only rank 0 calls the function
                if part.rank == 0:
                    with pytest.raises(mpicoll.DTypeError, match=re.escape(word)):
                        mpicoll.reduce(np.ones(3), function, comm=part, algorithm="linear")
                else:
                    mpicoll.reduce(np.ones(3), function, comm=part, algorithm="linear")
            assert mpicoll.allreduce(1, comm=part) == 2
            part.free()

    some_more(body)


def test_exception_of_the_function_reaches_the_caller(some_more: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()

        def broken(a: Any, b: Any) -> Any:
            raise ZeroDivisionError("mine")

        for start in (mpicoll.reduce, lambda *a, **k: mpicoll.ireduce(*a, **k).wait()):
            if world.rank == 0:
                with pytest.raises(ZeroDivisionError, match="mine"):
                    start(np.ones(3), broken, algorithm="linear")
            else:
                assert start(np.ones(3), broken, algorithm="linear") is None
        assert mpicoll.allreduce(1) == world.size

    some_more(body)


@pytest.mark.parametrize("collective", ROOTED)
def test_root_that_is_no_rank(some: Ranks, collective: str) -> None:
    def body() -> None:
        size = mpicoll.world().size
        for function in _forms(collective):
            for root in (size, -1, 1.0, "0", None, 2**70):
                refused(
                    mpicoll.RankError,
                    "root",
                    repr(root),
                    f"[0, {size})",
                    collective=collective,
                    call=lambda f=function, r=root: f(_block(), root=r),
                )

    some(body)


def test_root_may_be_any_integer_type(some: Ranks) -> None:
    def body() -> None:
        root = np.int8(mpicoll.world().size - 1)
        assert mpicoll.bcast(mpicoll.world().rank, root) == root

    some(body)


@pytest.mark.parametrize("collective", COUNTED)
def test_wrong_counts(some: Ranks, collective: str) -> None:
    def body() -> None:
        size = mpicoll.world().size
        x = _block()
        rows = len(x)
        good = [rows] * size if collective in ("gather", "allgather") else [2] * size
        options = _options(collective)

        def given(counts: Any) -> Any:
            return (counts, counts) if collective == "alltoall" else counts

        more, less = list(good), list(good)
        more[mpicoll.world().rank] += 1
        less[mpicoll.world().rank] -= 1
        negative = [-1] * size
        for function in _forms(collective):
            for wrong in ([*good, 0], good[:-1], negative, more, less):
                refused(
                    mpicoll.ShapeError,
                    "counts",
                    wrong,
                    collective=collective,
                    call=lambda f=function, w=wrong: f(x, counts=given(w), **options),
                )
            for nonsense in (7, "ab" * size, [None] * size, [1.5] * size):
                refused(
                    mpicoll.ShapeError,
                    "counts",
                    collective=collective,
                    call=lambda f=function, w=nonsense: f(x, counts=given(w), **options),
                )

    some(body)


def test_alltoall_counts_that_disagree_with_themselves(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        send, recv = [2] * world.size, [2] * world.size
        recv[world.rank] = 3
        x = _block()
        refused(
            mpicoll.ShapeError,
            "2 rows",
            "3",
            collective="alltoall",
            call=lambda: mpicoll.alltoall(x, counts=(send, recv)),
        )
        refused(
            mpicoll.ShapeError,
            "(send, recv)",
            collective="alltoall",
            call=lambda: mpicoll.alltoall(x, counts=[send] * 3),
        )

    some(body)


@pytest.mark.parametrize("collective", ["scatter", "reduce_scatter", "alltoall"])
def test_rows_that_do_not_divide(some_more: Ranks, collective: str) -> None:
    def body() -> None:
        size = mpicoll.world().size
        for function in _forms(collective):
            for rows in (1, size + 1, 2 * size - 1):
                refused(
                    mpicoll.ShapeError,
                    f"{rows} rows",
                    f"{size} ranks",
                    "counts=",
                    collective=collective,
                    call=lambda f=function, r=rows: f(np.zeros((r, 2)), **_options(collective)),
                )

    some_more(body)


class OnDevice:
    """A CUDA array, were its memory not the host's."""

    def __init__(self) -> None:
        self.memory = np.zeros(4, np.float32)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (4,), "typestr": "<f4", "data": (self.memory.ctypes.data, False), "version": 3}


class OnAccelerator:
    """An exporter of a DLPack device type: 2 is CUDA, 10 ROCm."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 1

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("memory of a device was asked for")


def _unfit() -> list[tuple[type[Exception], Any, list[str]]]:
    return [
        (mpicoll.DTypeError, [1.0, 2.0], ["list", "numpy.asarray"]),
        (mpicoll.DTypeError, (1.0, 2.0), ["tuple"]),
        (mpicoll.DTypeError, {"a": 1}, ["dict"]),
        (mpicoll.DTypeError, "text", ["str"]),
        (mpicoll.DTypeError, object(), ["object"]),
        (mpicoll.DTypeError, 2**63, ["int64", str(2**63)]),
        (mpicoll.DTypeError, np.array([1, None]), ["object"]),
        (mpicoll.DTypeError, np.zeros(4, [("a", "O"), ("b", "i4")]), ["object"]),
        (mpicoll.DTypeError, np.ma.masked_array(np.zeros(4), [0, 1, 0, 0]), ["mask", "fill"]),
        (mpicoll.DTypeError, torch.zeros(4).to_sparse(), ["sparse", "to_dense"]),
        (mpicoll.DeviceError, OnDevice(), ["OnDevice", "(4,)", "float32", "CUDA", "cupy", "mpicoll[cuda13]"]),
        (mpicoll.DeviceError, OnAccelerator(2), ["OnAccelerator", "CUDA", "cupy", "mpicoll[cuda13]"]),
        (mpicoll.DeviceError, OnAccelerator(10), ["OnAccelerator", "type 10, index 1", "copy"]),
        (mpicoll.DeviceError, torch.zeros(4, device="meta"), ["meta"]),
    ]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_no_array_on_the_host(some: Ranks, collective: str) -> None:
    def body() -> None:
        options = _options(collective)
        for kind, x, words in _unfit():
            for function in _forms(collective):
                refused(kind, *words, collective=collective, call=lambda f=function, x=x: f(x, **options))

    some(body)


@pytest.mark.parametrize("operation", ["send", "isend", "recv", "irecv", "sendrecv"])
def test_message_that_is_no_array_on_the_host(some: Ranks, operation: str) -> None:
    def body() -> None:
        for kind, x, words in _unfit():
            refused(kind, *words, collective=operation, call=lambda x=x: getattr(mpicoll, operation)(x, 0))

    some(body)


@pytest.mark.parametrize("collective", [one for one in COLLECTIVES if one not in ("bcast", "scatter")])
def test_none_is_no_array(some: Ranks, collective: str) -> None:
    def body() -> None:
        refused(
            mpicoll.DTypeError,
            "NoneType",
            collective=collective,
            call=lambda: getattr(mpicoll, collective)(None, **_options(collective)),
        )

    some(body)


@pytest.mark.parametrize("operation", ["bcast", "scatter", "recv", "irecv"])
def test_receiving_without_a_template(some_more: Ranks, operation: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        source = (world.rank + 1) % world.size
        refused(
            mpicoll.DTypeError,
            "shape and dtype",
            "out=",
            collective=operation,
            call=lambda: getattr(mpicoll, operation)(None, source),
        )

    some_more(body)


@pytest.mark.parametrize("collective", [*COLLECTIVES, "barrier"])
def test_unknown_algorithm(some: Ranks, collective: str) -> None:
    def body() -> None:
        for function in _forms(collective):
            x = [] if collective == "barrier" else [_block()]
            for wrong in ("nonsense", "native/2", "", "Ring"):
                refused(
                    mpicoll.AlgorithmError,
                    repr(wrong.partition("/")[0]),
                    "there are native, ",
                    collective=collective,
                    call=lambda f=function, x=x, w=wrong: f(*x, algorithm=w),
                )

    some(body)


def test_explaining_an_unknown_collective() -> None:
    with pytest.raises(mpicoll.AlgorithmError, match=r"nonsense.*there are .*allreduce"):
        mpicoll.explain("nonsense", 10)


@pytest.mark.parametrize("value", [np.ones(3), "8", -1])
def test_explaining_what_is_no_size(value: Any) -> None:
    with pytest.raises(mpicoll.ArgumentError, match=r"explain: nbytes must be .* such as x\.nbytes, got (an obj|-1)"):
        mpicoll.explain("bcast", value)


def test_segments_that_make_no_sense(some: Ranks) -> None:
    def body() -> None:
        x = np.zeros(4)
        for wrong, words in {
            "chain/0": "number of segments",
            "chain/x": "number of segments",
            "chain/-1": "number of segments",
            "chain/": "number of segments",
            "binomial/2": "has no segments",
        }.items():
            refused(
                mpicoll.AlgorithmError,
                words,
                repr(wrong),
                collective="bcast",
                call=lambda w=wrong: mpicoll.bcast(x, algorithm=w),
            )

    some(body)


def test_algorithm_that_can_not_serve(some_more: Ranks) -> None:
    def body() -> None:
        size = mpicoll.world().size
        elementwise = mpicoll.Op(np.subtract, elementwise=True)
        x = np.zeros((2 * size, 2))
        uneven = [[2] * size, [2] * size]
        cases: list[tuple[str, str, Callable[[], Any]]] = [
            ("allreduce", "commute", lambda: mpicoll.allreduce(x, elementwise, algorithm="ring")),
            ("allreduce", "elementwise", lambda: mpicoll.allreduce(x, np.matmul, algorithm="double_tree")),
            ("reduce_scatter", "commute", lambda: mpicoll.reduce_scatter(x, elementwise, algorithm="ring")),
            ("reduce", "commute", lambda: mpicoll.reduce(x, elementwise, 1, algorithm="binomial")),
            ("alltoall", "differ in size", lambda: mpicoll.alltoall(x, counts=uneven, algorithm="bruck")),
        ]
        if mpicoll.world()._core.transport.native is None:
            cases += [
                (name, "not use an MPI library", lambda n=name: getattr(mpicoll, n)(x, algorithm="native"))
                for name in COLLECTIVES
            ]
        else:
            cases += [("allreduce", "user", lambda: mpicoll.allreduce(x, np.matmul, algorithm="native"))]
        for collective, word, call in cases:
            refused(mpicoll.AlgorithmError, word, "can't serve", collective=collective, call=call)

    some_more(body)


@pytest.mark.mpi
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_native_serves_what_mpi_does_right_and_nothing_else(collective: str) -> None:
    size = mpicoll.world().size
    for dtype, meanings in MEANINGS.items():
        for op in meanings:
            if op == "avg" and collective in ("scan", "exscan"):
                continue
            x = _array(dtype, 2 * size)
            function = mpicoll.premul_sum(1) if op == "premul_sum" else op
            call = partial(getattr(mpicoll, collective), x, function, algorithm="native")
            if native_serves(op, dtype):
                call()
            else:
                computed = "sum" if op == "premul_sum" else op
                refused(mpicoll.AlgorithmError, "can't serve", computed, "algorithm=", collective=collective, call=call)


def test_function_on_blocks_must_be_elementwise(some: Ranks) -> None:
    def body() -> None:
        refused(
            mpicoll.DTypeError,
            "elementwise=True",
            collective="reduce_scatter",
            call=lambda: mpicoll.reduce_scatter(_block(), lambda a, b: a + b),
        )

    some(body)


def test_average_of_a_prefix(some: Ranks) -> None:
    def body() -> None:
        for collective in ("scan", "exscan"):
            for function in _forms(collective):
                refused(
                    mpicoll.DTypeError, "avg", "sum", collective=collective, call=lambda f=function: f(_block(), "avg")
                )

    some(body)


@pytest.mark.parametrize("operation", ["send", "isend", "recv", "irecv", "sendrecv", "probe", "iprobe"])
def test_peer_or_tag_out_of_range(some: Ranks, operation: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        function = getattr(mpicoll, operation)
        x = () if operation.endswith("probe") else (np.zeros(2),)
        peer = "source" if ("recv" in operation and operation != "sendrecv") or "probe" in operation else "dest"
        # The one that is PROC_NULL for mpi4py is no error.
        mpi = sys.modules.get("mpi4py.MPI")
        below = next(one for one in (-1, -4) if mpi is None or one != mpi.PROC_NULL)
        for wrong in (world.size, below, 0.0, "1", *([None] if peer == "dest" else [])):
            refused(
                mpicoll.RankError,
                peer,
                repr(wrong),
                f"[0, {world.size})",
                "pass mpicoll.PROC_NULL",
                *(["to receive from any rank, pass None"] if peer == "source" else []),
                collective=operation,
                call=lambda w=wrong: function(*x, w),
            )
        tag = "sendtag" if operation == "sendrecv" else "tag"
        for wrong in (-1, world._core.transport.max_tag + 1, 1.0, "a"):
            refused(
                mpicoll.RankError,
                "tag",
                repr(wrong),
                world._core.transport.max_tag,
                collective=operation,
                call=lambda w=wrong: function(*x, 0, **{tag: w}),
            )

    some(body)


def test_sendrecv_arguments_of_the_receive(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.zeros(2)
        for options in ({"source": world.size}, {"recvtag": -1}, {"out": np.zeros(3), "like": x}, {"like": [1]}):
            with pytest.raises(mpicoll.ArgumentError, match="sendrecv"):
                mpicoll.sendrecv(x, world.rank, **options)
        assert mpicoll.iprobe() is None

    some(body)


def test_freed_communicator(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        comm = world.split(0)
        assert comm is not None
        plan = mpicoll.allreduce_init(np.ones(2), comm=comm)
        plan()
        mpicoll.allreduce(np.ones(2), comm=comm)
        comm.free()
        x = _block()
        calls: list[Callable[[], Any]] = [
            plan,
            plan.start,
            lambda: comm.split(0),
            lambda: comm.group([0]),
            lambda: comm.mpi,
            lambda: mpicoll.barrier(comm=comm),
            lambda: mpicoll.send(x, 0, comm=comm),
            lambda: mpicoll.recv(x, 0, comm=comm),
            lambda: mpicoll.probe(comm=comm),
            lambda: mpicoll.explain("allreduce", 8, comm=comm),
            comm.__enter__,
        ]
        calls += [lambda f=f: f(x, comm=comm) for name in COLLECTIVES for f in _forms(name)]
        for call in calls:
            with pytest.raises(mpicoll.CommunicatorError, match=f"freed|rank {world.rank}"):
                call()
        comm.free()
        assert mpicoll.allreduce(1) == world.size

    some(body)


def test_world_can_not_be_freed(some: Ranks) -> None:
    def body() -> None:
        with pytest.raises(mpicoll.CommunicatorError, match="can't be freed"):
            mpicoll.world().free()
        assert mpicoll.allreduce(1) == mpicoll.world().size

    some(body)


@pytest.mark.parametrize("wrong", [0, "world", object(), [0, 1]], ids=["int", "str", "object", "list"])
def test_what_is_no_communicator(some: Ranks, wrong: Any) -> None:
    def body() -> None:
        for name in COLLECTIVES:
            for function in _forms(name):
                with pytest.raises(mpicoll.CommunicatorError, match=f"comm must be.*{type(wrong).__name__}"):
                    function(_block(), comm=wrong)
        assert mpicoll.allreduce(1) == mpicoll.world().size

    some(body)


def test_groups_that_make_no_sense(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for wrong in ([], [0, 0], [world.size], [-1]):
            with pytest.raises(mpicoll.RankError, match=f"group: ranks must be.*rank {world.rank}"):
                world.group(wrong)
        with pytest.raises(mpicoll.RankError, match=f"split: color.*-2.*rank {world.rank}"):
            world.split(-2)
        assert mpicoll.allreduce(1) == world.size

    some(body)


@pytest.mark.usefixtures("uncompared")
def test_ranks_that_disagree_about_the_size() -> None:
    """A message of another size than the schedule expects is an error where it arrives, not garbage."""

    def body() -> None:
        world = mpicoll.world()
        part = world.group([0, 1]) if world.rank < 2 else None
        if part is None:
            return
        x = np.ones(4 if part.rank else 2)
        with pytest.raises(mpicoll.TruncationError, match=rf"allreduce/recursive_doubling.*rank {part.rank}.*round 1"):
            mpicoll.allreduce(x, algorithm="recursive_doubling", comm=part)

    mpicoll.run_local(body, 3, ranks_per_node=1)


def test_errors_are_what_python_programs_expect() -> None:
    for kind in (mpicoll.ShapeError, mpicoll.RankError, mpicoll.AlgorithmError):
        assert issubclass(kind, ValueError)
    for kind in (mpicoll.DTypeError, mpicoll.DeviceError):
        assert issubclass(kind, TypeError)
    assert issubclass(mpicoll.Timeout, TimeoutError)
