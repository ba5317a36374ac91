"""The interfaces of MPICOLL_INTERFACE, which MPI libraries use too."""

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
INCLUDE, LIBFABRIC, UCX = "OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES"


@pytest.mark.parametrize(
    ("selection", "environ", "expected"),
    [
        (["ib0"], {}, {INCLUDE: "ib0", LIBFABRIC: "ib0", UCX: "ib0"}),
        (["10.0.0.0/16", "ib0", "eth7"], {}, {INCLUDE: "eth0,ib0", LIBFABRIC: "eth0", UCX: "eth0,ib0"}),
        (["10.1.0.7"], {}, {INCLUDE: "ib0", LIBFABRIC: "ib0", UCX: "ib0"}),
        ([], {}, {}),
        (["eth7"], {}, {}),
        (["ib0"], {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}),
        (["ib0"], {"OMPI_COMM_WORLD_SIZE": ""}, {}),
        (["ib0"], {INCLUDE: "eth0"}, {LIBFABRIC: "ib0", UCX: "ib0"}),
        (["ib0"], {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, {LIBFABRIC: "ib0", UCX: "ib0"}),
        (["ib0"], {LIBFABRIC: "eth0"}, {INCLUDE: "ib0", UCX: "ib0"}),
        (["ib0"], {UCX: "mlx5_0:1"}, {INCLUDE: "ib0", LIBFABRIC: "ib0"}),
    ],
    ids=["name", "network", "address", "none", "absent", "one host", "unknown", "include", "exclude", "fabric", "UCX"],
)
def test_the_selected_interfaces_are_included(
    selection: list[str],
    environ: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(interfaces, "find_addresses", lambda: THERE)
    monkeypatch.setattr(mpi_interfaces, "_RDMA_DEVICES", (str(tmp_path / "none"),))
    assert mpi_interfaces.include_only({"HOME": str(tmp_path)} | HOSTS | environ, selection) == expected


def test_ucx_keeps_its_rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interfaces, "find_addresses", lambda: THERE)
    monkeypatch.setattr(mpi_interfaces, "_RDMA_DEVICES", (str(tmp_path / "none"), str(tmp_path)))
    (tmp_path / "mlx5_0").mkdir()
    found = mpi_interfaces.include_only({"HOME": str(tmp_path)} | HOSTS, ["ib0"])
    assert found == {INCLUDE: "ib0", LIBFABRIC: "ib0"}
