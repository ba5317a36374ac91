"""The choice of addresses at which ranks of several hosts listen. The hosts are threads, and addresses of loopback."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.star import SOON

from mpicoll.transport.control import address_choice, timing
from mpicoll.transport.control.address_choice import AddressChoice, describe_host
from mpicoll.transport.control.interfaces import InterfaceAddress

BRIDGE = ("172.17.0.1", "172.17.0.0/16")


def near(number: int) -> tuple[str, str]:
    """Return an address of this machine, and its subnet."""
    return f"127.0.1.{number}", "127.0.1.0/24"


def near_too(number: int) -> tuple[str, str]:
    """Return an address of this machine in another subnet."""
    return f"127.0.2.{number}", "127.0.2.0/24"


def absent(number: int) -> tuple[str, str]:
    """Return an address of the subnet for documentation, which this machine does not have."""
    return f"192.0.2.{number}", "192.0.2.0/24"


def alone(number: int) -> tuple[str, str]:
    """Return an address of this machine in a subnet that no other host has."""
    return f"127.0.3.{number}", f"127.0.3.{number}/32"


def choose(hosts: Sequence[Sequence[tuple[str, str]]], ranks: int = 1) -> tuple[list[list[str]], int]:
    """Return what each rank of these hosts has chosen, and how often the ranks exchanged data."""
    size = len(hosts) * ranks
    offers = [
        {"place": f"p{n // ranks}", "host": f"h{n // ranks}", "addresses": hosts[n // ranks]} for n in range(size)
    ]
    offers = json.loads(json.dumps(offers))
    together, told, count = threading.Barrier(size), [""] * size, [0] * size

    def run(rank: int) -> list[str]:
        asking.addresses = hosts[rank // ranks]

        def exchange(value: Any) -> list[Any]:
            count[rank] += 1
            told[rank] = json.dumps(value)
            together.wait(SOON)
            everything = [json.loads(text) for text in told]
            together.wait(SOON)
            return everything

        try:
            return AddressChoice(rank, offers, exchange).choose()
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        chosen = list(threads.map(run, range(size)))
    assert len(set(count)) == 1
    return chosen, count[0]


asking = threading.local()
"""The addresses of the host that the thread acts for."""


def find_source_address(destination: str) -> str:
    """Return the address of the host that the route to `destination` begins with: one that looks like it."""
    start = destination.rpartition(".")[0]
    return next((address for address, _ in asking.addresses if address.rpartition(".")[0] == start), "")


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_choice, "find_source_address", find_source_address)
    monkeypatch.setattr(timing, "CONNECT_WITHIN", 0.3)


@pytest.mark.parametrize(
    ("hosts", "expected", "exchanges"),
    [
        ([[near(1), BRIDGE], [BRIDGE, near(2)], [near(3)]], [near(1), near(2), near(3)], 0),
        ([[near(1), near_too(1)], [near_too(2), near(2)]], [near(1), near(2)], 2),
        ([[near(1), near_too(1)], [near_too(2)]], [near_too(1), near_too(2)], 2),
        ([[absent(1), near(1)], [absent(2), near(2)]], [near(1), near(2)], 4),
        ([[absent(1), near(1), near_too(1)], [near_too(2), near(2)]], [near(1), near(2)], 2),
        ([[near(1), near_too(1)], [near(1), near_too(1)]], [near(1), near(1)], 2),
    ],
    ids=[
        "a bridge with the same address",
        "the order of rank 0",
        "the only shared subnet",
        "a subnet that does not work",
        "a subnet that not all hosts have",
        "the same network under two names",
    ],
)
def test_a_shared_subnet(hosts: list[list[tuple[str, str]]], expected: list[tuple[str, str]], exchanges: int) -> None:
    assert choose(hosts) == ([["127.0.0.1", address] for address, _ in expected], exchanges)


@pytest.mark.parametrize("works", [True, False])
def test_the_source_addresses_of_hosts_that_share_no_subnet(*, works: bool) -> None:
    """Those towards the first addresses of the others, or if these do not work, those towards the second ones."""
    hosts = [[alone(n) if works else (absent(n)[0], f"192.0.2.{n}/32"), near_too(n)] for n in (1, 2, 3)]
    hosts[1][1] = hosts[1][1][0], "127.0.2.2/32"
    chosen, exchanges = choose(hosts)
    assert chosen == [["127.0.0.1", own[0 if works else 1][0]] for own in hosts]
    assert exchanges == (2 if works else 4)


def test_one_host_and_ranks_of_one_host() -> None:
    assert choose([[near(1), near_too(1)]], ranks=3) == ([["127.0.0.1"]] * 3, 0)
    chosen, _ = choose([[near(1), near_too(1)], [near(2), near_too(2)]], ranks=2)
    assert chosen == [["127.0.0.1", f"127.0.1.{number}"] for number in (1, 1, 2, 2)]


def test_hosts_that_do_not_reach_each_other(caplog: pytest.LogCaptureFixture) -> None:
    """As before the choice, they listen at all addresses. One message says why."""
    assert choose([[absent(1), alone(1)], [absent(2)], []])[0] == [[], [], []]
    (record,) = caplog.records
    text = record.getMessage()
    assert re.search(r"h\d can't connect to h\d at 192\.0\.2\.\d: \w+", text), text
    assert "Set MPICOLL_INTERFACE to the interface that connects the hosts" in text


def test_a_host_that_does_not_answer_delays_the_start_by_one_bound() -> None:
    with socket.create_server(("127.0.1.9", 0), backlog=0) as full:
        ends = [full.getsockname()] * 3
        fillers = [socket.socket() for _ in range(3)]
        for one in fillers:
            one.setblocking(False)
            one.connect_ex(ends[0])
        errors = address_choice._connect_to([*ends, ("127.0.1.9", 0)])
        for one in fillers:
            one.close()
    assert errors == [110, 110, 110, 99]


def test_the_description_of_a_host() -> None:
    there = [InterfaceAddress("eth0", "10.1.2.3", 16), InterfaceAddress("eth0", "fd00::1", 64)]
    assert describe_host(there)["addresses"] == [("10.1.2.3", "10.1.0.0/16"), ("fd00::1", "fd00::/64")]
