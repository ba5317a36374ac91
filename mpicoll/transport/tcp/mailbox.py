"""Matching of messages with receives, as in MPI, while the messages arrive."""

from __future__ import annotations

import numpy as np

from mpicoll.transport.base import Memory


class Arrival:
    """A message from the rank `source` of the job, of which the beginning has arrived.

    Its bytes are written to `data`: the memory of the receive that it matches, or memory of its own.
    """

    __slots__ = ("data", "is_complete", "nbytes", "source", "tag")

    def __init__(self, source: int, tag: int, nbytes: int) -> None:
        self.source = source
        self.tag = tag
        self.nbytes = nbytes
        self.data: Memory | None = None
        self.is_complete = False

    def matches(self, source: int | None, tag: int | None) -> bool:
        """Return True if a receive from `source` with `tag` (None: any) matches the message."""
        return (source is None or source == self.source) and (tag is None or tag == self.tag)


class PostedReceive:
    """A posted receive into `data`, or into memory of the message's size if that is None; and its message.

    ``is_direct`` is True if the message is written to `data` as it arrives.
    """

    __slots__ = ("arrival", "data", "is_direct", "source", "tag")

    def __init__(self, data: Memory | None, source: int | None, tag: int | None) -> None:
        self.data = data
        self.source = source
        self.tag = tag
        self.arrival: Arrival | None = None
        self.is_direct = False


class Mailbox:
    """The unexpected messages and the posted receives of one rank in one context, both in order."""

    __slots__ = ("posted", "unexpected")

    def __init__(self) -> None:
        self.unexpected: list[Arrival] = []
        self.posted: list[PostedReceive] = []

    def begin(self, arrival: Arrival) -> Memory:
        """Match a message that begins to arrive with the first posted receive, or keep it for a later one. Return the
        memory to which its bytes are to be written."""
        for receive in self.posted:
            if arrival.matches(receive.source, receive.tag):
                self.posted.remove(receive)
                receive.arrival = arrival
                if receive.data is not None and arrival.nbytes <= receive.data.size:
                    arrival.data, receive.is_direct = receive.data[: arrival.nbytes], True
                break
        else:
            self.unexpected.append(arrival)
        if arrival.data is None:
            arrival.data = np.empty(arrival.nbytes, np.uint8)
        return arrival.data

    def post(self, receive: PostedReceive) -> None:
        """Match `receive` with the first unexpected message, or keep it for a later one."""
        receive.arrival = self.find(receive.source, receive.tag)
        if receive.arrival is None:
            self.posted.append(receive)
        else:
            self.unexpected.remove(receive.arrival)

    def withdraw(self, receive: PostedReceive) -> None:
        """Let `receive` match no later message."""
        if receive in self.posted:
            self.posted.remove(receive)

    def find(self, source: int | None, tag: int | None) -> Arrival | None:
        """Return the first unexpected message that a receive would match."""
        return next((arrival for arrival in self.unexpected if arrival.matches(source, tag)), None)
