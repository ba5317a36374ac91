"""Matching of messages with receives, as in MPI."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpicoll.transport.base import Envelope, Memory


@dataclass(slots=True, eq=False)
class LocalMessage:
    """A message, which can be received from the time `arrival` on."""

    source: int
    tag: int
    data: bytes
    arrival: float

    @property
    def envelope(self) -> Envelope:
        """Source, tag and size."""
        return Envelope(self.source, self.tag, len(self.data))

    def matches(self, source: int | None, tag: int | None) -> bool:
        """Return True if a receive from `source` with `tag` (None: any) matches the message."""
        return (source is None or source == self.source) and (tag is None or tag == self.tag)


@dataclass(slots=True, eq=False)
class PostedRecv:
    """A posted receive, and the message that it has matched."""

    data: Memory
    source: int | None
    tag: int | None
    message: LocalMessage | None = None


@dataclass(slots=True)
class LocalMailbox:
    """The unexpected messages and the posted receives of one rank in one context, both in order."""

    unexpected: list[LocalMessage] = field(default_factory=list)
    posted: list[PostedRecv] = field(default_factory=list)

    def deliver(self, message: LocalMessage) -> None:
        """Match `message` with the first posted receive, or keep it for a later one."""
        for recv in self.posted:
            if message.matches(recv.source, recv.tag):
                recv.message = message
                self.posted.remove(recv)
                return
        self.unexpected.append(message)

    def post(self, recv: PostedRecv) -> None:
        """Match `recv` with the first unexpected message, or keep it for a later one."""
        recv.message = self.first(recv.source, recv.tag)
        if recv.message is None:
            self.posted.append(recv)
        else:
            self.unexpected.remove(recv.message)

    def first(self, source: int | None, tag: int | None) -> LocalMessage | None:
        """Return the first unexpected message that a receive would match, whether or not it has arrived."""
        return next((message for message in self.unexpected if message.matches(source, tag)), None)
