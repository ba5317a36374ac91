"""The choice of one address of each host that the other hosts reach.

On several hosts the control network listens at no other. The ranks choose before they open its port: they exchange the
addresses of their hosts by MPI, and derive the same candidates from them, in this order: the subnets that all hosts
share, beginning with that of rank 0's default route; then, for hosts that routers join, the source addresses that the
kernels use towards the other hosts. A candidate is chosen only if connections to it can be made.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from mpicoll.logs import get_logger
from mpicoll.transport.control import timing
from mpicoll.transport.control.addresses import place
from mpicoll.transport.control.interfaces import LOOPBACK, InterfaceAddress, find_source_address
from mpicoll.transport.control.sockets import connecting_error, start_connecting

_MOST = 4
"""Number of shared subnets, and of routes, that are tried, so that few connections are made at a time."""

Exchange = Callable[[Any], Sequence[Any]]
"""Returns the arguments of all ranks, by rank, as JSON has them."""


def describe_host(addresses: Sequence[InterfaceAddress]) -> dict[str, Any]:
    """Return what other ranks have to know of this host. `addresses` are those at which this rank may listen."""
    listed = [(one.address, one.network) for one in addresses]
    return {"place": place(), "host": socket.gethostname(), "addresses": listed}


class _Host(NamedTuple):
    """A host: its name, its lowest rank, which acts for the others, and its addresses with their subnets."""

    name: str
    leader: int
    addresses: list[tuple[str, str]]


_Candidate = tuple[tuple[str, int], ...]
"""For each host, an address and a port that is open there for now. They are "" and 0 if there is none."""


class AddressChoice:
    """The choice of addresses at which the ranks of a job listen, made on rank `rank` by :meth:`choose`.

    `offers` is the result of :func:`describe_host` of each rank.
    """

    def __init__(self, rank: int, offers: Sequence[dict[str, Any]], exchange: Exchange) -> None:
        leaders: dict[str, int] = {}
        for other, offer in enumerate(offers):
            leaders.setdefault(offer["place"], other)
        usable = _drop_common_addresses([offers[leader]["addresses"] for leader in leaders.values()])
        self._hosts = [_Host(offers[one]["host"], one, own) for one, own in zip(leaders.values(), usable, strict=True)]
        self._own = list(leaders).index(offers[rank]["place"])
        self._rank = rank
        self._exchange = exchange
        self._failed: dict[tuple[str, ...], str] = {}

    @property
    def has_choice(self) -> bool:
        """True if a host has several addresses."""
        return any(len(host.addresses) != 1 for host in self._hosts)

    def choose(self) -> list[str]:
        """Return the IP addresses at which this rank is to listen. Collective.

        On one host it is 127.0.0.1, on several hosts also the chosen one. If not all hosts reach each other at one
        address, the list is empty.
        """
        if len(self._hosts) == 1:
            return [LOOPBACK]
        if not self.has_choice:
            return [LOOPBACK, self._hosts[self._own].addresses[0][0]]  # there is nothing else to try
        candidates = self._list_candidates()
        # The first one is nearly always right. The others wait for connections that fail at the same time.
        chosen = self._try(candidates[:1]) or self._try(candidates[1:])
        if chosen is not None:
            return [LOOPBACK, chosen]
        if self._rank == self._hosts[0].leader:
            get_logger().warning(
                "the control network listens at all interfaces that MPICOLL_INTERFACE allows, by default at all, for"
                " not all hosts reach each other at one address of each: %s. Set MPICOLL_INTERFACE to the interface"
                " that connects the hosts",
                "; ".join(self._failed.values()),
            )
        return []

    def _list_candidates(self) -> list[str]:
        """Return the address of this host in each candidate, or an empty string."""
        by_network = [{network: address for address, network in reversed(host.addresses)} for host in self._hosts]
        networks = dict.fromkeys(network for _, network in self._hosts[0].addresses)
        common = [one for one in networks if all(one in there for there in by_network)]
        routes = range(min(_MOST, max(len(host.addresses) for host in self._hosts)))
        shared = [by_network[self._own][one] for one in common[:_MOST]]
        return [*shared, *(self._find_source(number) for number in routes)]

    def _find_source(self, number: int) -> str:
        """Return the address of this host from which its kernel sends to address `number` of most of its peers."""
        own = [address for address, _ in self._hosts[self._own].addresses]
        others = [self._hosts[peer].addresses for peer in self._peers()]
        sources = (find_source_address(listed[min(number, len(listed) - 1)][0]) for listed in others if listed)
        found = Counter(source for source in sources if source in own) or Counter(own[:1])
        return found.most_common(1)[0][0] if found else ""

    def _peers(self) -> list[int]:
        """Return the hosts to which this one tries to connect: those of the hub and of its successor, and the next one,
        so that each host is connected to."""
        return sorted({0, 1, (self._own + 1) % len(self._hosts)} - {self._own})

    def _try(self, addresses: Sequence[str]) -> str | None:
        """Return the first of these addresses of this host that belongs to a candidate which works. Collective."""
        with ExitStack() as opened:
            acts = self._hosts[self._own].leader == self._rank
            offers = self._exchange([(one, _listen(one, opened)) for one in addresses if acts])
            by_address: dict[tuple[str, ...], _Candidate] = {}
            for ends in zip(*(offers[host.leader] for host in self._hosts), strict=True):
                by_address.setdefault(tuple(address for address, _ in ends), ends)
            new = {key: ends for key, ends in by_address.items() if key not in self._failed}
            problems = self._exchange(self._find_problems(list(new.values())) if acts else [])
        by_host = [problems[host.leader] for host in self._hosts]
        for key, *found in zip(new, *by_host, strict=True):
            if not any(found):
                return str(key[self._own])
            self._failed[key] = next(filter(None, found))
        return None

    def _find_problems(self, candidates: Sequence[_Candidate]) -> list[str]:
        """Return for each candidate why this host can't connect to another one, or an empty string if it can."""
        peers = self._peers()
        errors = iter(_connect_to([candidate[peer] for candidate in candidates for peer in peers]))
        return [
            next(
                (
                    f"{self._hosts[self._own].name} can't connect to {self._hosts[peer].name} at"
                    f" {candidate[peer][0] or 'any address'}: {os.strerror(error)}"
                    for peer, error in [(peer, next(errors)) for peer in peers]
                    if error
                ),
                "",
            )
            for candidate in candidates
        ]


def _drop_common_addresses(hosts: Sequence[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
    """Return the addresses without those that several hosts have: bridges for containers or virtual machines.

    Only ranks in containers with names of their own but one network have no other address.
    """
    count = Counter(address for own in hosts for address, _ in own)
    return [[(address, network) for address, network in own if count[address] == 1] or own for own in hosts]


def _listen(address: str, opened: ExitStack) -> int:
    """Return a free port of `address` that is open until `opened` is closed, or 0."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if address:
            sock = opened.enter_context(socket.create_server((address, 0), family=family, backlog=4096))
            return int(sock.getsockname()[1])
    except OSError as error:
        get_logger().debug("can't listen at %s: %s", address, error)
    return 0


def _connect_to(ends: Sequence[tuple[str, int]]) -> list[int]:
    """Connect to all of these addresses and ports at once. Returns the error number of each, or 0."""
    errors = [errno.ETIMEDOUT] * len(ends)
    deadline = time.monotonic() + timing.CONNECT_WITHIN
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for number, (address, port) in enumerate(ends):
            if not port:
                errors[number] = errno.EADDRNOTAVAIL
                continue
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            errors[number] = start_connecting(sock, address, port, timing.OUTAGE) or errno.ETIMEDOUT
            if errors[number] == errno.ETIMEDOUT:
                selector.register(sock, selectors.EVENT_WRITE, number)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                errors[key.data] = connecting_error(key.fileobj)
                selector.unregister(key.fileobj)
    return errors
