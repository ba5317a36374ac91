"""Messages between threads of different ranks, in one process."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from mpicoll.engine.diagnostics.mailbox import Mailbox
from mpicoll.engine.diagnostics.peers import Peers


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(cast("Any", None))


def test_a_message_that_is_there(mailbox: Mailbox) -> None:
    mailbox.put(1, "a", 3, "text")
    assert mailbox.take(1, "a", 3, 0.0) == "text"
    assert mailbox.take(1, "a", 3, 0.0) is None


def test_a_message_that_arrives_later(mailbox: Mailbox) -> None:
    later = threading.Timer(0.05, mailbox.put, (2, "a", 1, ""))
    later.start()
    assert mailbox.take(2, "a", 1, 60.0) == ""
    later.join()


@pytest.mark.parametrize(("source", "subject", "number"), [(2, "a", 1), (1, "b", 1), (1, "a", 2)])
def test_others_are_not_taken(mailbox: Mailbox, source: int, subject: str, number: int) -> None:
    mailbox.put(1, "a", 1, "text")
    assert mailbox.take(source, subject, number, 0.01) is None
    assert mailbox.take(1, "a", 1, 0.0) == "text"


def test_earlier_messages_are_dropped_and_later_ones_kept(mailbox: Mailbox) -> None:
    for number in (1, 2, 3):
        mailbox.put(1, "a", number, str(number))
    assert mailbox.take(1, "a", 2, 0.0) == "2"
    assert mailbox.take(1, "a", 1, 0.0) is None
    assert mailbox.take(1, "a", 3, 0.0) == "3"
    assert not mailbox._messages


def test_without_other_ranks_nothing_is_sent() -> None:
    peers = Peers(cast("Any", None))
    sent: list[tuple[Any, ...]] = []

    class Network:
        def send(self, body: dict[str, Any], to: int) -> None:
            sent.append((body, to))

    Mailbox(peers).send(1, "a", 1)
    peers.network = cast("Any", Network())
    Mailbox(peers).send(1, "a", 1, "text")
    assert sent == [({"kind": "mail", "subject": "a", "number": 1, "text": "text"}, 1)]
