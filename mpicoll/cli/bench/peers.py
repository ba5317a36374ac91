"""The contestants of a benchmark: mpicoll's candidates and its peers.

A contestant prepares a case once, and returns the call that runs it as its users would: peers on preallocated arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpicoll
from mpicoll.cli.bench import device_arrays, ring_cases
from mpicoll.cli.bench.cases import COLLECTIVES, REDUCTIONS, RING_CASES, ArrayKind, Case, wide
from mpicoll.config import config
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import SetupError

TimedCall: TypeAlias = Callable[[], Any]


class Unavailable(Exception):
    """The contestant lacks the requested operation; the message is the reason."""


class Ready(NamedTuple):
    """The call that runs a case, and its result; `result` is None if the call returns the result or there is none."""

    call: TimedCall
    result: Any = None


def _by_oracle(case: Case, got: Any) -> str | None:
    return case.workload.check(case.rank, got)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A contestant of a benchmark. `prepare` makes a case ready, or raises Unavailable; a first run must follow at
    once, whose result `check` examines, returning a description of the error or None. Contestants of one `phase` are
    timed in rotation, those of different phases separately. `barrier` begins a block of calls (None: MPI's), `finish`
    ends it.
    """

    name: str
    prepare: Callable[[Case], Ready]
    kind: ArrayKind = "numpy"
    ours: bool = False
    phase: str = "mpi"
    check: Callable[[Case, Any], str | None] = _by_oracle
    barrier: TimedCall | None = None
    finish: TimedCall | None = None


_COUNTED = ("gather", "scatter", "allgather", "reduce_scatter", "alltoall")
_FROM_ROOT = ("bcast", "scatter")

WRITE = "write"
"""The contestant of :func:`write`, which moves nothing: it has neither a bandwidth nor a ratio to a peer."""


def candidate(
    name: str,
    *,
    kind: ArrayKind,
    form: str = "",
    out: bool = True,
    algorithm: str | None = None,
    counts: bool = False,
    absent: bool = False,
    strided: bool = False,
) -> Contestant:
    """Return mpicoll as a contestant: the call (`form` ""), the nonblocking form ("i") or the plan ("_init"), with
    `out` or without; with equal `counts`; with `absent` arrays, None, on ranks that pass no data; with `strided`
    input."""

    def prepare(case: Case) -> Ready:
        collective = case.workload.collective
        if collective in RING_CASES:
            _check_ring_case(case, plain=out and algorithm is None and not (counts or absent or strided), form=form)
            return Ready(*ring_cases.prepare(case, start=form == "i"))
        function = getattr(mpicoll, f"i{collective}" if form == "i" else f"{collective}{form}")
        keywords: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
        arguments: tuple[Any, ...] = ()
        if collective != "barrier":
            x = case.x
            if strided:
                x = np.repeat(x, 2)[::2]
            if absent and collective not in _FROM_ROOT:
                raise Unavailable("for bcast and scatter only")
            if absent and case.rank != 0:
                x = None
            arguments = (x, case.workload.op) if collective in REDUCTIONS else (x,)
            if out or case.workload.in_place:
                keywords["out"] = case.out
        elif absent or strided:
            raise Unavailable("a barrier takes no arrays")
        if counts:
            if collective not in _COUNTED:
                raise Unavailable(f"not for {', '.join(one for one in COLLECTIVES if one not in _COUNTED)}")
            each = (case.workload.rows,) * case.workload.ranks
            keywords["counts"] = (each, each) if collective == "alltoall" else each
        if form == "_init":
            return Ready(function(*arguments, **keywords))
        call = partial(function, *arguments, **keywords)
        # `out` is None on ranks that receive nothing; without `out` each call allocates its result.
        return Ready(call, case.out) if form else Ready(_end_on_host(call, case))

    return Contestant(name, prepare, kind, ours=True)


def _end_on_host(call: TimedCall, case: Case) -> TimedCall:
    """Return a call that ends when its result is there."""
    if case.on_device is not None and config().cuda_order == "stream":
        return device_arrays.add_synchronization(call, case.on_device)
    return call


def _check_ring_case(case: Case, *, plain: bool, form: str) -> None:
    """Raise Unavailable if the case has no call of this form."""
    workload = case.workload
    if not plain or form == "_init" or (form and workload.collective in ("put", "get", "accumulate")):
        raise Unavailable(f"{workload.collective} has no such form")
    if workload.collective == "accumulate" and workload.op != "sum":
        raise Unavailable("accumulate is measured with sum")


def mpi4py(comm: Communicator, *, kind: ArrayKind, name: str = "mpi4py", form: str = "") -> Contestant:
    """Return raw mpi4py on a duplicated communicator: the call (`form` "") or its nonblocking form. Collective."""
    own = comm.mpi.Dup()
    from mpi4py import MPI

    ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    def prepare(case: Case) -> Ready:
        collective, x, out = case.workload.collective, case.x, case.out
        if collective in RING_CASES:
            _check_ring_case(case, plain=True, form=form)
            if case.workload.dtype in ("float16", "bfloat16"):
                raise Unavailable("some MPI libraries have no such dtype")
            return Ready(*ring_cases.prepare_mpi4py(case, own))
        method = getattr(
            own, f"{form}{'reduce_scatter_block' if collective == 'reduce_scatter' else collective}".capitalize()
        )
        if collective == "barrier":
            return Ready(method)
        if collective == "bcast":
            return Ready(partial(method, x), x)
        if collective in REDUCTIONS:
            if case.workload.op not in ops:
                raise Unavailable(f"MPI has no {case.workload.op}")
            if case.workload.dtype == "float16":
                raise Unavailable("some MPI libraries end the process when they are to reduce float16")
            return Ready(partial(method, x, out, ops[case.workload.op]), out)
        if collective == "scatter" and case.rank != 0:
            return Ready(partial(method, None, out), out)
        return Ready(partial(method, x, out), out)

    def check(case: Case, got: Any) -> str | None:
        # MPI does not define rank 0's result of an exscan.
        return None if case.workload.collective == "exscan" and case.rank == 0 else _by_oracle(case, got)

    return Contestant(name, prepare, kind, check=check)


def copy(kind: ArrayKind = "numpy") -> Contestant:
    """Return one copy of the buffer on every rank at once, the yardstick of large collectives: where ranks share a
    device, an allreduce has to read and write at least as much of its memory."""

    def prepare(case: Case) -> Ready:
        if case.workload.collective == "barrier":
            raise Unavailable("a barrier moves nothing")
        if case.on_device is not None:
            return Ready(*device_arrays.copying(case.on_device, case.workload.nbytes))
        # Pages that were never written map the same physical page.
        source, target = np.full(case.workload.nbytes, 1, np.uint8), np.full(case.workload.nbytes, 2, np.uint8)
        return Ready(partial(np.copyto, target, source), target)

    return Contestant("copy", prepare, kind, check=lambda case, got: _check_copy(got))


def write(kind: ArrayKind = "numpy") -> Contestant:
    """Return the writes of :func:`write_before` alone."""

    def prepare(case: Case) -> Ready:
        if case.workload.collective == "barrier":
            raise Unavailable("a barrier has no input")
        return Ready(case.rewrite)

    return Contestant(WRITE, prepare, kind, check=lambda case, got: None)


def write_before(contestant: Contestant) -> Contestant:
    """Return `contestant` with calls before which each rank writes its input, which is in no other cache then. A
    barrier, which has no input, is called as without it."""

    def prepare(case: Case) -> Ready:
        run, result = contestant.prepare(case)
        if case.workload.collective == "barrier":
            return Ready(run, result)
        rewrite = case.rewrite

        def call() -> Any:
            rewrite()
            return run()

        return Ready(call, result)

    return replace(contestant, prepare=prepare)


def _check_copy(got: Any) -> str | None:
    return None if (wide(got) == 1).all() else "nothing was copied"


def of_torch(
    backend: str,
    comm: Communicator,
    *,
    kind: ArrayKind,
    asynchronous: bool = False,
    dropin: bool = False,
    name: str = "",
    apart: bool = True,
) -> Contestant:
    """Return torch.distributed, or its `dropin` :mod:`mpicoll.torch`, on a process group of `backend`, in a separate
    phase if `apart`. Collective; see :func:`close`.

    mpicoll and gloo work on the CPU tensors, nccl on copies on this rank's device. Tensors on a device stay there: all
    contestants work on them in rotation, and each call waits for its result. Raises SetupError on all ranks if a node
    has fewer devices for nccl than ranks.
    """
    import torch
    import torch.distributed as dist

    place: Any = _device(torch, comm) if backend == "nccl" else "cpu"
    beside = kind == "cuda torch"
    if beside:
        place = torch.device("cuda", torch.cuda.current_device())
    group = create_group(dist, backend)
    functions: Any = dist
    if dropin:
        from mpicoll import torch as functions

    def tensor(array: Any) -> Any:
        if array is None:
            return None
        return (torch.from_numpy(array) if isinstance(array, np.ndarray) else array).to(place)

    def prepare(case: Case) -> Ready:
        function, arguments, result = _torch_call(functions, case, tensor(case.x), tensor(case.out))
        keywords = {"async_op": True} if asynchronous else {}
        call = partial(function, *arguments, group=group, **keywords)
        return Ready(device_arrays.add_synchronization(call, "torch") if beside else call, result)

    if beside or not apart:
        return Contestant(name or backend, prepare, kind, ours=backend == "mpicoll")
    return Contestant(
        backend,
        prepare,
        kind,
        ours=backend == "mpicoll",
        phase=backend,
        barrier=partial(dist.barrier, group=group),
        finish=torch.cuda.synchronize if place != "cpu" else None,
    )


def add_wait(contestant: Contestant) -> Contestant:
    """Return `contestant` with calls that wait for the request they have started."""

    def prepare(case: Case) -> Ready:
        start, result = contestant.prepare(case)

        def call() -> None:
            start().wait()

        return Ready(call, result)

    return replace(contestant, prepare=prepare)


def make_absent(name: str, kind: ArrayKind, why: str) -> Contestant:
    """Return a contestant that is not available, with the reason `why`."""

    def prepare(case: Case) -> Ready:
        raise Unavailable(why)

    return Contestant(name, prepare, kind)


def close() -> None:
    """Destroy the process groups, and what the cases have created. Collective."""
    ring_cases.close()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def _device(torch: Any, comm: Communicator) -> str:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if any(comm.mpi.allgather(there < comm.local_size)):
        raise SetupError(
            "--against nccl needs a CUDA device for each rank of a node, and there are fewer (here"
            f" {there} for {comm.local_size}); leave nccl out, or start fewer ranks"
        )
    torch.cuda.set_device(comm.local_rank)
    return f"cuda:{comm.local_rank}"


def create_group(dist: Any, backend: str) -> Any:
    """Return a new process group of all ranks. Collective."""
    if dist.is_initialized():
        return dist.new_group(backend=backend)
    from mpicoll.torch import rendezvous_handler

    store, rank, size = rendezvous_handler.rendezvous_over_mpi()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return dist.group.WORLD


def _torch_call(dist: Any, case: Case, x: Any, out: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return the function, its arguments, and its result."""
    workload, root = case.workload, case.rank == 0
    op = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(workload.op, workload.op.upper()))
    if workload.collective == "allreduce":
        out.copy_(x)  # it works in place only, as does reduce
        return dist.all_reduce, (out, op), out
    if workload.collective == "reduce":
        target = out.copy_(x) if root else x.clone()
        return dist.reduce, (target, 0, op), target
    if workload.collective == "gather":
        return dist.gather, (x, list(out.chunk(workload.ranks)) if root else None, 0), out
    if workload.collective == "scatter":
        return dist.scatter, (out, list(x.chunk(workload.ranks)) if root else None, 0), out
    if workload.collective == "reduce_scatter":
        # The names before torch 2.13 come second.
        return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, (out, x, op), out
    others: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
        "bcast": (dist.broadcast, (x, 0), x),
        "allgather": (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor, (out, x), out),
        "alltoall": (dist.all_to_all_single, (out, x), out),
        "barrier": (dist.barrier, (), None),
    }
    if workload.collective not in others:
        raise Unavailable(f"torch.distributed has no {workload.collective}")
    return others[workload.collective]
