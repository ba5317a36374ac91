"""The interfaces of MPICOLL_INTERFACE, which Open MPI uses too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicoll.transport import mpi_interfaces
from mpicoll.transport.control import interfaces
from mpicoll.transport.control.interfaces import InterfaceAddress

THERE = [
    InterfaceAddress("eth0", "10.0.0.1", 24),
    InterfaceAddress("ib0", "10.1.0.1", 16),
    InterfaceAddress("ib0", "10.1.0.7", 16),
]
HOSTS = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
INCLUDE = "OMPI_MCA_btl_tcp_if_include"


@pytest.mark.parametrize(
    ("selection", "environ", "expected"),
    [
        (["ib0"], {}, {INCLUDE: "ib0"}),
        (["10.0.0.0/16", "ib0", "eth7"], {}, {INCLUDE: "eth0,ib0"}),
        (["10.1.0.7"], {}, {INCLUDE: "ib0"}),
        ([], {}, {}),
        (["eth7"], {}, {}),
        (["ib0"], {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}),
        (["ib0"], {"OMPI_COMM_WORLD_SIZE": ""}, {}),
        (["ib0"], {INCLUDE: "eth0"}, {}),
        (["ib0"], {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, {}),
    ],
    ids=["name", "network", "address", "none", "absent", "one host", "unknown", "include", "exclude"],
)
def test_the_selected_interfaces_are_included(
    selection: list[str],
    environ: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(interfaces, "find_addresses", lambda: THERE)
    assert mpi_interfaces.include_only({"HOME": str(tmp_path)} | HOSTS | environ, selection) == expected
