"""Bridges for containers, such as docker0: keep Open MPI from using them between hosts.

docker0 has the same address on each host. Open MPI takes it for a network that joins them, each host connects to itself
there, and the job ends with "received unexpected process identifier".
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mpicoll.proc_files import read_file
from mpicoll.transport import launch_env
from mpicoll.transport.control.interfaces import find_addresses, find_default_address, is_bridge

EXCLUDE = "OMPI_MCA_btl_tcp_if_exclude"

_SETTING = "btl_tcp_if_"

_DEFAULT = "127.0.0.1/8,sppp"
"""The interfaces that Open MPI excludes by default."""


def exclude_from(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Open MPI ignores the bridges of this host, to be set before MPI_Init.

    Empty for a job on one host, for a launcher that does not state the size of the job, without bridges, and where
    the user or the site selects interfaces: Open MPI refuses a list of interfaces to use beside one of those to ignore.
    """
    size = launch_env.launched_size(environ)
    if size is None or launch_env.local_ranks(environ, size) == size:
        return {}
    default, addresses = find_default_address(), find_addresses()
    used = {one.interface for one in addresses if not is_bridge(one) or one.address == default}
    bridges = sorted({one.interface for one in addresses} - used)
    if not used or not bridges or are_interfaces_selected(environ):
        return {}
    return {EXCLUDE: ",".join([_DEFAULT, *bridges])}


def are_interfaces_selected(environ: Mapping[str, str]) -> bool:
    """Return True if a variable or a file of the user or the site selects the interfaces that Open MPI uses."""
    if any(name.startswith("OMPI_MCA_" + _SETTING) for name in environ):
        return True
    launcher = shutil.which("mpirun", path=environ.get("PATH"))
    prefixes = [environ.get("OPAL_PREFIX"), sys.prefix, launcher and Path(launcher).resolve().parents[1]]
    files = [Path(prefix, "etc", "openmpi-mca-params.conf") for prefix in prefixes if prefix]
    files += [
        Path("/etc/openmpi/openmpi-mca-params.conf"),
        Path(environ.get("HOME", "/"), ".openmpi", "mca-params.conf"),
    ]
    for file in files:
        with suppress(OSError):
            if re.search(rf"^\s*{_SETTING}(include|exclude)\s*=", read_file(os.fspath(file)), re.MULTILINE):
                return True
    return False
