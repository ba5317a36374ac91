"""Addresses at which ranks listen, and which of them other ranks try."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from support.launch import ROOT
from support.patches import patch_within
from support.star import TOKEN

from mpicoll.transport.control import addresses, interfaces, sockets
from mpicoll.transport.control.addresses import AddressBook, describe_address, read_addresses
from mpicoll.transport.control.interfaces import InterfaceAddress, select_addresses
from mpicoll.transport.control.network import ControlNetwork
from mpicoll.transport.control.sockets import listen

OWN = ["10.0.0.1", "172.17.0.1"]
THERE = [InterfaceAddress(*one) for one in (("eth0", OWN[0], 24), ("docker0", OWN[1], 16), ("eth0", "fd00::1", 64))]


@pytest.mark.parametrize(
    ("others", "tried"),
    [
        (["10.0.0.2", "172.17.0.1", "fd00::2"], ["10.0.0.2", "fd00::2"]),
        (OWN, OWN),  # the same network, though the names of the hosts differ
        ([], []),
    ],
    ids=["a bridge that both hosts have", "the same network", "none"],
)
def test_addresses_of_this_host_are_not_tried_for_another_host(
    others: list[str], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "find_addresses", lambda: THERE)
    book = AddressBook(0)
    here = describe_address(1000, [])
    assert here["addresses"] == [*OWN, "fd00::1"]
    book.set([here, here, here | {"place": "elsewhere", "host": "h2", "addresses": others}])
    assert book.addresses_of(1) == ["127.0.0.1"]
    assert book.addresses_of(2) == tried
    paths = book.describe_paths([1, 2])
    assert (
        paths
        == f"; MPICOLL_INTERFACE selects the interface ({here['host']} to h2 at {', '.join(tried) or 'no address'})"
    )
    assert book.describe_paths([1]) == ""


def test_addresses_are_read_as_far_as_they_are_used() -> None:
    here = describe_address(1000, ["127.0.0.1", "10.0.0.1"]) | {"inodes": [7], "outage": 1.5}
    there = here | {"place": "elsewhere", "host": "h2", "port": 2000, "pid": 5}
    sent = [there, here, here | {"port": 1001, "pid": 6}, there | {"port": 2001}]
    first, second, third, last = read_addresses(map(json.dumps, sent), here["place"])
    assert [first, second, third] == sent[:3]  # the settings of rank 0 count for all
    assert last == {name: there[name] for name in ("place", "host", "addresses", "pid")} | {"port": 2001}
    assert last["addresses"] is first["addresses"]
    assert third["place"] is second["place"]
    book = AddressBook(1)
    book.set([first, second, third, last])
    assert [book.port(rank) for rank in range(4)] == [2000, 1000, 1001, 2001]
    assert [book.is_local(rank) for rank in range(4)] == [False, True, True, False]
    assert book.inodes(2) == [7]
    assert book.exit_of(3, "closed") == (3, "closed", "", 5, "h2")


@pytest.mark.parametrize(
    ("selection", "selected"),
    [
        (["eth0"], ["10.0.0.1", "fd00::1"]),
        (["10.0.0.0/8"], ["10.0.0.1"]),
        (["172.17.0.1", "fd00::/16", "ib0"], ["172.17.0.1", "fd00::1"]),
    ],
)
def test_selected_addresses(selection: list[str], selected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "find_addresses", lambda: THERE)
    assert [one.address for one in select_addresses(selection)] == selected
    assert describe_address(1000, ["127.0.0.1", *selected])["addresses"] == selected


COMMANDS = """
ip link add first type veth peer name second
ip link add third type veth peer name fourth
ip addr add 10.77.0.1/24 dev first
ip addr add 10.77.0.2/16 dev first
ip addr add 10.77.0.3/24 dev first label first:1
ip addr add 10.77.0.1/24 dev second
ip addr add 10.77.0.4/24 dev third
ip addr add fd00::1/48 dev first nodad
ip link set first up
ip link set second up
exec "$@"
"""

SELECT = """
import sys
from mpicoll.transport.control.interfaces import find_addresses, select_addresses
print(*sorted(find_addresses()), sep="\\n")
for word in sys.argv[1:]:
    print(word, *[one.address for one in select_addresses([word])])
"""


def test_secondary_addresses_an_address_of_two_interfaces_and_one_that_is_down() -> None:
    try:
        subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and iproute2: {error}")
    within = ["unshare", "--net", "sh", "-ec", COMMANDS, "sh", sys.executable, "-c", SELECT]
    words = ["10.77.0.2", "10.77.0.1", "first", "10.77.0.0/16"]
    done = subprocess.run([*within, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "InterfaceAddress(interface='first', address='10.77.0.1', prefix=24)",
        "InterfaceAddress(interface='first', address='10.77.0.2', prefix=16)",
        "InterfaceAddress(interface='first', address='10.77.0.3', prefix=24)",
        "InterfaceAddress(interface='first', address='fd00::1', prefix=48)",
        "InterfaceAddress(interface='second', address='10.77.0.1', prefix=24)",
        "10.77.0.2 10.77.0.2",
        "10.77.0.1 10.77.0.1",
        "first 10.77.0.1 10.77.0.2 10.77.0.3 fd00::1",
        "10.77.0.0/16 10.77.0.1 10.77.0.2 10.77.0.3",
    ]


@pytest.mark.parametrize("selection", [["lo"], ["eth"], ["127.0.0.1"], ["192.168.0.0/16", "fd01::/16"]])
def test_a_selection_of_nothing(selection: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "find_addresses", lambda: THERE)
    with pytest.raises(
        ValueError, match=r"eth0 \(10\.0\.0\.1\), docker0 \(172\.17\.0\.1\), eth0 \(fd00::1\)$"
    ) as caught:
        select_addresses(selection)
    assert str(caught.value).startswith(f"MPICOLL_INTERFACE={','.join(selection)}: host {socket.gethostname()} ")


def test_a_rank_listens_at_its_addresses_only() -> None:
    """At one port of all of them, though another process has the port that was tried first."""
    line = ControlNetwork(0, 2, TOKEN, listen_at=["127.0.0.1", "127.0.0.2"])
    try:
        port = line.address["port"]
        for address in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((address, port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), timeout=10)
    finally:
        line.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


def test_a_port_that_is_free_at_one_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    create, tried = socket.create_server, []

    def create_server(address: tuple[str, int], **options: int) -> socket.socket:
        if len(tried) == 1:
            blocker.bind(address)
            blocker.listen()
        tried.append(address)
        return create(address, **options)  # type: ignore[arg-type]

    with socket.socket() as blocker:
        patch_within(monkeypatch, sockets, socket, create_server=create_server)
        one, other = listen(2, ["127.0.0.1", "127.0.0.2"])
        with one, other:
            assert one.getsockname()[1] == other.getsockname()[1] != tried[1][1]
            assert len(tried) == 4
