"""What is done about Open MPI's reports of failures, and about those that it does not make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpicoll

pytestmark = pytest.mark.mpi


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, for which the job is fault-tolerant."""
    from mpicoll.transport.mpi import fault_tolerance

    monkeypatch.setattr(fault_tolerance, "fault_tolerant", lambda: True)
    return fault_tolerance


@pytest.mark.parametrize("large", [0, 1, 5000])
def test_objects_are_exchanged_without_allgatherv(module: Any, large: int) -> None:
    from mpi4py import MPI

    class WithoutAllgatherv(MPI.Intracomm):
        def allgather(self, sendobj: Any) -> Any:
            pytest.fail("mpi4py's allgather calls MPI_Allgatherv")

    comm = WithoutAllgatherv(MPI.COMM_WORLD)
    values = [(rank, "x" * rank * large, None) for rank in range(comm.size)]
    assert module.allgather_objects(comm, values[comm.rank]) == values


def test_blocks_that_differ_in_size_are_not_gathered_by_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.transport.mpi import transport as module

    if mpicoll.world().size < 2:
        pytest.skip("needs two ranks")
    comm = mpicoll.world().duplicate()  # which keeps what was found out
    monkeypatch.setattr(module, "fault_tolerant", lambda: True)
    monkeypatch.setattr(comm._core.transport, "_failure_defect", None)
    counts = list(range(1, comm.size + 1))
    with pytest.raises(mpicoll.AlgorithmError, match="MPI_Allgatherv"):
        mpicoll.allgather(np.zeros(counts[comm.rank]), counts=counts, comm=comm, algorithm="native")
    find = comm._core.transport.find_native_defect
    assert find("allgather", uneven=False) is None
    assert find("alltoall", uneven=True) is None
    monkeypatch.undo()
    comm.free()


@pytest.mark.parametrize("code", ["ERR_OTHER", "ERR_INTERN", "ERR_UNKNOWN"])
@pytest.mark.parametrize("dies", [True, False])
def test_the_reason_of_an_unspecific_error_may_be_known_later(
    module: Any, monkeypatch: pytest.MonkeyPatch, code: str, dies: bool
) -> None:
    from mpi4py import MPI

    from mpicoll.transport.mpi import duplicate

    transport = duplicate(MPI.COMM_SELF)
    failures, queries = transport.failures, []

    def query_dead() -> set[int]:
        queries.append(None)
        return set(transport.members) if dies and len(queries) > 2 else set()

    monkeypatch.setattr(module, "_query_dead", query_dead)
    monkeypatch.setattr(module, "_DETECTION_TIME", 0.1)
    monkeypatch.setattr(failures, "is_revoked", lambda: False)
    monkeypatch.setattr(failures, "revoke", lambda: None)
    error = failures.operation_error(MPI.Exception(getattr(MPI, code)))
    assert type(error) is (mpicoll.RankFailed if dies else mpicoll.CommunicationError)
    assert getattr(error, "ranks", None) == (transport.members if dies else None)
    monkeypatch.undo()
    transport.free()
