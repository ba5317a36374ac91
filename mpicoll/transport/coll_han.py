"""Open MPI's collectives between hosts, its component coll/han: they succeed although a rank has died meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from mpicoll.transport import launch_env

PRIORITY = "OMPI_MCA_coll_han_priority"

_COMPONENTS = "OMPI_MCA_coll"


def disable_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a fault-tolerant job on several hosts does without this component; to be set before
    MPI_Init. Empty for other jobs, and if the user or the site has set its priority."""
    return {PRIORITY: "-1"} if launch_env.is_fault_tolerant(environ) and PRIORITY not in environ else {}


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return True if MPI does without this component, in a process whose variables at MPI_Init were `environ`."""
    with suppress(ValueError):  # of a priority that is no number
        if int(environ.get(PRIORITY, "0")) < 0:
            return True
    # A list of the components to use, or after a ^ of those to leave out.
    components = environ.get(_COMPONENTS, "")
    names = components.removeprefix("^").split(",")
    return bool(components) and ("han" in names) == components.startswith("^")
