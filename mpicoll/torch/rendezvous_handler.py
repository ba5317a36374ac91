"""Rendezvous of the ranks of a process group: rank, size and store from MPI."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from mpicoll.collectives.bcast import bcast
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import world
from mpicoll.errors import ArgumentError, SetupError

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_PATIENCE = timedelta(minutes=5)

# So that torch's own env:// may use the same server: its address is where env:// looks.
_SHARED = {"wait_for_workers": False, "multi_tenant": True}

_rounds = 0
_meetings = itertools.count()


def place(rank: int = -1, size: int = -1) -> tuple[dist.Store, int, int]:
    """Store, rank and number of ranks of a default group of all ranks of the MPI job. Collective over them.

    `rank` and `size` are what the caller of init_process_group has given. Raises SetupError if another launcher started
    this process, ArgumentError if `rank` or `size` is not MPI's.
    """
    global _rounds  # noqa: PLW0603  process groups are numbered by process
    comm = world()
    refuse_other_launchers(comm.size, os.environ)
    for name, given, value in (("rank", rank, comm.rank), ("world_size", size, comm.size)):
        if given not in (-1, value):
            raise ArgumentError(
                f"init_process_group: {name}={given}, but MPI says {value} (rank {comm.rank} of {comm.size});"
                " leave rank and world_size out, they come from MPI"
            )
    _rounds += 1
    return dist.PrefixStore(f"mpicoll/{_rounds}", _store()), comm.rank, comm.size


def environment_complete(rank: int, size: int, environ: Mapping[str, str]) -> bool:
    """Return True if the environment has all that ``env://`` needs, and not from a process group of mpicoll.

    `rank` and `size` are the caller's, or -1.
    """
    theirs = {name for name in _ENVIRONMENT if environ.get(name, "") != _published.get(name, "")}
    given = {"RANK": rank >= 0, "WORLD_SIZE": size > 0}
    return all(name in theirs or given.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))


def refuse_other_launchers(size: int, environ: Mapping[str, str]) -> None:
    """Raise SetupError where a launcher that is not MPI's has started several processes, each a world of one."""
    if size > 1:
        return
    other = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "a launcher that is not MPI's"
    for name, launcher, remedy in (
        ("WORLD_SIZE", other, "let `mpirun -np N python script.py` (or mpicoll.spawn) start them instead"),
        ("SLURM_STEP_NUM_TASKS", "srun", _SRUN),
    ):
        text = environ.get(name, "")
        if text.isdigit() and int(text) > 1 and name not in _published:
            raise SetupError(
                f"init_process_group: {launcher} started {text} processes ({name}={text}), but MPI sees a world of one:"
                f" {remedy}"
            )


_SRUN = "start them by `srun --mpi=pmix` (see `srun --mpi=list`) with an MPI that Slurm knows, or by mpirun"

_published: dict[str, str] = {}
"""What this module has put into the environment."""


_served: tuple[Communicator, dist.Store] | None = None
"""The store of the world, and what world that is."""


def _store() -> dist.Store:
    """The store of this job, made by the first process group and kept for all later ones, until a rank dies that may
    have served it. Collective, when it is made."""
    global _served  # noqa: PLW0603  there is one world
    comm = world()
    if _served is None or _served[0] is not comm:
        _served = comm, _made(comm)
    return _served[1]


def _made(comm: Communicator) -> dist.Store:
    if comm.size == 1:
        store: dist.Store = dist.HashStore()
        address, port = "localhost", 0
    else:
        store, address, port = _tcp_store(comm)
    values = (address, port, comm.rank, comm.size, comm.local_rank, comm.local_size)
    for name, value in zip(_ENVIRONMENT, values, strict=True):
        # For torch's own functions that look there, get_node_local_rank among them. What the user has set stays.
        if os.environ.get(name) == _published.get(name):
            os.environ[name] = _published[name] = str(value)
    return store


def _tcp_store(comm: Communicator) -> tuple[dist.Store, str, int]:
    """A store that rank 0 serves at a free port."""
    if comm.rank == 0:
        server = dist.TCPStore("localhost", 0, None, is_master=True, timeout=_PATIENCE, **_SHARED)
        addresses = ["localhost"] if comm.num_nodes == 1 else _addresses()
        _tell(comm, f"{server.port} {' '.join(addresses)}")
        return server, addresses[0], server.port
    port, *addresses = _tell(comm, "").split()
    # Those on rank 0's node may take the short way.
    if comm.node == comm.nodes[0]:
        addresses.insert(0, "localhost")
    address = next((one for one in addresses if _reachable(one, int(port))), None)
    if address is None:
        raise SetupError(
            f"init_process_group: rank {comm.rank} ({socket.gethostname()}) reaches none of the addresses of rank 0,"
            f" {', '.join(addresses)}, at port {port}; open it in the firewall, or set MASTER_ADDR and MASTER_PORT,"
            " RANK and WORLD_SIZE, to have torch's own env:// make the store"
        )
    return dist.TCPStore(address, int(port), None, is_master=False, timeout=_PATIENCE, **_SHARED), address, int(port)


def _tell(comm: Communicator, text: str) -> str:
    """Rank 0's text, on every rank."""
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(bcast(np.array(data.size), comm=comm))
    filled = np.empty(size, np.uint8)
    bcast(data if comm.rank == 0 else filled, out=filled, comm=comm)
    return filled.tobytes().decode()


def _addresses() -> list[str]:
    """The addresses of this host, the likelier ones first."""
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: this asks which of our addresses leads to the outside.
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with suppress(OSError):
        found += [socket.gethostbyname(socket.getfqdn())]
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda one: one.startswith("127.")) or ["localhost"]


def _reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True


def members(store: dist.Store, rank: int, size: int) -> list[int]:
    """The ranks, in mpicoll's world, of the `size` processes that meet at `store`, in the order of their `rank` there.

    Raises ArgumentError if two of them are one process of the world.
    """
    comm = world()

    def meet() -> list[int]:
        store.set(f"world_rank/{rank}", str(comm.rank))
        return [int(store.get(f"world_rank/{other}")) for other in range(size)]

    if size == comm.size:
        if store.add("come", 1) == 1:
            store.set("meeting", f"{comm.rank}.{next(_meetings)}")
        # All stores that ranks meet at have another name, whatever their order is on each rank.
        name = store.get("meeting").decode()
        ranks: list[int] = comm.progress.meet(meet, Call(f"init_process_group({name})", collective=False))
    else:  # which ranks will come is not known
        with comm.progress.waiting(Call("init_process_group", collective=False), _PATIENCE.total_seconds()):
            ranks = meet()
    if len(set(ranks)) != size:
        raise ArgumentError(f"init_process_group: ranks of the group share a rank of the MPI job: {ranks}")
    return ranks
