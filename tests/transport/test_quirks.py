"""The table of the defects and limits of MPI libraries."""

from __future__ import annotations

import numpy as np
import pytest

import mpicoll
from mpicoll.transport import quirks

OPENMPI5 = "Open MPI v5.0.11, package: Open MPI"
OPENMPI4 = "Open MPI v4.1.4, package: Debian OpenMPI"
MPICH4 = "MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7"
MPICH42 = "MPICH Version:      4.2.3\n"
MPICH43 = "MPICH Version:      4.3.2\n"
MPICH5 = "MPICH Version:      5.0.2\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\n"
INTEL = "Intel(R) MPI Library 2021.19.0 for Linux* OS\n"


@pytest.mark.parametrize(
    ("quirk", "having"),
    [
        (quirks.INTERLEAVED_NODES, {OPENMPI5}),
        (quirks.IGNORED_FAILURES, {OPENMPI5}),
        (quirks.UNEVEN_ALLGATHER, {OPENMPI5}),
        (quirks.PERSISTENT_COLLECTIVES, {MPICH4, MPICH42, INTEL}),
        (quirks.REDUCE_IN_PLACE, {OPENMPI4, MPICH4, MPICH42, MPICH43, CRAY}),
        (quirks.LARGE_RECEIVES, {OPENMPI5, OPENMPI4}),
        (quirks.FILE_ERRORS, {OPENMPI5, OPENMPI4}),
        (quirks.TRUNCATED_SIZES, {MPICH4, MPICH42, MPICH43, MPICH5, INTEL}),
        (quirks.SELF_PROGRESS, {MPICH4, MPICH42, MPICH43, MPICH5, CRAY}),
        (quirks.BUFFERED_SENDS, {INTEL}),
        (quirks.SCRIPT_LAUNCHER, {INTEL}),
        (quirks.FILE_VIEWS, {MPICH4}),
        (quirks.FILE_LOCKS, {INTEL}),
        (quirks.NEIGHBOR_ORDER, {INTEL}),
        (quirks.FINALIZE_BETWEEN_HOSTS, {MPICH4}),
        (quirks.FAILURES, {OPENMPI4, MPICH4, MPICH42, MPICH43, MPICH5, INTEL, CRAY}),
    ],
    ids=lambda value: value.name.replace(" ", "_").replace("'", "") if isinstance(value, quirks.Quirk) else "",
)
def test_versions_that_have_a_quirk(quirk: quirks.Quirk, having: set[str]) -> None:
    versions = {OPENMPI5, OPENMPI4, MPICH4, MPICH42, MPICH43, MPICH5, INTEL, CRAY}
    assert {version for version in versions if quirk in quirks.find_quirks(version)} == having


def test_quirks_have_different_names() -> None:
    assert len({one.name for one in quirks.QUIRKS}) == len(quirks.QUIRKS)


@pytest.mark.mpi
def test_plans_read_their_arrays_at_each_start() -> None:
    """Some libraries' persistent collectives move their data when they are created."""
    world = mpicoll.world()
    x, y = np.zeros(3, np.int64), np.zeros((world.size, 3), np.int64)
    gather = mpicoll.allgather_init(x, out=y.reshape(-1), algorithm="native")
    reduce = mpicoll.allreduce_init(x, algorithm="native")
    for turn in range(1, 4):
        x[:] = 10 * turn + world.rank
        gather()
        assert y[:, 0].tolist() == [10 * turn + rank for rank in range(world.size)]
        assert reduce()[0] == sum(10 * turn + rank for rank in range(world.size))


@pytest.mark.mpi
@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 3)], ids=str)
def test_where_ranks_of_nodes_do_not_follow_one_another(
    monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], collective: str
) -> None:
    """MPI's own gather and scatter are not taken there, with counts or without."""
    from mpi4py import MPI

    world = mpicoll.world()
    transport = world._core.transport
    is_defect = nodes in ((0, 1, 1, 0), (0, 1, 0, 1)) and quirks.INTERLEAVED_NODES.applies_to(MPI.Get_library_version())
    monkeypatch.setattr(transport, "nodes", nodes)
    monkeypatch.setattr(transport, "_gather_defect", type(transport)._gather_defect.func(transport))
    call = getattr(mpicoll, collective)
    x = np.zeros(2 * world.size if collective == "scatter" and world.rank == 0 else 2)
    for counts in (None, [2] * world.size):
        if is_defect:
            with pytest.raises(mpicoll.AlgorithmError, match="if the ranks of a node don't follow one another"):
                call(x, counts=counts, algorithm="native")
    with mpicoll.algorithms(**{collective: "native"}):
        assert (mpicoll.explain(collective, 1000).name != "native") == is_defect
    assert transport.find_native_defect("allgather") is None
