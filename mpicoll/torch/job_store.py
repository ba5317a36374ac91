"""The store of a job, through which torch's own backends such as gloo find the other ranks.

On one node it is a file without a name, which only the processes of the job have open, so that neither other hosts nor
other users of the node can reach it. It disappears with the last process, however the job ends. Where the ranks of the
node can't open a common file, the store is a TCPStore at the loopback interface. Between nodes it is a TCPStore at the
first interface that all ranks reach, open to every process that reaches it as well.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mpicoll.collectives.objects import allgather_object, bcast_object
from mpicoll.config import config
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import SetupError
from mpicoll.transport.control.interfaces import find_default_address, select_addresses

STORE_TIMEOUT = timedelta(minutes=5)

_LOOPBACK = "127.0.0.1"

_BACKLOG = 1024
"""Connections that a listening socket queues; one per rank at most."""


@dataclass(frozen=True)
class JobStore:
    """The store of the ranks of `comm`, and the values of MASTER_ADDR and MASTER_PORT."""

    comm: Communicator
    store: dist.Store
    address: str
    port: int

    def is_base_of(self, store: dist.Store) -> bool:
        """Return True if `store` is this store, with or without prefixes."""
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store is self.store


def create_job_store(comm: Communicator) -> JobStore:
    """Return the store of all ranks of `comm`. Collective.

    Raises SetupError if this rank can connect to none of rank 0's addresses.
    """
    if comm.size == 1:
        return JobStore(comm, dist.HashStore(), "localhost", 0)
    if comm.num_nodes > 1:
        return _create_tcp_store(comm)
    store = _create_file_store(comm)
    if store is None:
        return _create_tcp_store(comm)
    return JobStore(comm, store, _LOOPBACK, bcast_object(_reserve_port() if comm.rank == 0 else None, comm=comm))


def _create_file_store(comm: Communicator) -> dist.Store | None:
    """Return a store in a file without a name, or None if the ranks can't open the same file. Collective."""
    file = _create_file() if comm.rank == 0 else None
    try:
        path = bcast_object(file, comm=comm)
        descriptor = None if path is None else _open(path)
        is_open = all(allgather_object(descriptor is not None, comm=comm))
    finally:
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)
    if descriptor is None:
        return None
    if not is_open:
        os.close(descriptor)
        return None
    # The descriptor is never closed: the store, which programs may keep, opens the file by its number.
    store = dist.FileStore(_path_of(descriptor))
    store.set_timeout(STORE_TIMEOUT)
    return store


def _create_file() -> Path | None:
    """Return the path of a new file in a new folder that only this user can enter, or None."""
    for place in ("/dev/shm", tempfile.gettempdir()):
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="mpicoll-store-", dir=place))
            try:
                descriptor = os.open(folder / "store", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    # Fails if the file system is full.
                    os.write(descriptor, bytes(1))
                    os.ftruncate(descriptor, 0)
                finally:
                    os.close(descriptor)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return folder / "store"
    return None


def _open(path: Path) -> int | None:
    """Return a descriptor by whose number the file can be opened again after it was removed, or None."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        os.close(os.open(_path_of(descriptor), os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _reserve_port() -> int:
    """Return a port that stays free for the store that torch's own env:// may create on this rank.

    A socket is bound to it until this process ends, but does not listen, so no program can connect to it.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As torch's listening socket has it: otherwise the two could not have the same port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((_LOOPBACK, 0))
    port = int(sock.getsockname()[1])
    sock.detach()
    return port


def _create_tcp_store(comm: Communicator) -> JobStore:
    """Return a store that rank 0 serves at a free port of one interface, which all ranks reach. Collective.

    On one node it is the loopback interface. If no interface is reached by all ranks, the store is served at all of
    them, or SetupError is raised on all ranks if rank 0 has MPICOLL_INTERFACE.
    """
    mine = (_find_addresses(), config().interface) if comm.rank == 0 else None
    candidates, selection = bcast_object(mine, comm=comm)
    for address in [_LOOPBACK] if comm.num_nodes == 1 else candidates:
        listening = _listen(address) if comm.rank == 0 else None
        port = bcast_object(None if listening is None else listening.getsockname()[1], comm=comm)
        if port is None:
            continue
        reached = all(allgather_object(_can_connect(address, port), comm=comm))
        if listening is None:
            if reached:
                return JobStore(comm, _connect(address, port), address, port)
        elif reached:
            # The store closes the descriptor.
            store = _connect(address, port, is_master=True, listening=listening.detach())
            return JobStore(comm, store, address, port)
        else:
            listening.close()
    if selection and comm.num_nodes > 1:
        raise SetupError(
            f"init_process_group: MPICOLL_INTERFACE={','.join(selection)} selects {', '.join(candidates)} on the host"
            " of rank 0, and not all ranks can connect to one of these addresses; select another interface, or open"
            " the firewall"
        )
    return _create_open_store(comm, candidates)


def _create_open_store(comm: Communicator, addresses: list[str]) -> JobStore:
    """Return a store that rank 0 serves at all interfaces. Each rank connects to the first address that it reaches.

    Raises SetupError if this rank can connect to none of rank 0's addresses.
    """
    if comm.rank == 0:
        server = _connect("localhost", 0, is_master=True)
        bcast_object(server.port, comm=comm)
        return JobStore(comm, server, addresses[0], server.port)
    port = bcast_object(comm=comm)
    # Ranks on rank 0's node can use the loopback interface.
    if comm.node == comm.nodes[0]:
        addresses = [_LOOPBACK, *addresses]
    address = next((one for one in addresses if _can_connect(one, port)), None)
    if address is None:
        raise SetupError(
            f"init_process_group: rank {comm.rank} ({socket.gethostname()}) can't connect to any address of rank 0,"
            f" {', '.join(addresses)}, at port {port}; open it in the firewall, or set MASTER_ADDR and MASTER_PORT,"
            " RANK and WORLD_SIZE, so that torch's env:// creates the store"
        )
    return JobStore(comm, _connect(address, port), address, port)


def _listen(address: str) -> socket.socket | None:
    """Return a socket that listens at a free port of `address`, or None if this host does not have the address."""
    try:
        return socket.create_server((address, 0), backlog=_BACKLOG)
    except OSError:
        return None


def _connect(address: str, port: int, *, is_master: bool = False, listening: int | None = None) -> dist.TCPStore:
    """Return a client of the store at `address` and `port`.

    `is_master` also starts its server, at the `listening` socket if that is given.
    """
    return dist.TCPStore(
        address,
        port,
        None,
        is_master,
        STORE_TIMEOUT,
        # Lets torch's own env:// use the same server, whose address is in the variables that env:// reads.
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening,
    )


def _find_addresses() -> list[str]:
    """Return the addresses of this host, those that other hosts are most likely to reach first."""
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    with suppress(ValueError):  # nodes of one host, which need no other interface
        if config().interface:
            return [*found, *(one.address for one in select_addresses(config().interface))]
    if default := find_default_address():
        found.append(default)
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with suppress(OSError):
        found += [socket.gethostbyname(socket.getfqdn())]
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda one: one.startswith("127.")) or ["localhost"]


def _can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True
