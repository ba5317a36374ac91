"""Bodies of tests of device memory, for a real device (tests/gpu) and for a fake one.

Each body runs on every rank, with any transport, and takes `arrays`: an array library on this rank's device. Results
are compared with the oracle of data.py.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest

import mpicoll
from mpicoll.config import config
from mpicoll.engine.selection.catalogue import MAX_FLAT_BYTES, algorithms_of
from support.data import OPS, covering, dtype_of, expected, make_op, means, numbers, random
from support.exercise import COUNTED, FORMS, MATRICES, REDUCTIONS, ROOTED, SHAPES, Call
from support.ranks import Comms

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16")
DTYPES += ("float32", "float64", "complex64", "complex128")
"""All dtypes of mpicoll in native byte order, since devices have no other."""

SOME_DTYPES = ("bool", "int8", "uint32", "float16", "float64", "complex64")
"""One of each class."""

LAYOUTS = ("contiguous", "strided", "transposed", "negative")

WAYS = (None, "ipc", "nccl", "shm_flat", "shm_pipelined", "ring", "recursive_doubling", "native")
"""Ways of an allreduce: its own choice, and one of each kind that may be forced."""


def most(way: str | None, count: int) -> int:
    """Return the number of elements of a float32 allreduce by `way`: `count`, or the maximum of that way."""
    return min(count, MAX_FLAT_BYTES // 4) if way == "shm_flat" else count


class Arrays(Protocol):
    """An array library on a device. All operations are ordered on the current stream of the calling thread.

    `dtypes` are the dtypes of its arrays, `devices` the number of devices that this process sees. `played` marks a
    fake device, whose work is deferred until a thread waits for it.
    """

    name: str
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    played: bool
    devices: int

    def put(self, values: np.ndarray) -> Any:
        """Copy `values` to a new contiguous array."""

    def get(self, array: Any) -> np.ndarray:
        """Return the elements after all work on the current stream has completed."""

    def assign(self, target: Any, source: Any) -> None:
        """``target[...] = source``, both on the device."""

    def is_one(self, array: Any) -> bool:
        """Return True if `array` is an array of this library on this rank's device."""

    def dtype_name(self, array: Any) -> str: ...

    def address(self, array: Any) -> int: ...

    def stream(self) -> AbstractContextManager[Any]:
        """Make a new stream current in the block, which does not wait for the default stream."""

    def wait(self) -> None:
        """Wait until all work on the current stream has completed."""

    def delay(self) -> None:
        """Submit work of a tenth of a second to the current stream."""

    def used(self) -> int:
        """Return the bytes of device memory that this process holds, including those of other libraries."""

    def forget(self) -> None:
        """Free unused memory of the pools."""

    def capturing(self) -> AbstractContextManager[Any]:
        """Capture the current stream into a graph."""

    def interface(self, array: Any) -> Any:
        """Return an object with the CUDA array interface only, in which it names the current stream."""


class Cupy:
    """cupy's arrays, or those of the fake cupy."""

    name = "cupy"
    layouts = LAYOUTS

    def __init__(self, cupy: Any, *, played: bool) -> None:
        self.cupy = cupy
        self.played = played
        self.devices = int(cupy.cuda.runtime.getDeviceCount())
        self.dtypes = tuple(name for name in DTYPES if name != "bfloat16" or self._has_bfloat16())
        self._spin: Any = None

    def _has_bfloat16(self) -> bool:
        if self.played:
            return False
        try:
            self.cupy.empty(1, ml_dtypes.bfloat16)
        except (TypeError, ValueError):
            return False  # before cupy 14
        return True

    def put(self, values: np.ndarray) -> Any:
        return self.cupy.array(values)

    def get(self, array: Any) -> np.ndarray:
        found: np.ndarray = self.cupy.asnumpy(array)
        self.wait()
        return found

    def assign(self, target: Any, source: Any) -> None:
        self.cupy.copyto(target, source)

    def is_one(self, array: Any) -> bool:
        return type(array) is self.cupy.ndarray and array.device.id == self.cupy.cuda.runtime.getDevice()

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype.name)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def stream(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self.cupy.cuda.Stream(non_blocking=True)
        return stream

    def wait(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def delay(self) -> None:
        if self.played:
            return  # its work is always late
        if self._spin is None:
            code = (
                'extern "C" __global__ void spin(long long cycles) {'
                " long long begin = clock64(); while (clock64() - begin < cycles) {} }"
            )
            self._spin = self.cupy.RawKernel(code, "spin")
        self._spin((1,), (1,), (np.int64(150_000_000),))  # at 1.5 GHz, more or less

    def used(self) -> int:
        if self.played:
            return int(self.cupy.get_default_memory_pool().total_bytes())
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def forget(self) -> None:
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def unexportable(self, values: np.ndarray) -> Any:
        """Return an array in memory that other processes can't open."""
        made = self.cupy.ndarray(values.shape, values.dtype, memptr=self.cupy.cuda.malloc_async(values.nbytes))
        self.assign(made, self.put(values))
        return made

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self.cupy.cuda.Stream(non_blocking=True) as stream:
            # Other threads of this process may continue to allocate.
            stream.begin_capture(self.cupy.cuda.runtime.streamCaptureModeThreadLocal)
            try:
                yield
            finally:
                stream.end_capture()

    def interface(self, array: Any) -> Any:
        return _Interface(array, int(self.cupy.cuda.get_current_stream().ptr))


_capture_lock = threading.Lock()
"""Lock held while torch captures a graph."""


class Torch:
    """torch's CUDA tensors."""

    name = "torch"
    layouts = LAYOUTS[:3]
    dtypes = DTYPES
    played = False

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.devices = torch.cuda.device_count()

    def put(self, values: np.ndarray) -> Any:
        values = np.array(values, order="C")  # numpy.ascontiguousarray gives arrays of no dimension one
        if values.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(values.view(np.int16)).view(self.torch.bfloat16).cuda()
        return self.torch.from_numpy(values).cuda()

    def get(self, array: Any) -> np.ndarray:
        if array.dtype is self.torch.bfloat16:
            words: np.ndarray = array.view(self.torch.int16).cpu().numpy()
            return words.view(ml_dtypes.bfloat16)
        found: np.ndarray = array.detach().cpu().numpy()
        return found

    def assign(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def is_one(self, array: Any) -> bool:
        return type(array) is self.torch.Tensor and array.device == self.torch.device(
            "cuda", self.torch.cuda.current_device()
        )

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    @contextmanager
    def stream(self) -> Iterator[Any]:
        stream = self.torch.cuda.Stream()
        # As in any program, earlier work of the caller's stream is visible here; the reverse is not guaranteed.
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            yield stream

    def wait(self) -> None:
        self.torch.cuda.current_stream().synchronize()

    def delay(self) -> None:
        self.torch.cuda._sleep(150_000_000)

    def used(self) -> int:
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free)

    def forget(self) -> None:
        gc.collect()
        self.torch.cuda.empty_cache()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        graph = self.torch.cuda.CUDAGraph()
        # torch allows one capture at a time in a process, and synchronizes the device at its begin.
        with (
            _capture_lock,
            self.torch.cuda.graph(graph, stream=self.torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            yield

    def interface(self, array: Any) -> Any:
        return _Interface(array, int(self.torch.cuda.current_stream().cuda_stream))


class _Interface:
    """Exporter of an array by the CUDA array interface alone. A stream of 0 is written as 1, its value there."""

    def __init__(self, array: Any, stream: int) -> None:
        self._array = array  # its memory lives as long
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {"stream": stream or 1, "version": 3}


def laid(arrays: Arrays, values: np.ndarray, layout: str) -> tuple[Any, Any]:
    """Return an array with these values in the memory layout `layout`, and the array in whose memory it lies."""
    if layout == "strided":
        base = np.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1), values.dtype)
        base[..., 1::2] = values
        made = arrays.put(base)
        return made[..., 1::2], made
    if layout == "transposed":
        made = arrays.put(np.ascontiguousarray(values.transpose()))
        return _transposed(made, values.ndim), made
    if layout == "negative":
        flip = (slice(None, None, -1),) * values.ndim
        made = arrays.put(np.ascontiguousarray(values[flip]))
        return made[flip], made
    made = arrays.put(values)
    return made, made


def _transposed(array: Any, ndim: int) -> Any:
    permute = getattr(array, "permute", None)
    return array.T if permute is None else permute(*reversed(range(ndim)))


# --- every collective: rows of choices, as exercise.py has them for the host


PLACES = (("world", 3), ("world", 4), ("split", 4), ("group", 4), ("split", 3), ("group", 3), ("world", 2))
"""Communicators of more than one rank, in worlds of threads. The first one is taken where any would do."""


@lru_cache(maxsize=32)
def rows(
    collective: str, dtypes: tuple[str, ...], layouts: tuple[str, ...], user: tuple[str, ...], spread: bool = False
) -> list[dict[str, Any]]:
    """Choices in which every two values of two axes meet. `user` are the functions of data.py that the library of the
    arrays can compute. An algorithm may be refused; then another one is taken.

    If they are `spread`, each names its world's size too: every two values meet in one of the PLACES, and each value
    is tried in all of them, so that no row has to be carried out in all worlds.
    """
    axes: dict[str, Sequence[Any]] = {"dtype": dtypes}
    if collective in REDUCTIONS:
        ops = [op for op in OPS if not op.startswith("user_") or op in user]
        ops = [op for op in ops if (op, collective) not in {("avg", "scan"), ("avg", "exscan")}]
        axes["op"] = [op for op in ops if op != "user_matmul" or collective != "reduce_scatter"]
    axes["shape"] = (*SHAPES, *MATRICES)
    axes["layout"] = layouts
    axes["out"] = ("none", "given", "strided", "inplace")
    axes["form"] = FORMS
    axes["algorithm"] = (None, *algorithms_of(collective))
    axes["place" if spread else "comm"] = PLACES if spread else ("world", "split", "group")
    if collective in ROOTED:
        axes["root"] = ("first", "last", "middle")
    if collective in COUNTED:
        axes["counts"] = ("none", "equal", "uneven", "zeros")
    found = covering(axes, lambda row: _allowed(collective, row))
    return [row | dict(zip(("comm", "size"), row["place"], strict=True)) for row in found] if spread else found


def _allowed(collective: str, row: dict[str, Any]) -> bool:
    shape, out, counts, op = row.get("shape"), row.get("out"), row.get("counts", "none"), row.get("op")
    if op is not None and "dtype" in row and not means(op, row["dtype"]):
        return False
    if op == "user_matmul" and shape not in (None, *MATRICES):
        return False
    if op == "user_add" and row.get("dtype") in ("bool", "uint16", "uint32", "uint64"):
        return False  # torch has no sums of these, and not every library a | b
    if op == "user_first" and row.get("dtype") in ("bfloat16", "uint16", "uint32", "uint64"):
        return False  # cupy's where has no bfloat16, and not every torch these integers
    if shape == ():
        if row.get("layout") not in (None, "contiguous") or out == "strided" or counts in ("uneven", "zeros"):
            return False
        if collective in ("scatter", "alltoall", "reduce_scatter"):
            return False
    if out == "inplace" and collective in ("gather", "allgather", "scatter", "reduce_scatter"):
        return False
    return not (collective == "alltoall" and out == "inplace" and counts in ("uneven", "zeros"))


def run_rows(arrays: Arrays, collective: str, spread: bool = False) -> set[str]:
    """All rows of a collective; the algorithms that were asked for and served. If they are `spread`, those of a world
    of this size, and in one of two ranks also those of three's parts, which have one rank each then."""
    size = mpicoll.world().size
    comms = Comms()
    served: set[str] = set()
    user = tuple(op for op in OPS if op.startswith("user_"))
    # Kernels take their time to compile; all dtypes are for each_op_in_each_way.
    dtypes = tuple(name for name in arrays.dtypes if name in (*SOME_DTYPES, "bfloat16"))
    for row in rows(collective, dtypes, arrays.layouts, user, spread):
        alone = size == 2 and row["comm"] != "world" and row.get("size") == 3
        comm = comms[row["comm"]] if row.get("size", size) == size or alone else None
        if comm is None:
            continue
        try:
            if Exercise(arrays, Call(collective, row, comm.rank, comm.size), comm).run():
                served.add(str(row["algorithm"]))
        except Exception as error:
            raise AssertionError(f"{collective} {row} on rank {comm.rank} of {comm.size}: {error!r}") from error
    comms.free()
    return served


@lru_cache(maxsize=64)
def _inputs(collective: str, row: tuple[tuple[str, Any], ...], size: int, generation: int) -> list[np.ndarray]:
    made = Call(collective, dict(row), 0, size).inputs(generation)
    for one in made:
        one.flags.writeable = False
    return made


class Exercise:
    """Carries out a row on this rank, and looks at the result, the input and `out`."""

    def __init__(self, arrays: Arrays, call: Call, comm: mpicoll.Communicator) -> None:
        self.arrays = arrays
        self.call = call
        self.row = call.row
        self.comm = comm
        self.algorithm = self.row["algorithm"]
        self.generation = 0

    def run(self) -> bool:
        """Return True if the algorithm of the row has served; otherwise another algorithm has."""
        served = self.serves()
        if not served:
            self.algorithm = None
            self.in_its_form()
        return served

    def serves(self) -> bool:
        """Return True if the algorithm itself serves, without a fallback."""
        try:
            self.in_its_form()
        except mpicoll.AlgorithmError:
            if self.algorithm is None:
                raise
            return False
        return True

    def in_its_form(self) -> None:
        self.arguments()
        form, name = self.row["form"], self.call.collective
        if form == "plan":
            self.plan(getattr(mpicoll, f"{name}_init"))
        elif form == "call":
            function = getattr(mpicoll, name)
            self.check(function(*self.positional(), **self.options()))
            self.arguments()
            self.check(function(*self.positional(), **self.options()))
        else:
            request = getattr(mpicoll, f"i{name}")(*self.positional(), **self.options())
            value = request.wait(None if form == "background" else 60.0)
            assert request.test()
            assert request.wait() is value
            self.check(value)

    def plan(self, function: Callable[..., Any]) -> None:
        plan = function(*self.positional(), **self.options())
        for turn in range(3):
            if turn:
                self.renew()
            if turn == 1:
                plan.start()
                self.check(plan.wait())
            else:
                self.check(plan())

    def arguments(self) -> None:
        """Create new arrays with new values."""
        self.generation += 1
        inputs = self.inputs()
        mine = inputs[self.comm.rank]
        self.want = self.call.expect(inputs)
        self.x, self.base = laid(self.arrays, mine, self.row["layout"])
        self.given, self.out, self.out_base = mine, None, None
        how = self.row["out"] if self.call.receives else "none"
        if how == "inplace":
            self.out = self.x
        elif how != "none":
            shape = self.want.value.shape if self.want is not None else mine.shape
            garbage = numbers(random("garbage"), self.call.name, shape)
            self.out, self.out_base = laid(self.arrays, garbage, "strided" if how == "strided" else "contiguous")

    def inputs(self) -> list[np.ndarray]:
        """Return every rank's input, which ranks that are threads create once for all."""
        row = tuple(self.row.items())
        return _inputs(self.call.collective, row, self.call.size, self.generation)

    def renew(self) -> None:
        """Write other values to the same memory, as work of the current stream that nothing has waited for."""
        self.generation += 1
        inputs = self.inputs()
        self.want, self.given = self.call.expect(inputs), inputs[self.comm.rank]
        self.arrays.assign(self.x, self.arrays.put(self.given))

    def positional(self) -> tuple[Any, ...]:
        if self.call.collective not in REDUCTIONS:
            return (self.x,)
        return self.x, make_op(self.call.op, self.comm.rank, self.call.name)

    def options(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "comm": self.comm, **self.call.options(self.out)}

    def check(self, result: Any) -> None:
        if self.want is None:
            assert result is None
            return
        if self.out is not None:
            assert result is self.out, "out was given, and something else returned"
        assert self.arrays.is_one(result), f"the result is a {type(result).__name__}, or on another device"
        assert self.arrays.dtype_name(result) == self.call.name
        assert tuple(result.shape) == self.want.value.shape
        self.want.check(self.arrays.get(result), f"turn {self.generation}")
        if self.out is self.x:
            return
        _assert_equal(self.arrays.get(self.x), self.given, "the input was changed")
        if self.out_base is not None and self.row["out"] == "strided":
            between = self.arrays.get(self.out_base)[..., ::2]
            np.testing.assert_array_equal(between, np.zeros_like(between), "what lies between was written")


def _assert_equal(got: np.ndarray, want: np.ndarray, where: str) -> None:
    """Compare before calling numpy's assertion, whose description of differences is slow."""
    if (got.dtype, got.shape) != (want.dtype, want.shape) or got.tobytes() != want.tobytes():
        np.testing.assert_array_equal(got, want, where)


def each_way(
    arrays: Arrays, collective: str, op: str, name: str, shape: tuple[int, ...], ways: Sequence[str | None]
) -> set[str | None]:
    """Run the collective in each of those ways that serves, and return these ways."""
    world = mpicoll.world()
    served: set[str | None] = set()
    for way in ways:
        row = {"dtype": name, "op": op, "shape": shape, "layout": "contiguous", "out": "none", "form": "call"}
        row |= {"algorithm": way, "counts": "none"}
        if Exercise(arrays, Call(collective, row, world.rank, world.size), world).serves():
            served.add(way)
    return served


def each_op_in_each_way(arrays: Arrays, name: str) -> None:
    """Run all ops of a dtype."""
    if name not in arrays.dtypes:
        return
    served: set[str | None] = set()
    for op in OPS:
        if not op.startswith("user_") and means(op, name):
            served |= each_way(arrays, "allreduce", op, name, (1000,), WAYS)
    assert served >= must_serve(arrays) - {"nccl"}


def large(arrays: Arrays, count: int) -> None:
    """Reduce `count` elements of float32 by each way of an allreduce, then by the other collectives' own choices, in
    rotation, so that memory left over from one is reused by the next."""
    world = mpicoll.world()
    inputs = [random("large", rank).standard_normal(count).astype(np.float32) for rank in range(world.size)]
    want = expected("sum", inputs, "float32")
    x = arrays.put(inputs[world.rank])
    for way in WAYS:
        got = _served(way, lambda way=way: mpicoll.allreduce(x, algorithm=way))
        if got is not None:
            want.check(arrays.get(got), way)
            del got
    np.testing.assert_array_equal(arrays.get(mpicoll.bcast(x, world.size - 1)), inputs[-1])
    np.testing.assert_array_equal(arrays.get(mpicoll.allgather(x)), np.concatenate(inputs))
    part = count // world.size
    whole = x[: part * world.size]
    want.rows(part * world.rank, part * (world.rank + 1)).check(arrays.get(mpicoll.reduce_scatter(whole)))
    mine = slice(part * world.rank, part * (world.rank + 1))
    np.testing.assert_array_equal(
        arrays.get(mpicoll.alltoall(whole)), np.concatenate([one[: part * world.size][mine] for one in inputs])
    )
    np.testing.assert_array_equal(arrays.get(x), inputs[world.rank])


def _served(way: str | None, call: Callable[[], Any]) -> Any:
    """Return the result of the call; None if that way can't serve."""
    try:
        return call()
    except mpicoll.AlgorithmError:
        assert way is not None
        return None


def half_precision_is_summed_in_single(arrays: Arrays, name: str) -> None:
    """Sum large terms that cancel over the ranks, and leave small ones that half precision would have lost."""
    world = mpicoll.world()
    if name not in arrays.dtypes:
        return
    rng = random(name)
    half = dtype_of(name)
    big = (rng.standard_normal(10_000) * 256).astype(half)
    terms = [rng.standard_normal(10_000).astype(half) for _ in range(world.size)]
    if world.size > 2:
        terms[0], terms[-1] = big, -big
    for op in ("sum", "avg"):
        want = expected(op, terms, name)
        for way in WAYS:
            got = _served(
                way, lambda op=op, way=way: mpicoll.allreduce(arrays.put(terms[world.rank]), op, algorithm=way)
            )
            if got is not None:
                want.check(arrays.get(got).astype(np.float64), (op, way))


def nan_is_extreme(arrays: Arrays) -> None:
    world = mpicoll.world()
    for name in ("float16", "bfloat16", "float32", "float64"):
        if name not in arrays.dtypes:
            continue
        inputs = [numbers(random("nan", name, rank), name, (40,)) for rank in range(world.size)]
        for rank, one in enumerate(inputs):
            one[rank :: world.size + 2] = np.nan
        for op, ufunc in (("min", np.minimum), ("max", np.maximum)):
            want = ufunc.reduce([one.astype(np.float64) for one in inputs])
            for way in WAYS:
                if way == "native":
                    continue  # MPI may lose it
                x = arrays.put(inputs[world.rank])
                got = _served(way, lambda x=x, op=op, way=way: mpicoll.allreduce(x, op, algorithm=way))
                if got is not None:
                    np.testing.assert_array_equal(arrays.get(got).astype(np.float64), want, f"{op} {name} {way}")


def order_of_ranks_is_kept(arrays: Arrays) -> None:
    """Compose affine maps by a function that takes and returns whole arrays of the library."""
    world = mpicoll.world()
    maps = [np.stack([random("map", r).integers(-9, 9, 40), np.arange(40) + r]) for r in range(world.size)]
    second = np.array([[0], [1]])

    def compose(a: Any, b: Any) -> Any:
        assert arrays.is_one(a)
        return a * b[0] + b * arrays.put(second)

    prefixes = [maps[0]]
    for one in maps[1:]:
        prefixes.append(prefixes[-1] * one[0] + one * second)
    for way in WAYS:
        x = arrays.put(maps[world.rank])
        got = _served(way, lambda x=x, way=way: mpicoll.allreduce(x, compose, algorithm=way))
        if got is not None:
            np.testing.assert_array_equal(arrays.get(got), prefixes[-1], str(way))
    prefix = mpicoll.scan(arrays.put(maps[world.rank]), compose)
    np.testing.assert_array_equal(arrays.get(prefix), prefixes[world.rank])


def all_ranks_get_the_same_bits(arrays: Arrays) -> None:
    world = mpicoll.world()
    for way in WAYS:
        x = arrays.put(numbers(random("bits", world.rank), "float32", (999,)))
        got = _served(way, lambda x=x, way=way: mpicoll.allreduce(x, algorithm=way))
        if got is not None:
            everyone = mpicoll.allgather(arrays.get(got).view(np.uint8)).reshape(world.size, -1)
            assert (everyone == everyone[0]).all(), way


def pairs(arrays: Arrays) -> None:
    """Reduce values and places on the device by minloc and maxloc."""
    world = mpicoll.world()
    values = [random("pairs", rank).integers(0, 4, 50).astype(np.float32) for rank in range(world.size)]
    for op, extreme in (("minloc", np.min), ("maxloc", np.max)):
        x = arrays.put(values[world.rank])
        places = arrays.put(np.full(50, world.rank, np.int32))
        found, where = mpicoll.allreduce((x, places), op)
        want = extreme(values, axis=0)
        assert arrays.is_one(found)
        assert arrays.is_one(where)
        np.testing.assert_array_equal(arrays.get(found), want)
        np.testing.assert_array_equal(arrays.get(where), np.argmax(np.array(values) == want, axis=0))


# --- messages


def _ring() -> tuple[int, int, int, int]:
    world = mpicoll.world()
    return world.rank, world.size, (world.rank + 1) % world.size, (world.rank - 1) % world.size


def messages_of_every_dtype_and_layout(arrays: Arrays) -> None:
    rank, _, right, left = _ring()
    for number, name in enumerate(arrays.dtypes):
        for layout in arrays.layouts:
            for shape in ((4, 3), (0, 2), (1,)):
                mine, theirs = (numbers(random(name, layout, shape, one), name, shape) for one in (rank, left))
                x, _ = laid(arrays, mine, layout)
                got = mpicoll.sendrecv(x, right, left, number, number)
                assert arrays.is_one(got)
                assert arrays.dtype_name(got) == name
                np.testing.assert_array_equal(arrays.get(got), theirs)
                out, base = laid(arrays, np.zeros(shape, dtype_of(name)), layout)
                request = mpicoll.isend(x, right, number)
                assert mpicoll.recv(source=left, tag=number, out=out) is out
                np.testing.assert_array_equal(arrays.get(out), theirs)
                if layout == "strided":
                    assert not arrays.get(base)[..., ::2].any()
                request.wait()
                np.testing.assert_array_equal(arrays.get(x), mine)


def messages_of_every_size(arrays: Arrays) -> None:
    """Send from even ranks to the next, then in the other direction; and several at once, completed in any order."""
    rank, size, right, left = _ring()
    for count in (0, 1, 1000, 300_000, 3_000_000):
        like = arrays.put(np.zeros(count, np.float32))
        if rank % 2 == 0 and right != 0:
            mpicoll.send(arrays.put(np.full(count, rank, np.float32)), right)
            np.testing.assert_array_equal(arrays.get(mpicoll.recv(like, right)), np.full(count, right))
        elif rank % 2 == 1:
            np.testing.assert_array_equal(arrays.get(mpicoll.recv(like, left)), np.full(count, left))
            mpicoll.send(arrays.put(np.full(count, rank, np.float32)), left)
    receiving = [mpicoll.irecv(arrays.put(np.zeros(1000)), source, 2) for source in range(size)]
    sending = [mpicoll.isend(arrays.put(np.full(1000, 10.0 * rank + dest)), dest, 2) for dest in reversed(range(size))]
    for source, got in enumerate(mpicoll.waitall(receiving)):
        np.testing.assert_array_equal(arrays.get(got), np.full(1000, 10 * source + rank))
    mpicoll.waitall(sending)


def messages_between_host_and_device(arrays: Arrays) -> None:
    rank, _, right, left = _ring()
    mine, theirs = (np.full(5000, one, np.float64) for one in (rank, left))
    request = mpicoll.isend(arrays.put(mine), right, 1)
    got = mpicoll.recv(np.empty(5000), left, 1)
    np.testing.assert_array_equal(got, theirs)
    request.wait()
    request = mpicoll.isend(mine, right, 2)
    status = mpicoll.Status()
    like = arrays.put(np.zeros(5000))
    np.testing.assert_array_equal(arrays.get(mpicoll.recv(like, status=status)), theirs)
    assert (status.source, status.tag, status.nbytes) == (left, 2, 40_000)
    request.wait()


def truncated_message(arrays: Arrays) -> None:
    """Receive a message that is too large: an error is raised, and nothing is written behind the array."""
    rank, _, right, left = _ring()
    request = mpicoll.isend(arrays.put(np.full(100, rank, np.float32)), right, 3)
    whole = arrays.put(np.zeros(200, np.float32))
    with pytest.raises(mpicoll.TruncationError):
        mpicoll.recv(source=left, tag=3, out=whole[:50])
    assert not arrays.get(whole)[50:].any()
    request.wait()
    mpicoll.barrier()


# --- streams


def must_serve(arrays: Arrays) -> set[str | None]:
    """Return the ways of a float32 allreduce that these ranks must have."""
    world = mpicoll.world()
    ways: set[str | None] = {None, "ring", "recursive_doubling"}
    if world.size > 1 and world._core.no_shm_reason is None:
        ways |= {"shm_flat", "shm_pipelined"}
        if arrays.devices == 1:
            ways.add("ipc")
    if arrays.devices >= world.local_size > 1:
        ways.add("nccl")
    return ways


def in_stream_order() -> bool:
    """Return True if results are complete for the caller's stream, not for all of them."""
    return config().cuda_order == "stream"


def late_sum(arrays: Arrays, way: str, factor: int = 1) -> bool:
    """Return True if an allreduce of late inputs is right on all ranks, read at once on another stream. Another
    `factor` makes other values, so that data left over from an earlier call is not right by chance."""
    world = mpicoll.world()
    new, old = (arrays.put(np.full(10_000, value * factor, np.float32)) for value in (world.rank + 1, -1))
    arrays.wait()
    with arrays.stream():
        x, out = old * 1, old * 1
        arrays.wait()
        arrays.delay()
        arrays.assign(x, new)
        mpicoll.allreduce(x, out=out, algorithm=way)
        found = arrays.get(out * 1) if in_stream_order() else None
    with arrays.stream():
        found = arrays.get(out * 1) if found is None else found
    right = (found == factor * world.size * (world.size + 1) // 2).all()
    return bool(mpicoll.allreduce(bool(right), "land"))


def input_is_waited_for(arrays: Arrays) -> None:
    """Reduce a late input, and use the result on another stream at once.

    Without the wait before, the old values are summed; without the one after, stale data of the result is read.
    """
    world = mpicoll.world()
    served: set[str | None] = set()
    inputs = [numbers(random("late", rank), "float32", (200_000,)) for rank in range(world.size)]
    for way in WAYS:
        count = most(way, 200_000)
        want = expected("sum", [one[:count] for one in inputs], "float32")
        old = arrays.put(np.full(count, 1e6, np.float32))
        new = arrays.put(inputs[world.rank][:count])
        out = arrays.put(np.full(count, -1e6, np.float32))
        arrays.wait()
        with arrays.stream():
            x = old * 1
            arrays.wait()
            arrays.delay()
            arrays.assign(x, new)
            got = _served(way, lambda x=x, out=out, way=way: mpicoll.allreduce(x, out=out, algorithm=way))
            twice = arrays.get(got * 2) if got is not None and in_stream_order() else None
        if got is None:
            continue
        served.add(way)
        with arrays.stream():
            twice = arrays.get(got * 2) if twice is None else twice
        want.check(twice / 2, way)
    assert served >= must_serve(arrays) & set(WAYS)


def output_is_waited_for(arrays: Arrays) -> None:
    """Reduce into `out` while the caller's stream has yet to read its old values, which it must find."""
    world = mpicoll.world()
    for way in WAYS:
        count = most(way, 50_000)
        with arrays.stream():
            out = arrays.put(np.full(count, 7, np.float32))
            x = arrays.put(np.full(count, world.rank, np.float32))
            arrays.wait()
            arrays.delay()
            before = out * 1
            if _served(way, lambda x=x, out=out, way=way: mpicoll.allreduce(x, out=out, algorithm=way)) is not None:
                np.testing.assert_array_equal(arrays.get(before), np.full(count, 7), str(way))
                np.testing.assert_array_equal(arrays.get(out), np.full(count, sum(range(world.size))), str(way))


def host_runs_ahead(arrays: Arrays) -> None:
    """Submit all-reduces behind an input that is late on one rank, each of the result of the one before, and wait
    once."""
    world = mpicoll.world()
    if not in_stream_order() or "ipc" not in must_serve(arrays):
        pytest.skip("the host waits: MPICOLL_CUDA_ORDER=stream lets streams wait")
    mean = (world.size + 1) / 2
    with arrays.stream():
        x, new = (arrays.put(np.full(5000, one, np.float64)) for one in (0, world.rank + 1))
        for turn in range(4):
            # From the second turn on all is bound.
            if world.rank == turn % world.size:
                arrays.delay()
            arrays.assign(x, new)
            mpicoll.barrier()
            begin = time.perf_counter()
            for _ in range(20):
                mpicoll.allreduce(x, "avg", out=x, algorithm="ipc")
            submitted = time.perf_counter() - begin
            np.testing.assert_array_equal(arrays.get(x), np.full(5000, mean))
            waited = time.perf_counter() - begin
            assert arrays.played or turn == 0 or submitted < waited / 2, (submitted, waited)
            mpicoll.barrier()


def messages_are_in_order(arrays: Arrays) -> None:
    """Send and receive late data, blocking and nonblocking."""
    rank, _, right, left = _ring()
    for count in (10, 400_000):
        old, new = (arrays.put(np.full(count, value, np.float32)) for value in (-1, rank))
        seven = arrays.put(np.full(count, 7, np.float32))
        arrays.wait()
        for background in (False, True):
            with arrays.stream():
                x, out = old * 1, seven * 1
                arrays.wait()
                arrays.delay()
                arrays.assign(x, new)
                before = out * 1
                receiving = mpicoll.irecv(source=left, tag=4, out=out)
                sending = mpicoll.isend(x, right, 4)
                if background:
                    assert mpicoll.waitany([receiving])[0] == 0
                got = receiving.wait() if not background else out
                with arrays.stream():
                    np.testing.assert_array_equal(arrays.get(got * 2), np.full(count, 2 * left))
                np.testing.assert_array_equal(arrays.get(before), np.full(count, 7))
                sending.wait()


def requests_are_in_order(arrays: Arrays) -> None:
    """Run nonblocking collectives that overlap each other, with late inputs and results used on another stream."""
    world = mpicoll.world()
    new = arrays.put(np.full(30_000, world.rank + 1, np.float32))
    arrays.wait()
    total = world.size * (world.size + 1) // 2
    requests = []
    for number in range(4):
        with arrays.stream():
            x = arrays.put(np.full(30_000, -1, np.float32))
            arrays.wait()
            arrays.delay()
            arrays.assign(x, new * (number + 1))
            requests.append(mpicoll.iallreduce(x))
    for number, request in enumerate(requests):
        got = request.wait()
        with arrays.stream():
            np.testing.assert_array_equal(arrays.get(got * 1), np.full(30_000, total * (number + 1)))


def named_stream_is_waited_for(arrays: Arrays) -> None:
    """Pass an object that has the CUDA array interface only, and names the stream that writes it."""
    world = mpicoll.world()
    new = arrays.put(np.full(1000, world.rank, np.float32))
    x = arrays.put(np.full(1000, -1, np.float32))
    arrays.wait()
    # The stream must live until the call has been made.
    with arrays.stream() as _stream:
        arrays.delay()
        arrays.assign(x, new)
        exported = arrays.interface(x)
        out = arrays.put(np.zeros(1000, np.float32))
        shown = arrays.interface(out)
    # The current stream has no work on it now.
    got = mpicoll.allreduce(exported, out=shown)
    assert got is shown
    np.testing.assert_array_equal(arrays.get(out), np.full(1000, sum(range(world.size))))


def input_may_be_overwritten_at_once(arrays: Arrays) -> None:
    """Overwrite the input when a call has returned: other ranks, too, must have read what they need of it."""
    world = mpicoll.world()
    for way in WAYS:
        count = most(way, 60_000)
        ones, garbage = (arrays.put(np.full(count, value, np.float32)) for value in (1, 1e6))
        arrays.wait()
        with arrays.stream():
            x = ones * 1
            out = garbage * 1
            if world.rank == world.size - 1:
                arrays.delay()  # it comes last
            for _ in range(5):
                got = _served(way, lambda x=x, out=out, way=way: mpicoll.allreduce(x, out=out, algorithm=way))
                if got is None:
                    break
                arrays.assign(x, garbage)
                arrays.wait()
                np.testing.assert_array_equal(arrays.get(out), np.full(count, world.size), str(way))
                arrays.assign(x, ones)


def capture_is_refused(arrays: Arrays) -> None:
    """Call a collective while a graph is captured: it must be refused, and the next call must work."""
    world = mpicoll.world()
    x = arrays.put(np.ones(10, np.float32))
    arrays.wait()
    with arrays.capturing():
        with pytest.raises(mpicoll.DeviceError, match="captur"):
            mpicoll.allreduce(x)
        with pytest.raises(mpicoll.DeviceError, match="captur"):
            mpicoll.isend(x, world.rank)
    np.testing.assert_array_equal(arrays.get(mpicoll.allreduce(x)), np.full(10, world.size))


# --- memory


def memory_does_not_grow(arrays: Arrays, calls: int) -> None:
    """Check that repeated calls do not increase the memory in use on the device or the host."""
    for way in WAYS:
        x = arrays.put(np.ones(most(way, 20_000), np.float32))

        def call(x: Any = x, way: str | None = way) -> Any:
            return _served(way, lambda: mpicoll.allreduce(x, algorithm=way))

        if call() is None:
            continue
        for _ in range(calls // 10):
            call()
        arrays.forget()
        before, resident = arrays.used(), _resident()
        for _ in range(calls):
            call()
        arrays.forget()
        # Ranks share the device, so allocations of other ranks are included here.
        assert arrays.used() - before < 4 << 20, way
        assert _resident() - resident < 16 << 20, way
    _, _, right, left = _ring()
    x = arrays.put(np.ones(20_000, np.float32))
    for turn in range(calls):
        if turn == calls // 10:
            arrays.forget()
            before, resident = arrays.used(), _resident()
        mpicoll.sendrecv(x, right, left)
    arrays.forget()
    assert arrays.used() - before < 4 << 20, "messages"
    assert _resident() - resident < 16 << 20, "messages"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def freed_memory_comes_again(arrays: Arrays) -> None:
    """Free buffers, return them to the device and allocate new ones, at old addresses and with other sizes."""
    world = mpicoll.world()
    # Allocators of devices have other ways with much memory; the one that is played has the same for all of it.
    unit = 25_000 if arrays.played else 100_000
    for turn, count in enumerate((3 * unit, 7 * unit, 3 * unit, 10, 20 * unit, 7 * unit) * 2):
        inputs = [np.full(count, turn + rank, np.float32) for rank in range(world.size)]
        x = arrays.put(inputs[world.rank])
        out = arrays.put(np.zeros(count, np.float32))
        for way in (None, "ipc"):
            if _served(way, lambda x=x, out=out, way=way: mpicoll.allreduce(x, out=out, algorithm=way)) is None:
                continue
            np.testing.assert_array_equal(arrays.get(out), np.sum(inputs, axis=0), f"{way}, turn {turn}")
        gathered = mpicoll.allgather(x)
        np.testing.assert_array_equal(arrays.get(gathered), np.concatenate(inputs))
        if turn % 3 == world.rank % 3:
            # Not on all ranks at the same time.
            del x, out, gathered
            arrays.forget()


def parts_of_an_allocation(arrays: Arrays) -> None:
    """Reduce views into a large array, at different offsets on each rank."""
    world = mpicoll.world()
    whole = arrays.put(np.arange(1_000_000, dtype=np.float32))
    for way in WAYS:
        for first in (10, 1000, 999_000):
            begin = first - world.rank
            got = _served(
                way, lambda begin=begin, way=way: mpicoll.allreduce(whole[begin : begin + 999], algorithm=way)
            )
            if got is not None:
                want = sum(np.arange(first - rank, first - rank + 999, dtype=np.float64) for rank in range(world.size))
                np.testing.assert_array_equal(arrays.get(got), want, str(way))


def memory_that_cannot_be_shared(arrays: Cupy) -> None:
    """Reduce memory that no other process can open: the result is right by every way."""
    world = mpicoll.world()
    mine, total = np.full(60_000, world.rank, np.float32), np.full(60_000, sum(range(world.size)))
    for way in WAYS:
        x, out = arrays.unexportable(mine), arrays.unexportable(np.zeros_like(mine))
        # On all ranks, and on some of them: the others' can be opened.
        for one, into in ((x, out), (arrays.put(mine) if world.rank % 2 else x, out), (x, arrays.put(mine))):
            if (
                _served(way, lambda one=one, into=into, way=way: mpicoll.allreduce(one, out=into, algorithm=way))
                is None
            ):
                break
            np.testing.assert_array_equal(arrays.get(into), total, str(way))
    gathered = arrays.get(mpicoll.allgather(arrays.unexportable(mine)))
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(world.size), 60_000))


# --- what can't be


def places_must_agree(arrays: Arrays) -> None:
    """Check that input and output of a call must both be on the device, or both on the host."""
    x = arrays.put(np.ones(3, np.float32))
    for one, other in ((x, np.ones(3, np.float32)), (np.ones(3, np.float32), x)):
        with pytest.raises(mpicoll.DeviceError, match="the host"):
            mpicoll.allreduce(one, out=other)
        with pytest.raises(mpicoll.DeviceError, match="the host"):
            mpicoll.allreduce((one, other), "minloc")
    with pytest.raises(mpicoll.ShapeError):
        mpicoll.allreduce(x, out=arrays.put(np.ones(4, np.float32)))
    with pytest.raises(mpicoll.DTypeError):
        mpicoll.allreduce(x, out=arrays.put(np.ones(3, np.float64)))
    np.testing.assert_array_equal(arrays.get(mpicoll.allreduce(x)), np.full(3, mpicoll.world().size))


def host_and_device_take_turns(arrays: Arrays) -> None:
    """Run collectives on the host and on the device in alternation on one communicator."""
    world = mpicoll.world()
    for turn in range(5):
        on_device = mpicoll.iallreduce(arrays.put(np.full(1000, turn, np.float32)))
        on_host = mpicoll.iallreduce(np.full(1000, turn, np.float32))
        assert mpicoll.allreduce(1) == world.size
        np.testing.assert_array_equal(arrays.get(on_device.wait()), np.full(1000, turn * world.size))
        np.testing.assert_array_equal(on_host.wait(), np.full(1000, turn * world.size))


def after_a_collective(arrays: Arrays, body: Callable[[Arrays], None]) -> None:
    """Call `body` when the ranks have found out if they reach each other's memory."""
    mpicoll.allreduce(arrays.put(np.ones(1)))
    body(arrays)
    mpicoll.barrier()


MESSAGES = (
    messages_of_every_dtype_and_layout,
    messages_of_every_size,
    messages_between_host_and_device,
    truncated_message,
    messages_are_in_order,
)
"""Bodies that send messages."""

EVERYWHERE = (
    order_of_ranks_is_kept,
    nan_is_extreme,
    all_ranks_get_the_same_bits,
    pairs,
    messages_of_every_dtype_and_layout,
    messages_of_every_size,
    messages_between_host_and_device,
    truncated_message,
    input_is_waited_for,
    output_is_waited_for,
    host_runs_ahead,
    messages_are_in_order,
    requests_are_in_order,
    named_stream_is_waited_for,
    input_may_be_overwritten_at_once,
    capture_is_refused,
    freed_memory_comes_again,
    parts_of_an_allocation,
    places_must_agree,
    host_and_device_take_turns,
)
"""Bodies whose only argument is `arrays`."""
