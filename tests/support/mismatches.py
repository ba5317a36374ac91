"""Generated mismatches: different calls of the ranks, and the expected errors.

A case is the call of most ranks and that of a few others, drawn from a seed. :func:`check` runs it on the ranks of a
world, with MPICOLL_CHECK or without, and describes deviations from the expected outcome: on every rank a MismatchError
that names both calls, the field in which they differ and the ranks, the same on all of them; after which the
communicator works.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mpicoll
from mpicoll.engine.core.call_comparison import BATCH

KINDS = ("operation", "dtype", "shape", "op", "root", "counts", "order")
"""Mismatches that all ranks detect at once."""

FATAL = ("group", "missing")
"""Mismatches that leave ranks waiting for others."""

NBYTES = (8, 1 << 10, 64 << 10, 1 << 20)
"""Sizes of messages for which MPI, schedules and shared memory are used."""

FACES = ("native", "torch")
FORMS = ("blocking", "background")

REDUCE = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("bcast", "reduce", "gather", "scatter")
COUNTED = ("allgather", "gather", "reduce_scatter", "alltoall")
OPERATIONS = ("allreduce", "bcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall", "barrier")
NATIVE_ONLY = ("scan", "exscan")

TORCH = {
    "allreduce": "all_reduce",
    "bcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather_single",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter_single",
    "alltoall": "all_to_all_single",
    "barrier": "barrier",
}
"""Names of the collectives in torch, and in messages about its calls."""


@dataclass(frozen=True)
class Spec:
    """A collective. `rows` (a multiple of the ranks) and `columns` are those of the whole array, or of each rank's.
    `uneven` moves a row from the block of the first rank to that of the second."""

    operation: str
    dtype: str = "float32"
    rows: int = 12
    columns: int = 2
    op: str = "sum"
    root: int = 0
    counted: bool = False
    uneven: bool = False

    def named(self, face: str) -> str:
        """Return the name of the collective in messages."""
        if face == "native":
            return self.operation
        return "all_gather" if self.operation == "allgather" and self.counted else TORCH[self.operation]


@dataclass(frozen=True)
class Case:
    """A case in which `odd` ranks call `theirs`, one after the other, and the other ranks `usual`."""

    number: int
    kind: str
    face: str
    form: str
    size: int
    odd: tuple[int, ...]
    usual: tuple[Spec, ...]
    theirs: tuple[Spec, ...]

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.kind}, {self.face}, {self.form}, {self.size} ranks, {list(self.odd)} differ:"
            f" {self.usual} against {self.theirs}"
        )


def case(seed: str, number: int, size: int, face: str, nbytes: int | None = None) -> Case:
    """Return case `number` for `size` ranks and one face, on arrays of about `nbytes` if given; kinds and forms
    alternate."""
    rng = random.Random(f"{seed}/{number}/{size}/{face}")
    kind, form = KINDS[number % len(KINDS)], FORMS[number // len(KINDS) % 2]
    odd = tuple(sorted(rng.sample(range(size), rng.randint(1, max(1, (size - 1) // 2)))))
    among = {"op": REDUCE, "root": ROOTED, "counts": COUNTED}.get(kind, OPERATIONS)
    if face == "torch" and kind == "counts":
        among = ("allgather", "alltoall")
    if kind in ("operation", "order") and face == "native":
        among += NATIVE_ONLY
    if kind in ("dtype", "shape"):
        among = tuple(one for one in among if one != "barrier")
    usual = _spec(rng, rng.choice(among), size, counted=kind == "counts")
    if nbytes is not None:
        rows = nbytes // np.dtype(usual.dtype).itemsize // usual.columns // size * size
        usual = replace(usual, rows=max(2 if usual.counted else 1, rows // size) * size)
    if kind == "counts" and usual.operation == "alltoall":
        usual = replace(usual, uneven=False)  # only the odd ranks have uneven blocks
    if kind in ("operation", "order"):
        other = rng.choice([one for one in among if one != usual.operation])
        theirs = replace(usual, operation=other) if rng.random() < 0.5 else _spec(rng, other, size)
    elif kind == "dtype":
        theirs = replace(usual, dtype=rng.choice([one for one in _DTYPES if one != usual.dtype]))
    elif kind == "shape":
        theirs = replace(usual, **rng.choice([{"columns": 3}, {"rows": 2 * usual.rows}, {"columns": 5, "rows": 24}]))
    elif kind == "op":
        theirs = replace(usual, op=rng.choice([one for one in _OPS if one != usual.op]))
    elif kind == "root":
        theirs = replace(usual, root=rng.choice([one for one in range(size) if one != usual.root]))
    else:
        theirs = replace(usual, uneven=not usual.uneven)
    if kind == "order":
        return Case(number, kind, face, form, size, odd, (usual, theirs), (theirs, usual))
    return Case(number, kind, face, form, size, odd, (usual,), (theirs,))


_DTYPES = ("float32", "float64", "int32", "int64", "float16")
_OPS = ("sum", "max", "min", "prod")


def _spec(rng: random.Random, operation: str, size: int, *, counted: bool = False) -> Spec:
    rows, columns = rng.choice([12, 24, 1200]), rng.choice([1, 2])
    return Spec(
        operation,
        rng.choice(_DTYPES),
        rows,
        columns,
        rng.choice(_OPS),
        rng.randrange(size),
        counted,
        rng.random() < 0.5,
    )


def _counts(spec: Spec, size: int) -> list[int]:
    counts = [spec.rows // size] * size
    if spec.uneven:
        counts[0] += 1
        counts[1] -= 1
    return counts


# --- calling it


def native(spec: Spec, comm: mpicoll.Communicator, form: str) -> None:
    """Call the collective through the native API."""
    rank, size = comm.rank, comm.size
    name = spec.operation
    counts = _counts(spec, size) if spec.counted else None
    rows = spec.rows if counts is None or name in ("reduce_scatter", "alltoall") else counts[rank]
    if name == "scatter" and rank != spec.root:
        rows //= size
    x = np.ones((rows, spec.columns), spec.dtype)
    kwargs: dict[str, Any] = {"comm": comm}
    if name in (*REDUCE, *NATIVE_ONLY):
        kwargs["op"] = spec.op
    if name in ROOTED:
        kwargs["root"] = spec.root
    if counts is not None:
        # If the blocks are uneven, other ranks receive more, or less, from this one than they expect.
        arrivals = [counts[rank] if other == rank else spec.rows // size for other in range(size)]
        kwargs["counts"] = (counts, arrivals) if name == "alltoall" else counts
    arguments = () if name == "barrier" else (x,)
    if form == "blocking":
        getattr(mpicoll, name)(*arguments, **kwargs)
    else:
        getattr(mpicoll, f"i{name}")(*arguments, **kwargs).wait()


def torch(spec: Spec, group: Any, form: str) -> None:
    """Call the collective through torch."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts, rows = _counts(spec, size), spec.rows // size
    arrivals = [counts[rank] if other == rank else rows for other in range(size)]
    kwargs: dict[str, Any] = {"group": group, "async_op": form == "background"}
    ops = {"prod": dist.ReduceOp.PRODUCT}
    op = ops.get(spec.op) or getattr(dist.ReduceOp, spec.op.upper())

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, spec.columns, dtype=getattr(torch, spec.dtype))

    x = ones(spec.rows)
    mine = rank == spec.root
    calls: dict[tuple[str, bool], Callable[[], Any]] = {
        ("allreduce", False): lambda: dist.all_reduce(x, op, **kwargs),
        ("bcast", False): lambda: dist.broadcast(x, spec.root, **kwargs),
        ("reduce", False): lambda: dist.reduce(x, spec.root, op, **kwargs),
        ("allgather", False): lambda: dist.all_gather_single(ones(size * spec.rows), x, **kwargs),
        ("allgather", True): lambda: dist.all_gather([ones(one) for one in counts], ones(counts[rank]), **kwargs),
        ("gather", False): lambda: dist.gather(
            x, [ones(spec.rows) for _ in range(size)] if mine else None, spec.root, **kwargs
        ),
        ("scatter", False): lambda: dist.scatter(
            ones(rows), list(x.split(rows)) if mine else None, spec.root, **kwargs
        ),
        ("reduce_scatter", False): lambda: dist.reduce_scatter_single(ones(rows), x, op, **kwargs),
        ("alltoall", False): lambda: dist.all_to_all_single(torch.empty_like(x), x, **kwargs),
        ("alltoall", True): lambda: dist.all_to_all_single(ones(sum(arrivals)), x, arrivals, counts, **kwargs),
        ("barrier", False): lambda: dist.barrier(**kwargs),
    }
    work = calls[spec.operation, spec.counted]()
    if work is not None:
        work.wait()


Call = Callable[[Spec, str], None]
"""A call of a collective of one face on one communicator."""


def check(wanted: Case, comm: mpicoll.Communicator, call: Call, *, checked: bool = True) -> str:
    """Return the deviations from the expected outcome of `wanted` on `comm`; empty if there are none. Collective. If
    the calls are not `checked`, the error of a nonblocking call need not name its source line."""
    mine = wanted.theirs if comm.rank in wanted.odd else wanted.usual
    texts: list[str] = []
    wrong: list[str] = []
    for spec, usual, theirs in zip(mine, wanted.usual, wanted.theirs, strict=True):
        try:
            call(spec, wanted.form)
        except mpicoll.MismatchError as error:
            texts.append(str(error))
            wrong += _wrong(wanted, error, usual, theirs, sites=checked or wanted.form == "blocking")
        except Exception as error:  # noqa: BLE001  it is told
            texts.append("")
            wrong.append(f"{type(error).__name__} on rank {comm.rank}: {error}")
        else:
            texts.append("")
            wrong.append(f"nothing was raised on rank {comm.rank}")
    told = comm._core.transport.allgather_text("\n".join([*texts, *wrong]))
    if wrong or len(set(told)) > 1:
        everyone = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
        return f"{wanted}\n{'; '.join(wrong) or 'the ranks are told different things'}\n{everyone}"
    with mpicoll.debug(check=False):
        total = mpicoll.allreduce(comm.rank, comm=comm)
    if mpicoll.allreduce(comm.rank, comm=comm) != total or total != sum(range(comm.size)):
        return f"{wanted}\nthe communicator gives wrong results afterwards"
    return ""


def _wrong(wanted: Case, error: mpicoll.MismatchError, usual: Spec, theirs: Spec, *, sites: bool) -> list[str]:
    """Return the facts that `error` lacks or states wrongly."""
    field = {"order": "operation"}.get(wanted.kind, wanted.kind)
    found = []
    if field not in error.fields:
        found.append(f"{field} is not among the fields {error.fields}")
    if field not in str(error).splitlines()[0]:
        found.append(f"{field} is not named")
    # If both parties have the same size, either may be reported as the odd one.
    others = tuple(rank for rank in range(wanted.size) if rank not in wanted.odd)
    if wanted.kind == "counts" and usual.operation == "alltoall":
        if not set(error.ranks) & set(wanted.odd):
            found.append(f"none of the odd ranks is among {error.ranks}")
    elif error.ranks != wanted.odd and not (len(others) == len(wanted.odd) and error.ranks == others):
        found.append(f"the ranks that differ are {error.ranks}")
    for rank, one in enumerate(error.calls):
        spec = theirs if rank in wanted.odd else usual
        if one is None or not one["text"].startswith(f"{spec.named(wanted.face)}("):
            found.append(f"rank {rank} called {spec.named(wanted.face)}, and is said to have called {one}")
        elif sites and (one["site"] is None or "mismatches.py:" not in one["site"]):
            found.append(f"rank {rank} is said to have called from {one['site']}")
    return found


def cases(seed: str, count: int, sizes: Sequence[int], face: str) -> list[Case]:
    """Return `count` cases, for all `sizes` in rotation."""
    return [case(seed, number // len(sizes), sizes[number % len(sizes)], face) for number in range(count)]


def by_default(face: str, size: int) -> list[Case]:
    """Return a case of each kind, form and size that is detected without MPICOLL_CHECK, on any number of nodes: the
    rows of alltoall are not compared between nodes."""
    cases = [case("by default", number, size, face, nbytes) for nbytes in NBYTES for number in range(2 * len(KINDS))]
    return [one for one in cases if one.kind != "counts" or one.usual[0].operation != "alltoall"]


def between_nodes() -> list[str]:
    """Return the deviations of mismatches where the ranks share no memory, on communicators of the world, with the
    default checks only. Collective."""
    world = mpicoll.world()
    failures = []
    for one in by_default("native", world.size):
        comm = world.duplicate()
        failures.append(check(one, comm, lambda spec, form, comm=comm: native(spec, comm, form), checked=False))
        comm.free()
    failures += [
        _late(world.duplicate(), before, form)
        for before, form in (
            (BATCH - 1, "background"),
            (BATCH, "background"),
            (BATCH + 5, "blocking"),
            (2 * BATCH - 1, "background"),
        )
    ]
    return [one for one in failures if one]


def _late(comm: mpicoll.Communicator, before: int, form: str) -> str:
    """Return the deviations of a mismatch after `before` collectives that match, in calls of `form`. Collective."""
    x, last = np.ones(2), comm.rank == comm.size - 1
    for _ in range(before):
        mpicoll.allreduce(x, comm=comm)
    said, raised = "", before
    try:
        while raised < 3 * BATCH:
            raised += 1
            op = "prod" if last and raised == before + 1 else "sum"
            if form == "blocking":
                mpicoll.allreduce(x, op=op, comm=comm)  # in the extension, except for the one that differs
            else:
                mpicoll.iallreduce(x, op=op, comm=comm).wait()
    except mpicoll.MismatchError as error:
        said = str(error)
    # The next collective at which calls are compared.
    due = before + 1 if before < BATCH else (before // BATCH + 1) * BATCH
    wrong = [
        text
        for text, is_so in [
            (f"it was raised at collective {raised} in the place of {due}", raised != due),
            ("it does not say which collective", f"disagree about collective {before + 1}: " not in said),
            ("it does not say in what they differ", "they differ in op" not in said),
            ("it does not say what may be wrong", ("may be wrong" in said) != (raised > before + 1)),
        ]
        if is_so
    ]
    again = 0
    try:
        again = mpicoll.allreduce(1, comm=comm)
    except mpicoll.CommunicatorError as error:
        if "called different collectives" not in str(error):
            wrong.append(f"later calls raise {error}")
    if again != (comm.size if raised == before + 1 else 0):
        wrong.append(f"a later call gives {again}")
    if comm.duplicate()._core.transport.allgather_text(said) != [said] * comm.size:
        wrong.append("the ranks are told different things")
    comm.free()
    return f"after {before}: {'; '.join(wrong)}\n{said}" if wrong else ""
