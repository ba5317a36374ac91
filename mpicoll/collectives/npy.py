"""save, load: .npy files of arrays that are divided among the ranks."""

from __future__ import annotations

import ast
import json
import os
import re
import threading
from io import BytesIO
from math import prod
from typing import Any, Literal, overload

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.dtypes import Array
from mpicoll.collectives.arguments import ArrayT, adds_rank_to_errors, get_block_shape
from mpicoll.collectives.empty import check_shape
from mpicoll.collectives.file import File, make_subarray, prepare_input, prepare_output
from mpicoll.engine.core.arrays import even_displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import CommLike, as_communicator, resolve
from mpicoll.errors import ArgumentError, DTypeError, FileError, MismatchError, ShapeError

_MAGIC = b"\x93NUMPY"

_PLAIN = re.compile(r"\{'descr': '([^']*)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), *\}")
"""The header of an array whose dtype has no fields."""

_parsing = threading.Lock()
"""Held while a header is parsed: the parser of Python 3.11 is not safe for several threads, which ranks may be."""

_HEAD = 4096
"""Bytes that are read first; nearly all headers are shorter."""


def save(
    path: str | os.PathLike[str], x: Any, *, starts: int | tuple[int, ...] | None = None, comm: CommLike = None
) -> None:
    """Write an array that is divided among the ranks to a .npy file, which numpy.load reads.

    Without `starts` the blocks of the ranks lie one behind the other along the first axis, in the order of rank. An
    existing file is replaced. The ranks write their blocks at the same time; no rank has the whole array. The call is
    bounded by the timeout of the communicator.

    Args:
        path: the file, on a file system that all ranks have; the same on every rank.
        x: this rank's block: a numpy array or a torch tensor on the CPU, of any dtype of fixed size, the same on every
            rank; it may be empty. bfloat16 is stored as numpy does it, as dtype V2.
        starts: the index of the first element of `x` in the whole array, for blocks that are divided along other axes,
            or several. The blocks of all ranks must fill an array without gaps, and must not overlap.
        comm: the communicator; None is :func:`mpicoll.world`.

    Raises:
        DTypeError, ShapeError: an argument is invalid; raised on all ranks before the file is created (on ranks
            whose own arguments are valid, as ArgumentError).
        MismatchError: the blocks have different dtypes, or do not fit together; the file was not created.
        FileError: a rank can't write to the file; the same error on all ranks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mpicoll.save(f"{folder}/x.npy", np.array([[1, 2], [3, 4]]))
        ...     np.load(f"{folder}/x.npy")
        array([[1, 2],
               [3, 4]])
    """
    core = resolve(comm)
    error: ArgumentError | None = None
    mine: dict[str, Any] = {}
    buffer: Buffer | None = None
    try:
        buffer = prepare_input(core, "save", x)
        mine = _describe_block(core, buffer, starts)
    except ArgumentError as failure:
        error = failure
    blocks = _exchange(core, "save", mine, error)
    assert buffer is not None
    sizes, first = _join(core, blocks)
    header = _make_header(_find_descr(buffer), sizes)
    block = buffer.array.reshape(get_block_shape(buffer)) if starts is None else buffer.array
    with File.open(path, "w", comm=as_communicator(comm)) as file:
        file.write_at_all(0, np.frombuffer(header if core.rank == 0 else b"", np.uint8))
        file.write_subarray_all(len(header), block, sizes, first[core.rank])


@overload
def load(
    path: str | os.PathLike[str],
    starts: int | tuple[int, ...] | None = ...,
    shape: int | tuple[int, ...] | None = ...,
    dtype: Any = ...,
    *,
    like: Literal["numpy"] = ...,
    out: None = ...,
    comm: CommLike = ...,
) -> Array: ...
@overload
def load(
    path: str | os.PathLike[str],
    starts: int | tuple[int, ...] | None = ...,
    shape: int | tuple[int, ...] | None = ...,
    dtype: Any = ...,
    *,
    like: str,
    out: None = ...,
    comm: CommLike = ...,
) -> Any: ...
@overload
def load(
    path: str | os.PathLike[str],
    starts: int | tuple[int, ...] | None = ...,
    shape: int | tuple[int, ...] | None = ...,
    dtype: Any = ...,
    *,
    like: str = ...,
    out: ArrayT,
    comm: CommLike = ...,
) -> ArrayT: ...
def load(
    path: str | os.PathLike[str],
    starts: int | tuple[int, ...] | None = None,
    shape: int | tuple[int, ...] | None = None,
    dtype: Any = None,
    *,
    like: str = "numpy",
    out: Any = None,
    comm: CommLike = None,
) -> Any:
    """Read this rank's block of an array in a .npy file, which :func:`save` or numpy.save has written.

    Without `starts`, the rows of the array are divided evenly among the ranks, in the order of rank; the first ranks
    get one row more where they can't be. Each rank reads only its block. The call is bounded by the timeout of the
    communicator.

    Args:
        path: the file, on a file system that all ranks have; the same on every rank.
        starts: the index of the first element of this rank's block. Blocks may overlap, or be empty.
        shape: the shape of this rank's block. With `starts`, pass it or `out`.
        dtype: the dtype of the block, which must be that of the file (None). A file of bfloat16 has dtype V2: pass
            "bfloat16" with ``like="torch"``, or that of ml_dtypes.
        like: the library of the result, "numpy" or "torch".
        out: an array for the block; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.

    Returns:
        An array of `like`'s library with this rank's block; `out` if given.

    Raises:
        DTypeError, ShapeError: an argument is invalid, or does not fit the array in the file; raised on all ranks (on
            ranks whose own arguments are valid, as ArgumentError).
        FileError: a rank can't read the file, or it is no .npy file; the same error on all ranks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/x.npy", np.array([[1, 2], [3, 4]]))
        ...     mpicoll.load(f"{folder}/x.npy", starts=(0, 1), shape=(2, 1))
        array([[2],
               [4]])
    """
    core = resolve(comm)
    with File.open(path, "r", comm=as_communicator(comm)) as file:
        try:
            buffer = _load(core, file, starts, shape, dtype, like, out)
        except (ArgumentError, FileError):  # on all ranks
            file.close()
            raise
    return buffer.result() if out is None else out


def _load(core: CommunicatorCore, file: File, *arguments: Any) -> Buffer:
    """Return the buffer of this rank's block, filled. Collective; all ranks raise ArgumentError if one has to."""
    found, fortran, sizes, begin = _read_header(core, file)
    error: ArgumentError | None = None
    buffer: Buffer | None = None
    first: tuple[int, ...] = ()
    try:
        buffer, first = _prepare_load(core, found, sizes, *arguments)
    except ArgumentError as failure:
        error = failure
    _exchange(core, "load", {}, error)
    assert buffer is not None
    if fortran and len(sizes) > 1:
        # In the file lies the transposed array in C order.
        part = np.empty(buffer.array.shape[::-1], buffer.array.dtype)
        file.read_subarray_all(begin, sizes[::-1], first[::-1], out=part)
        np.copyto(buffer.array, part.T)
    else:
        file.read_subarray_all(begin, sizes, first, out=buffer.array)
    return buffer


def _exchange(
    core: CommunicatorCore, operation: str, mine: dict[str, Any], error: ArgumentError | None
) -> list[dict[str, Any]]:
    """Return every rank's `mine`. Collective. If a rank passes an `error`, it raises that, and the other ranks an
    ArgumentError that quotes it."""

    def run() -> list[dict[str, Any]]:
        text = json.dumps(mine if error is None else {"error": str(error)})
        parts = [json.loads(one) for one in ([text] if core.size == 1 else core.transport.allgather_text(text))]
        problem = next((one["error"] for one in parts if "error" in one), None)
        if error is not None:
            raise error
        if problem is not None:
            raise ArgumentError(problem)
        return parts

    parts: list[dict[str, Any]] = core.queue.run(run, Call(operation))
    return parts


@adds_rank_to_errors
def _describe_block(core: CommunicatorCore, buffer: Buffer, starts: Any) -> dict[str, Any]:
    """Return what the other ranks have to know of this rank's block."""
    shape = get_block_shape(buffer) if starts is None else buffer.array.shape
    first = None if starts is None else check_shape("save", starts, "starts")
    if first is not None and len(first) != len(shape):
        raise ShapeError(f"save: starts must be {len(shape)} indices, one for each axis of x, got {starts!r}")
    return {"shape": shape, "starts": first, "descr": repr(_find_descr(buffer)), "name": buffer.dtype.text}


def _find_descr(buffer: Buffer) -> Any:
    """Return the description of the dtype in the header; raw bytes where numpy has no name for it."""
    dtype = buffer.array.dtype
    if dtype.names is not None:
        return np.lib.format.dtype_to_descr(dtype)
    try:
        if buffer.dtype.name != "bfloat16" and np.dtype(dtype.str) == dtype:
            return dtype.str
    except TypeError:  # of ml_dtypes
        pass
    return f"|V{dtype.itemsize}"


def _join(core: CommunicatorCore, blocks: list[dict[str, Any]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the shape of the whole array, and the first index of each rank's block. All ranks raise the same
    MismatchError if the blocks do not fit together."""
    shapes = [tuple(one["shape"]) for one in blocks]
    for key, what in (("descr", "dtypes"), ("name", "dtypes")):
        if len({one[key] for one in blocks}) > 1:
            raise _mismatch(core, f"have different {what}: {', '.join(one['name'] for one in blocks)}", key)
    if len({(len(shape), one["starts"] is None) for shape, one in zip(shapes, blocks, strict=True)}) > 1:
        raise _mismatch(core, f"have different dimensions, or only some have starts=: {shapes}", "shape")
    if blocks[0]["starts"] is None:
        if len({shape[1:] for shape in shapes}) > 1:
            raise _mismatch(core, f"have different extents behind the first axis: {shapes}", "shape")
        ends = np.cumsum([0, *(shape[0] for shape in shapes)]).tolist()
        return (ends[-1], *shapes[0][1:]), [(end, *(0 for _ in shapes[0][1:])) for end in ends[:-1]]
    first = [tuple(one["starts"]) for one in blocks]
    low, extents = (np.array(one, np.int64).reshape(len(blocks), len(shapes[0])) for one in (first, shapes))
    filled = extents.prod(axis=1) > 0
    sizes = tuple((low + extents)[filled].max(axis=0).tolist()) if filled.any() else tuple(extents.max(axis=0).tolist())
    # An empty block lies anywhere.
    first = [one if full else (0,) * len(one) for one, full in zip(first, filled, strict=True)]
    for rank in np.flatnonzero(filled):
        others = np.flatnonzero(filled[:rank])
        apart = (low[others] >= low[rank] + extents[rank]) | (low[rank] >= low[others] + extents[others])
        overlap = others[~apart.any(axis=1)]
        if overlap.size:
            raise _mismatch(core, f"overlap: those of ranks {overlap[0]} and {rank}", "starts")
    total = sum(prod(shape) for shape in shapes)
    if total != prod(sizes):
        raise _mismatch(core, f"have {total} elements, and leave gaps in an array of shape {sizes}", "starts")
    return sizes, first


def _mismatch(core: CommunicatorCore, problem: str, field: str) -> MismatchError:
    return MismatchError(f"save: the blocks of the ranks {problem} (rank {core.rank} of {core.size})", (), (field,))


def _make_header(descr: Any, shape: tuple[int, ...]) -> bytes:
    file = BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    try:
        np.lib.format.write_array_header_1_0(file, fields)
    except ValueError:  # more than 64 KiB, of a structured dtype
        file = BytesIO()
        np.lib.format.write_array_header_2_0(file, fields)
    return file.getvalue()


def _read_header(core: CommunicatorCore, file: File) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Return the dtype of the array in a .npy file, whether it is in Fortran order, its shape, and the offset of its
    data. Collective; raises FileError on all ranks if it is none."""

    def read(begin: int, end: int) -> bytes:
        part: Array = file.read_at_all(begin, end - begin, np.uint8)
        return part.tobytes()

    size = file.get_size()
    head = read(0, min(size, _HEAD))
    try:
        width = {1: 2, 2: 4, 3: 4}[head[6]] if head.startswith(_MAGIC) else 0
        begin = 8 + width
        end = begin + int.from_bytes(head[8:begin], "little")
        if not width or end > size:
            raise ValueError("it does not begin with a header")
        if end > len(head):
            head += read(len(head), end)
        fields = _parse(head[begin:end].decode("utf-8" if head[6] == 3 else "latin-1").strip())
        found = np.lib.format.descr_to_dtype(fields["descr"])
        shape = tuple(map(int, fields["shape"]))
        return found, bool(fields["fortran_order"]), shape, end
    except (LookupError, SyntaxError, TypeError, ValueError) as error:
        where = f"rank {core.rank} of {core.size}"
        raise FileError(f"load: {file.name!r} is not a .npy file: {error} ({where})", file.name) from error


def _parse(text: str) -> Any:
    """Return the dict that `text` is in Python's syntax."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None:
        shape = tuple(int(extent) for extent in plain[3].split(",") if extent.strip())
        return {"descr": plain[1], "fortran_order": plain[2] == "True", "shape": shape}
    with _parsing:
        return ast.literal_eval(text)


@adds_rank_to_errors
def _prepare_load(
    core: CommunicatorCore,
    found: np.dtype[Any],
    sizes: tuple[int, ...],
    starts: Any,
    shape: Any,
    dtype: Any,
    like: str,
    out: Any,
) -> tuple[Buffer, tuple[int, ...]]:
    """Return the buffer of this rank's block of an array of the dtype `found`, and its first index."""
    dtypes.of_numpy(found)  # raises DTypeError for Python objects
    if starts is not None:
        first = check_shape("load", starts, "starts")
    elif shape is not None:
        raise ShapeError("load: shape is given without starts; pass both, or none to divide the rows")
    else:
        first, rows = _divide(core, sizes)
        if out is None:
            shape = rows
        elif tuple(getattr(out, "shape", rows)) != rows:
            raise ShapeError(f"load: out has shape {tuple(out.shape)}, and this rank's rows have shape {rows}")
    if out is None and dtype is None:
        dtype = found if like == "numpy" else found.name
        if like == "torch" and (found.kind == "V" or not found.isnative):
            raise DTypeError(f"load: the file has dtype {found}, for which torch has none; pass dtype= for the words")
    buffer = prepare_output(core, "load", shape, dtype, like, out)
    theirs = buffer.array.dtype
    if theirs != found and not (found.kind == "V" and found.names is None and theirs.itemsize == found.itemsize):
        raise DTypeError(f"load: the block has dtype {buffer.dtype.text}, but the file has {found}")
    make_subarray("load", theirs.itemsize, sizes, first, buffer.array.shape)
    return buffer, first


def _divide(core: CommunicatorCore, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first index and the shape of this rank's rows; all ranks have a 0-d array as a whole."""
    if not sizes:
        return (), ()
    begin, end = even_displacements(sizes[0], core.size)[core.rank : core.rank + 2]
    return (begin, *(0 for _ in sizes[1:])), (end - begin, *sizes[1:])
