"""The interfaces of MPICOLL_INTERFACE, as settings of MPI libraries and of the libraries below them.

They name the interfaces of TCP connections. A library that has faster devices uses these nevertheless.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mpicoll.transport import launch_env
from mpicoll.transport.container_bridges import are_interfaces_selected
from mpicoll.transport.control.interfaces import select_addresses

INCLUDE = "OMPI_MCA_btl_tcp_if_include"
"""Of Open MPI: a list."""

LIBFABRIC = "FI_TCP_IFACE"
"""Of libfabric, which Intel MPI and MPICH use: one interface."""

UCX = "UCX_NET_DEVICES"
"""Of UCX, which MPICH uses: a list of all devices, InfiniBand's among them."""

_RDMA_DEVICES = "/sys/class/infiniband", "/sys/class/cxi", "/sys/class/gni"
"""Of InfiniBand, RoCE, Omni-Path and EFA; of Slingshot; of Aries."""


def include_only(environ: Mapping[str, str], selection: Sequence[str]) -> dict[str, str]:
    """Return the variables by which the MPI library connects hosts at the interfaces that `selection`, the words of
    MPICOLL_INTERFACE, selects. To be set before MPI_Init.

    Empty without a selection, for a job on one host, for a launcher that does not state the size of the job, and if
    this host has none of the selected ones: all ranks raise an error for that when they connect, which names the host.
    A library whose interfaces the user or the site selects gets no variable, nor does UCX on a host with RDMA devices:
    it prefers these, and they have names of their own.
    """
    size = launch_env.launched_size(environ)
    if not selection or size is None or launch_env.local_ranks(environ, size) == size:
        return {}
    try:
        # By name: Open MPI prints a warning about a word that is no interface of this host.
        names = sorted({one.interface for one in select_addresses(selection)})
    except ValueError:
        return {}
    settings = {LIBFABRIC: names[0]}
    if not are_interfaces_selected(environ):
        settings[INCLUDE] = ",".join(names)
    if not has_rdma_devices():
        settings[UCX] = ",".join(names)
    return {name: value for name, value in settings.items() if name not in environ}


def has_rdma_devices() -> bool:
    """Return True if this host has network devices that MPI libraries use without TCP."""
    for folder in _RDMA_DEVICES:
        with suppress(OSError):
            if os.listdir(folder):  # noqa: PTH208  pathlib takes milliseconds to import
                return True
    return False
