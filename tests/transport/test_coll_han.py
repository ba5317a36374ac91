"""Open MPI's collectives between hosts in fault-tolerant jobs."""

from __future__ import annotations

import os

import pytest

import mpicoll
from mpicoll.transport import coll_han

FAULT_TOLERANT = {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        ({"OMPI_MCA_mpi_ft_enable": "0"}, {}),
        (FAULT_TOLERANT, {coll_han.PRIORITY: "-1"}),
        ({**FAULT_TOLERANT, coll_han.PRIORITY: "35"}, {}),
    ],
)
def test_which_jobs_do_without(environ: dict[str, str], settings: dict[str, str]) -> None:
    assert coll_han.disable_in(environ) == settings


@pytest.mark.parametrize(
    ("environ", "disabled"),
    [
        ({}, False),
        ({coll_han.PRIORITY: "35"}, False),
        ({coll_han.PRIORITY: "high"}, False),
        ({coll_han.PRIORITY: "-1"}, True),
        ({"OMPI_MCA_coll": "^hcoll,portals4"}, False),
        ({"OMPI_MCA_coll": "^hcoll,han"}, True),
        ({"OMPI_MCA_coll": "tuned,han,basic"}, False),
        ({"OMPI_MCA_coll": "tuned,basic,libnbc"}, True),
    ],
)
def test_whether_it_is_disabled(environ: dict[str, str], disabled: bool) -> None:
    assert coll_han.is_disabled(environ) == disabled


@pytest.mark.mpi
def test_where_it_is_not_disabled_schedules_carry_out_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.transport.mpi import transport as module

    if mpicoll.world().size < 2:
        pytest.skip("needs two ranks")
    comm = mpicoll.world().duplicate()  # which keeps what was found out
    transport = comm._core.transport
    monkeypatch.setattr(module, "fault_tolerant", lambda: True)
    monkeypatch.delenv(coll_han.PRIORITY, raising=False)
    monkeypatch.delenv("OMPI_MCA_coll", raising=False)
    monkeypatch.setattr(transport, "nodes", tuple(range(comm.size)))
    find = type(transport)._failure_defect.func
    monkeypatch.setattr(transport, "_failure_defect", find(transport))
    for collective in ("allreduce", "barrier"):
        with mpicoll.algorithms(**{collective: "native"}):
            assert mpicoll.explain(collective, 1000, comm=comm).name != "native"
    with pytest.raises(mpicoll.AlgorithmError, match="coll/han"):
        mpicoll.allreduce(1.0, algorithm="native", comm=comm)
    monkeypatch.setitem(os.environ, coll_han.PRIORITY, "-1")
    assert find(transport) is None
    comm.free()
