"""Addresses at which ranks listen, and which of them other ranks try."""

from __future__ import annotations

import pytest

from mpicoll.transport.control import addresses
from mpicoll.transport.control.addresses import AddressBook, describe_address

OWN = ["10.0.0.1", "172.17.0.1"]


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
    monkeypatch.setattr(addresses, "_addresses", lambda: OWN)
    book = AddressBook(0)
    here = describe_address(1000)
    book.set([here, here, here | {"place": "elsewhere", "addresses": others}])
    assert book.addresses_of(1) == ["127.0.0.1"]
    assert book.addresses_of(2) == tried
