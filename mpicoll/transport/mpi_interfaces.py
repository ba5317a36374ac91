"""The interfaces of MPICOLL_INTERFACE, as settings of Open MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpicoll.transport import launch_env
from mpicoll.transport.container_bridges import are_interfaces_selected
from mpicoll.transport.control.interfaces import select_addresses

INCLUDE = "OMPI_MCA_btl_tcp_if_include"


def include_only(environ: Mapping[str, str], selection: Sequence[str]) -> dict[str, str]:
    """Return the variables by which Open MPI connects hosts at the interfaces that `selection`, the words of
    MPICOLL_INTERFACE, selects. To be set before MPI_Init.

    Empty without a selection, for a job on one host, for a launcher that does not state the size of the job, where the
    user or the site selects the interfaces of Open MPI, and if this host has none of the selected ones: all ranks raise
    an error for that when they connect, which names the host.
    """
    size = launch_env.launched_size(environ)
    if not selection or size is None or launch_env.local_ranks(environ, size) == size:
        return {}
    if are_interfaces_selected(environ):
        return {}
    try:
        # By name: Open MPI prints a warning about a word that is no interface of this host.
        names = {one.interface for one in select_addresses(selection)}
    except ValueError:
        return {}
    return {INCLUDE: ",".join(sorted(names))}
