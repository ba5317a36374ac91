"""Listening sockets of a process, and what is said about them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mpicoll.cli import listening
from mpicoll.cli.listening import CONTROL, LAUNCHER, MPI, STORE


def test_sockets_of_this_process(tmp_path: Path) -> None:
    before = listening.list_sockets()
    with (
        socket.create_server(("127.0.0.1", 0)) as inner,
        socket.create_server(("", 0)) as outer,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket() as bound,
        socket.create_connection(inner.getsockname()),
    ):
        named.bind(str(tmp_path / "a name"))
        named.listen()
        abstract.bind(f"\0mpicoll-test-{os.getpid()}")
        abstract.listen()
        bound.bind(("127.0.0.1", 0))
        new = set(listening.list_sockets()) - set(before)
        assert new == {
            f"127.0.0.1:{inner.getsockname()[1]}",
            f"0.0.0.0:{outer.getsockname()[1]}",
            f"unix:{tmp_path / 'a name'}",
            f"unix:@mpicoll-test-{os.getpid()}",
        }
        assert listening.list_sockets(os.getpid()) == listening.list_sockets()
    assert listening.list_sockets() == before


def test_ipv6() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    with server:
        assert f"[::1]:{server.getsockname()[1]}" in listening.list_sockets()


def test_no_process() -> None:
    assert listening.list_sockets(0) == []


@pytest.mark.parametrize(
    ("address", "outer"),
    [
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("192.0.2.1:1", True),
        ("[2001:db8::1]:1", True),
        ("127.0.0.1:1", False),
        ("127.9.9.9:1", False),
        ("[::1]:1", False),
        ("[::ffff:127.0.0.1]:1", False),
        ("unix:@name", False),
        ("unix:/a/name:1", False),
    ],
)
def test_which_addresses_other_hosts_reach(address: str, outer: bool) -> None:
    assert listening.is_outer(address) is outer


def test_description_by_owner() -> None:
    report = {
        MPI: {"rank 0": ["0.0.0.0:1024", "[::]:1024"], "rank 1": []},
        CONTROL: {"rank 0": ["127.0.0.1:7"], "rank 1": ["127.0.0.1:8", "unix:@x"]},
        STORE: {"rank 0": [], "rank 1": []},
        LAUNCHER: {"prterun (9)": ["0.0.0.0:5"]},
    }
    mpi, control, store, launcher = listening.describe(report, "Open MPI v5.0.11")
    assert (mpi.text, mpi.is_open) == ("rank 0 at 0.0.0.0:1024, [::]:1024", True)
    assert mpi.setting.startswith("OMPI_MCA_btl=^tcp closes it")
    assert (control.text, control.is_open) == ("rank 0 at 127.0.0.1:7; rank 1 at 127.0.0.1:8, unix:@x", False)
    assert control.setting == ""
    assert (store.text, store.setting, store.is_open) == ("no port", "", False)
    assert launcher.is_open
    assert "PRTE_MCA_prte_if_include" in launcher.setting


def test_settings_are_those_that_there_are() -> None:
    report = {MPI: {"rank 0": ["0.0.0.0:1"]}, CONTROL: {"rank 0": ["[::]:2"]}, STORE: None}
    mpi, control, store = listening.describe(report, "MPICH 4.2")
    assert mpi.setting == "use a firewall"
    assert control.setting.startswith("MPICOLL_INTERFACE ")
    assert (store.text, store.is_open) == ("not examined: torch is not installed", False)
