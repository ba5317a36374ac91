"""Rendezvous of the ranks of a process group: rank, size and store from MPI."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import resolve, world
from mpicoll.errors import ArgumentError, SetupError
from mpicoll.torch.job_store import STORE_TIMEOUT, JobStore, create_job_store
from mpicoll.transport import launch_env

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_num_rendezvous = 0
_member_rendezvous = itertools.count()


def rendezvous_over_mpi(rank: int = -1, size: int = -1) -> tuple[dist.Store, int, int]:
    """Return the store, rank and number of ranks of a default group of all ranks of the MPI job. Collective over them.

    `rank` and `size` are the arguments of init_process_group, or -1. Raises SetupError if another launcher started this
    process, ArgumentError if `rank` or `size` differs from MPI's value.
    """
    global _num_rendezvous  # noqa: PLW0603  process groups are numbered by process
    comm = world()
    reject_other_launchers(comm.size, os.environ)
    for name, given, value in (("rank", rank, comm.rank), ("world_size", size, comm.size)):
        if given not in (-1, value):
            raise ArgumentError(
                f"init_process_group: {name}={given}, but {value} in MPI (rank {comm.rank} of {comm.size}); omit rank"
                " and world_size, which are taken from MPI"
            )
    _num_rendezvous += 1
    return dist.PrefixStore(f"mpicoll/{_num_rendezvous}", _get_store()), comm.rank, comm.size


def rendezvous(original: Callable[..., Any], url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Take rank, size and store from MPI, unless the program gives all values that ``env://`` needs.

    `original` is torch's handler of the `url`, which has the caller's rank and size.
    """
    given = dict(parse_qsl(urlparse(url).query))
    rank, size = int(given.get("rank", -1)), int(given.get("world_size", -1))
    if is_environment_complete(rank, size, os.environ):
        yield from original(url, **kwargs)
    elif (found := find_slurm_rank(rank, size, os.environ)) is not None:
        yield from original(f"{url.partition('?')[0]}?rank={found[0]}&world_size={found[1]}", **kwargs)
    else:
        yield rendezvous_over_mpi(rank, size)


def find_slurm_rank(rank: int, size: int, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks of a process that srun has started without MPI.

    None if MASTER_ADDR or MASTER_PORT is not set. `rank` and `size` are the caller's arguments, or -1."""
    if rank >= 0 or size > 0 or not launch_env.is_outside_mpi(environ):
        return None
    set_by_user = {name: environ[name] for name in environ if environ[name] != _exported.get(name)}
    return launch_env.find_address_rank(set_by_user)


def is_environment_complete(rank: int, size: int, environ: Mapping[str, str]) -> bool:
    """Return True if the environment has all variables that ``env://`` needs, not set by a process group of mpicoll.

    `rank` and `size` are the caller's arguments, or -1.
    """
    set_by_user = {name for name in _ENVIRONMENT if environ.get(name, "") != _exported.get(name, "")}
    given = {"RANK": rank >= 0, "WORLD_SIZE": size > 0}
    return all(name in set_by_user or given.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))


def reject_other_launchers(size: int, environ: Mapping[str, str]) -> None:
    """Raise SetupError if a launcher other than MPI's started several processes, each with a world of one rank."""
    if size > 1:
        return
    other = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "a launcher other than MPI's"
    for name, launcher, remedy in (
        (
            "WORLD_SIZE",
            other,
            _OTHERS,
        ),
        ("SLURM_STEP_NUM_TASKS", "srun", _SRUN),
    ):
        text = environ.get(name, "")
        if text.isdigit() and int(text) > 1 and name not in _exported:
            raise SetupError(
                f"init_process_group: {launcher} started {text} processes ({name}={text}), but each has a world of one"
                f" rank: {remedy}"
            )


_OTHERS = (
    "set MASTER_ADDR, MASTER_PORT and RANK too, or let `mpirun -np N python script.py` (or mpicoll.spawn) start them"
    " instead"
)

_SRUN = (
    "start them by `srun --mpi=pmix` (see `srun --mpi=list`) with an MPI library that Slurm supports, or by mpirun; or"
    " set MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) to do without MPI"
)

_exported: dict[str, str] = {}
"""Environment variables that this module has set, and their values."""


_job_store: JobStore | None = None


def _get_store() -> dist.Store:
    """Return the store of this job. Collective when it creates the store.

    The first process group creates the store, and later groups use it until the world is replaced after the death of a
    rank, which may have served the store.
    """
    global _job_store  # noqa: PLW0603  there is one world
    comm = world()
    if _job_store is None or _job_store.comm is not comm:
        _job_store = create_job_store(comm)
        values = (_job_store.address, _job_store.port, comm.rank, comm.size, comm.local_rank, comm.local_size)
        for name, value in zip(_ENVIRONMENT, values, strict=True):
            # torch's functions such as get_node_local_rank read these variables. Values that the user has set are kept.
            if os.environ.get(name) == _exported.get(name):
                os.environ[name] = _exported[name] = str(value)
        os.environ[launch_env.MPI_STORE] = f"{_job_store.address}:{_job_store.port}"
    return _job_store.store


def find_world_ranks(store: dist.Store, rank: int, size: int) -> list[int]:
    """Return the ranks, in mpicoll's world, of the `size` processes that use `store`, in the order of their `rank`.

    Groups of the job's own store exchange them by MPI. If the program has passed another store, that alone tells which
    processes belong together. Raises ArgumentError if two of them have the same rank in the world.
    """
    comm = resolve(None)
    if _job_store is not None and size == comm.size and _job_store.is_base_of(store):
        given = allgather_object(rank)
        if sorted(given) != list(range(size)):
            raise ArgumentError(
                f"init_process_group: rank must be a different number in [0, {size}) in each process, got {given}"
            )
        return sorted(range(size), key=given.__getitem__)
    return _exchange_world_ranks(store, rank, size)


def _exchange_world_ranks(store: dist.Store, rank: int, size: int) -> list[int]:
    """Return the result of :func:`find_world_ranks`, exchanged by `store`."""
    comm = resolve(None)

    def exchange_ranks() -> list[int]:
        store.set(f"world_rank/{rank}", str(comm.rank))
        texts = [store.get(f"world_rank/{other}") for other in range(size)]
        return [int(text) if text.isdigit() else -1 for text in texts]

    if size == comm.size:
        if store.add("arrived", 1) == 1:
            store.set("meeting", f"{comm.rank}.{next(_member_rendezvous)}")
        # Each rendezvous has a unique name, so ranks may run concurrent rendezvous in different orders.
        name = store.get("meeting").decode()
        ranks: list[int] = comm.queue.run_unqueued(
            exchange_ranks, Call(f"init_process_group({name})", collective=False)
        )
    else:  # the member ranks are not known yet
        with comm.queue.waiting(Call("init_process_group", collective=False), STORE_TIMEOUT.total_seconds()):
            ranks = exchange_ranks()
    if ranks[rank] != comm.rank or not all(0 <= other < comm.size for other in ranks):
        raise ArgumentError(
            "init_process_group: the store does not contain what the processes of the group have written to it; another"
            " program, or another group without a prefix of its own, writes to it too"
        )
    if len(set(ranks)) != size:
        raise ArgumentError(
            f"init_process_group: several processes of the group have the same rank of the MPI job: {ranks}"
        )
    return ranks
