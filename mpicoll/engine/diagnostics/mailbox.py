"""Messages between threads of the program on different ranks, delivered also while MPI is blocked."""

from __future__ import annotations

import threading
import time

from mpicoll.engine.diagnostics.peers import Peers


class Mailbox:
    """Numbered messages to and from the other ranks of the job, by subject.

    A message stays here until it is taken, or until a message with a higher number is requested from its source.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._messages: dict[tuple[int, str], dict[int, str]] = {}
        self._changed = threading.Condition()

    def send(self, to: int, subject: str, number: int, text: str = "") -> None:
        """Send a message to the rank `to` of the job. Returns at once."""
        self._peers.send("mail", to, subject=subject, number=number, text=text)

    def put(self, source: int, subject: str, number: int, text: str) -> None:
        """Store a message from the rank `source`. Called on the watchdog's thread."""
        with self._changed:
            self._messages.setdefault((source, subject), {})[number] = text
            self._changed.notify_all()

    def take(self, source: int, subject: str, number: int, timeout: float) -> str | None:
        """Return the text of a message from the rank `source`, or None if it does not arrive within `timeout` seconds.

        Removes the message, and earlier ones on its subject.
        """
        key, deadline = (source, subject), time.monotonic() + timeout
        with self._changed:
            while number not in self._messages.get(key, ()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            of_subject = self._messages[key]
            text = of_subject.pop(number)
            later = {one: kept for one, kept in of_subject.items() if one > number}
            if later:
                self._messages[key] = later
            else:
                del self._messages[key]
            return text
