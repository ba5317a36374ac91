from __future__ import annotations

import numpy as np

from mpicoll.transport.tcp.mailbox import Arrival, Mailbox, PostedReceive


def test_a_message_is_written_to_the_memory_of_its_receive() -> None:
    box, memory = Mailbox(), np.zeros(4, np.uint8)
    receive = PostedReceive(memory, 1, 7)
    box.post(receive)
    box.begin(Arrival(1, 7, 3))[:] = 5
    assert memory.tolist() == [5, 5, 5, 0]
    assert receive.is_direct
    assert not box.posted
    assert not box.unexpected


def test_a_message_that_is_too_large_has_memory_of_its_own() -> None:
    box, memory = Mailbox(), np.zeros(2, np.uint8)
    receive = PostedReceive(memory, None, None)
    box.post(receive)
    assert box.begin(Arrival(1, 7, 3)).size == 3
    assert not receive.is_direct
    assert not memory.any()


def test_messages_are_matched_in_order_by_source_and_tag() -> None:
    box = Mailbox()
    arrivals = [Arrival(source, tag, 1) for source, tag in ((0, 1), (1, 1), (0, 2), (0, 1))]
    for one in arrivals:
        box.begin(one)
    receives = [PostedReceive(None, *wanted) for wanted in ((0, 2), (None, 1), (0, None), (1, None))]
    for receive in receives:
        box.post(receive)
    assert [arrivals.index(one.arrival) for one in receives if one.arrival] == [2, 0, 3, 1]


def test_a_withdrawn_receive_matches_nothing() -> None:
    box = Mailbox()
    first, second = (PostedReceive(None, None, None) for _ in range(2))
    box.post(first)
    box.post(second)
    box.withdraw(first)
    box.begin(Arrival(0, 0, 0))
    assert first.arrival is None
    assert second.arrival is not None
