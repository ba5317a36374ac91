"""Known defects and limits of MPI libraries: which versions have them, and what is done about each.

This is the one table of what depends on an MPI library's name or version. What can be found out by trying it is tried
instead: reductions by :mod:`mpicoll.transport.reductions`, device memory by :mod:`mpicoll.transport.cuda_awareness`.
``mpicoll doctor`` prints the quirks of the library that it finds. The table is outside of
:mod:`mpicoll.transport.mpi`, since importing that package initialises MPI.
"""

from __future__ import annotations

import re

from mpicoll.named_tuple import NamedTuple


class Quirk(NamedTuple):
    """A defect or limit of some MPI libraries.

    `versions` is a regular expression that matches the beginning of their version strings, with single spaces.
    `libraries` names them for readers. `problem` says what goes wrong, `measure` what mpicoll does about it, or what
    the user has to set.
    """

    name: str
    libraries: str
    versions: str
    problem: str
    measure: str

    def applies_to(self, version: str) -> bool:
        """Return True if the library with this version string, the result of MPI_Get_library_version, has it."""
        return re.match(self.versions, " ".join(version.split())) is not None


PERSISTENT_COLLECTIVES = Quirk(
    "persistent collectives",
    "MPICH before 4.3, Intel MPI",
    r"MPICH Version: ([0-3]\.|4\.[0-2])|Intel\(R\) MPI Library",
    "allgather, gather and scatter move a part of the data when they are created, not when they are started, so later"
    " runs return old data; with 3 ranks or more some starts never complete (seen with MPICH 4.0.2, 4.2.3 and Intel MPI"
    " 2021.19; not with MPICH 4.3.2)",
    "plans call the blocking collectives",
)

INTERLEAVED_NODES = Quirk(
    "gather and scatter between hosts",
    "Open MPI 5 and 6",
    r"Open MPI v[56]\.",
    "if the ranks of a host don't follow one another in a communicator of several hosts, MPI_Gather and MPI_Scatter"
    " confuse the blocks at some roots (seen with 5.0.11), and MPI_Gatherv and MPI_Scatterv may never return (its issue"
    " 14165)",
    "gather and scatter are carried out by schedules on such communicators",
)

IGNORED_FAILURES = Quirk(
    "collectives between hosts when a rank dies",
    "Open MPI 5 and 6",
    r"Open MPI v[56]\.",
    "in a fault-tolerant job on several hosts, collectives can succeed with a wrong result when a rank dies, since"
    " coll/han ignores errors (seen with 5.0.11; its issue 11794)",
    "mpicoll disables that component, by OMPI_MCA_coll_han_priority, if it initialises MPI; else schedules carry out"
    " all collectives",
)

UNEVEN_ALLGATHER = Quirk(
    "MPI_Allgatherv when a rank dies",
    "Open MPI 5 and 6",
    r"Open MPI v[56]\.",
    "in a fault-tolerant job, MPI_Allgatherv, and so mpi4py's allgather of objects, can succeed with a wrong result if"
    " a rank dies meanwhile, since one of its algorithms ignores errors (coll/tuned, seen with 5.0.11)",
    "schedules carry out allgather of blocks that differ in size, and mpicoll exchanges objects by MPI_Allgather",
)

REDUCE_IN_PLACE = Quirk(
    "MPI_Reduce in place",
    "all but Open MPI 5, MPICH 5 and Intel MPI 2021.19",
    r"(?!Open MPI v5\.|MPICH Version: 5\.|Intel\(R\) MPI Library 2021\.19)",
    "MPI_Reduce in place was not seen to work at other roots than rank 0; MPICH 4.0 crashes there",
    "the operand is copied there, unless `mpicoll doctor` has found that it works",
)

LARGE_RECEIVES = Quirk(
    "messages that don't fit",
    "Open MPI",
    "Open MPI",
    "all of a large message is written through shared memory, also past the end of the buffer",
    "the size of a message is queried before it is received",
)

TRUNCATED_SIZES = Quirk(
    "sizes of truncated messages",
    "MPICH, Intel MPI",
    r"MPICH|Intel\(R\) MPI",
    "a receive that fails because the message is too large does not report how large it is",
    "TruncationError of irecv and sendrecv names the sender, the tag and the size of the memory, and MPI's own text",
)

SELF_PROGRESS = Quirk(
    "progress by MPI_COMM_SELF",
    "MPICH and its derivatives but Intel MPI",
    r"(?!Open MPI|Intel\(R\) MPI)",
    "MPI_Iprobe on MPI_COMM_SELF makes no progress on other messages (seen with MPICH 4.0.2 and 5.0.2, not with Open"
    " MPI and Intel MPI 2021.19; others were not tested)",
    "ranks that wait in shared memory call it on MPI_COMM_WORLD",
)

BUFFERED_SENDS = Quirk(
    "sends without a receive",
    "Intel MPI",
    r"Intel\(R\) MPI",
    "a rank that waits in MPI takes messages of any size into memory of its own before the program receives them (seen"
    " to 128 MiB), as MPI permits",
    "none: `send` without a receive may complete, and its data takes memory on the receiver",
)

LARGE_PERSISTENT = Quirk(
    "large plans",
    "Open MPI 5",
    r"Open MPI v5\.",
    "persistent collectives use no algorithm for large messages",
    "plans of more than 1 KiB call the blocking collectives",
)

FAILURES = Quirk(
    "failed ranks",
    "all but Open MPI 5",
    r"(?!Open MPI v[5-9])",
    "the job can't continue after a rank has died",
    "mpicoll reports the death and ends the job; for a job that continues, use Open MPI 5 with --with-ft ulfm",
)

CLOSED_CONNECTIONS = Quirk(
    "connections to dead ranks",
    "Open MPI",
    "Open MPI",
    "a rank that waits for messages of another host aborts the job when a connection is closed, before the death of the"
    " rank there can be reported",
    "in jobs on several hosts it waits for a second (its parameter opal_abort_delay), as do calls of MPI_Abort",
)

SURVIVORS = Quirk(
    "MPI_Finalize after a failure",
    "Open MPI 5",
    r"Open MPI v5\.",
    "in a fault-tolerant job MPI_Finalize sometimes waits for ever after a rank has died, and a communicator that is"
    " revoked while another rank still creates it crashes",
    "such a job exits without MPI_Finalize, and the survivors agree before they use a new communicator",
)

COMMUNICATOR_CREATION = Quirk(
    "creation of communicators",
    "Open MPI",
    "Open MPI",
    "a process creates one communicator at a time, and the first collectives of a communicator of several hosts create"
    " some: they wait for a function of MPI that creates one in another thread, and so for all ranks that it waits for"
    " (seen with 5.0.11)",
    "no rank creates a communicator between hosts before all of its ranks have called; for functions of MPI that the"
    " program calls itself, such as MPI_Comm_dup, wait for the nonblocking operations of mpicoll before them",
)

ENDED_LAUNCHER = Quirk(
    "output after SIGTERM",
    "Open MPI 5",
    r"Open MPI v5\.",
    "a launcher that receives SIGTERM prints nothing more of the ranks, and kills them after a quarter of a second",
    "the report of what they waited for is written to the launcher's stderr, if the lowest rank is on its host",
)

NEIGHBOR_ORDER = Quirk(
    "order of two equal neighbours",
    "Intel MPI",
    r"Intel\(R\) MPI",
    "MPI_Neighbor_alltoall on a periodic dimension of one or two ranks stores what a rank has sent to its lower"
    " neighbour as from the lower one, not from the upper one (seen with 2021.19)",
    "neighbor_alltoall of mpicoll calls no function of MPI for it, and has the order of the standard",
)

FINALIZE_BETWEEN_HOSTS = Quirk(
    "MPI_Finalize between hosts",
    "MPICH 4.0",
    r"MPICH Version: 4\.0\b",
    "MPI_Finalize of a job on several hosts often takes seconds, or never returns (seen with 4.0.2 of Debian, which"
    " uses UCX; without mpicoll, too)",
    "none: use MPICH 5 or Open MPI between hosts",
)

SCRIPT_LAUNCHER = Quirk(
    "SIGTERM to mpirun",
    "Intel MPI",
    r"Intel\(R\) MPI",
    "mpirun is a script, which ends at SIGTERM without the ranks that its mpiexec.hydra has started, and runs the"
    " mpiexec.hydra that is first in PATH, also that of another MPI (seen with 2021.19)",
    "`mpicoll run` and mpicoll.spawn end the ranks, which report what they wait for, and put the directory of mpirun"
    " first in PATH; without them, start `mpiexec.hydra` instead of `mpirun`",
)

FILE_ERRORS = Quirk(
    "errors of writing to files",
    "Open MPI",
    "Open MPI",
    "MPI_File_write_at_all succeeds on all ranks if the file system is full (seen with Open MPI 5.0.11), and before"
    " Open MPI 5 MPI_File_write_at does too (seen with 4.1.4)",
    "collective calls of mpicoll.File use the functions of MPI that each rank calls for itself, compare the numbers of"
    " bytes that these have written, and compare the results of all ranks",
)

FILE_VIEWS = Quirk(
    "views of files",
    "MPICH 4.0",
    r"MPICH Version: 4\.0\b",
    'a file view of a subarray ends the job with "Out of memory in file adio/common/flatten.c" (seen with 4.0.2, not'
    " with 5.0.2)",
    "collective calls of mpicoll.File use the functions of MPI that each rank calls for itself",
)

FILE_LOCKS = Quirk(
    "locks of files",
    "Intel MPI",
    r"Intel\(R\) MPI",
    "MPI_File_write_at that fails leaves its bytes of the file locked, and another rank that writes there waits for"
    " ever (seen with 2021.19)",
    "the locks are released after an error",
)

SLOTS = Quirk(
    "root and oversubscription",
    "Open MPI",
    "Open MPI",
    "mpirun refuses to start as root, and more ranks than cores",
    "`mpicoll run` and ci/env.sh set the variables that permit both",
)

QUIRKS = (
    INTERLEAVED_NODES,
    IGNORED_FAILURES,
    UNEVEN_ALLGATHER,
    PERSISTENT_COLLECTIVES,
    REDUCE_IN_PLACE,
    LARGE_RECEIVES,
    FILE_ERRORS,
    FILE_VIEWS,
    FILE_LOCKS,
    TRUNCATED_SIZES,
    SELF_PROGRESS,
    BUFFERED_SENDS,
    LARGE_PERSISTENT,
    FAILURES,
    CLOSED_CONNECTIONS,
    SURVIVORS,
    COMMUNICATOR_CREATION,
    ENDED_LAUNCHER,
    SCRIPT_LAUNCHER,
    FINALIZE_BETWEEN_HOSTS,
    NEIGHBOR_ORDER,
    SLOTS,
)
"""All quirks, those that lead to wrong results first."""


def find_quirks(version: str) -> list[Quirk]:
    """Return the quirks of the MPI library with this version string, the result of MPI_Get_library_version."""
    return [one for one in QUIRKS if one.applies_to(version)]
