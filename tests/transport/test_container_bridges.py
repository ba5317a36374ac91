"""Bridges for containers, which Open MPI is told to ignore."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicoll.transport import container_bridges
from mpicoll.transport.control.interfaces import InterfaceAddress

ETHERNET = InterfaceAddress("eth0", "10.0.0.1", 24)
BRIDGE = InterfaceAddress("docker0", "172.17.0.1", 16)
OUTER = InterfaceAddress("br-ex", "10.1.0.1", 16)

EXCLUDED = {"OMPI_MCA_btl_tcp_if_exclude": "127.0.0.1/8,sppp,docker0"}
HOSTS = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("there", "environ", "expected"),
    [
        ([ETHERNET, BRIDGE], {}, EXCLUDED),
        ([OUTER, BRIDGE], {}, EXCLUDED),
        ([ETHERNET], {}, {}),
        ([BRIDGE], {}, {}),
        ([ETHERNET, BRIDGE], {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}),
        ([ETHERNET, BRIDGE], {"OMPI_COMM_WORLD_SIZE": ""}, {}),
        ([ETHERNET, BRIDGE], {"OMPI_MCA_btl_tcp_if_include": "eth0"}, {}),
        ([ETHERNET, BRIDGE], {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, {}),
    ],
    ids=[
        "bridge",
        "bridge with the default route",
        "none",
        "nothing else",
        "one host",
        "unknown",
        "include",
        "exclude",
    ],
)
def test_bridges_are_excluded(
    there: list[InterfaceAddress],
    environ: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(container_bridges, "find_addresses", lambda: there)
    monkeypatch.setattr(container_bridges, "find_default_address", lambda: OUTER.address)
    assert container_bridges.exclude_from({"HOME": str(tmp_path)} | HOSTS | environ) == expected


@pytest.mark.parametrize(("line", "expected"), [("btl_tcp_if_include = eth0", {}), ("#btl_tcp_if_include=a", EXCLUDED)])
def test_a_setting_in_a_file_of_open_mpi_remains_the_only_one(
    line: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(container_bridges, "find_addresses", lambda: [ETHERNET, BRIDGE])
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"mpi_yield_when_idle = 1\n{line}\n")
    assert container_bridges.exclude_from({"HOME": str(tmp_path)} | HOSTS) == expected
